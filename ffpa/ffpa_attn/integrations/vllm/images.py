"""Images of a prompt whose rows see each other both ways, in models that vLLM calls prefix-LMs, without a mask.

A row of an image sees all keys up to the image's last: so the image is a sequence of its own, which ends there and is
not causal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from .attention import Images, bound


def find(
    ranges: Mapping[int, Sequence[tuple[int, int]]], offsets: torch.Tensor, lengths: torch.Tensor, device: torch.device
) -> Images | None:
    """Returns the images that have rows in this step, or None if there are none.

    ranges   the first and the last position of each image, by request.
    offsets  [B + 1] on the host, where each request's rows begin.
    lengths  [B] on the host, the keys of each request; those of prompts are exact.
    device   where the result shall be.
    """
    if not any(ranges.values()):
        return None
    begins, keys = offsets.tolist(), lengths.tolist()
    rows, counts, ends, requests = [], [0], [], []
    for i, images in ranges.items():
        if i >= len(keys):
            continue
        past = keys[i] - (begins[i + 1] - begins[i])  # keys of earlier steps
        for first, last in images:
            first, last = max(first, past), min(last, keys[i] - 1)
            if first >= last:  # a row alone sees no more than it does anyway
                continue
            rows += range(begins[i] + first - past, begins[i] + last - past + 1)
            counts.append(len(rows))
            ends.append(last + 1)
            requests.append(i)
    if not rows:
        return None
    longest = max(b - a for a, b in pairwise(counts))
    of_rows, of_requests = (torch.tensor(x, device=device) for x in (rows, requests))
    of_counts, of_ends = (torch.tensor(x, dtype=torch.int32, device=device) for x in (counts, ends))
    return Images(of_rows, of_counts, of_ends, of_requests, bound(longest), bound(max(ends)))
