"""Tests the fused forwards on wgmma, of one block and of pairs: shipped kernels, in the emulator and on a GPU."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from cases import CASES as CASES_OF_ALL
from cases import PACKED_CASES as PACKED_CASES_OF_ALL
from cases import Case, PackedCase, attending, make_inputs, make_packed_inputs
from ffpa_attn import env, ffpa, ffpa_varlen
from ffpa_attn.backends import fused, row_tiles
from ffpa_attn.backends.choice import CANDIDATES
from ffpa_attn.backends.fused import FusedPlan
from ffpa_attn.launching import native
from ffpa_attn.operators import ops
from ffpa_attn.specs import archs
from ffpa_attn.specs.problem import Problem, Visibility
from ffpa_attn.specs.spec import (
    FUSED_COLUMNS,
    LATENT_COLUMNS,
    PAIR_COLUMNS,
    ForwardWgmmaFused,
    ForwardWgmmaLatent,
    ForwardWgmmaPair,
)
from ffpa_attn.testing import emulate
from test_mma import check, far_apart
from test_two_phase import check_bits_repeat, check_graph_replays, check_packed, steep_inputs

F16, BF16 = torch.float16, torch.bfloat16
FUSED = [ForwardWgmmaFused(dtype, *widths) for dtype in ("f16", "bf16") for widths in FUSED_COLUMNS]
SHIPPED = FUSED + [ForwardWgmmaPair(dtype, columns) for dtype in ("f16", "bf16") for columns in PAIR_COLUMNS]
LATENT = [ForwardWgmmaLatent(dtype, columns) for dtype in ("f16", "bf16") for columns in LATENT_COLUMNS]
# The head dims are the narrowest of each kernel.
by_kernel = pytest.mark.parametrize("d", [64, 384], ids=["d64", "d384"])


@pytest.fixture(params=["emulated", "cuda"])
def device(request, monkeypatch):
    """Makes the kernel run for certain, for any number of rows, in the emulator or on a GPU."""
    if request.param == "cuda":
        if not torch.cuda.is_available() or native.record() is None:
            pytest.skip("needs a GPU, and kernels for it")
        major, minor = torch.cuda.get_device_capability()
        if why_not := archs.why_not_on("sm_90a", f"sm_{major}{minor}"):
            pytest.skip(why_not)
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    plan_tiles(monkeypatch, shared=False, count=1)
    return "cpu" if request.param == "emulated" else "cuda"


SHARED_HEADS = row_tiles.shared_heads


def plan_tiles(monkeypatch, shared: bool, count: int) -> None:
    """Makes plans in which query heads share row tiles, or do not, with keys in at most `count` parts."""

    def cut(p, spec, tile_heads, workspace_cap):
        return 1.0, row_tiles.cut_keys(p.n_q, p.n_k, p.visibility, spec.rows // tile_heads, 128, count)

    def heads(p, rows=row_tiles.ROWS):
        planned, fit = SHARED_HEADS(p, rows), [n for n in range(1, rows + 1) if p.group % n == 0]
        return (max(fit) if planned == 1 else planned) if shared else 1

    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(row_tiles, "shared_heads", heads)
    monkeypatch.setattr(fused, "_parts", cut)


def run(device: str, function, seed: int = 0):
    """Returns what `function` gives, and the emulator's report."""
    with emulate("sm_90a", seed=seed) if device == "cpu" else nullcontext() as reports:
        result = function()
    if reports is None:
        torch.cuda.synchronize()
        return result, None
    report, *merges = attending(reports)
    assert report["kernel"] in {spec.name for spec in SHIPPED + LATENT}
    plan = next(reversed(ops._plans.values())).choice.plan
    assert [merge["kernel"][:14] for merge in merges] == ["forward_merge_"] * (plan.parts.count > 1)
    return result, report


def attend(device: str, case: Case, inputs, seed: int = 0, **options):
    q, k, v, mask = inputs
    rule = {**case.options(q.device), **options}
    return run(device, lambda: ffpa(q, k, v, return_lse=True, mask=mask, layout=case.layout, **rule), seed)


def fits(case) -> bool:
    return case.d <= PAIR_COLUMNS[-1] and (case.d_v or case.d) <= fused.MOST_COLUMNS


CASES = [case for case in CASES_OF_ALL if fits(case) and case.batch * case.n_q * case.n_k]
CASES += [
    # values of their own width
    *[Case(n_q=140, n_k=300, d=d, d_v=d_v, rule={"causal": True}) for d, d_v in ((192, 128), (64, 320), (8, 264), (320, 8))],
    # tiles of which some rows are whole, some not, and several tiles of keys
    *[Case(n_q=n_q, n_k=n_k, d=64) for n_q, n_k in ((1, 1), (129, 1), (1, 513), (256, 256), (64, 65), (191, 257))],
    *[
        Case(n_q=n_q, n_k=n_k, d=64, rule={"window": window, "align": align})
        for n_q, n_k in ((270, 270), (140, 600), (300, 140))
        for window, align in (((16, 0), "bottom_right"), ((0, 9), "top_left"), ((-1, 20), "bottom_right"), ((7, -1), "top_left"))
    ],
    Case(n_q=400, n_k=100, d=64, rule={"window": (0, -1), "align": "top_left"}),  # row tiles behind all keys
    # pairs: the second block has no columns, or few; its keys likewise; rows see keys of only one of the blocks
    *[Case(heads_q=1, heads_kv=1, n_q=40, n_k=100, d=d, d_v=d_v, rule={"causal": True}) for d, d_v in ((512, 8), (8, 384), (384, 200), (64, 424))],
    *[Case(heads_q=1, heads_kv=1, n_q=n_q, n_k=n_k, d=384) for n_q, n_k in ((1, 1), (129, 1), (16, 64), (65, 65), (128, 256))],
    *[Case(heads_q=1, heads_kv=1, n_q=140, n_k=n_k, d=384, rule=rule) for n_k, rule in ((140, {"causal": True}), (300, {"window": (16, 0)}), (270, {"window": (7, -1), "align": "top_left"}))],
    Case(heads_q=1, heads_kv=1, n_q=140, n_k=100, d=384, mask="bool-some-rows-empty", rule={"softcap": 8.0}),
    Case(heads_q=1, heads_kv=1, n_q=400, n_k=100, d=384, rule={"window": (0, -1), "align": "top_left"}),
]  # fmt: skip
PACKED_CASES = [case for case in PACKED_CASES_OF_ALL if fits(case)]
PACKED_CASES += [
    PackedCase((64, 1, 133), (64, 1, 133), d=64, rule={"causal": True}),
    PackedCase((5, 140, 0, 17), (33, 40, 12, 0), d=320),
    PackedCase((150, 20), (30, 360), d=64, d_v=8, spare=9, rule={"window": (8, 3)}),
    PackedCase((20, 50), (300, 30), d=64, spare=70, rule={"causal": True, "align": "top_left", "softcap": 6.0}),
    PackedCase((64, 1, 133), (64, 1, 133), heads_q=1, heads_kv=1, d=384, rule={"causal": True}),
    PackedCase((5, 140, 0, 17), (33, 90, 12, 0), d=384, d_v=200, spare=9),
    PackedCase((5, 64, 3), (133, 40, 90), heads_q=4, heads_kv=1, d=576, d_v=512, spare=9, rule={"causal": True}),
    PackedCase((20, 50), (165, 30), d=448, spare=70, rule={"causal": True, "align": "top_left", "softcap": 6.0}),
]


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_cases(case, device):
    inputs = make_inputs(case, device)
    (out, lse), report = attend(device, case, inputs, seed=3)
    check(case, inputs, out, lse)
    assert report is None or report["bank_conflict_ratio"] <= 1.001


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1e-3])
@by_kernel
def test_scales_of_tiles_that_every_row_sees(d, scale, device):
    case = Case(heads_q=1, heads_kv=1, n_q=128, n_k=256, d=d, dtype=F16, rule={"scale": scale})
    inputs = make_inputs(case, device)
    check(case, inputs, *attend(device, case, inputs)[0])


@pytest.mark.parametrize("seed", [0, 1, 5])
@pytest.mark.parametrize("spec", SHIPPED, ids=[spec.name for spec in SHIPPED])
def test_every_kernel_emulated(spec, seed, monkeypatch):
    """Kernels are right on any schedule, with as many products as arithmetic says."""
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    plan_tiles(monkeypatch, shared=False, count=1)
    pair, columns, dtype = isinstance(spec, ForwardWgmmaPair), spec.columns, F16 if spec.dtype == "f16" else BF16
    value_columns = spec.value_columns
    rule = [{}, {"causal": True}, {"window": (100, 30)}][seed % 3]
    case = Case(heads_kv=1, n_q=135, n_k=280, d=columns, d_v=value_columns - 8, dtype=dtype, rule=rule)
    inputs = make_inputs(case, "cpu", seed)
    (out, lse), report = attend("cpu", case, inputs, seed)
    check(case, inputs, out, lse)
    keys, boxes = 128 if columns <= 192 or pair else 64, columns // 64
    ends = {0: (280, 280), 1: (273, 280), 2: (280, 280)}[seed % 3]  # end of the keys that each row tile sees
    begins = {2: (0, 173)}.get(seed % 3, (0, 0))
    groups = 2, 1  # warpgroups with rows in each row tile
    tiles = [-(-end // keys) - begin // keys for begin, end in zip(begins, ends, strict=True)]
    # S has products of 64 keys; O, of all columns, of 64, or of half of them for the keys of both blocks.
    products = keys // 16 * (boxes + (2 if pair else 1 if boxes <= 4 else boxes))
    assert report["kernel"] == spec.name
    of_groups = sum(n * group for n, group in zip(tiles, groups, strict=True)) * case.heads_q
    assert report["wgmma"] == of_groups * products * 4  # each warp counts


@pytest.mark.parametrize("falling", [False, True], ids=["rising", "falling"])
@pytest.mark.parametrize("steepness, dtype", [(1.0, F16), (12.0, F16), (12.0, BF16)], ids=str)
@by_kernel
def test_references_that_move(d, steepness, dtype, falling, device):
    case = Case(heads_kv=1, n_q=140, n_k=1100 if d == 64 else 420, d=d, dtype=dtype)
    inputs = steep_inputs(case, device, steepness, falling)
    check(case, inputs, *attend(device, case, inputs, seed=2)[0])


@by_kernel
def test_rows_move_one_by_one(d, device):
    """Some rows of each pair, warp and quad move in the third tile, some in the eighth, some never."""
    case = Case(heads_q=1, heads_kv=1, n_q=128, n_k=1030, d=d, dtype=F16)
    q, k, v, _ = (x if x is None else x.clone() for x in make_inputs(case, device))
    q[..., :2] = 0
    q[:, :, 3::7, 0], q[:, :, 5::11, 1] = 16.0, 24.0
    k[..., :2] = 0
    k[:, :, 300, 0], k[:, :, 900, 1] = 12.0, 20.0
    check(case, (q, k, v, None), *attend(device, case, (q, k, v, None), seed=3)[0])


@pytest.mark.parametrize("where", [(0, 0, 0), (1, 1, 1), (0, 1, 0), (1, 0, 1)], ids=str)
def test_references_that_move_in_one_block(where, device):
    """A pair's first block has the first 64 keys of each tile: in tile after tile one block's rows move on."""
    case = Case(heads_q=1, heads_kv=1, n_q=70, n_k=400, d=384, dtype=F16)
    q, k, v, _ = (x if x is None else x.clone() for x in make_inputs(case, device))
    q[..., 0], k[..., 0] = 0, 0
    q[:, :, 3::7, 0] = 16.0
    for tile, block in enumerate(where):
        k[:, :, tile * 128 + block * 64 + 5, 0] = 16.0 * (tile + 1)
    check(case, (q, k, v, None), *attend(device, case, (q, k, v, None), seed=3)[0])


@by_kernel
def test_rows_that_see_nothing_for_long(d, device):
    """The first key of some rows comes in a later tile, or never."""
    n_k, apart = (1100, 9) if d == 64 else (370, 3)
    case = Case(heads_kv=1, n_q=140, n_k=n_k, d=d)
    q, k, v, _ = make_inputs(case, device)
    first = (torch.arange(140) * apart).view(1, 1, -1, 1)
    mask = (torch.arange(n_k).view(1, 1, 1, -1) >= first).to(q.device)
    (out, lse), _ = attend(device, case, (q, k, v, mask), seed=4)
    check(case, (q, k, v, mask), out, lse)
    assert torch.isneginf(lse[:, :, -16:]).all() and not out[:, :, -16:].any()


def check_bits_of_schedules(device, case, inputs, emulated_gpu, attend=attend):
    """Checks that bits repeat on any schedule, by any number of blocks."""
    results = []
    for seed, blocks in ((0, 2), (1, 5), (3, 1), (7, 40)) if device == "cpu" else ((0, 2),) * 50:
        emulated_gpu(blocks)
        results.append(attend(device, case, inputs, seed)[0])
    check(case, inputs, *results[0])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@by_kernel
def test_bits_repeat(d, device, emulated_gpu):
    case = Case(heads_kv=1, n_q=300, n_k=530 if d == 64 else 270, d=d, rule={"causal": True})
    check_bits_of_schedules(device, case, steep_inputs(case, device, 6.0, False), emulated_gpu)


@pytest.mark.parametrize("case", PACKED_CASES, ids=[case.id for case in PACKED_CASES])
def test_packed_sequences(case, device):
    inputs = make_packed_inputs(case, device)
    computes = min(inputs[5:]) > 0
    with emulate("sm_90a", seed=3) if device == "cpu" else nullcontext() as reports:
        out, lse = ffpa_varlen(*inputs, return_lse=True, **case.options(device))
    kernel = "forward_wgmma_fused" if max(case.d, case.d_v or 0) <= FUSED_COLUMNS[-1][0] else "forward_wgmma_pair"
    families = [r["kernel"].split("_f16")[0].split("_bf16")[0] for r in attending(reports or [])]
    assert reports is None or families == [kernel] * computes
    check_packed(case, inputs, out, lse)


@by_kernel
def test_packed_qkv(d, device):
    """q, k and v are columns of one tensor, each three head dims apart; the result goes into a strided tensor."""
    case = Case(n_q=140, n_k=140, d=d, layout="BNHD", rule={"causal": True})
    x = torch.randn(1, 140, 3, 2, d, generator=torch.Generator().manual_seed(0)).to(device, BF16)
    inputs = (*x.unbind(2), None)
    out = torch.full((1, 140, 3, d), torch.nan, dtype=BF16, device=x.device)
    (_, lse), _ = attend(device, case, inputs, out=out[:, :, :2])
    check(case, inputs, out[:, :, :2], lse)
    assert out[:, :, 2].isnan().all()


@by_kernel
def test_without_an_lse(d, device):
    case = Case(n_q=140, n_k=100, d=d)
    inputs = make_inputs(case, device)
    want = attend(device, case, inputs)[0][0]
    assert torch.equal(run(device, lambda: ffpa(*inputs[:3]))[0], want)


@pytest.mark.large(gigabytes=10)
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "head", "row"])
@by_kernel
def test_more_than_31_bits_of_offsets(d, dim, device):
    """Views of 4 GB are never written but where the tensors are."""
    case, inputs, out = far_apart(dim, device, d=d)
    (_, lse), _ = attend(device, case, inputs, out=out)
    check(case, inputs, out, lse)


# ---- on a GPU ----


on_a_gpu = pytest.mark.parametrize("device", ["cuda"], indirect=True)


@on_a_gpu
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("d", range(8, fused.MOST_COLUMNS + 1, 24))
@pytest.mark.parametrize("rule", [{}, {"causal": True}], ids=str)
def test_every_head_dim_on_a_gpu(d, dtype, rule, device):
    case = Case(heads_q=4, heads_kv=2, n_q=1000, n_k=1531, d=d, dtype=dtype, rule=rule)
    inputs = make_inputs(case, device)
    check(case, inputs, *attend(device, case, inputs)[0])


@on_a_gpu
@pytest.mark.parametrize("d", [*(widths[0] for widths in FUSED_COLUMNS if widths[0] == widths[1]), *PAIR_COLUMNS[:-1]])
def test_bits_repeat_on_a_gpu(d, device):
    check_bits_repeat(d, partial(attend, device))


@on_a_gpu
@pytest.mark.parametrize("d", [256, 512])
def test_graph_replays_on_a_gpu(d, device):
    check_graph_replays(d)


# ---- the plan ----

PROBLEM = Problem(
    "forward", "cuda", "sm_90", "bf16", 1, 32, 8, 8192, 8192, 256, 256, None, Visibility(-1, -1, False), 0.04, 0.0, None, True, None, "f32", None
)  # fmt: skip


def test_what_runs(monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda spec, arch: None)

    def planned(**changes):
        flags = {name: changes.pop(name) for name in list(changes) if name.isupper()}
        return CANDIDATES["hopper"](PROBLEM._replace(**changes), {**env.all_flags(), **flags})

    for d_qk, d_v, kernel, columns in (
        (8, 8, ForwardWgmmaFused, (64, 64)),
        (64, 72, ForwardWgmmaFused, (128, 128)),
        (192, 128, ForwardWgmmaFused, (192, 128)),
        (136, 8, ForwardWgmmaFused, (192, 128)),
        (192, 136, ForwardWgmmaFused, (192, 192)),
        (128, 192, ForwardWgmmaFused, (192, 192)),
        (200, 128, ForwardWgmmaFused, (256, 256)),
        (40, 256, ForwardWgmmaFused, (256, 256)),
        (264, 8, ForwardWgmmaFused, (320, 320)),
        (320, 320, ForwardWgmmaFused, (320, 320)),
        (328, 8, ForwardWgmmaPair, (384,)),
        (40, 448, ForwardWgmmaPair, (448,)),
        (512, 512, ForwardWgmmaPair, (512,)),
    ):
        plan = planned(d_qk=d_qk, d_v=d_v, packed=(8192, 8192))
        assert plan._replace(microseconds=0.0) == FusedPlan(kernel("bf16", *columns))
    for changes, why in (
        ({"acc": "f16", "dtype": "f16"}, "accumulates in f32"),
        ({"num_stages": 2}, "num_stages"),
        ({"n_q": 2**31 - 9000}, "32 bits"),
        ({"packed": (9, 2**31 - 1000)}, "2147482648 of all sequences are too many"),
        ({"packed": (8192, 8192), "batch": 2**26 - 2**11 - 63}, "row tiles in 32 bits"),
        ({"ENABLE_FFPA_SMEM_SWIZZLE_Q": True}, "SWIZZLE_Q"),
    ):
        assert why in planned(**changes), changes
    assert isinstance(planned(n_q=1, FFPA_BACKEND="hopper"), FusedPlan)
    assert isinstance(planned(packed=(8192, 8192), batch=2**26 - 2**11 - 64), FusedPlan)
    assert isinstance(planned(FFPA_WORKSPACE_MB=1), FusedPlan)
    assert planned(d_v=520).kernel.startswith("forward_wgmma_two_phase")
