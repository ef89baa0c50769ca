"""This is the forward on mma.sync: it finds which instance and which run-time settings a problem gets, and calls it.

Up to 256 columns warps own whole rows; wider head dims, and levels 2 and 3, are split; from 640 on, calls that force
nothing go to two_phase.py instead, but for the fewest rows. `plan` is pure. The same plan runs natively on a GPU and,
with FFPA_EMULATE, in the emulator on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from .. import env
from ..launching import attention_call
from ..launching.attention_call import Call, Memo, forward_launch
from ..launching.launch import multiprocessors
from ..specs import archs
from ..specs.problem import E4M3, LEAST_SCALE, MOST_POSITIONS, Problem, visible_keys
from ..specs.spec import (
    COLUMNS,
    E4M3_SHAPES,
    MOST_COLUMNS,
    PAGED_COLUMNS,
    ROWS_HEAD_DIMS,
    ForwardMerge,
    ForwardMmaKeys,
    ForwardMmaRows,
    ForwardMmaSplit,
    Shape,
    forward_spec,
    register_shapes,
    rows_shapes,
    rows_spec,
    streamed_shapes,
)
from . import row_tiles

# This is what the kernels do, whatever is asked: a toggle forced to anything else cannot be honoured.
_SPLIT_FIXED = {
    "ENABLE_FFPA_PERSIST_KV_G2S": False,
    "ENABLE_FFPA_PERSIST_Q_S2R": False,
    "ENABLE_FFPA_PERSIST_V_S2R": False,
}
_ROWS_FIXED = {
    "ENABLE_FFPA_QKV_SMEM_SHARE": False,
    "ENABLE_FFPA_SMEM_SWIZZLE_Q": True,
    "ENABLE_FFPA_SMEM_SWIZZLE_K": True,
    "ENABLE_FFPA_SMEM_SWIZZLE_V": True,
    "ENABLE_FFPA_PERSIST_Q_G2S": True,
    "ENABLE_FFPA_PERSIST_KV_G2S": True,
    "ENABLE_FFPA_PERSIST_V_S2R": True,  # a fragment of V is loaded once a tile, for all rows of a warp
    "FFPA_PV_STAGES": None,
}

_MOST_BLOCKS_OF_A_DIM = 2**16 - 1  # blocks in each dim of a grid but the first
_ROW_TILE_BYTES = 48  # bytes of shared memory, as KeptRows::kBytes says
_KEYS_BYTES = 32  # bytes of shared memory, as KeptKeys::kBytes says
_MEASURED_KEYS = 8192  # keys with which the speeds of tiles were measured
_ENDS = {1: 256, 2: 256, 3: 1024}  # begin and end of a work item at each level take as long as so many keys
_MORE_ENDS = {256: 192}  # keys more for tiles of so many columns: their ring of one stage hides none of the first loads
_RESERVED_BYTES = 1024  # bytes of shared memory that each block takes for itself
_SPLIT_WARPS = 8  # of a block in the split-D kernel
_WARP_KEYS = 32  # keys of a warp in a tile, where warps own keys
_WITHOUT_HIDING = 8  # times as long, to the choice: what hides no loads is taken only where nothing else fits
_MOST_COLUMNS_OF_Q = 192  # columns of Q that registers hold
_MOST_GROUPED_COLUMNS = 640  # columns of a column group of level 2: the fewest groups recompute the least
_MOST_GROUPED_PAGED_COLUMNS = 512  # the same, where keys lie in pages

Spec = ForwardMmaSplit | ForwardMmaKeys | ForwardMmaRows


class LevelPlan(NamedTuple):
    spec: Spec
    level: int
    stages: int
    q_resident: bool
    splits: int = 1
    value_stages: int = 0  # stages of V, where it has a ring of its own
    grid_of_heads: bool = False
    tile_heads: int = 1  # query heads of a group whose rows share tiles
    microseconds: float = 0.0  # an estimate

    @property
    def kernel(self) -> str:
        return self.spec.name

    @property
    def alike(self) -> LevelPlan:
        """Returns what is the same for calls that are launched alike: all but the estimate."""
        return self._replace(microseconds=0.0)

    @property
    def specs(self) -> tuple:
        return (self.spec,)

    def forward(
        self, q, k, v, out, lse, mask, offsets, rule, workspace_cap, memo: Memo, sinks=None, largest=None, pages=None
    ) -> None:
        """Runs the forward as choice.Plan says; packed sequences, and keys in pages, come without a mask."""
        if offsets and (len(offsets[0]) < 2 or not offsets[2]):  # there are no rows
            out.zero_()
            lse.fill_(-float("inf"))
            return
        call = memo.get("call")
        if call is None:
            blocks = multiprocessors(q.device)
            call = memo["call"] = _call(self, q, k, v, out, mask, offsets, rule, pages, workspace_cap, blocks)
        call(q, k, v, out, lse, mask, offsets, sinks, largest, pages)


def smem_bytes(spec: Spec, d_qk: int, stages: int, q_resident: bool, value_stages: int = 0) -> int:
    """Returns the bytes of shared memory, as the Config's launch_shape does; a test compares the two."""
    if isinstance(spec, ForwardMmaRows):
        return (spec.rows + stages * 2 * spec.keys) * spec.head_dim * 2 + _ROW_TILE_BYTES

    if isinstance(spec, ForwardMmaKeys):
        warps, query = spec.keys // _WARP_KEYS, -(-d_qk // spec.columns) * spec.rows * spec.columns * 2
        of_warp = max(stages * _WARP_KEYS, spec.rows * 4) * spec.columns + 64 + 8 * spec.rows
        return warps * of_warp + query + _ROW_TILE_BYTES + _KEYS_BYTES

    def step(rows: int, columns: int, padded: bool, bytes_of_element: int = 2) -> int:
        return rows * (columns * bytes_of_element + 16 * padded)

    of_key = 1 if spec.e4m3 else 2
    query = step(spec.rows, spec.key_columns, spec.pad_q)
    key = step(spec.keys, spec.key_columns, spec.pad_k, of_key) + (0 if q_resident else query)
    value = step(spec.value_rows, spec.columns, spec.pad_v, of_key)
    slots = stages * key + value_stages * value if spec.own_rings else stages * max(key, value)
    score_warps_by_keys = min(256 // spec.rows, _SPLIT_WARPS)
    statistics = (score_warps_by_keys + 1) * spec.rows * 4
    resident = -(-d_qk // spec.key_columns) * query if q_resident else 0
    barriers = 64 * (1 + spec.own_rings)
    return slots + spec.rows * spec.keys * 2 + statistics + barriers + _ROW_TILE_BYTES + _KEYS_BYTES + resident


def _accumulators(p: Problem, flags: Mapping[str, Any]) -> tuple[str, str] | str:
    """Returns (acc_qk, acc_pv) as `acc` and the toggles say."""
    acc_qk, acc_pv = {"f32": ("f32", "f32"), "f16": ("f16", "f16"), "mixed": ("f32", "f16")}[p.acc]
    if flags["ENABLE_FFPA_FORCE_QK_F16"] is not None:
        acc_qk = "f16" if flags["ENABLE_FFPA_FORCE_QK_F16"] else "f32"
    if flags["ENABLE_FFPA_FORCE_PV_F16"] is not None:
        acc_pv = "f16" if flags["ENABLE_FFPA_FORCE_PV_F16"] else "f32"
    if "f16" in (acc_qk, acc_pv) and p.dtype != "f16":
        return f"tensor cores accumulate products of {p.dtype} in f32 only"
    return acc_qk, acc_pv


def _columns(d_v: int, paged: bool) -> int:
    return next(columns for columns in (PAGED_COLUMNS if paged else COLUMNS) if columns >= d_v)


def _candidates(p: Problem, acc: tuple[str, str]) -> Iterator[tuple[int, Shape]]:
    """Gives pairs of (level, shape)."""
    paged = p.pages is not None
    if p.cache:
        yield from ((1, shape) for shape in E4M3_SHAPES if shape.columns >= p.d_v)
        return
    if p.level in (1, None) and p.d_v <= MOST_COLUMNS:
        yield from ((1, shape) for shape in register_shapes(_columns(p.d_v, paged), acc, paged))
    if p.level == 2:
        groups = -(-p.d_v // (_MOST_GROUPED_PAGED_COLUMNS if paged else _MOST_GROUPED_COLUMNS))
        yield from ((2, shape) for shape in register_shapes(_columns(-(-p.d_v // groups), paged), acc, paged))
    if p.level in (3, None):
        yield from ((3, shape) for shape in streamed_shapes(max(p.d_qk, p.d_v), acc))


_BANDWIDTH = 4e6  # bytes of K and V a microsecond
_LEAST_READERS = 0.9  # part of the multiprocessors that is taken to read as fast as all do
_READS = {64: 0.82, 192: 0.85, 256: 0.93}  # part of the bandwidth that tiles of so many columns reach, where not all
# Parts of so many columns that begin a multiple of 1,024 keys apart take so many times as long to read: with rows of
# 9 · 2^7 and 5 · 2^8 bytes, many blocks seem to read from the same channels of the memory at a time.
_SAME_CHANNELS, _CHANNEL_KEYS = {576: 1.1, 640: 1.2}, 1024


def _microseconds(p: Problem, level: int, shape: Shape, tile_heads: int, splits: int) -> float:
    """Estimates a call on an otherwise idle GPU: waves of work items, each so many tiles long and some for its ends.

    Speeds and bandwidth are those of an H200; elsewhere they serve to compare.
    """
    multiprocessors = archs.multiprocessors(p.arch)
    groups = -(-p.d_v // shape.columns)
    rows = p.batch * p.heads_q * p.n_q
    items = row_tiles.count(p, shape.rows, tile_heads) * (groups if level < 3 else 1) * splits
    width = p.d_qk + (p.d_v if level == 3 else shape.columns)
    ends = (_ENDS[level] + _MORE_ENDS.get(shape.columns, 0)) / shape.keys
    measured = 2 * shape.rows * _MEASURED_KEYS * width / (shape.speed * 1e6 / 132)
    of_a_tile = measured / (_MEASURED_KEYS / shape.keys + ends)
    rows_of_head = shape.rows // tile_heads
    on_a_diagonal = (rows_of_head + shape.keys) / 2 if p.visibility.bounded else 0  # keys of tiles beyond visible ones
    tiles = -(-(visible_keys(p) + on_a_diagonal) // (shape.keys * splits))
    # microseconds to read K and V from HBM once
    memory = p.batch * p.heads_kv * p.n_k * (p.d_qk + p.d_v) * 2 / _BANDWIDTH
    memory /= _READS.get(shape.columns, 1)
    if splits > 1 and -(-p.n_k // (shape.keys * splits)) * shape.keys % _CHANNEL_KEYS == 0:
        memory *= _SAME_CHANNELS.get(shape.columns, 1)
    memory *= max(_LEAST_READERS * multiprocessors / max(items, 1), 1)
    merge = 2.5 + splits * rows * p.d_v * 4 / 2e6 if splits > 1 else 0
    return max(-(-items // multiprocessors) * (tiles + ends) * of_a_tile, memory + of_a_tile) + merge


@lru_cache(maxsize=64)  # several families ask what the levels would take
def _splits(p: Problem, level: int, shape: Shape, tile_heads: int, workspace_cap: int) -> int:
    """Returns into how many parts the keys go: more than one if the row tiles alone would leave the GPU idle."""
    most = row_tiles.most_parts(p, shape.keys, workspace_cap)
    return min(range(1, most + 1), key=lambda splits: _microseconds(p, level, shape, tile_heads, splits))


# (microseconds for a key's column of 8 bits, the most blocks of a multiprocessor), on an H200
_OF_OWN_KEYS = 0.72e-4, 3
_OF_8_BITS = {16: (0.5e-4, 2), 32: (0.66e-4, 1)}  # by rows of a tile
_ENDS_OF_8_BITS = 128


def _of_8_bits(spec: Spec) -> tuple[float, int]:
    return _OF_OWN_KEYS if isinstance(spec, ForwardMmaKeys) else _OF_8_BITS[spec.rows]


def _pace_of_8_bits(p: Problem, spec: Spec, blocks: int) -> row_tiles.Pace:
    of_key = _of_8_bits(spec)[0] * (p.d_qk + spec.columns)
    blocks *= archs.multiprocessors(p.arch)
    columns = (p.d_qk + p.d_v) // 2
    return row_tiles.Pace(spec.rows, spec.keys, blocks, of_key, _ENDS_OF_8_BITS * of_key, columns, _BANDWIDTH)


def _as_toggled(spec: ForwardMmaSplit, flags: Mapping[str, Any]) -> ForwardMmaSplit:
    pads = {f"pad_{x}": flags[f"ENABLE_FFPA_SMEM_SWIZZLE_{x.upper()}"] is False for x in "qkv"}
    own_rings = flags["ENABLE_FFPA_QKV_SMEM_SHARE"] is False or flags["FFPA_PV_STAGES"] is not None
    return replace(spec, own_rings=own_rings, serial=_is_serial(flags), **pads)


def _is_serial(flags: Mapping[str, Any]) -> bool:
    return flags["ENABLE_FFPA_REGISTERS_PIPE_KV"] is False


def _stages(p: Problem, flags: Mapping[str, Any], all_stages: list[int]) -> list[int]:
    """Returns the stages that may be, the preferred ones first."""
    prefetch = flags["ENABLE_FFPA_PREFETCH_QKV"]
    stages = [p.num_stages] if p.num_stages else all_stages
    return stages if prefetch is None else [n for n in stages if (n > 1) == prefetch]  # one stage prefetches nothing


def settings(spec: ForwardMmaSplit, p: Problem, flags: Mapping[str, Any], limit: int) -> tuple[int, int, bool] | None:
    """Returns (stages, value_stages, q_resident) that fit: if nothing is forced, a resident Q before a longer ring, and
    a ring as long as fits.
    """
    stages, resident = _stages(p, flags, [4, 3, 2, 1]), spec.e4m3 or flags["ENABLE_FFPA_PERSIST_Q_G2S"]
    for q_resident in (True, False) if resident is None else (resident,):
        for n in stages:
            of_values = (flags["FFPA_PV_STAGES"] or n) if spec.own_rings else 0
            last_choice = q_resident and n == 1 and resident is None and len(stages) > 1
            if not last_choice and smem_bytes(spec, p.d_qk, n, q_resident, of_values) <= limit:
                return n, of_values, q_resident
    return None


def _settings_of_8_bits(spec: Spec, p: Problem, flags: Mapping[str, Any], limit: int) -> tuple[int, tuple | None]:
    """Returns as many blocks of an SM as have room for a ring of two steps each, and what settings() says of them."""
    for blocks in range(_of_8_bits(spec)[1], 1, -1):
        found = settings(spec, p, flags, _part(limit, blocks))
        if found and found[0] > 1:
            return blocks, found
    return 1, settings(spec, p, flags, limit)


def _part(limit: int, blocks: int = 2) -> int:
    """Returns the bytes of shared memory that each of so many blocks on an SM has."""
    return (limit + _RESERVED_BYTES) // blocks - _RESERVED_BYTES


def _not_known(flags: Mapping[str, Any], fixed: Mapping[str, bool], family: str) -> str | None:
    forced = (name for name, value in fixed.items() if flags[name] not in (None, value))
    return next((f"the {family} does not know {name}={int(flags[name])}" for name in forced), None)


def _rows_plan(p: Problem, acc: tuple[str, str], flags: Mapping[str, Any]) -> LevelPlan | str:
    """Plans a forward whose warps own whole rows, with whole tiles of K and V in shared memory."""
    width = max(p.d_qk, p.d_v)
    if width > ROWS_HEAD_DIMS[-1]:
        return f"shared memory holds whole tiles of K and V of up to {ROWS_HEAD_DIMS[-1]} columns, not {width}"
    if reason := _not_known(flags, _ROWS_FIXED, "mma forward for small head dims"):
        return reason
    q_in_registers = flags["ENABLE_FFPA_PERSIST_Q_S2R"]
    if q_in_registers and width > _MOST_COLUMNS_OF_Q:
        return f"registers hold {_MOST_COLUMNS_OF_Q} columns of Q beside S and O, not {width}"
    head_dim = next(d for d in ROWS_HEAD_DIMS if width <= d)
    padded = p._replace(d_qk=head_dim)
    limit = archs.shared_memory_bytes(p.arch)
    plans = []
    paged = p.pages is not None
    for shape in rows_shapes(head_dim, paged):
        spec = replace(rows_spec(p.dtype, acc, shape, q_in_registers, paged), serial=_is_serial(flags))
        if spec.plain and (p.mask or p.softcap or p.scale < LEAST_SCALE or q_in_registers):
            continue
        fits = [
            (slowdown, n)
            for slowdown, most in ((1.0, _part(limit)), (1.4, limit))  # one block alone has nothing to hide its softmax
            for n in _stages(p, flags, [2, 1])
            if smem_bytes(spec, p.d_qk, n, True) <= most
        ]
        if fits:
            slowdown, stages = fits[0]
            heads = row_tiles.shared_heads(p, shape.rows)
            of_tiles = row_tiles.of_whole_tiles(padded, shape.rows, heads)
            splits = _splits(of_tiles, 1, shape, heads, flags["FFPA_WORKSPACE_MB"] << 20)
            cost = _microseconds(padded, 1, shape, heads, splits) * slowdown
            plans.append(LevelPlan(spec, 1, stages, True, splits, tile_heads=heads, microseconds=cost))
    return _cheapest(plans, spec, p)


def _hides_loads(plan: LevelPlan) -> bool:
    return isinstance(plan.spec, ForwardMmaRows) or plan.stages > 1


def _cheapest(plans: list[LevelPlan], last: Spec, p: Problem) -> LevelPlan | str:
    if not plans:
        return f"{last.name} with these settings needs more shared memory than {p.arch} has"
    best = min(plans, key=lambda plan: plan.microseconds * (1 if _hides_loads(plan) else _WITHOUT_HIDING))
    groups = 1 if isinstance(best.spec, ForwardMmaRows) else -(-p.d_v // best.spec.columns)
    blocks = row_tiles.count(p, best.spec.rows, best.tile_heads) * groups * best.splits
    if blocks > row_tiles.MOST_TILES:
        return f"{best.spec.name} needs more blocks than a grid holds"
    return best


def _split_plan(p: Problem, acc: tuple[str, str], flags: Mapping[str, Any]) -> LevelPlan | str:
    """Plans a forward to which K and V come in steps along the head dim and along the keys."""
    if p.level == 1 and p.d_v > MOST_COLUMNS:
        return f"level 1 keeps O in registers, which hold {MOST_COLUMNS} columns of it and not {p.d_v}"
    if reason := _not_known(flags, _SPLIT_FIXED, "split-D mma forward"):
        return reason
    limit = archs.shared_memory_bytes(p.arch)
    plans = []
    for level, shape in _candidates(p, acc):
        spec = forward_spec(p.dtype, acc, shape, level == 3, p.pages is not None, p.cache is not None)
        if p.cache:
            blocks, fitting = _settings_of_8_bits(spec, p, flags, limit)
        else:
            spec = _as_toggled(spec, flags)
            fitting = settings(spec, p, flags, limit)
        if fitting is None:
            continue
        cap = flags["FFPA_WORKSPACE_MB"] << 20
        of_a_block = _scratch_bytes(spec, p.d_v) if level == 3 else 0
        if of_a_block > cap:
            reason = f"level 3 needs {-(-of_a_block >> 20)} MiB of workspace for a block of {spec.rows} rows"
            continue
        heads = row_tiles.shared_heads(p, shape.rows)
        if p.cache:
            how = row_tiles.microseconds, _pace_of_8_bits(p, spec, blocks), heads
            cost, parts = row_tiles.fastest_parts(p, shape.rows, shape.keys, heads, cap, *how)
            splits = parts.count
        else:
            splits = _splits(row_tiles.of_whole_tiles(p, shape.rows, heads), level, shape, heads, cap - of_a_block)
            cost = _microseconds(p, level, shape, heads, splits)
        stages, value_stages, q_resident = fitting
        of_plan = {"value_stages": value_stages, "tile_heads": heads, "microseconds": cost}
        plans.append(LevelPlan(spec, level, stages, q_resident, splits, **of_plan))
    return reason if reason and not plans else _cheapest(plans, spec, p)


def _why_no_pages(p: Problem, flags: Mapping[str, Any]) -> str | None:
    if p.acc != "f32":
        return f"pages are read with acc='f32' alone, not {p.acc!r}"
    forced = next((flag for flag in env.EXPERIMENTS if flags[flag] is not None), None)
    return forced and f"the mma forward that reads pages knows no {forced}"


def _why_no_8_bits(p: Problem) -> str | None:
    if p.cache != E4M3:
        return "copies bring 16 bytes, and 8-bit rows do not begin at a multiple of it, or are no multiple of it"
    if p.level not in (None, 1):
        return f"8-bit pages are read at level 1 alone, not {p.level}"
    if p.d_v > MOST_COLUMNS:
        return f"registers hold {MOST_COLUMNS} columns of O beside 8-bit pages, not {p.d_v}"
    return None


def plan(p: Problem, flags: Mapping[str, Any]) -> LevelPlan | str:
    """Returns what runs the forward, or why nothing of this family can (whether it is built is another question)."""
    acc = _accumulators(p, flags)
    if isinstance(acc, str):
        return acc
    if p.pages and (reason := _why_no_pages(p, flags)):
        return reason
    if p.n_q + p.n_k > MOST_POSITIONS:
        return f"the mma forward counts positions in 32 bits, and {p.n_q} rows with {p.n_k} keys are too many"
    if p.packed and p.packed[0] > MOST_POSITIONS:
        return f"the mma forward counts positions in 32 bits, and {p.packed[0]} of all sequences are too many"
    prefetch = flags["ENABLE_FFPA_PREFETCH_QKV"]
    for name, stages in (("num_stages", p.num_stages), ("FFPA_PV_STAGES", flags["FFPA_PV_STAGES"])):
        if prefetch is not None and stages and prefetch != (stages > 1):
            return f"ENABLE_FFPA_PREFETCH_QKV={int(prefetch)} and {name}={stages} exclude each other"
    grid_of_heads = bool(flags["ENABLE_FFPA_LAUNCH_GRID_DNHB"])
    if grid_of_heads and max(p.heads_q, p.batch) > _MOST_BLOCKS_OF_A_DIM:
        return f"ENABLE_FFPA_LAUNCH_GRID_DNHB=1: a grid of {p.heads_q} heads and {p.batch} batch entries is too large"

    if p.cache and (reason := _why_no_8_bits(p)):
        return reason
    whole_tiles = max(p.d_qk, p.d_v) <= ROWS_HEAD_DIMS[-1] or flags["ENABLE_FFPA_PERSIST_KV_G2S"]
    whole_tiles = whole_tiles and p.level in (None, 1) and not p.cache
    families = (_rows_plan, _split_plan) if whole_tiles else (_split_plan,)
    reasons = []
    for family in families:
        answer = family(p, acc, flags)
        if not isinstance(answer, str):
            return answer._replace(grid_of_heads=grid_of_heads)
        reasons.append(answer)
    return "; ".join(reasons)


_AS_FAST = 1.01  # times as long by estimates, which are no better than that
_LATER = 1.0  # microseconds by which few rows begin later on wgmma: barriers and maps of tensors come first
_COLD_CODE = {128: 1.5}  # microseconds more than at 64 columns until code of whole rows has come from memory


def why_faster(p: Problem, other: row_tiles.RowTilePlan, flags: Mapping[str, Any]) -> str | None:
    """Says why the levels are faster than another plan, by estimates, or None."""
    ours = plan(p, flags)
    if isinstance(ours, str):
        return None
    of_ours = ours.microseconds
    if isinstance(ours.spec, ForwardMmaRows):
        of_ours += _COLD_CODE.get(ours.spec.head_dim, 0)
    of_other = other.microseconds + (_LATER if p.n_q <= row_tiles.ROWS // 2 else 0)
    if of_other <= _AS_FAST * of_ours:
        return None
    return f"{other.kernel} is estimated to take {of_other:.0f} µs, and {ours.kernel} {of_ours:.0f}"


def _scratch_bytes(spec: ForwardMmaSplit, d_v: int) -> int:
    """Returns the bytes of O in fp32, of one resident block of level 3."""
    return -(-d_v // spec.columns) * spec.columns * spec.rows * 4


def _call(plan: LevelPlan, q, k, v, out, mask, offsets, rule, pages, workspace_cap: int, blocks: int) -> Call:
    scratch = partial = None
    n_q, n_k = attention_call.lengths(q, k, offsets, pages)
    rows_of_head = plan.spec.rows // plan.tile_heads
    of_keys = row_tiles.cut_keys(n_q, n_k, rule.visibility, rows_of_head, plan.spec.keys, plan.splits)
    rows = n_q * q.shape[-3] * attention_call.entries(q, offsets)
    if of_keys.count > 1:
        partial = rows * row_tiles.floats_of_row(of_keys, v.shape[-1])
        workspace_cap -= 4 * partial
    if plan.spec.streamed:  # fewer blocks run where the cap asks for it
        of_a_block = _scratch_bytes(plan.spec, v.shape[-1])
        blocks = max(1, min(blocks, workspace_cap // of_a_block))
        scratch = blocks * of_a_block // 4
    of_plan = "stages", "value_stages", "q_resident", "grid_of_heads", "tile_heads"
    settings = {name: getattr(plan, name) for name in of_plan} | of_keys.settings
    settings |= {"resident_blocks": blocks, "tile_rows": rows_of_head}
    specs = (plan.spec, *((ForwardMerge(plan.spec.dtype),) if of_keys.count > 1 else ()))
    launch = forward_launch(specs, q, k, v, out, mask, offsets, rule, pages, **settings)
    return Call(launch, scratch, partial, scratch_of=lambda packed_rows: (blocks, 0, 4 * (scratch or 0)))
