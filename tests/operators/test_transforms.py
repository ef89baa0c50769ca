"""torch.func: gradients, Jacobians and maps of our functions are what loops of plain calls give, or one sentence."""

import warnings

import ffpa_attn
import pytest
import torch
from ffpa_attn import ffpa, ffpa_varlen
from ffpa_attn.operators import ops
from torch.func import grad, grad_and_value, jacfwd, jacrev, vjp, vmap

BF16 = torch.bfloat16


def t(device, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, BF16)


def dense(device, *first, batch=2, n_q=9, n_k=13, heads=4):
    q = t(device, *first, batch, heads, n_q, 32, seed=1)
    return q, *(t(device, *first, batch, 2, n_k, d, seed=s) for d, s in ((32, 2), (40, 3)))


def loss(q, k, v, **rule):
    """Returns a loss in which the LSE counts too."""
    out, lse = ffpa(q, k, v, return_lse=True, **rule)
    return out.float().square().sum() + lse.sum()


def by_autograd(function, tensors, which):
    tensors = [x.detach().clone() for x in tensors]
    wanted = [tensors[i].requires_grad_() for i in which]
    return torch.autograd.grad(function(*tensors), wanted)


def calls(monkeypatch) -> list:
    """Gives a list with one entry for each time that a kernel is asked for."""
    made, run = [], ops.run
    monkeypatch.setattr(ops, "run", lambda *args, **more: (made.append(args), run(*args, **more))[1])
    return made


def equal(found, want):
    for x, y in zip(found, want, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        torch.testing.assert_close(x, y, atol=0, rtol=0)


def close(found, want):
    """Allows for sums of another order, of numbers that have been rounded to 16 bits."""
    for x, y in zip(found, want, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        torch.testing.assert_close(x.float(), y.float(), atol=2e-2, rtol=2e-2)


RULES = [{}, {"causal": True, "softcap": 3.0}, {"window": (4, 2), "scale": 0.3}]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_grad_is_autograds(device, rule):
    tensors = dense(device)
    function = lambda q, k, v: loss(q, k, v, **rule)  # noqa: E731
    want = by_autograd(function, tensors, (0, 1, 2))
    found, value = grad_and_value(function, argnums=(0, 1, 2))(*tensors)
    equal(found, want)
    assert value == function(*tensors)


def test_grad_of_the_operator(device):
    q, k, v = dense(device)
    function = lambda q: torch.ops.ffpa_attn.forward(q, k, v)[0].float().square().sum()  # noqa: E731
    equal([grad(function)(q)], by_autograd(function, [q], [0]))


def test_grad_of_packed_sequences(device):
    cu = torch.tensor([0, 4, 10], dtype=torch.int32, device=device)
    x = t(device, 10, 4, 32)
    function = lambda x: ffpa_varlen(x, x, x, cu, cu, 6, 6, causal=True).float().square().sum()  # noqa: E731
    want = by_autograd(function, [x], [0])
    equal([grad(function)(x)], want)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        equal(vmap(grad(function))(torch.stack([x, x])), [want[0], want[0]])


def test_vjp(device):
    q, k, v = dense(device)
    out, pull = vjp(lambda *x: ffpa(*x), q, k, v)
    g = t(device, *out.shape, seed=7)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    equal(pull(g), torch.autograd.grad(ffpa(*inputs), inputs, g))


def test_grad_inside_autograd(device):
    """torch.func computes on what autograd records: the value is differentiable, its gradient is not."""
    q, k, v = (x.requires_grad_() for x in dense(device))
    found = grad(lambda q: loss(q, k, v))(q)
    with pytest.raises(RuntimeError, match="ffpa's gradients cannot be differentiated again"):
        found.float().sum().backward()


@pytest.mark.parametrize("second", [grad, jacrev])
def test_second_derivatives_say_so(device, second):
    x = t(device, 1, 1, 4, 8)
    first = second(lambda q: ffpa(q, x, x).float().square().sum())
    with pytest.raises(RuntimeError, match="ffpa's gradients cannot be differentiated again"):
        second(lambda q: first(q).float().sum())(x)


def test_forward_mode_says_so(device):
    x = t(device, 1, 1, 4, 8)
    with pytest.raises(NotImplementedError, match="ffpa has no forward-mode derivatives.*jacrev"):
        jacfwd(lambda q: ffpa(q, x, x))(x)


def test_a_hessian_says_so(device):
    x = t(device, 1, 1, 4, 8)
    with pytest.raises(RuntimeError, match="ffpa's gradients cannot be differentiated again"):
        torch.func.hessian(lambda q: ffpa(q, x, x).float().square().sum())(x)


def test_jacrev(device, monkeypatch):
    q, k, v = dense(device, batch=1, n_q=3, n_k=4, heads=2)
    out = ffpa(q, k, v.requires_grad_())
    rows = [
        torch.autograd.grad(out, v, e, retain_graph=True)[0]
        for e in torch.eye(out.numel()).to(out).view(-1, *out.shape)
    ]
    made = calls(monkeypatch)
    found = jacrev(lambda v: ffpa(q, k, v))(v.detach())
    assert len(made) == 2
    close([found], [torch.stack(rows).view(*out.shape, *v.shape)])


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_map_is_one_call(device, batch, rule, monkeypatch):
    tensors = dense(device, 5, batch=batch)
    function = lambda q, k, v: ffpa(q, k, v, return_lse=True, **rule)  # noqa: E731
    want = [function(*entry) for entry in zip(*tensors, strict=True)]
    made = calls(monkeypatch)
    out, lse = vmap(function)(*tensors)
    assert len(made) == 1
    close([out, lse], [torch.stack(parts) for parts in zip(*want, strict=True)])


@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, 1), (1, 2, 3), (-1, 0, -1)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_maps_over_any_dim(device, batch, dims):
    """A dim that is mapped may be the last one; a tensor without one is every entry's."""
    tensors = dense(device, 3, batch=batch)
    tensors = [x[0] if d is None else x.movedim(0, d).contiguous() for x, d in zip(tensors, dims, strict=True)]
    entries = [[x] * 3 if d is None else x.unbind(d) for x, d in zip(tensors, dims, strict=True)]
    want = [ffpa(*(x.contiguous() for x in entry)) for entry in zip(*entries, strict=True)]
    close([vmap(lambda *x: ffpa(*x), in_dims=dims)(*tensors)], [torch.stack(want)])


def test_rows_before_heads_and_without_lse(device):
    tensors = [x.transpose(2, 3) for x in dense(device, 3)]
    want = [ffpa(*entry, layout="BNHD") for entry in zip(*tensors, strict=True)]
    close([vmap(lambda *x: ffpa(*x, layout="BNHD"))(*tensors)], [torch.stack(want)])


def test_a_map_of_maps(device, monkeypatch):
    tensors = dense(device, 2, 3)
    want = [torch.stack([ffpa(*inner) for inner in zip(*outer, strict=True)]) for outer in zip(*tensors, strict=True)]
    made = calls(monkeypatch)
    found = vmap(vmap(lambda *x: ffpa(*x)))(*tensors)
    assert len(made) == 1
    close([found], [torch.stack(want)])


def test_a_map_of_nothing(device):
    assert vmap(lambda *x: ffpa(*x))(*dense(device, 3, n_q=0)).shape == (3, 2, 4, 0, 40)
    assert vmap(lambda *x: ffpa(*x))(*dense(device, 3, batch=0)).shape == (3, 0, 4, 9, 40)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("shape", [(9, 13), (4, 1, 13), (1, 4, 9, 1), (2, 1, 9, 13), (2, 4, 9, 13)], ids=str)
def test_gradients_of_each_sample(device, shape, own, monkeypatch):
    """The mask has gradients too, be it shared or each sample's own: what a sample's batch shares is summed over it."""
    samples = 3
    tensors = dense(device, samples)
    mask = t(device, *(samples,) * own, *shape, seed=5)
    masks = mask.unbind() if own else [mask] * samples
    want = [
        by_autograd(lambda q, k, v, m: loss(q, k, v, mask=m), entry, range(4))
        for entry in zip(*tensors, masks, strict=True)
    ]
    made = calls(monkeypatch)
    per_sample = grad(lambda q, k, v, m: loss(q, k, v, mask=m), argnums=(0, 1, 2, 3))
    found = vmap(per_sample, in_dims=(0, 0, 0, 0 if own else None))(*tensors, mask)
    assert len(made) == 2
    close(found, [torch.stack(parts) for parts in zip(*want, strict=True)])


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_masks_without_gradient(device, own, monkeypatch):
    """A mask that entries and batch share is not written out for each."""
    tensors = dense(device, 3)
    mask = torch.rand(*(3,) * own, 9, 13, generator=torch.Generator().manual_seed(6)).to(device) > 0.3
    masks = mask.unbind() if own else [mask] * 3
    want = [ffpa(*entry, mask=m) for *entry, m in zip(*tensors, masks, strict=True)]
    made = calls(monkeypatch)
    found = vmap(lambda q, k, v, m: ffpa(q, k, v, mask=m), in_dims=(0, 0, 0, 0 if own else None))(*tensors, mask)
    close([found], [torch.stack(want)])
    assert made[0][-2].shape == ((6, 1, 9, 13) if own else (9, 13))


def test_no_place_for_results_under_vmap(device):
    tensors = dense(device, 3)
    place = torch.empty(3, 2, 4, 9, 40, dtype=BF16, device=device)
    with pytest.raises(NotImplementedError, match="`out` is given under torch.vmap"):
        vmap(lambda q, k, v, out: ffpa(q, k, v, out=out))(*tensors, place)


def test_a_map_of_8_bit_floats(device):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("8-bit floats need sm_89")
    x = t(device, 2, 1, 2, 5, 32).to(torch.float8_e4m3fn)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        found = vmap(lambda x: ffpa_attn.ffpa_fp8(x, x, x))(x)
    equal(found, [ffpa_attn.ffpa_fp8(entry, entry, entry) for entry in x])
