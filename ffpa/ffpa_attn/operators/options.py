"""This module makes operators' options of what a caller passes, checked."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..checks import arguments
from . import again


def options_of(*args) -> dict:
    """Returns operators' options, not to be changed. Checking takes 4 µs, so those of earlier calls are kept."""
    if not torch.compiler.is_compiling():
        try:
            values = (*args, *args[again.WINDOW])
            if again.PLAIN.issuperset(map(type, values)):
                return _kept(*values)
        except TypeError:  # `window` is no tuple; or what is wrong is said below, once more
            pass
    return _checked(*args)


def _checked(causal, align, scale, window, softcap, num_stages, level, acc, return_lse, *_) -> dict:
    """Returns the checked options less those at their default, as each costs the dispatcher over 1 µs."""
    options = {
        **arguments.visibility(causal, align, window),
        "scale": arguments.scale(scale),
        "softcap": arguments.softcap(softcap),
        "return_lse": arguments.flag("return_lse", return_lse),
        "level": arguments.level(level),
        "acc": arguments.acc(acc),
        "num_stages": arguments.num_stages(num_stages),
    }
    return {name: value for name, value in options.items() if not arguments.known(value) or value != _DEFAULTS[name]}


# Types are part of the key, as 1 equals True and 1.0; so the window's sides are arguments, too.
_kept = lru_cache(4096, typed=True)(_checked)
_DEFAULTS = {
    arg.name: arg.default_value for arg in torch.ops.ffpa_attn.forward.default._schema.arguments if arg.kwarg_only
}
