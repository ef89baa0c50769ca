"""The backward on our compiled kernels: every case of the matrix, in the emulator everywhere and on a GPU where there is one.

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
from ffpa_attn import backward, backward_chunks, env, ops, reference
from ffpa_attn.backward_chunks import KEY_TILE, ROW_TILE, Chunk, Packed
from ffpa_attn.backward_mask import MaskGradient
from ffpa_attn.spec import MMA_PRODUCT_TILES, PRODUCT_TILES, Problem, Visibility
from ffpa_attn.testing import emulate

ARCHS = {"hopper": "sm_90a", "mma": "sm_80"}  # backend -> what emulates it
BACKENDS = pytest.mark.parametrize("backend", list(ARCHS))
PROBLEM = Problem(
    "backward", "cuda", "sm_90", "bf16", 1, 32, 32, 8192, 8192, 512, 512, None, Visibility(-1, -1, False), 0.1, 0.0, None, True, None, "f32", None
)  # fmt: skip


@contextlib.contextmanager
def garbage_in_new_memory():
    """NaN, where it is to hold floats."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def forced(monkeypatch):
    """forced(backend, device, seed): from now on backwards run there; gives the list of what the emulator reports."""

    def force(backend: str, device: str, seed: int = 0) -> list[dict]:
        if device == "cuda" and backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a Hopper GPU")
        reports, run = [], ops._backward
        ops._plans.clear()

        def run_there(*args):
            with contextlib.ExitStack() as stack:
                if device == "cpu":
                    stack.enter_context(garbage_in_new_memory())
                    found = stack.enter_context(emulate(ARCHS[backend], seed=seed))
                    stack.callback(lambda: reports.extend(found))
                stack.enter_context(env.overridden("FFPA_BACKEND", backend))
                return run(*args)

        monkeypatch.setattr(ops, "_backward", run_there)
        return reports

    return force


@BACKENDS
@test_numerics.by_id(CASES)
def test_gradients(case, backend, device, forced, monkeypatch):
    reports = forced(backend, device)
    if "softcap" not in case.rule:
        monkeypatch.setattr(reference, "mask_gradient", None)  # that of a mask is the kernels' too
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
    """Sums of dK and dV wait for the one sequence that a chunk cuts: one ends where the next begins, one goes on and on."""
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
    """More tiles than blocks, in other orders of the warps."""
    forced(backend, device, seed)
    case = LONGER.with_(heads_q=2, heads_kv=1, n_q=300, rule={"window": (200, 100)}, mask="bool-some-rows-empty")
    test_numerics.test_gradients(case, device)


def gradients_of(case: Case, device, cap_mb: int | None = None, **options):
    inputs = test_numerics.leaves(*make_inputs(case, device))
    q, k, v, *mask = inputs
    out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True, mask=mask[0] if mask else None, layout=case.layout, **case.rule)
    g = test_numerics.random_like(out, 7)
    with env.overridden("FFPA_WORKSPACE_MB", str(cap_mb)) if cap_mb else contextlib.nullcontext():
        return torch.ops.ffpa_attn.backward(
            g, None, q.detach(), k.detach(), v.detach(), out.detach(), lse.detach(), *(mask[:1] or [None]), layout=case.layout,
            **case.rule, **options,
        )[:3]  # fmt: skip


@BACKENDS
@pytest.mark.parametrize(
    "case, cap_mb, kinds",
    [
        (LONGER.with_(heads_q=6, n_k=300, d=72), 4, {(True, True)}),
        (LONGER.with_(heads_q=2, heads_kv=1, d=72), 2, {(True, False), (False, True)}),
    ],
    ids=["rows", "rows, then keys"],
)
def test_workspace_caps(case, cap_mb, kinds, backend, device, forced):
    """In chunks: whole gradients, or sums of dK and dV over some rows; at last dQ on its own, and dK and dV by keys."""
    forced(backend, device)
    whole = gradients_of(case, device)
    got = gradients_of(case, device, cap_mb)
    assert {(chunk.of_q, chunk.of_k) for chunk in last_chunks()} == kinds and len(last_chunks()) > 2
    for name, x, want in zip(("dq", "dk", "dv"), got, whole, strict=True):
        # The same sums, in fp32, in another order of additions.
        assert (x.float() - want.float()).abs().max() <= 2**-7 * want.float().abs().max(), name


@BACKENDS
@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_a_workspace_smaller_than_a_row_tile(align, backend, device, forced):
    """dQ by keys, too: of rows that see keys of every chunk, or of the first alone."""
    forced(backend, device)
    case = Case(heads_q=1, heads_kv=1, n_q=300, n_k=1300, d=72, rule={"causal": True, "align": align})
    whole = gradients_of(case, device)
    got = gradients_of(case, device, 1)
    of_q = [(chunk.first_tile, chunk.first_key, chunk.end_key) for chunk in last_chunks() if chunk.of_q]
    assert of_q[0][:2] == (0, 0) and of_q[1][:2] == (0, of_q[0][2]) and len(of_q) % 2 == 0
    for name, x, want in zip(("dq", "dk", "dv"), got, whole, strict=True):
        assert (x.float() - want.float()).abs().max() <= 2**-7 * want.float().abs().max(), name


def last_chunks() -> list[Chunk]:
    return list(
        [plan.choice.plan for plan in ops._plans.values() if hasattr(plan.choice.plan, "chunks")][-1].all_chunks
    )


LONG_AND_NARROW = LONGER.with_(d=64, d_v=None, heads_kv=1)


@BACKENDS
@pytest.mark.parametrize(
    "case, cap_mb, kinds",
    [
        (Case(3, 4, 2, 400, 200, 24, mask="additive-some-rows-empty", layout="BNHD", rule={"window": (90, 60)}), 4, {(3, 4, True, True)}),
        (LONG_AND_NARROW.with_(heads_q=3, mask="additive"), 6, {(1, 6, True, True), (1, 3, True, True)}),
        (LONG_AND_NARROW.with_(heads_q=2, mask="additive-2d"), 2, {(1, 1, True, False)}),
        (Case(heads_q=2, heads_kv=1, n_q=40, n_k=1300, d=24, mask="additive-2d"), 1, {(1, 1, True, False)}),
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


MASK_SHAPES = list(product((True, False), repeat=4))  # which dims have all elements of their own


@BACKENDS
def test_masks_shared_in_every_way(backend, device, forced, monkeypatch):
    """Each gradient is the sum of that of a mask which nothing shares. (PyTorch is no yardstick where all keys of a row share
    an element: rounding and dLSE are all that is left there.)
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
@pytest.mark.parametrize("n_q, n_k", [(0, 5), (5, 0)])
def test_a_mask_of_nothing(n_q, n_k, backend, device, forced):
    forced(backend, device)
    q, k, v, _ = make_inputs(Case(n_q=n_q, n_k=n_k), device)
    mask = torch.zeros(1, 2, 1, 1, device=device)
    out, lse = ffpa_attn.ffpa(q, k, v, mask=mask, return_lse=True)
    assert not torch.ops.ffpa_attn.backward(out, None, q, k, v, out, lse, mask, mask_grad=True)[3].any()


@pytest.mark.parametrize("heads, floats", [(2, 0), (1, 1)])
def test_mask_gradients_take_no_workspace(heads, floats, device, forced):
    """Only themselves, and fp32 sums where elements are shared."""
    forced("mma", device)
    q, k, v, _ = make_inputs(Case(heads_kv=1, n_q=300, n_k=280, d=24), device)
    mask = torch.zeros(1, heads, 300, 280, dtype=q.dtype, device=device)
    out, lse = ffpa_attn.ffpa(q, k, v, mask=mask, return_lse=True)

    def peak(mask_grad: bool) -> int:
        args = out, None, q, k, v, out, lse, mask
        return test_memory.peak_of(device, lambda: ops._backward_dense(*args, mask_grad=mask_grad))

    assert peak(True) - peak(False) <= mask.numel() * (2 + 4 * floats) + (1 << 17)


# What key/value heads, query heads of each, rows and keys there are; and chunks of three batch entries.
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
        for entry, tile in product(range(chunk.entries), range(chunk.row_tiles)):  # as in backward_tiles.cuh
            batch, head_kv = divmod(chunk.first_entry + entry, heads_kv)
            head, tile_of_head = divmod(chunk.first_tile + tile, tiles_of_head)
            rows = of_pairs[batch, head_kv * group + head, tile_of_head * ROW_TILE :][:ROW_TILE]
            by_tile[entry, tile, : len(rows), :n_k] = rows
        workspaces.append((ds, chunk))
    for own in MASK_SHAPES:
        d_mask = torch.full([n if of_own else 1 for n, of_own in zip(shape, own, strict=True)], torch.nan, dtype=dtype)
        gradient = MaskGradient(d_mask, torch.empty(*shape[:3], 8), torch.empty(3, heads_kv, n_k, 8))
        for ds, chunk in workspaces:
            gradient.add(ds, chunk, scratch=torch.full((chunk.pairs // 2,), torch.nan))
        gradient.finish()
        assert torch.equal(d_mask, of_pairs.float().sum_to_size(d_mask.shape).to(dtype)), own


@pytest.mark.parametrize(
    "mb, n",
    [
        (4, 100),
        (4, 2000),
        (4, 32768),
        (64, 100),
        (64, 8192),
        (130, 131072),
        (256, 131072),
        (1024, 8192),
        (1024, 131072),
    ],
)
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_cover_everything_once_within_the_cap(mb, n, group, packed):
    work = backward_chunks.Work(entries=3, group=group, n_q=n, n_k=n + 300, d_qk=512, d_v=512)
    if packed:
        work = work._replace(n_q=n // 2, n_k=n, packed=Packed(7, n, n + 300))
    cap, of_key = mb << 20, 4 * 1280  # in tiles of 160 columns
    chunks, entries = backward_chunks.cut(work, PRODUCT_TILES, cap)
    all_chunks = [c._replace(first_entry=c.first_entry + entry) for entry in range(entries) for c in chunks]
    keys_in_parts = max(
        (work.keys_summed(c.keys) for c in all_chunks if c.of_k and c.row_tiles < work.tiles), default=0
    )
    rows_in_parts = max((c.row_tiles * ROW_TILE for c in all_chunks if c.of_q and c.keys < work.keys), default=0)
    assert (
        max(c.rows * work.columns_of(c.keys) for c in all_chunks) * 4
        + max(keys_in_parts * of_key, rows_in_parts * 4 * 640)
        <= cap
    )
    for c in () if packed else all_chunks:
        assert (
            c.row_tiles % work.tiles_of_head == 0
            or c.first_tile // work.tiles_of_head == (c.end_tile - 1) // work.tiles_of_head
        )
    for of in ("of_q", "of_k"):
        pairs = {
            entry: [c for c in all_chunks if getattr(c, of) and c.first_entry <= entry < c.first_entry + c.entries]
            for entry in range(3)
        }
        for chunks in pairs.values():
            assert sum(c.row_tiles * c.keys for c in chunks) == work.tiles * work.keys
            corners = [(c.first_tile, c.first_key) for c in chunks]
            # Sums go on where the last chunk of the same keys, or rows, left them.
            assert sorted(corners, key=(lambda at: at) if of == "of_q" else (lambda at: at[::-1])) == corners
            assert len(set(corners)) == len(corners)


@pytest.mark.parametrize("d", [64, 224, 256, 320, 448, 512, 640, 768, 1024, 2048])
@pytest.mark.parametrize("packed", [None, (9000, 9000)], ids=["dense", "packed"])
@pytest.mark.parametrize("backend", ["hopper", "mma"])
def test_caps_that_are_enough(backend, packed, d):
    """From 1 MiB and 2 KiB a column on, as the README has it. Below, what there is no room for is refused."""
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
    """However many there are: sums of dK and dV wait for no more than one at a time."""
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
    """On a GPU with many tiles for each block; and in chunks, whose sums wait for the next."""
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


@BACKENDS
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_fp32_gradients(layout, backend, device, forced):
    """What partial results are summed up from: the 16-bit gradients are these, rounded."""
    forced(backend, device)
    case = LONGER.with_(n_q=70, n_k=90, layout=layout)
    exact, rounded = gradients_of(case, device, fp32_grads=True), gradients_of(case, device)
    for x, y in zip(exact, rounded, strict=True):
        assert x.dtype == torch.float32 and torch.equal(x.to(y.dtype), y)


@BACKENDS
def test_the_lse_of_more_keys(backend, device, forced):
    """Ring attention: a backward over some keys, with out and LSE of all of them; the parts add up."""
    forced(backend, device)
    q, k, v, _ = make_inputs(Case(n_q=70, n_k=200, d=264), device)
    q, k, v = (x.clone() for x in (q, k, v))
    out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True)
    g = test_numerics.random_like(out, 7)

    def run(keys):
        return torch.ops.ffpa_attn.backward(g, None, q, k[:, :, keys], v[:, :, keys], out, lse, fp32_grads=True)

    parts, whole = [run(slice(0, 130)), run(slice(130, None))], run(slice(None))
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], atol=2e-3, rtol=1e-2)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([part[i] for part in parts], 2), whole[i], atol=2e-3, rtol=1e-2)


@BACKENDS
@pytest.mark.parametrize("what", ["sum", "expanded heads", "expanded rows", "padded rows"])
def test_strides_of_what_autograd_hands_over(what, backend, device, forced):
    """dO of a sum is one number; of a broadcast, one row."""
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
        else:
            g = torch.nn.functional.pad(g, (0, 3))[..., :-3]
        return torch.autograd.grad(out, tensors, g)

    got = run(ffpa_attn.ffpa, test_numerics.leaves(q, k, v))
    want = run(lambda *x: oracle.attention(*x)[0], test_numerics.leaves(q, k, v))
    base = run(lambda *x: compare.baseline(*x)[0], test_numerics.leaves(q, k, v))
    for name, *three in zip(("dq", "dk", "dv"), got, want, base, strict=True):
        compare.assert_close(name, *three)


@BACKENDS
@pytest.mark.parametrize("dim", [0, 2], ids=["batch", "keys"])
def test_heads_that_share_memory(dim, backend, device, forced):
    """K and V expanded: all their strides there are 0."""
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
@pytest.mark.parametrize("seed", [0, 1])
def test_short_sequences_beside_long_ones(seed, backend, device, forced, monkeypatch):
    """Row tiles of the longest one that others have no rows for: their products are over nothing, and no copy waits."""
    forced(backend, device, seed)
    case = PackedCase((20, 300, 5), (40, 300, 5), heads_q=2, heads_kv=1, d=264, rule={"causal": True})
    test_numerics.test_packed(case, device, "read", monkeypatch)


TILES = [("hopper", tile) for tile in PRODUCT_TILES] + [("mma", tile) for tile in MMA_PRODUCT_TILES]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("backend, tile", TILES, ids=[f"{backend}-{tile.columns}" for backend, tile in TILES])
def test_tiles_of_products(backend, tile, dtype, device, forced, monkeypatch):
    """Each for sequences whose ends are no multiples of anything; blocks of a cluster zero what lies behind together."""
    *kernels, _ = backward._FAMILIES[backend]
    monkeypatch.setitem(backward._FAMILIES, backend, (*kernels, (tile,)))
    reports = forced(backend, device, seed=1)
    case = PackedCase((20, 300), (40, 270), heads_q=1, heads_kv=1, d=264, dtype=dtype, rule={"causal": True})
    test_numerics.test_packed(case, device, "read", monkeypatch)
    products = [report["kernel"] for report in reports if "products" in report["kernel"]]
    assert all(f"_columns{tile.columns}" in name for name in products) and bool(products) == (device == "cpu")


@BACKENDS
def test_the_last_row_that_sees_a_tile_of_keys(backend, device, forced):
    """The first row of a step, whatever a step is; row 64 sees the last key."""
    forced(backend, device)
    case = Case(n_q=70, n_k=64, d=24, rule={"window": (1, 0), "align": "top_left"})
    test_numerics.test_gradients(case, device)


@BACKENDS
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_rows_without_keys_pass_on_nothing(softcap, backend, device, forced):
    """Whatever Q, dO and dLSE hold there: neither their own gradients nor those of keys see it."""
    forced(backend, device)
    case = Case(heads_q=2, heads_kv=1, n_q=300, n_k=90, d=264, mask="bool-some-rows-empty")
    q, k, v, mask = make_inputs(case, device)
    q, k, v = (x.clone() for x in (q, k, v))
    dead = ~mask.expand(1, 2, 300, 90).any(-1)
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


@BACKENDS
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("garbage", ["q", "grad"])
def test_rows_that_an_lse_leaves_out(garbage, softcap, backend, device, forced):
    """A caller's -inf says that a row counts for nothing, though it sees all keys of its tile."""
    forced(backend, device)
    case = Case(heads_q=2, heads_kv=1, n_q=256, n_k=256, d=72)
    q, k, v, _ = make_inputs(case, device)
    dead = torch.zeros(1, 2, 256, dtype=torch.bool, device=q.device)
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


@BACKENDS
def test_fp16_products_beyond_its_range(backend, device, forced):
    """dP - δ may be more than 65504 where P is so small that dS is not: gradients scaled up, one large value."""
    case = Case(heads_q=1, heads_kv=1, n_q=64, n_k=256, d=64, dtype=torch.float16)
    q, k, v, _ = make_inputs(case, device)
    v = v.clone()
    v[:, :, 7] = 64.0
    out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True)
    grad = torch.full_like(out, 20.0)
    tensors = (grad, None, q, k, v, out, lse)
    want = torch.ops.ffpa_attn.backward(*(x if x is None else x.cpu() for x in tensors))  # the reference
    forced(backend, device)
    got = torch.ops.ffpa_attn.backward(*tensors)
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=False):
        assert a.isfinite().all(), name
        torch.testing.assert_close(a.cpu(), b, atol=2e-2 * float(b.abs().max()), rtol=2e-2)


@BACKENDS
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_sequences_do_not_see_each_other(softcap, backend, device, forced):
    """NaN in one packed sequence stays there, though tiles reach beyond the ends of sequences."""
    forced(backend, device)
    lengths_q, lengths_k = (140, 0, 150), (270, 9, 160)
    generator = torch.Generator().manual_seed(0)

    def tensor(lengths, heads):
        return torch.randn(sum(lengths), heads, 264, generator=generator).to(device, torch.bfloat16)

    q, k, v = tensor(lengths_q, 2), tensor(lengths_k, 1), tensor(lengths_k, 1)
    cu = offsets(lengths_q, device), offsets(lengths_k, device), 150, 270
    second_q, second_k = slice(140, None), slice(279, None)

    def run():
        out, lse = ffpa_attn.ffpa_varlen(q, k, v, *cu, causal=True, softcap=softcap, return_lse=True)
        g = test_numerics.random_like(out, 7)
        g[second_q] *= q[second_q]
        return torch.ops.ffpa_attn.varlen_backward(g, None, q, k, v, out, lse, *cu, causal=True, softcap=softcap)

    clean = run()
    for x, rows in ((q, second_q), (k, second_k), (v, second_k)):
        x[rows] = torch.nan
    dirty = run()
    for x, y, rows in zip(clean, dirty, (slice(0, 140), slice(0, 270), slice(0, 270)), strict=True):
        assert torch.equal(x[rows], y[rows])


@BACKENDS
def test_no_sequences(backend, device, forced):
    """Whatever the longest of them may be."""
    forced(backend, device)
    q = torch.randn(5, 1, 264, device=device).to(torch.bfloat16).requires_grad_()
    none = offsets((), device)
    ffpa_attn.ffpa_varlen(q, q, q, none, none, 5, 5).sum().backward()
    assert not q.grad.any()


@pytest.mark.large
@BACKENDS
def test_more_than_31_bits_of_offsets(backend, device, forced):
    """Tensors of 4.3 GB: what the last batch entry gets, it gets alone."""
    if device == "cpu" or torch.cuda.mem_get_info()[0] < 50 << 30:
        pytest.skip("needs 50 GB of a GPU")
    forced(backend, device)
    shape = 1025, 64, 128, 264  # 2^31 elements and more
    q, k, v, g = (torch.empty(shape, device=device, dtype=torch.bfloat16).normal_() for _ in range(4))
    out, lse = ffpa_attn.ffpa(q, k, v, causal=True, return_lse=True)
    got = torch.ops.ffpa_attn.backward(g, None, q, k, v, out, lse, causal=True)[:3]
    last = [x[-1:].clone() for x in (q, k, v, out, lse)]
    want = torch.ops.ffpa_attn.backward(g[-1:].clone(), None, *last, causal=True)[:3]
    assert all(torch.equal(x[-1:], y) for x, y in zip(got, want, strict=True))


# ---- plans ----


def test_a_workspace_that_is_too_small():
    plan = backward.plan(PROBLEM._replace(n_q=300, n_k=600), "hopper", 1 << 20)
    assert plan == "the backward needs 2 MiB of workspace, and FFPA_WORKSPACE_MB is 1"
    assert backward.plan(PROBLEM._replace(n_q=300, n_k=600), "hopper", 2 << 20).chunks


def test_short_sequences_cost_what_they_have():
    """Not what they would have were all as long as the longest: 40,960 chunks."""
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
