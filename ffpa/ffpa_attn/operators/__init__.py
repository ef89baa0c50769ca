"""This package is what PyTorch sees: schemas, and what each dispatch key does with a call."""
