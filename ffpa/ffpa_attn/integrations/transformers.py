"""Makes `attn_implementation="ffpa"` known to transformers, by `register()`; `continuous_batching` has another name.

The attention function reads a layer's tensors as they are: heads of K and V are not repeated, nothing is copied. What
it cannot do goes to transformers' own functions, with one warning; under FFPA_STRICT=1 it raises.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import warnings
import weakref
from functools import cache
from types import ModuleType

import torch

from .. import env
from ..attention import ffpa, ffpa_varlen
from ..checks import arguments, memory_checks
from ..support.imports import when_imported
from . import continuous_batching
from .masks import Seen, by_rule, seen_by
from .sdpa_override import sdpa

OLDEST = (5, 4)  # the release of transformers from which on masks are made of lengths and offsets


def register(name: str = "ffpa") -> None:
    """Makes `AutoModelForCausalLM.from_pretrained(…, attn_implementation=name)` run on ffpa from now on.

    For continuous batching, `model.generate_batch`, the name is "ffpa_flash_3", whatever `name` is.
    """
    if name in ("eager", "flex_attention") or any(part in name.lower() for part in ("flash", "sdpa", "|", "/")):
        raise ValueError(
            f"`name` is {name!r}: transformers takes this, and names with `flash`, `sdpa`, `|` or `/`, for its own; use 'ffpa'"
        )
    _check_version()
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, make_mask)  # without one, padding would be dropped
    _serve_models_that_look_up_a_class(name)
    continuous_batching.register(name)


def _check_version() -> None:
    needed = ".".join(map(str, OLDEST))
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is None or tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST:
        way_out = f"pip install 'transformers>={needed}'"
        raise ImportError(f"transformers is {found or 'not installed'}; ffpa_attn needs {needed} or newer: {way_out}")


def attention(
    module,
    query,
    key,
    value,
    attention_mask=None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux=None,
    sinks=None,
    position_bias=None,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    max_length_q=None,
    max_length_k=None,
    **others,
):
    """Is transformers' attention function: query [B, Hq, N, D], key and value [B, Hkv, Nk, D]; ([B, N, Hq, Dv], None).

    attention_mask is None (the layer's rule: causal or not, and its window), tokens [B, Nk] beside that rule, or a mask
    that says it all: [B, 1 or Hq, N, Nk], bool or additive, or a RuleMask. Packed sequences follow the layer's rule.
    s_aux or sinks, [Hq], are logits that join the denominators alone, and get gradients.
    """
    _check_that_all_keys_count(module, others)
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    query, key, value = _of_one_type_and_batch(query, key, value)
    of_keys = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    offsets = None if cu_seq_lens_q is None else (cu_seq_lens_q, of_keys)
    shape = query.shape[0], 1, query.shape[2], key.shape[2]

    given = s_aux if sinks is None else sinks
    why, way_out = _unsupported(module, query, value, dropout, given, others)
    if why:
        index = getattr(module, "layer_idx", None)
        who = type(module).__name__ + ("" if index is None else f" of layer {index}")
        say_once(getattr(module, "config", module), who, why, way_out)
        seen = seen_by(shape, query.device, is_causal, sliding_window, attention_mask, offsets)
        rule = {"dropout": dropout, "scaling": scaling, "softcap": softcap}
        rule |= {"s_aux": s_aux, "sinks": sinks, "position_bias": position_bias}
        return _by_transformers(module, query, key, value, seen, rule, others)

    seen = seen_by(shape, query.device, is_causal, sliding_window, attention_mask, offsets, position_bias)
    scale = None if scaling is None else float(scaling)
    side = -1 if seen.window is None else seen.window - 1  # transformers counts the row's own key, too
    rule = {"scale": scale, "softcap": softcap or 0.0, "causal": seen.is_causal, "window": (side, side), "sinks": given}
    q, k, v = (memory_checks.made_readable(x).transpose(1, 2) for x in (query, key, value))
    if seen.offsets:
        return _packed_attention(q, k, v, seen.offsets, (max_length_q, max_length_k), rule), None
    mask = seen.mask if seen.keys is None else seen.keys[:, None, None]
    return ffpa(q, k, v, mask=mask, layout="BNHD", **rule), None


def _packed_attention(q, k, v, offsets, longest, rule):
    """Attends in [B, N, H, D] whose rows, those of one entry after those of another, are sequences."""
    rows = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    offsets = [x.to(device=q.device, dtype=torch.int32) for x in offsets]
    # A length that is on the GPU is not worth waiting for: it only bounds what the offsets say.
    longest = [n if isinstance(n, int) else x.shape[0] for n, x in zip(longest, rows, strict=False)]
    out = ffpa_varlen(*rows, *offsets, *longest, **rule)
    return out.view(*q.shape[:-1], v.shape[-1])


def _of_one_type_and_batch(*tensors):
    """Norms kept in float32 leave their type to queries and keys; the layer computes in the type of the others. Learned
    queries, which come once for all entries of a batch, are expanded.
    """
    half = [x.dtype for x in tensors if x.dtype in arguments.DTYPES]
    tensors = [x.to(half[0]) for x in tensors] if half else tensors
    batch = max(x.shape[0] for x in tensors)
    return [x if x.shape[0] == batch else x.expand(batch, -1, -1, -1) for x in tensors]


# ---- the masks of a model, which are made before its first layer ----


def make_mask(config=None, **asked):
    """Makes the mask for `attn_implementation="ffpa"`; its arguments are those of transformers' sdpa_mask."""
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    if asked.get("mask_function") is None:
        asked["mask_function"] = causal_mask_function
    own = not _calls_attention_functions(type(config))
    if own:
        way_out = "choose another attn_implementation for this model"
        say_once(config, type(config).__name__.removesuffix("Config"), "attention of its own", way_out)
    if own or not _takes_rules(type(config)):  # such layers count on numbers, and None may mean another rule to them
        return eager_mask(config=config, **{**asked, "allow_is_bidirectional_skip": False})
    mask = by_rule(config, **asked)
    # None says here that the last key is the last row's own; SDPA's would say that the first key is the first row's.
    return sdpa_mask(**{**asked, "allow_is_causal_skip": False}) if mask is NotImplemented else mask


def _calls_attention_functions(config_class: type) -> bool:
    """Says whether a model's layers call what is registered. transformers asks this for SDPA, but not for others."""
    code, models = _models(config_class)
    return code is None or hasattr(code, "ALL_ATTENTION_FUNCTIONS") or _declare(models, "_supports_attention_backend")


def _takes_rules(config_class: type) -> bool:
    """Says whether a model's layers can do without numbers, as for SDPA or FlashAttention: `is_causal` is the rule."""
    code, models = _models(config_class)
    if code is None:
        return True
    models = [x for x in models if getattr(x, "config_class", None) is config_class] or models
    return _declare(models, "_supports_sdpa") or _declare(models, "_supports_attention_backend", "_supports_flash_attn")


def _models(config_class: type):
    """Returns the module of the models that have this configuration, None where it is not known, and its classes."""
    name = config_class.__module__
    code = sys.modules.get(name.replace("configuration_", "modeling_")) if "configuration_" in name else None
    return code, [x for x in vars(code).values() if isinstance(x, type)] if code else []


def _declare(classes, *names: str) -> bool:
    return any(all(getattr(x, name, False) for name in names) for x in classes)


# The compiler need not look into these two.
_calls_attention_functions._dynamo_marked_constant = _takes_rules._dynamo_marked_constant = True


# ---- models that look up the class of their attention by its implementation's name: SAM's, Falcon's, and others ----


@cache
def _serve_models_that_look_up_a_class(name: str) -> None:
    """Adds the name to each table of attention classes. Without it, a model raises KeyError when it is made."""

    def add_to_tables(module: ModuleType) -> None:
        for variable, table in list(vars(module).items()):
            if variable.endswith("ATTENTION_CLASSES") and isinstance(table, dict) and "eager" in table:
                table.setdefault(name, _class_for(table, module))

    when_imported(r"transformers\.models\..*\.modeling_\w+", add_to_tables)


def _class_for(table: dict, module: ModuleType) -> type:
    """Returns the table's class that calls PyTorch's function, with ffpa in the place of that; or, where no class calls
    what ffpa could do, the eager one, unchanged but for a warning.
    """
    base = table.get("sdpa", table["eager"])

    def __init__(self, config, *args, **options):
        way_out = "choose another attn_implementation for this model"
        say_once(config, type(config).__name__.removesuffix("Config"), "attention of its own", way_out)
        base.__init__(self, config, *args, **options)

    if "sdpa" in table:
        name, methods = f"Ffpa{base.__name__}", {"forward": sdpa()(base.forward)}
    else:
        name, methods = f"Unchanged{base.__name__}", {"__init__": __init__}
    new = type(name, (base,), {**methods, "__module__": module.__name__, "__doc__": base.__doc__})
    return vars(module).setdefault(name, new)  # whoever unpickles a model looks for it there


# ---- what is left to transformers ----


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


def _check_that_all_keys_count(module, others) -> None:
    """A layer that chooses its keys writes that into the mask for transformers' own functions alone."""
    for name in ("indices", "block_indices"):
        if others.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} chooses the keys of each row (`{name}`), which ffpa does not support: "
                "load the model with attn_implementation='sdpa'"
            )


def _unsupported(module, query, value, dropout, sinks, others) -> tuple[str | None, str]:
    """Says why ffpa cannot compute this, and what would change that."""
    if dropout > 0:
        number = "" if torch.compiler.is_compiling() else f" of {dropout}"  # it may be a symbol there
        return f"dropout{number} in attention", _without_dropout(module)
    if sinks is not None and sinks.dim() > 1:
        return "attention sinks of each row", "choose another attn_implementation for this model"
    if others.get("cache") is not None:
        return "a paged cache (continuous batching)", f"choose attn_implementation={continuous_batching.NAME!r}"
    if others.get("output_attentions"):
        return "attention weights as a result (output_attentions)", "set output_attentions=False"
    if query.device.type not in ("cuda", "cpu"):
        return f"tensors on {query.device.type}", "move the model to a CUDA GPU"
    casts = query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type)
    if query.dtype not in arguments.DTYPES and not casts:
        or_cast = ", or run it under autocast" if query.dtype == torch.float32 else ""  # autocast casts nothing else
        return f"tensors of {query.dtype}", f"load the model with dtype=torch.bfloat16{or_cast}"
    if query.shape[-1] % 8 or value.shape[-1] % 8:
        return f"head dims {query.shape[-1]} and {value.shape[-1]}", "use head dims that are multiples of 8"
    return None, ""


def _without_dropout(module) -> str:
    """Models spell the setting in many ways: attention_dropout, attn_pdrop, attention_probs_dropout_prob."""
    settings = () if torch.compiler.is_compiling() else getattr(getattr(module, "config", None), "__dict__", ())
    of_attention = [f"{name}=0.0" for name in settings if "att" in name and "drop" in name]
    setting = " and ".join(of_attention) or "the dropout of attention to 0"
    return f"set {setting} in the model's config, or call model.eval()"


def _by_transformers(module, query, key, value, seen: Seen, rule, others):
    """Computes by the model's own eager function where SDPA does not mean the same, else by SDPA."""
    rule = {name: what for name, what in rule.items() if what is not None}
    eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    n_q, n_k, is_causal = query.shape[2], key.shape[2], False
    on_the_diagonal = not seen.is_causal or n_q in (1, n_k)  # SDPA's diagonal begins at the first key
    mask_needed = not (seen.is_only_causality() and on_the_diagonal) or "position_bias" in rule
    if not others.get("output_attentions") and rule.keys() <= {"dropout", "scaling", "position_bias"}:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward as function

        is_causal = seen.is_causal and n_q > 1 and not mask_needed
    elif eager is not None:
        function, mask_needed = eager, True
        rule.setdefault("scaling", query.shape[-1] ** -0.5)
    else:
        raise NotImplementedError(
            f"{type(module).__name__}: {', '.join(rule)} together are beyond ffpa and SDPA, and there is no eager function"
        )
    mask = seen.written((query.shape[0], 1, n_q, n_k), query.device) if mask_needed else None
    if mask is not None and mask.dtype == torch.bool and function is eager:
        mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    return function(module, query, key, value, mask, is_causal=is_causal, **rule, **others)
