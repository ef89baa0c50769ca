"""The masks of transformers, without their N² numbers where a rule says the same.

transformers makes one mask for all layers of a kind, before the first of them, and hands it to the attention function. Ours is
None where the layer's own rule says it all, a `RuleMask` where keys are padding or sequences are packed, else what SDPA gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map


class RuleMask(torch.Tensor):
    """A bool mask [B, 1, Nq, Nk] that is written down only if someone computes with it: the attention function reads the rule.

    A row sees the keys that `sees` gives it, of these the ones that `keys` [B, Nk] has True, or those of its own sequence by
    `offsets` [n + 1], which count rows of all entries of the batch one after the other. With both, sequences are what `keys` means:
    tokens, or padding, which nobody looks at.
    """

    @staticmethod
    def __new__(cls, shape, is_causal, window, keys=None, offsets=None):
        device = (offsets if keys is None else keys).device
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)

    def __init__(self, shape, is_causal: bool, window: int | None, keys=None, offsets=None):
        self.is_causal, self.window, self.keys, self.offsets = is_causal, window, keys, offsets

    def dense(self) -> torch.Tensor:
        batch, _, n_q, n_k = self.shape
        visible = sees(n_q, n_k, self.is_causal, self.window, self.device).expand(self.shape)
        if self.keys is not None:
            return visible & self.keys[:, None, None]
        row = torch.arange(batch * n_q, device=self.device)
        sequence = torch.searchsorted(self.offsets[1:], row, right=True).view(batch, 1, n_q)
        return visible & (sequence[..., None] == sequence[..., None, :])

    def __tensor_flatten__(self):
        """So that a compiled layer takes one as it is."""
        return [name for name in ("keys", "offsets") if getattr(self, name) is not None], (self.is_causal, self.window)

    @staticmethod
    def __tensor_unflatten__(inner, rule, shape, stride):
        return RuleMask(shape, *rule, **inner)

    def __repr__(self):
        return (
            f"RuleMask({tuple(self.shape)}, {self.is_causal}, {self.window}, keys={self.keys}, offsets={self.offsets})"
        )

    def sliced(self, dim=0, start=None, end=None, step=1) -> torch.Tensor:
        """The last rows have the same rule, and models ask for them where only their logits are needed."""
        size = self.shape[dim]
        start, end, step = slice(start, end, step).indices(size)
        if (start, end, step) == (0, size, 1):
            return RuleMask(self.shape, self.is_causal, self.window, self.keys, self.offsets)
        if (dim, end, step) == (2, size, 1) and self.keys is not None:
            shape = (*self.shape[:2], size - start, self.shape[3])
            return RuleMask(shape, self.is_causal, self.window, self.keys)
        return torch.ops.aten.slice.Tensor(self.dense(), dim, start, end, step)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """What does not know the rule, a model's own code that combines masks, computes with the numbers."""
        if function in (torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default):
            return cls.sliced(*args, **(kwargs or {}))
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, RuleMask) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


def sees(n_q: int, n_k: int, is_causal: bool, window: int | None, device) -> torch.Tensor:
    """[Nq, Nk]: whether a row sees a key, of which the last is the last row's own; `window` counts the own key, too."""
    behind = torch.arange(n_q, device=device)[:, None] + (n_k - n_q) - torch.arange(n_k, device=device)
    visible = (behind >= 0) if is_causal else torch.ones_like(behind, dtype=torch.bool)
    return visible if window is None else visible & (behind.abs() < window)


def padding_keys(padding: torch.Tensor, n_k: int, first: int = 0) -> torch.Tensor:
    """[B, Nk] bool of a mask of tokens [B, any]: what it does not say is not there yet (a static cache's end)."""
    padding = padding[:, first : first + n_k].bool()
    return F.pad(padding, (0, n_k - padding.shape[1]))


def make_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset=0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config=None,
    **others,
):
    """What transformers calls for `attn_implementation="ffpa"`; its arguments are those of transformers' sdpa_mask."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if mask_function is None:
        mask_function = causal_mask_function
    window = None
    in_numbers = (
        isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    )  # the last key is the last row's
    if (
        in_numbers
        and allow_is_causal_skip
        and (mask_function is causal_mask_function or _is_window(local_size, config))
    ):
        window = local_size
        if attention_mask is None:
            return None
        if not torch.compiler.is_compiling():
            keys = padding_keys(attention_mask, kv_length, kv_offset)
            if keys.all():
                return None
            apart = q_length == kv_length and _in_one_piece(keys)  # rows of padding can then be sequences of their own
            return RuleMask((batch_size, 1, q_length, kv_length), True, window, keys, _offsets(keys) if apart else None)
    if in_numbers and attention_mask is None and q_length == kv_length and not torch.compiler.is_compiling():
        packed = _packed(mask_function, causal_mask_function)
        if packed is not None:
            sequence, window = packed
            return RuleMask((batch_size, 1, q_length, kv_length), True, window, offsets=_offsets(sequence))
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        # None says here that the last key is the last row's own; SDPA's would say that the first is the first's.
        allow_is_causal_skip=False,
        **others,
    )


def _is_window(local_size: int | None, config) -> bool:
    """Whether `local_size` is that of a causal window; chunks have one, too."""
    layers = getattr(config, "layer_types", None) or ()
    return (
        local_size is not None
        and local_size == getattr(config, "sliding_window", None)
        and "chunked_attention" not in layers
    )


def _packed(mask_function, causal_mask_function) -> tuple[torch.Tensor, int | None] | None:
    """(the sequence of each row [B, N], the window) where transformers composed a mask function for packed sequences out of nothing
    else: the function is all that it hands over.
    """
    found: dict = {}
    for part in _conditions(mask_function):
        made = _made_by("packed_sequence_mask_function", part) or _made_by("sliding_window_overlay", part)
        if part is not causal_mask_function and not made:
            return None
        found |= {"causal": True} if not made else made
    if not {"causal", "packed_sequence_mask"} <= found.keys():
        return None
    return found["packed_sequence_mask"], found.get("sliding_window")


def _conditions(function):
    """All of which a key must meet; positions counted anew in each sequence compare as those of the whole do."""
    inner = _made_by("remap_positions_for_packed_sequence", function).get("mask_function")
    parts = [inner] if inner else _made_by("and_masks", function).get("mask_functions", ())
    if not parts:
        yield function
    for part in parts:
        yield from _conditions(part)


def _made_by(factory: str, function) -> dict:
    """What a mask function of transformers.masking_utils closes over, where this factory made it."""
    ours = getattr(function, "__qualname__", "").split(".")[0] == factory
    return inspect.getclosurevars(function).nonlocals if ours else {}


def _in_one_piece(keys: torch.Tensor) -> bool:
    """Whether the tokens of each entry lie side by side, all padding before or behind."""
    begins = keys[:, :1].sum(1) + (keys[:, 1:] & ~keys[:, :-1]).sum(1)
    return bool((begins <= 1).all())


def _offsets(sequence: torch.Tensor) -> torch.Tensor:
    """[n + 1] int32: where numbers change, or an entry begins, and where the last one ends."""
    starts = torch.ones_like(sequence, dtype=torch.bool)
    starts[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    return F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=sequence.numel()).int()
