"""This module says how the reference path calls PyTorch: its operators, and nothing around them."""

from __future__ import annotations

import torch

from . import private_torch

_set_grad_enabled = private_torch.find("torch._C._set_grad_enabled") or torch.set_grad_enabled


class PlainTorch:
    """A context in which PyTorch's own operators run as the reference path means them: no graph is recorded, nothing is
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
