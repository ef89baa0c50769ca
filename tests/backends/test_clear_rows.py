"""Tests what clears the rows of packed results that belong to no sequence: in the emulator, and on a GPU where there is one."""

from itertools import pairwise

import pytest
import torch
from ffpa_attn.backends.reference import Rule
from ffpa_attn.launching import attention_call
from ffpa_attn.specs.problem import Visibility
from ffpa_attn.testing import emulate

D, HEADS, FREE = 24, 3, 7.0  # FREE is what nobody has written
RULE = Rule(1.0, 0.0, Visibility(-1, -1, False))
MANY = [i * 9 + i // 40 for i in range(80)]  # three looks of a warp, with a row of no sequence behind every 40 of them

# Offsets of sequences, rows of the tensor, rows of the longest.
ASCENDING = {
    "before, behind": ([5, 9, 9, 30], 41, 99),
    "longer than the longest": ([0, 20, 25, 40], 40, 6),
    "many sequences": (MANY, 800, 9),
    "gaps of one row": ([2 * i for i in range(41)], 1200, 1),
    "more rows than blocks": ([3, 700, 1400], 1500, 600),
    "as many rows as a block has at most": ([1, 2], 300_000, 9),
    "beyond the tensor": ([-9, -2, 8, 50, 60], 40, 99),
    "no sequence": ([0], 10, 9),
    "no row of any": ([4, 4, 4], 10, 9),
    "no gap": ([0, 7, 40], 40, 40),
}
FALLING = {
    "once": ([0, 30, 20, 40], 40, 99),
    "within the last sequence of many": ([*MANY, 700, 690], 800, 99),
    "before the first sequence of many": ([5, 3, *MANY[1:]], 800, 99),
    "from beyond the tensor": ([0, 99, 10, 40], 40, 99),
}


def in_sequences(offsets, total, longest) -> torch.Tensor:
    rows = torch.zeros(total, dtype=torch.bool)
    inside = [min(max(x, 0), total) for x in offsets]
    for begin, end in pairwise(inside):
        rows[begin : min(end, begin + longest)] = True
    return rows


def clear(case, device, results=True, parts=1):
    """Returns out [H, T, D], a view whose heads lie side by side, LSE and sums of parts, all of them full of FREE before."""
    offsets, total, longest = case
    out = torch.full((total, HEADS, D + 8), FREE, dtype=torch.bfloat16, device=device)[..., :D].transpose(0, 1)
    lse = torch.full((HEADS, total), FREE, device=device)
    rows = (len(offsets) - 1) * HEADS * min(longest, total)
    partial = torch.full((rows * parts * (64 + 2),), FREE, device=device)
    cu = torch.tensor(offsets, dtype=torch.int32, device=device)
    launch = attention_call.clear_launch(out, out, out, out, (cu, cu, longest, 9), RULE, splits=parts)
    with emulate("sm_80", seed=2):
        launch(*((out, lse) if results else (None, None)), cu, partial if parts > 1 else None)
    return out, lse, partial[partial.numel() - 2 * rows * parts :]


def unwritten(x: torch.Tensor) -> torch.Tensor:
    """Says which elements nobody wrote: the emulator fills results with NaN, as nobody may read them before."""
    return x.isnan() if x.device.type == "cpu" else x == FREE


@pytest.mark.parametrize("case", ASCENDING.values(), ids=ASCENDING)
def test_rows_of_no_sequence_alone_are_cleared(case, device):
    out, lse, sums = clear(case, device, parts=2)
    stays = in_sequences(*case).to(device)
    assert not out[:, ~stays].any() and torch.isneginf(lse[:, ~stays]).all()
    assert unwritten(out[:, stays]).all() and unwritten(lse[:, stays]).all() and unwritten(sums).all()


@pytest.mark.parametrize("case", FALLING.values(), ids=FALLING)
def test_all_is_cleared_where_offsets_fall(case, device):
    out, lse, sums = clear(case, device, parts=3)
    assert not out.any() and torch.isneginf(lse).all() and len(sums) and not sums.any()


def test_sums_alone(device):
    """Keys may come in several calls, each of which has some of the sequences."""
    out, lse, sums = clear(FALLING["once"], device, results=False, parts=3)
    assert (out == FREE).all() and (lse == FREE).all() and not sums.any()
