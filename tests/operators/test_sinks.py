"""Sinks and the largest logits are what float64 says, in every form of a call, and as PyTorch sees the operators."""

import warnings

import compare
import ffpa_attn
import oracle
import pytest
import torch
from cases import Case, PackedCase, make_inputs, make_packed_inputs
from ffpa_attn import explain, ffpa, ffpa_fp8, ffpa_varlen, quantize_fp8
from ffpa_attn.backends import reference, sink_gradient
from ffpa_attn.operators import again, dispatch_keys, ops
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, vmap
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

OPS = torch.ops.ffpa_attn
INF = float("inf")
CASE = Case(batch=2, heads_q=4, heads_kv=2, n_q=20, n_k=33, d=64, d_v=72, dtype=torch.float16)
PACKED = PackedCase((9, 0, 20, 4), (20, 5, 13, 0), heads_q=4, heads_kv=2, d=64)
SINKS = (0.5, -INF, 30.0, -2.0)


def sinks_on(device, dtype=torch.float32, values=SINKS):
    return torch.tensor(values, dtype=dtype, device=device)


def dense(device, **changes):
    *qkv, mask = make_inputs(CASE.with_(**changes), device)
    return [x.detach().requires_grad_() for x in qkv], mask


def gradients(out, lse, inputs, seed=1):
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(x.shape, generator=generator).to(x.device) for x in (out, lse)]
    wanted = [g.masked_fill(x == -INF, 0.0).to(x.dtype) for g, x in zip(grads, (out, lse), strict=True)]
    return torch.autograd.grad([out, lse], inputs, wanted)


def close(found, want, **names):
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dsinks", "dmask"), found, want, strict=False):
        torch.testing.assert_close(x.double(), y.double(), atol=1e-2, rtol=5e-3, msg=lambda m, n=name: f"{n}: {m}")


def exact(inputs, mask, sinks, **rule):
    """Returns the oracle's results and gradients."""
    doubles = [x.detach().double().requires_grad_() for x in (*inputs, sinks)]
    if mask is not None and mask.requires_grad:
        doubles.append(mask.detach().double().requires_grad_())
        mask = doubles[-1]
    out, lse = oracle.attention(*doubles[:3], mask=mask, sinks=doubles[3], **rule)
    return [out, lse, *gradients(out, lse, doubles)]


# ---- values and gradients ----

RULES = [
    {},
    {"causal": True, "scale": 0.3, "softcap": 4.0},
    {"window": (5, 2), "align": "top_left"},
    {"window": (2, 0), "scale": -0.2},
]
SHAPES = [{}, {"n_q": 33, "n_k": 7}, {"layout": "BNHD"}, {"heads_q": 4, "heads_kv": 1, "n_q": 1}, {"n_k": 0}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_dense(device, rule, shape):
    """With seven keys and 33 rows, some rows see none: the LSE is then the sink, or -inf without one."""
    inputs, _ = dense(device, **shape)
    sinks, layout = sinks_on(device).requires_grad_(), {"layout": shape.get("layout", "BHND")}
    out, lse, largest = ffpa(*inputs, sinks=sinks, return_lse=True, return_max_logits=True, **rule, **layout)
    close([out, lse, *gradients(out, lse, [*inputs, sinks])], exact(inputs, None, sinks, **rule, **layout))
    rows = inputs if layout["layout"] == "BHND" else [x.transpose(1, 2) for x in inputs]
    torch.testing.assert_close(largest.double(), oracle.largest_scores(*rows[:2], **rule), atol=1e-4, rtol=1e-4)
    assert torch.equal(ffpa(*inputs, return_max_logits=True, **rule, **layout)[1], largest), "sinks count"


@pytest.mark.parametrize(
    "kind", ["bool", "bool-some-rows-empty", "additive-2d", "additive-some-rows-empty", "additive-f32", "rows"]
)
def test_masks(device, kind):
    """Numbers that a mask adds are no scores; -inf hides a pair, in one that is expanded, too."""
    (q, k, v), mask = dense(device, mask={"rows": "additive"}.get(kind, kind))
    if kind == "rows":
        mask = (
            mask[..., :1, :].clone().masked_fill_(torch.arange(33, device=device) % 3 == 0, -INF).expand(2, 4, 20, 33)
        )
    mask, sinks = mask.detach(), sinks_on(device).requires_grad_()
    inputs = [q, k, v]
    if mask.dtype != torch.bool:
        mask.requires_grad_()
    out, lse, largest = ffpa(*inputs, mask=mask, sinks=sinks, return_lse=True, return_max_logits=True, causal=True)
    found = gradients(out, lse, [*inputs, sinks, *[mask] * mask.requires_grad])
    close([out, lse, *found], exact(inputs, mask, sinks, causal=True))
    want = oracle.largest_scores(q, k, mask=mask.detach(), causal=True)
    torch.testing.assert_close(largest.double(), want, atol=1e-4, rtol=1e-4)
    out, largest_alone = ffpa(q, k, v, mask=mask, return_max_logits=True, causal=True)
    assert torch.equal(largest, largest_alone)


def test_a_head_that_sees_nothing(device):
    (q, k, v), _ = dense(device)
    mask = torch.zeros(4, 1, 33, dtype=torch.bool, device=device)
    mask[1:] = True
    sinks = sinks_on(device).requires_grad_()
    out, lse, largest = ffpa(q, k, v, mask=mask, sinks=sinks, return_lse=True, return_max_logits=True)
    assert (largest[:, 0] == -INF).all() and largest[:, 1:].isfinite().all()
    assert not out[:, 0].any() and (lse[:, 0] == SINKS[0]).all()
    of_lse = torch.autograd.grad(lse.sum(), sinks)[0]
    assert of_lse[0] == lse[:, 0].numel() and of_lse[1] == 0


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_packed(device, rule):
    """One sequence has no rows, one no keys; rows of no sequence keep 0 and -inf."""
    case = PackedCase((9, 0, 20, 4), (20, 5, 13, 0), heads_q=4, heads_kv=2, d=64, spare=3)
    q, k, v, *offsets = make_packed_inputs(case, device)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    sinks = sinks_on(device).requires_grad_()
    out, lse, largest = ffpa_varlen(*inputs, *offsets, sinks=sinks, return_lse=True, return_max_logits=True, **rule)
    grads = gradients(out, lse, [*inputs, sinks])
    assert not out[33:].any() and (lse[:, 33:] == -INF).all() and largest.shape == (4, 4)
    generator = torch.Generator().manual_seed(1)
    of_out, of_lse = (torch.randn(x.shape, generator=generator).to(device) for x in (out, lse))
    doubles = [x.detach().double().nan_to_num(0.0).requires_grad_() for x in (*inputs, sinks)]
    doubles[3] = sinks.detach().double().requires_grad_()
    total = 0.0
    for i, (rows, keys) in enumerate(zip(*(cu.tolist()[:-1] for cu in offsets[:2]), strict=True)):
        end, last = (cu.tolist()[i + 1] for cu in offsets[:2])
        one = [
            x[None, a:b].transpose(1, 2)
            for x, a, b in zip(doubles[:3], (rows, keys, keys), (end, last, last), strict=True)
        ]
        want, want_lse = oracle.attention(*one, sinks=doubles[3], **rule)
        close([out[rows:end].transpose(0, 1), lse[:, rows:end]], [want[0], want_lse[0]])
        torch.testing.assert_close(
            largest[i].double(), oracle.largest_scores(*one[:2], **rule)[0], atol=1e-4, rtol=1e-4
        )
        total = total + (want[0].transpose(0, 1) * of_out[rows:end].to(out.dtype).double()).sum()
        total = total + torch.where(want_lse == -INF, 0.0, want_lse * of_lse[None, :, rows:end].double()).sum()
    *exact_grads, of_sinks = torch.autograd.grad(total, doubles)
    for x, y in zip(grads[:3], exact_grads, strict=True):  # P and dS in 16 bits: single elements may err by 2e-2
        assert (x.double() - y).norm() <= 1e-2 * y.norm()
    torch.testing.assert_close(grads[3].double(), of_sinks, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinks_of_16_bits(device, dtype):
    inputs, _ = dense(device)
    sinks = sinks_on(device, dtype, (0.3, -1.7, 2.0, -INF)).requires_grad_()
    out, lse = ffpa(*inputs, sinks=sinks, return_lse=True)
    found = gradients(out, lse, [*inputs, sinks])
    assert found[3].dtype == dtype
    close([out, lse, *found], exact(inputs, None, sinks))
    strided = torch.stack([sinks.detach(), sinks.detach() + 1], 1)[:, 0]
    assert not strided.is_contiguous() and torch.equal(ffpa(*inputs, sinks=strided), out)


@pytest.mark.parametrize("form", ["dense", "packed"])
def test_plans_get_float32(form, monkeypatch):
    """Kernels read sinks as float32, one after the other."""
    given, run = [], ops.run
    monkeypatch.setattr(ops, "run", lambda *args, **more: (given.append(more["sinks"]), run(*args, **more))[1])
    sinks = sinks_on("cpu", torch.bfloat16, (0.5, 7.0, 1.0, 7.0, 2.0, 7.0, 3.0, 7.0))[::2]
    with torch.no_grad():
        if form == "dense":
            ffpa(*dense("cpu")[0], sinks=sinks)
        else:
            ffpa_varlen(*make_packed_inputs(PACKED, "cpu"), sinks=sinks)
    assert len(given) == 1 and given[0].dtype == torch.float32 and given[0].is_contiguous()
    assert given[0].tolist() == [0.5, 1.0, 2.0, 3.0]


def test_sums_of_the_gradient_are_float32(device):
    """Each product is beyond float16, and they cancel but for 1."""
    out = torch.full((1, 1, 2, 64), 300.0, dtype=torch.float16, device=device)
    grad_out = torch.tensor([300.0, -300.0], device=device).repeat(32).to(torch.float16).expand_as(out).clone()
    out[..., 0], grad_out[..., 0] = 1.0, 1.0
    out[..., 1] = 0.0
    lse = torch.zeros(1, 1, 2, device=device)
    found = OPS.sink_gradient(grad_out, None, out, lse, torch.zeros(1, device=device))
    assert found.tolist() == [-2.0]


def test_no_sinks_are_infinite_ones(device):
    inputs, _ = dense(device, n_q=33, n_k=7)
    none = sinks_on(device, values=[-INF] * 4).requires_grad_()
    found, want = ([*ffpa(*inputs, causal=True, return_lse=True, **more)] for more in ({"sinks": none}, {}))
    found += gradients(*found, [*inputs, none])
    want += gradients(*want, inputs)
    for x, y in zip(found[:5], want, strict=True):
        torch.testing.assert_close(x, y)
    assert not found[5].any() and (found[1] == -INF).any()


@pytest.mark.parametrize("value", [80.0, 3e4, 1e30])
def test_sinks_far_above_scores(device, value):
    inputs, _ = dense(device)
    sinks = sinks_on(device, values=[value] * 4).requires_grad_()
    out, lse = ffpa(*inputs, sinks=sinks, return_lse=True)
    assert not out.any() and (lse == value).all()
    *grads, of_sinks = torch.autograd.grad([out.float().sum() + lse.sum()], [*inputs, sinks])
    assert not any(x.any() for x in grads)
    torch.testing.assert_close(of_sinks, torch.full_like(of_sinks, 2 * 20))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("direction", ["equal", "half", "no sink"])
def test_far_rows_keep_to_their_lse(device, sign, direction):
    """Scores are all ±20480, where a gradient computes softmax once more, but of rows whose LSE has more than their keys:
    sinks that weigh as much as all keys, or half of that.
    """
    q = torch.full((1, 1, 3, 64), 16.0, dtype=torch.float16, device=device)
    k = torch.full((1, 1, 4, 64), sign * 20.0, dtype=torch.float16, device=device)
    v = torch.randn(1, 1, 4, 64, generator=torch.Generator().manual_seed(0)).to(q)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    more = {"equal": 0.0, "half": torch.tensor(0.5).log().item(), "no sink": -INF}[direction]
    sinks = torch.tensor([sign * 20480.0 + torch.tensor(4.0).log().item() + more], device=device)
    share = 1.0 if direction == "no sink" else 1 / (1 + torch.tensor(more).exp().item())
    out = ffpa(*inputs, scale=1.0, sinks=sinks.requires_grad_())
    torch.testing.assert_close(
        out, (v.mean(2, keepdim=True) * share).expand_as(out).to(out.dtype), atol=2e-3, rtol=2e-3
    )
    _, _, dv, of_sinks = torch.autograd.grad([out.float().sum()], [*inputs, sinks])
    torch.testing.assert_close(dv, torch.full_like(dv, 3 * share / 4), atol=3e-3, rtol=3e-3)
    want = -(1 - share) * share * v.float().mean(2).sum() * 3
    torch.testing.assert_close(of_sinks[0], want, atol=2e-3, rtol=2e-2)


def test_merged_parts_have_one_sink(device):
    """A part without sinks and one with them make the whole."""
    (q, k, v), _ = dense(device)
    sinks = sinks_on(device).requires_grad_()
    out, lse = ffpa(q, k, v, sinks=sinks, return_lse=True)
    with_sink = ffpa(q, k[:, :, :9], v[:, :, :9], sinks=sinks, return_lse=True)
    merged = ffpa_attn.merge(*with_sink, *ffpa(q, k[:, :, 9:], v[:, :, 9:], return_lse=True))
    close([*merged, *gradients(*merged, [q, k, v, sinks])], [out, lse, *gradients(out, lse, [q, k, v, sinks])])


@pytest.mark.parametrize("cap", [1, 1024])
def test_of_many_tiles(device, cap, monkeypatch):
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap))
    monkeypatch.setattr(sink_gradient, "_MOST_ELEMENTS", 10000)
    monkeypatch.setenv("FFPA_BACKEND", "reference")
    monkeypatch.setattr(reference, "_ENOUGH_BYTES", 1 << 18)
    inputs, _ = dense(device, n_q=300, n_k=200)
    sinks = sinks_on(device).requires_grad_()
    out, lse, largest = ffpa(*inputs, causal=True, sinks=sinks, return_lse=True, return_max_logits=True)
    close([out, lse, *gradients(out, lse, [*inputs, sinks])], exact(inputs, None, sinks, causal=True))
    torch.testing.assert_close(largest.double(), oracle.largest_scores(*inputs[:2], causal=True), atol=1e-4, rtol=1e-4)


def test_bits_repeat(device):
    inputs, _ = dense(device)
    sinks = sinks_on(device).requires_grad_()
    out, lse = ffpa(*inputs, sinks=sinks, return_lse=True)
    first = gradients(out, lse, [*inputs, sinks])
    for _ in range(3):
        assert all(
            torch.equal(x, y)
            for x, y in zip(
                first, gradients(*ffpa(*inputs, sinks=sinks, return_lse=True), [*inputs, sinks]), strict=True
            )
        )


def test_a_nan_is_a_nan(device):
    (q, k, v), _ = dense(device)
    with torch.no_grad():
        q[1, 2, 5, 7] = torch.nan
        out, lse, largest = ffpa(q, k, v, sinks=sinks_on(device), return_lse=True, return_max_logits=True)
    assert out.isnan().any(-1).sum() == lse.isnan().sum() == 1 and lse[1, 2, 5].isnan()
    assert not largest[0].isnan().any()


@pytest.mark.parametrize("which", ["sinks", "q"])
def test_only_what_needs_a_gradient_is_computed(device, which, monkeypatch):
    with torch.no_grad():
        (q, k, v), _ = dense(device)
        q, k, v = (x.clone() for x in (q, k, v))
    sinks, ran = sinks_on(device), []
    for name in ("gradients_of", "gradient_of_sinks"):
        real = getattr(dispatch_keys, name)
        monkeypatch.setattr(dispatch_keys, name, lambda *x, n=name, r=real, **o: (ran.append(n), r(*x, **o))[1])
    wanted = {"sinks": sinks, "q": q}[which].requires_grad_()
    torch.autograd.grad(ffpa(q, k, v, sinks=sinks).float().sum(), wanted)
    assert ran == ["gradient_of_sinks" if which == "sinks" else "gradients_of"]


# ---- places for results ----


def test_to_an_output(device):
    with torch.no_grad():
        (q, k, v), mask = dense(device, mask="additive")
        sinks = sinks_on(device)
        for more in ({}, {"mask": mask}, {"causal": True}):
            want, want_lse, want_largest = ffpa(q, k, v, sinks=sinks, return_lse=True, return_max_logits=True, **more)
            out = torch.empty_like(want)
            found = ffpa(q, k, v, sinks=sinks, out=out, return_max_logits=True, return_lse=True, **more)
            assert found[0] is out and all(
                torch.equal(x, y) for x, y in zip(found, (want, want_lse, want_largest), strict=True)
            )
            found = ffpa(q, k, v, out=out, return_max_logits=True, **more)
            assert len(found) == 2 and torch.equal(found[1], want_largest)
            assert torch.equal(ffpa(q, k, v, sinks=sinks, out=out, **more), want)
        q, k, v, *offsets = make_packed_inputs(PACKED, device)
        asked = {"sinks": sinks, "return_lse": True, "return_max_logits": True}
        want, out = ffpa_varlen(q, k, v, *offsets, **asked), torch.empty_like(q)
        found = ffpa_varlen(q, k, v, *offsets, out=out, **asked)
        assert found[0] is out and all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
    with pytest.raises(ValueError, match="`out` is given but an input requires grad"):
        ffpa(*(x.detach() for x in dense(device)[0]), out=torch.empty(2, 4, 20, 72), sinks=sinks.requires_grad_())


def test_what_is_returned(device):
    inputs, _ = dense(device)
    out, _, largest = ffpa(*inputs, return_lse=True, return_max_logits=True)
    assert largest.dtype == torch.float32 and largest.shape == (2, 4) and not largest.requires_grad
    only = ffpa(*inputs, return_max_logits=True)
    assert len(only) == 2 and torch.equal(only[1], largest)
    assert isinstance(ffpa(*inputs, sinks=sinks_on(device)), torch.Tensor)
    torch.autograd.grad(out.float().sum(), inputs)  # QK-clip asks for both
    assert ffpa(*(x[:, :, :0] for x in inputs), return_max_logits=True)[1].eq(-INF).all()
    assert ffpa(*(x[:0] for x in inputs), return_max_logits=True)[1].shape == (0, 4)


def test_8_bit_floats(device):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("8-bit floats need sm_89")
    made = [quantize_fp8(x.detach(), per="block") for x in dense(device, d_v=64, n_q=200, n_k=150)[0]]
    tensors, scales = zip(*made, strict=True)
    rows = [x.double() * s.repeat_interleave(128, 2)[:, :, : x.shape[2], None] for x, s in made]
    sinks = sinks_on(device)
    keywords = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True), out_dtype=torch.float32, causal=True)
    out, lse, largest = ffpa_fp8(*tensors, **keywords, sinks=sinks, return_lse=True, return_max_logits=True)
    want, want_lse = oracle.attention(*rows, sinks=sinks, causal=True)
    atol = 1e-4 if device == "cpu" else 6e-2  # a GPU rounds probabilities to 8 bits
    torch.testing.assert_close(out.double(), want, atol=atol, rtol=1e-4)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-2 if device == "cuda" else 1e-4, rtol=1e-4)
    torch.testing.assert_close(largest.double(), oracle.largest_scores(*rows[:2], causal=True), atol=1e-2, rtol=1e-3)
    for x, y in zip(
        ffpa_fp8(*tensors, **keywords, return_max_logits=True),
        ffpa_fp8(*tensors, **keywords, return_lse=True),
        strict=True,
    ):
        assert x.shape == y.shape or x.shape == (2, 4)
    with pytest.raises(ValueError, match="`sinks` requires grad, and ffpa_fp8 has no gradients"):
        ffpa_fp8(*tensors, sinks=sinks.requires_grad_())


# ---- as PyTorch sees them ----


class TestOpcheck:
    @pytest.mark.parametrize("name", ["forward", "forward_max_logits"])
    @pytest.mark.parametrize("kind", [None, "bool", "additive"])
    def test_forward(self, device, name, kind):
        inputs, mask = dense(device, mask=kind)
        sinks = sinks_on(device).requires_grad_()
        torch.library.opcheck(getattr(OPS, name).default, (*inputs, mask, sinks), {"causal": True})

    @pytest.mark.parametrize("name", ["varlen_forward", "varlen_forward_max_logits"])
    def test_packed(self, device, name):
        q, k, v, *offsets = make_packed_inputs(PACKED, device)
        inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        torch.library.opcheck(getattr(OPS, name).default, (*inputs, *offsets, sinks_on(device).requires_grad_()))

    @pytest.mark.parametrize("name", ["forward_out", "forward_out_max_logits"])
    def test_to_an_output(self, device, name):
        q, k, v = (x.detach() for x in dense(device)[0])
        out = q.new_empty(2, 4, 20, 72)
        torch.library.opcheck(getattr(OPS, name).default, (q, k, v, out, None, sinks_on(device)))
        q, k, v, *offsets = make_packed_inputs(PACKED, device)
        args = (q, k, v, torch.empty_like(q), *offsets, sinks_on(device))
        torch.library.opcheck(getattr(OPS, f"varlen_{name}").default, args)

    @pytest.mark.parametrize("name", ["fp8_forward", "fp8_forward_max_logits"])
    def test_8_bit_floats(self, device, name, monkeypatch):
        """opcheck compares by torch.allclose, which knows no 8-bit floats."""
        if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("8-bit floats need sm_89")
        x = [quantize_fp8(x.detach())[0] for x in dense(device, d_v=64)[0]]
        allclose = torch.allclose
        monkeypatch.setattr(torch, "allclose", lambda a, b, **o: allclose(a.float(), b.float(), **o))
        args, options = (*x, None, None, None, sinks_on(device)), {"out_dtype": torch.bfloat16}
        torch.library.opcheck(getattr(OPS, name).default, args, options)

    @pytest.mark.parametrize("form", ["BHND", "BNHD", "packed"])
    def test_sink_gradient(self, device, form):
        if form == "packed":
            q, k, v, *offsets = make_packed_inputs(PACKED, device)
            out, lse = OPS.varlen_forward(q, k, v, *offsets)
        else:
            inputs, _ = dense(device, layout=form)
            out, lse = OPS.forward(*(x.detach() for x in inputs), layout=form)
        options = {} if form == "packed" else {"layout": form}
        for of_lse in (None, torch.randn_like(lse)):
            args = (torch.randn_like(out), of_lse, out, lse, sinks_on(device))
            for operator in (OPS.sink_gradient, OPS.sink_gradient_delta):
                torch.library.opcheck(operator.default, args, options)
            delta = OPS.sink_gradient_delta(*args, **options)[1]
            if form == "packed":
                torch.library.opcheck(OPS.varlen_backward.default, (*args[:2], q, k, v, out, lse, *offsets, delta))
            else:
                args = *args[:2], *(x.detach() for x in inputs), out, lse
                torch.library.opcheck(OPS.backward.default, (*args, None, delta), options)


def test_sinks_by_name_and_by_place(device):
    (q, k, v), _ = dense(device)
    sinks = sinks_on(device).requires_grad_()
    by_name, by_place = OPS.forward(q, k, v, sinks=sinks), OPS.forward(q, k, v, None, sinks)
    assert torch.equal(by_name[0], by_place[0])
    for x, y in zip(*(gradients(*r, [q, k, v, sinks]) for r in (by_name, by_place)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("kind", [None, "additive"])
def test_compile(device, kind, largest):
    inputs, mask = dense(device, mask=kind)
    sinks = torch.nn.Parameter(sinks_on(device))

    def attend(q, k, v, sinks):
        return ffpa(q, k, v, mask=mask, sinks=sinks, return_lse=True, return_max_logits=largest, causal=True)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    found, want = compiled(*inputs, sinks), attend(*inputs, sinks)
    assert counter.frame_count == 1 and len(found) == 2 + largest
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
    for x, y in zip(*(gradients(*r[:2], [*inputs, sinks]) for r in (found, want)), strict=True):
        torch.testing.assert_close(x, y, atol=0, rtol=0)


def test_compile_of_packed_sequences(device):
    q, k, v, *offsets = make_packed_inputs(PACKED, device)
    attend = lambda *x: ffpa_varlen(*x[:3], *offsets, sinks=x[3], return_lse=True, return_max_logits=True)  # noqa: E731
    inputs = [x.detach().requires_grad_() for x in (q, k, v, sinks_on(device))]
    found, want = torch.compile(attend, backend="aot_eager", fullgraph=True)(*inputs), attend(*inputs)
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
    for x, y in zip(*(gradients(*r[:2], inputs) for r in (found, want)), strict=True):
        torch.testing.assert_close(x, y, atol=0, rtol=0)


def test_compile_to_an_output(device):
    q, k, v = (x.detach() for x in dense(device)[0])
    sinks = sinks_on(device)

    def attend(q, k, v):
        out = q.new_zeros(2, 4, 20, 72)
        _, largest = ffpa(q, k, v, out=out, sinks=sinks, return_max_logits=True)
        return out * 2, largest

    found = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v)
    assert all(torch.equal(x, y) for x, y in zip(found, attend(q, k, v), strict=True))


def test_autocast(device):
    inputs = [x.detach().float().requires_grad_() for x in dense(device)[0]]
    sinks = sinks_on(device).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        out, lse, largest = ffpa(*inputs, sinks=sinks, return_lse=True, return_max_logits=True)
    of_sinks = torch.autograd.grad(out.float().sum() + lse.masked_fill(lse == -INF, 0).sum(), sinks)[0]
    assert out.dtype == torch.bfloat16 and of_sinks.dtype == largest.dtype == torch.float32
    want = ffpa(*(x.bfloat16() for x in inputs), sinks=sinks, return_max_logits=True)
    assert torch.equal(out, want[0]) and torch.equal(largest, want[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(device, use_reentrant):
    inputs, _ = dense(device)
    sinks = sinks_on(device).requires_grad_()
    attend = lambda *x: ffpa(*x[:3], sinks=x[3])  # noqa: E731
    want = torch.autograd.grad(attend(*inputs, sinks).float().square().sum(), [*inputs, sinks])
    checkpoint(attend, *inputs, sinks, use_reentrant=use_reentrant).float().square().sum().backward()
    assert all(torch.equal(x.grad, y) for x, y in zip([*inputs, sinks], want, strict=True))


@pytest.mark.parametrize("saved", [False, True])
def test_selective_checkpoint(device, saved, monkeypatch):
    inputs, _ = dense(device)
    sinks, runs, run = sinks_on(device).requires_grad_(), [], ops._forward
    monkeypatch.setattr(ops, "_forward", lambda *x: (runs.append(x), run(*x))[1])

    def policy(ctx, op, *args, **kwargs):
        keep = saved and op is OPS.forward_max_logits.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k, v, sinks):
        return (ffpa(q * 1.5, k, v, sinks=sinks, return_max_logits=True)[0].float() * 2).sum()

    want = torch.autograd.grad(block(*inputs, sinks), [*inputs, sinks])
    runs.clear()
    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    loss = checkpoint(block, *inputs, sinks, use_reentrant=False, context_fn=contexts)
    got = torch.autograd.grad(loss, [*inputs, sinks])
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)) and len(runs) == (1 if saved else 2)


def test_second_derivatives_say_so(device):
    inputs, _ = dense(device)
    sinks = sinks_on(device).requires_grad_()
    for wanted in (sinks, inputs[0]):
        out = ffpa(*inputs, sinks=sinks)
        (first,) = torch.autograd.grad(out.float().square().sum(), wanted, create_graph=True)
        with pytest.raises(RuntimeError, match="ffpa's gradients cannot be differentiated again"):
            torch.autograd.grad(first.float().sum(), sinks)
    with pytest.raises(RuntimeError, match="ffpa's gradients cannot be differentiated again"):
        grad(lambda s: grad(lambda s: ffpa(*inputs, sinks=s).float().square().sum())(s).sum())(sinks)
    with pytest.raises(NotImplementedError, match="ffpa has no forward-mode derivatives"):
        torch.func.jvp(lambda s: ffpa(*inputs, sinks=s), (sinks,), (sinks,))


# ---- torch.func ----


def loss(q, k, v, sinks, **rule):
    out, lse, largest = ffpa(q, k, v, sinks=sinks, return_lse=True, return_max_logits=True, **rule)
    return out.float().square().sum() + lse.masked_fill(lse == -INF, 0.0).sum() + largest.sum()


def test_grad_is_autograds(device):
    inputs, _ = dense(device)
    sinks = sinks_on(device).requires_grad_()
    want = torch.autograd.grad(loss(*inputs, sinks), [*inputs, sinks])
    found = grad(loss, argnums=(0, 1, 2, 3))(*(x.detach() for x in (*inputs, sinks)))
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize(
    "dims", [(0, 0, 0, None), (0, 0, 0, 0), (None, None, None, 0), (None, 0, 0, 1), (0, None, None, None)]
)
def test_maps(device, dims):
    """What is mapped joins the batch; sinks that are mapped make a call of each entry."""
    tensors = [
        torch.stack([x.detach(), x.detach() * 0.5, -x.detach()])
        for x in (*dense(device)[0], sinks_on(device).clamp(-9))
    ]
    given = [x[0] if d is None else x.movedim(0, d) for x, d in zip(tensors, dims, strict=True)]
    entries = [[x[0]] * 3 if d is None else x.unbind() for x, d in zip(tensors, dims, strict=True)]
    attend = lambda *x: ffpa(*x[:3], sinks=x[3], return_lse=True, return_max_logits=True)  # noqa: E731
    want = [attend(*entry) for entry in zip(*entries, strict=True)]
    for x, y in zip(vmap(attend, in_dims=dims)(*given), zip(*want, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(y), atol=2e-3, rtol=2e-3)
    without_lse = lambda *x: ffpa(*x[:3], sinks=x[3])  # noqa: E731
    found = vmap(without_lse, in_dims=dims)(*given)
    torch.testing.assert_close(found, torch.stack([x for x, _, _ in want]), atol=2e-3, rtol=2e-3)
    want = [grad(loss, argnums=(0, 3))(*entry) for entry in zip(*entries, strict=True)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="There is a performance drop")
        found = vmap(grad(loss, argnums=(0, 3)), in_dims=dims)(*given)
    for x, y in zip(found, zip(*want, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(y), atol=2e-2, rtol=2e-2)


def test_a_map_over_nothing(device):
    (q, k, v), _ = dense(device)
    sinks = sinks_on(device).expand(0, 4)
    out, largest = vmap(lambda s: ffpa(q, k, v, sinks=s, return_max_logits=True))(sinks)
    assert out.shape == (0, 2, 4, 20, 72) and largest.shape == (0, 2, 4)
    of_q, of_sinks = vmap(grad(loss, argnums=(0, 3)), in_dims=(None, None, None, 0))(q, k, v, sinks)
    assert of_q.shape == (0, *q.shape) and of_sinks.shape == (0, 4)


def test_flops_are_those_of_a_call_without(device):
    from torch.utils.flop_counter import FlopCounterMode

    inputs, _ = dense(device)
    counts = []
    for more in ({}, {"sinks": sinks_on(device).requires_grad_()}, {"return_max_logits": True}):
        with FlopCounterMode(display=False) as counter:
            out = ffpa(*inputs, **more)
            (out[0] if isinstance(out, tuple) else out).float().sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] and counts == [counts[0]] * 3


def test_fake_and_meta_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(8, 32, 131072, 512, dtype=torch.bfloat16, requires_grad=True)
        sinks = torch.empty(32, requires_grad=True)
        out, largest = ffpa(q, q, q, sinks=sinks, return_max_logits=True)
        assert out.shape == q.shape and largest.shape == (8, 32)
        assert torch.autograd.grad(out.sum(), sinks)[0].shape == (32,)
    q = torch.empty(2, 4, 100, 512, dtype=torch.float16, device="meta")
    assert ffpa(q, q, q, sinks=torch.empty(4, device="meta"), return_max_logits=True)[1].shape == (2, 4)


# ---- the short way, and what is said ----


def test_a_second_call_plans_nothing(device, monkeypatch):
    """Parameters of a model are known, too; calls that want their gradients go the long way."""
    monkeypatch.setattr(again, "_known", {})
    with torch.no_grad():
        (q, k, v), _ = dense(device)
        q, k, v = (x.clone() for x in (q, k, v))
        for sinks in (sinks_on(device), torch.nn.Parameter(sinks_on(device)), sinks_on(device, torch.bfloat16)):
            for more in ({}, {"causal": True, "return_lse": True}):
                first = ffpa(q, k, v, sinks=sinks, **more)
                other = torch.ops.ffpa_attn.forward(q, k, v, None, sinks + 1, causal=bool(more))[0]
                known = len(again._known)
                with monkeypatch.context() as patch:
                    patch.setattr(ops, "_forward", None)
                    found = ffpa(q, k, v, sinks=sinks, **more)
                    moved = ffpa(q, k, v, sinks=sinks + 1, **more)
                pairs = zip(first, found, strict=True) if more else [(first, found)]
                assert all(torch.equal(x, y) for x, y in pairs)
                assert torch.equal(moved[0] if more else moved, other) and len(again._known) == known > 0
        assert not torch.equal(ffpa(q, k, v), ffpa(q, k, v, sinks=sinks_on(device)))
        for wrong in (torch.zeros(3, device=device), torch.zeros(4, dtype=torch.float64, device=device), [0.0] * 4):
            with pytest.raises((TypeError, ValueError), match="`sinks`"):
                ffpa(q, k, v, sinks=wrong)
    known = dict(again._known)
    sinks = sinks_on(device).requires_grad_()
    for _ in range(2):
        assert ffpa(q, k, v, sinks=sinks).requires_grad and ffpa(q, k, v, return_max_logits=True)[1].shape == (2, 4)
    assert again._known == known


def test_explain(device):
    inputs, mask = dense(device, mask="additive")
    plain = explain(*inputs, arch="sm_90")
    assert "sinks" not in str(plain.problem) and not plain.problem.largest
    asked = explain(*inputs, sinks=sinks_on(device), return_max_logits=True, arch="sm_90")
    assert asked.problem.sinks and asked.problem.largest and " sinks largest logits " in str(asked)
    assert not explain(
        *inputs, sinks=sinks_on(device), return_max_logits=True, direction="backward", arch="sm_90"
    ).problem.sinks
    assert not explain(
        *inputs, mask=mask, return_max_logits=True, arch="sm_90"
    ).problem.largest  # it has a call of its own


@pytest.mark.parametrize(
    "more, why",
    [({"sinks": True}, "SDPA has no sinks"), ({"return_max_logits": True}, "SDPA returns no largest logits")],
)
def test_sdpa_refuses(more, why, monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", "sdpa")
    q = torch.zeros(1, 4, 20, 64, dtype=torch.bfloat16)
    more = {name: torch.zeros(4) if name == "sinks" else x for name, x in more.items()}
    with pytest.raises(NotImplementedError, match=why):
        ffpa(q, q, q, **more)


def test_no_yardstick_of_ours():
    """The oracle's sinks are one more key without a value, as the formula has them."""
    q, k, v = (x.detach() for x in dense("cpu")[0])
    out, lse = oracle.attention(q, k, v, sinks=sinks_on("cpu"))
    plain, plain_lse = oracle.attention(q, k, v)
    weights = torch.sigmoid(plain_lse - sinks_on("cpu").double()[:, None])[..., None]
    torch.testing.assert_close(out, plain * weights)
    torch.testing.assert_close(lse, torch.logaddexp(plain_lse, sinks_on("cpu").double()[:, None].expand_as(plain_lse)))
    compare.assert_close("plain", ffpa(q, k, v), plain, compare.baseline(q, k, v)[0])
