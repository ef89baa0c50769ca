"""This module has keywords that other attention functions take and ours do not, with what to write instead."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping

_ALWAYS = "leave it away: "
_NO_DROPOUT = (
    "there is no dropout: leave it away where it is 0, or call torch.nn.functional.scaled_dot_product_attention"
)
_NO_PAGES = "there are no pages of keys: gather those of each sequence into one tensor first"
_NO_SINKS = "there are no sinks: with return_lse=True, multiply the result by sigmoid(lse - sink)"
_PACKED = "packed sequences go to ffpa_varlen"

# These say what to do about each word; {new} is our name for it, where the function that was called has it.
WAYS_OUT: Mapping[str, tuple[str | None, str]] = {
    "is_causal": ("causal", "pass {new}=True, or {new}='top_left' where rows and keys differ in number, as PyTorch means it"),
    "attn_mask": ("mask", "pass it as {new}=, bool (True = take part) or additive"),
    "attention_mask": ("mask", "pass it as {new}=, bool (True = take part) or additive"),
    "attn_bias": ("mask", "pass it as {new}=, an additive mask"),
    "alibi_slopes": ("mask", "call ffpa_attn.flash_attn_func, which takes them, or pass the bias as {new}="),
    "dropout": (None, _NO_DROPOUT),
    "dropout_p": (None, _NO_DROPOUT),
    "enable_gqa": (None, _ALWAYS + "heads of q share those of k and v wherever their numbers say so"),
    "deterministic": (None, _ALWAYS + "results and gradients are deterministic"),
    "softmax_scale": ("scale", "pass it as {new}="),
    "sm_scale": ("scale", "pass it as {new}="),
    "scaling": ("scale", "pass it as {new}="),
    "window_size": ("window", "pass it as {new}=(left, right), -1 = unbounded"),
    "sliding_window": ("window", "pass {new}=(sliding_window - 1, sliding_window - 1): a row's own key is not counted"),
    "logits_soft_cap": ("softcap", "pass it as {new}="),
    "logit_softcapping": ("softcap", "pass it as {new}="),
    "return_attn_probs": ("return_lse", "no probabilities are kept; {new}=True gives the log of their sums"),
    "return_softmax_lse": ("return_lse", "pass {new}=True"),
    "tensor_layout": ("layout", "pass {new}='BHND' or 'BNHD'"),
    "backend": (None, _ALWAYS + "the fastest kernel is chosen; the flag FFPA_BACKEND forces another"),
    "block_table": (None, _NO_PAGES),
    "page_table": (None, _NO_PAGES),
    "s_aux": (None, _NO_SINKS),
    "sinks": (None, _NO_SINKS),
    "seqused_k": (None, "packed sequences end where cu_seqlens_k says: make it of the keys that are used"),
    "cu_seqlens_q": (None, _PACKED),
    "cu_seqlens_k": (None, _PACKED),
    "max_seqlen_q": (None, _PACKED),
    "max_seqlen_k": (None, _PACKED),
    "mask": (None, "call ffpa with it, for one sequence at a time where they are packed"),
    "layout": (None, _ALWAYS + "there is one layout, which the function's own description names"),
}  # fmt: skip


def refuse(function: Callable, unknown: Mapping) -> None:
    """Raises for the first of the keywords that a function does not know, in Python's own words and with a way out."""
    word = next(iter(unknown))
    known = [name for name, x in inspect.signature(function).parameters.items() if x.kind is not x.VAR_KEYWORD]
    raise TypeError(
        f"{function.__name__}() got an unexpected keyword argument '{word}'; {_way_out(function, word, known)}"
    )


def _way_out(function: Callable, word: str, known: list[str]) -> str:
    new, way_out = WAYS_OUT.get(word, (None, ""))
    if new is None or new in known:
        similar = difflib.get_close_matches(word, known, 1)
        return way_out.format(new=new) or (
            f"did you mean `{similar[0]}`?" if similar else f"allowed: {', '.join(known)}"
        )
    return (
        f"{function.__name__} has no `{new}`; {WAYS_OUT[new][1] if new in WAYS_OUT else 'only ffpa and ffpa_varlen do'}"
    )
