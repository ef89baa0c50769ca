"""Tests traced programs in which lengths, and what is computed from them, are symbols: one graph serves all of them."""

import ffpa_attn
import pytest
import torch
import torch._dynamo
from ffpa_attn import ffpa, ffpa_varlen, flash_attn_func
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

BF16 = torch.bfloat16
LENGTHS = (12, 17, 20, 33)


def t(n, heads=2, device="cpu"):
    return torch.randn(1, heads, n, 64, generator=torch.Generator().manual_seed(n)).to(device, BF16)


RULES = {
    "window": lambda q: ffpa(q, q, q, window=(q.shape[2] // 2, q.shape[2] // 4)),
    "left window": lambda q: ffpa(q, q, q, window=(q.shape[2] - 9, -1), causal=True),
    "scale": lambda q: ffpa(q, q, q, scale=1.0 / q.shape[2]),
    "whole scale": lambda q: ffpa(q, q, q, scale=q.shape[2] // 8),
    "power of the length": lambda q: ffpa(q, q, q, scale=q.shape[2] ** -0.5),
    "softcap": lambda q: ffpa(q, q, q, softcap=q.shape[2] * 0.5),
    "causal": lambda q: ffpa(q, q, q, causal=q.shape[2] > 18),
    "causal and window": lambda q: ffpa(q, q, q, causal=q.shape[2] > 18, window=(q.shape[2] // 3, q.shape[2] // 4)),
    "causal, known by the range": lambda q: ffpa(q, q, q, causal=q.shape[2] > 8),
    "rows of a mask": lambda q: ffpa(q, q, q, mask=q.new_zeros(q.shape[2], 1), causal=q.shape[2] > 18),
    "flash-attn": lambda q: flash_attn_func(q, q, q, causal=q.shape[1] > 1, window_size=(q.shape[1] // 2 - 7, q.shape[1])),
    "longest": lambda q: packed(q[0].transpose(0, 1), lambda x, cu: x.shape[0] // 2 + 1),
}  # fmt: skip


def packed(x, longest):
    cu = torch.arange(3, dtype=torch.int32, device=x.device) * (x.shape[0] // 2)
    return ffpa_varlen(x, x, x, cu, cu, longest(x, cu), longest(x, cu), causal=True)


class Program(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "with gradients"])
@pytest.mark.parametrize("name", RULES)
def test_compiled_once_for_all_lengths(name, grad, device):
    function, graphs = RULES[name], CompileCounterWithBackend("aot_eager")
    compiled, counts = torch.compile(function, fullgraph=True, backend=graphs, dynamic=True), []
    for n in LENGTHS:
        q, same = (t(n, device=device).requires_grad_(grad) for _ in range(2))
        found, want = compiled(q), function(same)
        assert torch.equal(found, want)
        if grad:
            found.float().square().sum().backward()
            want.float().square().sum().backward()
            assert torch.equal(q.grad, same.grad)
        counts.append(graphs.frame_count)
    assert counts == counts[:1] * len(counts)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_exported_for_all_lengths(name, strict):
    length = torch.export.Dim("length", min=9, max=100)
    function = RULES[name]
    program = torch.export.export(Program(function), (t(12),), dynamic_shapes=(({2: length},),), strict=strict).module()
    for n in LENGTHS:
        assert torch.equal(program(t(n)), function(t(n)))


READ = {
    "longest": lambda x, n: packed(x[0].transpose(0, 1), lambda x, cu: n.item()),
    "longest of offsets": lambda x, n: packed(x[0].transpose(0, 1), lambda x, cu: cu.diff().max().item()),
    "window": lambda x, n: ffpa(x, x, x, window=(n.item(), -1)),
    "causal": lambda x, n: ffpa(x, x, x, causal=(n > 8).item()),
    "scale": lambda x, n: ffpa(x, x, x, scale=(n / 64).item()),
}  # fmt: skip


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("how", ["compiled", "exported", "exported strictly"])
@pytest.mark.parametrize("name", READ)
def test_numbers_read_from_tensors(name, how, device):
    """Nobody knows `max_seqlen` of `.item()` while a program is traced."""
    function, graphs = READ[name], CompileCounterWithBackend("aot_eager")
    x, counts = t(12, device=device), []
    if how == "compiled":
        program = torch.compile(function, fullgraph=True, backend=graphs)
    else:
        args, strict = (x, torch.tensor(7, device=device)), how == "exported strictly"
        program = torch.export.export(Program(function), args, strict=strict).module()
    for n in (7, 9, 8):
        n = torch.tensor(n, device=device)
        assert torch.equal(program(x, n), function(x, n))
        counts.append(graphs.frame_count)
    assert counts == counts[:1] * 3


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_numbers_read_from_tensors_in_training(device):
    compiled = torch.compile(READ["longest of offsets"], fullgraph=True, backend="aot_eager")
    x, same = (t(12, device=device).requires_grad_() for _ in range(2))
    for function, q in ((compiled, x), (READ["longest of offsets"], same)):
        function(q, None).float().square().sum().backward()
    assert torch.equal(x.grad, same.grad)


def test_what_a_symbol_stands_for_is_checked_when_it_runs():
    bad = {
        "window": lambda q: ffpa(q, q, q, window=(q.shape[2] - 14, -1)),
        "softcap": lambda q: ffpa(q, q, q, softcap=12.0 - q.shape[2]),
    }
    for word, function in bad.items():
        torch._dynamo.reset()
        n, wrong = (20, 12) if word == "window" else (11, 20)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
        assert torch.equal(compiled(t(n)), function(t(n)))
        with pytest.raises(ValueError, match=f"`({word}|window)` is"):
            compiled(t(wrong))


def test_constants_are_checked_while_traced():
    q = t(12)
    for wrong in ({"window": (-2, 0)}, {"scale": float("nan")}, {"softcap": -1.0}, {"causal": 1}):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=f"`{next(iter(wrong))}`"):
            torch.compile(lambda q, wrong=wrong: ffpa(q, q, q, **wrong), fullgraph=True, backend="aot_eager")(q)


def test_numbers_of_operators_may_be_whole():
    """`Scalar` hands on an int as it is."""
    q = t(14)
    for wrong in (True, 1j, "1"):
        with pytest.raises((TypeError, RuntimeError), match="scale"):
            torch.ops.ffpa_attn.forward(q, q, q, scale=wrong)
    out, lse = torch.ops.ffpa_attn.forward(q, q, q, scale=1, softcap=2)
    want = torch.ops.ffpa_attn.forward(q, q, q, scale=1.0, softcap=2.0)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_8_bit_floats_compile_for_all_lengths():
    def function(q):
        return ffpa_attn.ffpa_fp8(q, q, q, causal=q.shape[2] > 18, scale=1.0 / q.shape[2], window=(q.shape[2] // 2, -1))

    graphs, counts = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(function, fullgraph=True, backend=graphs, dynamic=True)
    for n in LENGTHS:
        q = t(n).to(torch.float8_e4m3fn)
        assert torch.equal(compiled(q), function(q))
        counts.append(graphs.frame_count)
    assert counts == counts[:1] * len(counts)
