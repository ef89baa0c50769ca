"""ffpa takes scaled_dot_product_attention: what it takes means what PyTorch's own means; all else is PyTorch's own."""

import itertools
import subprocess
import sys
import threading
import types
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import compare
import ffpa_attn
import pytest
import torch
import torch.nn.attention.bias
import torch.nn.functional as F
from ffpa_attn import disable_sdpa, enable_sdpa, explain, sdpa
from ffpa_attn.integrations import sdpa_dispatch, sdpa_override
from test_memory import bytes_of, peak_of
from torch import overrides
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.utils.checkpoint import CheckpointError, checkpoint

PYTORCH = partial(torch._C._nn.scaled_dot_product_attention)  # partial: what a module holds as it is may be replaced
BF16, F16 = torch.bfloat16, torch.float16
ROOT = Path(__file__).parents[2]


@contextmanager
def enabled():
    enable_sdpa()
    try:
        yield
    finally:
        disable_sdpa()


@contextmanager
def dispatched():
    end = sdpa_dispatch.override("CPU", "CUDA")
    try:
        yield
    finally:
        end()


WAYS = pytest.mark.parametrize("way", [sdpa, enabled, dispatched])
# Here the compiler sees ffpa's operator; where the dispatcher comes to it, the compiler sees PyTorch's function.
WAYS_OF_PYTHON = pytest.mark.parametrize("way", [sdpa, enabled])
WAYS_OF_ALL_THREADS = pytest.mark.parametrize("way", [enabled, dispatched])


def t(*shape, dtype=BF16, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def attend(q, k, v, **options):
    """Calls by a name that was imported long before."""
    return imported_before(q, k, v, **options)


# ---- what is taken ----


@dataclass(frozen=True)
class Call:
    q: tuple = (2, 4, 20, 64)
    k: tuple = (2, 4, 33, 64)
    d_v: int | None = None
    mask: tuple | None = None  # mask's kind and shape
    options: dict = field(default_factory=dict)


CALLS = {
    "plain": Call(),
    "wide": Call((1, 2, 20, 512), (1, 2, 33, 512)),
    "own value width": Call(d_v=72),
    "scale": Call(options={"scale": 0.3}),
    "scale of an int": Call(options={"scale": 0}),
    "negative scale": Call(options={"scale": -0.3}),
    "causal": Call((2, 4, 33, 64), options={"is_causal": True}),
    "causal, fewer rows": Call(options={"is_causal": True}),
    "causal, more rows": Call((2, 4, 40, 64), options={"is_causal": True}),
    "grouped": Call(k=(2, 2, 33, 64), options={"enable_gqa": True}),
    "one head of keys": Call(k=(2, 1, 33, 64), options={"enable_gqa": True, "is_causal": True}),
    "grouped for nothing": Call(options={"enable_gqa": True}),
    "3 dims": Call((3, 20, 64), (3, 33, 64), d_v=72),
    "3 dims, causal": Call((3, 20, 64), (3, 33, 64), options={"is_causal": True, "scale": 0.2}),
    "3 dims, mask of 2": Call((3, 20, 64), (3, 33, 64), mask=("bool", (20, 33))),
    "3 dims, mask of 3": Call((3, 20, 64), (3, 33, 64), mask=("own", (3, 20, 33))),
    "bool": Call(mask=("bool", (2, 4, 20, 33))),
    "bool keys": Call(mask=("bool", (2, 1, 1, 33))),
    "bool of 2 dims": Call(mask=("bool", (20, 33)), options={"scale": 0.2}),
    "bool of 3 dims": Call(mask=("bool", (4, 1, 33))),
    "additive": Call(mask=("own", (2, 4, 20, 33))),
    "additive by head": Call(mask=("own", (4, 20, 33))),
    "additive keys": Call(mask=("own", (1, 33))),
    "additive float32": Call(mask=("float32", (2, 1, 20, 33))),
    "additive, grouped": Call(k=(2, 2, 33, 64), mask=("own", (1, 4, 20, 33)), options={"enable_gqa": True}),
    "no keys": Call(k=(2, 4, 0, 64)),
    "no rows": Call(q=(2, 4, 0, 64)),
    "empty batch": Call(q=(0, 4, 20, 64), k=(0, 4, 33, 64)),
}


def make(call, dtype, device):
    """Returns (tensors to differentiate by, mask or None)."""
    q, k = t(*call.q, dtype=dtype, device=device), t(*call.k, dtype=dtype, device=device, seed=1)
    v = t(*call.k[:-1], call.d_v or call.k[-1], dtype=dtype, device=device, seed=2)
    if call.mask is None:
        return [q, k, v], None
    kind, shape = call.mask
    if kind == "bool":
        return [q, k, v], t(*shape, dtype=torch.float32, device=device) > -0.5
    return [q, k, v], t(*shape, dtype=dtype if kind == "own" else torch.float32, device=device)


def results(function, tensors, mask, options):
    """Returns (result, its gradients); those of an additive mask, too."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().clone().requires_grad_()
        leaves.append(mask)
    out = function(*leaves[:3], mask, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def yardstick(q, k, v, mask, is_causal=False, scale=None, enable_gqa=False):
    """Computes how well a 16-bit result may be known: compare.py's baseline, by PyTorch's arguments."""
    if q.dim() == 3:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
        return yardstick(q, k, v, mask, is_causal, scale).squeeze(1)
    return compare.baseline(q, k, v, mask=mask, causal=is_causal, align="top_left", scale=scale)[0]


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", CALLS)
def test_means_what_pytorch_means(device, taken, name, dtype):
    call = CALLS[name]
    tensors, mask = make(call, dtype, device)
    base = results(yardstick, tensors, mask, call.options)
    exact_mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    want = results(PYTORCH, [x.double() for x in tensors], exact_mask, call.options)
    with sdpa():
        got = results(F.scaled_dot_product_attention, tensors, mask, call.options)
    assert len(taken) == 1
    for part, ours, exact, theirs in zip(("out", "dq", "dk", "dv", "dmask"), got, want, base, strict=False):
        assert ours.dtype == theirs.dtype
        compare.assert_close(part, ours, exact, theirs)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_rows_that_see_nothing_give_zero_as_in_pytorch(device, taken, kind):
    q, k = t(1, 2, 6, 64, device=device), t(1, 2, 7, 64, device=device)
    mask = torch.ones(6, 7, dtype=torch.bool, device=device)
    mask[2] = False
    if kind == "additive":
        mask = torch.zeros(6, 7, device=device).masked_fill(~mask, -torch.inf)
    with sdpa():
        out = F.scaled_dot_product_attention(q, k, k, mask)
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's fused kernels for GPUs give the mean of all values
        want = PYTORCH(q, k, k, mask)
    assert taken and not out[:, :, 2].any() and not want[:, :, 2].any()


def test_by_name_and_by_position(device, taken):
    q, k, v = (torch.nn.Parameter(t(1, 2, 9, 64, device=device, seed=i)) for i in range(3))
    with sdpa():
        a = F.scaled_dot_product_attention(value=v, query=q, key=k, is_causal=True)
        b = F.scaled_dot_product_attention(q, k, v, None, 0.0, True)
    assert len(taken) == 2 and torch.equal(a, b)


@pytest.mark.parametrize("rows_first", [False, True])
def test_the_result_lies_in_memory_as_q_does(device, taken, rows_first):
    """The result lies as PyTorch's does: what follows, a view as [B, N, H * D], must not become a copy."""
    q = t(2, 9, 4, 64, device=device).transpose(1, 2) if rows_first else t(2, 4, 9, 64, device=device)
    with sdpa():
        out = F.scaled_dot_product_attention(q, q, q)
    assert taken and out.stride() == q.stride()


@pytest.mark.parametrize("heads", [1, 4])
def test_chunks_of_a_packed_tensor_are_not_copied(device, taken, heads):
    x = t(1, 1000, 3 * heads * 512, device=device)
    q, k, v = x.chunk(3, -1)
    if heads > 1:
        q, k, v = (y.unflatten(-1, (heads, 512)).transpose(1, 2) for y in (q, k, v))
    kept = []
    with sdpa():
        peak = peak_of(device, lambda: kept.append(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
    most = bytes_of(*kept) + (1 << 16)
    assert taken and peak <= most + (2**30 if device == "cuda" else 0)  # a GPU counts the operator's workspace, too


def test_offsets_beyond_32_bits(device):
    """Such offsets come from the memory between the rows."""
    x = torch.empty(520 << 22, dtype=BF16, device=device).view(520, 1 << 22)
    x = x[:, :64]  # no page but those of the rows is touched
    x.copy_(t(520, 64))
    assert x.stride(0) * x.shape[0] > 2**31
    with sdpa():
        out = F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)
    dense = x.contiguous()[None]
    torch.testing.assert_close(out, PYTORCH(dense, dense, dense, is_causal=True), atol=1e-2, rtol=2e-2)


def test_65536_rows(device, taken):
    """An image's decode has more than 2**31 scores so; on the CPU, a few of the rows are computed."""
    rows = 65536
    x = t(1, rows if device == "cuda" else 40, 3 * 512, device=device)
    q, k, v = x.chunk(3, -1)
    if device == "cpu":
        k, v = (t(1, rows, 512, seed=i) for i in (1, 2))
    with sdpa():
        out = F.scaled_dot_product_attention(q, k, v)
    some = torch.tensor([0, 1, q.shape[1] // 2, q.shape[1] - 1], device=device)
    exact = [x.double() for x in (q[:, some], k, v)]
    compare.assert_close("out", out[:, some], PYTORCH(*exact), yardstick(q[:, some], k, v, None))
    assert taken and explain(*(torch.empty(1, 1, rows, 512, dtype=BF16, device="meta"),) * 3, arch="sm_90").kernel


# ---- what is not ----


def odd_address(device):
    return t(2 * 9 * 64 + 1, device=device)[1:].view(1, 2, 9, 64)


PASSED_ON = {
    "float32": lambda d: ([t(1, 2, 9, 64, dtype=torch.float32, device=d)] * 3, {}),
    "float64": lambda d: ([t(1, 2, 9, 64, dtype=torch.float64, device=d)] * 3, {}),
    "head dim 20": lambda d: ([t(1, 2, 9, 20, device=d)] * 3, {}),
    "value dim 20": lambda d: ([t(1, 2, 9, 64, device=d)] * 2 + [t(1, 2, 9, 20, device=d)], {}),
    "dropout": lambda d: ([t(1, 2, 9, 64, device=d)] * 3, {"dropout_p": 0.5}),
    "2 dims": lambda d: ([t(9, 64, device=d)] * 3, {}),
    "5 dims": lambda d: ([t(1, 1, 2, 9, 64, device=d)] * 3, {}),
    "3 and 4 dims": lambda d: ([t(2, 9, 64, device=d)] + [t(1, 2, 9, 64, device=d)] * 2, {}),
    "meta": lambda d: ([t(1, 2, 9, 64, device="meta")] * 3, {}),
    "columns apart": lambda d: ([t(1, 2, 64, 9, device=d).mT] * 3, {}),
    "odd row stride": lambda d: ([t(1, 2, 9, 68, device=d)[..., :64]] * 3, {}),
    "odd address of q": lambda d: ([odd_address(d)] + [t(1, 2, 9, 64, device=d)] * 2, {}),
    "odd address of k": lambda d: ([t(1, 2, 9, 64, device=d), odd_address(d), t(1, 2, 9, 64, device=d)], {}),
    "odd address of v": lambda d: ([t(1, 2, 9, 64, device=d)] * 2 + [odd_address(d)], {}),
    "sparse": lambda d: ([t(1, 2, 9, 64, device=d).to_sparse()] * 3, {}),
    "one batch of keys": lambda d: ([t(2, 2, 9, 64, device=d)] + [t(1, 2, 9, 64, device=d)] * 2, {}),
    "one head of keys": lambda d: ([t(1, 2, 9, 64, device=d)] + [t(1, 1, 9, 64, device=d)] * 2, {}),
    "heads": lambda d: ([t(1, 4, 9, 64, device=d)] + [t(1, 2, 9, 64, device=d)] * 2, {}),
    "groups": lambda d: ([t(1, 4, 9, 64, device=d)] + [t(1, 3, 9, 64, device=d)] * 2, {"enable_gqa": True}),
    "types": lambda d: ([t(1, 2, 9, 64, device=d)] * 2 + [t(1, 2, 9, 64, device=d, dtype=F16)], {}),
    "mask of another type": lambda d: ([t(1, 2, 9, 64, device=d)] * 3 + [t(9, 9, device=d, dtype=F16)], {}),
    "mask of 1 dim": lambda d: ([t(1, 2, 9, 64, device=d)] * 3 + [t(9, device=d)], {}),
    "mask that does not fit": lambda d: ([t(1, 2, 9, 64, device=d)] * 3 + [t(3, 9, device=d)], {}),
    "mask and causal": lambda d: ([t(1, 2, 9, 64, device=d)] * 3 + [t(9, 9, device=d)], {"is_causal": True}),
    "causal of an int": lambda d: ([t(1, 2, 9, 64, device=d)] * 3, {"is_causal": 1}),
    "causal of a name": lambda d: ([t(1, 2, 9, 64, device=d)] * 3, {"is_causal": "top_left"}),
    "groups of an int": lambda d: ([t(1, 2, 9, 64, device=d)] * 3, {"enable_gqa": 1}),
    "infinite scale": lambda d: ([t(1, 2, 9, 64, device=d)] * 3, {"scale": torch.inf}),
    "no tensor": lambda d: ([t(1, 2, 9, 64, device=d)] * 2 + [None], {}),
    "no key": lambda d: ([t(1, 2, 9, 64, device=d)], {}),
    "another keyword": lambda d: ([t(1, 2, 9, 64, device=d)] * 3, {"causal": True}),
}


def outcome(function, args, options):
    """Returns a call's result, or its error: PyTorch's words, or the type where Python itself misses arguments."""
    torch.manual_seed(0)
    try:
        return function(*args, **options)
    except TypeError as error:
        return type(error)
    except Exception as error:
        return repr(error)


@WAYS
@pytest.mark.parametrize("name", PASSED_ON)
def test_passed_on(device, taken, name, way):
    args, options = PASSED_ON[name](device)
    want = outcome(PYTORCH, args, options)
    with way():
        got = outcome(F.scaled_dot_product_attention, args, options)
    assert not taken
    if isinstance(want, torch.Tensor) and not want.is_meta:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    else:
        assert type(got) is type(want) and (isinstance(got, torch.Tensor) or got == want)


def of_dual_numbers(attend, x):
    math_first = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]  # the latter has no derivatives of this kind
    with forward_ad.dual_level(), sdpa_kernel(math_first, set_priority=True):
        x = forward_ad.make_dual(x, x)
        return forward_ad.unpack_dual(attend(x, x, x)).tangent


TRANSFORMED = {
    "vmap": lambda attend, x: torch.vmap(attend)(x, x, x),
    "grad": lambda attend, x: torch.func.grad(lambda x: attend(x, x, x).sum())(x),
    "dual numbers": of_dual_numbers,
}


@WAYS
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed_tensors_are_passed_on(device, taken, name, way):
    function, x = TRANSFORMED[name], t(3, 2, 9, 64, device=device)
    PYTORCH(x, x, x)  # the first call of a process on a GPU sets PyTorch's own order of backends, whatever was asked
    want = function(PYTORCH, x)
    with way():
        got = function(attend, x)
    assert not taken and torch.equal(got, want)


@WAYS
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_ragged_tensors(device, way, layout):
    x = torch.nested.nested_tensor([t(5, 2, 64, device=device), t(7, 2, 64, device=device)], layout=layout)
    x = x.transpose(1, 2) if layout is torch.jagged else x
    want = PYTORCH(x, x, x)
    with way():
        got = attend(x, x, x)
    for ours, theirs in zip(got.unbind(), want.unbind(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=2e-2)


class Recorder(torch.Tensor):
    seen = ()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        Recorder.seen += ((function, len(args), kwargs),)
        return super().__torch_function__(function, types, args, kwargs)


@WAYS
def test_a_subclass_of_tensors_gets_pytorchs_own(taken, way):
    """PyTorch gets the very call, as it was written."""
    Recorder.seen = ()
    x = t(1, 2, 9, 64).as_subclass(Recorder)
    with way():
        assert type(F.scaled_dot_product_attention(x, x, value=x, is_causal=True)) is Recorder
    (call,) = (call for call in Recorder.seen if call[0] is PYTORCH.func)
    assert not taken and call[1] == 2 and call[2].keys() == {"value", "is_causal"}


@WAYS
def test_where_only_math_is_asked_for(device, taken, way):
    """The math backend can be differentiated twice."""
    x = t(1, 2, 9, 64, device=device).requires_grad_()
    with way(), sdpa_kernel(SDPBackend.MATH):
        (grad,) = torch.autograd.grad(attend(x, x, x).square().sum(), x, create_graph=True)
        assert torch.autograd.grad(grad.square().sum(), x)[0].isfinite().all() and not taken
        assert "ffpa_attn.forward.default" not in calls_in_the_graph(attend, x, x, x)[1]
    with way():
        attend(x, x, x)
    assert taken


@WAYS_OF_PYTHON
def test_torchscript(taken, way):
    """What is traced must hold for other inputs, and what is scripted knows PyTorch's function alone."""
    x, longer = t(1, 2, 9, 64), t(1, 2, 12, 64)
    with way(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced, scripted = torch.jit.trace(in_a_module, (x,), check_trace=False), torch.jit.script(in_a_module)
    assert not taken and torch.equal(traced(longer), scripted(longer))
    torch.testing.assert_close(traced(longer), PYTORCH(longer, longer, longer))


def in_a_module(x):
    return F.scaled_dot_product_attention(x, x, x)


@WAYS
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
def test_causal_biases_of_pytorch(way, variant, dtype):
    bias = getattr(torch.nn.attention.bias, variant)(9, 12)
    q, k = t(1, 2, 9, 64, dtype=dtype), t(1, 2, 12, 64, dtype=dtype)
    want = F.scaled_dot_product_attention(q, k, k, bias)
    with way():
        got = F.scaled_dot_product_attention(q, k, k, bias)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=2e-2)


# ---- where it works ----


def counts(taken, function=attend) -> bool:
    """Says whether a call is taken now."""
    before = len(taken)
    function(*[t(1, 2, 9, 64)] * 3)
    return len(taken) > before


def test_in_the_context_alone(taken):
    with sdpa():
        assert counts(taken)
        with sdpa():
            assert counts(taken)
        assert counts(taken)
    assert not counts(taken)
    with pytest.raises(RuntimeError, match="stop"), sdpa():
        raise RuntimeError("stop")
    assert not counts(taken)


def test_a_decorator_that_would_do_nothing():
    async def later():
        pass

    with pytest.raises(TypeError, match="with sdpa"):
        ffpa_attn.sdpa()(later)
    with pytest.raises(TypeError, match="`@sdpa\\(\\)`"):
        ffpa_attn.sdpa(later)


def test_as_a_decorator(taken):
    @sdpa()
    def attend(q, *, k, v):
        """This function's arguments have names of its own."""
        return F.scaled_dot_product_attention(q, k, v)

    @sdpa()
    def attend_twice(x):
        yield F.scaled_dot_product_attention(x, x, x)
        yield F.scaled_dot_product_attention(x, x, x)

    class Layer(torch.nn.Module):
        @sdpa()
        def forward(self, x):
            return attend(x, k=x, v=x)

    q = torch.randn(1, 2, 5, 64, dtype=BF16)
    want = F.scaled_dot_product_attention(q, q, q)
    assert not taken and attend.__doc__ == "This function's arguments have names of its own."
    torch.testing.assert_close(attend(q, k=q, v=q), want, atol=2e-2, rtol=2e-2)
    assert len(taken) == 1
    Layer()(q)
    assert len(taken) == 2
    for i, _ in enumerate(attend_twice(q)):
        assert len(taken) == 3 + i
        F.scaled_dot_product_attention(q, q, q)
    assert len(taken) == 4

    compiled = torch.compile(lambda x: attend(x, k=x, v=x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), want, atol=2e-2, rtol=2e-2)


def test_other_functions_are_left_alone():
    x = t(4, 4, dtype=torch.float32)
    with sdpa():
        assert torch.equal(torch.matmul(x, x), x @ x) and torch.equal(F.softmax(x, -1), x.softmax(-1))


def test_in_every_module(taken):
    """The function is replaced in modules that come and go between, too."""
    here = sys.modules[__name__]
    held = {name: value for name, value in vars(here).items() if not isinstance(value, list)}
    late = types.ModuleType("late")
    sys.modules["late"] = late
    try:
        with enabled():
            enable_sdpa()
            exec("from torch.nn.functional import scaled_dot_product_attention as own", vars(late))
            assert counts(taken) and counts(taken, F.scaled_dot_product_attention) and counts(taken, late.own)
            assert torch._C._nn.scaled_dot_product_attention is PYTORCH.func
            assert PYTORCH is not torch._C._nn.scaled_dot_product_attention  # this module's own name was replaced
        assert (
            F.scaled_dot_product_attention is late.own is imported_before is torch._C._nn.scaled_dot_product_attention
        )
    finally:
        del sys.modules["late"]
    assert all(vars(here)[name] is value for name, value in held.items()) and not counts(taken)
    disable_sdpa()
    assert not counts(taken)


@pytest.mark.parametrize("way, elsewhere", [(sdpa, False), (enabled, True), (dispatched, True)])
def test_threads(taken, way, elsewhere):
    found = []
    with way():
        thread = threading.Thread(target=lambda: found.append(counts(taken)))
        thread.start()
        thread.join()
        assert found == [elsewhere] and counts(taken)


def test_both_at_once(taken):
    with enabled(), sdpa():
        assert counts(taken) and len(taken) == 1
        attend(*[t(1, 2, 9, 20)] * 3)
    assert len(taken) == 1


@WAYS
def test_ffpa_may_call_pytorchs_own(device, taken, way, monkeypatch):
    """One of ffpa's backends is that function: the call must end there."""
    monkeypatch.setenv("FFPA_BACKEND", "sdpa")
    q = t(1, 2, 64, 64, device=device)
    want = PYTORCH(q, q, q)
    with way():
        got = attend(q, q, q), ffpa_attn.ffpa(q, q, q)
    assert len(taken) == 1
    for out in got:
        torch.testing.assert_close(out, want, atol=1e-2, rtol=2e-2)


@WAYS_OF_ALL_THREADS
def test_attention_of_nn(taken, way):
    layer = torch.nn.MultiheadAttention(64, 2, batch_first=True, dtype=BF16)
    x = t(2, 9, 64)
    want = layer(x, x, x, need_weights=False)[0]
    with way():
        got = layer(x, x, x, need_weights=False)[0]
    assert taken
    torch.testing.assert_close(got, want, atol=1e-2, rtol=2e-2)


@WAYS_OF_ALL_THREADS
def test_checkpoint(taken, way):
    x = t(1, 2, 9, 64).requires_grad_()
    with way():
        checkpoint(attend, x, x, x, use_reentrant=False).sum().backward()
    assert len(taken) == 2 and x.grad.isfinite().all()


def test_checkpoint_says_that_the_context_does_not_reach_it():
    x = t(1, 2, 9, 64).requires_grad_()
    with sdpa(), pytest.raises(CheckpointError):
        checkpoint(attend, x, x, x, use_reentrant=False).sum().backward()


AUTOCAST = {
    "float32": (torch.float32,) * 3,
    "mixed": (torch.float32, F16, BF16),
    "of the other type": (F16,) * 3,
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(device, taken, name):
    q, k, v = (t(1, 2, 9, 64, device=device, dtype=dtype).requires_grad_() for dtype in AUTOCAST[name])
    with torch.autocast(device, dtype=BF16):
        want = attend(q, k, v)
        with sdpa():
            out = attend(q, k, v)
    out.sum().backward()
    assert taken and out.dtype == want.dtype == BF16 and q.grad.dtype == q.dtype
    torch.testing.assert_close(out, want, atol=1e-2, rtol=2e-2)


def test_autocast_leaves_float64(taken):
    with torch.autocast("cpu", dtype=BF16), sdpa():
        assert attend(*[t(1, 2, 9, 64, dtype=torch.float64)] * 3).dtype == torch.float64
    assert not taken


@pytest.mark.parametrize("way", [sdpa, dispatched])
def test_dtensors(taken, way):
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("PyTorch is built without torch.distributed")
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        q = t(1, 4, 9, 64)
        cut = distribute_tensor(q, init_device_mesh("cpu", (1,)), [Shard(1)])
        with way():
            out = attend(cut, cut, cut)
        assert taken and type(out) is DTensor
        torch.testing.assert_close(out.full_tensor(), PYTORCH(q, q, q), atol=1e-2, rtol=2e-2)
        for dim, rows in ((2, q), (1, q[0])):  # rows are apart: context parallelism has plans of its own
            cut = distribute_tensor(rows, init_device_mesh("cpu", (1,)), [Shard(dim)])
            assert sdpa_override.attend(cut, cut, cut) is None
    finally:
        distributed.destroy_process_group()


# ---- compiled ----


def in_the_context(q, k, v, **options):
    with sdpa():
        return F.scaled_dot_product_attention(q, k, v, **options)


def calls_in_the_graph(function, *args, way=None, **options):
    """Returns (result, what the one graph calls)."""
    called = []

    def backend(graph, _):
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    if way is None:
        return compiled(*args, **options), called
    with way():
        return compiled(*args, **options), called


COMPILED = pytest.mark.parametrize(
    "function, way", [(in_the_context, None), (attend, sdpa), (attend, enabled)], ids=["inside", "around", "enabled"]
)


def test_modes_are_compiled_though_the_first_to_compile_was_enabled():
    overrides._get_overridable_functions.cache_clear()  # this is the state at first
    with enabled():
        assert PYTORCH.func in itertools.chain(*overrides.get_overridable_functions().values())


@WAYS_OF_PYTHON
def test_compiled_with_a_rule_that_lengths_decide(taken, way):
    compiled = torch.compile(
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=q.shape[2] > 1),
        backend="aot_eager",
        dynamic=True,
        fullgraph=True,
    )
    with way():
        for n in (9, 1, 12):
            q = t(1, 2, n, 64)
            torch.testing.assert_close(compiled(q), PYTORCH(q, q, q, is_causal=n > 1), atol=1e-2, rtol=2e-2)
    assert taken


@COMPILED
@pytest.mark.parametrize("rank", [3, 4])
def test_compiled(device, function, way, rank):
    q, k = t(1, 2, 20, 64, device=device), t(1, 2, 33, 64, device=device)
    q, k = (q, k) if rank == 4 else (q[0], k[0])
    out, called = calls_in_the_graph(function, q, k, k, way=way, is_causal=True)
    assert "ffpa_attn.forward.default" in called
    torch.testing.assert_close(out, PYTORCH(q, k, k, is_causal=True), atol=1e-2, rtol=2e-2)


@COMPILED
@pytest.mark.parametrize("name", ["float32", "head dim 20", "columns apart", "odd row stride"])
def test_compiled_passed_on(function, way, name):
    x = PASSED_ON[name]("cpu")[0][0]
    out, called = calls_in_the_graph(function, x, x, x, way=way)
    assert "ffpa_attn.forward.default" not in called and torch.equal(out, PYTORCH(x, x, x))


@pytest.mark.parametrize("name", ["vmap", "grad"])
def test_compiled_transforms_are_passed_on(taken, name):
    x = t(3, 2, 9, 64)
    compiled = torch.compile(lambda x: TRANSFORMED[name](attend, x), backend="eager", fullgraph=True)
    with sdpa():
        out = compiled(x)
    assert not taken
    torch.testing.assert_close(out, TRANSFORMED[name](PYTORCH, x), atol=1e-2, rtol=2e-2)


@WAYS
def test_compiled_for_all_lengths(way):
    counter = CompileCounterWithBackend("aot_eager")
    compiled, graphs = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True), []
    with way():
        for n in (20, 31, 56):
            q, k = t(1, 2, n, 64).requires_grad_(), t(1, 2, n + 5, 64)
            out = compiled(q, k, k)
            out.sum().backward()
            torch.testing.assert_close(out, ffpa_attn.ffpa(q, k, k))
            graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


class Attention(torch.nn.Module):
    def forward(self, q):
        return F.scaled_dot_product_attention(q, q, q)


@WAYS_OF_PYTHON
@pytest.mark.parametrize("strict", [False, True])
def test_exported(way, strict):
    q = t(1, 2, 9, 64)
    with way():
        program = torch.export.export(Attention(), (q,), strict=strict)
    assert "ffpa_attn.forward.default" in str(program.graph)
    torch.testing.assert_close(program.module()(q), PYTORCH(q, q, q), atol=1e-2, rtol=2e-2)


def test_compiled_under_autocast(taken):
    x = t(1, 2, 9, 64, dtype=torch.float32)
    with torch.autocast("cpu", dtype=BF16):
        out, called = calls_in_the_graph(attend, x, x, x, way=sdpa)
    assert "ffpa_attn.forward.default" in called and out.dtype == BF16


def test_what_was_compiled_before_is_compiled_anew(taken):
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert not counts(taken, compiled)
    with enabled():
        assert counts(taken, compiled)
    assert not counts(taken, compiled)


# ---- a model ----


def test_vae_decodes_the_same(device, taken):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    vae = (
        diffusers.AutoencoderKL(block_out_channels=(64,), norm_num_groups=8, layers_per_block=1).eval().to(device, BF16)
    )
    latents = t(1, 4, 16, 16, device=device)
    with torch.no_grad():
        want = vae.decode(latents).sample
        with sdpa():
            got = vae.decode(latents).sample
    assert len(taken) == 1
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_the_example_runs():
    pytest.importorskip("diffusers")
    command = [sys.executable, ROOT / "examples" / "vae_decode.py", "--latent", "8", "--calls", "1", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "max difference" in done.stdout, done.stderr
