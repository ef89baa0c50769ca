"""This is the one place that names the version; it imports nothing, so the build can read it without torch."""

__version__ = "1.0.0.dev0"
