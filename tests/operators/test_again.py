"""A kind of call that was seen before takes one lookup, and gives what its first call gave."""

import threading

import pytest
import torch
from ffpa_attn import ffpa, ffpa_varlen
from ffpa_attn.backends import choice, sdpa
from ffpa_attn.operators import again, ops
from ffpa_attn.triton_ops.launch import Unable
from torch.nn.attention import SDPBackend, sdpa_kernel


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(again, "_known", {})
    monkeypatch.setattr(ops, "_plans", {})


def inputs(device="cpu", d=64, n=20, dtype=torch.bfloat16, seed=0):
    made = torch.randn(3, 1, 2, n, d, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return made.unbind(0)


def no_planning(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a call of a known kind asks nothing")

    for name in ("describe", "seen", "_forward", "_backward", "_decide"):
        monkeypatch.setattr(ops, name, refuse)
    monkeypatch.setattr(choice, "choose", refuse)
    monkeypatch.setattr(again, "gradients_of", refuse)


OPTIONS = [
    {},
    {"causal": True},
    {"scale": 0.3, "softcap": 4.0},
    {"window": (5, 2), "return_lse": True},
    {"causal": "top_left", "return_lse": True},
]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_second_call_plans_nothing(options, backend, device, monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", backend)
    first = ffpa(*inputs(device), **options)
    others = inputs(device, seed=1)
    wanted = torch.ops.ffpa_attn.forward(*others, **_as_operators_take(options))[0]
    no_planning(monkeypatch)
    for again_first, with_others in [(ffpa(*inputs(device), **options), ffpa(*others, **options))] * 2:
        if options.get("return_lse"):
            assert all(torch.equal(a, b) for a, b in zip(first, again_first, strict=True))
            with_others = with_others[0]
        else:
            assert torch.equal(first, again_first)
        assert torch.equal(with_others, wanted) and with_others.is_contiguous()


def _as_operators_take(options: dict) -> dict:
    options = {"return_lse": False, **options}
    if options.get("causal") == "top_left":
        options |= {"causal": True, "align": "top_left"}
    if "window" in options:
        options["window_left"], options["window_right"] = options.pop("window")
    return options


def test_a_second_packed_call_plans_nothing(device, monkeypatch):
    if device == "cpu":
        pytest.skip("offsets on the CPU are checked at every call")
    x = [t[0].transpose(0, 1).contiguous() for t in inputs(device)]
    offsets = torch.tensor([0, 7, 20], dtype=torch.int32, device=device)
    first = ffpa_varlen(*x, offsets, offsets, 20, 20, return_lse=True)
    no_planning(monkeypatch)
    second = ffpa_varlen(*x, offsets, offsets, 20, 20, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_packed_calls_are_known_by_their_offsets(monkeypatch):
    """Offsets that must be checked give no kind; others tell by shape, length and place."""
    x = [t[0].transpose(0, 1).contiguous() for t in inputs()]
    cu = torch.tensor([0, 7, 20], dtype=torch.int32)
    args = (False, "bottom_right", None, (-1, -1), 0.0, None, None, "f32", False)
    assert again.kind(*x, args, cu, cu, 20, 20) is None
    assert ffpa_varlen(*x, cu, cu, 20, 20).shape == x[0].shape and not again._known
    with pytest.raises(ValueError, match="cu_seqlens"):
        ffpa_varlen(*x, cu + 9, cu, 20, 20)


@pytest.mark.parametrize(
    ("name", "value"), [("causal", 1), ("softcap", True), ("window", (5.0, 0)), ("return_lse", 0), ("level", True)]
)
def test_equal_values_of_other_types_are_refused_as_ever(name, value):
    """1 equals True, and a kind of call with the one says nothing about the other."""
    right = {"causal": True, "softcap": 1.0, "window": (5, 0), "return_lse": False, "level": None}
    q, k, v = inputs()
    ffpa(q, k, v, **{name: right[name]})
    with pytest.raises((TypeError, ValueError), match=name):
        ffpa(q, k, v, **{name: value})


@pytest.mark.parametrize("window", [5, ([], 0), None], ids=str)
def test_what_is_no_window_is_refused_as_ever(window):
    with pytest.raises((TypeError, ValueError), match="window"):
        ffpa(*inputs(), window=window)


def test_a_list_is_a_window_too():
    assert torch.equal(ffpa(*inputs(), window=[5, 0]), ffpa(*inputs(), window=(5, 0)))
    assert torch.equal(ffpa(*inputs(), window=[5, 0]), ffpa(*inputs(), window=(5, 0)))


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("change", ["shape", "strides", "dtype", "alignment"])
def test_kinds_differ_by_any_tensor(change, which):
    args = (False, "bottom_right", None, (-1, -1), 0.0, None, None, "f32", False)
    tensors = list(inputs())
    before = again.kind(*tensors, args)
    x = tensors[which]
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    tensors[which] = {
        "shape": x[..., :32],
        "strides": x.mT.contiguous().mT,
        "dtype": x.half(),
        "alignment": shifted,
    }[change]
    assert before is not None and again.kind(*tensors, args) not in (None, before)


@pytest.mark.parametrize("which", range(9))
def test_kinds_differ_by_any_argument(which):
    args = [False, "bottom_right", None, (-1, -1), 0.0, None, None, "f32", False]
    before = again.kind(*inputs(), tuple(args))
    args[which] = [True, "top_left", 0.5, (3, -1), 2.0, 2, 1, "f16", True][which]
    assert again.kind(*inputs(), tuple(args)) not in (None, before)


def test_a_flag_makes_another_kind(monkeypatch):
    q, k, v = inputs()
    ffpa(q, k, v)
    monkeypatch.setenv("FFPA_BACKEND", "mma")
    monkeypatch.setenv("FFPA_EMULATE", "sm_10")
    with pytest.raises(ValueError, match="FFPA_EMULATE"):
        ffpa(q, k, v)


def test_calls_that_are_not_plain_have_no_kind():
    q, k, v = inputs()
    ffpa(q, k, v)
    known = len(again._known)
    with torch.autograd.graph.save_on_cpu():
        assert ffpa(q.requires_grad_(), k, v).requires_grad
    with torch._C._AutoDispatchBelowAutograd():
        assert not ffpa(q, k, v).requires_grad
    q = q.detach()
    with torch.autocast("cpu", torch.bfloat16):
        assert ffpa(q.float(), k.float(), v.float()).dtype == torch.bfloat16
    assert torch.equal(ffpa(torch._neg_view(q), k, v), ffpa(-q, k, v))
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    heads_first = ffpa(*swapped)
    known += 1
    assert torch.equal(ffpa(*swapped, layout="BNHD").transpose(1, 2), ffpa(q, k, v)) and heads_first.shape == (
        1,
        20,
        2,
        64,
    )
    with pytest.raises(TypeError, match="`k` is"):
        ffpa(q, None, v)
    with pytest.raises(ValueError):
        ffpa(q, k[..., :32], v)
    assert len(again._known) == known


def test_a_second_call_has_the_strides_of_the_first(monkeypatch):
    """A dim of one element may have any stride; a result has the same whether its kind was seen or not."""
    monkeypatch.setenv("FFPA_BACKEND", "reference")
    q = torch.randn(1, 4, 20, 64).bfloat16()[:, :1]
    assert q.is_contiguous() and q.stride(0) != 20 * 64
    assert len({ffpa(q, q, q).stride() for _ in range(3)}) == 1


class Third(float):
    """A number of a type that may hold anything."""


def test_values_that_may_change_are_no_part_of_a_kind():
    q, k, v = inputs()
    assert torch.equal(ffpa(q, k, v, scale=Third(0.3)), ffpa(q, k, v, scale=0.3)) and len(again._known) == 1


def test_results_are_no_views(monkeypatch):
    """A view that was made without gradients cannot be changed where gradients are wanted."""
    monkeypatch.setenv("FFPA_BACKEND", "sdpa")
    torch_sdpa = sdpa.torch_sdpa

    def a_view(*args, **options):
        return torch_sdpa(*args, **options).transpose(1, 2).contiguous().transpose(1, 2)[:, :, :1]

    monkeypatch.setattr(sdpa, "torch_sdpa", a_view)
    one = [x[:, :, :1] for x in inputs()]
    rows_first = [x.transpose(1, 2) for x in inputs(n=1)]
    with torch.no_grad():
        results = [ffpa(*one), ffpa(*one), torch.ops.ffpa_attn.forward(*one, return_lse=False)[0]]
        monkeypatch.setattr(sdpa, "torch_sdpa", torch_sdpa)
        results += [ffpa(*rows_first, layout="BNHD") for _ in range(2)]
    assert not any(x._is_view() for x in results)


def test_work_of_the_dispatcher_gives_no_kind():
    args = (False, "bottom_right", None, (-1, -1), 0.0, None, None, "f32", False)
    q, k, v = inputs()
    assert again.kind(q, k, v, args) is not None
    for changed in (torch._neg_view(q), q.to("meta")):
        assert again.kind(changed, k, v, args) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert again.kind(q, k, v, args) is None
    with torch.autograd.profiler.profile():
        assert again.kind(q, k, v, args) is None


def gradients(x, g, g_lse=None, **options):
    out = ffpa(*x, **options)
    outs = out if isinstance(out, tuple) else (out,)
    return torch.autograd.grad(outs, x, (g,) if len(outs) == 1 else (g, g_lse))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_second_backward_plans_nothing(options, backend, device, monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", backend)
    g, g_lse = torch.randn(2, 1, 2, 20, 64, device=device).unbind(0)
    g, g_lse = g.bfloat16(), g_lse[..., 0].clone() if options.get("return_lse") else None
    rule = {name: x for name, x in _as_operators_take(options).items() if name != "return_lse"}
    cases = []
    for seed in range(2):
        x = inputs(device, seed=seed)
        saved = torch.ops.ffpa_attn.forward(*x, **rule)
        cases.append(([t.requires_grad_() for t in x], torch.ops.ffpa_attn.backward(g, g_lse, *x, *saved, **rule)[:3]))
    (x, wanted), _ = cases
    for _ in range(2):  # the first call of a kind, and the first gradients of a call that was recorded by its kind
        assert all(map(torch.equal, gradients(x, g, g_lse, **options), wanted))
    no_planning(monkeypatch)
    for x, wanted in cases:
        assert all(map(torch.equal, gradients(x, g, g_lse, **options), wanted))


def test_a_second_packed_backward_plans_nothing(device, monkeypatch):
    if device == "cpu":
        pytest.skip("offsets on the CPU are checked at every call")
    x = [t[0].transpose(0, 1).contiguous().requires_grad_() for t in inputs(device)]
    offsets = torch.tensor([0, 7, 20], dtype=torch.int32, device=device)
    g = torch.randn_like(x[0])

    def run():
        return torch.autograd.grad(ffpa_varlen(*x, offsets, offsets, 20, 20), x, g)

    first, _ = run(), run()
    no_planning(monkeypatch)
    assert all(map(torch.equal, first, run()))


def test_gradients_that_lie_elsewhere_are_another_kind():
    x = [t.requires_grad_() for t in inputs()]
    g = torch.randn_like(x[0])
    wanted, _ = gradients(x, g), gradients(x, g)
    (recorded,) = again._known.values()
    assert len(recorded._plans) == 1
    for other in (
        g.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack((g, g), -1)[..., 0],
        g[:, :1].expand_as(g),
    ):
        expected = gradients(x, other.contiguous())
        assert all(map(torch.equal, gradients(x, other), expected))
        assert all(map(torch.equal, gradients(x, other), expected))
    assert all(map(torch.equal, gradients(x, g), wanted)) and len(recorded._plans) == 4


def test_gradients_that_are_not_plain(monkeypatch):
    x = [t.requires_grad_() for t in inputs()]
    g = torch.randn_like(x[0])
    for _ in range(2):
        wanted = gradients(x, -g)
    through_operators, asked = again.gradients_of, []
    monkeypatch.setattr(
        again, "gradients_of", lambda *args, **rule: asked.append(1) or through_operators(*args, **rule)
    )
    assert all(map(torch.equal, gradients(x, -g), wanted)) and not asked
    assert all(map(torch.equal, gradients(x, torch._neg_view(g)), wanted)) and asked


def test_tensors_that_change_between_forward_and_backward():
    """What lies elsewhere by then is met as it is; what was written to is refused, as ever."""
    q, k, v = inputs()
    g = torch.randn_like(q)
    leaf = q.clone().requires_grad_()
    for _ in range(2):
        wanted = torch.autograd.grad(ffpa(leaf, k, v), leaf, g)[0]
    (recorded,) = again._known.values()
    for _ in range(2):
        out = ffpa(leaf, k, v)
        leaf.data = q.transpose(1, 2).contiguous().transpose(1, 2)
        torch.testing.assert_close(torch.autograd.grad(out, leaf, g)[0], wanted)
        leaf.data = q.clone()
        assert len(recorded._plans) == 2
    out = ffpa(leaf, k, v)
    with torch.no_grad():
        leaf.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, leaf, g)


def test_a_flag_between_forward_and_backward_counts(monkeypatch):
    x = [t.requires_grad_() for t in inputs()]
    g = torch.randn_like(x[0])
    for _ in range(2):
        gradients(x, g)
    out = ffpa(*x)
    monkeypatch.setenv("FFPA_STRICT", "1")
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    with pytest.raises(NotImplementedError, match="FFPA_STRICT"):
        torch.autograd.grad(out, x, g)


def test_a_backward_that_triton_cannot_load_is_chosen_anew(monkeypatch):
    x = [t.requires_grad_() for t in inputs()]
    g = torch.randn_like(x[0])
    wanted, _ = gradients(x, g), gradients(x, g)
    run, asked = ops.run_backward, []

    def unable_once(*args, **options):
        asked.append(1)
        if len(asked) == 1:
            raise Unable("it does not load")
        return run(*args, **options)

    monkeypatch.setattr(ops, "run_backward", unable_once)
    assert all(map(torch.equal, gradients(x, g), wanted)) and len(asked) == 2


def test_kinds_of_gradients_are_bounded(monkeypatch):
    monkeypatch.setattr(again, "_MOST_GRADIENTS", 3)
    x = [t.requires_grad_() for t in inputs()]
    for i in range(1, 9):
        g = torch.randn(*x[0].shape[:-1], 64 * i, dtype=x[0].dtype)[..., :64]
        gradients(x, g)
        (recorded,) = again._known.values()
        assert len(recorded._plans) <= 3


def test_only_some_inputs_want_gradients():
    q, k, v = inputs()
    g = torch.randn_like(q)
    wanted = gradients([t.requires_grad_() for t in inputs()], g)
    for i in range(3):
        x = list(inputs())
        x[i].requires_grad_()
        for _ in range(2):
            assert torch.equal(torch.autograd.grad(ffpa(*x), x[i], g)[0], wanted[i])
    for _ in range(2):  # the LSE alone
        x = [t.requires_grad_() for t in (q, k, v)]
        _, lse = ffpa(*x, return_lse=True)
        dq, dk = torch.autograd.grad(lse.sum(), x[:2])
        assert dq.isfinite().all() and dk.any()


def test_results_do_not_share_memory():
    q, k, v = inputs()
    results = [ffpa(q, k, v) for _ in range(4)]
    assert len({x.data_ptr() for x in results}) == 4


def test_inference_mode_leaves_nothing_behind(monkeypatch):
    """What a kind keeps may be written to in any mode."""
    monkeypatch.setenv("FFPA_BACKEND", "reference")
    q, k, v = inputs()
    with torch.inference_mode():
        inside = [ffpa(q, k, v) for _ in range(2)]
    with torch.no_grad():
        outside = ffpa(q, k, v)
    assert torch.equal(inside[1], outside) and inside[1].is_inference() and not outside.is_inference()


def test_sdpa_gives_its_own_tensor(monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", "sdpa")
    made, torch_sdpa = [], sdpa.torch_sdpa

    def kept(*args, **options):
        made.append(torch_sdpa(*args, **options).contiguous())
        return made[-1]

    monkeypatch.setattr(sdpa, "torch_sdpa", kept)
    for _ in range(2):
        assert ffpa(*inputs()) is made[-1]
    out = torch.ops.ffpa_attn.forward(*inputs(), return_lse=False)[0]
    assert out.data_ptr() == made[-1].data_ptr()
    q, k, v = (x.transpose(1, 2) for x in inputs())
    assert ffpa(q, k, v, layout="BNHD").is_contiguous()


@pytest.mark.parametrize("shape", [(0, 2, 20, 64), (1, 2, 0, 64)])
def test_sdpa_is_not_asked_for_nothing(shape, monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", "sdpa")
    monkeypatch.setattr(sdpa, "torch_sdpa", None)
    q, k = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape[0], 2, 20, 64, dtype=torch.bfloat16)
    assert all(ffpa(q, k, k).shape == shape for _ in range(2))


@pytest.mark.parametrize("laid_out", ["as rows first", "as it should be"])
def test_sdpas_tensor_has_the_strides_that_fakes_have(laid_out, monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", "sdpa")
    torch_sdpa = sdpa.torch_sdpa

    def other_strides(*args, **options):
        out = torch_sdpa(*args, **options)
        return out.transpose(1, 2).contiguous().transpose(1, 2) if laid_out == "as rows first" else out.contiguous()

    monkeypatch.setattr(sdpa, "torch_sdpa", other_strides)
    results = [ffpa(*inputs()) for _ in range(2)]
    assert all(x.is_contiguous() for x in results) and torch.equal(*results)


def test_sdpa_that_would_materialise_the_scores_gives_way(monkeypatch):
    """Global switches say so, call by call."""
    monkeypatch.setenv("FFPA_BACKEND", "sdpa")
    q, k, v = inputs()
    first = ffpa(q, k, v)
    with monkeypatch.context() as patch, sdpa_kernel(SDPBackend.MATH):
        patch.setattr(sdpa, "torch_sdpa", None)
        assert torch.allclose(ffpa(q, k, v), first, atol=1e-2)
    assert torch.equal(ffpa(q, k, v), first)


def test_a_kernel_that_triton_cannot_load_is_chosen_anew(monkeypatch):
    q, k, v = inputs()
    first = ffpa(q, k, v)
    (kind,) = again._known

    def unable(*tensors):
        raise Unable("it does not load")

    again._known[kind] = unable
    assert torch.equal(ffpa(q, k, v), first) and again._known[kind] is not unable


def test_kinds_are_bounded(monkeypatch):
    monkeypatch.setattr(again, "_MOST_KINDS", 5)
    for n in range(1, 30):
        ffpa(*inputs(n=n, d=8))
        assert len(again._known) <= 5


@pytest.mark.parametrize("wants_gradients", [False, True])
def test_threads(wants_gradients, device):
    """Threads that meet at new kinds get what one thread gets."""
    shapes = [(n, d) for n in (3, 8, 17) for d in (8, 64)]

    def call(n: int, d: int) -> tuple:
        x = inputs(device, n=n, d=d)
        return gradients([t.requires_grad_() for t in x], x[0].detach()) if wants_gradients else (ffpa(*x),)

    wanted = {shape: call(*shape) for shape in shapes}
    again._known.clear()
    wrong, barrier = [], threading.Barrier(8)

    def work(i: int) -> None:
        barrier.wait()
        for shape in (shapes[i % 3 :] + shapes[: i % 3]) * 5:
            if not all(map(torch.equal, call(*shape), wanted[shape])):
                wrong.append(shape)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(again._known) == len(shapes)
