"""Tools for tests are here, imported on demand only: shipped kernels in the emulator, and builds of other kernels."""

from ..building.emulator_build import build_emulated_module, load_emulated_module

__all__ = ["build_emulated_module", "emulate", "load_emulated_module"]


def __getattr__(name: str):
    if name == "emulate":  # it needs torch, which building a module does not
        from ..launching.emulated import emulate

        return emulate
    raise AttributeError(name)
