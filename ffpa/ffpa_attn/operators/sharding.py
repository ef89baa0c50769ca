"""Operators run on DTensors by these rules: sharded by batch or heads, each rank computes its part and sends nothing.

PyTorch's own `register_sharding` keeps what it found for calls that differ in `layout` alone, and lets heads be cut
unevenly, which would part queries from their keys: so the rules are registered by the means that it has itself.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

from .forms import MAX_LOGITS

_FORWARDS = ("forward", "forward_out", "varlen_forward", "varlen_forward_out")
_BACKWARDS = ("backward", "varlen_backward", "sink_gradient", "sink_gradient_delta")
_OPERATORS = (*_FORWARDS, *(x + MAX_LOGITS for x in _FORWARDS), *_BACKWARDS)
_OPTIONS = ["layout", "return_lse", "mask_grad", "fp32_grads"]  # a result's shape, type or placement depends on these


@cache
def register() -> None:
    for name in _OPERATORS:
        DTensor._op_dispatcher.sharding_propagator.register_op_strategy(
            getattr(torch.ops.ffpa_attn, name).default, _strategy, RuntimeSchemaInfo(static_kwargkey=_OPTIONS)
        )


class _Cut(NamedTuple):
    """The dim that is cut, batch or heads, in each kind of tensor."""

    rows: int  # a dim of q, and of all that is laid out as q is
    lse: int
    mask: int  # a dim of a mask, counted from the end
    largest: int  # a dim of the largest scores
    by_heads: bool


def _cuts(packed: bool, layout: str) -> list[_Cut]:
    """Returns the ways to cut, the one by heads last."""
    if packed:
        return [_Cut(1, 0, 0, 1, True)]
    return [_Cut(0, 0, -4, 0, False), _Cut(1 if layout == "BHND" else 2, 1, -3, 1, True)]


def _strategy(call: OpSchema) -> OpStrategy:
    """Returns all ways to place the tensors of a call on the dims of a mesh; DTensor takes the cheapest."""
    schema, options = call.op._schema, call.kwargs_schema
    given = zip(schema.arguments, call.args_schema, strict=False)  # arguments that are left out are the last
    arguments = {argument.name: x for argument, x in given if isinstance(x, OpStrategy)}
    results = [result.name for result in schema.returns]
    empty = {"lse"} if not options.get("return_lse", True) else {"dmask"} if not options.get("mask_grad") else set()
    of_sinks_alone = "q" not in arguments  # that is their gradient
    packed = arguments["out"].ndim == 3 if of_sinks_alone else "cu_seqlens_q" in arguments
    cuts = _cuts(packed, options.get("layout", "BHND"))
    rules = [[Replicate()] * (len(results) + len(arguments))]
    for cut in cuts:
        of_results = [Replicate() if name in empty else _placement(name, cut, arguments) for name in results]
        rules.append(of_results + [_placement(name, cut, arguments) for name in arguments])
    has_one_head = not of_sinks_alone and arguments["k"].shape[cuts[-1].rows] == 1
    if has_one_head:  # all ranks use it; its gradient is the sum of theirs
        rule = dict(zip([*results, *arguments], rules[-1], strict=True))
        rule |= {"k": Replicate(), "v": Replicate()} | {name: Partial() for name in ("dk", "dv") if name in rule}
        rules.append([rule[name] for name in (*results, *arguments)])
    found = expand_to_full_mesh_op_strategy(call.get_mesh_from_args(), call, rules, input_index=len(results))
    if not of_sinks_alone:
        found.strategies = [way for way in found.strategies if _heads_stay_together(way, cuts[-1].rows, arguments)]
    for argument in schema.arguments:
        if argument.alias_info is not None:
            found.strategies = _in_place(found.strategies, argument.name, arguments)
    return found


def _placement(name: str, cut: _Cut, arguments: dict[str, OpStrategy]) -> Placement:
    if name in ("cu_seqlens_q", "cu_seqlens_k"):
        return Replicate()
    if name in ("lse", "grad_lse", "delta"):
        return Shard(cut.lse)
    if name == "max_logits":
        return Shard(cut.largest)
    if name in ("sinks", "dsinks"):
        return Shard(0) if cut.by_heads else Replicate() if name == "sinks" else Partial()
    if name not in ("mask", "dmask"):
        return Shard(cut.rows)
    mask = arguments["mask"]
    dim = mask.ndim + cut.mask
    if dim >= 0 and mask.shape[dim] > 1:
        return Shard(dim)
    return Replicate() if name == "mask" else Partial()  # the gradient of what all ranks use is the sum of theirs


def _heads_stay_together(way: OpSpec, heads: int, arguments: dict[str, OpStrategy]) -> bool:
    """Says whether all ranks have equally many heads: then each has those of K and V that its own of q attend to."""

    def even(name: str) -> bool:
        x = way.input_specs[list(arguments).index(name)]
        ranks = prod(x.mesh.size(i) for i, placement in enumerate(x.placements) if placement == Shard(heads))
        return arguments[name].shape[heads] % ranks == 0

    return even("q") and even("k")


def _in_place(ways: list[OpSpec], name: str, arguments: dict[str, OpStrategy]) -> list[OpSpec]:
    """Returns the ways that write a tensor where it is, as what is written to a copy is lost."""
    at, here = list(arguments).index(name), arguments[name].strategies[0].output_spec.placements
    ways = [way for way in ways if way.input_specs[at].placements == here]
    if not ways:
        raise ValueError(
            f"`{name}` is a DTensor placed {here}; allowed: replicated, or sharded by batch or by heads that its ranks share "
            f"evenly; place it so, or leave `{name}` away"
        )
    return ways
