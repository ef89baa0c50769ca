"""The one comparator says how far a result may be from the float64 oracle.

The yardstick is PyTorch itself: the same computation, matmuls in the input type and softmax in float32. A result may
err twice as much as that, plus one unit in the last place, which is no less for a number that is below normal ones; NaN
and infinities must sit exactly where the oracle has them.

Rows that see a score beyond 10^4, or one whose terms are that large, have another yardstick, softmax in float32 of
float32 scores, as a product in float16 overflows; and there float32 itself no longer tells scores apart, so that what
its rounding may change is allowed too (`Movement`). Everywhere else that is nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import oracle
import torch

LARGE = 1e4  # a score beyond it, before or after its mask: a product in float16 is about to overflow

_DEVIATIONS = 4.0  # standard deviations that the largest error may have at least; their RMS has a margin of as many
MMA_DEPTH = 16  # products that a tensor core adds up before it rounds the sum
_ULP = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-23}


def _matmul(a, b, acc: str):
    """Returns a @ b, accumulated in "f32" or "f16".

    PyTorch has the latter on GPUs alone (torch.backends.cuda.matmul.allow_fp16_accumulation). What it means is the same
    everywhere: the sum is an f16 number, rounded after every 16 products. Rounding is all that makes such sums worse,
    so this is no looser a yardstick than an eager matmul on the tensor cores would be.
    """
    if acc == "f32":
        return a @ b
    total = torch.zeros((), dtype=torch.float16, device=a.device)
    for k in range(0, a.shape[-1], MMA_DEPTH):
        products = a[..., k : k + MMA_DEPTH].float() @ b[..., k : k + MMA_DEPTH, :].float()
        total = (total.float() + products).to(torch.float16)
    return total.expand(*a.shape[:-1], b.shape[-1])


def baseline(
    q, k, v, *, causal=False, align="bottom_right", scale=None, window=(-1, -1), softcap=0.0, mask=None, layout="BHND",
    acc_qk="f32", acc_pv="f32", sinks=None,
):  # fmt: skip
    """Computes PyTorch's own attention in the input type: (out, lse), differentiable. Rows without keys give (0, 0)."""
    if layout == "BNHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    hidden = ~oracle.visible(q.shape[2], k.shape[2], causal, align, window, q.device)
    if mask is not None:
        hidden = hidden | (~mask if mask.dtype == torch.bool else mask == -torch.inf)

    def scores_of(products):
        scores = products * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        return scores if mask is None or mask.dtype == torch.bool else scores + mask.float()

    products = _matmul(q, k.transpose(2, 3), acc_qk).float()
    hidden = hidden.expand(products.shape)
    scores = scores_of(products)
    large = is_large(scores.masked_fill(hidden, 0.0), products.isfinite() | hidden)
    if large.any():
        scores = torch.where(large, scores_of(q.float() @ k.float().transpose(2, 3)), scores)
    if sinks is not None:  # each is one more key, whose value is 0
        more = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        scores, hidden = torch.cat([scores, more], 3), torch.cat([hidden, more == -torch.inf], 3)
        v = torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[3])], 2)
    empty = hidden.all(-1, keepdim=True)
    scores = torch.where(empty, 0.0, scores.masked_fill(hidden, -torch.inf))
    out = _matmul(torch.where(empty, 0.0, torch.softmax(scores, -1)).to(v.dtype), v, acc_pv)
    lse = torch.where(empty, 0.0, scores.logsumexp(-1, keepdim=True) if scores.shape[-1] else 0.0).squeeze(-1)
    return (out.transpose(1, 2) if layout == "BNHD" else out), lse


def is_large(
    scores: torch.Tensor, finite: torch.Tensor, sizes: torch.Tensor | None = None, softcap: float = 0.0
) -> torch.Tensor:
    """Returns, as [.., rows, 1], the rows that see a score beyond LARGE, or a product that is not `finite` in the input
    type, or one whose terms are large though their sum is not.
    """
    large = (scores.abs() > LARGE) & (scores != -torch.inf) | ~finite
    if sizes is not None:
        large = large | (sizes > large_terms(softcap)) & (scores != -torch.inf)
    return large.any(-1, keepdim=True)


def large_terms(softcap: float) -> float:
    """A softcap below 1 divides a product, and its sum's rounding, by less: its slope hangs on what that leaves."""
    return LARGE * min(softcap or 1.0, 1.0)


def sizes_of_products(q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float = 0.0) -> torch.Tensor | None:
    """Returns the sums of the sizes of the terms of each score, or None where all are small."""
    if not q.numel() or not k.numel():
        return None
    largest = float(q.abs().amax().nan_to_num(torch.inf).double() * k.abs().amax().nan_to_num(torch.inf).double())
    if largest * q.shape[-1] * abs(scale) <= large_terms(softcap):
        return None
    return (q.float().abs() @ k.float().abs().mT).double() * abs(scale)


class Movement(NamedTuple):
    """What becomes of a result where each score of a row with large ones moves by its rounding in float32. All float64.

    `by` bounds how far: the sum of products moves by an ulp of the sum of their sizes (tensor cores cut sums off), the
    score by half an ulp each time that it is rounded: scaled, with its mask added, in base 2; four times more by a
    softcap. So P lies between exp(low - greatest sum) and exp(high - least sum), whatever scores do together. Keys that
    are all alike have the same product where sums have one order (`ordered`: on tensor cores, not in a CPU's BLAS), so
    that P moves by what comes later alone.

    The backward's P is exp(score - LSE) of an LSE in float32, the caller's: its rounding moves scores once more, and
    the scores are computed again. Such a P need not add up to 1, yet is never more than 1.

    A sink is a key whose score has no product: it moves by what comes later alone, and keys that are alike move from it
    together.
    """

    large: torch.Tensor  # [.., rows, 1]
    p: tuple[torch.Tensor, torch.Tensor]  # the least and the largest P of the forward
    p_again: tuple[torch.Tensor, torch.Tensor]  # the same, in the backward
    by: torch.Tensor
    log_sum: tuple[torch.Tensor, torch.Tensor]  # [.., rows, 1]
    softcap: float

    @classmethod
    def of(cls, k, sizes, raw, scores, lse, large, softcap, has_mask, ordered, has_sink=False) -> Movement:
        """sizes: those of products, None if small; raw: the scaled products; scores: -inf where hidden. has_mask: numbers
        are added to products; has_sink: the last key is one.
        """
        hidden = scores == -torch.inf
        of_products = 2.0**-24 * raw.abs() + 2.0**-23 * (raw.abs() if sizes is None else sizes)
        if softcap:  # a softcap lets large products move by little
            capped, *ends = (softcap * torch.tanh((raw + x) / softcap) for x in (0.0, of_products, -of_products))
            of_products = torch.maximum(*((end - capped).abs() for end in ends)) + 2.0**-22 * capped.abs()
        of_products = of_products.masked_fill(hidden, 0.0)
        later = 3 * 2.0**-24 * scores.masked_fill(hidden, 0.0).abs()
        by = of_products + later
        keys = slice(0, -1) if has_sink else slice(None)
        alike = (k == k[..., :1, :])[..., keys, :].all(-1).all(-1)[..., None, None] & ordered
        apart = torch.where(alike, later if has_mask else 0.0, by)
        if has_sink and by.shape[-1] > 1:  # what all keys share moves them from the sink
            shared = torch.where(alike, by[..., keys].amax(-1, keepdim=True), 0.0)
            apart = torch.cat([apart[..., keys], by[..., -1:] + shared], -1)
        low, high = (_log_sum(scores + x) for x in (-by, by))
        rounding = 2.0**-23 * lse.abs()
        least = low
        if has_sink:  # a backward may take a sink that weighs no more than an LSE's rounding for none
            of_keys = _log_sum((scores - by)[..., keys])
            least = torch.where(low - of_keys <= 8 * rounding, of_keys, low)
        return cls(
            large,
            _between(scores, apart, *(_log_sum(scores + x) for x in (-apart, apart))),
            _between(scores, by, least - rounding, high + rounding),
            by,
            (low - rounding, high + rounding),
            softcap,
        )

    def _change(self, p, between) -> torch.Tensor:
        """Returns the change of P, at most; it is nothing in rows without large scores."""
        least, most = between
        return torch.where(self.large, torch.maximum(most - p, p - least).clamp_min(0.0), 0.0)

    def out(self, p, v, out) -> torch.Tensor:
        """Returns the move of out: no farther than to its least or largest value, of which it is an average."""
        farthest = torch.maximum(v.amax(-2, keepdim=True) - out, out - v.amin(-2, keepdim=True))
        return torch.minimum(self._change(p, self.p) @ v.abs(), farthest * self.large)

    def lse(self, lse) -> torch.Tensor:
        low, high = self.log_sum
        return torch.where(self.large, torch.maximum(high - lse, lse - low), 0.0)

    def gradients(self, p, k, q, v, out, grad, d_score, lowered, slope, capped, scale) -> dict[str, torch.Tensor]:
        """d_score = P * lowered is the gradient of a score; slope, of its softcap, makes it a scaled product's."""
        change = self._change(p, self.p_again)
        of_delta = (grad.abs() * self.out(p, v, out)).sum(-1, keepdim=True)
        of_score = change * lowered.abs() + (p + change) * of_delta
        of_slope = (2 * capped.abs() * self.by / self.softcap**2).clamp_max(1.0) * self.large if self.softcap else 0.0
        of_product = abs(scale) * (of_score * (slope + of_slope) + d_score.abs() * of_slope)
        return {
            "dq": of_product @ k.abs(),
            "dk": of_product.mT @ q.abs(),
            "dv": change.mT @ grad.abs(),
            "dmask": of_score,
            "dsinks": of_score,
        }


def _log_sum(scores: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(scores, -1, keepdim=True)


def _between(scores, by, low_sum, high_sum) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the least P, the largest) where scores move by `by`; the logarithm of their sum is between these."""
    most = torch.exp((scores + by - low_sum).clamp_max(0.0))
    return torch.exp(scores - by - high_sum).nan_to_num(0.0), most.nan_to_num(0.0)


class Comparison(NamedTuple):
    """What a comparison found, in float64 on the tensors' device, and what judges it: many come from a GPU at once."""

    found: torch.Tensor
    judge: Callable[..., None]


def settle(*comparisons: Comparison) -> None:
    """Raises AssertionError for the first comparison that is too far off."""
    if not comparisons:
        return
    numbers = torch.cat([one.found for one in comparisons]).tolist()
    for found, judge in comparisons:
        judge(*numbers[: len(found)])
        numbers = numbers[len(found) :]


def _found(*numbers: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.double() for x in numbers])


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, base, moved=None, least=None) -> None:
    settle(close(name, got, want, base, moved, least))


def close(name: str, got: torch.Tensor, want: torch.Tensor, base, moved=None, least=None) -> Comparison:
    """Compares got, what we computed, with want, the oracle's float64; base: PyTorch's own, in got's type, or several
    such; moved: what the rounding of large scores changes, which is allowed beyond; least: what twice PyTorch's error
    counts as at least, where it is small by luck: of each element so many deviations of its own rounding
    (`deviations`). The RMS of such rounding is one deviation, more by chance where few rows have most of it. What may
    round to an infinity may be one.
    """
    bases = base if isinstance(base, tuple) else (base,)
    base = bases[0]
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if not want.numel():
        return Comparison(want.new_empty(0, dtype=torch.float64), lambda: None)
    ulp, least_ulp = _ULP[base.dtype], _least_ulp(base.dtype)
    got, want, bases = got.detach().double(), want.detach(), [base.detach().double() for base in bases]
    sizes = want.nan_to_num(0.0, 0.0, 0.0).abs()
    zero = sizes.new_zeros(())
    moved = zero if moved is None else moved * (1 + ulp)
    least = zero if least is None else least
    # Where PyTorch overflows, it is no yardstick.
    errors = [((base - want).abs() - moved).clamp_min(0.0).nan_to_num(0.0, 0.0, 0.0) for base in bases]
    units = (ulp * sizes).clamp_min(least_ulp)
    rounding = torch.maximum(2 * _worst(errors), least) + units
    may_overflow = sizes + moved + rounding > torch.finfo(base.dtype).max
    elsewhere = [((is_it(got) != is_it(want)) & ~may_overflow).sum() for is_it in _NO_NUMBERS.values()]
    finite = torch.isfinite(want) & ~may_overflow
    differences = (moved, least, (got - want).abs(), *errors)
    moved, least, error, *base_errors = (x if x is zero else torch.where(finite, x, 0.0) for x in differences)
    allowed = torch.maximum(2 * _worst(base_errors), least) + units + moved
    beyond = ~(error <= allowed) & finite
    worst = torch.where(finite, error - allowed, -torch.inf).argmax()
    count = finite.sum()
    sums = (
        (x.square().sum() / count).sqrt() for x in (error, torch.where(finite, want, 0.0), moved, least, *base_errors)
    )
    of_worst = (x.take(worst) for x in (got, want, error, allowed))

    def judge(
        nan, inf, minus_inf, count, beyond, got, want, error, allowed, rows, rms, size, of_moved, of_least, *of_bases
    ) -> None:
        for what, wrong in zip(_NO_NUMBERS, (nan, inf, minus_inf), strict=True):
            assert not wrong, f"{name}: {int(wrong)} of {sizes.numel()} elements differ in being {what}"
        if not count:
            return
        assert not beyond, (
            f"{name}: {int(beyond)} of {int(count)} elements are too far off; worst: {got:.6g} "
            f"for {want:.6g}, error {error:.3g}, allowed {allowed:.3g}"
        )
        of_least *= (1 + _DEVIATIONS / math.sqrt(max(rows, 1.0))) / deviations(sizes.numel())
        rms_allowed = max(2 * max(of_bases), of_least) + max(ulp * size, least_ulp) / 2 + of_moved
        assert rms <= rms_allowed, f"{name}: RMS error {rms:.3g}, PyTorch's own {max(of_bases):.3g}"

    return Comparison(_found(*elsewhere, count, beyond.sum(), *of_worst, _rows_that_count(least), *sums), judge)


def _least_ulp(dtype: torch.dtype) -> float:
    """Returns the distance of numbers below the least normal one."""
    numbers = torch.finfo(dtype)
    return numbers.smallest_normal * numbers.eps


def _rows_that_count(sizes: torch.Tensor) -> torch.Tensor:
    """Returns how many rows, all alike, would have this sum of squares and this sum of the squares of squares."""
    of_rows = sizes.square().sum(-1)
    squares = of_rows.square().sum()
    return torch.where(squares > 0, of_rows.sum().square() / squares, 1.0)


_NO_NUMBERS = {"NaN": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}


def deviations(count: int) -> float:
    """Returns how many deviations the largest of so many normal errors may be: about sqrt(2 ln count) + 1."""
    return max(_DEVIATIONS, 1 + math.sqrt(2 * math.log(max(count, 1))))


def _worst(errors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.max() for x in errors]).max()


def assert_lse_close(name: str, got: torch.Tensor, want: torch.Tensor, q, k, scale, base=None, moved=None) -> None:
    settle(lse_close(name, got, want, q, k, scale, base, moved))


def lse_close(
    name: str, got: torch.Tensor, want: torch.Tensor, q, k, scale, base=None, moved=None, least=None
) -> Comparison:
    """LSE is float32 whatever the inputs: its error is that of float32 sums of D products (and of nothing coarser), or
    two units in the last place where it is large; of rows with large scores `moved` is allowed beyond.

    Where scores are f16 sums, `base` is the baseline's LSE with such sums, and twice its error is allowed as well, or
    `least`, if that is more.
    """
    assert got.dtype == torch.float32, f"{name}: {got.dtype}"
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if not want.numel():
        return Comparison(want.new_empty(0, dtype=torch.float64), lambda: None)
    elsewhere = [(is_it(got) != is_it(want)).sum() for is_it in (torch.isnan, torch.isneginf)]
    finite = torch.isfinite(want)
    unreal = (finite & ~torch.isfinite(got)).sum()
    size_q, size_k = (x.abs().nan_to_num(0.0).max().double() if x.numel() else 0.0 for x in (q, k))
    factor = 2.0**-22 * q.shape[-1] * abs(q.shape[-1] ** -0.5 if scale is None else scale)
    of_sums = want.new_full((), 1e-5) + factor * size_q * size_k
    if base is not None:
        of_base = 2 * torch.where(finite, (base.double() - want).abs(), 0.0).max()
        of_sums = of_sums + (of_base if least is None else torch.maximum(of_base, least))
    allowed = torch.maximum(2.0**-22 * want.abs(), of_sums) + (0.0 if moved is None else moved)
    error, allowed = (torch.where(finite, x, 0.0) for x in ((got.double() - want).abs(), allowed))
    worst = (error - allowed).argmax()
    beyond = (~(error <= allowed)).sum()

    def judge(nan, minus_inf, unreal, beyond, error, allowed) -> None:
        for what, wrong in (("NaN", nan), ("-inf", minus_inf)):
            assert not wrong, f"{name}: {what} in other places"
        assert not unreal, f"{name}: NaN or inf"
        assert not beyond, f"{name}: error {error:.3g}, allowed {allowed:.3g}"

    return Comparison(_found(*elsewhere, unreal, beyond, *(x.take(worst) for x in (error, allowed))), judge)
