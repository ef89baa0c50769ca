"""This module has functions of flash-attn 2, and of the package ffpa-attn on PyPI, done by `ffpa`, `ffpa_varlen` and
`ffpa_with_kvcache`.

Code written for them runs as it is. What ffpa cannot do raises NotImplementedError, but for calls that the package on
PyPI leaves to PyTorch: these are left there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral

import torch
import torch.nn.functional as F

from ..attention import ffpa, ffpa_varlen
from ..checks import arguments, memory_checks, page_checks, words
from ..kv_cache import ffpa_with_kvcache
from ..specs.problem import HEAD_DIM_STEP
from . import masks, sdpa_override

# ---- flash-attn 2, with the sinks of FlashAttention 3 and 4 ----


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    **unknown,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Serves as flash-attn's function of this name: q [B, Nq, Hq, D], k and v [B, Nk, Hkv, D]; returns [B, Nq, Hq, D].

    causal and window_size meet at the last row and the last key. `alibi_slopes`, float32 [Hq] or [B, Hq], become a bias
    [1 or B, Hq, Nq, Nk] in memory, and get no gradient. With return_attn_probs it returns (out, LSE [B, Hq, Nq], None):
    flash-attn has something in the third place only where there is dropout. The LSE of a row that sees no key is -inf.
    Sinks [Hq], logits that join the denominators alone, are `s_aux` to FlashAttention 3 and `learnable_sink` to 4; the
    LSE has them in it.
    Results and gradients are deterministic whatever `deterministic` says.
    """
    if unknown:
        words.refuse(flash_attn_func, unknown)
    _no_dropout(dropout_p)
    arguments.only_tensors(q=q, k=k, v=v)
    bias = None if alibi_slopes is None else _alibi(q, k, alibi_slopes)
    rule = softmax_scale, causal, window_size, softcap, return_attn_probs
    given = {"mask": bias, "layout": "BNHD", "sinks": _sinks(s_aux, learnable_sink)}
    return _attend(ffpa, _names(s_aux), q, k, v, *rule, **given)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    s_aux: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    **unknown,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Runs flash_attn_func on packed sequences: q [Tq, Hq, D], k, v [Tk, Hkv, D]; gives [Tq, Hq, D], LSE [Hq, Tq].

    With block_table, int32 [B, entries], k and v are pools [pages, rows, Hkv, D]. How many keys each sequence has there
    say seqused_k, int32 [B], or else the differences of cu_seqlens_k. Gradients of such keys do not exist.
    """
    if unknown:
        words.refuse(flash_attn_varlen_func, unknown)
    _no_dropout(dropout_p)
    _not_given("pass one sequence at a time to flash_attn_func", alibi_slopes=alibi_slopes)
    arguments.only_tensors(q=q, k=k, v=v)
    arguments.tensors_or_none(block_table=block_table)
    of_pages, names = {}, _names(s_aux)
    if block_table is not None or seqused_k is not None:
        if block_table is not None and seqused_k is None and cu_seqlens_k is not None:
            arguments.only_tensors(cu_seqlens_k=cu_seqlens_k)
            arguments.has_rank("cu_seqlens_k", cu_seqlens_k, 1, "[B + 1], offsets of the sequences")
            seqused_k, names["seqused_k"] = cu_seqlens_k.diff(), "cu_seqlens_k"
        cu_seqlens_k, of_pages = None, {"block_table": block_table, "seqused_k": seqused_k}
        if block_table is not None:
            arguments.has_rank("block_table", block_table, 2, page_checks.OF_TABLES)
            arguments.has_rank("k", k, 4, "[pages, rows, H, D]")
            if isinstance(max_seqlen_k, torch.Tensor):
                max_seqlen_k = k.shape[1] * block_table.shape[1]
    offsets = cu_seqlens_q, cu_seqlens_k, _longest(max_seqlen_q, q), _longest(max_seqlen_k, k)
    rule = softmax_scale, causal, window_size, softcap, return_attn_probs
    return _attend(ffpa_varlen, names, q, k, v, *rule, *offsets, sinks=_sinks(s_aux, learnable_sink), **of_pages)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    s_aux: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    k_descale: torch.Tensor | float | None = None,
    v_descale: torch.Tensor | float | None = None,
    **unknown,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Serves as flash-attn's function of this name, with the further keywords of FlashAttention 3: q [B, N, Hq, D], or packed
    [T, Hq, D] with cu_seqlens_q; gives what q has rows for, and with return_softmax_lse the LSE, [B, Hq, N] or [Hq, T].

    The caches are [B_cache, rows, Hkv, D], or pools [pages, rows, Hkv, D] with a `block_table`, which FlashAttention 3 calls
    `page_table`. New rows k and v are written at cache_seqlens, in place. Without cache_seqlens all of the cache counts.
    Caches of e4m3 have k_descale and v_descale, while q has 16 bits: numbers, or tensors of one number, of one for each head,
    [Hkv], or [B, Hkv] if that has the same for all sequences, as an expanded one has.
    `num_splits` and what else is about speed alone change nothing. Rotary embeddings are refused: apply them to q and k.
    """
    if unknown or not (rotary_cos is None and rotary_sin is None and alibi_slopes is None):
        _refuse_of_caches(unknown, alibi_slopes, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if block_table is not None and page_table is not None:
        raise ValueError(
            "`block_table` and `page_table` are both given; they are two names of the same thing: pass one"
        )
    arguments.only_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    table, of_table = (block_table, "block_table") if page_table is None else (page_table, "page_table")
    arguments.tensors_or_none(**{of_table: table}, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    if cache_seqlens is None:
        if k is not None:
            raise ValueError(
                "`cache_seqlens` is None but `k` is given; pass the keys that each sequence has before these, int32 [B]"
            )
        arguments.has_rank("k_cache", k_cache, 4, f"[B_cache, rows, H, D], or [pages, rows, H, D] with {of_table}")
        if table is not None:
            arguments.has_rank(of_table, table, 2, page_checks.OF_TABLES)
        cache_seqlens = k_cache.shape[1] * (1 if table is None else table.shape[1])
    arguments.has_rank("q", q, 4 if cu_seqlens_q is None else 3, "[B, N, H, D], or [T, H, D] with cu_seqlens_q")
    q = memory_checks.made_readable(q)
    if cu_seqlens_q is None:
        max_seqlen_q = None
    elif max_seqlen_q is None or isinstance(max_seqlen_q, torch.Tensor):
        max_seqlen_q = q.shape[0]
    rule = softmax_scale, causal, window_size, softcap, return_softmax_lse
    cache = {"cache_seqlens": cache_seqlens, "block_table": table, "cache_batch_idx": cache_batch_idx}
    cache |= {"cache_leftpad": cache_leftpad, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    cache |= {"cu_seqlens_k_new": cu_seqlens_k_new, "sinks": _sinks(s_aux, learnable_sink), "k": k, "v": v}
    cache |= {"k_scale": _of_heads("k_descale", k_descale), "v_scale": _of_heads("v_descale", v_descale)}
    names = _names(s_aux, "return_softmax_lse") | {"block_table": of_table}
    names |= {"k_scale": "k_descale", "v_scale": "v_descale"}
    return _called(ffpa_with_kvcache, names, q, k_cache, v_cache, **_rule(q, *rule), **cache)


def _refuse_of_caches(unknown: dict, alibi_slopes, **of_rotary) -> None:
    """Raises for what flash_attn_with_kvcache does not have, among keywords of FlashAttention 3 and others."""
    for name in _OF_SPEED:
        unknown.pop(name, None)
    others = {name: unknown.pop(name) for name in _OF_FLASH_3 if name in unknown}
    others["attention_chunk"] = others.get("attention_chunk") or None  # 0 means none
    if unknown:
        words.refuse(flash_attn_with_kvcache, unknown)
    of_rotary["rotary_seqlens"] = others.pop("rotary_seqlens", None)
    _not_given("apply the rotary embedding to q and k before the call, and leave it away", **of_rotary)
    for name, value in {"alibi_slopes": alibi_slopes, **others}.items():
        _not_given(words.OF_CACHES[name], **{name: value})


_OF_SPEED = ("scheduler_metadata", "pack_gqa", "sm_margin")  # keywords of FlashAttention 3
# These are keywords that mean something else than ours.
_OF_FLASH_3 = ("qv", "q_descale", "attention_chunk", "rotary_seqlens")


def _of_heads(name: str, scale):
    """Returns a scale as ffpa_with_kvcache takes it, of one that all sequences share."""
    if not isinstance(scale, torch.Tensor) or scale.dim() != 2:
        return scale
    if scale.shape[0] != 1 and scale.stride(0) != 0:
        raise NotImplementedError(
            f"`{name}` has shape {tuple(scale.shape)}, a number for each sequence; caches have one for each head: pass [Hkv], or "
            f"that expanded to [B, Hkv]"
        )
    return scale[0]


def _sinks(s_aux, learnable_sink):
    if s_aux is not None and learnable_sink is not None:
        raise ValueError("`s_aux` and `learnable_sink` are both given; they are two names of the same thing: pass one")
    return learnable_sink if s_aux is None else s_aux


def _names(s_aux, lse: str = "return_attn_probs") -> dict[str, str]:
    """Returns what callers of flash-attn know our arguments as."""
    sinks = "learnable_sink" if s_aux is None else "s_aux"
    return {"scale": "softmax_scale", "window": "window_size", "return_lse": lse, "sinks": sinks}


def _called(function: Callable, names: Mapping[str, str], *args, **options):
    """Calls a function of ours; its errors say what callers named their arguments."""
    try:
        return function(*args, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise page_checks.renamed(error, names) from None


def _alibi(q, k, slopes):
    """Returns -slope * |distance to the diagonal|, [B or 1, Hq, Nq, Nk]."""
    arguments.only_tensors(alibi_slopes=slopes)
    if slopes.dtype != torch.float32:
        raise TypeError(f"`alibi_slopes` has dtype {slopes.dtype}; it must be torch.float32: alibi_slopes.float()")
    if q.dim() != 4 or k.dim() != 4:
        return None  # ffpa itself refuses that
    batch, n_q, heads, _ = q.shape
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"`alibi_slopes` has shape {tuple(slopes.shape)}; it must "
            f"be [Hq] = {(heads,)} or [B, Hq] = {(batch, heads)}, "
            "one slope for each head of `q`"
        )
    n_k = k.shape[1]
    row = torch.arange(n_k - n_q, n_k, device=slopes.device)
    distance = (row[:, None] - torch.arange(n_k, device=slopes.device)).abs()
    return -slopes.detach().view(-1, heads, 1, 1) * distance


# ---- ffpa-attn on PyPI, 0.2.4 ----


class Backend:
    """A kernel and settings for PyPI's ffpa-attn: accepted, and but for tensor_layout="NHD" without effect."""

    name = "ffpa"

    def __init__(self, name=None, forward=None, backward=None, *args, tensor_layout="HND", **settings):
        self.name, self.forward, self.backward = name or self.name, forward, backward
        self.tensor_layout = arguments.one_of("tensor_layout", tensor_layout, ("HND", "NHD"))
        vars(self).update(settings)

    def __eq__(self, other):
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self):
        return hash((type(self), self.name))

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def is_nhd_supported(self, headdim: int) -> bool:
        return True


class CUDABackend(Backend):
    name = "cuda"


class TritonBackend(Backend):
    name = "triton"


class CuTeDSLBackend(Backend):
    name = "cutedsl"


class SDPABackend(Backend):
    name = "sdpa"


def is_nhd_zero_copy_input(t: torch.Tensor) -> bool:
    """Says whether a [B, N, H, D] tensor is read as it lies."""
    return t.dim() == 4 and memory_checks.rows_problem(t) is None


def ffpa_attn_func(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **kwargs,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Serves as that package's function: query [B, Hq, Nq, D], key and value [B, Hkv, Nk, D]; returns [B, Hq, Nq, D].

    The arguments mean what they mean to PyTorch's scaled_dot_product_attention, which takes the calls that ffpa cannot
    (float32, dropout). Only, is_causal lets the last row see the last key, Nk must be at least Nq then, and a mask of
    3 dims is [B, Nq, Nk] where that fits. `backend`, `forward_backend` and `backward_backend` are accepted: ffpa
    chooses its kernel itself.
    """
    forward = _backends(ffpa_attn_func, kwargs)
    arguments.only_tensors(query=query, key=key, value=value)
    rows_first = isinstance(forward, Backend) and forward.tensor_layout == "NHD"
    if rows_first:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    numbers = isinstance(attn_mask, torch.Tensor) and not sdpa_override.is_causal_bias(attn_mask)
    if numbers and attn_mask.dim() == 3 and query.dim() == 4 and attn_mask.shape[0] == query.shape[0]:
        attn_mask = attn_mask.unsqueeze(1)
    if is_causal and _rows(query) > _rows(key):
        raise ValueError(
            f"`key` has {_rows(key)} rows but `query` has {_rows(query)}; with is_causal each row must have a key: "
            "call ffpa with causal='top_left' or 'bottom_right'"
        )
    call, options = (query, key, value, attn_mask, dropout_p, is_causal), {"scale": scale, "enable_gqa": enable_gqa}
    out = sdpa_override.attend(*call, **options, align="bottom_right")
    if out is None:
        out = _by_pytorch(*call, **options)
    return out.transpose(1, 2) if rows_first else out


def _rows(x) -> int:
    return x.shape[-2] if x.dim() > 1 else 0


def _by_pytorch(query, key, value, attn_mask, dropout_p, is_causal, **options):
    n_q, n_k = _rows(query), _rows(key)
    if attn_mask is None:
        to_write = n_q != n_k  # PyTorch's diagonal begins at the first key
    else:  # PyTorch refuses what is no mask
        is_mask = isinstance(attn_mask, torch.Tensor) and attn_mask.dim() > 1 and attn_mask.dtype in _TYPES_OF_MASKS
        to_write = is_mask and not sdpa_override.is_causal_bias(attn_mask)
    if is_causal and to_write:
        visible = masks.sees(n_q, n_k, True, None, query.device)
        attn_mask, is_causal = visible if attn_mask is None else masks.both(attn_mask, visible), False
    return sdpa_override.torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, **options)


_TYPES_OF_MASKS = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def ffpa_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int | None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    enable_gqa: bool = False,
    return_lse: bool = False,
    **kwargs,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Runs ffpa_attn_func on packed sequences: q [Tq, Hq, D], k, v [Tk, Hkv, D]; gives [Tq, Hq, D] (and LSE [Hq, Tq]).

    cu_seqlens_k=None says that keys lie as queries do. Of the further keywords that the package knows, window_size and
    softcap mean what they mean in flash-attn, num_splits nothing; the others must be None.
    """
    _no_dropout(dropout_p)
    window, softcap = kwargs.pop("window_size", None) or (None, None), kwargs.pop("softcap", None) or 0.0
    kwargs.pop("num_splits", None)
    not_here = {name: kwargs.pop(name) for name in _NOT_HERE if name in kwargs}
    _not_given("call ffpa with a mask for each sequence, or ffpa_varlen where keys are in pages", **not_here)
    _not_given("call ffpa_varlen, which takes sinks=", sink=kwargs.pop("sink", None))
    _backends(ffpa_attn_varlen_func, kwargs)
    arguments.only_tensors(q=q, k=k, v=v)
    if not arguments.flag("enable_gqa", enable_gqa) and q.shape[1:2] != k.shape[1:2]:
        raise ValueError(
            f"`enable_gqa` is False but shapes {tuple(q.shape)} and {tuple(k.shape)} have different numbers of heads; "
            "pass enable_gqa=True to have several heads of queries share one of keys"
        )
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    packed = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    rule = softmax_scale, causal, tuple(-1 if side is None else side for side in window), softcap
    names, options = {"return_attn_probs": "return_lse"}, {"return_attn_probs": return_lse}
    out = _called(flash_attn_varlen_func, names, *packed, dropout_p, *rule, **options)
    return out[:2] if return_lse else out


_NOT_HERE = "attention_mask attn_mask block_mask score_mod aux_tensors seqused_k block_table alibi_slopes".split()
_BACKENDS = ("cuda", "triton", "cutedsl", "sdpa")


def _backends(function: Callable, kwargs: dict):
    """Checks what is left of the keywords; returns the backend of the forward."""
    for name, backend in kwargs.items():
        if name not in ("backend", "forward_backend", "backward_backend"):
            words.refuse(function, {name: backend})
        if isinstance(backend, str):
            arguments.one_of(name, backend, _BACKENDS)
        elif backend is not None and not isinstance(backend, Backend):
            raise TypeError(
                f"`{name}` is a {type(backend).__name__}; pass one of {_BACKENDS}, a Backend, or leave it away"
            )
    forward = kwargs.get("forward_backend")
    return kwargs.get("backend") if forward is None else forward


# ---- all of them ----


def _attend(
    function: Callable, names: Mapping[str, str], q, k, v, scale, causal, window, softcap, with_lse, *offsets, **options
):
    """Calls ffpa or ffpa_varlen with arguments that flash-attn takes, and returns what that does."""
    rule = _rule(q, scale, causal, window, softcap, with_lse)
    results = _called(function, names, _padded(q), _padded(k), _padded(v), *offsets, **rule, **options)
    out, lse = results if with_lse else (results, None)
    out = out if out.shape[-1] == v.shape[-1] else out[..., : v.shape[-1]]
    return (out, lse, None) if with_lse else out


def _rule(q, scale, causal, window, softcap, with_lse) -> dict:
    """Returns keywords of ours for what flash-attn takes."""
    if scale is None and q.dim() and q.shape[-1] % HEAD_DIM_STEP:
        scale = q.shape[-1] ** -0.5  # not the scale of the padded columns
    if isinstance(scale, torch.Tensor) and scale.is_cpu and scale.numel() == 1:
        scale = scale.item()
    if arguments.known(causal):
        causal = bool(causal) if isinstance(causal, Integral) else arguments.flag("causal", causal)
    if isinstance(window, (tuple, list)):
        window = tuple(map(_side, window))
    return {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "return_lse": with_lse}


def _side(n):
    """Returns -1 for any negative number, which means unbounded."""
    if not arguments.known(n):
        return torch.sym_max(n, -1)
    return max(int(n), -1) if isinstance(n, Integral) else n


def _longest(n, x):
    """Returns a bound of the lengths. One in a tensor is not worth waiting for a GPU: offsets say what they are."""
    return x.shape[0] if isinstance(n, torch.Tensor) and x.dim() else n


def _padded(x):
    """Takes what flash-attn does: any head dim, filled up with zeros, and columns with any stride, by way of a copy."""
    if x.dim() == 0:
        return x
    if x.stride(-1) != 1:
        x = x.contiguous()
    missing = -x.shape[-1] % HEAD_DIM_STEP
    return F.pad(x, (0, missing)) if missing else x


def _no_dropout(dropout_p) -> None:
    if dropout_p:
        raise NotImplementedError(
            f"`dropout_p` is {dropout_p}; ffpa has no dropout: pass 0.0 (and drop out of the result), or call "
            "torch.nn.functional.scaled_dot_product_attention"
        )


def _not_given(way_out: str, **named) -> None:
    for name, value in named.items():
        if value is not None:
            raise NotImplementedError(f"`{name}` is given, which this function does not take here: {way_out}")
