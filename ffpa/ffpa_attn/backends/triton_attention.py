"""Plans attention in Triton for head dims up to 256, forward and backward: the tiles, and what kernels are given.

Importing this module imports no Triton; a call does.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import shutil
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import env
from ..checks import memory_checks
from ..specs import archs
from ..specs.problem import LEAST_SCALE, Problem
from ..triton_ops.launch import Launch, Memo, Step, Tiles, describer, has_descriptor, launch_alone, run, strides
from ..triton_ops.tiles import DEFAULT, MEASURED
from .reference_plan import mask_gradient

MOST_COLUMNS = 256
_MOST_POSITIONS = 2**29  # rows and keys: twice their sum is counted in 32 bits
_MOST_ROWS = 128  # rows of a tile
_SLACK_BYTES = 1 << 10
# Bytes of an element in stages, float32's: elements below 4 bytes are not copied there.
_MASK_BYTES = {None: 0, "bool": 0, "16-bit additive": 4, "additive": 4}
_FAR_PROGRAMS = 512  # about so many programs look for far rows, and share what there are
_LEAST_CAP, _LARGEST_CAP = 1e-30, 1e30  # beyond these all scores are 0, or as they are without a cap


# These are tiles, with the rows of a slice. They take half the shared memory of the smallest GPU, and one stage, so
# that loads of scratch stay where its barriers are.
_PERSISTENT = {64: (Tiles(128, 64, 4, 1), 64), 128: (Tiles(128, 64, 4, 1), 32), 256: (Tiles(128, 32, 4, 1), 32)}


_gave_up: list[tuple[tuple, str]] = []  # kinds of calls whose kernels cannot run in this process, and why
_LEAST_RELEASE = (3, 6)
_LAUNCHES_WITHOUT_C = (3, 9)  # earlier releases compile what launches kernels


@cache
def _release() -> tuple[int, ...]:
    for name in ("triton", "pytorch-triton"):  # the second is what PyTorch's nightly builds call it
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return tuple(map(int, importlib.metadata.version(name).split(".")[:2]))
    return _LAUNCHES_WITHOUT_C  # somebody built it who has what it takes


def give_up(p: Problem, plan: TritonPlan, reason: str) -> None:
    """Leaves calls of this kind to others."""
    _gave_up.append((_kind(p, plan), reason))


def _kind(p: Problem, plan: TritonPlan) -> tuple:
    """Returns what kernels are compiled for, but for what lengths and strides decide."""
    see = p.visibility
    rule = see.left >= 0, see.right >= 0, see.top_left, p.mask, p.softcap > 0, p.scale >= LEAST_SCALE
    wanted = p.needs_lse, p.sinks, p.largest
    return plan, p.device, p.arch, p.dtype, p.d_qk, p.d_v, p.packed is not None, *rule, *wanted


def if_able(p: Problem, plan: TritonPlan) -> TritonPlan | str:
    """Returns the plan, or why its kernels cannot run."""
    return next((reason for kind, reason in _gave_up if kind == _kind(p, plan)), plan)


@cache
def why_not() -> str | None:
    """Says why Triton cannot run here at all, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install 'triton>=3.6'"
    if _release() < _LEAST_RELEASE:
        return f"Triton is {'.'.join(map(str, _release()))}; 3.6 or newer is needed: pip install -U triton"
    return None


def interprets() -> bool:
    """Says whether CPU tensors go to kernels that no choice leads to."""
    flags = env.run_flags()
    return flags["FFPA_BACKEND"] == "triton" and flags["TRITON_INTERPRET"] and not torch.cuda.is_available()


@cache
def _lacks_compiler() -> bool:
    compiler = shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")  # Triton looks there
    return _release() < _LAUNCHES_WITHOUT_C and not (compiler and header.exists())


def width(d: int) -> int:
    """Returns the columns of a tile, which are a power of 2 in Triton."""
    return max(16, 1 << (d - 1).bit_length())


def smem_bytes(tiles: Tiles, widths: tuple[int, int], work: str, mask: str | None) -> int:
    """Returns the most bytes that tiles take, as Triton lays them out: own rows (or keys) once, the others in every
    stage, and in one place P or dS on its way, or a mask's tiles, which are a stage fewer.
    """
    own, others = (tiles.keys, tiles.rows) if work == "keys" else (tiles.rows, tiles.keys)
    resident = own * (widths[0] if work in ("forward", "fp8") else sum(widths))
    size = 1 if work == "fp8" else 2
    of_pair = max(size, (tiles.stages - 1) * _MASK_BYTES[mask])
    return (resident + tiles.stages * others * sum(widths)) * size + own * others * of_pair + _SLACK_BYTES


def _stages(asked: int, arch: str) -> int:
    """With one stage K and V come to the same place, and Triton 3.6's ptxas then loses where products find them."""
    return max(asked, 2) if arch == "sm_90" else asked


def tiles_of(work: str, p: Problem, widths: tuple[int, int]) -> Tiles | str:
    """Returns tiles for "forward" or "fp8", for the "rows" or "keys" that backward programs own, or for "far" ones."""
    widest, arch = max(64, *widths), p.arch or "sm_80"
    measured = MEASURED.get(arch, {}).get((work, p.visibility.right >= 0), {}).get(widest)
    most = archs.shared_memory_bytes(arch)
    if measured and not p.num_stages:
        tiles = Tiles(*measured)
        while p.mask and tiles.stages > 2 and smem_bytes(tiles, widths, work, p.mask) > most:  # measured without a mask
            tiles = tiles._replace(stages=tiles.stages - 1)
        return tiles
    for found in DEFAULT[work][widest]:
        tiles = Tiles(*found)._replace(stages=_stages(p.num_stages or found[3], arch))
        if smem_bytes(tiles, widths, work, p.mask) <= most:
            return tiles
    return f"{p.num_stages} stages of {max(widths)} columns do not fit the shared memory of {p.arch}"


def reads_by_descriptors(p: Problem) -> bool:
    return p.device == "cpu" or int(p.arch.removeprefix("sm_")) >= 90


def _scratch_bytes_of_a_core(tiles: Tiles, widths: tuple[int, int]) -> int:
    return tiles.rows * (widths[1] + 2) * 4  # bytes of O, maxima and sums


def _persistent_plan(p: Problem, flags: Mapping[str, Any]) -> TritonPlan | str:
    asked = f"the persistent Triton kernel (FFPA_TRITON_CORES={flags['FFPA_TRITON_CORES']})"
    if p.packed:
        return f"{asked} takes no packed sequences"
    if p.mask:
        return f"{asked} takes no mask"
    if p.num_stages not in (None, 1):
        return f"{asked} has one stage, not {p.num_stages}"
    widths = width(p.d_qk), width(p.d_v)
    tiles, slice_rows = _PERSISTENT[max(64, *widths)]
    most_cores = (flags["FFPA_WORKSPACE_MB"] << 20) // _scratch_bytes_of_a_core(tiles, widths)
    cores = min(flags["FFPA_TRITON_CORES"], most_cores)
    return if_able(p, TritonPlan("forward", widths, tiles, None, False, cores, slice_rows))


def refusal(p: Problem, flags: Mapping[str, Any]) -> str | None:
    """Says why Triton cannot run the problem, whatever the tiles, or None."""
    reason = why_not()
    if reason:
        return reason
    if p.device != "cuda" and not flags["TRITON_INTERPRET"]:
        return "Triton runs CPU tensors in its interpreter alone; set TRITON_INTERPRET=1 before it is imported"
    if p.device == "cuda" and _lacks_compiler():
        return "Triton needs a C compiler and Python's headers; install gcc and python3-dev"
    if max(p.d_qk, p.d_v) > MOST_COLUMNS:
        return f"the Triton kernels keep whole rows on chip, up to {MOST_COLUMNS} columns and not {max(p.d_qk, p.d_v)}"
    if p.pages:
        return "the Triton kernels know no pages"
    if p.acc != "f32":
        return f"the Triton kernels accumulate in f32, not as acc={p.acc!r}"
    if p.n_q + p.n_k > _MOST_POSITIONS:
        return f"the Triton kernels count positions in 32 bits, and {p.n_q} rows with {p.n_k} keys are too many"
    experiment = next((name for name in env.EXPERIMENTS if flags[name] is not None), None)
    if experiment:
        return f"the Triton kernels do not know {experiment}={int(flags[experiment])}"
    return None


def plan(p: Problem, flags: Mapping[str, Any]) -> TritonPlan | str:
    """Returns what runs the problem, or why Triton cannot."""
    reason = refusal(p, flags)
    if reason:
        return reason
    if p.direction == "forward" and flags["FFPA_TRITON_CORES"]:
        return _persistent_plan(p, flags)
    widths = width(p.d_qk), width(p.d_v)
    works = ("forward",) if p.direction == "forward" else ("rows", "keys", "far")
    found = [tiles_of(work, p, widths) for work in works]
    refused = next((answer for answer in found if isinstance(answer, str)), None)
    if refused:
        return refused
    over_rows, over_keys, far = found if len(found) > 1 else (found[0], None, None)
    return if_able(p, TritonPlan(p.direction, widths, over_rows, over_keys, reads_by_descriptors(p), far=far))


# ---- launches ----


def _dense(x: torch.Tensor, packed: bool) -> torch.Tensor:
    """Returns [B, H, N, D]: dense tensors as they are, packed ones, [H, T, D], as one batch entry."""
    return x.unsqueeze(0) if packed else x


def scale_and_cap(rule) -> tuple[float, float]:
    """Returns both as a kernel computes with them: caps too small or too large for it are what they come to."""
    if 0 < rule.softcap < _LEAST_CAP:
        return 0.0, 0.0
    return float(rule.scale), float(rule.softcap if rule.softcap < _LARGEST_CAP else 0.0)


def sides(see) -> tuple[int, int]:
    """Returns a window's sides; without one they do not depend on lengths: no other number to compile for."""
    return tuple(_MOST_POSITIONS if x < 0 else min(x, _MOST_POSITIONS) for x in (see.left, see.right))


class Kind:
    """What all kernels, and all calls of a kind, are given alike."""

    def __init__(self, plan: TritonPlan, q, k, v, mask, offsets, rule, *more: torch.Tensor):
        """Takes q, k, v [B, H, N, D], and in `more` other tensors that are read by rows."""
        from ..triton_ops.backward_kernels import STATISTICS_ROWS
        from ..triton_ops.forward_kernels import MaskStrides, Rule, Sizes

        packed = offsets is not None
        batch, self.heads, total_q, d_qk = q.shape
        self.heads_kv, total_k, d_v = v.shape[1:]
        longest_q, longest_k = offsets[2:] if packed else (total_q, total_k)
        self.sequences = len(offsets[0]) - 1 if packed else batch
        self.longest_q, self.longest_k = min(longest_q, total_q), min(longest_k, total_k)
        # Tiles of rows need not end where rows do, as a sequence may begin anywhere.
        self.padded_q = (-(-total_q // _MOST_ROWS) + packed) * _MOST_ROWS
        self.padded_rows = batch * self.heads * self.padded_q
        self.statistics_blocks = self.padded_rows // STATISTICS_ROWS.value
        see, (scale, cap) = rule.visibility, scale_and_cap(rule)
        mask_strides = MaskStrides(0, 0, 0, 0)
        if mask is not None:
            steps = zip(mask.shape, mask.stride(), strict=True)
            mask_strides = MaskStrides(*(0 if size == 1 else stride for size, stride in steps))
        sizes = Sizes(self.heads, self.heads // self.heads_kv, self.longest_q, self.longest_k, total_q, total_k)
        self.numbers = mask_strides, sizes, Rule(scale, cap, *sides(see))
        self.tma = plan.descriptors and not packed and all(map(has_descriptor, (q, k, v, *more)))
        self.hides = packed or see.bounded
        left, right = sides(see)
        shift = 0 if see.top_left else total_k - total_q
        # Some rows see no key if the last key of the first row, or the first key of the last one, does not exist.
        self.blind = see.bounded if packed else shift + right < 0 or total_q - 1 + shift - left >= total_k
        self._describers: dict[Tiles, list] = {}
        self.options = {
            "PACKED": packed,
            "TOP_LEFT": see.top_left,
            "RAW": mask is None and not cap and scale >= LEAST_SCALE,
            "CAPPED": cap > 0,
            "MASK": "none" if mask is None else "bool" if mask.dtype == torch.uint8 else "additive",
            "TMA": self.tma,
            "D_QK": d_qk,
            "D_V": d_v,
            "WIDTH_QK": plan.widths[0],
            "WIDTH_V": plan.widths[1],
            "BLIND": self.blind,
        }

        rows, raw = self.padded_rows, self.options["RAW"]
        begins = {"exponents": 0 if raw else rows, "naturals": rows, "shares": 2 * rows, "delta": 3 * rows}
        begins["largest"] = 4 * rows
        self.parts = {name: ("statistics", 4 * first) for name, first in begins.items()}

    @property
    def empty(self) -> bool:
        return not self.sequences or not self.longest_q

    def over_rows(self, tiles: Tiles, numbers: Sequence, **options) -> Launch:
        """Returns the launch of a kernel whose programs own rows."""
        programs = -(-self.longest_q // tiles.rows) * self.heads * self.sequences
        return self._launch(programs, numbers, tiles, self.longest_k % tiles.keys != 0, **options)

    def over_keys(self, tiles: Tiles, numbers: Sequence) -> Launch:
        programs = -(-self.longest_k // tiles.keys) * self.heads_kv * self.sequences
        return self._launch(programs, numbers, tiles, self.longest_q % tiles.rows != 0)

    def far(self, tiles: Tiles, numbers: Sequence) -> Launch:
        """Returns the launch of a kernel whose programs take turns at a head's blocks, if any of its rows are far."""
        heads = self.heads_kv * self.sequences
        parts = min(-(-_FAR_PROGRAMS // heads), -(-max(self.longest_q, self.longest_k) // tiles.rows))
        ends = self.longest_q % tiles.rows != 0 or self.longest_k % tiles.keys != 0
        return self._launch(heads * parts, (parts, *numbers), tiles, ends)

    def _launch(self, programs: int, numbers: Sequence, tiles: Tiles, ends: bool, **options) -> Launch:
        """Says how it is launched; `ends`: rows or keys that programs go over end within a tile."""
        options = {**self.options, "EDGES": self.hides or ends, **options}
        return Launch(programs, (*numbers, *self.numbers), options, tiles)

    def sources(self, tiles: Tiles, q, k, v, *by_rows) -> Sequence:
        """Returns the tensors as a kernel of such tiles reads them."""
        if not self.tma:
            return q, k, v, *by_rows
        describers = self._describers.get(tiles)
        if describers is None:
            qk, d_v = self.options["WIDTH_QK"], self.options["WIDTH_V"]
            describers = [describer(q, tiles.rows, qk), describer(k, tiles.keys, qk), describer(v, tiles.keys, d_v)]
            describers += [describer(x, tiles.rows, d_v) for x in by_rows]
            self._describers[tiles] = describers
        return [describe(x) for describe, x in zip(describers, (q, k, v, *by_rows), strict=True)]


def _mask_of(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Returns [B, H, Nq, Nk], of size 1 where it is broadcast; bools become bytes."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _or(other: torch.Tensor, *wanted: torch.Tensor | None) -> list[torch.Tensor]:
    """Returns the tensors; in the place of one that is not there stands another, which nobody reads."""
    return [other if x is None else x for x in wanted]


def _wanted(sinks: torch.Tensor | None, largest: torch.Tensor | None) -> dict[str, bool]:
    """Returns what a forward is compiled for, beside its rule."""
    return {"SINKS": sinks is not None, "LARGEST": largest is not None}


# ---- the plan, and how it runs ----

_OF_FORWARD = "q k v out lse mask offsets_q offsets_k sinks largest".split()
_OF_BACKWARD = "out grad given lse q k v dq dk dv mask offsets_q offsets_k statistics".split()


class TritonPlan(NamedTuple):
    direction: str
    widths: tuple[int, int]  # columns of Q and K, and of V: powers of 2
    over_rows: Tiles  # tiles of the forward, and of dQ: programs own rows
    over_keys: Tiles | None  # tiles of dK and dV: programs own keys
    descriptors: bool  # tensors are read by TMA where they allow it
    cores: int | None = None  # at most so many programs, which stay: the persistent forward
    slice_rows: int | None = None  # rows of its row tile that are on chip at once
    far: Tiles | None = None  # tiles of dQ, dK and dV where scores are too large for the others

    specs = ()  # nvcc compiles nothing for it

    @property
    def kernel(self) -> str:
        rows, keys, *_ = self.over_rows
        kind = self.direction if self.cores is None else f"persistent_{self.direction}"
        return f"triton_{kind}_head_dim{max(self.widths)}_rows{rows}_keys{keys}"

    @property
    def workspace_bytes(self) -> int:
        return (self.cores or 0) * _scratch_bytes_of_a_core(self.over_rows, self.widths)

    def forward(
        self, q, k, v, out, lse, mask, offsets, rule, workspace_cap: int, memo: Memo, sinks=None, largest=None
    ) -> None:
        """Runs on q, k, v, out [B, H, N, D], lse [B, H, N] or empty; packed: [H, T, D], [H, T] and their offsets. sinks
        are float32 [Hq]; largest, float32 [B, Hq] full of -inf, takes the largest score of each head.
        """
        if offsets:  # rows of no sequence get these
            out.zero_()
            lse.fill_(-float("inf"))
        if self.cores:
            return self._forward_on_cores(q, k, v, out, lse, rule, memo, sinks, largest)
        rest = out if mask is None else mask, *(offsets[:2] if offsets else (lse, lse))
        steps = partial(self._forward_steps, q, k, v, out, lse, mask, offsets, rule, memo, sinks, largest)
        run(memo, (q, k, v, out, lse, *rest, *_or(lse, sinks, largest)), _OF_FORWARD, steps)

    def _forward_on_cores(self, q, k, v, out, lse, rule, memo: Memo, sinks, largest) -> None:
        from ..triton_ops import persistent_kernels as kernels

        with_lse, tiles = lse.dim() > 1, self.over_rows
        kind = memo.get("kind") or memo.setdefault("kind", Kind(self, q, k, v, None, None, rule))
        if not out.numel() or kind.empty:
            return
        lse = lse if with_lse else lse.view(1, 1, -1)
        cores = min(self.cores, -(-kind.longest_q // tiles.rows) * kind.heads * kind.sequences)
        scratch = kernels.scratch(cores, tiles.rows, self.widths[1], q.device)

        def how() -> Launch:
            numbers = *strides(q, k, v, out, lse), kind.sequences, *kind.numbers[1:]
            options = {"SLICE": self.slice_rows, "LSE": with_lse} | _wanted(sinks, largest)
            return Launch(cores, numbers, kind.options | options, tiles)

        tensors = q, k, v, out, lse, *scratch, *_or(lse, sinks, largest)
        launch_alone(memo, kernels.persistent_forward_kernel, tensors, how)

    def _forward_steps(self, q, k, v, out, lse, mask, offsets, rule, memo: Memo, sinks, largest) -> Iterator[Step]:
        from ..triton_ops.forward_kernels import forward_kernel

        packed, with_lse, mask = offsets is not None, lse.dim() > 1, _mask_of(mask)
        q, k, v, out = (_dense(x, packed) for x in (q, k, v, out))
        lse = _dense(lse, packed) if with_lse else lse.view(1, 1, -1)
        kind = memo.get("kind") or memo.setdefault("kind", Kind(self, q, k, v, mask, offsets, rule))
        tiles = self.over_rows
        if out.numel() and not kind.empty:
            rest = out if mask is None else mask, *(offsets[:2] if packed else (lse, lse))
            tensors = *kind.sources(tiles, q, k, v), out, lse, *rest, *_or(lse, sinks, largest)
            options = {"LSE": with_lse} | _wanted(sinks, largest)
            yield forward_kernel, tensors, lambda: kind.over_rows(tiles, strides(q, k, v, out, lse), **options)

    def backward(self, saved, grads, d_mask, mask, offsets, rule, workspace_cap: int, memo: Memo) -> None:
        """Computes grads, dq, dk and dv, and d_mask if it is wanted; saved: dO, dLSE or None, q, k, v, out, LSE, and δ or
        None.
        """
        self._gradients(*saved, *grads, mask, offsets, rule, memo)
        mask_gradient(saved, d_mask, mask, rule, workspace_cap)

    def _gradients(self, grad, grad_lse, q, k, v, out, lse, delta, dq, dk, dv, mask, offsets, rule, memo: Memo) -> None:
        packed = offsets is not None
        if "has rows" not in memo:
            memo["has rows"] = not memory_checks.rows_problem(grad)
        if not memo["has rows"]:  # the gradient of a sum is one number, expanded
            grad = grad.contiguous()
        lse = lse.contiguous()
        kind = memo.get("kind")
        if kind is None:
            dense = [_dense(x, packed) for x in (q, k, v, grad)]
            kind = memo["kind"] = Kind(self, *dense[:3], _mask_of(mask), offsets, rule, dense[3])
        nothing = kind.empty or not kind.longest_k
        if packed or nothing:  # rows of no sequence get zeros
            for gradient in (dq, dk, dv):
                gradient.zero_()
        if nothing:
            return
        statistics = torch.empty(4 * kind.padded_rows + kind.statistics_blocks, dtype=torch.float32, device=q.device)
        known = {"delta": delta, "grad_lse": grad_lse}  # the first of these that is there
        name, given = next(((name, x) for name, x in known.items() if x is not None), (None, lse))
        tensors = out, grad, given, lse, q, k, v, dq, dk, dv
        rest = out if mask is None else mask, *(offsets[:2] if packed else (lse, lse))
        run(
            memo,
            (*tensors, *rest, statistics),
            _OF_BACKWARD,
            lambda: self._backward_steps(*(_dense(x, packed) for x in tensors), *rest, statistics, name, kind),
            kind.parts,
        )

    def _backward_steps(
        self, out, grad, given, lse, q, k, v, dq, dk, dv, mask, cu_q, cu_k, statistics, name: str | None, kind: Kind
    ) -> Iterator[Step]:
        from ..triton_ops import backward_kernels as kernels
        from ..triton_ops.forward_kernels import Strides

        rows, blocks, raw = kind.padded_rows, kind.statistics_blocks, kind.options["RAW"]
        exponents, naturals, shares, delta, largest = statistics.split((rows,) * 4 + (blocks,))
        statistics_strides = Strides(kind.heads * kind.padded_q, kind.padded_q, 1)
        if not raw:
            exponents = naturals
        rest = _mask_of(mask), cu_q, cu_k
        over_rows, over_keys, far = self.over_rows, self.over_keys, self.far

        def how_statistics() -> Launch:
            numbers = *strides(out, grad, given, lse), statistics_strides, kind.numbers[1]
            tiles = Tiles(kernels.STATISTICS_ROWS.value, 0, 4, 1)
            return Launch(blocks, numbers, kind.options | {"GIVEN": name}, tiles)

        def numbers(*of_gradients: torch.Tensor) -> list:
            return [*strides(q, k, v, grad), statistics_strides, *strides(*of_gradients)]

        found = exponents, naturals, shares, largest, delta
        yield kernels.statistics_kernel, (out, grad, given, lse, *found), how_statistics
        sources = kind.sources(far, q, k, v, grad)
        tensors = *sources[:2], naturals, shares, largest, *rest
        yield kernels.shares_kernel, tensors, lambda: kind.far(far, [*strides(q, k), statistics_strides])
        tensors = *kind.sources(over_keys, q, k, v, grad), exponents, shares, delta, dk, dv, *rest
        yield kernels.keys_gradient_kernel, tensors, lambda: kind.over_keys(over_keys, numbers(dk, dv))
        tensors = *kind.sources(over_rows, q, k, v, grad), exponents, shares, delta, dq, *rest
        yield kernels.rows_gradient_kernel, tensors, lambda: kind.over_rows(over_rows, numbers(dq))
        if raw:
            tensors = *sources, naturals, shares, largest, delta, dq, dk, dv, *rest
            yield kernels.far_gradients_kernel, tensors, lambda: kind.far(far, numbers(dq, dk, dv))
