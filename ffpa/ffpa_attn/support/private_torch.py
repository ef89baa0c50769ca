"""This module looks once, as it is imported, for each private name of PyTorch that this package calls.

A release of PyTorch may drop any of them. What they are for is then off, with a reason that the import warns of, the
doctor lists and an exception tells whoever asks for it; everything else works. Names that come with slow imports
(DTensor's, the compiler's) are looked for where they are used. `PlainTorch` is the reference path's way to call PyTorch.
"""

from __future__ import annotations

import contextlib
import importlib
import re

import torch

TRIED = ("2.10", "2.11", "2.13", "2.15")  # all tests pass with each

OFF: list[str] = []  # one sentence for each thing that is off


def find(path: str):
    """Returns what a path such as "torch.a.b" names, or None."""
    found = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name, None)
    return found


def needs(use: str, *paths: str) -> str | None:
    """Returns None if all are there, else a sentence that says why `use` is off."""
    gone = [path for path in paths if find(path) is None]
    if not gone:
        return None
    OFF.append(
        f"{use}: off, as PyTorch {torch.__version__} has no {' and no '.join(gone)}; it was tried with {tried()}"
    )
    return OFF[-1]


def off(use: str, error: Exception) -> NotImplementedError:
    """Makes the exception for a use that has just failed, with `error`, for want of a name."""
    return NotImplementedError(f"{use}: off with PyTorch {torch.__version__} ({error}); it was tried with {tried()}")


def tried() -> str:
    return f"{', '.join(TRIED[:-1])} and {TRIED[-1]}"


def newer_than_tried(version: str = torch.__version__) -> str | None:
    release = re.match(r"(\d+)\.(\d+)", version)
    if release is None or tuple(map(int, release.groups())) <= tuple(map(int, TRIED[-1].split("."))):
        return None
    return f"PyTorch {version} is newer than what this release of ffpa-cuda was tried with: {tried()}"


def warnings() -> list[str]:
    newer = newer_than_tried()
    return OFF + [newer] * bool(newer)


# These modules are imported if they are there; `find` tells which of their names are.
for _module in ("_functorch.utils", "_subclasses.fake_tensor", "jit._builtins", "utils._contextlib"):
    with contextlib.suppress(ImportError):
        importlib.import_module(f"torch.{_module}")

_MODES = (
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._get_tracing_state",
    "torch.autograd.forward_ad._current_level",
)
no_short_way = needs(
    "the short way past PyTorch's dispatcher, without which a call takes 10 µs more",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._dispatch_keys",
    "torch._C.DispatchKey",
    "torch._C.DispatchKeySet",
    "torch._C._any_requires_grad",
    "torch._C._after_autograd_keyset.raw_repr",
    "torch._C._AutoDispatchBelowAutograd",
    "torch.autograd.profiler._is_profiler_enabled",
    *_MODES,
)
no_gradients = needs("gradients, torch.func and torch.compile", "torch._C._AutoDispatchBelowAutograd")
no_torch_func = needs(
    "derivatives by torch.func",
    "torch._C._are_functorch_transforms_active",
    "torch._functorch.utils.enable_single_level_autograd_function",
    "torch.autograd.function._SingleLevelFunction",
)
no_override = needs("sdpa() and enable_sdpa()", "torch._C._functorch.CInterpreter", *_MODES)
no_torchscript = needs("enable_sdpa() in TorchScript", "torch.jit._builtins._register_builtin")
no_torch_sdpa = needs("PyTorch's own kernels as a choice", "torch._fused_sdp_choice")


FakeTensor = find("torch._subclasses.fake_tensor.FakeTensor") or ()  # no tensor is an instance of no class
FunctionalTensor = find("torch._subclasses.functional_tensor.FunctionalTensor") or ()  # the compiler makes graphs of it
_set_grad_enabled = find("torch._C._set_grad_enabled") or torch.set_grad_enabled


class PlainTorch:
    """In this context PyTorch's own operators run as the reference path means them: no graph is recorded, nothing is
    cast. It takes a fifth of the time of `torch.no_grad()` and `torch.autocast()`.
    """

    def __init__(self, device: torch.device):
        self.device = device.type

    def __enter__(self):
        self.grad, self.cast = torch.is_grad_enabled(), torch.is_autocast_enabled(self.device)
        self._set(False, False)

    def __exit__(self, *_):
        self._set(self.grad, self.cast)

    def _set(self, grad: bool, cast: bool) -> None:
        _set_grad_enabled(grad)
        torch.set_autocast_enabled(self.device, cast)
