"""Tests what clears the rows of packed results that belong to no sequence: in the emulator, and on a GPU where there is one."""

from itertools import pairwise

import pytest
import torch
from ffpa_attn.backends.reference import Rule
from ffpa_attn.launching import attention_call
from ffpa_attn.launching.attention_call import Call
from ffpa_attn.specs.problem import Visibility
from ffpa_attn.testing import emulate

D, HEADS, TILE_ROWS, FREE = 24, 3, 32, 7.0  # FREE is what nobody has written
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
    "the last sequence ends before it begins": ([*MANY, 790, 780], 800, 99),
    "no gap": ([0, 7, 40], 40, 40),
}
# Some sequence begins before the one before it; and the rows that a tile of TILE_ROWS has all the same.
FALLING = {
    "once": (([0, 30, 20, 40], 40, 99), [(0, 40)]),
    "offsets that end with zeros": (([0, 10, 30, 0, 0], 40, 99), [(0, 30)]),
    "one row each, and zeros": (([*range(41), 0, 0, 0], 300, 1), [(0, 40)]),
    "tiles of others": (([0, 100, 120, 0, 0], 300, 128), [(0, 96)]),
    "from beyond the tensor": (([0, 99, 10, 40], 40, 99), [(0, 40)]),
}


def in_sequences(offsets, total, longest) -> torch.Tensor:
    rows = torch.zeros(total, dtype=torch.bool)
    inside = [min(max(x, 0), total) for x in offsets]
    for begin, end in pairwise(inside):
        rows[begin : min(end, begin + longest)] = True
    return rows


def clear(case, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out [H, T, D], a view whose heads lie side by side, and LSE, which were full of FREE before."""
    offsets, total, longest = case
    out = torch.full((total, HEADS, D + 8), FREE, dtype=torch.bfloat16, device=device)[..., :D].transpose(0, 1)
    lse = torch.full((HEADS, total), FREE, device=device)
    cu = torch.tensor(offsets, dtype=torch.int32, device=device)
    packed = cu, cu, longest, 9
    launch = attention_call.forward_launch((), out, out, out, out, None, packed, RULE, tile_rows=TILE_ROWS)
    with emulate("sm_80", seed=2):
        Call(launch)(out, out, out, out, lse, None, packed)
    return out, lse


@pytest.mark.parametrize("case", ASCENDING.values(), ids=ASCENDING)
def test_rows_of_no_sequence_alone_are_cleared(case, device):
    out, lse = clear(case, device)
    stays = in_sequences(*case).to(device)
    assert not out[:, ~stays].any() and torch.isneginf(lse[:, ~stays]).all()
    assert (out[:, stays] == FREE).all() and (lse[:, stays] == FREE).all()


@pytest.mark.parametrize("case, tiles", FALLING.values(), ids=FALLING)
def test_rows_without_a_tile_are_cleared_where_begins_fall(case, tiles, device):
    out, lse = clear(case, device)
    stays = torch.zeros(case[1], dtype=torch.bool, device=device)
    for begin, end in tiles:
        stays[begin:end] = True
    assert (out == 0).all(2).all(0).equal(~stays) and torch.isneginf(lse).all(0).equal(~stays)


def test_without_an_lse(device):
    out = torch.full((HEADS, 40, D), FREE, dtype=torch.bfloat16, device=device)
    packed = (torch.tensor([3, 30], dtype=torch.int32, device=device),) * 2 + (99, 9)
    launch = attention_call.forward_launch((), out, out, out, out, None, packed, RULE, tile_rows=TILE_ROWS)
    with emulate("sm_80"):
        Call(launch)(out, out, out, out, torch.empty(0), None, packed)
    assert not out[:, :3].any() and not out[:, 30:].any() and (out[:, 3:30] == FREE).all()
