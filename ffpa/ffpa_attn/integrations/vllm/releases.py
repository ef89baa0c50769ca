"""This module alone knows that releases of vLLM differ: in their names, and in what they ask a backend."""

from __future__ import annotations

import importlib.metadata
import logging
import re

TRIED = ("0.20.0", "0.21.0", "0.24.0", "0.28.0", "0.30.0", "0.33.0")  # .dev/serving_check.sh runs these


def found() -> str:
    """Returns the version of the vLLM that is installed."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def say_if_untried() -> None:
    """Warns where vLLM asks for a backend, and nobody has tried this release or one that differs in its last number alone."""
    here = found()
    if _minor(here) and _minor(here) not in map(_minor, TRIED):
        tried = ", ".join(TRIED)
        logging.getLogger(__name__).warning("vLLM is %s; FFPA was tried with %s alone", here, tried)


def _age(version: str) -> str:
    """Returns how old a release is beside those that were tried; a number of a commit's own build says nothing."""
    here, first, last = map(_minor, (version, TRIED[0], TRIED[-1]))
    if not here or "dev" in version:
        return "unknown age"
    return "too old" if here < first else "too new" if here > last else "between those that were tried"


def unfit(error: Exception) -> str:
    """Says what this vLLM lacks, without which it cannot have the backends."""
    here, tried = found(), ", ".join(TRIED)
    return f"vLLM {here} ({_age(here)}) lacks what ffpa_attn needs: {error}; install one that was tried: {tried}"


def member(name: str, path: str):
    """Returns what `--attention-backend` calls `name`, which has its class at `path`; makes it if it is not there."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    there = AttentionBackendEnum.__members__.get(name)
    if there is not None:
        return there
    if hasattr(AttentionBackendEnum, "register"):  # newer than 0.30
        made = AttentionBackendEnum.register(name, path)
    else:
        made = _add(AttentionBackendEnum, name, path)
    # A process that is spawned reads the configuration before it loads plugins; so the name goes there with its path.
    made.__reduce_ex__ = lambda protocol: (member, (name, path))
    return made


def _add(enum, name: str, value: str):
    """Adds a name to an enumeration as its class statement would have."""
    made = object.__new__(enum)
    made._name_, made._value_ = name, value
    made.__objclass__, made._sort_order_ = enum, len(enum._member_names_)
    enum._member_names_.append(name)
    enum._member_map_[name] = enum._value2member_map_[value] = made
    type.__setattr__(enum, name, made)
    return made


def writer():
    """Returns vLLM's function that writes keys and values where slots say."""
    from vllm._custom_ops import reshape_and_cache_flash

    return reshape_and_cache_flash


class StandardPool:
    """Says how releases up to 0.28 lay out a pool: as newer ones always do, [pages, heads, rows, D of K and of V]."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Returns the shape of a pool, as one indexes it."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Returns the order of these dims in memory; where layers are one of them, they come first in the shape."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        if get_kv_cache_layout() == "HND":
            return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Says whether pools may be sent elsewhere: those who send them know the layouts of vLLM's own backends."""
        return not hasattr(super(), "get_kv_cache_shape")
