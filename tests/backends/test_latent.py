"""Tests the forward in which V is the first columns of K, in one storage: in the emulator and on a GPU."""

from contextlib import nullcontext

import pytest
import torch
from cases import Case, PackedCase, attending, make_inputs, make_packed_inputs
from ffpa_attn import env, explain, ffpa, ffpa_varlen
from ffpa_attn.backends import fused
from ffpa_attn.backends.choice import CANDIDATES
from ffpa_attn.launching import native
from ffpa_attn.operators import ops
from ffpa_attn.operators.forms import values_in_keys
from ffpa_attn.specs.problem import Visibility
from ffpa_attn.specs.spec import LATENT_COLUMNS, ForwardWgmmaLatent, ForwardWgmmaPair
from ffpa_attn.testing import emulate
from test_fused import PROBLEM, check_bits_of_schedules, device, plan_tiles, run  # noqa: F401
from test_mma import check
from test_two_phase import check_packed, steep_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

F16, BF16 = torch.float16, torch.bfloat16
WAYS = [(False, 1), (True, 1), (True, 3)]
by_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: ("shared" if way[0] else "alone") + f"-{way[1]}")


@pytest.fixture
def planned(way, device, monkeypatch):  # noqa: F811
    plan_tiles(monkeypatch, *way)
    return device


def in_keys(inputs, case):
    """Puts V into K: its columns follow those that V has not."""
    q, k, _, *rest = inputs
    return q, k, k[..., : case.d_v or case.d], *rest


def attend(device: str, case: Case, inputs, seed: int = 0):  # noqa: F811
    """Returns out and LSE, of this kernel alone."""
    q, k, v, mask = inputs
    (out, lse), report = run(
        device, lambda: ffpa(q, k, v, return_lse=True, mask=mask, layout=case.layout, **case.rule), seed
    )
    assert "latent" in next(reversed(ops._plans.values())).choice.kernel
    assert report is None or "latent" in report["kernel"]
    return (out, lse), report


CASES = [
    *[Case(heads_q=heads, heads_kv=1, n_q=n_q, n_k=n_k, d=576, d_v=512, rule={"causal": True}) for heads, n_q, n_k in ((1, 1, 1), (16, 1, 300), (16, 5, 64), (2, 65, 65), (3, 50, 129), (128, 1, 200), (1, 64, 256), (5, 30, 400))],
    *[Case(heads_q=2, heads_kv=1, n_q=40, n_k=200, d=d, d_v=d_v, dtype=F16) for d, d_v in ((576, 512), (576, 8), (520, 264), (512, 512), (328, 328), (328, 8), (400, 256), (512, 448))],
    *[Case(heads_q=2, heads_kv=1, n_q=40, n_k=300, d=512, mask=mask) for mask in ("bool", "bool-some-rows-empty", "additive", "additive-f32", "bias-by-head")],
    *[Case(heads_q=4, heads_kv=2, n_q=70, n_k=300, d=512, rule={"window": window, "align": align}, layout="BNHD") for window in ((100, 0), (0, 9), (-1, 20)) for align in ("bottom_right", "top_left")],
    *[Case(heads_q=4, heads_kv=2, n_q=70, n_k=300, d=512, mask=mask, rule={"window": (99, 0)}) for mask in ("bool", "additive")],  # tiles begin at odd keys
    *[Case(heads_q=32, heads_kv=1, n_q=5, n_k=300, d=512, rule={"window": (left, 0)}) for left in (62, 63, 126, 127, 128)],
    Case(batch=2, heads_q=4, heads_kv=2, n_q=40, n_k=300, d=576, d_v=512, rule={"softcap": 5.0, "causal": True}),
    Case(heads_q=2, heads_kv=1, n_q=30, n_k=300, d=512, mask="additive", rule={"softcap": 5.0, "scale": -0.1}),
    Case(heads_q=1, heads_kv=1, n_q=200, n_k=60, d=512, rule={"causal": True}),  # rows before all keys
    Case(heads_q=1, heads_kv=1, n_q=200, n_k=100, d=512, rule={"window": (0, -1), "align": "top_left"}),
]  # fmt: skip
PACKED_CASES = [
    PackedCase((1, 1, 1, 1), (300, 1, 0, 129), d=576, d_v=512, heads_q=16, heads_kv=1),
    PackedCase((5, 70, 0, 17), (33, 200, 12, 0), d=576, d_v=512, heads_q=2, heads_kv=1, spare=9, rule={"causal": True}),
    PackedCase((30, 2, 64), (200, 300, 30), d=512, heads_q=4, heads_kv=1, rule={"window": (150, 0)}),
    PackedCase((20, 50), (165, 30), d=400, d_v=72, heads_q=3, heads_kv=1, spare=70, rule={"causal": True, "align": "top_left"}),
]  # fmt: skip


@by_way
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_cases(case, planned):
    inputs = in_keys(make_inputs(case, planned), case)
    (out, lse), report = attend(planned, case, inputs, seed=3)
    check(case, inputs, out, lse)
    assert report is None or report["bank_conflict_ratio"] <= 1.001


def test_heads_of_one_position_share_tiles_under_a_window():
    """They see the fewest keys together; more positions would see another tile of them."""

    def heads(left: int, group: int) -> int:
        see = Visibility(left, 0, False)
        problem = PROBLEM._replace(
            heads_q=group, heads_kv=1, n_q=8192, n_k=8192, d_qk=576, d_v=512, visibility=see, values_in_keys=True
        )
        plan = fused.plan(problem, env.run_flags())
        assert isinstance(plan.spec, ForwardWgmmaLatent)
        return plan.tile_heads

    assert heads(127, 128) == heads(127, 64) == 64
    assert heads(126, 64) == 32  # two positions see 128 keys
    assert heads(-1, 128) == 1


@by_way
@pytest.mark.parametrize("case", PACKED_CASES, ids=[case.id for case in PACKED_CASES])
def test_packed_sequences(case, planned, emulated_gpu):
    emulated_gpu(4)
    inputs = in_keys(make_packed_inputs(case, planned), case)
    if planned == "cuda":
        out, lse = ffpa_varlen(*inputs, return_lse=True, **case.rule)
    else:
        with emulate("sm_90a", seed=3) as reports:
            out, lse = ffpa_varlen(*inputs, return_lse=True, **case.rule)
        assert "latent" in attending(reports)[0]["kernel"]
    check_packed(case, inputs, out, lse)


@pytest.mark.parametrize("seed", [0, 1, 5])
@pytest.mark.parametrize("columns", LATENT_COLUMNS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_every_kernel_emulated(dtype, columns, seed, monkeypatch):
    """Kernels are right on any schedule, with as many products as arithmetic says."""
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    plan_tiles(monkeypatch, shared=False, count=1)
    case = Case(heads_kv=1, n_q=100, n_k=280, d=columns, d_v=504, dtype=dtype)
    inputs = in_keys(make_inputs(case, "cpu", seed), case)
    (out, lse), report = attend("cpu", case, inputs, seed)
    check(case, inputs, out, lse)
    tiles_of_rows, tiles_of_keys = 2 * case.heads_q, 2 * 3
    warps, steps = 4, 4  # warps of a warpgroup, and steps of 16 of the 64 that a product runs over
    products = columns // 64 + 2  # a box of S each, and one of O in each warpgroup
    assert report["wgmma"] == tiles_of_rows * tiles_of_keys * warps * steps * products


@pytest.mark.parametrize("way", WAYS[:1], ids=["alone"])
@pytest.mark.parametrize("falling", [False, True], ids=["rising", "falling"])
@pytest.mark.parametrize("steepness, dtype", [(1.0, F16), (12.0, F16), (12.0, BF16)], ids=str)
def test_references_that_move(steepness, dtype, falling, planned):
    case = Case(heads_q=2, heads_kv=1, n_q=70, n_k=420, d=576, d_v=512, dtype=dtype)
    inputs = in_keys(steep_inputs(case, planned, steepness, falling), case)
    check(case, inputs, *attend(planned, case, inputs, seed=2)[0])


@pytest.mark.parametrize("way", WAYS[:1], ids=["alone"])
@pytest.mark.parametrize("where", [(0, 0, 0), (1, 1, 1), (0, 1, 0), (1, 0, 1)], ids=str)
def test_references_that_move_in_one_warpgroup(where, planned):
    """The first warpgroup has the first 64 keys of each 128: rows move on again and again in one warpgroup's tiles."""
    case = Case(heads_q=1, heads_kv=1, n_q=60, n_k=400, d=576, d_v=512, dtype=F16)
    q, k, *_ = (x if x is None else x.clone() for x in make_inputs(case, planned))
    q[..., 0], k[..., 0] = 0, 0
    q[:, :, 3::7, 0] = 16.0
    for tile, group in enumerate(where):
        k[:, :, tile * 128 + group * 64 + 5, 0] = 16.0 * (tile + 1)
    inputs = q, k, k[..., :512], None
    check(case, inputs, *attend(planned, case, inputs, seed=3)[0])


@by_way
def test_rows_that_see_nothing_for_long(planned):
    case = Case(heads_q=2, heads_kv=1, n_q=70, n_k=370, d=576, d_v=512)
    q, k, v, _ = in_keys(make_inputs(case, planned), case)
    first = (torch.arange(70) * 6).view(1, 1, -1, 1)
    mask = (torch.arange(370).view(1, 1, 1, -1) >= first).to(q.device)
    (out, lse), _ = attend(planned, case, (q, k, v, mask), seed=4)
    check(case, (q, k, v, mask), out, lse)
    assert torch.isneginf(lse[:, :, -8:]).all() and not out[:, :, -8:].any()


@by_way
def test_bits_repeat(planned, emulated_gpu):
    case = Case(batch=2, heads_q=16, heads_kv=2, n_q=9, n_k=500, d=512, rule={"causal": True})
    inputs = in_keys(steep_inputs(case, planned, 6.0, False), case)
    check_bits_of_schedules(planned, case, inputs, emulated_gpu, attend)


@by_way
@pytest.mark.parametrize("size", [1e9, 1e30, -3e38])
def test_large_scores(size, planned):
    case = Case(heads_q=4, heads_kv=1, n_q=20, n_k=300, d=512)
    q, k, v, _ = in_keys(make_inputs(case, planned), case)
    mask = torch.full((1, 1, 1, 300), size, device=q.device)
    out, lse = attend(planned, case, (q, k, v, mask))[0]
    torch.testing.assert_close(lse, torch.full_like(lse, size), rtol=1e-6, atol=0)
    torch.testing.assert_close(out.float(), v.float().mean(2)[:, :, None].expand_as(out), rtol=0, atol=0.02)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("d, d_v", [(576, 512), (512, 512), (400, 200)])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("n_q", [1, 3, 200])
def test_on_a_gpu(n_q, dtype, d, d_v, device, monkeypatch):  # noqa: F811
    """Heads and parts are those that the chooser plans."""
    monkeypatch.undo()
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    monkeypatch.setattr(fused, "_SPEED_OF_LATENTS", 100.0)  # pairs would be taken for faster in some of these calls
    case = Case(batch=3, heads_q=32, heads_kv=2, n_q=n_q, n_k=5000, d=d, d_v=d_v, dtype=dtype, rule={"causal": True})
    inputs = in_keys(make_inputs(case, device), case)
    results = [attend(device, case, inputs)[0] for _ in range(20)]
    check(case, inputs, *results[0])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("batch, n_q", [(2, 1), (20, 8)], ids=["parts", "whole"])
def test_graph_replays_with_other_latents(batch, n_q, device, monkeypatch):  # noqa: F811
    monkeypatch.undo()
    case = Case(batch=batch, heads_q=128, heads_kv=1, n_q=n_q, n_k=4000, d=576, d_v=512, rule={"causal": True})
    q, k, v, _ = in_keys(make_inputs(case, device), case)
    ffpa(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ffpa(q, k, v, causal=True)
    plan = explain(q, k, v, causal=True).plan
    assert "latent" in plan.kernel and (plan.parts.count > 1) == (n_q == 1)
    for seed in range(3):
        k.normal_(generator=torch.Generator(device).manual_seed(seed))
        graph.replay()
        assert torch.equal(got, ffpa(q, k, v, causal=True))


# ---- the plan ----


def test_which_calls_have_values_in_keys(monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda spec, arch: None)
    k = torch.randn(1, 1, 64, 576).bfloat16()
    q = torch.randn(1, 16, 1, 576).bfloat16()

    def kernel(k, v) -> str:
        return explain(q[..., : k.shape[-1]], k, v, arch="sm_90").kernel

    assert "latent" in kernel(k, k[..., :512]) and "latent" in kernel(k, k[..., :504])
    assert "latent" in kernel(k[..., :512], k[..., :512])
    assert "latent" not in kernel(k, k[..., :512].clone())
    assert "latent" not in kernel(k, k[..., 64:])  # not the first columns
    assert "latent" not in kernel(k, k)  # more columns than O has
    assert values_in_keys(k, k[..., :512]) and not values_in_keys(
        k[..., :384], k[..., :512]
    )  # K, the first columns of V
    rows = torch.empty(128, 1, 576)
    in_pages, values = rows.unflatten(0, (2, 64)), rows[..., :512].unflatten(0, (2, 64))
    assert in_pages.stride() != values.stride() and values_in_keys(in_pages, values)  # of one head, whose stride is any
    q, k = torch.randn(2, 1, 16, 1, 576).bfloat16(), torch.randn(2, 1, 1, 64, 576).bfloat16()
    wrapped = torch.func.vmap(lambda q, k: q * ("latent" in explain(q, k, k[..., :512], arch="sm_90").kernel))(q, k)
    assert not wrapped.any()  # nobody knows where it lies
    q, k = q[0], k[0]
    assert "latent" not in kernel(k[..., :256], k[..., :256])  # the fused forward has these
    for there in ({"device": "meta"}, {}):
        with FakeTensorMode() if not there else nullcontext():
            q, k = (torch.empty(1, *shape, 576, dtype=BF16, **there) for shape in ((16, 1), (1, 64)))
            assert "latent" in kernel(k, k[..., :512]) and "latent" not in kernel(k, torch.empty_like(k)[..., :512])


def test_a_kind_of_call_knows_where_values_are():
    """The same shapes and strides with V elsewhere are another kind of call."""
    case = Case(heads_q=16, heads_kv=1, n_q=1, n_k=100, d=576, d_v=512)
    q, k, v, _ = in_keys(make_inputs(case, "cpu"), case)
    elsewhere = torch.empty_strided(k.shape, k.stride(), dtype=k.dtype).copy_(torch.randn(k.shape))[..., :512]
    assert elsewhere.stride() == v.stride()
    kernels = []
    for values in (v, elsewhere, v, elsewhere):
        with env.overridden("FFPA_BACKEND", "hopper"), emulate("sm_90a") as reports:
            ffpa(q, k, values)
        kernels.append("latent" in reports[0]["kernel"])
    assert kernels == [True, False, True, False]


def test_what_runs(monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda spec, arch: None)

    def planned(**changes):
        return CANDIDATES["hopper"](PROBLEM._replace(values_in_keys=True, **changes), env.all_flags())

    rows = {"batch": 8, "n_q": 1, "heads_q": 16, "heads_kv": 1}  # memory binds
    for d_qk, d_v, columns in ((576, 512, 576), (520, 8, 576), (512, 512, 512), (328, 320, 512)):
        assert planned(d_qk=d_qk, d_v=d_v, **rows).spec == ForwardWgmmaLatent("bf16", columns)
    assert planned(d_qk=576, d_v=512).spec == ForwardWgmmaLatent("bf16", 576)
    for d in (384, 448, 512):  # many rows: products bind, and pairs have no columns more than they need
        assert planned(d_qk=d, d_v=d).spec == ForwardWgmmaPair("bf16", d)
    assert planned(d_qk=576, d_v=576).spec.family == "forward_wgmma_two_phase"  # O has 512 columns
    plan = planned(batch=8, n_q=1, n_k=8192, d_qk=576, d_v=512, heads_q=128, heads_kv=1)
    assert (plan.tile_heads, plan.parts.count) == (64, 8)  # 16 tiles of 64 heads, on 132 multiprocessors
