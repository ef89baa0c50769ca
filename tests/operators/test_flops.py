"""torch.utils.flop_counter counts our operators, as it counts PyTorch's."""

import subprocess
import sys

import pytest
import torch
from ffpa_attn import ffpa, ffpa_fp8, ffpa_varlen
from ffpa_attn.operators import flops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

BF16 = torch.bfloat16


def counted(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def tensors(device, grad=False, d_v=48):
    shapes = (2, 4, 11, 32), (2, 2, 17, 32), (2, 2, 17, d_v)
    return [torch.randn(shape, dtype=BF16, device=device, requires_grad=grad) for shape in shapes]


FORWARD = 2 * 2 * 4 * 11 * 17 * (32 + 48)
BACKWARD = 2 * 2 * 4 * 11 * 17 * (3 * 32 + 2 * 48)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"return_lse": True}, {"softcap": 2.0}], ids=str)
def test_forward(device, options):
    q, k, v = tensors(device)
    assert counted(lambda: ffpa(q, k, v, **options)) == FORWARD
    assert (
        counted(lambda: ffpa(q, k, v, out=torch.empty(2, 4, 11, 48, dtype=BF16, device=device), **options)) == FORWARD
    )
    mask = torch.ones(11, 17, dtype=torch.bool, device=device)
    assert counted(lambda: ffpa(q, k, v, mask=mask, **options)) == FORWARD
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert counted(lambda: ffpa(q, k, v, layout="BNHD", **options)) == FORWARD


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_backward(device, layout):
    q, k, v = (x if layout == "BHND" else x.transpose(1, 2) for x in tensors(device, grad=True))
    assert counted(lambda: ffpa(q, k, v, layout=layout).float().sum().backward()) == FORWARD + BACKWARD


def test_the_same_as_pytorchs_own(device):
    q, k, v = (
        torch.randn(2, 4, n, d, dtype=BF16, device=device, requires_grad=True)
        for n, d in ((11, 32), (17, 32), (17, 48))
    )
    forward = flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape)
    backward = flop_counter.sdpa_backward_flop_count((*q.shape[:3], 48), q.shape, k.shape, v.shape)
    with torch.no_grad():
        assert counted(lambda: ffpa(q, k, v, causal=True)) == forward
    assert counted(lambda: ffpa(q, k, v, causal=True).float().sum().backward()) == forward + backward


def test_packed_sequences(device):
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 4, 10], [0, 0, 9]))
    q = torch.randn(10, 4, 32, dtype=BF16, device=device, requires_grad=True)
    k = torch.randn(9, 2, 32, dtype=BF16, device=device)
    pairs = 4 * 6 * 9
    forward = counted(lambda: ffpa_varlen(q, k, k, cu_q, cu_k, 6, 9).float().sum().backward())
    assert forward == pairs * 2 * (64 + 5 * 32)
    with torch.no_grad():
        assert counted(lambda: ffpa_varlen(q, k, k, cu_q, cu_k, 6, 9, out=torch.empty_like(q))) == pairs * 2 * 64


def test_packed_sequences_without_numbers():
    with FakeTensorMode():
        cu, x = torch.empty(3, dtype=torch.int32), torch.empty(10, 4, 32, dtype=BF16)
        assert counted(lambda: ffpa_varlen(x, x, x, cu, cu, 6, 7)) == 2 * 4 * 6 * 7 * 2 * 64


@pytest.mark.parametrize("v_transposed", [False, True])
def test_8_bit_floats(v_transposed):
    q, k, v = (x.float().to(torch.float8_e4m3fn) for x in tensors("cpu"))
    if v_transposed:
        v = v.mT.contiguous()
    assert counted(lambda: ffpa_fp8(q, k, v, v_transposed=v_transposed)) == FORWARD


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(3, 2), (0, 0), (-1, 4), (5, -1), (100, 1), (2, 100)])
@pytest.mark.parametrize("rows, keys", [(7, 7), (1, 20), (20, 3), (9, 14), (0, 5), (5, 0)])
def test_windows_count_what_is_seen(rows, keys, window, causal, align):
    left, right = window
    shift = keys - rows if align == "bottom_right" else 0
    right_most = 0 if causal else right
    seen = sum(
        (left < 0 or key >= row + shift - left) and (right_most < 0 or key <= row + shift + right_most)
        for row in range(rows)
        for key in range(keys)
    )
    options = {"causal": causal, "align": align, "window_left": left, "window_right": right}
    assert flops._pairs(rows, keys, options) == seen


@pytest.mark.parametrize("first", ["ffpa_attn", "torch.utils.flop_counter"])
def test_whichever_is_imported_first(first):
    """The package does not import the counter, which brings Triton; a second import of the counter is told again."""
    code = f"""
import importlib, sys, torch
import {first}
if {first!r} == "ffpa_attn":
    assert "torch.utils.flop_counter" not in sys.modules
import ffpa_attn
from torch.utils import flop_counter
for counter in (flop_counter, importlib.reload(flop_counter)):
    with counter.FlopCounterMode(display=False) as mode:
        x = torch.randn(1, 1, 4, 8).half()
        ffpa_attn.ffpa(x, x, x)
    assert mode.get_total_flops() == 2 * 16 * 16, mode.get_total_flops()
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
