"""Tests second derivatives: whoever asks for one, in whatever way, is told that there is none; and nobody else is."""

import time
import weakref
from functools import partial

import ffpa_attn
import pytest
import torch
import torch.nn.functional as F
from ffpa_attn.integrations import tf32
from torch.autograd import forward_ad, functional
from torch.utils.checkpoint import checkpoint

REFUSED = pytest.raises(RuntimeError, match="ffpa's gradients cannot be differentiated again")
ROWS = 12


def packed(attention, q, k, v, **options):
    """Attends in two sequences."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    offsets = torch.tensor([0, 5, ROWS], dtype=torch.int32, device=q.device)
    return attention(q, k, v, offsets, offsets, ROWS, ROWS, **options)


def of_rows(attention, q, k, v, **options):
    return attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)


def in_place_of_pytorchs(q, k, v):
    with ffpa_attn.sdpa():
        return F.scaled_dot_product_attention(q, k, v)


def in_tf32(q, k, v):
    return tf32.attention(q.float(), k.float(), v.float(), None, {})


ATTENTIONS = {
    "ffpa": partial(ffpa_attn.ffpa, causal=True),
    "its LSE": lambda q, k, v: ffpa_attn.ffpa(q, k, v, return_lse=True)[1],
    "out and LSE": lambda q, k, v: sum(map(torch.sum, ffpa_attn.ffpa(q, k, v, return_lse=True))),
    "packed": partial(packed, ffpa_attn.ffpa_varlen),
    "flash": partial(of_rows, ffpa_attn.flash_attn_func, causal=True),
    "flash, columns filled up": lambda *x: of_rows(ffpa_attn.flash_attn_func, *(y[..., :13] for y in x)),
    "flash, packed": partial(packed, ffpa_attn.flash_attn_varlen_func),
    "PyPI's": ffpa_attn.ffpa_attn_func,
    "SDPA": in_place_of_pytorchs,
    "TF32": in_tf32,
}
attentions = pytest.mark.parametrize("attend", ATTENTIONS.values(), ids=ATTENTIONS)


def tensors(device, grad=False):
    return [torch.randn(1, 2, ROWS, 16, device=device, dtype=torch.half).requires_grad_(grad) for _ in range(3)]


def gradient(f, *x):
    return torch.autograd.grad(f(*x).float().sum(), x, create_graph=True)


def squares(*x):
    return sum(y.float().square().sum() for y in x)


def a_penalty(f, x):
    x.requires_grad_()
    (f(x).float().sum() + squares(*gradient(f, x))).backward()


def of_named(f, x):
    torch.autograd.grad(squares(*gradient(f, x.requires_grad_())), x)


def unused_ones_allowed(f, x):
    torch.autograd.grad(squares(*gradient(f, x.requires_grad_())), x, allow_unused=True)


def of_a_gradient_that_depends_on_it(f, x):
    x.requires_grad_()
    (grad,) = torch.autograd.grad(squares(f(x)), x, create_graph=True)
    torch.autograd.grad(grad.float().sum(), x)


def into_named(f, x):
    squares(*gradient(f, x.requires_grad_())).backward(inputs=[x])


def of_an_incoming_gradient(f, x):
    factor = torch.ones((), device=x.device, requires_grad=True)
    (grad,) = gradient(lambda x: f(x) * factor, x.requires_grad_())
    torch.autograd.grad(grad.float().sum(), factor)


def by_a_learned_step(f, x):
    """MAML differentiates so: parameters after a step are a function of those before."""
    weight = torch.eye(16, device=x.device, dtype=x.dtype).requires_grad_()
    (step,) = torch.autograd.grad(squares(f(x @ weight)), weight, create_graph=True)
    torch.autograd.grad(squares(f(x @ (weight - 0.1 * step))), weight)


def forward_over_reverse(f, x):
    out = f(x.requires_grad_())
    with forward_ad.dual_level():
        grad = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        torch.autograd.grad(out, x, grad)


def scalar(f):
    return lambda x: squares(f(x))


REQUESTS = {
    request.__name__: request
    for request in (
        a_penalty, of_named, unused_ones_allowed, of_a_gradient_that_depends_on_it, into_named, of_an_incoming_gradient,
        by_a_learned_step, forward_over_reverse,
    )
} | {
    "hvp": lambda f, x: functional.hvp(scalar(f), x, torch.ones_like(x)),
    "vhp": lambda f, x: functional.vhp(scalar(f), x, torch.ones_like(x)),
    "jvp": lambda f, x: functional.jvp(scalar(f), x, torch.ones_like(x)),
    "hessian": lambda f, x: functional.hessian(scalar(f), x),
    "hessian at once": lambda f, x: functional.hessian(scalar(f), x, vectorize=True),
}  # fmt: skip


@attentions
@pytest.mark.parametrize("of", [0, 1, 2], ids="qkv")
@pytest.mark.parametrize("ask", REQUESTS.values(), ids=REQUESTS)
def test_refused(device, attend, of, ask):
    """Were a gradient a constant, its derivative would be a silent zero. The other two inputs require no gradients."""
    inputs = tensors(device)
    x = inputs.pop(of)
    with REFUSED:
        ask(lambda y: attend(*inputs[:of], y, *inputs[of:]), x)


@attentions
@pytest.mark.parametrize("first, second", [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)])
def test_refused_of_one_input_by_another(device, attend, first, second):
    inputs = tensors(device, grad=True)
    (grad,) = torch.autograd.grad(squares(attend(*inputs)), inputs[first], create_graph=True)
    with REFUSED:
        torch.autograd.grad(squares(grad), inputs[second], allow_unused=True)


@pytest.mark.parametrize("attend", [ffpa_attn.ffpa, in_tf32], ids=["ffpa", "TF32"])
@pytest.mark.parametrize("ask", REQUESTS.values(), ids=REQUESTS)
def test_refused_of_a_mask(device, attend, ask):
    inputs, mask = tensors(device), torch.randn(ROWS, 16, device=device, dtype=torch.half)
    rows = torch.eye(ROWS, 16, device=device, dtype=torch.half)  # rows with 16 columns, as by_a_learned_step wants

    def f(mask):
        bias = mask @ rows.T
        if attend is in_tf32:
            return tf32.attention(*(x.float() for x in inputs), bias.float(), {})
        return attend(*inputs, mask=bias)

    with REFUSED:
        ask(f, mask)


@attentions
def test_a_graph_of_gradients_may_be_asked_for_and_not_used(device, attend):
    inputs = tensors(device, grad=True)
    want = torch.autograd.grad(squares(attend(*inputs)), inputs)
    got = torch.autograd.grad(squares(attend(*inputs)), inputs, create_graph=True)
    assert all(map(torch.equal, got, want))
    assert all(x.requires_grad for x in got) and not any(x.requires_grad for x in want)


def test_gradients_that_another_path_differentiates(device):
    """The error is for those who ask for ffpa's part of a derivative, and for nobody else."""
    q, k, v = tensors(device, grad=True)
    scale = torch.ones((), device=device, requires_grad=True)
    (dq,) = torch.autograd.grad(ffpa_attn.ffpa(q, k, v).float().sum(), q, create_graph=True)
    (got,) = torch.autograd.grad((dq.float() * scale).sum(), scale)
    assert torch.equal(got, dq.detach().float().sum())
    assert torch.autograd.grad(dq.float().sum(), torch.ones(1, requires_grad=True), allow_unused=True) == (None,)


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_checkpointed(device, again):
    """What a checkpoint saves may be unpacked once."""
    q, k, v = tensors(device, grad=True)
    out = checkpoint(lambda q: ffpa_attn.ffpa(2 * q, k, v), q, use_reentrant=False)
    (got,) = torch.autograd.grad(out.float().sum(), q, create_graph=again)
    (want,) = torch.autograd.grad(ffpa_attn.ffpa(2 * q, k, v).float().sum(), q)
    assert torch.equal(got, want)
    if again:
        with REFUSED:
            torch.autograd.grad(squares(got), q)


@attentions
def test_nothing_is_kept_alive(device, attend):
    """What a forward saved goes with the last of its results, and of the gradients that were asked for with a graph."""

    class Saved:
        def __init__(self, x):
            self.x = x.detach()

    inputs, saved = tensors(device, grad=True), []

    def pack(x):
        box = Saved(x)
        saved.append(weakref.ref(box))
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.x):
        out = attend(*(1 * x for x in inputs)).float().sum()
    grads = torch.autograd.grad(out, inputs, create_graph=True)
    assert saved and any(box() for box in saved)
    del out, grads
    end = time.monotonic() + 5  # a GPU's thread of autograd lets go of a graph a little after it has told the caller
    while any(box() for box in saved) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(box() for box in saved)
