"""Every family of kernels that a wheel holds runs in the emulator; a new family needs a call here."""

import pytest
import torch
from ffpa_attn import env, ffpa, ffpa_fp8, ffpa_varlen, ffpa_with_kvcache, quantize_fp8
from ffpa_attn.backends import two_phase
from ffpa_attn.backends.append import append
from ffpa_attn.operators import ops
from ffpa_attn.specs.spec import aot_specs
from ffpa_attn.testing import emulate


def attention(d: int, rows: int, keys: int, gradients: bool = False) -> None:
    q, k, v = (torch.randn(1, 1, n, d, dtype=torch.bfloat16, requires_grad=gradients) for n in (rows, keys, keys))
    out = ffpa(q, k, v)
    if gradients:
        out.sum().backward()


def attention_of_packed_sequences() -> None:
    x, offsets = torch.randn(9, 1, 64).bfloat16(), torch.tensor([0, 8], dtype=torch.int32)
    ffpa_varlen(x, x, x, offsets, offsets, 8, 8)


def attention_with_sinks() -> None:
    x, sinks = torch.randn(1, 1, 8, 64).bfloat16(), torch.zeros(1, requires_grad=True)
    ffpa(x, x, x, sinks=sinks).sum().backward()


def attention_of_latents() -> None:
    q, k = torch.randn(1, 1, 1, 576).bfloat16(), torch.randn(1, 1, 8, 576).bfloat16()
    ffpa(q, k, k[..., :512])


def appended_rows() -> None:
    rows, pages = torch.randn(1, 1, 1, 64).bfloat16(), torch.zeros(1, 16, 1, 64).bfloat16()
    append(rows, rows, pages, pages.clone(), torch.zeros(1, dtype=torch.int32))


def attention_on_pages_of_8_bits() -> None:
    q, pages = torch.randn(1, 1, 1, 64).bfloat16(), torch.zeros(128, 16, 1, 64).to(torch.float8_e4m3fn)
    table = torch.arange(128, dtype=torch.int32)[None]
    ffpa_with_kvcache(q, pages, pages.clone(), cache_seqlens=2000, block_table=table)


def attention_of_8_bits() -> None:
    q, k, v = (quantize_fp8(torch.randn(1, 1, 8, 512))[0] for _ in range(3))
    ffpa_fp8(q, k, v)


# Each row has the backend, whether it computes P first where it may, and a call.
CALLS = [
    ("mma", False, lambda: attention(64, 8, 8, gradients=True)),
    ("mma", False, lambda: attention(64, 8, 136, gradients=True)),  # keys of two tiles
    ("mma", False, lambda: attention(512, 8, 72)),
    ("mma", False, lambda: attention(64, 1, 2000)),  # few rows: parts of the keys are merged
    ("mma", True, lambda: attention(640, 8, 72)),
    ("mma", False, attention_of_packed_sequences),
    ("mma", False, attention_with_sinks),
    ("mma", False, appended_rows),
    ("mma", False, attention_on_pages_of_8_bits),
    ("hopper", False, lambda: attention(64, 8, 8, gradients=True)),
    ("hopper", False, lambda: attention(384, 8, 8)),
    ("hopper", True, lambda: attention(768, 8, 8)),
    ("hopper", False, attention_of_latents),
    ("hopper", False, attention_of_8_bits),
]
ARCHS = {"mma": "sm_80", "hopper": "sm_90a"}


@pytest.mark.long(seconds=30)
def test_every_family_of_a_wheel_runs_in_the_emulator(monkeypatch):
    monkeypatch.setattr(ops, "_plans", {})
    slower, ran = two_phase.why_slower, []
    for backend, first_p, call in CALLS:
        monkeypatch.setenv("FFPA_BACKEND", backend)
        monkeypatch.setattr(two_phase, "why_slower", slower if not first_p else lambda *of_problem: None)
        with emulate(ARCHS[backend]) as reports:
            call()
        ran += [report["kernel"] for report in reports]
    families = {spec.family for spec in aot_specs(env.all_flags())}
    assert families == {family for family in families if any(name.startswith(family) for name in ran)}
