"""Who computes a call: the choice, and a file for each that says how it would run one, or why it cannot."""
