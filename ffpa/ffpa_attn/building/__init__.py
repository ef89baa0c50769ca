"""From a spec to machine code, or to a module of the emulator. Nothing here imports torch."""
