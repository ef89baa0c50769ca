"""Defines what attention is: float64, whole matrices, one line per rule. It shares no code with the package.

`attention` is differentiable, so the oracle of every gradient is autograd through it.
"""

from __future__ import annotations

import torch


def visible(n_q: int, n_k: int, causal=False, align="bottom_right", window=(-1, -1), device="cpu") -> torch.Tensor:
    """Returns [n_q, n_k], True where row r may see key c."""
    r = torch.arange(n_q, device=device).unsqueeze(1)
    c = torch.arange(n_k, device=device).unsqueeze(0)
    diagonal = r if align == "top_left" else r + (n_k - n_q)
    ok = torch.ones(n_q, n_k, dtype=torch.bool, device=device)
    if causal:
        ok &= c <= diagonal
    left, right = window
    if left != -1:
        ok &= c >= diagonal - left
    if right != -1:
        ok &= c <= diagonal + right
    return ok


def visible_pairs(n_q: int, n_k: int, **rule) -> int:
    return int(visible(n_q, n_k, **rule).sum())


def attention(
    q, k, v, *, causal=False, align="bottom_right", scale=None, window=(-1, -1), softcap=0.0, mask=None, layout="BHND",
    sinks=None,
):  # fmt: skip
    """Returns (out, lse) in float64; out in the layout of q, lse [B, H, Nq]. Sinks are one more key, whose value is 0."""
    if layout == "BNHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k, v = q.double(), k.double(), v.double()
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q.shape[2], k.shape[2], causal, align, window, q.device).expand(scores.shape)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask.double()
        seen = seen & (mask != -torch.inf)
    scores = torch.where(seen, scores, -torch.inf)
    if sinks is not None:
        more = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores, v = torch.cat([scores, more], 3), torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[3])], 2)
        seen = torch.cat([seen, more != -torch.inf], 3)
    empty = ~seen.any(-1, keepdim=True)
    safe = torch.where(empty, 0.0, scores)
    p = torch.where(empty, 0.0, torch.softmax(safe, -1)) if scores.shape[-1] else scores
    out = p @ v
    lse = torch.where(empty, -torch.inf, torch.logsumexp(safe, -1, keepdim=True) if scores.shape[-1] else 0.0)
    return (out.transpose(1, 2) if layout == "BNHD" else out), lse.squeeze(-1)


def largest_scores(q, k, *, causal=False, align="bottom_right", scale=None, window=(-1, -1), softcap=0.0, mask=None):
    """Returns [B, H] in float64: the largest score that is seen, without what a mask adds; -inf where none is."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q.shape[2], k.shape[2], causal, align, window, q.device).expand(scores.shape)
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask != -torch.inf)
    none = scores.new_full((*scores.shape[:2], 1), -torch.inf)
    return torch.cat([torch.where(seen, scores, -torch.inf).flatten(2), none], 2).amax(2)
