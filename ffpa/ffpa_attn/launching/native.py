"""Knows the compiled kernels: which there are, whether one can run on a GPU, and its name in the registry once it can.

Nothing here touches a GPU before a kernel is asked for, so importing is safe before a fork.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import env
from ..building import build, jit, toolchain
from ..specs import archs
from ..specs.problem import Problem
from ..specs.spec import ForwardClearRows, KernelSpec, aot_specs
from ..support.transient import is_transient
from . import structs

_PACKAGE = Path(__file__).resolve().parents[1]
PYTHON_ONLY = (
    "this installation holds no CUDA kernels, because it was not built, or built where there was no nvcc; in its source, run "
    "`.dev/install.sh`, which fetches one, or set CUDA_HOME and run `pip install --no-build-isolation .`"
)


@cache
def record() -> dict[str, Any] | None:
    """Returns what the build wrote down of the library in this package; None in a Python-only installation."""
    path = _PACKAGE / build.RECORD
    return json.loads(path.read_text()) if path.exists() else None


@cache
def library():
    """Returns the operators of the native library, which is loaded now if need be."""
    if record() is None:
        raise RuntimeError(f"ffpa_attn: {PYTHON_ONLY}")
    path = _PACKAGE / build.LIBRARY
    if record().get("params") != build.params_hash():
        raise RuntimeError(
            f"ffpa_attn: {build.csrc()}/attention/params changed since {path} was built; install ffpa-cuda again"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise RuntimeError(f"ffpa_attn: {path} does not load ({error}); install ffpa-cuda again") from None
    return torch.ops.ffpa_attn_native


@cache
def gpu_of(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def is_built(spec: KernelSpec, gpu: str) -> bool:
    """Says whether the wheel's library holds the kernel in a form that this GPU runs."""
    built = (record() or {"kernels": {}})["kernels"].get(spec.name)
    return built is not None and any(archs.runs(target, gpu) for target in built["targets"])


_unready: dict[tuple[KernelSpec, str], str] = {}  # kernels that cannot be made ready in this process, and why
_ready: set[tuple[KernelSpec, str]] = set()  # kernels that are ready, of which nothing more is asked


def why_not(spec: KernelSpec, gpu: str) -> str | None:
    """Says why this kernel cannot run on this GPU; None when it can, if need be after compiling it."""
    if (spec, gpu) in _unready:
        return _unready[spec, gpu]
    if (spec, gpu) in _ready:
        return None
    reason = archs.why_not_on(spec.arch, gpu)
    if reason:
        return f"{spec.name} cannot run: {reason}"
    if record() is None:
        return PYTHON_ONLY
    if is_built(spec, gpu):
        return None
    reason = toolchain.why_no_build()
    return f"{spec.name} is not built for {gpu}, and {reason}" if reason else None


def _why_not_in_a_wheel(spec: KernelSpec, gpu: str) -> str | None:
    """Says why an installation built as the flags say could not run the kernel on this GPU; None where it could."""
    reason = archs.why_not_on(spec.arch, gpu)
    if reason:
        return f"{spec.name} cannot run: {reason}"
    flags = env.all_flags()
    targets = archs.targets(spec.arch, archs.requested(flags)) if spec in aot_specs(flags) else ()
    reason = None if any(archs.runs(target, gpu) for target in targets) else toolchain.why_no_build()
    return f"no wheel holds {spec.name} for {gpu}, and {reason}" if reason else None


def why_not_all(plan, p: Problem) -> str | None:
    """Says why one of the plan's kernels cannot run on the problem's GPU, here or in an installed wheel, or None."""
    of_one = _why_not_in_a_wheel if p.supposed else why_not
    return next((reason for spec in needed(plan, p) if (reason := of_one(spec, p.at_hand or p.arch))), None)


def needed(plan, p: Problem) -> tuple[KernelSpec, ...]:
    """Returns the kernels that nvcc compiles for a call: the plan's, and what clears rows of packed results."""
    clears = plan.specs and p.packed and p.direction == "forward"
    return (*plan.specs, ForwardClearRows()) if clears else plan.specs


def driver_problem(runtime: int, driver: int) -> str | None:
    """Says what a driver lacks: it runs what its own major version built, or an older one (13000 is CUDA 13.0)."""
    if driver // 1000 >= runtime // 1000:
        return None
    built_with = f"these kernels were built with CUDA {shown(runtime)}"
    if not driver:
        return f"there is no NVIDIA driver, and {built_with}; install a driver for it"
    return (
        f"the NVIDIA driver supports CUDA {shown(driver)}, and {built_with}; install a newer driver, or ffpa-cuda "
        f"from source with nvcc {driver // 1000}"
    )


def shown(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


@cache
def kernel(spec: KernelSpec, gpu: str) -> str:
    """Returns the kernel's name in the registry, ready to launch on GPUs of this kind; compiles it now if need be."""
    reason = why_not(spec, gpu)
    if reason:
        raise NotImplementedError(f"ffpa_attn: {reason}")
    ops = library()
    reason = driver_problem(*ops.cuda_versions())
    if reason:
        raise RuntimeError(f"ffpa_attn: {reason}")
    if is_built(spec, gpu):
        return spec.name
    if record()["sources"] != build.sources_hash():
        raise RuntimeError(
            f"ffpa_attn: {build.csrc()} changed since the native library was built, so {spec.name} would not fit it; "
            "install ffpa-cuda again"
        )
    name = f"{spec.name}@{gpu}"
    with jit.opened(spec, gpu) as (_, compiled):
        load_kernel(compiled.name, spec.name, name)
    return name


# These are no operators: a model from elsewhere can call those, with any path and any address.


@cache
def _function(name: str, *types):
    """Returns a C function of the library, which answers null, or what is wrong."""
    library()
    function = getattr(ctypes.CDLL(str(_PACKAGE / build.LIBRARY)), name)
    function.restype, function.argtypes = ctypes.c_char_p, types
    return function


def _raise(problem: bytes | None) -> None:
    if problem:
        raise RuntimeError(problem.decode(errors="replace"))


def load_kernel(path: str, spec: str, name: str) -> None:
    """Registers a library's kernel."""
    load = _function("ffpa_load_kernel", ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p)
    _raise(load(os.fsencode(path), spec.encode(), name.encode()))


def launcher(names: Sequence[str], params: Sequence[bytes], places: Sequence[int], device: int) -> Callable:
    """Returns what enqueues registered kernels, one after another, on PyTorch's current stream: it takes the addresses
    that go to these places of each kernel's params, and params to use instead, or None. What addresses point to must
    live until then, as a caller's tensors do.
    """
    find = _function("ffpa_find_kernel", ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))
    run = _function("ffpa_launch", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
    kernels, all_params = (ctypes.c_uint64 * len(names))(), ctypes.create_string_buffer(b"".join(params))
    for i, name in enumerate(names):
        found = ctypes.c_void_p()
        _raise(find(name.encode(), ctypes.byref(found)))
        kernels[i] = found.value
    kept = kernels, all_params, (ctypes.c_int * len(places))(*places)  # C reads them at every launch
    addresses_of = map(ctypes.addressof, kept)
    launches = structs.struct("KernelLaunches")(len(names), len(places), len(params[0]), device, *addresses_of)
    address = ctypes.addressof(launches)

    def enqueue(addresses: bytes, params: bytes | None = None) -> None:
        problem = run(address, addresses, params)
        if problem:
            _raise(problem)

    enqueue.kept = launches, kept
    return enqueue


def compiled_launcher(kernels: ctypes.Array, device: int) -> Callable[[bytes], None]:
    """Returns what enqueues kernels that Triton compiled (structs CompiledKernel), one after another, on PyTorch's
    current stream, given the addresses of a call's tensors. It raises where they take other parameters.
    """
    count = len(kernels)
    _raise(_function("ffpa_check_compiled", ctypes.c_void_p, ctypes.c_int)(kernels, count))
    run = _function("ffpa_launch_compiled", ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int)

    def enqueue(addresses: bytes) -> None:
        problem = run(kernels, count, addresses, device)
        if problem:
            _raise(problem)

    return enqueue


def make_ready(spec: KernelSpec, gpu: str) -> bool:
    """Says whether the kernel can be launched, compiled if need be; if not, `why_not` has it, and nobody retries."""
    handled = sys.exc_info()[1]
    try:
        kernel(spec, gpu)
    except RuntimeError as error:
        if is_transient(error, handled):
            raise
        _unready[spec, gpu] = f"{spec.name} is not ready for {gpu}: {str(error).removeprefix('ffpa_attn: ')}"
        return False
    _ready.add((spec, gpu))
    return True
