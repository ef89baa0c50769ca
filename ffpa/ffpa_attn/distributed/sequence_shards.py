"""This module has the chunks of a sequence that each rank of a group holds, and checks what each rank passes in."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..checks import arguments, memory_checks, words
from ..operators.dispatch_keys import as_autocast_would
from . import agreement


def held(layout: str, world: int) -> list[list[int]]:
    """Returns the chunks of each rank. Zigzag pairs an early with a late one: causal work is the same for all."""
    if layout == "zigzag":
        return [[rank, 2 * world - 1 - rank] for rank in range(world)]
    return [[rank] for rank in range(world)]


def apart(x: torch.Tensor, dim: int, layout: str, world: int) -> list[torch.Tensor]:
    """Returns what each rank holds of the whole sequence."""
    chunks_of = held(layout, world)
    chunks = x.tensor_split(sum(map(len, chunks_of)), dim)
    return [_joined([chunks[i] for i in mine], dim) for mine in chunks_of]


def together(parts: Sequence[torch.Tensor], dim: int, layout: str) -> torch.Tensor:
    """Returns the whole sequence from what each rank holds."""
    chunks = {}
    for part, mine in zip(parts, held(layout, len(parts)), strict=True):
        chunks.update(zip(mine, part.tensor_split(len(mine), dim), strict=True))
    return _joined([chunks[i] for i in range(len(chunks))], dim)


def _joined(chunks: list[torch.Tensor], dim: int) -> torch.Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)


def shard_sequence(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    dim: int = 2,
    layout: str = "zigzag",
) -> torch.Tensor:
    """Returns this rank's part of a sequence that every rank has whole; nothing is sent. It is differentiable."""
    rank, world = rank_and_world(group)
    arguments.only_tensors(x=x)
    dim = _dim(x, dim)
    pieces = world * (2 if _layout(layout) == "zigzag" else 1)
    if x.shape[dim] % pieces:
        raise ValueError(
            f"`x` has {x.shape[dim]} rows in dim {dim}; layout={layout!r} on {world} ranks needs a multiple of {pieces}: "
            f"pad the sequence to {-(-x.shape[dim] // pieces) * pieces}"
        )
    return apart(x, dim, layout, world)[rank]


def gather_sequence(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    dim: int = 2,
    layout: str = "zigzag",
) -> torch.Tensor:
    """Returns on every rank the whole sequence, from the parts that `shard_sequence` made. It has no gradients."""
    _, world = rank_and_world(group)
    arguments.only_tensors(x=x)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "`x` requires grad, which gather_sequence does not pass on; compute on the parts, or pass x.detach()"
        )
    dim = _dim(x, dim)
    kind = {"function": "gather_sequence", "x": x.shape, "x.dtype": x.dtype, "dim": dim, "layout": _layout(layout)}
    agreement.check(group, kind, x)
    _even_rows("x", x.shape[dim], layout)
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x, group=group)
    return together(parts, dim, layout)


# ---- checks: before anything is sent, as a rank that raises later leaves the others waiting ----


def rank_and_world(group) -> tuple[int, int]:
    """Returns this process' rank in the group, and how many ranks there are."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "`group` needs torch.distributed, which has no process group yet; call "
            "torch.distributed.init_process_group() first, or ffpa where one process holds the whole sequence"
        )
    if group is not None and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "`group` does not hold this rank; call on the ranks that torch.distributed.new_group was given"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"`group` is a {type(group).__name__}; pass a torch.distributed.ProcessGroup (of a DeviceMesh: mesh.get_group()), "
            "or None for all ranks"
        )
    return dist.get_rank(group), dist.get_world_size(group)


def checked(
    function, unknown, group, q, k, v, layout, causal, scale, softcap, return_lse, sinks, return_max_logits
) -> tuple:
    """Checks a call of attention on several ranks. Returns q, k and v as autocast has them, and the operators' options.

    Ranks compare before each checks its own parts, so that all of them raise. If they differed they would add up what
    does not belong together, or wait for one that alone refuses.
    """
    if unknown:
        words.refuse(function, unknown)
    rank_and_world(group)  # what is no group is refused before ranks compare
    arguments.only_tensors(q=q, k=k, v=v)
    arguments.tensors_or_none(sinks=sinks)
    for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if hasattr(x, "to_local"):
            raise TypeError(
                f"`{name}` is a {type(x).__name__}; pass what this rank holds, {name}.to_local(), and mesh.get_group(): ffpa itself takes "
                "DTensors sharded by batch or heads"
            )
    q, k, v = as_autocast_would(q, k, v, cast=torch.Tensor.to)
    parts = {"q": q, "k": k, "v": v}
    arguments.flag("return_lse", return_lse)
    options = {
        "causal": arguments.flag("causal", causal),
        "scale": arguments.scale(scale),
        "softcap": arguments.softcap(softcap),
    }
    wants_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    of_sinks = sinks is not None and torch.is_grad_enabled() and sinks.requires_grad
    kind = {
        "function": function.__name__,
        **{name: x.shape for name, x in parts.items()},
        **{f"{name}.dtype": x.dtype for name, x in parts.items()},
        "requires_grad of q, k or v": wants_grad,
        "sinks": None if sinks is None else (tuple(sinks.shape), sinks.dtype),
        "requires_grad of sinks": of_sinks,
        "return_max_logits": arguments.flag("return_max_logits", return_max_logits),
        "layout": _layout(layout),
        **options,
    }
    agreement.check(group, kind, q)
    arguments.dense(q, k, v, None, "BHND")
    arguments.sinks(sinks, q, q.shape[1])
    memory_checks.rows(q=q, k=k, v=v)
    way_out = "a rank holds the same part of all three: cut them with shard_sequence"
    arguments.agree("k", k.shape[2], "q", q.shape[2], "{} rows", way_out)
    _even_rows("q", q.shape[2], layout)
    return q, k, v, options


def untraced(function):
    """Keeps torch.compile off a function, with a graph before and one behind it: messages are no part of a graph."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        dynamo = sys.modules.get("torch._dynamo")  # importing it takes seconds
        return (dynamo.disable(function) if dynamo else function)(*args, **kwargs)

    call._torchdynamo_disable = True
    return call


def _layout(layout) -> str:
    return arguments.one_of("layout", layout, ("zigzag", "contiguous"))


def _dim(x, dim) -> int:
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"`dim` is {dim!r} ({type(dim).__name__}); pass the dim of the sequence as an int")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"`dim` is {dim}; `x` has {x.dim()} dims: pass one of {-x.dim()} to {x.dim() - 1}")
    return dim % x.dim()


def _even_rows(name: str, rows: int, layout: str) -> None:
    if layout == "zigzag" and rows % 2:
        raise ValueError(
            f"`{name}` has {rows} rows; with layout='zigzag' each rank holds two chunks of equal length: pad the sequence "
            "to a multiple of twice the number of ranks, or use layout='contiguous'"
        )
