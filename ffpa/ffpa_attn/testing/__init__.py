"""Tools for tests: building kernels for the CPU emulator. Imported on demand only; nothing in the package needs it."""

from ffpa_attn.testing.emulator_build import build_emulated_module, find_csrc, load_emulated_module

__all__ = ["build_emulated_module", "find_csrc", "load_emulated_module"]
