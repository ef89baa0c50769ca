"""What surrounds the package: PyTorch's private names, other packages, and what is said while it works."""
