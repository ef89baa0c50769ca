"""The cost of a workload on paper: visible pairs, nominal FLOPs, and the bytes that must move at least once."""

from __future__ import annotations

from workload import Workload

BACKWARD_FACTOR = 2.5  # five products, and the forward has two; counted so even where a kernel recomputes more


def visible_pairs(n_q: int, n_kv: int, causal: bool) -> int:
    """Counts pairs (row, key) that meet. Causal is bottom right: row r meets the keys up to r + n_kv - n_q."""
    if not causal:
        return n_q * n_kv
    unseen = max(n_kv - n_q, 0)  # rows count up from here to n_kv visible keys; earlier ones see none
    return (n_kv * (n_kv + 1) - unseen * (unseen + 1)) // 2


def _flops(w: Workload, pairs: float) -> float:
    forward = 2 * (w.d + w.d_v) * pairs * w.heads
    return forward * BACKWARD_FACTOR if w.backward else forward


def nominal_flops(w: Workload) -> float:
    return _flops(w, sum(visible_pairs(n_q, n_kv, w.causal) for n_q, n_kv in w.sequences))


def halved_flops(w: Workload) -> float:
    """Counts FLOPs of half of the whole square, which others report for causal attention."""
    return _flops(w, sum(n_q * n_kv for n_q, n_kv in w.sequences) / 2)


def least_bytes(w: Workload) -> int:
    """Counts bytes, every tensor once. Forward: q, k, v, out. Backward: those, grad of out, and the three gradients."""
    rows, keys = (sum(lengths) for lengths in zip(*w.sequences, strict=True))
    elements = (w.d + w.d_v) * (rows * w.heads + keys * w.heads_kv)
    return 2 * elements * (2 if w.backward else 1)
