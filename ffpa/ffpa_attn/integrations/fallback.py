"""Says what ffpa leaves to transformers: once a model and feature, or by an error under FFPA_STRICT=1."""

from __future__ import annotations

import warnings
import weakref

import torch

from .. import env

_said: dict[tuple[int, str], weakref.ref] = {}  # the model, by its id and the feature
_said_of_traced: set[tuple[str, str]] = set()  # kinds of layers, and features


def say_once(model, who: str, why: str, way_out: str) -> None:
    """Warns, or raises; `model` is what all layers of one share, its config."""
    message = f"ffpa_attn: {who} has {why}, which ffpa does not support: {way_out}"
    if _strict():
        raise NotImplementedError(f"FFPA_STRICT=1: {message}")
    if torch.compiler.is_compiling():
        return _say_once_while_traced(who, why, message)
    said = _said.get((id(model), why))
    if said is None or said() is not model:
        _said[id(model), why] = weakref.ref(model)
        warnings.warn(f"{message}. transformers' own attention computes it (said once a model)", stacklevel=3)


def _strict() -> bool:
    return env.run_flags()["FFPA_STRICT"]


def _say_once_while_traced(who: str, why: str, message: str) -> None:
    """No graph can say it: the compiler itself runs this, which sees no more of a model than the name of its layers."""
    kind = who.partition(" ")[0], why
    if kind not in _said_of_traced:
        _said_of_traced.add(kind)
        warnings.warn(f"{message}. transformers' own attention computes it (said once a kind of layers)", stacklevel=2)


# Neither function is traced: PyTorch 2.11 cannot follow how flags are read.
_strict._dynamo_marked_constant = _say_once_while_traced._dynamo_marked_constant = True
