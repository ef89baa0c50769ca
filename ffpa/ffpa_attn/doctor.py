"""`python -m ffpa_attn.doctor` says what this installation can run here, what is missing, and what to do about it.

The exit code is 0 unless something is broken; a part that is merely not there is not.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

from . import env
from .backends import row_tiles
from .backends.reference import Rule
from .building import build, cache, toolchain
from .launching import native
from .launching.attention_call import NO_PAGES, forward_launch
from .specs import archs
from .specs.problem import Visibility
from .specs.spec import ForwardMerge, aot_specs
from .support import private_torch
from .support.version import __version__

_DRIVER = Path("/proc/driver/nvidia/version")


class Finding(NamedTuple):
    subject: str
    text: str
    broken: bool = False


def _installation() -> Iterator[Finding]:
    yield Finding("ffpa-cuda", f"{__version__} in {Path(__file__).parent}")
    yield Finding("Python", f"{platform.python_version()} on {platform.platform()}")


def _pytorch() -> Iterator[Finding]:
    built_for = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU alone"
    yield Finding("PyTorch", f"{torch.__version__}, built {built_for}")
    for said in private_torch.warnings():
        yield Finding("PyTorch", said)
    if not torch.version.cuda and _DRIVER.exists():
        yield Finding("PyTorch", "there is an NVIDIA driver: install a PyTorch built for CUDA to use the GPU")


def _triton() -> Iterator[Finding]:
    try:
        yield Finding("Triton", version("triton"))
    except PackageNotFoundError:
        yield Finding("Triton", 'not installed; for head dims up to 256: pip install "triton>=3.6"')


def _kernels() -> Iterator[Finding]:
    record = native.record()
    if record is None:
        yield Finding("kernels", native.PYTHON_ONLY)
        return
    built_with = f"nvcc {record['nvcc']} and PyTorch {record['torch']}"
    yield Finding("kernels", f"{len(record['kernels'])} in {build.LIBRARY}, built with {built_with}")
    for name, kernel in record["kernels"].items():
        used = kernel["resources"]
        targets = (f"{t} ({used[t]['registers']} registers)" if t in used else f"{t} (PTX)" for t in kernel["targets"])
        yield Finding("", f"{name}: {', '.join(targets)}")
    missing = [spec.name for spec in aot_specs(env.all_flags()) if spec.name not in record["kernels"]]
    if missing:
        yield Finding("kernels", f"not in this build, compiled at first use: {', '.join(missing)}")
    runtime, driver = native.library().cuda_versions()
    yield Finding(
        "CUDA", f"runtime {native.shown(runtime)}, driver up to {native.shown(driver) if driver else '- (none)'}"
    )


def merged_alone(spec: ForwardMerge, x: torch.Tensor) -> torch.Tensor:
    """Merges x [rows, columns] with no other part, which gives x: the smallest launch that proves the way to a kernel."""
    rows, columns = x.shape
    assert columns % row_tiles.PART_COLUMNS == 0, columns
    sums = torch.zeros(rows, 2, device=x.device)  # each row's reference, and its sum of P
    sums[:, 1].fill_(1.0)
    partial = torch.cat((x.float().flatten(), sums.flatten()))
    out = torch.empty_like(x)
    call = x[None, None], x[None, None], x[None, None], out[None, None]
    launch = forward_launch((spec,), *call, None, None, Rule(1.0, 0.0, Visibility(-1, -1, False)))
    launch(*call, *[None] * 5, partial, None, None, *NO_PAGES)
    return out


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        why = "" if torch.version.cuda else ", and this PyTorch would not use one"
        yield Finding("GPU", f"none in sight{why}; CPU tensors run in plain PyTorch")
        return
    for index in range(torch.cuda.device_count()):
        yield from _gpu(torch.device("cuda", index))


def _gpu(device: torch.device) -> Iterator[Finding]:
    properties, gpu = torch.cuda.get_device_properties(device), native.gpu_of(device)
    subject = f"GPU {device.index}"
    memory, sms = properties.total_memory >> 30, properties.multi_processor_count
    yield Finding(subject, f"{properties.name}, {gpu}, {sms} SMs, {memory} GiB")
    specs = aot_specs(env.all_flags())
    never = {spec.name: why for spec in specs if (why := archs.why_not_on(spec.arch, gpu))}
    built = [spec.name for spec in specs if native.is_built(spec, gpu)]
    later = [spec.name for spec in specs if spec.name not in never and spec.name not in built]
    yield Finding(subject, f"{len(built)} of {len(specs)} kernels are ready")
    for name, why in never.items():
        yield Finding(subject, f"{name} is not for it: {why}")
    if native.record() is None:
        return
    if later:
        why_not = toolchain.why_no_build()
        yield Finding(
            subject, f"{len(later)} more {f'are missing: {why_not}' if why_not else 'are compiled at first use'}"
        )
    spec = ForwardMerge("f16")
    if native.why_not(spec, gpu):
        return
    x = torch.arange(4096, dtype=torch.float16, device=device).view(16, 256)
    right = torch.equal(merged_alone(spec, x), x)
    yield Finding(subject, f"a test launch gives the {'right' if right else 'WRONG'} result", broken=not right)


def _compiler() -> Iterator[Finding]:
    nvcc, ninja = toolchain.find_nvcc(), toolchain.find_ninja()
    yield Finding("nvcc", f"{nvcc.version} from {nvcc.found}: {nvcc.path}" if nvcc else f"none; {toolchain.GET_NVCC}")
    yield Finding("ninja", str(ninja) if ninja else "none; pip install ninja")
    if nvcc and (why := toolchain.why_no_build()):
        yield Finding("nvcc", f"cannot be used: {why}")


def _cache() -> Iterator[Finding]:
    directory = cache.cache_directory()
    if not directory.exists():
        yield Finding("cache", f"{directory}, made when a kernel is compiled at first use")
        return
    cache.check_owner(directory)
    yield Finding("cache", f"{directory}, {len(list(directory.glob('*.so')))} kernels compiled at first use")


def _flags() -> Iterator[Finding]:
    flags = env.all_flags()
    changed = [f"{flag.name}={flags[flag.name]}" for flag in env.FLAGS if flags[flag.name] != flag.default]
    yield Finding("flags", ", ".join(changed) or "all at their defaults; the README lists them")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _installation, _pytorch, _flags, _triton, _kernels, _gpus, _compiler, _cache,
)  # fmt: skip


def examine() -> Iterator[Finding]:
    """Gives every finding; a failed check is one too, unless one before it failed alike: a wrong flag fails many."""
    said = set()
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if text not in said:
                yield Finding(check.__name__.strip("_"), text, broken=True)
            said.add(text)


def main() -> int:
    env.let_stdout_write_anything()
    broken = []
    for finding in examine():
        print(f"{finding.subject:<10} {'BROKEN: ' if finding.broken else ''}{finding.text}", flush=True)
        if finding.broken:
            broken.append(finding.subject)
    print(f"\nbroken: {', '.join(broken)}" if broken else "\nnothing is broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
