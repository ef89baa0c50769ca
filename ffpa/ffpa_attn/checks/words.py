"""This module has keywords that other attention functions take and ours do not, with what to write instead."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping

# A row has words of theirs, our name for what they mean, if there is one, and what to do: {new} stands for our name.
_ROWS = (
    ("is_causal", "causal", "pass {new}=True, or {new}='top_left' where rows and keys differ in number, as PyTorch means it"),
    ("attn_mask attention_mask", "mask", "pass it as {new}=, bool (True = take part) or additive"),
    ("attn_bias", "mask", "pass it as {new}=, an additive mask"),
    ("alibi_slopes", "mask", "call ffpa_attn.flash_attn_func, which takes them, or pass the bias as {new}="),
    ("dropout dropout_p", None, "there is no dropout: leave it away where it is 0, or call torch.nn.functional.scaled_dot_product_attention"),
    ("enable_gqa", None, "leave it away: heads of q share those of k and v wherever their numbers say so"),
    ("deterministic", None, "leave it away: results and gradients are deterministic"),
    ("softmax_scale sm_scale scaling", "scale", "pass it as {new}="),
    ("window_size", "window", "pass it as {new}=(left, right), -1 = unbounded"),
    ("sliding_window", "window", "pass {new}=(sliding_window - 1, sliding_window - 1): a row's own key is not counted"),
    ("logits_soft_cap logit_softcapping", "softcap", "pass it as {new}="),
    ("return_attn_probs", "return_lse", "no probabilities are kept; {new}=True gives the log of their sums"),
    ("return_softmax_lse", "return_lse", "pass {new}=True"),
    ("tensor_layout", "layout", "pass {new}='BHND' or 'BNHD'"),
    ("backend", None, "leave it away: the fastest kernel is chosen; the flag FFPA_BACKEND forces another"),
    ("block_table", None, "keys in pages go to ffpa_varlen, with block_table= and seqused_k=, or to ffpa_with_kvcache"),
    ("page_table", "block_table", "pass it as {new}="),
    ("k_cache v_cache cache_seqlens cache_batch_idx cache_leftpad", None, "a cache of keys goes to ffpa_with_kvcache; to explain it is k, v and seqused_k"),
    ("qv", None, "put it beside q, torch.cat((qv, q), -1), over keys that have V's columns first, of which v is a view, k[..., :D_v]"),
    ("q_descale k_descale v_descale", None, "8-bit floats go to ffpa_fp8; packed sequences have 16 bits: cast to these; caches of e4m3 have k_scale and v_scale"),
    ("attention_chunk", None, "no rule cuts keys into chunks: pass such a mask to ffpa, or call once for each chunk"),
    ("rotary_cos rotary_sin rotary_interleaved", None, "there is no rotary embedding: apply it to q and k first"),
    ("num_splits", None, "leave it away: how keys are split is chosen"),
    ("s_aux sink sinks learnable_sink attention_sinks", "sinks", "pass it as {new}=, a tensor [Hq] with a logit for each head of q"),
    ("return_max_logit return_max_scores", "return_max_logits", "pass {new}=True"),
    ("seqused_k", None, "lengths of keys in pages go to ffpa_varlen, beside block_table=; packed sequences end where cu_seqlens_k says"),
    ("cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k", None, "packed sequences go to ffpa_varlen"),
    ("mask", None, "call ffpa with it, for one sequence at a time where they are packed"),
    ("layout", None, "leave it away: there is one layout, which the function's own description names"),
)  # fmt: skip
WAYS_OUT = {word: (new, way_out) for words, new, way_out in _ROWS for word in words.split()}
OF_CACHES = {  # what to do with them where keys are in a cache
    "cu_seqlens_k": "cache_seqlens= has the number of keys of each sequence, before new ones: with offsets, cu_seqlens_k.diff()",
    "seqused_k": "pass it as cache_seqlens=, less the new rows",
    "max_seqlen_k": "ffpa_with_kvcache takes it; here the cache says how long sequences may be",
    "alibi_slopes": "there is no bias of keys in a cache: gather them, and call flash_attn_func with the slopes",
    "qv": WAYS_OUT["qv"][1].replace("of which v is a view, k[", "of which v_cache is a view, k_cache["),
    "q_descale": "q has 16 bits beside caches of either kind: cast it to these",
    "attention_chunk": WAYS_OUT["attention_chunk"][1],
}
_ELSEWHERE = {"sinks": "s_aux"}  # what functions with other libraries' names call ours


def refuse(function: Callable, unknown: Mapping) -> None:
    """Raises for the first of the keywords that a function does not know, in Python's own words and with a way out."""
    word = next(iter(unknown))
    known = [name for name, x in inspect.signature(function).parameters.items() if x.kind is not x.VAR_KEYWORD]
    raise TypeError(
        f"{function.__name__}() got an unexpected keyword argument '{word}'; {_way_out(function, word, known)}"
    )


def _way_out(function: Callable, word: str, known: list[str]) -> str:
    if "cache_seqlens" in known and word in OF_CACHES:
        return OF_CACHES[word]
    new, way_out = WAYS_OUT.get(word, (None, ""))
    new = new if new in known or _ELSEWHERE.get(new) not in known else _ELSEWHERE[new]
    if new is None or new in known:
        similar = difflib.get_close_matches(word, known, 1)
        return way_out.format(new=new) or (
            f"did you mean `{similar[0]}`?" if similar else f"allowed: {', '.join(known)}"
        )
    ours, way_out = WAYS_OUT.get(new, (new, ""))
    return f"{function.__name__} has no `{new}`; {way_out if ours is None else 'ffpa and ffpa_varlen have it'}"
