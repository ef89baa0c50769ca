"""The fused forward on wgmma: the shipped, unmodified kernels, in the emulator and on a GPU where there is one."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from cases import CASES as CASES_OF_ALL
from cases import PACKED_CASES as PACKED_CASES_OF_ALL
from cases import Case, PackedCase, make_inputs, make_packed_inputs
from ffpa_attn import archs, emulated, env, ffpa, ffpa_varlen, fused, native, ops
from ffpa_attn.choice import CANDIDATES
from ffpa_attn.fused import FusedPlan
from ffpa_attn.spec import FUSED_COLUMNS, ForwardFused, Problem, Visibility
from ffpa_attn.testing import emulate
from test_mma import check, far_apart
from test_two_phase import check_bits_repeat, check_graph_replays, check_packed, steep_inputs

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(params=["emulated", "cuda"])
def device(request, monkeypatch):
    """Where it runs for certain, for any number of rows."""
    if request.param == "cuda":
        if not torch.cuda.is_available() or native.record() is None:
            pytest.skip("needs a GPU, and kernels for it")
        major, minor = torch.cuda.get_device_capability()
        if why_not := archs.why_not_on("sm_90a", f"sm_{major}{minor}"):
            pytest.skip(why_not)
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    monkeypatch.setattr(ops, "_plans", {})
    return "cpu" if request.param == "emulated" else "cuda"


def run(device: str, function, seed: int = 0):
    """What `function` gives, and the emulator's report."""
    with emulate("sm_90a", seed=seed) if device == "cpu" else nullcontext() as reports:
        result = function()
    if reports is None:
        torch.cuda.synchronize()
        return result, None
    (report,) = reports
    assert report["kernel"].startswith("forward_fused")
    return result, report


def attend(device: str, case: Case, inputs, seed: int = 0, **options):
    q, k, v, mask = inputs
    rule = {**case.rule, **options}
    return run(device, lambda: ffpa(q, k, v, return_lse=True, mask=mask, layout=case.layout, **rule), seed)


def fits(case) -> bool:
    return max(case.d, case.d_v or 0) <= fused.MOST_COLUMNS


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
]  # fmt: skip
PACKED_CASES = [case for case in PACKED_CASES_OF_ALL if fits(case)]
PACKED_CASES += [
    PackedCase((64, 1, 133), (64, 1, 133), d=64, rule={"causal": True}),
    PackedCase((5, 140, 0, 17), (33, 40, 12, 0), d=320),
    PackedCase((150, 20), (30, 360), d=64, d_v=8, spare=9, rule={"window": (8, 3)}),
    PackedCase((20, 50), (300, 30), d=64, spare=70, rule={"causal": True, "align": "top_left", "softcap": 6.0}),
]


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_cases(case, device):
    inputs = make_inputs(case, device)
    (out, lse), report = attend(device, case, inputs, seed=3)
    check(case, inputs, out, lse)
    assert report is None or report["bank_conflict_ratio"] <= 1.001


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1e-3])
def test_scales_of_tiles_that_every_row_sees(scale, device):
    case = Case(heads_q=1, heads_kv=1, n_q=128, n_k=512, d=64, dtype=F16, rule={"scale": scale})
    inputs = make_inputs(case, device)
    check(case, inputs, *attend(device, case, inputs)[0])


@pytest.mark.parametrize("seed", [0, 1, 5])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("columns", FUSED_COLUMNS)
def test_every_kernel_emulated(columns, dtype, seed, monkeypatch):
    """Right on any schedule, with as many products as arithmetic says."""
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    rule = [{}, {"causal": True}, {"window": (100, 30)}][seed % 3]
    case = Case(heads_kv=1, n_q=135, n_k=280, d=columns, d_v=columns - 8, dtype=dtype, rule=rule)
    inputs = make_inputs(case, "cpu", seed)
    (out, lse), report = attend("cpu", case, inputs, seed)
    check(case, inputs, out, lse)
    keys, boxes = 128 if columns <= 192 else 64, columns // 64
    ends = {0: (280, 280), 1: (273, 280), 2: (280, 280)}[seed % 3]  # of what each row tile sees
    begins = {2: (0, 173)}.get(seed % 3, (0, 0))
    tiles = sum(-(-end // keys) - begin // keys for begin, end in zip(begins, ends, strict=True)) * case.heads_q
    products = keys // 16 * (boxes + (1 if boxes <= 4 else boxes))  # of 64 keys; of all columns, or of 64
    assert report["kernel"] == ForwardFused("f16" if dtype == F16 else "bf16", columns).name
    assert report["wgmma"] == tiles * products * 8  # each warp counts


@pytest.mark.parametrize("falling", [False, True], ids=["rising", "falling"])
@pytest.mark.parametrize("steepness, dtype", [(1.0, F16), (12.0, F16), (12.0, BF16)], ids=str)
def test_references_that_move(steepness, dtype, falling, device):
    case = Case(heads_kv=1, n_q=140, n_k=1100, d=64, dtype=dtype)
    inputs = steep_inputs(case, device, steepness, falling)
    check(case, inputs, *attend(device, case, inputs, seed=2)[0])


def test_rows_move_one_by_one(device):
    """Of each pair of rows, of a warp, of a quad: some move in the third tile, some in the eighth, some never."""
    case = Case(heads_q=1, heads_kv=1, n_q=128, n_k=1030, d=64, dtype=F16)
    q, k, v, _ = (x if x is None else x.clone() for x in make_inputs(case, device))
    q[..., :2] = 0
    q[:, :, 3::7, 0], q[:, :, 5::11, 1] = 16.0, 24.0
    k[..., :2] = 0
    k[:, :, 300, 0], k[:, :, 900, 1] = 12.0, 20.0
    check(case, (q, k, v, None), *attend(device, case, (q, k, v, None), seed=3)[0])


def test_rows_that_see_nothing_for_long(device):
    """Rows whose first key comes in a later tile, or never."""
    case = Case(heads_kv=1, n_q=140, n_k=1100, d=64)
    q, k, v, _ = make_inputs(case, device)
    first = (torch.arange(140) * 9).view(1, 1, -1, 1)
    mask = (torch.arange(1100).view(1, 1, 1, -1) >= first).to(q.device)
    (out, lse), _ = attend(device, case, (q, k, v, mask), seed=4)
    check(case, (q, k, v, mask), out, lse)
    assert torch.isneginf(lse[:, :, -17:]).all() and not out[:, :, -17:].any()


def test_bits_repeat(device, monkeypatch):
    """On any schedule, by any number of blocks."""
    case = Case(heads_kv=1, n_q=300, n_k=530, d=64, rule={"causal": True})
    inputs = steep_inputs(case, device, 6.0, False)
    results = []
    for seed, blocks in ((0, 2), (1, 3), (3, 1), (7, 2)) if device == "cpu" else ((0, 2),) * 50:
        monkeypatch.setattr(emulated, "RESIDENT_BLOCKS", blocks)
        results.append(attend(device, case, inputs, seed)[0])
    check(case, inputs, *results[0])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("case", PACKED_CASES, ids=[case.id for case in PACKED_CASES])
def test_packed_sequences(case, device):
    inputs = make_packed_inputs(case, device)
    computes = min(inputs[5:]) > 0
    with emulate("sm_90a", seed=3) if device == "cpu" else nullcontext() as reports:
        out, lse = ffpa_varlen(*inputs, return_lse=True, **case.rule)
    assert reports is None or [r["kernel"][:13] for r in reports] == ["forward_fused"] * computes
    check_packed(case, inputs, out, lse)


def test_packed_qkv(device):
    """q, k and v as columns of one tensor, the rows of each three head dims apart; the result into a strided tensor."""
    case = Case(n_q=140, n_k=140, d=64, layout="BNHD", rule={"causal": True})
    x = torch.randn(1, 140, 3, 2, 64, generator=torch.Generator().manual_seed(0)).to(device, BF16)
    inputs = (*x.unbind(2), None)
    out = torch.full((1, 140, 3, 64), torch.nan, dtype=BF16, device=x.device)
    (_, lse), _ = attend(device, case, inputs, out=out[:, :, :2])
    check(case, inputs, out[:, :, :2], lse)
    assert out[:, :, 2].isnan().all()


def test_without_an_lse(device):
    case = Case(n_q=140, n_k=300, d=64)
    inputs = make_inputs(case, device)
    want = attend(device, case, inputs)[0][0]
    assert torch.equal(run(device, lambda: ffpa(*inputs[:3]))[0], want)


@pytest.mark.large
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "head", "row"])
def test_more_than_31_bits_of_offsets(dim, device):
    """Views of 4 GB that are never written but where the tensors are."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 10 << 30:
        pytest.skip("needs 10 GB")
    case, inputs, out = far_apart(dim, device, d=64)
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
@pytest.mark.parametrize("d", FUSED_COLUMNS)
def test_bits_repeat_on_a_gpu(d, device):
    check_bits_repeat(d, partial(attend, device))


@on_a_gpu
def test_graph_replays_on_a_gpu(device):
    check_graph_replays(256)


# ---- the plan ----

PROBLEM = Problem(
    "forward", "cuda", "sm_90", "bf16", 1, 32, 8, 8192, 8192, 256, 256, None, Visibility(-1, -1, False), 0.04, 0.0, None, True, None, "f32", None
)  # fmt: skip


def test_what_runs(monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda spec, arch: None)

    def planned(**changes):
        flags = {name: changes.pop(name) for name in list(changes) if name.isupper()}
        return CANDIDATES["hopper"](PROBLEM._replace(**changes), {**env.all_flags(), **flags})

    for d_qk, d_v, columns in (
        (8, 8, 64),
        (64, 72, 128),
        (192, 128, 192),
        (40, 256, 256),
        (264, 8, 320),
        (320, 320, 320),
    ):
        assert planned(d_qk=d_qk, d_v=d_v, packed=(8192, 8192)) == FusedPlan(ForwardFused("bf16", columns))
    for changes, why in (
        ({"acc": "f16", "dtype": "f16"}, "accumulates in f32"),
        ({"num_stages": 2}, "num_stages"),
        ({"n_q": 2**31 - 9000}, "32 bits"),
        ({"n_q": 1}, "32 row tiles leave most of 132"),
        ({"n_q": 64, "batch": 100}, "64 rows leave half of a tile of 128 empty"),
        ({"packed": (2**30, 2**30), "batch": 2**20 - 31}, "row tiles in 32 bits"),
        ({"ENABLE_FFPA_SMEM_SWIZZLE_Q": True}, "SWIZZLE_Q"),
    ):
        assert why in planned(**changes), changes
    assert isinstance(planned(n_q=1, FFPA_BACKEND="hopper"), FusedPlan)
    assert isinstance(planned(FFPA_WORKSPACE_MB=1), FusedPlan)
    assert planned(d_v=328).kernel.startswith("forward_two_phase")
