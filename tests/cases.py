"""Defines the case matrix that every path must pass, and how its tensors are made.

Inputs are random normal. Each tensor lies inside a larger block of NaN (rows before, after and between, columns past
the head dim), so whatever is read beside a tensor shows up in the result.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True)
class Case:
    batch: int = 1
    heads_q: int = 2
    heads_kv: int = 2
    n_q: int = 64
    n_k: int = 64
    d: int = 64
    d_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    mask: str | None = None  # a kind that make_mask knows
    layout: str = "BHND"
    rule: dict = field(default_factory=dict)  # causal, align, scale, window, softcap
    sinks: tuple[float, ...] = ()  # one for each head of Q, or none

    def options(self, device) -> dict:
        """Returns the rule, and sinks if there are any."""
        return with_sinks(self, device)

    @property
    def id(self) -> str:
        heads = f"h{self.heads_q}" if self.heads_q == self.heads_kv else f"h{self.heads_q}over{self.heads_kv}"
        dims = f"d{self.d}" + (f"v{self.d_v}" if self.d_v else "")
        rule = [f"{name}={str(value).replace(' ', '')}" for name, value in self.rule.items()]
        tail = [f"{self.mask}-mask"] * bool(self.mask) + [self.layout] * (self.layout != "BHND") + rule
        tail += ["sinks"] * bool(self.sinks)
        return "-".join([str(self.dtype)[6:], f"b{self.batch}", heads, f"n{self.n_q}x{self.n_k}", dims, *tail])

    def with_(self, **changes) -> Case:
        return replace(self, **changes)


def with_sinks(case: Case | PackedCase, device) -> dict:
    return {**case.rule, "sinks": torch.tensor(case.sinks, device=device)} if case.sinks else case.rule


def poisoned(shape, dtype, device, generator, row_slack: int = 8, size: float = 1.0) -> torch.Tensor:
    """Returns a random normal tensor with odd strides inside a block of NaN; rows stay aligned to 16 bytes."""
    *outer, rows, cols = shape
    block = torch.full((*(n + 1 for n in outer), rows + 3, cols + row_slack), torch.nan, dtype=dtype, device=device)
    view = block[tuple(slice(0, n) for n in outer)][..., 2 : 2 + rows, :cols]
    view.copy_(torch.randn(shape, generator=generator, dtype=torch.float32).mul_(size).to(dtype))
    return view


def make_mask(kind: str | None, case: Case, device, generator) -> torch.Tensor | None:
    """Returns a mask of one of these kinds: bool, bool-keys [B,1,1,Nk], bool-left-padded, bool-some-rows-empty,
    additive, additive-2d, additive-f32, additive-some-rows-empty [1,H,Nq,Nk], bias-by-head.
    """
    full = (case.batch, case.heads_q, case.n_q, case.n_k)
    if kind is None:
        return None
    if kind == "bool":
        return (torch.rand(full, generator=generator) < 0.7).to(device)
    if kind == "bool-keys":
        return (torch.rand(full[0], 1, 1, full[3], generator=generator) < 0.7).to(device)
    if kind == "bool-left-padded":
        padding = torch.arange(full[0]).view(-1, 1, 1, 1) * (full[3] // 2)
        return (torch.arange(full[3]).view(1, 1, 1, -1) >= padding).to(device)
    if kind == "bool-some-rows-empty":
        keep = torch.rand(full[0], 1, full[2], full[3], generator=generator) < 0.5
        keep[:, :, ::3] = False
        return keep.to(device)
    if kind == "additive":
        return torch.randn(full, generator=generator).to(device, case.dtype)
    if kind == "additive-2d":
        bias = torch.randn(full[2:], generator=generator)
        return bias.masked_fill(torch.rand(full[2:], generator=generator) < 0.2, -torch.inf).to(device, case.dtype)
    if kind == "additive-f32":
        return torch.randn(full[0], 1, full[2], full[3], generator=generator).to(device)
    if kind == "additive-some-rows-empty":
        bias = torch.randn(1, *full[1:], generator=generator)
        bias[:, :, ::3] = -torch.inf
        return bias.to(device, case.dtype)
    if kind == "bias-by-head":
        return torch.randn(1, full[1], 1, full[3], generator=generator).to(device)
    raise ValueError(kind)


def make_inputs(case: Case, device, seed: int = 0):
    """Returns (q, k, v, mask) of a case; no two cases share numbers."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(case.id.encode()))
    d_v = case.d_v or case.d
    shapes = [
        (case.batch, case.heads_q, case.n_q, case.d),
        (case.batch, case.heads_kv, case.n_k, case.d),
        (case.batch, case.heads_kv, case.n_k, d_v),
    ]
    tensors = [poisoned(shape, case.dtype, device, generator, 8 * (i + 1)) for i, shape in enumerate(shapes)]
    if case.layout == "BNHD":  # the same numbers, heads inside rows
        tensors = [
            poisoned((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype, device, generator).copy_(
                x.transpose(1, 2)
            )
            for x in tensors
        ]
    return *tensors, make_mask(case.mask, case, device, generator)


_f16 = torch.float16
_SINKS = (0.5, -math.inf, 30.0, -3.0)
_base = Case(heads_q=1, heads_kv=1)  # cases about heads have more of them

CASES: list[Case] = [
    # head dims: every multiple of 64, and ones between
    *[_base.with_(d=d, n_q=33, n_k=70) for d in range(64, 1025, 64)],
    *[_base.with_(d=d, n_q=17, n_k=40, dtype=_f16) for d in (8, 24, 72, 136, 264, 328, 520, 1000, 1152, 2048)],
    # lengths: tails, single rows, nothing at all
    *[_base.with_(n_q=n_q, n_k=n_k, d=320) for n_q, n_k in ((1, 1), (1, 300), (129, 1), (65, 127), (200, 31), (0, 5), (5, 0))],
    _base.with_(batch=0),
    # heads
    *[_base.with_(batch=2, heads_q=h_q, heads_kv=h_kv, n_q=40, n_k=72, d=128) for h_q, h_kv in ((4, 2), (8, 1), (6, 3), (1, 1))],
    # values of their own width
    *[_base.with_(d=d, d_v=d_v, n_q=45, n_k=91, rule={"causal": True}) for d, d_v in ((192, 128), (576, 512), (64, 320), (8, 1024))],
    _base.with_(heads_q=16, heads_kv=1, d=576, d_v=512, n_q=8, n_k=100),
    # causal and windows, at both alignments, with more keys than rows and fewer
    *[
        _base.with_(n_q=n_q, n_k=n_k, d=128, dtype=dtype, rule={"causal": True, "align": align})
        for n_q, n_k in ((64, 64), (50, 130), (130, 50), (1, 77))
        for align, dtype in (("bottom_right", torch.bfloat16), ("top_left", _f16))
    ],
    *[
        _base.with_(n_q=n_q, n_k=n_k, d=64, rule={"window": window, "align": align})
        for n_q, n_k in ((70, 70), (40, 110), (110, 40))
        for window, align in (((16, 0), "bottom_right"), ((0, 9), "top_left"), ((-1, 20), "bottom_right"), ((7, -1), "top_left"))
    ],
    _base.with_(n_q=300, n_k=50, d=24, rule={"window": (100, 20), "align": "top_left"}),  # its last rows see no key
    _base.with_(n_q=90, n_k=60, d=512, rule={"causal": True, "window": (10, 30)}),
    _base.with_(n_q=60, n_k=90, d=256, heads_q=4, heads_kv=2, rule={"causal": True, "window": (0, 0)}),
    # Visible keys begin or end one key from the edge of a tile, whatever its size: the first and the last tile hold one
    # key that one row sees; all rows but the first (last) see a whole tile.
    *[
        _base.with_(n_q=30, n_k=n_k, d=d, rule={"window": window})
        for d in (64, 512, 1024)
        for n_k, window in ((513, (228, 0)), (284, (-1, 0)), (600, (342, -1)), (255, (-1, -1)))
    ],
    # scale and softcap
    *[
        _base.with_(d=64, n_q=200, n_k=200, dtype=_f16, rule={"scale": scale, "causal": causal})
        for scale in (0.0, -0.3)
        for causal in (False, True)
    ],
    *[_base.with_(d=512, n_k=90, rule={"scale": scale}) for scale in (1.0, 0.01, 0.0, -0.3)],
    *[_base.with_(d=256, n_k=90, dtype=_f16, rule={"softcap": cap, "scale": 1.0, "causal": causal}) for cap, causal in ((5.0, False), (30.0, True))],
    # masks
    *[
        _base.with_(batch=2, heads_q=4, heads_kv=2, n_q=37, n_k=61, d=320, mask=kind)
        for kind in ("bool", "bool-keys", "bool-left-padded", "bool-some-rows-empty", "additive", "additive-2d", "additive-f32", "bias-by-head")
    ],
    _base.with_(batch=2, n_q=61, n_k=61, d=512, mask="bool-left-padded", rule={"causal": True}),
    _base.with_(batch=2, n_q=30, n_k=61, d=64, mask="additive-2d", rule={"causal": True, "softcap": 8.0, "window": (25, -1)}),
    # layout
    _base.with_(batch=2, heads_q=4, heads_kv=2, n_q=37, n_k=61, d=320, layout="BNHD"),
    _base.with_(batch=2, heads_q=4, heads_kv=2, n_q=37, n_k=61, d=512, d_v=456, layout="BNHD"),
    _base.with_(batch=2, heads_q=4, heads_kv=2, n_q=37, n_k=61, d=192, d_v=128, layout="BNHD", mask="bool", rule={"causal": True}),
    # sinks: some rows see no key; one head has none
    *[_base.with_(heads_q=4, heads_kv=2, n_q=90, n_k=61, d=d, sinks=_SINKS, rule={"causal": True}) for d in (64, 512)],
    _base.with_(batch=2, heads_q=4, heads_kv=1, n_q=1, n_k=300, d=320, sinks=_SINKS, dtype=_f16, layout="BNHD"),
    _base.with_(heads_q=2, heads_kv=2, n_q=37, n_k=61, d=1024, sinks=_SINKS[:2], mask="additive-some-rows-empty", rule={"softcap": 8.0}),
    _base.with_(heads_q=4, heads_kv=4, n_q=5, n_k=0, d=128, sinks=_SINKS),
]  # fmt: skip


@dataclass(frozen=True)
class PackedCase:
    lengths_q: tuple
    lengths_k: tuple
    heads_q: int = 2
    heads_kv: int = 2
    d: int = 128
    d_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    spare: int = 0  # rows after the last sequence, which belong to none
    rule: dict = field(default_factory=dict)
    sinks: tuple[float, ...] = ()

    def options(self, device) -> dict:
        return with_sinks(self, device)

    @property
    def id(self) -> str:
        rule = [f"{name}={str(value).replace(' ', '')}" for name, value in self.rule.items()]
        lengths = "x".join("_".join(map(str, lengths)) for lengths in (self.lengths_q, self.lengths_k))
        return "-".join(
            [str(self.dtype)[6:], f"n{lengths}", f"h{self.heads_q}over{self.heads_kv}", f"d{self.d}", *rule]
            + ["sinks"] * bool(self.sinks)
        )


PACKED_CASES = [
    PackedCase((64, 1, 33), (64, 1, 33), rule={"causal": True}),
    PackedCase((5, 40, 0, 17), (33, 40, 12, 0), d=320),
    PackedCase((5, 40, 0, 17), (33, 20, 12, 0), d=512, heads_q=4, heads_kv=1, dtype=_f16, rule={"causal": True}),
    PackedCase((50, 20), (30, 60), d=64, rule={"causal": True, "align": "top_left"}),
    PackedCase((50, 20), (30, 60), d=192, d_v=128, spare=9, rule={"window": (8, 3)}),
    PackedCase((20, 50), (60, 30), d=64, spare=9, rule={"causal": True}),
    PackedCase((31,), (70,), d=256, rule={"softcap": 6.0, "scale": 1.0, "causal": True, "window": (20, -1)}),
    PackedCase((300, 40), (50, 40), d=64, rule={"window": (100, -1), "align": "top_left"}),
    PackedCase((0, 0), (0, 0), spare=4),
    PackedCase((), ()),
    *[PackedCase((5, 40, 0, 17), (33, 20, 12, 0), heads_q=4, heads_kv=2, d=d, spare=9, rule={"causal": True}, sinks=_SINKS) for d in (64, 512)],
]  # fmt: skip


def offsets(lengths, device) -> torch.Tensor:
    return torch.tensor(
        [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32, device=device
    )


def make_packed_inputs(case: PackedCase, device, seed: int = 0):
    """Returns (q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k); spare rows hold NaN."""
    generator = torch.Generator().manual_seed(seed + len(case.id))
    t_q, t_k = sum(case.lengths_q), sum(case.lengths_k)
    shapes = [(t_q, case.heads_q, case.d), (t_k, case.heads_kv, case.d), (t_k, case.heads_kv, case.d_v or case.d)]
    tensors = []
    for rows, heads, d in shapes:
        x = poisoned((rows + case.spare, heads, d), case.dtype, device, generator)
        x[rows:] = torch.nan
        tensors.append(x)
    longest = [max(lengths, default=0) for lengths in (case.lengths_q, case.lengths_k)]
    return *tensors, offsets(case.lengths_q, device), offsets(case.lengths_k, device), *longest


def attending(reports) -> list[dict]:
    """Returns the emulator's reports but for that of what clears the rows of no sequence, once others have attended."""
    return [report for report in reports if report["kernel"] != "forward_clear_rows"]


def among_neighbours(ours, case: PackedCase, at: int, rows: tuple[int, int], device, seed: int):
    """Returns (q, k, v, cu_seqlens_q, cu_seqlens_k) of the case, in tensors of so many rows, and where sequence `at` has its
    rows of q; that sequence is `ours`, and the others are random numbers of this seed.
    """
    _, _, _, cu_q, cu_k, *_ = make_packed_inputs(case, device)
    of_q, of_k = (slice(offsets[at], offsets[at + 1]) for offsets in (cu_q, cu_k))
    tensors = []
    for mine, place, total in zip(ours, (of_q, of_k, of_k), (rows[0], rows[1], rows[1]), strict=False):
        x = torch.randn(total, *mine.shape[1:], generator=torch.Generator().manual_seed(seed)).to(mine)
        x[place] = mine
        tensors.append(x)
    return (*tensors, cu_q, cu_k), of_q
