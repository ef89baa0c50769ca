"""This module makes the masks of transformers, without their N² numbers where a rule says the same.

transformers makes one mask for all layers of a kind, before the first of them, and hands it to the attention function.
Ours is None where every key up to the row's own is seen, a `RuleMask` where there is a window, padding or packed
sequences, else what SDPA gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

_NOT_TO_BE_WRITTEN = "a mask of ffpa_attn's is a rule and holds no numbers to change; change its copy, mask.clone()"


class RuleMask(torch.Tensor):
    """A bool mask [B, 1, Nq, Nk], written down only if someone computes with it: the attention function reads the rule.

    A row sees the keys that `sees` gives it, of these the ones that `keys` [B, Nk] has True, or those of its own
    sequence by `offsets` [2, n + 1], which count rows, and keys, of all entries of the batch one after the other. With
    both, sequences are what `keys` means for rows of tokens, and rows of padding, which nobody reads, see nothing.
    """

    @staticmethod
    def __new__(cls, shape, is_causal: bool, window: int | None, keys=None, offsets=None, nothing=None, device=None):
        device = next((x.device for x in (keys, offsets, nothing) if x is not None), device)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.is_causal, self.window, self.keys, self.offsets = is_causal, window, keys, offsets
        self.tokens = keys  # the compiler's own objects do not have this name
        if keys is None and offsets is None:  # the compiler takes no mask with no tensor in it
            self.nothing = torch.empty(0, device=device) if nothing is None else nothing
        return self

    def dense(self) -> torch.Tensor:
        offsets = None if self.keys is not None or self.offsets is None else self.offsets.unbind()
        return Seen(self.is_causal, self.window, self.keys, offsets).written(self.shape, self.device)

    def with_shape(self, shape, offsets=None) -> RuleMask:
        nothing = getattr(self, "nothing", None)
        return RuleMask(shape, self.is_causal, self.window, self.keys, offsets, nothing, self.device)

    def __tensor_flatten__(self):
        """Names the tensors, so that a compiled layer takes a mask as it is."""
        held = [name for name in ("tokens", "offsets") if getattr(self, name) is not None] or ["nothing"]
        return held, (self.is_causal, self.window)

    @staticmethod
    def __tensor_unflatten__(inner, rule, shape, stride):
        return RuleMask(shape, *rule, inner.get("tokens"), inner.get("offsets"), inner.get("nothing"))

    def __setitem__(self, *_):
        raise TypeError(_NOT_TO_BE_WRITTEN)

    def __deepcopy__(self, memo):
        return self.with_shape(self.shape, self.offsets)

    def __repr__(self):
        return (
            f"RuleMask({tuple(self.shape)}, {self.is_causal}, {self.window}, keys={self.keys}, offsets={self.offsets})"
        )

    def sliced(self, dim=0, start=None, end=None, step=1) -> torch.Tensor:
        """Slices; the last rows have the same rule, and models ask for them where only their logits are needed."""
        size = self.shape[dim]
        start, end, step = slice(start, end, step).indices(size)
        if (start, end, step) == (0, size, 1):
            return self.with_shape(self.shape, self.offsets)
        if (dim, end, step) == (2, size, 1) and (self.keys is not None or self.offsets is None):
            return self.with_shape((*self.shape[:2], size - start, self.shape[3]))
        return torch.ops.aten.slice.Tensor(self.dense(), dim, start, end, step)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Computes with the numbers for what does not know the rule, such as a model's own code that combines masks."""
        if function in (torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default):
            return cls.sliced(*args, **(kwargs or {}))
        given = dict(zip((x.name for x in function._schema.arguments), args, strict=False)) | (kwargs or {})
        written = [x.name for x in function._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
        if any(isinstance(given.get(name), RuleMask) for name in written):
            raise TypeError(_NOT_TO_BE_WRITTEN)
        return function(*_written_down(args), **{name: _written_down(x) for name, x in (kwargs or {}).items()})


def _written_down(argument):
    """Returns an operator's argument with the numbers of each mask in it."""
    if type(argument) in (list, tuple):
        return type(argument)(map(_written_down, argument))
    return argument.dense() if isinstance(argument, RuleMask) else argument


class Seen(NamedTuple):
    """What the rows of a layer see: by a rule (of `keys`, those that it allows; or each its own sequence by `offsets`,
    of queries and of keys), or, where `mask` is given, by that alone.
    """

    is_causal: bool = False
    window: int | None = None
    keys: torch.Tensor | None = None
    offsets: tuple[torch.Tensor, torch.Tensor] | None = None
    mask: torch.Tensor | None = None

    def is_only_causality(self) -> bool:
        return self.window is None and self.keys is None and self.offsets is None and self.mask is None

    def written(self, shape, device) -> torch.Tensor | None:
        """Returns [B, 1, Nq, Nk], or None where every row sees every key."""
        batch, _, n_q, n_k = shape
        if self.mask is not None or (self.is_only_causality() and not self.is_causal):
            return self.mask
        visible = sees(n_q, n_k, self.is_causal, self.window, device).expand(shape)
        if self.keys is not None:
            visible = visible & self.keys[:, None, None]
        if self.offsets:
            if n_q != n_k:
                raise NotImplementedError(
                    "packed sequences with keys of their own, beside a mask or what ffpa does not support: pad them instead"
                )
            at = torch.arange(batch * n_q, device=device)
            row, key = (torch.searchsorted(x[1:].to(device), at, right=True).view(batch, 1, n_q) for x in self.offsets)
            visible = visible & (row[..., None] == key[..., None, :])
        return visible


def seen_by(shape, device, is_causal, window, mask=None, offsets=None, bias=None) -> Seen:
    """Returns what a layer's rule, a mask and packed sequences say together. mask is a RuleMask in the rule's place,
    tokens [B, Nk] beside the rule, or one that says it all: [B, 1 or Hq, Nq, Nk], bool or additive.
    """
    keys = None
    if isinstance(mask, RuleMask):
        is_causal, window, keys = mask.is_causal, mask.window, mask.keys
        if mask.offsets is not None and offsets is None:
            keys, offsets = None, mask.offsets.unbind()
        mask = None
    elif mask is not None and mask.dim() == 2:
        keys, mask = padding_keys(mask, shape[3]), None
    elif mask is not None:
        is_causal, window = False, None
        if mask.dim() < 3:
            raise ValueError(
                f"`attention_mask` has shape {tuple(mask.shape)}; it must be [B, Nk] or [B, 1 or Hq, N, Nk]"
            )
    rule = Seen(is_causal, window, keys, offsets)
    if mask is None and bias is None and not (offsets and keys is not None):
        return rule
    for more in (rule.written(shape, device), bias):  # rule, mask and bias go together as numbers alone
        mask = more if mask is None else mask if more is None else both(mask, more)
    return Seen(mask=mask)


def both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns two masks, bool or additive, as one."""
    if a.dtype == b.dtype == torch.bool:
        return a & b
    if torch.bool not in (a.dtype, b.dtype):
        return a + b
    visible, scores = (a, b) if a.dtype == torch.bool else (b, a)
    return torch.where(visible, scores, -torch.inf)


def sees(n_q: int, n_k: int, is_causal: bool, window: int | None, device) -> torch.Tensor:
    """Says which keys a row sees, [Nq, Nk]. The last is the last row's own; `window` counts the own key, too."""
    behind = torch.arange(n_q, device=device)[:, None] + (n_k - n_q) - torch.arange(n_k, device=device)
    visible = (behind >= 0) if is_causal else torch.ones_like(behind, dtype=torch.bool)
    return visible if window is None else visible & (behind.abs() < window)


def padding_keys(padding: torch.Tensor, n_k: int, first: int = 0) -> torch.Tensor:
    """Turns a mask of tokens [B, any] into bool [B, Nk]: keys past it are not there yet (a static cache's end)."""
    padding = padding[:, first : first + n_k].bool()
    return F.pad(padding, (0, n_k - padding.shape[1]))


def by_rule(
    config, mask_function, batch_size, q_length, kv_length, q_offset=0, kv_offset=0, attention_mask=None, local_size=None,
    allow_is_causal_skip=True, device="cpu", **_,
):  # fmt: skip
    """Returns a RuleMask, None, or NotImplemented where no rule says what is asked for."""
    from transformers.masking_utils import causal_mask_function

    last_key_is_the_last_rows = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    compiling = torch.compiler.is_compiling()  # no graph can make a RuleMask
    if not last_key_is_the_last_rows:
        return NotImplemented
    shape = batch_size, 1, q_length, kv_length
    if allow_is_causal_skip and (mask_function is causal_mask_function or _is_window(local_size, config)):
        if compiling:  # nobody looks at lengths, which may be any
            return None if attention_mask is None and local_size is None else NotImplemented
        window = local_size if local_size is not None and local_size < kv_length else None
        keys = None
        if attention_mask is not None:
            keys = padding_keys(attention_mask, kv_length, kv_offset).expand(batch_size, -1)
        whole, side_by_side = (True, True) if keys is None else _tokens_lie(keys)
        if whole:  # not all models hand their layers' window over
            return None if window is None else RuleMask(shape, True, window, device=device)
        apart = side_by_side and q_length == kv_length  # tokens can then be sequences
        return RuleMask(shape, True, window, keys, _offsets_of_tokens(keys) if apart else None)
    if compiling or attention_mask is not None or q_length != kv_length:
        return NotImplemented
    packed = _packed(mask_function)
    return RuleMask(shape, True, packed[1], offsets=_offsets(packed[0])) if packed else NotImplemented


def _is_window(local_size: int | None, config) -> bool:
    """Says whether `local_size` is that of a causal window; chunks have one, too."""
    layers = getattr(config, "layer_types", None) or ()
    return (
        local_size is not None
        and local_size == getattr(config, "sliding_window", None)
        and "chunked_attention" not in layers
    )


def _packed(mask_function: Callable) -> tuple[torch.Tensor, int | None] | None:
    """Returns (the sequence of each row [B, N], the window) where transformers composed a mask function for packed
    sequences out of nothing else: the function is all that it hands over.
    """
    from transformers.masking_utils import causal_mask_function

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
    """Gives the conditions a key must meet; positions counted anew in a sequence compare as those of the whole do."""
    inner = _made_by("remap_positions_for_packed_sequence", function).get("mask_function")
    parts = [inner] if inner else _made_by("and_masks", function).get("mask_functions", ())
    if not parts:
        yield function
    for part in parts:
        yield from _conditions(part)


def _made_by(factory: str, function) -> dict:
    """Returns what a mask function of transformers.masking_utils closes over, where this factory made it."""
    ours = getattr(function, "__qualname__", "").split(".")[0] == factory
    return inspect.getclosurevars(function).nonlocals if ours else {}


def _tokens_lie(keys: torch.Tensor) -> list[bool]:
    """Says whether tokens lie [everywhere, side by side in each entry], in one go: the host waits for the answer."""
    begins = keys[:, :1].sum(1) + (keys[:, 1:] & ~keys[:, :-1]).sum(1)
    return torch.stack([keys.all(), (begins <= 1).all()]).tolist()


def _offsets_of_tokens(keys: torch.Tensor) -> torch.Tensor:
    """Returns [2, 3 B + 3] int32: for each entry, rows of padding (without keys), keys of padding (without rows), and
    its tokens; at the end the padding behind all of them. Any may be empty.
    """
    batch, n = keys.shape
    begins = keys.int().argmax(1) + n * torch.arange(batch, device=keys.device)
    ends = begins + keys.sum(1)
    last = F.pad(ends[:-1], (1, 0))  # the ends of tokens in the entry before
    rows, columns = (torch.stack(x, dim=1).flatten() for x in ((begins, begins, ends), (last, begins, ends)))
    none, all_ = ends.new_zeros(1), ends.new_full((1,), batch * n)
    return torch.stack([torch.cat([none, rows, all_, all_]), torch.cat([none, columns, ends[-1:], all_])]).int()


def _offsets(sequence: torch.Tensor) -> torch.Tensor:
    """Returns [2, n + 1] int32: where numbers change, or an entry begins, and where the last one ends."""
    starts = torch.ones_like(sequence, dtype=torch.bool)
    starts[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    return F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=sequence.numel()).int().repeat(2, 1)
