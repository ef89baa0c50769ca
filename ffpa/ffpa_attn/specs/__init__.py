"""This package says which kernels there are, by what they compute, and what they may take of a GPU."""
