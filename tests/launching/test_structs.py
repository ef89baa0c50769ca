"""Tests that Python and the compiler agree on the structs of a call's numbers."""

import ctypes
import struct
import subprocess
import sys

import pytest
import torch
from ffpa_attn import env, ffpa
from ffpa_attn.building import build
from ffpa_attn.doctor import merged_alone
from ffpa_attn.launching import emulated, native, structs
from ffpa_attn.launching.launch import READ, WRITE, Kernel, Launch
from ffpa_attn.specs.spec import BackwardRows, ForwardMerge
from ffpa_attn.testing import emulate

HEADERS = sorted(path.name for path in (build.csrc() / "attention" / "params").glob("*.h"))


def assertions(name: str, kind: type[ctypes.Structure]):
    yield f"sizeof({name}) == {ctypes.sizeof(kind)}"
    for field, number in kind._fields_:
        yield f"offsetof({name}, {field}) == {getattr(kind, field).offset}"
        yield f"sizeof({name}::{field}) == {ctypes.sizeof(number)}"


def test_every_field_lies_where_the_compiler_puts_it(tmp_path):
    declared, enums = structs._declared()
    said = [line for name, kind in declared.items() for line in assertions(name, kind)]
    said += [f"int({enum}::{name}) == {i}" for enum, names in enums.items() for i, name in enumerate(names)]
    lines = [f'#include "attention/params/{header}"' for header in HEADERS]
    lines += ["#include <cstddef>", "using namespace ffpa;", *(f"static_assert({line});" for line in said)]
    source = tmp_path / "structs.cpp"
    source.write_text("\n".join(lines) + "\n")
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{build.csrc()}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"AttentionParams", "BackwardParams", "Fp8Params", "ArrangeParams"} <= set(declared) and len(said) > 100


def test_the_headers_are_read_where_the_locale_has_no_letters():
    """They have letters that ASCII lacks, and an installation may lie below a path that has some."""
    locale = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONPATH": str(build.csrc().parent / "ffpa"),
    }
    code = "from ffpa_attn.launching import structs; print(len(structs.struct('AttentionParams')._fields_))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env.child_environment(**locale), capture_output=True, text=True
    )
    assert int(done.stdout) == len(structs.struct("AttentionParams")._fields_), done.stderr


def test_every_header_of_structs_is_read():
    assert sorted(structs._HEADERS) == HEADERS


def test_a_field_of_another_kind_is_an_error():
    with pytest.raises(KeyError, match="uint8_t"):
        list(structs._fields("  uint8_t small;\n", {}, {}))


def test_addresses_and_numbers_of_a_call_reach_a_gpus_kernel(monkeypatch):
    launched = []
    monkeypatch.setattr(native, "gpu_of", lambda device: "sm_90")
    monkeypatch.setattr(native, "kernel", lambda spec, gpu: f"{spec.name}@{gpu}")
    monkeypatch.setattr(native, "launcher", lambda *of: lambda *call: launched.append((*of, *call)))
    kind = structs.struct("BackwardParams")
    memory = {"attention.q.data": READ, "attention.lse": WRITE, "partial": READ}
    launch = Launch(
        [Kernel(BackwardRows("f16"), kind(entries=9, turn=3), memory)], torch.device("cuda", 1), "first_entry"
    )
    x, y = torch.zeros(3), torch.zeros(4)
    launch(x, y, None, ints=(1, 2, 3, 4, 5, 6, 7))
    launch(y, None, x, ints=(8,))
    (names, params, places, device, _, _), _ = launched
    assert (names, params, device) == (["backward_rows_f16@sm_90"], [bytes(kind(entries=9, turn=3))], 1)
    assert places == [structs.offset(kind, field) for field in memory]
    assert [struct.unpack("3Q", call[4]) for call in launched] == [
        (x.data_ptr(), y.data_ptr(), 0),
        (y.data_ptr(), 0, x.data_ptr()),
    ]
    first, second = (kind.from_buffer_copy(call[5]) for call in launched)
    assert (first.first_entry, first.entries, first.end_key, first.turn) == (1, 2, 6, 7)
    assert (second.first_entry, second.entries, second.turn) == (8, 9, 3)


def test_a_kernel_refuses_parameters_of_another_size(monkeypatch):
    launch = emulated.launch
    monkeypatch.setattr(emulated, "launch", lambda spec, params, memory: launch(spec, params[:-8], memory))
    q = torch.zeros(1, 1, 8, 512, dtype=torch.float16)
    with emulate(), pytest.raises(ValueError, match="parameters of another size"):
        ffpa(q, q, q)


def test_the_smallest_launch_in_the_emulator():
    x = torch.randn(9, 64).half()
    with emulate():
        assert torch.equal(merged_alone(ForwardMerge("f16"), x), x)
