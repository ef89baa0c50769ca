"""Tests the table of flags: typed, tri-state, read at run time, printed, and the same in docs/flags.md."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ffpa_attn import env

ROOT = Path(__file__).parent.parent


def test_one_file():
    assert (ROOT / "env.py").resolve() == Path(env.__file__).resolve() or (ROOT / "env.py").read_text() == Path(
        env.__file__
    ).read_text()


def test_every_known_flag_is_there():
    names = {flag.name for flag in env.FLAGS}
    kernel = (
        "PREFETCH_QKV FORCE_QK_F16 FORCE_PV_F16 QKV_SMEM_SHARE SMEM_SWIZZLE_Q SMEM_SWIZZLE_K SMEM_SWIZZLE_V PERSIST_Q_G2S "
        "PERSIST_KV_G2S PERSIST_Q_S2R PERSIST_V_S2R REGISTERS_PIPE_KV LAUNCH_GRID_DNHB"
    )
    build = "DEBUG ADA AMPERE HOPPER ALL_STAGES ALL_HEADDIM"
    assert {f"ENABLE_FFPA_{name}" for name in f"{kernel} {build}".split()} <= names
    assert {
        f"FFPA_{name}" for name in "BACKEND STRICT CHECK EMULATE LOG CACHE_DIR CUDA_ARCHS WORKSPACE_MB".split()
    } <= names
    assert len(names) == len(env.FLAGS)
    for flag in env.FLAGS:
        assert flag.scope in ("build", "run") and flag.doc.endswith(".") and "\n" not in flag.doc
    assert all(env.run_flags()[f"ENABLE_FFPA_{name}"] is None for name in kernel.split()), (
        "toggles are automatic when unset"
    )


@pytest.mark.parametrize(
    "name, raw, value",
    [
        ("FFPA_STRICT", "1", True),
        ("FFPA_STRICT", "0", False),
        ("FFPA_STRICT", "", False),
        ("ENABLE_FFPA_PERSIST_Q_G2S", "1", True),
        ("ENABLE_FFPA_PERSIST_Q_G2S", "0", False),
        ("ENABLE_FFPA_PERSIST_Q_G2S", "", None),
        ("FFPA_WORKSPACE_MB", "64", 64),
        ("FFPA_BACKEND", "mma", "mma"),
        ("FFPA_EMULATE", "1", "sm_80"),
        ("FFPA_EMULATE", "0", None),
        ("FFPA_EMULATE", "sm_90a", "sm_90a"),
        ("FFPA_CACHE_DIR", "/somewhere", "/somewhere"),
    ],
)
def test_values(monkeypatch, name, raw, value):
    monkeypatch.setenv(name, raw)
    assert env.run_flags()[name] == value and type(env.run_flags()[name]) is type(value)


@pytest.mark.parametrize(
    "name, raw, allowed",
    [
        ("FFPA_STRICT", "yes", "0 or 1"),
        ("ENABLE_FFPA_SMEM_SWIZZLE_Q", "2", "0 or 1"),
        ("FFPA_WORKSPACE_MB", "0", "an integer >= 1"),
        ("FFPA_WORKSPACE_MB", "1GB", "an integer >= 1"),
        ("FFPA_BACKEND", "cuda", "auto | mma"),
        ("FFPA_EMULATE", "sm_70", "sm_80 | sm_90a"),
    ],
)
def test_bad_values_name_flag_value_and_way_out(monkeypatch, name, raw, allowed):
    monkeypatch.setenv(name, raw)
    with pytest.raises(ValueError) as caught:
        env.run_flags()
    assert f"{name}={raw!r}" in str(caught.value) and allowed in str(caught.value) and "unset it" in str(caught.value)


CLASHES = [
    ({"PERSIST_KV_G2S": "1", "PERSIST_Q_G2S": "0"}, ("PERSIST_KV_G2S", "PERSIST_Q_G2S")),
    ({"PERSIST_Q_S2R": "1", "PERSIST_Q_G2S": "1"}, ("PERSIST_Q_S2R", "PERSIST_Q_G2S")),
    ({"QKV_SMEM_SHARE": "1", "PERSIST_Q_G2S": "1"}, ("QKV_SMEM_SHARE", "PERSIST_Q_G2S")),
    ({"QKV_SMEM_SHARE": "1", "PERSIST_KV_G2S": "1"}, ("QKV_SMEM_SHARE", "PERSIST_KV_G2S")),
]
FRIENDS = [
    {"PERSIST_KV_G2S": "1"},
    {"PERSIST_KV_G2S": "1", "PERSIST_Q_G2S": "1"},
    {"PERSIST_Q_S2R": "1", "PERSIST_Q_G2S": "1", "PERSIST_KV_G2S": "1"},
    {"QKV_SMEM_SHARE": "1", "PERSIST_KV_G2S": "1", "PERSIST_Q_S2R": "1", "PERSIST_Q_G2S": "1"},
    {"QKV_SMEM_SHARE": "1", "PERSIST_Q_G2S": "0"},
]


@pytest.mark.parametrize("settings, both", CLASHES, ids=str)
def test_exclusions_name_both_flags(monkeypatch, settings, both):
    for name, value in settings.items():
        monkeypatch.setenv(f"ENABLE_FFPA_{name}", value)
    with pytest.raises(ValueError) as caught:
        env.run_flags()
    assert all(f"ENABLE_FFPA_{name}" in str(caught.value) for name in both)


@pytest.mark.parametrize("settings", FRIENDS, ids=str)
def test_what_is_compatible_passes(monkeypatch, settings):
    for name, value in settings.items():
        monkeypatch.setenv(f"ENABLE_FFPA_{name}", value)
    assert all(env.run_flags()[f"ENABLE_FFPA_{name}"] is (value == "1") for name, value in settings.items())


def test_read_again_when_the_environment_changes(monkeypatch):
    before = env.run_flags()
    assert env.run_flags() is before
    monkeypatch.setenv("FFPA_LOG", "1")
    assert env.run_flags()["FFPA_LOG"] and env.run_flags() is not before
    monkeypatch.delenv("FFPA_LOG")
    assert env.run_flags() is before


def test_without_the_interpreters_dictionary(monkeypatch):
    """os.environ on another interpreter need not have `_data`."""

    class Plain(dict):
        pass

    monkeypatch.setattr(os, "environ", Plain(FFPA_STRICT="1"))
    assert env.run_flags()["FFPA_STRICT"] is True


def test_printed_with_how_to_set_each():
    shown = subprocess.run(
        [sys.executable, "env.py"],
        cwd=ROOT,
        env=env.child_environment(FFPA_STRICT="1", FFPA_WORKSPACE_MB="x"),
        capture_output=True,
        text=True,
    ).stdout
    assert all(flag.name in shown and flag.doc in shown for flag in env.FLAGS)
    assert "set to 1" in shown and "INVALID: FFPA_WORKSPACE_MB='x'" in shown and "FFPA_STRICT=1 python" in shown


def test_readme_table_is_generated():
    assert env.markdown_table() in (ROOT / "docs" / "flags.md").read_text(), (
        "paste the output of env.markdown_table() into docs/flags.md"
    )


# "C" has no letters beyond ASCII, and bytes for those of a path; an encoding by name has neither.
ENCODINGS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "the C locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "utf-8": {"PYTHONIOENCODING": "utf-8"},
}
REPORTS = {
    "flags": ["-m", "ffpa_attn.env"],
    "doctor": ["-m", "ffpa_attn.doctor"],
    "bench": [str(ROOT / "tests" / "test_ffpa_attn.py"), "--device", "cpu", "--no-emulation", "--sleep", "0", "--H", "1", "--N", "64", "--D", "64", "--iters", "1", "--warmup", "1", "--gen-bench-table", "--save-dir"],
}  # fmt: skip


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("report", REPORTS)
def test_reports_where_stdout_lacks_letters(report, encoding, tmp_path):
    """A path may hold letters, and bytes that are none."""
    directory = tmp_path / os.fsdecode("jürgen-µ".encode() + b"-\xff")
    directory.mkdir()
    changes = {"FFPA_CACHE_DIR": str(directory), "FFPA_WORKSPACE_MB": "two µ" if report == "flags" else "512"}
    changes |= {"PYTHONPATH": str(ROOT / "ffpa"), **ENCODINGS[encoding]}
    done = subprocess.run(
        [sys.executable, *REPORTS[report], *[directory] * (report == "bench")],
        env={**os.environ, **changes},
        capture_output=True,
        cwd=tmp_path,
        timeout=300,
    )
    shown, way = done.stdout, "utf-8" if encoding == "utf-8" else "ascii"
    assert b"UnicodeEncodeError" not in done.stderr, done.stderr.decode(errors="replace")
    if report == "doctor":
        assert done.returncode == 0 and b"nothing is broken" in shown, shown.decode(errors="replace")
        assert "jürgen-µ".encode(way, "backslashreplace") in shown or "jürgen-µ".encode() in shown
    elif report == "flags":
        assert b"INVALID: FFPA_WORKSPACE_MB" in shown
    else:
        assert done.returncode == 0 and "† ran on".encode(way, "backslashreplace") in shown, done.stderr.decode(
            errors="replace"
        )
        assert "† ran on" in next(directory.glob("*.md")).read_text(encoding="utf-8")
