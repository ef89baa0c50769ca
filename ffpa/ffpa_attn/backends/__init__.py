"""This package computes calls: it has the choice, and a file per candidate that says how it runs one, or why not."""
