"""Makes ffpa an implementation of PyTorch's flash attention, which varlen_attn and scaled_dot_product_attention then run on.

`register()` names it, torch.nn.attention.activate_flash_attention_impl("FFPA") turns it on for all threads, and
restore_flash_attention_impl() off. It replaces kernels of operators: those that varlen_attn calls, at any head dim, and with
`sdpa` the dense function itself (`sdpa_dispatch.py`). What ffpa lacks runs on the kernel that was there before where that
takes the head dim, else it raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.attention

from ..attention import ffpa_varlen
from ..checks import arguments, page_checks
from ..operators import dispatch_keys
from ..operators.options import options_of
from ..support import private_torch
from . import sdpa_dispatch

_NEEDED = ("register_flash_attention_impl", "activate_flash_attention_impl", "restore_flash_attention_impl")
_WIDEST = 256  # columns that PyTorch's own kernels take


def register(name: str = "FFPA", *, device: str = "CUDA", sdpa: bool = True) -> None:
    """Has torch.nn.attention.activate_flash_attention_impl(name) turn ffpa on, and restore_flash_attention_impl() off. It
    changes nothing itself, and may be called again. It needs PyTorch 2.11; varlen_attn has its keywords for grouped heads,
    pages and seqused_k from 2.12 on.

    name    what PyTorch is to call it.
    device  whose kernels are replaced: "CUDA", or "CPU", where PyTorch has none and ffpa runs in plain PyTorch.
    sdpa    whether scaled_dot_product_attention is replaced, too: calls that mean the same to ffpa run on it, and
            PyTorch does the others, as with enable_sdpa.
    """
    arguments.one_of("device", device, ("CUDA", "CPU"))
    arguments.flag("sdpa", sdpa)
    otherwise = "call ffpa_varlen in the place of varlen_attn, and enable_sdpa() for scaled_dot_product_attention"
    missing = [needed for needed in _NEEDED if not hasattr(torch.nn.attention, needed)]
    if missing:
        raise NotImplementedError(
            f"register() needs PyTorch 2.11 or newer: torch.nn.attention of {torch.__version__} has no {missing[0]}; {otherwise}"
        )
    missing = [needed for needed in _KERNELS if needed != _SINCE_2_12 and not hasattr(torch.ops.aten, needed)]
    if missing:
        raise NotImplementedError(
            f"PyTorch {torch.__version__} has no operator {missing[0]}, which register() replaces; it was tried with "
            f"{private_torch.tried()}: {otherwise}"
        )
    torch.nn.attention.register_flash_attention_impl(name, register_fn=partial(_Active, device, sdpa))


class _Active:
    """PyTorch keeps this while ffpa is on."""

    def __init__(self, device: str, sdpa: bool):
        self.library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # of what is replaced
            for name, kernel in _KERNELS.items():
                if hasattr(torch.ops.aten, name):
                    self.library.impl(name, partial(kernel, _own_kernel(name, device)), device, allow_override=True)
        self.end_sdpa = sdpa_dispatch.override(device) if sdpa else lambda: None

    def remove(self) -> None:
        """Gives the operators back to the kernels that they had."""
        self.library = None
        self.end_sdpa()


def _own_kernel(name: str, device: str) -> Callable | None:
    """Returns the kernel that an operator has now, or None."""
    try:
        kernel = torch.library.get_kernel(f"aten::{name}", device)
    except RuntimeError:
        return None
    return partial(kernel.call_boxed, torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device)))


# ---- the operators; `own` is what they ran on before ----


class _Call(NamedTuple):
    """All calls of a forward have these, in order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cum_seq_q: torch.Tensor | None
    cum_seq_k: torch.Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    return_debug_mask: bool


def _forward(own: Callable | None, *args, **options) -> tuple[torch.Tensor, ...]:
    query, value = args[0], args[2]
    if reason := _lacking(*args, **options):
        return _by(own, query, reason)(*args, **options)
    as_compiled_code_expects = not query.is_contiguous() and query.shape[-1] == value.shape[-1]
    out, lse = _attend(torch.empty_like(query) if as_compiled_code_expects else None, *args, **options)
    of_dropout = (query.new_empty(shape, dtype=torch.uint64) for shape in (2, ()))
    return out, lse, *of_dropout, query.new_empty(0)


def _forward_into(own: Callable | None, out: torch.Tensor, *args, **options) -> torch.Tensor:
    if reason := _lacking(*args, **options):
        return _by(own, args[0], reason)(out, *args, **options)
    return _attend(out, *args, **options)[1]


def _attend(
    out, *args, scale=None, window_size_left=None, window_size_right=None, seqused_k=None, block_table=None, num_splits=None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    call = _Call(*args)
    cu_seqlens = call.cum_seq_q, None if block_table is not None else call.cum_seq_k
    if seqused_k is not None and block_table is None:
        cu_seqlens, seqused_k = _cut(*cu_seqlens, seqused_k), None
    rule = {"causal": call.is_causal, "scale": scale, "window": _window(window_size_left, window_size_right)}
    rule |= {"block_table": block_table, "seqused_k": seqused_k, "return_lse": True, "out": out}
    try:
        return ffpa_varlen(*call[:3], *cu_seqlens, call.max_q, call.max_k, **rule)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise page_checks.renamed(error, _NAMES) from None


def _backward(
    own: Callable | None, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, *of_dropout, **options,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    offsets = cum_seq_q, cum_seq_k, max_q, max_k
    saved = query, key, value, out, logsumexp
    if reason := _lacking(query, key, value, *offsets, dropout_p, is_causal, False):
        return _by(own, query, reason)(grad_out, *saved, *offsets, dropout_p, is_causal, *of_dropout, **options)
    window = _window(options.get("window_size_left"), options.get("window_size_right"))
    rule = options_of(is_causal, "bottom_right", options.get("scale"), window, 0.0, None, None, "f32", True)
    grads = dispatch_keys.gradients_of(grad_out, None, (*saved, *offsets[:2]), offsets[2:], **rule)
    return tuple(map(_laid_out_as, grads, (query, key, value)))


_SINCE_2_12 = "_flash_attention_forward_no_dropout_inplace"
_KERNELS: Mapping[str, Callable] = {
    "_flash_attention_forward": _forward,
    _SINCE_2_12: _forward_into,
    "_flash_attention_backward": _backward,
}
# These are what varlen_attn calls our arguments.
_NAMES = {
    "q": "query", "k": "key", "v": "value", "cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k", "max_seqlen_q": "max_q",
    "max_seqlen_k": "max_k", "window": "window_size",
}  # fmt: skip
_KNOWN = frozenset(("scale", "window_size_left", "window_size_right", "seqused_k", "block_table", "num_splits"))


def _lacking(*args, **options) -> str | None:
    """Returns what of a call ffpa does not have, or does not have here; options at their default are not given."""
    call = _Call(*args)
    if call.cum_seq_q is None:
        return "`cum_seq_q` is None, and ffpa takes dense calls at scaled_dot_product_attention: call that"
    if call.dropout_p:
        return f"`dropout_p` is {call.dropout_p}, and ffpa has no dropout: pass 0.0"
    if call.return_debug_mask:
        return "`return_debug_mask` is True, and ffpa returns no probabilities: pass False"
    if options.get("num_splits") == 1:
        return (
            "`num_splits` is 1, which promises the same bits for a sequence in every batch, and those of ffpa depend on the "
            "number of sequences and on max_q and max_k: leave it away"
        )
    unknown = sorted(options.keys() - _KNOWN)
    return f"`{unknown[0]}` is given, which ffpa does not have for packed sequences: leave it away" if unknown else None


def _by(own: Callable | None, query: torch.Tensor, reason: str) -> Callable:
    if own is None or query.shape[-1] > _WIDEST:
        raise NotImplementedError(reason)
    return own


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


def _cut(cum_seq_q, cum_seq_k, used) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns offsets that have each sequence as two: its rows and the keys that are used, no rows and the other keys."""
    arguments.only_tensors(cu_seq_k=cum_seq_k)
    arguments.has_dtype("seqused_k", used, torch.int32, ": seqused_k.to(torch.int32)")
    begins = cum_seq_k[:-1]
    keys = torch.cat([torch.stack([begins, begins + used], dim=1).flatten(), cum_seq_k[-1:]])
    return torch.cat([cum_seq_q[:1], cum_seq_q[1:].repeat_interleave(2)]), keys


def _laid_out_as(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns a gradient with the strides that compiled code expects: those of torch.empty_like(x)."""
    if x.is_contiguous() or torch.empty_like(x, device="meta").stride() == grad.stride():
        return grad
    return torch.empty_like(x).copy_(grad)
