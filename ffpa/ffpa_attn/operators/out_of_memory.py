"""This module says what to do where there is no memory for a call's results or its workspace. The call is not tried
again with less: other sizes of the workspace give other bits, and these are not to depend on what is free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..launching.attention_call import Call

if TYPE_CHECKING:
    from ..backends.choice import Choice

_CAP = "FFPA_WORKSPACE_MB"


def least_cap(choice: Choice, flags: Mapping[str, Any]) -> int:
    """Returns the smallest FFPA_WORKSPACE_MB with which the same backend runs the problem."""
    from ..backends.choice import choose

    def runs(cap: int) -> bool:
        try:
            return choose(choice.problem, {**flags, _CAP: cap}).backend == choice.backend
        except NotImplementedError:
            return False

    return bisect_left(range(flags[_CAP]), True, lo=1, key=runs)


def _workspace_bytes(choice: Choice, memo: Mapping) -> int | None:
    """Returns how much the call asks for, or None where only a call that runs finds out; it is no more than the cap."""
    calls = [call for call in memo.values() if isinstance(call, Call)]
    floats = sum((call.scratch or 0) + (call.partial or 0) for call in calls)
    known = getattr(choice.plan, "workspace_bytes", None)
    return 4 * floats if known is None and calls else known


def _shown(count: int) -> str:
    return f"{count / (1 << 20):.3g} MiB"


def explained(
    error: torch.OutOfMemoryError, choice: Choice, memo: Mapping, result_bytes: int, flags: Mapping[str, Any]
) -> torch.OutOfMemoryError:
    """Returns the same error, with what can be done about it. `memo` is that of the call's plan."""
    call = f"{choice.problem} on {choice.kernel}"
    return _explained(error, call, _workspace_bytes(choice, memo), result_bytes, flags[_CAP], least_cap(choice, flags))


def of_sink_gradient(
    error: torch.OutOfMemoryError, out: torch.Tensor, workspace: int | None, result_bytes: int, flags: Mapping[str, Any]
) -> torch.OutOfMemoryError:
    """Does the same where the gradient of sinks has no memory, which works with any workspace."""
    call = f"gradient of sinks, of `out` with shape {tuple(out.shape)} and dtype {out.dtype}"
    return _explained(error, call, workspace, result_bytes, flags[_CAP], 1)


def _explained(
    error: torch.OutOfMemoryError, call: str, workspace: int | None, result_bytes: int, cap: int, least: int
) -> torch.OutOfMemoryError:
    asked = f"up to {cap} MiB" if workspace is None else _shown(workspace)
    beside = f"its workspace of {asked} ({_CAP}={cap})"
    way_out = f"set {_CAP}={least}, the least that works for this call (smaller is slower), or free memory"
    if workspace == 0:
        beside = "what else it takes"
        way_out = (
            f"it has no workspace, and {_CAP}={least}, the least that works, takes no less than {cap}: free memory"
        )
    elif least == cap:
        way_out = f"{_CAP}={cap} is the least that works for this call: free memory"
    said = str(error).partition("\n")[0]
    return torch.OutOfMemoryError(
        f"ffpa_attn: {call}: no memory for its results of {_shown(result_bytes)} and {beside}; {way_out}. "
        f"PyTorch says: {said}"
    )
