"""Runs the bench, as in `python tests/test_ffpa_attn.py --gen-bench --plot`; under pytest, proves that it works."""

import sys
from pathlib import Path

# This tree's package comes first, installed or not: the record names the commit that was measured.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import cli

if __name__ == "__main__":  # no pytest is imported before this: the bench needs none
    sys.exit(cli.main())

import csv
import re
import subprocess
from dataclasses import replace

import compare
import emulation
import forced
import measure
import oracle
import providers
import pytest
import torch
from ffpa_attn import env, explain, ffpa
from ffpa_attn.building.toolchain import BuildError
from record import Record
from workload import Workload, make_inputs

SMALL = ["--device", "cpu", "--N", "32", "--H", "1", "--sleep", "0"]
NOT_EMULATED = [*SMALL, "--no-emulation"]
VERBATIM = (
    "--B 1 --H 48 --N 8192 --show-all --D 320",
    "--gen-bench --show-all --plot",
    "--B 1 --H 32 --N 1024 --check --show-all --D 64",
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Runs tests on one thread: sizes are so small that threads only wait for each other, long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(tmp_path, *flags: str) -> int:
    return cli.main([*NOT_EMULATED, "--save-dir", str(tmp_path), *flags])


def run_emulated(tmp_path, *flags: str) -> int:
    return cli.main([*SMALL, "--save-dir", str(tmp_path), *flags])


def saved(tmp_path, ending: str) -> list[Path]:
    return sorted(path for path in tmp_path.iterdir() if path.name.endswith(ending))


@pytest.mark.parametrize("d", range(320, 1025, 64))
def test_smoke_of_the_numbers(d, device):
    x = make_inputs(Workload(1, 2, 1, 40, 72, d, d, "bf16"), device, seed=d)
    want = oracle.attention(x.q, x.k, x.v, causal=True)[0]
    base = compare.baseline(x.q, x.k, x.v, causal=True)[0]
    compare.assert_close("out", ffpa(x.q, x.k, x.v, causal=True), want, base)


@pytest.mark.parametrize("call", VERBATIM)
def test_calls_people_know(call, monkeypatch, tmp_path, capsys):
    """Calls run as they are, but for the files' place and the device; on a CPU big sizes are reduced, which is said.
    The second call has the last one's toggles, too, and has no kernel to emulate then: `.dev/bench.sh` runs it whole.
    """
    if call != VERBATIM[0]:
        for toggle in ("ENABLE_FFPA_PERSIST_Q_G2S", "ENABLE_FFPA_PERSIST_KV_G2S"):
            monkeypatch.setenv(toggle, "1")
    assert cli.main([*call.split(), "--device", "cpu", "--save-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "no claim of speed" in shown
    assert "Reduced, since the CPU would take very long" in shown
    assert ("forward_mma_rows" in shown) == (call == VERBATIM[2])  # what the toggles ask for, and D > 256 lacks
    refused = "not measured: the split-D mma forward does not know ENABLE_FFPA_PERSIST_KV_G2S=1"
    assert (refused in shown) == (call != VERBATIM[0])
    assert (shown.count("bank conflicts 1.00") == 9) == (call == VERBATIM[0])
    if "--plot" in call:
        assert "|Algorithm|320|384|448|512|576|640|704|768|832|896|960|1024|" in shown
        assert len(saved(tmp_path, ".png")) == 2 and saved(tmp_path, ".json")
        flags = Record.load(saved(tmp_path, ".json")[0]).source["flags"]
        assert flags == {"ENABLE_FFPA_PERSIST_Q_G2S": True, "ENABLE_FFPA_PERSIST_KV_G2S": True}


def test_runs_as_a_program(tmp_path):
    """The bench runs from the repository root, with nothing but this file on the command line."""
    here = Path(__file__)
    command = [
        sys.executable,
        here.relative_to(here.parents[1]),
        *NOT_EMULATED,
        "--D",
        "64",
        "--check",
        "--dir",
        tmp_path,
    ]
    done = subprocess.run(
        command, cwd=here.parents[1], env=env.child_environment(), capture_output=True, text=True, timeout=80
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +\(sdpa\): .*\(~1.00x\)", done.stdout, re.MULTILINE)
    assert re.search(r"^ +\(ffpa\+auto\): .*max error", done.stdout, re.MULTILINE)


def test_line(tmp_path, capsys):
    """A line has an aligned tag, output values, time, TFLOPS, gain over the best so far, speedup, what is new."""
    assert run(tmp_path, "--D", "64", "--show-all") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "(ffpa+auto)" in line)
    number = r"[\d.e+-]+"
    assert re.fullmatch(
        rf" +\(ffpa\+auto\): \['{number}', '{number}', '{number}'\], time:{number}ms, TFLOPS:{number} *"
        rf" \(\+{number} *%\)\(~\d+\.\d\dx\) {number}% of (GEMM|copy), (sdpa|reference), {number} to {number}ms",
        line,
    )


def test_without_a_gpu_the_kernels_run_in_the_emulator(tmp_path, capsys):
    """The kernels of the size asked for run at all levels, with all sums, right and without bank conflicts."""
    flags = ["--D", "320,512", "--N", "8192", "--H", "8", "--check", "--gen-bench"]
    assert cli.main(["--device", "cpu", "--sleep", "0", "--save-dir", str(tmp_path), *flags]) == 0
    shown = capsys.readouterr().out
    found = re.findall(
        r"\(ffpa\+acc\+(\w+)\+L(\d)\): \d+ of 227 KB shared memory, \d+ registers for O and S(?:, \d+ in all, \d+ B spilled)?, bank conflicts 1\.00, "
        r"0\.0\d+ B/FLOP, max error \S+, forward_mma_split_f16_\w+",
        shown,
    )
    assert found == 2 * [(acc, level) for acc in ("f32", "f16", "mixed") for level in "123"]
    assert "columns512_rows64_keys256" in shown  # the tile is for many rows, few as there are here
    assert "checked 20 rows against float64 on random data: 0 wrong" in shown
    assert "|L3* bank conflicts|1.00|1.00|" in shown
    record = Record.load(saved(tmp_path, ".json")[0])
    assert [len(result.chip) for result in record.results] == [9, 9]


def test_build_tells_registers(nvcc, tmp_path, capsys):
    """The registers are those of a kernel that is compiled now, whatever lies in the cache."""
    assert run_emulated(tmp_path, "--D", "64", "--tags", "acc+f32+L1", "--build") == 0
    shown = capsys.readouterr()
    assert re.search(r"\(ffpa\+acc\+f32\+L1\): .* \d+ in all, 0 B spilled, ", shown.out)
    assert "compiling forward_mma_rows_f16_f32_f32_head_dim64" in shown.err


@pytest.mark.parametrize(
    "flags",
    [
        "--varlen --causal",
        "--n-q 1 --n-kv 600 --H 4 --heads-kv 2 --dtype bf16",
        "--n-q 50 --n-kv 20 --causal",
        "--D-v 256 --H 4 --heads-kv 1",
    ],
)
def test_options_in_the_emulator(flags, tmp_path, capsys):
    """Options work even where SDPA cannot run and nothing else is timed."""
    assert run_emulated(tmp_path, "--D", "320", "--tags", "acc+f32", "--check", "--gen-bench", *flags.split()) == 0
    shown = capsys.readouterr().out
    assert shown.count("bank conflicts 1.00") == 3 and "checked 3 rows" in shown and "L3* max error" in shown


def test_a_check_of_nothing_is_a_failure(tmp_path, capsys):
    assert run(tmp_path, "--D", "128", "--backward", "--tags", "acc+f32", "--check") == 1
    assert "nothing to check" in capsys.readouterr().err


def test_a_peer_that_breaks_while_it_is_timed(monkeypatch, tmp_path, capsys):
    """A peer is left out; one of ours is a failure."""
    calls = []

    def breaking(x):
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("out of order")
        return x.q

    monkeypatch.setitem(providers.PEERS, "unfused", lambda w, x: providers.Provider("(unfused)", "none", breaking))
    assert run(tmp_path, "--D", "64", "--torch") == 0
    shown = capsys.readouterr().out
    assert "(unfused): not measured: RuntimeError: out of order" in shown and "(ffpa+auto): [" in shown
    monkeypatch.setitem(
        providers.PEERS, "unfused", lambda w, x: providers.Provider("(unfused)", "none", breaking, is_ffpa=True)
    )
    calls.clear()
    assert run(tmp_path, "--D", "64", "--torch") == 1
    assert "FAILED (unfused)" in capsys.readouterr().err


def test_the_emulator_of_another_gpu(tmp_path, capsys):
    assert run_emulated(tmp_path, "--D", "512", "--tags", "acc+f32", "--arch", "sm_89", "--check") == 0
    assert capsys.readouterr().out.count(" of 99 KB shared memory") == 3


def test_a_kernel_that_is_wrong_in_the_emulator_fails_the_check(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(emulation, "run", lambda plan, p, x, out: forced.run(plan, p, x._replace(v=x.v + 0.1), out))
    assert run_emulated(tmp_path, "--D", "320", "--tags", "acc+f32+L1", "--check") == 1
    assert "FAILED (ffpa+acc+f32+L1)" in capsys.readouterr().err


def test_a_check_without_the_emulator_is_a_failure(monkeypatch, tmp_path, capsys):
    def no_compiler(*args):
        raise BuildError("no g++")

    monkeypatch.setattr(emulation, "run", no_compiler)
    assert run_emulated(tmp_path, "--D", "320", "--tags", "acc+f32+L1") == 0
    assert "(emulator): not measured: BuildError: no g++" in capsys.readouterr().out
    assert run_emulated(tmp_path, "--D", "320", "--tags", "acc+f32+L1", "--check") == 1
    assert "FAILED the emulator: BuildError: no g++" in capsys.readouterr().err


def test_flags_that_change_numbers(tmp_path, capsys):
    """Inputs of ones give ones; another seed gives others; --show-matrix prints the tensor."""

    def shown(*flags: str) -> str:
        assert run(tmp_path, "--D", "64", "--tags", "auto", "--i", "1", *flags) == 0
        return capsys.readouterr().out

    def values(text: str) -> str:
        return re.search(r"\(ffpa\+auto\): \[(.*?)\]", text)[1]

    assert values(shown("--no-rv")) == "'1.00000000', '1.00000000', '1.00000000'"
    assert values(shown("--no-rv", "--show-less")) == "'1.00000000'"
    plain = shown()
    assert values(plain) == values(shown("--seed", "0")) != values(shown("--seed", "1"))
    assert values(plain) != values(shown("--no-rk")) != values(shown("--no-rq"))
    assert "tensor([[[[" in shown("--show-matrix") and "tensor(" not in plain


def test_a_gpu_that_is_not_there(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        cli.main(["--device", "cuda"])
    assert "PyTorch sees no GPU" in capsys.readouterr().err


def test_a_recorded_wrong_row_fails_the_check(monkeypatch, tmp_path):
    monkeypatch.setattr(providers, "ffpa", lambda q, k, v, **rule: ffpa(q, k[:, :, :-1], v[:, :, :-1], **rule))
    assert run(tmp_path, "--D", "64", "--gen-bench", "--tags", "auto") == 0
    (stored,) = saved(tmp_path, ".json")
    assert cli.main(["--from", str(stored)]) == 0
    assert cli.main(["--from", str(stored), "--check"]) == 1


def test_a_fallback_on_a_gpu_fails_the_check(monkeypatch, tmp_path, capsys):
    """A package that was not built falls back."""

    def falling_back(*args, **forced):
        return replace(explain(*args, **forced), fallback="runs on sdpa, not on a kernel of ours")

    monkeypatch.setattr(providers, "explain", falling_back)
    assert run(tmp_path, "--D", "64", "--tags", "auto") == 0
    assert run(tmp_path, "--D", "64", "--tags", "auto", "--check") == 1
    assert "FAILED (ffpa+auto)" in capsys.readouterr().err


def test_a_race_in_the_emulator_is_a_failure(monkeypatch, tmp_path, capsys):
    def racing(*args):
        raise RuntimeError("ffpa_attn: a race")

    monkeypatch.setattr(emulation, "run", racing)
    assert run_emulated(tmp_path, "--D", "320", "--tags", "acc+f32+L1") == 1
    assert "FAILED (ffpa+acc+f32+L1) in the emulator" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        "--backward --causal --check-all",
        "--heads-kv 1 --H 4 --causal --n-kv 70 --check-all --torch",
        "--varlen --n-kv 50 --check-all --torch",
        "--varlen --causal --backward --check-all",
        "--n-q 1 --n-kv 200 --dtype bf16 --check-all --D-v 128",
        "--n-q 50 --n-kv 20 --causal --check",
        "--no-rand-qkv --show-matrix --show-less --verbose",
        "--no-rq --no-rk --no-rv --seed 3 --flops-mm --w 2 --i 2 --debug",
        "--flash --peers all --tags auto,stage2",
    ],
)
def test_options(flags, tmp_path):
    assert run(tmp_path, "--D", "64", "--i", "1", *flags.split()) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags", ["--D 0", "--D x", "--arch gpu", "--MAX-D 256", "--H 5 --heads-kv 2", "--peers nobody", "--check-al"]
)
def test_refused_flags(flags, capsys):
    with pytest.raises(SystemExit) as refused:
        cli.main(flags.split())
    assert refused.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"ENABLE_FFPA_PERSIST_KV_G2S": "1", "ENABLE_FFPA_PERSIST_Q_G2S": "0"}, "exclude each other"),
        ({"FFPA_EMULATE": "1"}, "times in the emulator mean nothing"),
    ],
)
def test_refused_environment(flags, message, monkeypatch, capsys):
    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        cli.main(["--D", "64"])
    assert message in capsys.readouterr().err


def test_a_problem_that_ffpa_refuses_is_a_failure(tmp_path, capsys):
    assert run(tmp_path, "--D", "60") == 1
    assert "FAILED ffpa on B=1, H=1, N=32, D=60, fp16: ValueError: `q` has head dim 60" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--check", "--check-all --backward", "--check --no-rand-qkv"])
def test_a_wrong_result_fails_the_check(flags, monkeypatch, tmp_path, capsys):
    """The check fails even for what all-ones inputs would hide: the last key is dropped."""
    monkeypatch.setattr(providers, "ffpa", lambda q, k, v, **rule: ffpa(q, k[:, :, :-1], v[:, :, :-1], **rule))
    assert run(tmp_path, "--D", "64", *flags.split()) == 1
    assert "FAILED (ffpa+auto)" in capsys.readouterr().err


def test_a_raising_row_of_ours_fails_and_a_peer_is_skipped(monkeypatch, tmp_path, capsys):
    def broken(*args, **rule):
        raise RuntimeError("out of order")

    monkeypatch.setattr(providers, "ffpa", broken)
    assert run(tmp_path, "--D", "64") == 1
    assert "RuntimeError: out of order" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setitem(providers.PEERS, "unfused", lambda w, x: providers.Provider("(unfused)", "none", broken))
    assert run(tmp_path, "--D", "64", "--torch") == 0
    assert "(unfused): not measured: RuntimeError: out of order" in capsys.readouterr().out


def test_running_out_of_memory_loses_nothing(monkeypatch, tmp_path, capsys):
    def make(w, *args, **options):
        if w.d == 384:
            raise torch.OutOfMemoryError("not that much")
        return make_inputs(w, *args, **options)

    monkeypatch.setattr(measure, "make_inputs", make)
    assert run(tmp_path, "--MAX-D", "448", "--gen-bench") == 1
    shown = capsys.readouterr()
    assert "|Algorithm|320|448|" in shown.out and "OutOfMemoryError: not that much" in shown.err


def test_a_missing_record_is_said(tmp_path, capsys):
    assert cli.main(["--from", str(tmp_path / "none.json"), "--plot"]) == 2
    assert "none.json" in capsys.readouterr().err


def test_the_package_of_the_same_name_runs_beside_ours(tmp_path, capsys):
    (tmp_path / "ffpa_attn").mkdir()
    (tmp_path / "ffpa_attn" / "__init__.py").write_text(
        "import torch.nn.functional as F\n__version__ = '0.0'\nprint('noise')\n"
        "def ffpa_attn_func(q, k, v, is_causal, enable_gqa, backend=None):\n"
        "    assert backend != 'cutedsl' or q.shape[-1] < 384, 'too wide'\n"
        "    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)\n"
    )
    assert (
        run(
            tmp_path,
            "--MAX-D",
            "384",
            "--causal",
            "--show",
            "--check-all",
            "--tags",
            "auto,pypi",
            "--pypi",
            str(tmp_path),
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert shown.count("(ffpa-pypi): [") == 2 and "ffpa-attn 0.0 of PyPI" in shown
    assert shown.count("(ffpa-pypi+cutedsl): [") == 1 and "AssertionError: too wide" in shown
    assert run(tmp_path, "--D", "64", "--varlen", "--tags", "auto,pypi", "--pypi", str(tmp_path)) == 0
    assert "(ffpa-pypi): not measured: RuntimeError: NotImplementedError" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_measured(monkeypatch, tmp_path, capsys):
    calls = []

    def impatient(q, k, v, **rule):
        calls.append(q.shape[-1])
        if calls.count(384) == 5:
            raise KeyboardInterrupt
        return ffpa(q, k, v, **rule)

    monkeypatch.setattr(providers, "ffpa", impatient)
    assert run(tmp_path) == 130
    record = Record.load(saved(tmp_path, ".json")[0])
    assert record.interrupted and [result.workload.d for result in record.results] == [320, 384]
    assert all(len(row.times_ms) == 5 for row in record.results[0].rows)
    assert all(0 < len(row.times_ms) < 5 for row in record.results[1].rows)
    assert "saved" in capsys.readouterr().out


def test_record_and_pictures(tmp_path, capsys):
    """--plot alone works; a record comes back as it was; table and pictures need nothing but the record."""
    assert run_emulated(tmp_path, "--MAX-D", "384", "--plot", "--causal", "--tag", "mine", "--torch") == 0
    stored = saved(tmp_path, "_mine_H1_N32_causal.json")[0]
    record = Record.load(stored)
    record.save(tmp_path / "again")
    assert (tmp_path / "again.json").read_text() == stored.read_text()
    assert record.source["tree"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", record.source["tree"])
    with stored.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["d"], row["tag"]) for row in rows] == [
        (d, tag) for d in ("320", "384") for tag in ("(sdpa)", "(ffpa+auto)", "(unfused)")
    ]
    assert all(float(row["halved_tflops"]) > 0 and len(row["times_ms"].split()) == 5 for row in rows)

    pictures = tmp_path / "pictures"
    capsys.readouterr()
    assert cli.main(["--from", str(stored), "--plot", "--gen-bench", "--dir", str(pictures)]) == 0
    assert "|Algorithm|320|384|" in capsys.readouterr().out
    assert {path.name.split("causal_")[1] for path in pictures.iterdir()} == {
        "TFLOPS.png",
        "ffpa+acc+f32_Speedup.png",
        "on_chip.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.iterdir())
