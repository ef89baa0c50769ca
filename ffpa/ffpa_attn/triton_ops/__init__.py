"""This package holds Triton's kernels, the tiles they were measured with, and how they are launched."""
