"""This package makes a spec's kernel ready to launch on a GPU or in the emulator."""
