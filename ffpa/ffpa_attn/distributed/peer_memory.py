"""Processes of one host share GPU memory here, and streams wait for one another, by CUDA's driver, without a kernel."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # it differs between hosts
_LAZY_PEER_ACCESS = ctypes.c_uint(1)
_AT_LEAST = ctypes.c_uint(0)  # wait till a word is no less, in a circle of 2^32


class Memory:
    """A rank's own memory, zeroed, and the places here of the other ranks' memory.

    In `shared`, a RuntimeError of its making is no failure of the call: messages of torch.distributed do as well.
    """

    def __init__(self, size: int, device: torch.device):
        self.device, self._own, self._at, handle = device, ctypes.c_uint64(), {}, _Handle()
        with torch.cuda.device(device):
            torch.cuda.empty_cache()  # PyTorch keeps what the driver may need
            # Less than whole blocks of the driver's would share one, and another process maps all of a block.
            blocks = -(-size // (2 << 20)) * (2 << 20)
            _call("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(blocks))
            _call("cuMemsetD8_v2", self._own, ctypes.c_ubyte(0), ctypes.c_size_t(size))
            _call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
            torch.cuda.synchronize()  # zeros are there before another rank writes
        self.handle = bytes(handle)

    def map(self, handles: list[bytes], rank: int) -> None:
        """Maps the memory of all ranks, of which this is `rank`. What will be done with it is tried, on zeros."""
        zero = torch.zeros(1, dtype=torch.int32, device=self.device)
        with torch.cuda.device(self.device):
            for other, handle in enumerate(handles):
                address = ctypes.c_uint64(self._own.value)
                if other != rank:
                    handle = _Handle.from_buffer_copy(handle)
                    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
                self._at[other] = address.value
                self.copy(zero, other, 0)
                self.write(other, 0, 0)
            self.wait(0, 0)
            torch.cuda.synchronize()

    def unmap(self) -> None:
        """Unmaps the others' memory, once nothing of this rank's is under way."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            for address in self._at.values():
                if address != self._own.value:
                    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        self._at.clear()

    def free(self) -> None:
        if self._own.value:
            with torch.cuda.device(self.device):
                _call("cuMemFree_v2", self._own)
            self._own.value = 0

    def __del__(self):
        # A process that ends gives all back, and other ranks, for which streams wait, may be gone.
        if sys.is_finalizing():
            return
        with contextlib.suppress(RuntimeError):
            self.unmap()
            self.free()

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous tensor in this rank's own memory."""
        span = _Span(self._own.value + offset, like.nbytes)
        return torch.as_tensor(span, device=like.device).view(like.dtype).view(like.shape)

    def copy(self, x: torch.Tensor, rank: int, offset: int) -> None:
        """Copies x into a rank's memory, on the current stream, which is this device's."""
        place, x_at = ctypes.c_uint64(self._at[rank] + offset), ctypes.c_uint64(x.data_ptr())
        _call("cuMemcpyDtoDAsync_v2", place, x_at, ctypes.c_size_t(x.nbytes), _stream())

    def write(self, rank: int, word: int, value: int) -> None:
        """Writes a word of 32 bits of a rank's memory, on the same stream, when all that came before is written."""
        at = ctypes.c_uint64(self._at[rank] + 4 * word)
        _call("cuStreamWriteValue32_v2", _stream(), at, ctypes.c_uint32(value), ctypes.c_uint(0))

    def wait(self, word: int, value: int) -> None:
        """Waits on this device's current stream, whatever device is, till a word of this rank's is at least `value`."""
        at = ctypes.c_uint64(self._own.value + 4 * word)
        with torch.cuda.device(self.device):
            _call("cuStreamWaitValue32_v2", _stream(), at, ctypes.c_uint32(value), _AT_LEAST)


def shared(group: dist.ProcessGroup | None, size: int, device: torch.device) -> Memory | str:
    """Returns `size` bytes of each rank, mapped by all; or, on all, why not. All call this, and `release`, together."""
    memory, handle, host, error = None, None, "", ""
    try:
        host = _BOOT.read_text()
        memory = Memory(size, device)
        handle = memory.handle
    except (RuntimeError, OSError) as reason:
        error = str(reason)
    handles, errors, hosts, sizes = zip(*gathered(group, (handle, error, host, size)), strict=True)
    if len(set(sizes)) > 1:
        raise ValueError(
            f"`k` and `v` differ between the ranks of the group, which exchange {sizes} bytes; pass the same everywhere"
        )
    if len(set(hosts)) > 1:
        errors = ("its ranks are on several hosts",)
    if not any(errors):
        try:
            memory.map(handles, dist.get_rank(group))
        except RuntimeError as reason:
            error = str(reason)
        errors = gathered(group, error)
    if any(errors):
        release(group, memory)
        return next(filter(None, errors))
    return memory


def release(group: dist.ProcessGroup | None, memory: Memory | None) -> None:
    if memory:
        memory.unmap()
    gathered(group, None)
    if memory:
        memory.free()


def gathered(group: dist.ProcessGroup | None, x) -> list:
    of_all = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_all, x, group=group)
    return of_all


def _stream() -> ctypes.c_void_p:
    """Returns the current stream; the default one has the same handle on every device."""
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


class _Handle(ctypes.Structure):
    """CUDA's name of memory, by which another process opens it."""

    _fields_ = (("bytes", ctypes.c_byte * 64),)


class _Span:
    """Bytes of a GPU, as `torch.as_tensor` takes them."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(str(error)) from None


_NO_CONTEXT = 201  # status in a thread that has made no call of CUDA's runtime yet


def _call(name: str, *args) -> None:
    try:
        function = getattr(_driver(), name)
    except AttributeError:
        raise RuntimeError(f"this driver has no {name}") from None
    status = function(*args)
    if status == _NO_CONTEXT:
        torch.cuda.mem_get_info()
        status = function(*args)
    if status:
        raise RuntimeError(f"{name} failed: CUDA error {status}")
