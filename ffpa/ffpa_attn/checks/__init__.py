"""Every message about bad input."""
