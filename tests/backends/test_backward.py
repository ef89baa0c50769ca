"""Tests the backward on our compiled kernels: every case, in the emulator everywhere and on a GPU where there is one.

The forward is whatever the case gets by itself; only the backward is forced.
"""

import contextlib
from itertools import product

import compare
import ffpa_attn
import oracle
import pytest
import test_memory
import test_numerics
import torch
from cases import CASES, PACKED_CASES, Case, PackedCase, make_inputs, offsets
from ffpa_attn import env
from ffpa_attn.backends import backward, backward_chunks, backward_short, reference
from ffpa_attn.backends.backward_chunks import KEY_TILE, ROW_TILE, Chunk, Pass
from ffpa_attn.operators import ops
from ffpa_attn.specs.problem import Problem, Visibility
from ffpa_attn.specs.spec import MMA_PRODUCT_TILES, PRODUCT_TILES
from ffpa_attn.testing import emulate

# Backends, and the architecture that emulates each; "short" is mma where the keys fit one tile.
ARCHS = {"hopper": "sm_90a", "mma": "sm_80", "short": "sm_90a"}
BACKENDS = pytest.mark.parametrize("backend", ["hopper", "mma"])
BACKENDS_AND_SHORT = pytest.mark.parametrize("backend", list(ARCHS))
PROBLEM = Problem(
    "backward", "cuda", "sm_90", "bf16", 1, 32, 32, 8192, 8192, 512, 512, None, Visibility(-1, -1, False), 0.1, 0.0, None, True, None, "f32", None
)  # fmt: skip


@contextlib.contextmanager
def garbage_in_new_memory():
    """Fills new memory with NaN, where it is to hold floats."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def forced(monkeypatch):
    """Gives forced(backend, device, seed): from then on backwards run there; it returns the emulator's reports."""

    def force(backend: str, device: str, seed: int = 0) -> list[dict]:
        if device == "cuda" and backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a Hopper GPU")
        reports, run = [], ops._backward
        ops._plans.clear()
        if backend == "mma":
            monkeypatch.setattr(backward_short, "plan", lambda p: "it is left out")

        def run_there(*args):
            with contextlib.ExitStack() as stack:
                if device == "cpu":
                    stack.enter_context(garbage_in_new_memory())
                    found = stack.enter_context(emulate(ARCHS[backend], seed=seed))
                    stack.callback(lambda: reports.extend(found))
                stack.enter_context(env.overridden("FFPA_BACKEND", "mma" if backend == "short" else backend))
                return run(*args)

        monkeypatch.setattr(ops, "_backward", run_there)
        return reports

    return force


@BACKENDS
@test_numerics.by_id(CASES)
def test_gradients(case, backend, device, forced, monkeypatch):
    reports = forced(backend, device)
    if "softcap" not in case.rule:
        monkeypatch.setattr(reference, "mask_gradient", None)  # the gradient of a mask is the kernels' too
    test_numerics.test_gradients(case, device)
    if device == "cpu" and case.batch * case.n_q * case.n_k:
        kernels = [report["kernel"] for report in reports]
        assert "backward_rows" in kernels[0] and all("backward" in name for name in kernels) and len(kernels) == 4
        assert all(report["bank_conflict_ratio"] < 1.2 for report in reports)


@BACKENDS
@test_numerics.by_id(PACKED_CASES)
def test_packed(case, backend, device, forced, monkeypatch):
    forced(backend, device)
    test_numerics.test_packed(case, device, "read", monkeypatch)


@BACKENDS
@pytest.mark.parametrize("cap_mb, kinds", [(8, {(True, True)}), (2, {(True, False), (False, True)})])
def test_packed_in_chunks(cap_mb, kinds, backend, device, forced, monkeypatch):
    """Chunks begin and end within sequences, and between them."""
    forced(backend, device)
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap_mb))
    case = PackedCase((300, 0, 5, 530), (280, 9, 0, 540), heads_q=2, heads_kv=1, d=24, rule={"causal": True})
    test_numerics.test_packed(case, device, "read", monkeypatch)
    assert {(chunk.of_q, chunk.of_k) for chunk in last_chunks()} == kinds and len(last_chunks()) > 2


@BACKENDS
def test_many_sequences_in_chunks(backend, device, forced, monkeypatch):
    """Sums of dK and dV wait for the one sequence that a chunk cuts: some end where the next begins, one goes on."""
    forced(backend, device)
    monkeypatch.setenv("FFPA_WORKSPACE_MB", "4")
    case = PackedCase((600, 5, 1300, 0, 700, 5, 290), (300, 40, 260, 5, 300, 20, 290), heads_q=1, heads_kv=1, d=24)
    test_numerics.test_packed(case, device, "read", monkeypatch)
    chunks = last_chunks()
    assert {chunk.turn for chunk in chunks} == {0, 1} and chunks[0].keys > 2 * 512 and all(c.of_q for c in chunks)


@BACKENDS
def test_packed_where_a_row_tile_is_too_much(backend, device, forced, monkeypatch):
    """dQ is summed over chunks of keys, dK and dV over those of rows."""
    forced(backend, device)
    monkeypatch.setenv("FFPA_WORKSPACE_MB", "2")
    case = PackedCase((40, 20), (1100, 5), heads_q=1, heads_kv=1, d=448)
    test_numerics.test_packed(case, device, "read", monkeypatch)
    assert {(c.of_q, c.of_k, c.keys < 1280) for c in last_chunks()} == {(True, False, True), (False, True, True)}


LONGER = Case(heads_q=4, heads_kv=2, n_q=600, n_k=520, d=320, d_v=264, rule={"causal": True})


@BACKENDS
@pytest.mark.parametrize("seed", [1, 3])
def test_schedules(seed, backend, device, forced):
    """There are more tiles than blocks, and the warps run in other orders."""
    forced(backend, device, seed)
    case = LONGER.with_(heads_q=2, heads_kv=1, n_q=300, rule={"window": (200, 100)}, mask="bool-some-rows-empty")
    test_numerics.test_gradients(case, device)


def gradients_of(case: Case, device, cap_mb: int | None = None, **options):
    inputs = test_numerics.leaves(*make_inputs(case, device))
    q, k, v, *mask = inputs
    out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True, mask=mask[0] if mask else None, layout=case.layout, **case.rule)
    g = test_numerics.random_like(out, 7)
    rule = {name: value for name, value in case.rule.items() if name != "window"}
    rule |= dict(zip(("window_left", "window_right"), case.rule.get("window", ()), strict=False))
    with env.overridden("FFPA_WORKSPACE_MB", str(cap_mb)) if cap_mb else contextlib.nullcontext():
        return torch.ops.ffpa_attn.backward(
            g, None, q.detach(), k.detach(), v.detach(), out.detach(), lse.detach(), *(mask[:1] or [None]), layout=case.layout,
            **rule, **options,
        )[:3]  # fmt: skip


@BACKENDS
@pytest.mark.parametrize(
    "case, cap_mb, kinds",
    [
        (LONGER.with_(heads_q=6, n_k=300, d=72), 4, {(True, True)}),
        (LONGER.with_(heads_q=2, heads_kv=1, d=72), 3, {(True, True)}),
        (LONGER.with_(heads_q=2, heads_kv=1, d=72), 2, {(True, False), (False, True)}),
        (LONGER.with_(heads_q=2, heads_kv=1, d=72), 1, {(True, False), (False, True)}),
    ],
    ids=["rows", "keys", "dQ, then dK and dV", "less of both"],
)
def test_workspace_caps(case, cap_mb, kinds, backend, device, forced):
    """Caps cut the work: sums of dK and dV over rows, or of dQ over keys; at last dQ alone, then dK and dV."""
    forced(backend, device)
    whole = gradients_of(case, device)
    got = gradients_of(case, device, cap_mb)
    assert {(chunk.of_q, chunk.of_k) for chunk in last_chunks()} == kinds and len(last_chunks()) > 2
    for name, x, want in zip(("dq", "dk", "dv"), got, whole, strict=True):
        # The sums are the same, in fp32, with their additions in another order.
        assert (x.float() - want.float()).abs().max() <= 2**-7 * want.float().abs().max(), name


@BACKENDS
@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_a_workspace_smaller_than_a_row_tile(align, backend, device, forced):
    """dQ goes by keys, too: its rows see keys of every chunk, or of the first alone."""
    forced(backend, device)
    case = Case(heads_q=1, heads_kv=1, n_q=300, n_k=1300, d=72, rule={"causal": True, "align": align})
    whole = gradients_of(case, device)
    got = gradients_of(case, device, 1)
    of_q = [(chunk.first_tile, chunk.first_key, chunk.end_key) for chunk in last_chunks() if chunk.of_q]
    assert of_q[0][:2] == (0, 0) and of_q[1][:2] == (0, of_q[0][2]) and len(of_q) % 2 == 0
    for name, x, want in zip(("dq", "dk", "dv"), got, whole, strict=True):
        assert (x.float() - want.float()).abs().max() <= 2**-7 * want.float().abs().max(), name


@BACKENDS
def test_small_gradients_keep_their_digits(backend, device, forced):
    """In float16 the workspace holds 2¹² · P, and dS of a small dO all of its digits nevertheless."""
    forced(backend, device)
    q, k, v = (torch.randn(1, 1, n, 64).to(device, torch.float16).requires_grad_() for n in (70, 140, 140))
    grad = torch.randn(1, 1, 70, 64).to(device, torch.float16)
    out = ffpa_attn.ffpa(q, k, v)
    large = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    small = torch.autograd.grad(out, (q, k, v), grad * 2**-10)
    for name, x, want in zip(("dq", "dk", "dv"), small, large, strict=True):
        assert (x.float() * 2**10 - want.float()).abs().max() <= 2**-8 * want.float().abs().max(), name


WINDOW = Case(heads_q=2, heads_kv=1, n_q=800, n_k=800, d=24, rule={"window": (200, 0)})
GROUP = Case(heads_q=2, heads_kv=1, n_q=700, n_k=900, d=72, d_v=24, rule={"causal": True})


@BACKENDS
@pytest.mark.parametrize(
    "case, cap_mb, boxes",
    [
        (GROUP, 4, (2, 2, True)),
        (GROUP.with_(n_k=800), 4, (3, 1, False)),
        (GROUP.with_(n_k=700), 4, (1, 2, False)),
        (GROUP.with_(n_k=700, rule={"window": (400, 300)}), 4, (1, 2, True)),
        (GROUP.with_(n_k=700, rule={"window": (400, 300)}, mask="additive-2d"), 4, (1, 2, False)),
        (GROUP.with_(n_q=300, rule={"causal": True, "align": "top_left"}, mask="additive"), 2, (1, 1, True)),
        (GROUP.with_(heads_q=1, n_q=1100, n_k=300), 2, (2, 1, False)),
        (Case(heads_q=1, heads_kv=1, n_q=530, n_k=1040, d=24, mask="additive-some-rows-empty"), 3, (2, 2, True)),
        (Case(heads_q=1, heads_kv=1, n_q=600, n_k=600, d=256, rule={"causal": True}), 2, (1, 1, False)),
        (WINDOW, 3, (2, 3, True)),
        (WINDOW.with_(heads_q=1, n_q=2100, n_k=2100, mask="additive-2d"), 4, (1, 3, False)),
    ],
    ids=[
        "by rows",
        "by keys",
        "keys unseen by one head's rows",
        "window by rows",
        "window by keys",
        "keys unseen",
        "rows without keys",
        "no rule",
        "wide tiles",
        "bands by rows",
        "bands by keys",
    ],
)
def test_boxes_of_rows_and_keys(case, cap_mb, boxes, backend, device, forced, monkeypatch):
    """dQ, dK and dV are summed at once, from the first chunk that sees some to the last; what none sees, never."""
    forced(backend, device)
    of_pass = Pass(*boxes, of_q=True, of_k=True)
    monkeypatch.setattr(reference, "mask_gradient", None)
    monkeypatch.setattr(backward_chunks, "_fastest_passes", lambda *args: [of_pass])
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap_mb))
    test_numerics.test_gradients(case, device)
    chunks = last_chunks()
    assert len({c.first_tile for c in chunks}) > 1 and len({c.first_key for c in chunks}) > 1
    assert max(c.row_tiles for c in chunks) == of_pass.row_tiles


WINDOWS = {  # each has a case, and the key tiles that a row of the workspace has
    "window": (WINDOW, 2),
    "causal": (WINDOW.with_(n_q=300, n_k=900, d=72, d_v=24, rule={"causal": True, "window": (256, 256)}), 2),
    "both sides": (WINDOW.with_(heads_q=1, batch=2, n_q=600, rule={"window": (100, 300)}, mask="additive"), 3),
    "rows without keys": (WINDOW.with_(n_q=1100, n_k=860, rule={"window": (60, 30)}, mask="additive-2d"), 1),
    "keys without rows": (WINDOW.with_(n_q=300, rule={"window": (10, 20), "align": "top_left"}, mask="additive"), 1),
    "rows end amid a band": (WINDOW.with_(n_q=290, n_k=600, rule={"window": (192, 20), "align": "top_left"}), 2),
    "the diagonal": (WINDOW.with_(n_q=520, n_k=520, rule={"window": (0, 0)}), 1),
    "packed": (PackedCase((600, 5, 270, 300), (620, 800, 9, 320), 2, 1, d=24, rule={"window": (140, 20)}), 2),
    "packed from the first": (
        PackedCase((300, 5, 270), (320, 800, 9), 2, 1, d=24, rule={"window": (140, 0), "align": "top_left"}), 2,
    ),
}  # fmt: skip


@BACKENDS
@pytest.mark.parametrize("name", list(WINDOWS))
def test_windows(name, backend, device, forced, monkeypatch):
    """A row of the workspace has the keys of its window alone."""
    forced(backend, device)
    case, key_tiles = WINDOWS[name]
    monkeypatch.setattr(reference, "mask_gradient", None)
    if isinstance(case, PackedCase):
        test_numerics.test_packed(case, device, "read", monkeypatch)
    else:
        test_numerics.test_gradients(case, device)
    assert last_plan().most_columns == key_tiles * KEY_TILE < last_chunks()[0].keys


@BACKENDS
@pytest.mark.parametrize("name", ["window", "keys without rows"])
def test_windows_change_no_bit(name, backend, device, forced, monkeypatch):
    """Where no score tile sees all of its keys, bits are those of a workspace whose rows have all keys."""

    class WithoutBands(backward_chunks.Work):
        def __init__(self, p: Problem):
            super().__init__(p)
            self.columns = self.keys_of_longest

    forced(backend, device)
    case, _ = WINDOWS[name]
    got = gradients_of(case, device)
    ops._plans.clear()
    monkeypatch.setattr(backward, "Work", WithoutBands)
    assert all(map(torch.equal, got, gradients_of(case, device)))


def last_plan() -> backward.BackwardPlan:
    return [plan.choice.plan for plan in ops._plans.values() if hasattr(plan.choice.plan, "chunks")][-1]


def last_chunks() -> list[Chunk]:
    return list(last_plan().all_chunks)


LONG_AND_NARROW = LONGER.with_(d=64, d_v=None, heads_kv=1)


@BACKENDS
@pytest.mark.parametrize(
    "case, cap_mb, kinds",
    [
        (Case(3, 4, 2, 400, 200, 24, mask="additive-some-rows-empty", layout="BNHD", rule={"window": (90, 60)}), 4, {(3, 4, True, True)}),
        (LONG_AND_NARROW.with_(heads_q=3, mask="additive"), 6, {(1, 6, True, True), (1, 3, True, True)}),
        (LONG_AND_NARROW.with_(heads_q=2, mask="additive-2d"), 2, {(1, 3, True, False)}),
        (Case(heads_q=2, heads_kv=1, n_q=40, n_k=1300, d=24, mask="additive-2d"), 1, {(1, 2, True, True)}),
    ],
    ids=["entries", "heads", "rows, then keys", "keys"],
)  # fmt: skip
def test_mask_gradients_by_chunks(case, cap_mb, kinds, backend, device, forced, monkeypatch):
    """Every pair counts once, whatever memory held where none are visible."""
    forced(backend, device)
    monkeypatch.setattr(reference, "mask_gradient", None)
    monkeypatch.setenv("FFPA_WORKSPACE_MB", str(cap_mb))
    test_numerics.test_gradients(case, device)
    assert kinds <= {(chunk.entries, chunk.row_tiles, chunk.of_q, chunk.of_k) for chunk in last_chunks()}


MASK_SHAPES = list(product((True, False), repeat=4))  # for each dim, whether all its elements are the mask's own


@BACKENDS
def test_masks_shared_in_every_way(backend, device, forced, monkeypatch):
    """Each gradient is the sum of that of a mask which nothing shares. (PyTorch is no yardstick where all keys of a row
    share an element: rounding and dLSE are all that is left there.)
    """
    forced(backend, device)
    monkeypatch.setattr(reference, "mask_gradient", None)
    q, k, v, _ = make_inputs(Case(batch=2, heads_kv=1, n_q=30, n_k=40, d=24), device)
    q, k, v, one = q.clone(), k.clone(), v.clone(), torch.full((1, 1, 1, 1), 0.5, device=device)
    out, lse = ffpa_attn.ffpa(q, k, v, mask=one, return_lse=True)
    g, g_lse = test_numerics.random_like(out, 7), test_numerics.random_like(lse, 8)
    of_pairs = None
    for own in MASK_SHAPES:
        mask = one.expand([size if of_own else 1 for size, of_own in zip((2, 2, 30, 40), own, strict=True)]).clone()
        got = torch.ops.ffpa_attn.backward(g, g_lse, q, k, v, out, lse, mask, mask_grad=True)[3]
        of_pairs = got if of_pairs is None else of_pairs
        torch.testing.assert_close(got.double(), of_pairs.double().sum_to_size(mask.shape), atol=1e-5, rtol=1e-5)


@BACKENDS
@pytest.mark.parametrize("rule", [{}, {"causal": True, "softcap": 8.0}], ids=["plain", "rules"])
@pytest.mark.parametrize("mask", ["bool", "bool-keys", "bool-some-rows-empty"])
def test_bool_masks_that_are_aligned(mask, rule, backend, device, forced):
    """Rows of a mask begin at multiples of 16 bytes."""
    forced(backend, device)
    case = Case(batch=2, heads_kv=1, n_q=70, n_k=336, d=24, mask=mask, rule=rule)
    test_numerics.test_gradients(case, device)


@BACKENDS
def test_any_byte_but_0_is_true(backend, device, forced):
    forced(backend, device)
    case = Case(n_q=40, n_k=320, d=24, mask="bool")
    q, k, v, mask = make_inputs(case, device)
    out, lse = ffpa_attn.ffpa(q, k, v, mask=mask, return_lse=True)
    g = test_numerics.random_like(out, 7)
    numbers = torch.arange(mask.numel(), device=device, dtype=torch.int64).view(mask.shape) % 255 + 1
    others = (mask * numbers).to(torch.uint8).view(torch.bool)
    got, want = (torch.ops.ffpa_attn.backward(g, None, q, k, v, out, lse, x)[:3] for x in (others, mask))
    assert all(map(torch.equal, got, want))


@BACKENDS_AND_SHORT
@pytest.mark.parametrize("n_q, n_k", [(0, 5), (5, 0)])
def test_a_mask_of_nothing(n_q, n_k, backend, device, forced):
    forced(backend, device)
    q, k, v, _ = make_inputs(Case(n_q=n_q, n_k=n_k), device)
    mask = torch.zeros(1, 2, 1, 1, device=device)
    out, lse = ffpa_attn.ffpa(q, k, v, mask=mask, return_lse=True)
    assert not torch.ops.ffpa_attn.backward(out, None, q, k, v, out, lse, mask, mask_grad=True)[3].any()


@pytest.mark.parametrize("heads, floats", [(2, 0), (1, 1)])
def test_mask_gradients_take_no_workspace(heads, floats, device, forced):
    """Mask gradients take memory for themselves, and for fp32 sums where elements are shared."""
    forced("mma", device)
    q, k, v, _ = make_inputs(Case(heads_kv=1, n_q=300, n_k=280, d=24), device)
    mask = torch.zeros(1, heads, 300, 280, dtype=q.dtype, device=device)
    out, lse = ffpa_attn.ffpa(q, k, v, mask=mask, return_lse=True)

    def peak(mask_grad: bool) -> int:
        args = out, None, q, k, v, out, lse, mask
        return test_memory.peak_of(device, lambda: ops._BODIES["backward"](*args, mask_grad=mask_grad))

    assert peak(True) - peak(False) <= mask.numel() * (2 + 4 * floats) + (1 << 17)


# Each row has key/value heads, query heads of each, rows and keys; then the chunks of three batch entries.
CHUNKS = {
    "entries": ((3, 1, 200, 300), [(0, 5, 0, 1), (5, 4, 0, 1)]),
    "more entries": ((2, 2, 300, 200), [(0, 1, 0, 4), (1, 4, 0, 4), (5, 1, 0, 4)]),
    "heads": ((1, 3, 300, 512), [(entry, 1, *tiles) for entry in range(3) for tiles in ((0, 2), (2, 6))]),
    "rows": ((2, 2, 600, 9), [(entry, 1, *tiles) for entry in range(6) for tiles in ((0, 2), (2, 3), (3, 5), (5, 6))]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", list(CHUNKS))
def test_pairs_of_chunks_count_once(name, dtype):
    (heads_kv, group, n_q, n_k), places = CHUNKS[name]
    shape = (3, heads_kv * group, n_q, n_k)
    of_pairs = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    tiles_of_head, keys = -(-n_q // ROW_TILE), -(-n_k // KEY_TILE) * KEY_TILE
    workspaces = []
    for place in places:
        chunk = Chunk(*place, 0, keys, 0, True, True)
        ds = torch.full((chunk.pairs + 100,), torch.nan, dtype=torch.bfloat16)
        by_tile = ds[: chunk.pairs].view(chunk.entries, chunk.row_tiles, ROW_TILE, keys)
        for entry, tile in product(range(chunk.entries), range(chunk.row_tiles)):  # the order of backward/tiles.cuh
            batch, head_kv = divmod(chunk.first_entry + entry, heads_kv)
            head, tile_of_head = divmod(chunk.first_tile + tile, tiles_of_head)
            rows = of_pairs[batch, head_kv * group + head, tile_of_head * ROW_TILE :][:ROW_TILE]
            by_tile[entry, tile, : len(rows), :n_k] = rows
        workspaces.append((ds, chunk))
    for own in MASK_SHAPES:
        d_mask = torch.full([n if of_own else 1 for n, of_own in zip(shape, own, strict=True)], torch.nan, dtype=dtype)
        q, k = torch.empty(*shape[:3], 8), torch.empty(3, heads_kv, n_k, 8)
        gradient = backward.MaskGradient(d_mask, q, k, Visibility(-1, -1, False), keys)
        for ds, chunk in workspaces:
            gradient.add(ds, chunk, scratch=torch.full((chunk.pairs // 2,), torch.nan))
        gradient.finish()
        assert torch.equal(d_mask, of_pairs.float().sum_to_size(d_mask.shape).to(dtype)), own


@pytest.mark.parametrize("n_q, n_k", [(700, 900), (1200, 790)])
def test_pairs_of_bands_count_once(n_q, n_k):
    """Column 0 is another key in each row tile, and one of a chunk's keys or not; rows see some keys or none."""
    work = work_of(n_q, n_k, left=100, right=20)
    rows, keys = torch.arange(n_q)[:, None], torch.arange(n_k)
    seen = (keys >= rows + work.nearest) & (keys <= rows + work.farthest)
    of_pairs = torch.randint(-4, 5, (2, 3, n_q, n_k), generator=torch.Generator().manual_seed(0)) * seen
    q, k = torch.empty(2, 3, n_q, 8), torch.empty(2, 3, n_k, 8)
    for own in MASK_SHAPES:
        d_mask = torch.full([n if of_own else 1 for n, of_own in zip(of_pairs.shape, own, strict=True)], torch.nan)
        gradient = backward.MaskGradient(d_mask, q, k, Visibility(100, 20, False), work.columns)
        for first_key, end_key in ((0, 768), (768, work.keys)):
            chunk = Chunk(0, 6, 0, work.tiles, first_key, end_key, 0, True, True)
            ds = torch.zeros(6, work.tiles, ROW_TILE, gradient.pairs(chunk) // chunk.rows)
            for row in range(n_q):
                first = max((row // 128 * 128 + work.nearest) // 64 * 64, 0) if end_key == 768 else first_key
                of_row = of_pairs.flatten(0, 1)[:, row, first : min(end_key, first + ds.shape[-1])]
                ds.flatten(1, 2)[:, row, : of_row.shape[-1]] = of_row
            gradient.add(ds.flatten(), chunk, scratch=torch.full((chunk.pairs // 2,), torch.nan))
        gradient.finish()
        assert torch.equal(d_mask, of_pairs.float().sum_to_size(d_mask.shape)), own


def work_of(n_q, n_k, group=1, d=512, left=-1, right=-1, top_left=False, **more) -> backward_chunks.Work:
    """Returns what backward.plan makes of such a problem."""
    rule = {"visibility": Visibility(left, right, top_left), "heads_q": 3 * group, "heads_kv": 3, "d_qk": d, "d_v": d}
    return backward_chunks.Work(PROBLEM._replace(n_q=n_q, n_k=n_k, **rule, **more))


def visible_tiles(work) -> torch.Tensor:
    """Returns [row tiles of a head, key tiles]: whether some row sees some key, row by row."""
    rows = torch.arange(work.n_q)
    low = rows * 0 if work.nearest is None else (rows + work.nearest).clamp_min(0)
    end = rows * 0 + work.n_k if work.farthest is None else (rows + work.farthest + 1).clamp(0, work.n_k)
    tiles = torch.zeros(work.tiles_of_head, work.tiles_of_keys + 1, dtype=torch.int32)
    some = low < end
    tiles.index_put_(
        (rows[some] // ROW_TILE, low[some] // KEY_TILE), torch.tensor(1, dtype=torch.int32), accumulate=True
    )
    last = (end[some] - 1) // KEY_TILE + 1
    tiles.index_put_((rows[some] // ROW_TILE, last), torch.tensor(-1, dtype=torch.int32), accumulate=True)
    return tiles.cumsum(1)[:, :-1] > 0


class Sums:
    """What becomes of the sums of all row tiles, or of all key tiles, of an entry from chunk to chunk, as
    backward/tiles.cuh and backward/gradient_writer.cuh have it.
    """

    def __init__(self, visible: torch.Tensor, places: int):
        """`visible` is [those that have sums, what these are over]."""
        count, over = visible.shape
        self.seen = visible.any(1)
        self.first = torch.where(self.seen, visible.int().argmax(1), 0)
        self.end = torch.where(self.seen, over - visible.flip(1).int().argmax(1), 0)
        self.at, self.is_done = self.first.clone(), torch.zeros(count, dtype=torch.bool)
        self.owner = torch.full((max(places, 1),), -1)
        self.moved = 0  # sums written or read

    def add(self, mine: slice, over: tuple[int, int], place: int) -> None:
        here = torch.arange(mine.start, mine.stop)
        part = here[torch.maximum(self.first[mine], torch.tensor(over[0])) < self.end[mine].clamp_max(over[1])]
        places = part - mine.start + place
        continues, is_last = self.first[part] < over[0], self.end[part] <= over[1]
        assert not self.is_done[part].any() and (self.at[part] <= torch.clamp_min(self.first[part], over[0])).all()
        assert torch.equal(self.owner[places[continues]], part[continues]), "sums of another tile"
        self.owner[places[~is_last]] = part[~is_last]  # an IndexError means that there is no place
        self.is_done[part[is_last]] = True
        self.at[part] = self.end[part].clamp_max(over[1])
        self.moved += int(continues.sum() + (~is_last).sum())


def follow(work, cut) -> tuple[Sums, Sums]:
    """Follows all chunks of an entry, in their order: every visible pair counts once for dQ and once for dK and dV."""
    of_head = visible_tiles(work)
    visible = of_head.repeat(work.group, 1)
    sums = Sums(visible, cut.row_tiles_kept), Sums(visible.T, cut.keys_kept // KEY_TILE)
    counted = torch.zeros(2, *visible.shape, dtype=torch.int8)
    for c in cut.chunks:
        rows, keys = slice(c.first_tile, c.end_tile), slice(c.first_key // KEY_TILE, c.end_key // KEY_TILE)
        assert visible[rows, keys].any(), "nobody sees it"
        if c.of_q:
            counted[0, rows, keys] += 1
            sums[0].add(rows, (keys.start, keys.stop), c.tiles_before)
        if c.of_k:
            counted[1, rows, keys] += 1
            sums[1].add(keys, (rows.start, rows.stop), c.keys_before // KEY_TILE)
    assert (counted <= 1).all() and (counted[:, visible] == 1).all()
    assert all(torch.equal(x.is_done, x.seen) for x in sums)
    return sums


def bytes_of_sums(work, cut) -> int:
    of_q = cut.row_tiles_kept * ROW_TILE * backward_chunks.sums_of_row(work, cut.of_q.columns)
    of_k = cut.keys_kept * backward_chunks.sums_of_key(work, cut.of_k.columns)
    return 4 * (of_q + of_k if any(c.of_q and c.of_k for c in cut.chunks) else max(of_q, of_k))


SEEN = {
    "all": {},
    "causal": {"right": 0},
    "top_left": {"right": 0, "top_left": True},
    "window": {"left": 700, "right": 300},
    "after": {"left": 0, "top_left": True},
    "behind": {"left": 4095, "right": 0},
}


@pytest.mark.parametrize(
    "mb, n",
    [
        (4, 100),
        (4, 2000),
        (4, 16384),
        (64, 100),
        (64, 8192),
        (130, 131072),
        (256, 131072),
        (1024, 8192),
        (1024, 65536),
        (1024, 131072),
    ],
)
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("seen", [*SEEN, "packed"])
def test_chunks_cover_everything_once_within_the_cap(mb, n, group, seen):
    cap = mb << 20
    if seen == "packed":
        work = work_of(n // 2, n, group, batch=7, packed=(n, n + 300))
    else:
        n_k = {"after": max(n - 300, 50), "behind": n // 4 + 50}.get(seen, n + 300)
        work = work_of(n, n_k, group, **SEEN[seen])
    cut = backward_chunks.cut(work, PRODUCT_TILES, cap)
    largest = max(c.rows * work.columns_of(c.keys) for c in cut.chunks)
    assert 4 * largest + bytes_of_sums(work, cut) <= cap
    if seen != "packed":
        for c in cut.chunks:
            whole_heads = c.first_tile % work.tiles_of_head == 0 == c.row_tiles % work.tiles_of_head
            assert whole_heads or c.first_tile // work.tiles_of_head == (c.end_tile - 1) // work.tiles_of_head
        if cut.entries > 1:
            follow(work, cut)
            return
    # These chunks have whole entries, or packed sequences, of which nobody knows what is seen: all pairs count.
    all_chunks = [c._replace(first_entry=c.first_entry + entry) for entry in range(cut.entries) for c in cut.chunks]
    for of in ("of_q", "of_k"):
        for entry in range(3):
            chunks = [c for c in all_chunks if getattr(c, of) and c.first_entry <= entry < c.first_entry + c.entries]
            assert sum(c.row_tiles * c.keys for c in chunks) == work.tiles * work.keys
            corners = [(c.first_tile, c.first_key) for c in chunks]
            # Sums go on where the last chunk of the same keys, or rows, left them.
            assert sorted(corners, key=(lambda at: at) if of == "of_q" else (lambda at: at[::-1])) == corners
            assert len(set(corners)) == len(corners)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n, group, d", [(32_768, 1, 512), (65_536, 8, 320), (131_072, 1, 1024)])
def test_sums_of_dq_lie_apart_from_those_of_dk_and_dv(n, group, d, causal):
    """Where a chunk gives all gradients, dK and dV begin while dQ is computed."""
    see = Visibility(-1, 0 if causal else -1, False)
    problem = PROBLEM._replace(heads_kv=32 // group, n_q=n, n_k=n, d_qk=d, d_v=d, visibility=see)
    plan = backward.plan(problem, "hopper", 1 << 30)
    waiting = [c for c in plan.chunks if c.of_q and c.of_k and c.keys < n]
    assert waiting or all(c.keys >= n for c in plan.chunks)
    for chunk in waiting:
        end = plan.sums_at(chunk, True) + chunk.row_tiles * plan.sums_of_tile
        assert end <= plan.sums_of_k_at <= plan.sums_at(chunk, False)


@pytest.mark.parametrize("n", [20_000, 32_768, 65_536, 131_072, 262_144])
@pytest.mark.parametrize("d", [512, 1024])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 8])
def test_sums_of_long_sequences_cost_little(n, d, causal, group):
    """Sums take little time under 1 GiB, at 3.5 TB/s beside 650 TFLOPS; P is computed once where possible."""
    work = work_of(n, n, group, d, right=0 if causal else -1)
    cut = backward_chunks.cut(work, PRODUCT_TILES, 1 << 30)
    of_q, of_k = follow(work, cut)
    width_q, width_k = (f(work, cut.of_q.columns) for f in (backward_chunks.sums_of_row, backward_chunks.sums_of_key))
    seconds = 4 * (of_q.moved * ROW_TILE * width_q + of_k.moved * KEY_TILE * width_k) / 3.5e12
    assert seconds < 0.06 * 10 * d * work.seen * n * n * group / 650e12
    least_sums = 4 * n * min(group * d, 2 * d)  # bytes of the sums of all rows, or of all keys
    assert all(c.of_q and c.of_k for c in cut.chunks) == (least_sums <= 1 << 29)
    # Multiprocessors have enough tiles, too: as many pairs as half of the cap holds, whatever a mask hides.
    assert max(c.pairs for c in cut.chunks) * 4 >= 1 << 28


@pytest.mark.parametrize("d", [64, 224, 256, 320, 448, 512, 640, 768, 1024, 2048])
@pytest.mark.parametrize("packed", [None, (9000, 9000)], ids=["dense", "packed"])
@pytest.mark.parametrize("backend", ["hopper", "mma"])
def test_caps_that_are_enough(backend, packed, d):
    """Caps from 1 MiB and 2 KiB a column on are, as in the README. What smaller ones have no room for is refused."""
    problem = PROBLEM._replace(
        direction="backward", batch=4, heads_q=8, heads_kv=8, n_q=9000, n_k=9000, d_qk=d, d_v=d, packed=packed
    )
    enough = -(-(512 + d) // 512)
    for mb in range(1, enough + 1):
        for d_v in (d, 64, 1024) if mb < enough else (d,):
            plan = backward.plan(problem._replace(d_v=d_v), backend, mb << 20)
            if isinstance(plan, str):
                assert mb < enough and "MiB of workspace" in plan
                continue
            tiles = 9000 // 256 + (4 if packed else 1)
            for of in ("of_q", "of_k"):
                area = sum(c.entries * c.row_tiles * c.keys for c in plan.all_chunks if getattr(c, of))
                assert area == (8 if packed else 32) * tiles * tiles * KEY_TILE, (mb, d_v, of)


def test_packed_sequences_are_computed_once():
    """However many sequences there are, sums of dK and dV wait for no more than one at a time."""
    for sequences, n, d in ((512, 512, 512), (128, 2048, 512), (64, 2048, 1024)):
        rows = sequences * n
        problem = PROBLEM._replace(
            direction="backward",
            batch=sequences,
            heads_q=32,
            heads_kv=8,
            n_q=n,
            n_k=n,
            d_qk=d,
            d_v=d,
            packed=(rows, rows),
        )
        plan = backward.plan(problem, "hopper", 1 << 30)
        assert all(chunk.of_q and chunk.of_k for chunk in plan.chunks) and plan.partial_floats < 1 << 24


@BACKENDS
def test_bits_repeat(backend, device, forced):
    """Bits repeat on a GPU with many tiles for each block; and in chunks, whose sums wait for the next."""
    forced(backend, device)
    case, caps, times = LONGER.with_(heads_q=2, heads_kv=1, n_q=300), (None,), 1
    if device == "cuda":
        case, caps, times = LONGER.with_(heads_q=16, heads_kv=8, n_q=3000, n_k=3000), (None, 64), 50
        test_numerics.test_gradients(case, device)
    firsts = [gradients_of(case, device, cap_mb) for cap_mb in caps]
    assert len(caps) == 1 or len(last_chunks()) > 1
    forced(backend, device, seed=2)
    for _ in range(times):
        for cap_mb, first in zip(caps, firsts, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(first, gradients_of(case, device, cap_mb), strict=True))


@BACKENDS_AND_SHORT
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_fp32_gradients(layout, backend, device, forced):
    """Partial results are summed up from gradients in fp32: the 16-bit gradients are these, rounded."""
    forced(backend, device)
    case = LONGER.with_(n_q=70, n_k=90, layout=layout)
    exact, rounded = gradients_of(case, device, fp32_grads=True), gradients_of(case, device)
    for x, y in zip(exact, rounded, strict=True):
        assert x.dtype == torch.float32 and torch.equal(x.to(y.dtype), y)


@BACKENDS_AND_SHORT
def test_the_lse_of_more_keys(backend, device, forced):
    """Ring attention runs a backward over some keys, with out and LSE of all of them; the parts add up."""
    forced(backend, device)
    q, k, v, _ = make_inputs(Case(n_q=70, n_k=200, d=264), device)
    q, k, v = (x.clone() for x in (q, k, v))
    out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True)
    g = test_numerics.random_like(out, 7)

    def run(keys):
        return torch.ops.ffpa_attn.backward(g, None, q, k[:, :, keys], v[:, :, keys], out, lse, fp32_grads=True)

    parts, whole = [run(slice(0, 120)), run(slice(120, None))], run(slice(None))
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], atol=2e-3, rtol=1e-2)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([part[i] for part in parts], 2), whole[i], atol=2e-3, rtol=1e-2)


@BACKENDS_AND_SHORT
@pytest.mark.parametrize("what", ["sum", "expanded heads", "expanded rows", "padded rows", "off 16 bytes"])
def test_strides_of_what_autograd_hands_over(what, backend, device, forced):
    """dO of a sum is one number; that of a broadcast, one row."""
    forced(backend, device)
    q, k, v, _ = make_inputs(Case(n_q=70, n_k=90, d=264), device)

    def run(function, tensors):
        out = function(*tensors)
        if what == "sum":
            return torch.autograd.grad(out.sum(), tensors)
        g = test_numerics.random_like(out, 7).to(out.dtype)
        if what == "expanded heads":
            g = g[:, :1].expand(out.shape)
        elif what == "expanded rows":
            g = g[:, :, :1].expand(out.shape)
        elif what == "off 16 bytes":
            g = torch.cat((g.new_zeros(1), g.flatten()))[1:].view(g.shape)
        else:
            g = torch.nn.functional.pad(g, (0, 3))[..., :-3]
        return torch.autograd.grad(out, tensors, g)

    got = run(ffpa_attn.ffpa, test_numerics.leaves(q, k, v))
    want = run(lambda *x: oracle.attention(*x)[0], test_numerics.leaves(q, k, v))
    base = run(lambda *x: compare.baseline(*x)[0], test_numerics.leaves(q, k, v))
    for name, *three in zip(("dq", "dk", "dv"), got, want, base, strict=True):
        compare.assert_close(name, *three)


@BACKENDS_AND_SHORT
@pytest.mark.parametrize("dim", [0, 2], ids=["batch", "keys"])
def test_heads_that_share_memory(dim, backend, device, forced):
    """K and V are expanded: all their strides there are 0."""
    forced(backend, device)
    q, k, v, _ = make_inputs(Case(batch=2, n_q=40, n_k=90, d=264), device)
    k, v = (x.narrow(dim, 0, 1).clone().expand_as(x) for x in (k, v))
    q = q.clone()
    out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True)
    g = test_numerics.random_like(out, 7)
    got = torch.ops.ffpa_attn.backward(g, None, q, k, v, out, lse)
    want = torch.ops.ffpa_attn.backward(g, None, q, k.contiguous(), v.contiguous(), out, lse)
    assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))


@BACKENDS
@pytest.mark.parametrize("rule", [{"causal": True}, {"window": (20, -1), "align": "top_left"}], ids=["causal", "left"])
def test_more_key_tiles_than_a_warp_has_lanes(rule, backend, device, forced):
    """The lanes of a warp count the score tiles of 32 key tiles at a time."""
    forced(backend, device)
    test_numerics.test_gradients(Case(heads_q=1, heads_kv=1, n_q=300, n_k=8500, d=16, rule=rule), device)


@BACKENDS
@pytest.mark.parametrize("seed", [0, 1])
def test_short_sequences_beside_long_ones(seed, backend, device, forced, monkeypatch):
    """Row tiles of the longest sequence that others have no rows for multiply nothing, and no copy waits."""
    forced(backend, device, seed)
    case = PackedCase((20, 300, 5), (40, 300, 5), heads_q=2, heads_kv=1, d=264, rule={"causal": True})
    test_numerics.test_packed(case, device, "read", monkeypatch)


TILES = [("hopper", tile) for tile in PRODUCT_TILES] + [("mma", tile) for tile in MMA_PRODUCT_TILES]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("backend, tile", TILES, ids=[f"{backend}-{tile.columns}" for backend, tile in TILES])
def test_tiles_of_products(backend, tile, dtype, device, forced, monkeypatch):
    """Sequences end at no multiple of anything; the blocks of a cluster together zero what lies behind."""
    *kernels, _ = backward._FAMILIES[backend]
    monkeypatch.setitem(backward._FAMILIES, backend, (*kernels, (tile,)))
    reports = forced(backend, device, seed=1)
    case = PackedCase((20, 300), (40, 270), heads_q=1, heads_kv=1, d=264, dtype=dtype, rule={"causal": True})
    test_numerics.test_packed(case, device, "read", monkeypatch)
    products = [report["kernel"] for report in reports if "products" in report["kernel"]]
    assert all(f"_columns{tile.columns}" in name for name in products) and bool(products) == (device == "cpu")


@BACKENDS_AND_SHORT
def test_the_last_row_that_sees_a_tile_of_keys(backend, device, forced):
    """The row is the first of a step, whatever a step is; row 64 sees the last key."""
    forced(backend, device)
    case = Case(n_q=70, n_k=64, d=24, rule={"window": (1, 0), "align": "top_left"})
    test_numerics.test_gradients(case, device)


@BACKENDS_AND_SHORT
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_rows_without_keys_pass_on_nothing(softcap, backend, device, forced):
    """Whatever Q, dO and dLSE hold in such rows, neither their own gradients nor those of keys see it."""
    forced(backend, device)
    n_q = 100 if backend == "short" else 300
    case = Case(heads_q=2, heads_kv=1, n_q=n_q, n_k=90, d=264, mask="bool-some-rows-empty")
    q, k, v, mask = make_inputs(case, device)
    q, k, v = (x.clone() for x in (q, k, v))
    dead = ~mask.expand(1, 2, n_q, 90).any(-1)
    assert dead.any()

    def run(garbage: float):
        x = q.masked_fill(dead[..., None], garbage)
        out, lse = ffpa_attn.ffpa(x, k, v, mask=mask, softcap=softcap, return_lse=True)
        g = test_numerics.random_like(out, 7).masked_fill(dead[..., None], garbage)
        half = torch.full_like(lse, 0.5)
        return torch.ops.ffpa_attn.backward(g, half, x, k, v, out, lse, mask, softcap=softcap)[:3]

    clean, dirty = run(0.0), run(float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert not dirty[0][dead].any()


@BACKENDS_AND_SHORT
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("garbage", ["q", "grad"])
def test_rows_that_an_lse_leaves_out(garbage, softcap, backend, device, forced):
    """A caller's -inf says that a row counts for nothing, though it sees all keys of its tile."""
    forced(backend, device)
    n = 128 if backend == "short" else 256
    case = Case(heads_q=2, heads_kv=1, n_q=n, n_k=n, d=72)
    q, k, v, _ = make_inputs(case, device)
    dead = torch.zeros(1, 2, n, dtype=torch.bool, device=q.device)
    dead[:, :, 5], dead[:, 1, 100::30] = True, True
    out, lse = ffpa_attn.ffpa(q, k, v, softcap=softcap, return_lse=True)
    lse = lse.masked_fill(dead, -float("inf"))

    def run(value: float):
        x, g = q, test_numerics.random_like(out, 7).masked_fill(dead[..., None], 0.0)
        if garbage == "q":
            x = q.masked_fill(dead[..., None], value)
        else:
            g = g.masked_fill(dead[..., None], value)
        return torch.ops.ffpa_attn.backward(g, None, x, k, v, out, lse, softcap=softcap)[:3]

    clean, dirty = run(0.0), run(float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert not dirty[0][dead].any() and all(x.isfinite().all() and x.any() for x in dirty)


@BACKENDS_AND_SHORT
def test_fp16_products_beyond_its_range(backend, device, forced):
    """dP - δ may be more than 65504 where P is so small that dS is not: gradients scaled up, one large value."""
    case = Case(heads_q=1, heads_kv=1, n_q=64, n_k=128 if backend == "short" else 256, d=64, dtype=torch.float16)
    q, k, v, _ = make_inputs(case, device)
    v = v.clone()
    v[:, :, 7] = 64.0
    out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True)
    grad = torch.full_like(out, 20.0)
    tensors = (grad, None, q, k, v, out, lse)
    want = torch.ops.ffpa_attn.backward(*(x if x is None else x.cpu() for x in tensors))  # given by the reference
    forced(backend, device)
    got = torch.ops.ffpa_attn.backward(*tensors)
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=False):
        assert a.isfinite().all(), name
        torch.testing.assert_close(a.cpu(), b, atol=2e-2 * float(b.abs().max()), rtol=2e-2)


@BACKENDS_AND_SHORT
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_sequences_do_not_see_each_other(softcap, backend, device, forced):
    """NaN in one packed sequence stays there, though tiles reach beyond the ends of sequences."""
    forced(backend, device)
    lengths_q, lengths_k = ((40, 0, 50), (60, 9, 30)) if backend == "short" else ((140, 0, 150), (270, 9, 160))
    generator = torch.Generator().manual_seed(0)

    def tensor(lengths, heads):
        return torch.randn(sum(lengths), heads, 264, generator=generator).to(device, torch.bfloat16)

    q, k, v = tensor(lengths_q, 2), tensor(lengths_k, 1), tensor(lengths_k, 1)
    cu = offsets(lengths_q, device), offsets(lengths_k, device), max(lengths_q), max(lengths_k)
    second_q, second_k = slice(lengths_q[0], None), slice(sum(lengths_k[:2]), None)

    def run():
        out, lse = ffpa_attn.ffpa_varlen(q, k, v, *cu, causal=True, softcap=softcap, return_lse=True)
        g = test_numerics.random_like(out, 7)
        g[second_q] *= q[second_q]
        return torch.ops.ffpa_attn.varlen_backward(g, None, q, k, v, out, lse, *cu, causal=True, softcap=softcap)

    clean = run()
    for x, rows in ((q, second_q), (k, second_k), (v, second_k)):
        x[rows] = torch.nan
    dirty = run()
    first_q, first_k = slice(0, lengths_q[0]), slice(0, lengths_k[0])
    for x, y, rows in zip(clean, dirty, (first_q, first_k, first_k), strict=True):
        assert torch.equal(x[rows], y[rows])


@BACKENDS_AND_SHORT
def test_no_sequences(backend, device, forced):
    """There are no sequences, whatever the longest of them may be."""
    forced(backend, device)
    q = torch.randn(5, 1, 264, device=device).to(torch.bfloat16).requires_grad_()
    none = offsets((), device)
    ffpa_attn.ffpa_varlen(q, q, q, none, none, 5, 5).sum().backward()
    assert not q.grad.any()


@pytest.mark.large(gigabytes=26)
@BACKENDS_AND_SHORT
def test_more_than_31_bits_of_offsets(backend, device, forced):
    """Tensors have 4.3 GB; inputs share most of their memory. What the last batch entry gets, it gets alone."""
    if device == "cpu":
        pytest.skip("needs a GPU")
    forced(backend, device)
    entries = 1025  # batch entries, each of 2^21 elements and more
    entries_of_all = torch.empty(entries + 3, 64, 128, 264, device=device, dtype=torch.bfloat16).normal_()
    q, k, v, g = (entries_of_all[i : i + entries] for i in range(4))
    out, lse = ffpa_attn.ffpa(q, k, v, causal=True, return_lse=True)
    got = torch.ops.ffpa_attn.backward(g, None, q, k, v, out, lse, causal=True)[:3]
    last = [x[-1:].clone() for x in (q, k, v, out, lse)]
    want = torch.ops.ffpa_attn.backward(g[-1:].clone(), None, *last, causal=True)[:3]
    assert all(torch.equal(x[-1:], y) for x, y in zip(got, want, strict=True))


# ---- plans ----


def test_a_workspace_that_is_too_small():
    plan = backward.plan(PROBLEM._replace(n_q=1300, n_k=1300), "hopper", 1 << 20)
    assert plan == "the backward needs 2 MiB of workspace, and FFPA_WORKSPACE_MB is 1"
    assert backward.plan(PROBLEM._replace(n_q=1300, n_k=1300), "hopper", 2 << 20).chunks


def test_short_sequences_cost_what_they_have():
    """Sequences do not cost what they would were all as long as the longest: 40,960 chunks."""
    total = 32768
    problem = PROBLEM._replace(batch=256, heads_kv=8, n_q=total, n_k=total, packed=(total, total))
    assert sum(1 for _ in backward.plan(problem, "hopper", 1 << 30).all_chunks) < 2000


@pytest.mark.parametrize(
    "d, d_v, n, causal, of_q, of_k",
    [
        (320, 320, 8192, False, 160, 160),
        (384, 384, 16384, False, 192, 192),
        (512, 512, 8192, False, 256, 256),
        (1024, 1024, 16384, True, 256, 256),
    ],
)
def test_tiles_fit_head_dims(d, d_v, n, causal, of_q, of_k):
    see = Visibility(-1, 0 if causal else -1, False)
    plan = backward.plan(PROBLEM._replace(d_qk=d, d_v=d_v, n_q=n, n_k=n, visibility=see), "hopper", 1 << 30)
    assert (plan.of_q.columns, plan.of_k.columns) == (of_q, of_k)
    assert plan.pairs * 4 <= 1 << 30 and not plan.partial_floats
