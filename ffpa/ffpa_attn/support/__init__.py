"""This package is what surrounds the others: PyTorch's private names, other packages, and what is said at work."""
