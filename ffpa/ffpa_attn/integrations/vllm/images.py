"""In models that vLLM calls prefix-LMs the rows of an image see each other both ways; this needs no mask.

A row of an image sees all keys up to the image's last: so the image is a sequence of its own, which ends there and is
not causal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from .attention import Images, bound


def find(
    ranges: Mapping[int, Sequence[tuple[int, int]]],
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
) -> Images | None:
    """Returns the images that have rows in this step, where the table is, or None if there are none.

    ranges       the first and the last position of each image, by request.
    offsets      [B + 1] on the host, where each request's rows begin.
    lengths      [B] on the host, the keys of each request; those of prompts are exact.
    block_table  [B, entries], the pages of each request.
    """
    if not any(ranges.values()):
        return None
    begins, keys = offsets.tolist(), lengths.tolist()
    spans, ends, requests = [], [], []
    for i, images in ranges.items():
        if i >= len(keys):
            continue
        past = keys[i] - (begins[i + 1] - begins[i])  # keys of earlier steps
        for first, last in images:
            first, last = max(first, past), min(last, keys[i] - 1)
            if first >= last:  # a row alone sees no more than it does anyway
                continue
            spans.append(range(begins[i] + first - past, begins[i] + last - past + 1))
            ends.append(last + 1)
            requests.append(i)
    if not spans:
        return None
    counts = [0, *accumulate(map(len, spans))]
    numbers = _copied(spans, [*counts, *ends, *requests], block_table.device)
    rows, offsets, ends_there, requests = numbers.split([counts[-1], len(counts), len(ends), len(ends)])
    table = block_table.index_select(0, requests)
    longest = max(map(len, spans))
    return Images(rows.long(), offsets, ends_there, table, bound(longest), bound(max(ends)))


def _copied(spans: list[range], more: list[int], device: torch.device) -> torch.Tensor:
    """Returns all these numbers as int32, by one copy, for which the host does not wait."""
    rows = sum(map(len, spans))
    here = torch.empty(rows + len(more), dtype=torch.int32, pin_memory=device.type == "cuda")
    at = 0
    for span in spans:
        torch.arange(span.start, span.stop, out=here[at : at + len(span)])
        at += len(span)
    here[rows:] = torch.tensor(more, dtype=torch.int32)
    return here.to(device, non_blocking=True)
