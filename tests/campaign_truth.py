"""Says what a call must give, how far PyTorch's own result is from it, and how far rounding large scores may move it.

The truth is the oracle's formula in float64, with its gradients, a block of rows at a time (a test compares both).
Beside it, of the same matrices, stand the comparator's yardsticks: attention and its gradients as PyTorch computes them
in the input type. Where scores are large (compare.LARGE), a third thing says what float32 cannot tell apart.

A sink is one more key, of zeros, with a value of zeros: its product is 0, and the sink is what a mask adds to that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import compare
import oracle
import torch

_MOST_SCORES = 1 << 22  # scores of one block: 32 MB in float64
_ROUNDINGS = 3  # roundings to 16 bits that a dS has behind it: those of P, of dP - delta, and its own
_LEAST_NORMAL = 2.0**-126  # hardware's exp2 gives 0 below it
_ROUNDING_OF_P = 2.0**-12  # error of P by rounding a score that is not large, which float32 has to 2^-24 of its size
_FAR_APART = 85.0  # difference of scores whose P may be below normal numbers: exp(-87.3) is


class Expected(NamedTuple):
    want: torch.Tensor  # float64
    bases: tuple[torch.Tensor, ...]  # PyTorch's own, in the type of the result
    moved: torch.Tensor | None  # what is allowed beyond twice their error
    least: torch.Tensor | None  # what twice that error counts as at least


class Part(NamedTuple):
    """What a block of rows adds to a result."""

    want: torch.Tensor
    bases: list[torch.Tensor]
    moved: torch.Tensor | None = None
    variance: torch.Tensor | None = None  # variance of the error that rounding makes
    surely: torch.Tensor | None = None  # error that float32 sums may make

    def each(self, change) -> Part:
        return Part(*(x if x is None else [change(y) for y in x] if isinstance(x, list) else change(x) for x in self))


class Sum:
    """A result that grows part by part."""

    def __init__(self, shape, dtype, device, bases: int):
        self.want = torch.zeros(shape, dtype=torch.float64, device=device)
        self.bases = [torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(bases)]
        self.rest: list[torch.Tensor | None] = [None] * 3
        self.dtype = dtype

    def add(self, at, part: Part) -> None:
        self.want[at] += part.want
        for mine, base in zip(self.bases, part.bases, strict=True):
            mine[at] += base
        for i, x in enumerate((part.moved, part.variance, part.surely)):
            if x is not None:
                if self.rest[i] is None:
                    self.rest[i] = torch.zeros_like(self.want)
                self.rest[i][at] += x

    def fill(self, value: float) -> None:
        for x in (self.want, *self.bases):
            x.fill_(value)

    def put(self, at, part: Part) -> None:
        """Adds to what is -inf."""
        for x in (self.want, *self.bases):
            x[at] = 0.0
        self.add(at, part)

    def raise_to(self, at, part: Part) -> None:
        """Keeps the larger numbers, where they are not added up."""
        self.want[at] = torch.maximum(self.want[at], part.want)
        if part.moved is not None:
            self.rest[0] = torch.zeros_like(self.want) if self.rest[0] is None else self.rest[0]
            self.rest[0][at] = torch.maximum(self.rest[0][at], part.moved)

    def each(self, change) -> None:
        self.want, self.bases, *self.rest = self.part().each(change)

    def part(self) -> Part:
        return Part(self.want, self.bases, *self.rest)

    def expected(self) -> Expected:
        moved, variance, surely = self.rest
        least = None
        if variance is not None:
            least = compare.deviations(variance.numel()) * variance.sqrt() + (0.0 if surely is None else surely)
        return Expected(self.want, tuple(base.to(self.dtype) for base in self.bases), moved, least)


def _blocks(batch_heads: int, group: int, n_q: int, n_k: int) -> Iterator[tuple[slice, slice]]:
    """Yields (key/value heads of batch entries, rows)."""
    rows = max(1, min(n_q, _MOST_SCORES // max(1, group * n_k)))
    heads = max(1, min(batch_heads, _MOST_SCORES // max(1, group * n_k * rows)))
    for head in range(0, batch_heads, heads):
        for row in range(0, n_q, rows):
            yield slice(head, min(head + heads, batch_heads)), slice(row, min(row + rows, n_q))


def expected(q, k, v, **how) -> dict[str, Expected]:
    """Returns what each result must be, from the arguments that `sums` takes."""
    return {name: x.expected() for name, x in sums(q, k, v, **how).items()}


def sums(
    q, k, v, *, causal=False, align="bottom_right", scale=None, window=(-1, -1), softcap=0.0, mask=None, acc_qk="f32", acc_pv="f32",
    grad=None, grad_lse=None, ordered=True, sinks=None, max_logits=False,
) -> dict[str, Sum]:  # fmt: skip
    """Returns sums of out and lse, and with `grad` of dq, dk, dv and a mask's dmask, as [B, H, N, D], and of dsinks [H],
    with `max_logits` what they are, [B, H]; mask broadcastable.

    ordered: whether sums of products have one order, so that keys that are alike have the same.
    """
    batch, heads_q, n_q, d = q.shape
    heads_kv, n_k, d_v = v.shape[1:]
    group = heads_q // heads_kv
    scale = d**-0.5 if scale is None else scale
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    additive = mask is not None and mask.dtype != torch.bool
    seen_by_rule = oracle.visible(n_q, n_k, causal, align, window, q.device)

    by_heads = (batch * heads_kv, group)
    q = q.reshape(*by_heads, n_q, d)
    k, v = k.reshape(batch * heads_kv, n_k, d), v.reshape(batch * heads_kv, n_k, d_v)
    shape_k, shape_v = k.shape, v.shape
    if sinks is not None:
        k, v = (torch.cat([x, x.new_zeros(x.shape[0], 1, x.shape[2])], 1) for x in (k, v))
    q64, k64, v64 = q.double(), k.double(), v.double()
    out = Sum((*by_heads, n_q, d_v), q.dtype, q.device, 1)
    lse = Sum((*by_heads, n_q), torch.float32, q.device, 1)
    found = {"out": out, "lse": lse}
    if max_logits:
        found["max_logits"] = Sum(by_heads, torch.float32, q.device, 0)
        found["max_logits"].fill(-torch.inf)
    if grad is not None:
        grad = grad.reshape(out.want.shape)
        grad_lse = None if grad_lse is None else grad_lse.reshape(lse.want.shape)
        shapes = {"dq": q.shape, "dk": shape_k, "dv": shape_v}
        found |= {name: Sum(shape, q.dtype, q.device, 2) for name, shape in shapes.items()}
        if sinks is not None:
            found["dsinks"] = Sum(by_heads, sinks.dtype, q.device, 2)
        if additive:
            found["dmask"] = Sum(mask.shape, mask.dtype, mask.device, 2)

    product, score = _largest(q, k, scale, mask if additive else None, sinks)
    limit = 0.9 * compare.large_terms(softcap)
    sizes = {
        "large": not (product <= limit and score <= limit),  # NaN counts as large, too
        "tiny_p": not 2 * score < _FAR_APART - math.log(max(n_k, 1)),
    }

    def of_block(x, heads, rows):
        """Returns [heads, group * rows, ...] of x [heads, group, rows, ...]."""
        x = x[heads, :, rows]
        return x.reshape(x.shape[0], group * x.shape[2], *x.shape[3:])

    for heads, rows in _blocks(batch * heads_kv, group, n_q, n_k) if k.shape[1] and n_q else ():
        count, length = heads.stop - heads.start, rows.stop - rows.start
        seen, bias = seen_by_rule[rows], None
        if mask is not None:
            own = mask.expand(batch, heads_q, mask.shape[2], n_k)
            own = own[:, :, rows] if mask.shape[2] > 1 else own.expand(batch, heads_q, length, n_k)
            own = own.reshape(batch * heads_kv, group, length, n_k)[heads]
            seen = seen & (own if not additive else own != -torch.inf)
            seen = seen.reshape(count, group * length, n_k)
            bias = own.reshape(count, group * length, n_k) if additive else None
        else:
            seen = seen.expand(group, length, n_k).reshape(1, group * length, n_k)
        if sinks is not None:
            of_rows = sinks.reshape(1, heads_kv, group, 1).expand(batch, -1, -1, length)
            of_rows = of_rows.reshape(batch * heads_kv, group * length, 1)[heads]
            bias = of_rows.new_zeros(count, group * length, n_k) if bias is None else bias
            bias = torch.cat([bias, of_rows], -1)
            seen = torch.cat([seen.expand(count, -1, -1), of_rows != -torch.inf], -1)
        block = Block(
            *(of_block(x, heads, rows) for x in (q, q64)), k[heads], k64[heads], v[heads], v64[heads], seen, bias, scale, softcap, acc_qk, acc_pv,
            ordered=ordered, mask=mask if additive else None, has_sink=sinks is not None, **sizes,
        )  # fmt: skip
        parts = {"out": block.out(), "lse": block.log_sum()}
        if grad is not None:
            g_lse = None if grad_lse is None else of_block(grad_lse, heads, rows)
            parts |= block.gradients(of_block(grad, heads, rows), g_lse)
        shape = (count, group, length)
        if max_logits:
            largest = block.largest().each(lambda x, shape=shape: x.view(shape).amax(-1))
            found["max_logits"].raise_to(heads, largest)
        for name, part in parts.items():
            if name in ("dk", "dv"):
                found[name].add(heads, part.each(lambda x: x[:, :n_k]))
            elif name == "dsinks":
                found[name].add(heads, part.each(lambda x, shape=shape: x.view(shape).sum(-1)))
            elif name == "dmask":
                _add_to_mask(
                    found[name], heads, rows, heads_kv, part.each(lambda x, shape=(*shape, n_k): x.view(shape))
                )
            else:
                found[name].add(
                    (heads, slice(None), rows), part.each(lambda x, shape=shape: x.view(*shape, *x.shape[2:]))
                )

    if not k.shape[1]:
        lse.want.fill_(-torch.inf)
    shapes = {"out": (batch, heads_q, n_q, d_v), "lse": (batch, heads_q, n_q), "dq": (batch, heads_q, n_q, d)}
    shapes |= {"dk": (batch, heads_kv, n_k, d), "dv": (batch, heads_kv, n_k, d_v), "max_logits": (batch, heads_q)}
    for name, shape in shapes.items():
        if name in found:
            found[name].each(lambda x, shape=shape: x.reshape(shape))
    if "dsinks" in found:
        found["dsinks"].each(lambda x: x.reshape(batch, heads_q).sum(0))
    return found


def _largest(q, k, scale: float, bias, sinks) -> tuple[float, float]:
    """Returns bounds of the sizes of all products of q and k, and of all scores; a GPU is asked once."""
    if not q.numel() or not k.numel():
        return 0.0, 0.0
    of_q, of_k = (torch.linalg.vector_norm(x.float(), dim=-1).max().double() for x in (q, k))
    added = [of_q.new_zeros(())] * 2
    for i, x in enumerate((bias, sinks)):
        if x is not None and x.numel():
            added[i] = torch.where(x == -torch.inf, 0.0, x.double().abs()).max()
    product, of_bias, of_sinks = torch.stack((of_q * of_k, *added)).tolist()
    return product, max(product * abs(scale) + of_bias, of_sinks)


def _add_to_mask(total: Sum, heads, rows, heads_kv, part: Part) -> None:
    """Adds a part of a block, [heads, group, rows, keys], to the mask's elements, entry by entry."""
    count, group = part.want.shape[:2]
    mask_shape = total.want.shape
    for i in range(count):
        entry, head = divmod(heads.start + i, heads_kv)
        at = (
            slice(entry, entry + 1) if mask_shape[0] > 1 else slice(0, 1),
            slice(head * group, (head + 1) * group) if mask_shape[1] > 1 else slice(0, 1),
            rows if mask_shape[2] > 1 else slice(0, 1),
            slice(None),
        )
        target = total.want[at].shape
        total.add(at, part.each(lambda x, i=i, target=target: x[i : i + 1].sum_to_size(target)))


class Block:
    """Matrices [heads, rows, keys] of some rows and all keys; names with 64 are float64, q, k and v as given."""

    def __init__(
        self,
        q,
        q64,
        k,
        k64,
        v,
        v64,
        seen,
        bias,
        scale,
        softcap,
        acc_qk,
        acc_pv,
        ordered,
        mask,
        has_sink,
        large,
        tiny_p,
    ):
        """`has_sink` says whether the last key is one; `large`, whether scores may be large; `tiny_p`, whether a P may
        be below normal numbers.
        """
        self.q, self.k, self.v, self.q64, self.k64, self.v64 = q, k, v, q64, k64, v64
        self.scale, self.softcap, self.mask, self.has_sink = scale, softcap, mask, has_sink
        self.acc_qk, self.acc_pv = acc_qk, acc_pv
        self.tiny_p = tiny_p
        self.unit = torch.finfo(q.dtype).eps / 2 / 3**0.5  # largest standard deviation of what is rounded, by its size
        self.raw = self._product(q64 @ k64.mT) * scale
        self.capped = softcap * torch.tanh(self.raw / softcap) if softcap else self.raw
        scores = self.capped if bias is None else self.capped + bias.double()
        self.hidden = ~seen
        self.empty = self.hidden.all(-1, keepdim=True)
        self.scores = scores.masked_fill(self.hidden, -torch.inf)
        self.lse = torch.logsumexp(self.scores, -1, keepdim=True)
        self.p = torch.softmax(self.scores.masked_fill(self.empty, 0.0), -1).masked_fill(self.empty, 0.0)
        self.o = self.p @ v64
        self._base_scores(bias, large)
        self.movement = None
        if large and bool(self.large.any()):
            self.movement = compare.Movement.of(
                k, self.sizes, self.raw, self.scores, self.lse, self.large, softcap, mask is not None, ordered, has_sink
            )

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Returns products, that of a sink 0 though a row may hold NaN."""
        if self.has_sink:
            x[..., -1] = 0.0
        return x

    def _base_scores(self, bias, large: bool) -> None:
        """Computes the scores that compare.baseline has."""
        exact = self._product(self.q.float() @ self.k.float().mT)
        product = exact.to(self.q.dtype)
        if self.acc_qk != "f32":
            product = self._product(compare._matmul(self.q, self.k.mT, self.acc_qk))
        product = product.float()
        if large:
            self.sizes = compare.sizes_of_products(self.q, self.k, self.scale, self.softcap)
            self.large = compare.is_large(self.scores, product.isfinite() | self.hidden, self.sizes, self.softcap)
            product = torch.where(self._has_no_yardstick(product), exact, product)
        scores = product * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        self.base_capped = scores
        scores = scores if bias is None else scores + bias.float()
        self.base_scores = torch.where(self.empty, 0.0, scores.masked_fill(self.hidden, -torch.inf))
        self.base_p = torch.where(self.empty, 0.0, torch.softmax(self.base_scores, -1))
        self.p16 = self.base_p.to(self.q.dtype)
        product = (
            self.p16.float() @ self.v.float()
            if self.acc_pv == "f32"
            else compare._matmul(self.p16, self.v, self.acc_pv)
        )
        self.base_o = product.to(self.q.dtype)

    def _has_no_yardstick(self, product) -> torch.Tensor:
        """Returns rows whose products say nothing as PyTorch has them: large ones, or f16 sums that overflow."""
        return self.large if self.acc_qk == "f32" else ~(product.isfinite() | self.hidden).all(-1, keepdim=True)

    def out(self) -> Part:
        moved = None if self.movement is None else self.movement.out(self.p, self.v64, self.o)
        lost = self._tiny
        if lost is not None:
            moved = lost @ self.v64.abs() + (0.0 if moved is None else moved)
        variance = self.unit**2 * (self.p.square() @ self.v64.square())  # P is rounded before it meets V
        return Part(self.o, [self.base_o], moved, variance)

    def log_sum(self) -> Part:
        base = torch.where(self.empty, 0.0, self.base_scores.logsumexp(-1, keepdim=True))
        moved = None if self.movement is None else self.movement.lse(self.lse).squeeze(-1)
        variance = None if self.acc_qk == "f32" else (self.p.square() * self._variance_of_sums).sum(-1)
        return Part(self.lse.squeeze(-1), [base.squeeze(-1)], moved, variance)

    def largest(self) -> Part:
        """Returns the largest score of each row, without what a mask adds. Sums in f16 may move it by as much as any score:
        there are too few such numbers to say how far they are off.
        """

        def largest(x, nothing: float):
            x = x.masked_fill(self.hidden, nothing)[..., : -1 if self.has_sink else None]
            return torch.cat([x, torch.full_like(self.lse, nothing)], -1).amax(-1)

        moved = None
        if self.acc_qk == "f16":
            own = compare.deviations(self.raw.numel()) * self._variance_of_sums.sqrt()
            moved = largest(torch.maximum(2 * (self.base_capped.double() - self.capped).abs(), own), 0.0)
        return Part(largest(self.capped, -torch.inf), [], moved)

    @functools.cached_property
    def _variance_of_sums(self) -> torch.Tensor:
        """Returns the variance of scores whose sums are in f16, rounded time and again. What there is by then of a sum is a
        part of it, or of what its terms come to if their signs are random.
        """
        times = -(-self.q.shape[-1] // compare.MMA_DEPTH)
        terms = self._product(self.q64.square() @ self.k64.square().mT) * self.scale**2
        return self.unit**2 * (times * terms + (times / 3 + 1) * self.raw.square())

    def gradients(self, grad, grad_lse) -> dict[str, Part]:
        """Returns the parts of dq, dk, dv, and of the gradient of the scores, that of a sink by itself."""
        grad64, scale = grad.double(), self.scale
        d_lse = 0.0 if grad_lse is None else grad_lse.double()[..., None]
        dp = grad64 @ self.v64.mT
        lowered = dp - ((grad64 * self.o).sum(-1, keepdim=True) - d_lse)
        slope = torch.cosh(self.raw / self.softcap).square().reciprocal() if self.softcap else 1.0  # 1 - tanh^2
        d_score = self.p * lowered
        ds = d_score * slope

        dtype = self.q.dtype
        slope32 = 1 - (self.base_capped / self.softcap).square() if self.softcap else 1.0
        d_lse32 = 0.0 if grad_lse is None else grad_lse.float()[..., None]
        dp32 = grad.float() @ self.v.float().mT
        dv_base = self.p16.float().mT @ grad.float()
        # Autograd rounds dP to 16 bits, sums over it in float32, and rounds dS to 16 bits with its scale.
        dp16 = dp32.to(dtype).float()
        by_autograd = self.base_p * (dp16 - ((self.base_p * dp16).sum(-1, keepdim=True) - d_lse32))
        ds_scaled = (by_autograd * slope32 * scale).to(dtype).float()
        # Kernels see a block of keys at a time: delta is made of the output in 16 bits, dS is in 16 bits without scale.
        delta = (grad.float() * self.base_o.float()).sum(-1, keepdim=True) - d_lse32
        by_blocks = self.base_p * (dp32 - delta)
        ds16 = (by_blocks * slope32).to(dtype).float()
        k32, q32 = self.k.float(), self.q.float()
        parts = {
            "dq": Part(scale * (ds @ self.k64), [ds_scaled @ k32, scale * (ds16 @ k32)]),
            "dk": Part(scale * (ds.mT @ self.q64), [ds_scaled.mT @ q32, scale * (ds16.mT @ q32)]),
            "dv": Part(self.p.mT @ grad64, [dv_base, dv_base]),
            "dmask": Part(d_score, [by_autograd, by_blocks.to(dtype).float()]),
            "dsinks": Part(d_score, [by_autograd, by_blocks]),
        }
        if self.movement is not None:
            moved = self.movement.gradients(
                self.p, self.k64, self.q64, self.v64, self.o, grad64, d_score, lowered, slope, self.capped, scale
            )
            parts = {name: part._replace(moved=moved[name]) for name, part in parts.items()}
        for name, lost in self._lost(grad64, lowered, slope).items():
            moved = parts[name].moved
            parts[name] = parts[name]._replace(moved=lost if moved is None else moved + lost)
        for name, (variance, surely) in self._errors(grad64, d_lse, dp, ds, d_score, slope).items():
            parts[name] = parts[name]._replace(variance=variance, surely=surely)
        if self.has_sink:
            parts["dmask"] = parts["dmask"].each(lambda x: x[..., :-1])
            parts["dsinks"] = parts["dsinks"].each(lambda x: x[..., -1])
        left_out = "dmask" * (self.mask is None), "dsinks" * (not self.has_sink)
        return {name: part for name, part in parts.items() if name not in left_out}

    def _lost(self, grad, lowered, slope) -> dict:
        """Returns name -> what a P below float32's normal numbers adds, 0 on hardware; nothing, of ordinary scores."""
        lost = self._tiny
        if lost is None:
            return {}
        of_score = lost * lowered.abs()
        of_product = abs(self.scale) * of_score * slope
        return {
            "dq": of_product @ self.k64.abs(),
            "dk": of_product.mT @ self.q64.abs(),
            "dv": lost.mT @ grad.abs(),
            "dmask": of_score,
            "dsinks": of_score,
        }

    @functools.cached_property
    def _tiny(self) -> torch.Tensor | None:
        """Returns P where it is, or may be by its rounding, below the least normal number; None where it nowhere is."""
        if not self.tiny_p:
            return None
        least = (self.p if self.movement is None else self.movement.p_again[0]) * (1 - _ROUNDING_OF_P)
        tiny = torch.where(least < _LEAST_NORMAL, self.p, 0.0)
        return tiny if tiny is not None and bool(tiny.any()) else None

    def _lse_error(self) -> torch.Tensor:
        """Returns how far a row's LSE may be off by the rounding of its products, each as its P counts, of exponentials
        and their sum, and its own.
        """
        size_q, size_k = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (self.q64, self.k64))
        products = abs(self.scale) * size_q * (self.p @ size_k)
        return 2.0**-22 * (products + self.lse.masked_fill(self.empty, 0.0).abs()) + 2.0**-19

    def _errors(self, grad, d_lse, dp, ds, d_score, slope) -> dict:
        """Returns name -> (variance, what float32 sums may add). P, dP - delta and dS are rounded, and so is the output
        that delta is made of, which changes all dS of a row alike.
        """
        p, k, q, scale = self.p, self.k64, self.q64, self.scale
        size_of_o = self.o.abs().clamp(min=torch.finfo(self.q.dtype).smallest_normal)  # below it O rounds as there
        of_delta = self.unit**2 * (grad * size_of_o).square().sum(-1, keepdim=True)
        of_delta = of_delta + self.unit**2 * (p * dp).square().sum(-1, keepdim=True)
        sums = 2.0**-22 * (grad.abs() @ self.v64.abs().mT + (grad * self.o).abs().sum(-1, keepdim=True)) * p
        of_ds, of_p = _ROUNDINGS * (self.unit * ds).square(), p * slope
        errors = {
            "dq": (
                scale**2 * (of_ds @ k.square() + of_delta * (of_p @ k).square()),
                abs(scale) * ((sums * slope) @ k.abs()),
            ),
            "dk": (
                scale**2 * ((of_ds + of_delta * of_p.square()).mT @ q.square()),
                abs(scale) * ((sums * slope).mT @ q.abs()),
            ),
            "dv": (self.unit**2 * (p.square().mT @ grad.square()), None),
        }
        if self.has_sink:  # -P delta stays in float32, and P errs by as much of itself as the LSE that it is made of
            of_lse = 2.0**-22 * d_lse.abs() * p if isinstance(d_lse, torch.Tensor) else 0.0
            errors["dsinks"] = (of_delta * p.square(), sums + of_lse + self._lse_error() * d_score.abs())
        if self.mask is not None:
            of_mask = _ROUNDINGS * (self.unit * d_score).square()
            # Keys that share an element share the error of delta, and that of dP - delta where dLSE is most of it.
            if self.mask.shape[-1] == 1:
                keys = slice(0, -1) if self.has_sink else slice(None)
                of_delta = of_delta + (self.unit * d_score[..., keys].sum(-1, keepdim=True)).square()
                errors["dmask"] = (of_mask + of_delta * p * p[..., keys].sum(-1, keepdim=True), sums)
            else:
                errors["dmask"] = (of_mask + of_delta * p.square(), sums)
        return errors
