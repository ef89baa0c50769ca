"""This package holds every message about bad input."""
