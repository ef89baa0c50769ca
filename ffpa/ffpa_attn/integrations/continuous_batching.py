"""Has transformers' continuous batching, `model.generate_batch`, run on ffpa, as `attn_implementation="ffpa_flash_3"`.

For a name with "flash" in it, transformers loads flash-attn's three functions from a module. For this name it gets
`flash_api`, each time it loads: after another implementation, too.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import warnings
from types import ModuleType

from ..checks import arguments
from ..support.imports import when_imported
from . import flash_api

NAME = "ffpa_flash_3"  # For names without a 3, older releases copy pages together before they decode.
_THEIRS = "flash_attention_3"  # whose callers and masks are those of NAME
_TRIED = "5.4 to 5.24"
_others: set[str] = set()  # names of ours that generate_batch does not take


def register(other: str) -> None:
    """Adds NAME to transformers' implementations. Whoever calls generate_batch with the `other` name is told of it."""
    _others.add(other)
    _register_once()


@functools.cache
def _register_once() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    when_imported(r"transformers\.generation\.continuous_batching\.continuous_api", _check_before_it_begins)
    release = importlib.metadata.version("transformers")
    if not _is_loaded():
        warnings.warn(
            f"ffpa_attn: transformers {release} loads flash-attn's functions in a way that is not known ({_TRIED} were "
            f"tried), so attn_implementation={NAME!r} is missing: run generate_batch with 'sdpa', which is all that this "
            "concerns",
            stacklevel=4,
        )
        return
    functions = AttentionInterface()
    AttentionInterface.register(NAME, functions[_THEIRS])
    if f"paged|{_THEIRS}" in functions:  # until 5.18
        AttentionInterface.register(f"paged|{NAME}", _refusing(functions[f"paged|{_THEIRS}"], release))
    AttentionMaskInterface.register(NAME, make_mask)
    when_imported(r"transformers\.models\..*\.modeling_\w+", _accept_models_with_sinks)


def _is_loaded() -> bool:
    """Puts itself before transformers' loader of kernels, and says whether transformers then finds our functions."""
    from transformers import modeling_flash_attention_utils
    from transformers.integrations import hub_kernels

    try:
        theirs = hub_kernels.load_and_register_attn_kernel

        @functools.wraps(theirs)
        def load(attn_implementation: str, *args, **options) -> ModuleType | None:
            if attn_implementation.removeprefix("paged|") == NAME:
                return flash_api
            return theirs(attn_implementation, *args, **options)

        hub_kernels.load_and_register_attn_kernel = load
        return flash_api.flash_attn_varlen_func in modeling_flash_attention_utils._lazy_imports(NAME)
    except (AttributeError, TypeError, ValueError, ImportError):
        return False


def make_mask(config=None, **asked):
    """Makes the mask for NAME: none, or which tokens are no padding. It takes what flash_attention_mask takes."""
    from transformers.masking_utils import flash_attention_mask

    if not _may_be_flash(type(config)):
        _refuse_without_flash(type(config).__name__.removesuffix("Config"))
    return flash_attention_mask(config=config, **asked)


def _may_be_flash(config_class: type) -> bool:
    from .transformers import _declare, _models

    code, models = _models(config_class)
    return code is None or _declare(models, "_supports_flash_attn")


_may_be_flash._dynamo_marked_constant = True  # The compiler need not look into it.


def _refuse_without_flash(model: str) -> None:
    raise ValueError(
        f"attn_implementation={NAME!r}: {model} does not declare that FlashAttention's functions compute its attention "
        "(`_supports_flash_attn`): choose 'ffpa', or for generate_batch 'sdpa'"
    )


# ---- what is refused before it begins: errors of a request are only logged ----


def _check_before_it_begins(continuous_api: ModuleType) -> None:
    manager = continuous_api.ContinuousBatchingManager
    begin = manager.__init__

    @functools.wraps(begin)
    def __init__(self, model, *args, **options):
        _check(model)
        begin(self, model, *args, **options)

    manager.__init__ = __init__


def _check(model) -> None:
    name = (model.config._attn_implementation or "").removeprefix("paged|")
    if name in _others:
        raise ValueError(
            f"attn_implementation={name!r} does not serve generate_batch, for which transformers asks a name with 'flash' "
            f"in it: write {NAME!r}, or call model.set_attn_implementation({NAME!r}) before"
        )
    if name != NAME:
        return
    if not model._supports_flash_attn:
        _refuse_without_flash(type(model).__name__)
    if model.dtype not in arguments.DTYPES:
        allowed = arguments.names_of(arguments.DTYPES)
        raise ValueError(
            f"attn_implementation={NAME!r}: the model has dtype {model.dtype}; allowed: {allowed}; load it with "
            "dtype=torch.bfloat16"
        )


def _refusing(function, release: str):
    """Has transformers' function refuse what older releases lose: before 5.19 softcaps, and windows that a module does
    not have as an attribute; before 5.16 all windows, whatever attention is chosen.
    """
    no_windows = tuple(map(int, re.findall(r"\d+", release)[:2])) < (5, 16)

    @functools.wraps(function)
    def attention(module, query, key, value, attention_mask, **given):
        window = given.get("sliding_window")
        lost = "softcap" if given.get("softcap") else "sliding_window"
        if lost == "softcap" or (window and (no_windows or getattr(module, "sliding_window", None) != window)):
            raise NotImplementedError(
                f"{type(module).__name__} has `{lost}`, with which generate_batch of transformers {release} makes wrong "
                "tokens: pip install 'transformers>=5.19'"
            )
        return function(module, query, key, value, attention_mask, **given)

    return attention


def _accept_models_with_sinks(module: ModuleType) -> None:
    """Adds NAME to the implementations that models with sinks list: any other is replaced by the first of them."""
    for x in list(vars(module).values()):
        listed = vars(x).get("_compatible_flash_implementations") if isinstance(x, type) else None
        if listed and "flash_attention_4" in listed and NAME not in listed:
            listed.append(NAME)
