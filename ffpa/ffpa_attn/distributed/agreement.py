"""Here ranks of a group compare what they call, in the group's store, on the host, before anything moves."""

from __future__ import annotations

import pickle
import threading
import time
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import env
from ..support import private_torch

# Ranks whose calls are of different known kinds hear of it at the next comparison, no more than so many calls later.
_MOST_CALLS = 512
_MOST_KINDS = 4096


class Agreement:
    """Kinds of call that all ranks of a group have compared. Nothing else makes a kind known, so ranks that call alike
    compare at the same calls.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        try:
            store = dist.distributed_c10d._get_process_group_store(group)
        except AttributeError as error:
            raise private_torch.off("attention on several ranks", error) from None
        self.patience = store.timeout.total_seconds()
        life = store.add(f"ffpa_attn/groups/{self.rank}", 1)  # a group of the same name may have written here before
        self.store = dist.PrefixStore(f"ffpa_attn/{life}", store)
        self.kinds: dict[tuple, dict] = {}  # a kind's values, and the kind
        self.calls: list[dict] = []  # the kinds called since the last comparison
        self.comparisons = 0
        self.comparing = threading.Lock()
        self.lost = ""  # why the ranks may no longer be at the same call

    def check(self, kind: dict, at_every_call: bool) -> None:
        if self.world == 1:
            return
        values = tuple(kind.values())
        known = self.kinds.get(values)
        if known is None or at_every_call or self.lost or len(self.calls) == _MOST_CALLS:
            with self.comparing:
                self._compare(kind)
                if values not in self.kinds:
                    if len(self.kinds) == _MOST_KINDS:
                        self.kinds.clear()
                    self.kinds[values] = kind
        else:
            self.calls.append(known)

    def _compare(self, kind: dict) -> None:
        if self.lost:
            raise RuntimeError(
                f"{kind['function']}: the ranks of this `group` no longer call alike: {self.lost}; make a new group on all ranks "
                "(torch.distributed.new_group)"
            )
        self.lost = f"a comparison of what they call ended early on rank {self.rank}"
        calls = self._told_by_all(kind)
        if any(of_rank != calls[0] for of_rank in calls):
            self._raise_difference(calls)
        self._go_on()

    def _go_on(self) -> None:
        self.lost = ""
        self.calls.clear()

    def _told_by_all(self, kind: dict) -> list[list[dict]]:
        """Returns what each rank tells: the calls it made since the last comparison, and the one that it makes now."""
        self.comparisons += 1
        at = f"{self.comparisons}/"
        self.store.set(f"{at}{self.rank}", pickle.dumps([*self.calls, kind]))
        keys = [f"{at}{rank}" for rank in range(self.world)]
        started, pause = time.monotonic(), 1e-4
        while not self.store.check(keys):  # (to wait in the store would keep other threads from it)
            if time.monotonic() - started > self.patience:
                absent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                self.lost = (
                    f"rank {self.rank} had a call to compare with the others', and within {self.patience:.0f} s rank{'s' * (len(absent) > 1)} "
                    f"{', '.join(map(str, absent))} of the group did not come, or came with a call of a kind that all know"
                )
                raise RuntimeError(
                    f"{kind['function']}: {self.lost}. Pass the same everywhere (here {kind}); a rank that took this call for another kind "
                    "waits for this one: make a new group on all ranks, or end them all"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        told = [pickle.loads(self.store.get(key)) for key in keys]
        self.store.delete_key(f"{self.comparisons - 1}/{self.rank}")  # all have read it, as they have come here
        return told

    def _raise_difference(self, calls: list[list[dict]]) -> None:
        """Names the first difference; before it all ranks called alike."""
        at = next(i for i, kinds in enumerate(zip(*calls, strict=False)) if any(kind != kinds[0] for kind in kinds))
        kinds = [of_rank[at] for of_rank in calls]
        name, rank = next((n, r) for n in kinds[0] for r, kind in enumerate(kinds) if kind.get(n) != kinds[0][n])
        difference = (
            f"`{name}` is {kinds[rank].get(name)} on rank {rank} of the group, but {kinds[0][name]} on rank 0"
            f" (here {kinds[self.rank].get(name)})"
        )
        advice = "pass the same everywhere, of parts as shard_sequence cuts them"
        if all(at == len(of_rank) - 1 for of_rank in calls):
            self._go_on()  # nothing has moved
            raise ValueError(f"{difference}; {advice}")
        self.lost = f"in a call of {kinds[self.rank]['function']} before this one {difference}"
        raise ValueError(
            f"{self.lost}, and what was computed since is wrong; {advice}, and make a new group on all ranks"
        )


_agreements: WeakKeyDictionary[dist.ProcessGroup, Agreement] = WeakKeyDictionary()


def check(group: dist.ProcessGroup | None, kind: dict, x: torch.Tensor) -> None:
    """Raises on all ranks where this call differs between them: at each kind that is new to the group, and at every call
    where the host waits for each call anyway.

    A rank for which its kind is new waits, no longer than the store's timeout, till the others come with a call that
    they compare. A rank that makes a call of a known kind waits for nothing, and is not told.
    """
    flags = env.run_flags()
    is_cuda, at_every_call = x.is_cuda, flags["FFPA_CHECK"]
    kind.update(is_cuda=is_cuda, FFPA_CHECK=at_every_call, FFPA_RING_COPIES=flags["FFPA_RING_COPIES"])
    group = group or dist.group.WORLD
    agreement = _agreements.get(group)
    if agreement is None:
        agreement = _agreements[group] = Agreement(group)
    agreement.check(kind, at_every_call or not is_cuda)
