"""Moves tensors from rank to rank while kernels run: by messages of torch.distributed, or copies by GPUs of a host."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import env
from ..support.progress import say
from . import peer_memory

# Returns the tensors that came: work of this stream from now on finds them there, and may overwrite what was sent.
Wait = Callable[[], list[torch.Tensor]]


class Exchange:
    """A way to exchange tensors: what comes lies in one of several places in turn, till as many exchanges later.

    Kernels fill a GPU: what needs a multiprocessor and waits for one kernel starts as late as the next one ends. With
    `ahead` an exchange waits for what was computed before the last one was posted, not since: this takes three places.
    """

    places: list[list[torch.Tensor]]

    def __init__(self, device: torch.device, ahead: bool):
        self.device, self.posted = device, 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.passed = deque(maxlen=2 if ahead else 1)  # events of the computing stream at the last exchanges

    def post(self, tensors: Sequence[torch.Tensor], to: int, source: int | None, rows: int) -> Wait:
        """Sends tensors [B, H, N, D], or none, to a rank; receives such of `rows` from `source`, none if that is None.

        What is sent is contiguous and, with `ahead`, was there when the call began.
        """
        place = self.posted % len(self.places)
        self.posted += 1
        sent = list(tensors)
        received = [] if source is None else [_of_rows(x, rows) for x in self.places[place]]
        if self.stream:
            self.passed.append(torch.cuda.current_stream(self.device).record_event())
            self.stream.wait_event(self.passed[0])
        with torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
            wait_for_both = self._start(sent, to, received, source, place)

        def wait() -> list[torch.Tensor]:
            wait_for_both()
            sent.clear()  # they have left, and need no memory here
            return received

        return wait

    def finish(self) -> None:
        """Ends a call, which has awaited all that it posted."""

    def _start(self, sent, to, received, source, place) -> Callable[[], object]:
        """Returns what makes the stream that calls it wait for both directions."""
        raise NotImplementedError


class Messages(Exchange):
    """Messages of torch.distributed: between any ranks, on any device."""

    def __init__(self, group: dist.ProcessGroup | None, like: Sequence[torch.Tensor], places: int, ahead: bool):
        super().__init__(like[0].device, ahead)
        self.places = [
            [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like] for _ in range(places)
        ]
        self.group = group

    def _start(self, sent, to, received, source, place):
        messages = [dist.P2POp(dist.isend, x, group=self.group, group_peer=to) for x in sent]
        messages += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=source) for x in received]
        works = dist.batch_isend_irecv(messages) if messages else []
        return lambda: [work.wait() for work in works]


class Copies(Exchange):
    """Copy engines write into other ranks' places; NCCL's kernels would hold multiprocessors till the other rank has
    come.

    All ranks count exchanges alike. A rank whose place is free writes the exchange's number to the source, to the word
    of those that are ready there; waits for the rank that it sends to; copies; and writes the number there, to the word
    of those that have sent. Places and words last from call to call: to map one another's memory takes processes
    milliseconds.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, ahead: bool):
        super().__init__(device, ahead)
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.memory, self.size, self.in_a_call = None, 0, False
        self.read = None  # the event after which the last call has read what came

    def prepare(self, group: dist.ProcessGroup | None, like: Sequence[torch.Tensor], places: int) -> str | None:
        """Prepares a call, on all ranks at once; or returns, on all of them, why it cannot."""
        if self.in_a_call:
            raise RuntimeError(
                "ring_attention: a call in this `group` ended in an error, and its ranks may have exchanged different numbers of tensors "
                "since; make a new group on all ranks (torch.distributed.new_group)"
            )
        of_each = (8 * self.world, *(x.nbytes for x in like))
        words, *sizes = (-(-size // 1024) * 1024 for size in of_each)  # kernels may ask that of an address
        self.offsets = [[words + i * sum(sizes) + sum(sizes[:j]) for j in range(len(sizes))] for i in range(places)]
        size = words + places * sum(sizes)
        if size > self.size:
            if self.memory:
                peer_memory.release(group, self.memory)
                self.memory, self.size = None, 0
            found = peer_memory.shared(group, size, self.device)
            if isinstance(found, str):
                return found
            self.memory, self.size = found, size
        self.places = [[self.memory.tensor(*x) for x in zip(offsets, like, strict=True)] for offsets in self.offsets]
        self.passed.clear()
        if self.read:
            self.stream.wait_event(self.read)
        self.in_a_call = True
        return None

    def finish(self):
        self.in_a_call = False
        if self.stream:
            self.read = torch.cuda.current_stream(self.device).record_event()

    def _start(self, sent, to, received, source, place):
        number, memory = self.posted, self.memory
        if received:
            memory.write(source, self.rank, number)
        if sent:
            memory.wait(to, number)
            for x, offset in zip(sent, self.offsets[place], strict=True):
                memory.copy(x, to, offset)
            memory.write(to, self.world + self.rank, number)
        copied = self.stream.record_event() if self.stream else None

        def wait() -> None:
            if received:
                memory.wait(self.world + source, number)
            if copied:
                torch.cuda.current_stream(self.device).wait_event(copied)

        return wait


# A group keeps these: exchanges ahead of what is computed, and others.
_kept: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[torch.device, bool], Copies | None]] = WeakKeyDictionary()


def exchange(group: dist.ProcessGroup | None, like: Sequence[torch.Tensor], places: int, ahead: bool) -> Exchange:
    """Returns the exchange of one call, for tensors no larger than `like`; all ranks of the group ask together."""
    device = like[0].device
    if _may_be_copied(like):
        kept, key = _kept.setdefault(group or dist.group.WORLD, {}), (device, ahead)
        if key not in kept:
            kept[key] = Copies(group, device, ahead)
        if kept[key]:
            with torch.cuda.device_of(like[0]):  # NCCL, too, gathers objects there
                why_not = kept[key].prepare(group, like, places)
            if not why_not:
                return kept[key]
            kept[key] = None
            if env.run_flags()["FFPA_LOG"]:
                say(f"ffpa_attn: ring attention sends messages: {why_not}")
    return Messages(group, like, places, ahead)


def _may_be_copied(tensors: Sequence[torch.Tensor]) -> bool:
    if not (tensors[0].is_cuda and all(x.numel() for x in tensors) and env.run_flags()["FFPA_RING_COPIES"]):
        return False
    with torch.cuda.device(tensors[0].device):
        return not torch.cuda.is_current_stream_capturing()


def _of_rows(place: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns so many rows of a place, as contiguous as what is sent."""
    batch, heads, _, d = place.shape
    return place.view(-1)[: batch * heads * rows * d].view(batch, heads, rows, d)
