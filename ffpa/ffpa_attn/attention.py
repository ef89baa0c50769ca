"""Users call these functions: ffpa, ffpa_varlen, merge, explain. They read arguments; the operators do the rest."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from . import env
from .checks import arguments, memory_checks, page_checks, words
from .launching import native
from .operators import again, again_paged, dispatch_keys, forms, paged
from .operators.options import options_of
from .specs.problem import LevelType, MMAAccType

if TYPE_CHECKING:
    from .backends.choice import Choice

_OF_POOLS = {"k_pages": "k", "v_pages": "v"}  # what the operators' arguments are called here


def ffpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
    num_stages: int | None = None,
    level: LevelType | int | None = None,
    acc: MMAAccType | str = "f32",
    *,
    causal: bool | str = False,
    align: str = "bottom_right",
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: torch.Tensor | None = None,
    layout: str = "BHND",
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_max_logits: bool = False,
    **unknown,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Computes exact attention softmax(scale * q k^T) v; head dims may be any multiple of 8.

    q [B, Hq, Nq, D], k [B, Hkv, Nk, D], v [B, Hkv, Nk, Dv] (or [B, N, H, D] with layout="BNHD"), float16 or bfloat16,
    unit stride on the last dim; Hq is a multiple of Hkv. It returns [B, Hq, Nq, Dv] (in the layout given), and with
    return_lse the natural-log sum of exponentials, float32 [B, Hq, Nq], and with
    return_max_logits, last, the largest score of each head, float32 [B, Hq].

    causal      row r sees keys up to its diagonal: key r + Nk - Nq (align="bottom_right") or key r ("top_left");
                causal="top_left" is short for both.
    window      (left, right) keys around the diagonal, -1 = unbounded.
    softcap     scores become softcap * tanh(score / softcap); 0.0 = off.
    mask        bool (True = take part) or additive, broadcastable to [B, Hq, Nq, Nk]. By name only: place four is `o`.
    scale       default D ** -0.5.
    level       None picks the fastest kernel; 1, 2 or 3 forces the split-D mma kernels at that level.
    acc         "f32", "f16" or "mixed" (QK^T in f32, PV in f16): what tensor cores accumulate in.
    num_stages  1..4 pipeline stages of those kernels; None = automatic. Both say nothing where no such kernel runs.
    out         where to write the result; no gradients then. `o`, the fourth place, is the first release's name for it:
                what fits there is overwritten, what is no place for a result is refused.
    sinks       [Hq], float32 or a 16-bit type: for each head of q a logit, neither scaled nor capped, that takes a share
                of the softmax and gives nothing: out = sum of exp(score) v / (exp(sink) + sum of exp(score)). The LSE
                includes it, and it has a gradient. -inf is no sink.

    The largest score is that of the visible pairs, scaled and capped: sinks and what a mask adds do not count. A head
    that sees nothing gives -inf. It has no gradient.

    Scores may be as large as a float32 holds; in Hopper's kernels, without a float32 or bfloat16 mask, 1.1e38 at most.
    A row that sees no key gives 0, LSE -inf, and gradients 0; beside a sink its LSE is the sink (docs/contract.md). Gradients are
    deterministic. They take P as exp(score - LSE), as FlashAttention does, and beyond |LSE| = 1.1e4, where a float32
    LSE leaves that open, from softmax once more. Rows whose LSE covers more than the keys that are here, as in a ring
    or with a sink, keep to their LSE.
    """
    if unknown:
        words.refuse(ffpa, unknown)
    args = causal, align, scale, window, softcap, num_stages, level, acc, return_lse
    plain = mask is None and o is None and out is None and layout == "BHND" and return_max_logits is False
    kind = again.kind(q, k, v, args, sinks=sinks) if plain else None
    if kind is not None and (results := again.run(kind, q, k, v, *_given(sinks))) is not None:
        return results
    arguments.only_tensors(q=q, k=k, v=v)
    arguments.tensors_or_none(mask=mask, sinks=sinks)
    options = options_of(*args)
    if arguments.layout(layout) != "BHND":
        options = {**options, "layout": layout}
    of_scores = mask, sinks
    if o is None and out is None:
        name = forms.operator_name("forward", return_max_logits)
        out, lse, *largest = dispatch_keys.at_once(name, q, k, v, *of_scores)(q, k, v, *of_scores, **options)
        if kind is not None:
            again.remember(kind, q, k, v, options, sinks=sinks)
    else:
        out = arguments.one_output(o, out)
        if o is not None and mask is None:
            arguments.not_a_mask(o, q, k, v)
        arguments.no_grad_with_out(out, q, k, v, *of_scores)
        name = forms.operator_name("forward_out", return_max_logits)
        results = dispatch_keys.at_once(name, q, k, v, out, *of_scores)(q, k, v, out, *of_scores, **options)
        lse, *largest = results if return_max_logits else [results]
    return forms.results(out, lse, largest, return_lse)


def _given(sinks) -> tuple:
    return () if sinks is None else (sinks,)


def ffpa_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    o: torch.Tensor | None = None,
    num_stages: int | None = None,
    level: LevelType | int | None = None,
    acc: MMAAccType | str = "f32",
    *,
    causal: bool | str = False,
    align: str = "bottom_right",
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_max_logits: bool = False,
    block_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    **unknown,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Runs ffpa on packed sequences: q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv]; gives [Tq, Hq, Dv], LSE [Hq, Tq].

    Sequence i holds rows cu_seqlens[i] to cu_seqlens[i + 1] (int32, B + 1 entries, on the tensors' device). The
    offsets of GPU tensors are never read on the host: a length counts as clamped to [0, max_seqlen], no address leaves
    the tensors, and rows of no sequence give 0 and LSE -inf. FFPA_CHECK=1 checks them and waits for the GPU.
    return_max_logits gives [B, Hq], a row for each sequence.

    With block_table, int32 [B, entries], keys lie in the pages of pools k [pages, rows, Hkv, D] and v [pages, rows, Hkv,
    Dv]: those of sequence i are the first seqused_k[i] (int32 [B]) rows of pages block_table[i, 0], block_table[i, 1], and
    so on; cu_seqlens_k is None. The rows of a page are a multiple of 16. Several sequences may share a page. Entries behind
    the keys that are used, or before those that a window sees, may be anything; a page outside the pool counts as zeros.
    There are no gradients. ffpa_with_kvcache writes new rows as well, and says what 8-bit pools and their k_scale and v_scale
    are.
    """
    if unknown:
        words.refuse(ffpa_varlen, unknown)
    args = causal, align, scale, window, softcap, num_stages, level, acc, return_lse
    if block_table is not None or seqused_k is not None:
        max_seqlens = max_seqlen_q, max_seqlen_k
        k_scale, v_scale = page_checks.scales_of(k_scale, v_scale, k)
        call = again_paged.Call(
            q, k, v, out, sinks, cu_seqlens_q, seqused_k, block_table, k_scale=k_scale, v_scale=v_scale
        )
        plain = o is None and cu_seqlens_k is None and return_max_logits is False
        kind = again_paged.kind(call, (*args, *max_seqlens)) if plain else None
        if kind is not None and (results := again.run(kind, call)) is not None:
            return results
        options = options_of(*args)
        out = arguments.one_output(o, out)
        page_checks.varlen(cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, *max_seqlens)
        where = paged.Where(cu_seqlens_q, seqused_k, block_table, *max_seqlens, k_scale=k_scale, v_scale=v_scale)
        wanted = return_lse, return_max_logits
        results = paged.attend(q, k, v, where, sinks, out, options, *wanted, names=_OF_POOLS)
        if kind is not None:
            again_paged.remember(kind, call, where, options)
        return results
    page_checks.no_scales(k_scale, v_scale)
    cu_seqlens = cu_seqlens_q, cu_seqlens_k
    plain = o is None and out is None and return_max_logits is False
    plain = plain and type(cu_seqlens_q) is type(cu_seqlens_k) is torch.Tensor
    kind = again.kind(q, k, v, args, *cu_seqlens, max_seqlen_q, max_seqlen_k, sinks=sinks) if plain else None
    if kind is not None and (results := again.run(kind, q, k, v, *cu_seqlens, *_given(sinks))) is not None:
        return results
    arguments.only_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    arguments.tensors_or_none(sinks=sinks)
    offsets = (
        cu_seqlens_q,
        cu_seqlens_k,
        arguments.max_seqlen("max_seqlen_q", max_seqlen_q),
        arguments.max_seqlen("max_seqlen_k", max_seqlen_k),
    )
    options = options_of(*args)
    if o is None and out is None:
        name = forms.operator_name("varlen_forward", return_max_logits)
        run = dispatch_keys.at_once(name, q, k, v, *cu_seqlens, sinks)
        out, lse, *largest = run(q, k, v, *offsets, sinks, **options)
        if kind is not None:
            again.remember(kind, q, k, v, options, *offsets, sinks=sinks)
    else:
        out = arguments.one_output(o, out)
        arguments.no_grad_with_out(out, q, k, v, sinks)
        name = forms.operator_name("varlen_forward_out", return_max_logits)
        run = dispatch_keys.at_once(name, q, k, v, out, *cu_seqlens, sinks)
        results = run(q, k, v, out, *offsets, sinks, **options)
        lse, *largest = results if return_max_logits else [results]
    return forms.results(out, lse, largest, return_lse)


def merge(
    o1: torch.Tensor,
    lse1: torch.Tensor,
    o2: torch.Tensor,
    lse2: torch.Tensor,
    *,
    layout: str = "BHND",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (o, lse) over two disjoint sets of keys, from the attention over each. It is differentiable.

    o [B, H, N, D] (or [B, N, H, D] with layout="BNHD") with lse [B, H, N]; or packed o [T, H, D] with lse [H, T]. Give sinks
    to one part alone: they count once.
    """
    arguments.only_tensors(o1=o1, lse1=lse1, o2=o2, lse2=lse2)
    layout = arguments.layout(layout)
    rows_first = o1.dim() == 3 or layout == "BNHD"  # o has rows before heads, lse has not
    arguments.merge_shapes(o1, lse1, o2, lse2, rows_first)
    top = torch.maximum(lse1, lse2)
    top = torch.where(top == -torch.inf, 0.0, top)  # both parts are empty
    weights = [(lse - top).exp() for lse in (lse1, lse2)]
    total = weights[0] + weights[1]
    empty = total == 0
    shares = [torch.where(empty, 0.0, w / torch.where(empty, 1.0, total))[..., None] for w in weights]
    blind = [(lse == -torch.inf)[..., None] for lse in (lse1, lse2)]
    if rows_first:
        shares, blind = ([x.transpose(-3, -2) for x in xs] for xs in (shares, blind))
    # A part without keys must not pass on what its o holds, forward or backward; NaN of keys that weigh nothing is NaN.
    parts = [share * torch.where(b, 0.0, o.float()) for share, b, o in zip(shares, blind, (o1, o2), strict=True)]
    lse = torch.where(empty, -torch.inf, top + torch.where(empty, 1.0, total).log())
    return (parts[0] + parts[1]).to(torch.promote_types(o1.dtype, o2.dtype)), lse


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
    num_stages: int | None = None,
    level: LevelType | int | None = None,
    acc: MMAAccType | str = "f32",
    *,
    causal: bool | str = False,
    align: str = "bottom_right",
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: torch.Tensor | None = None,
    layout: str = "BHND",
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    direction: str = "forward",
    sinks: torch.Tensor | None = None,
    return_max_logits: bool = False,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    **unknown,
) -> Choice:
    """Says which kernel ffpa would run for these arguments, and why; nothing runs, and no GPU is needed.

    arch ("sm_80", "sm_90", …) asks as if tensors were on such a GPU; they may then be on the CPU or meta, and
    fake ones are taken everywhere. An installation without kernels answers as an installed wheel would, and says so.
    direction="backward" asks for gradients. The answer prints as lines; .kernel, .why and .rejected hold the parts.

    Calls of ffpa_varlen and ffpa_with_kvcache are asked about with these keywords; the others are those of ffpa. What
    offsets, lengths, tables and scales hold is not read.

    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
                 say that q, k and v are packed sequences; all four are needed.
    block_table, seqused_k
                 say that k and v are pools of pages, and seqused_k alone, which is cache_seqlens then, that they are a
                 cache without pages. q is packed, with cu_seqlens_q and max_seqlen_q, or [B, N, Hq, D]. max_seqlen_k is
                 what the cache can hold, if it is not given; a cache_batch_idx is block_table=cache_batch_idx[:, None].
                 New rows and left padding change nothing; the kernel that writes rows is not named.
    k_scale, v_scale
                 are those of 8-bit pools and caches.
    """
    from .backends.choice import choose

    if unknown:
        words.refuse(explain, unknown)
    arguments.only_tensors(q=q, k=k, v=v)
    arguments.tensors_or_none(mask=mask, sinks=sinks)
    out = arguments.one_output(o, out)
    if o is not None and mask is None:
        arguments.not_a_mask(o, q, k, v)
    options = options_of(causal, align, scale, window, softcap, num_stages, level, acc, return_lse)
    arch = arguments.arch(arch, q)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, mask, sinks))
    arguments.one_of("direction", direction, ("forward", "backward"))
    of_heads = sinks, arguments.flag("return_max_logits", return_max_logits)
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if block_table is not None or seqused_k is not None:
        lengths = cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, max_seqlen_q, max_seqlen_k
        page_checks.explained(q, k, *lengths, mask, layout, direction)
        scales = page_checks.scales_of(k_scale, v_scale, k, k.new_full)
        page_checks.no_gradients(q=q, k=k, v=v, sinks=sinks, out=out, k_scale=scales[0], v_scale=scales[1])
        maxima = page_checks.maxima(q, k, block_table, max_seqlen_q, max_seqlen_k)
        form = forms.Paged(k, cu_seqlens_q, seqused_k, block_table, None, None, 0, *maxima, *of_heads, options, scales)
    elif any(x is not None for x in offsets):
        arguments.only_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        arguments.no_mask_and_layout("cu_seqlens_q", mask, layout)
        form = forms.Packed(*offsets, *of_heads)
    else:
        form = forms.Dense(arguments.layout(layout), mask, *of_heads)
    if form.pages is None:
        page_checks.no_scales(k_scale, v_scale)
    q, k, v = dispatch_keys.as_autocast_would(q, k, v)
    try:
        form.check(q, k, v)
        memory_checks.rows(**form.named(q, k, v))
    except (TypeError, ValueError) as error:
        raise page_checks.renamed(error, _OF_POOLS) from None
    if out is not None:
        arguments.output("out", out, (*q.shape[:-1], v.shape[-1]), q)
    if direction == "forward":
        options = {**options, "return_lse": return_lse or needs_grad}
    else:
        options = dispatch_keys.rule_of(options)
    problem = forms.describe(form, direction, q, k, v, options, out, device="cuda" if arch else None, arch=arch)
    return choose(problem._replace(supposed=arch is not None and native.record() is None), env.run_flags())


# These are the first release's names.
L1, L2, L3 = LevelType
FP32, FP16, MIXED = MMAAccType
faster_prefill_attn_func = ffpa
ffpa_acc_f32_L1 = partial(ffpa, level=L1, acc=FP32)
ffpa_acc_f16_L1 = partial(ffpa, level=L1, acc=FP16)


def ffpa_mma_acc_f32_L1(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, num_stages: int | None = None
) -> torch.Tensor:
    return ffpa(q, k, v, o, num_stages=num_stages, level=L1, acc=FP32)


def ffpa_mma_acc_f16_L1(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, num_stages: int | None = None
) -> torch.Tensor:
    return ffpa(q, k, v, o, num_stages=num_stages, level=L1, acc=FP16)
