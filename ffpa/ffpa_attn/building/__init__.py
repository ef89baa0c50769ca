"""This package goes from a spec to machine code, or to a module of the emulator. Nothing here imports torch."""
