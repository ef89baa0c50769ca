"""This package holds small mistakes, each of which a test should notice; `__main__.py` makes them one at a time."""

from . import backward, building, calls, distributed, hopper, integrations, mma, operators, scores, sinks, triton

MUTANTS = [
    mutant
    for area in (backward, building, calls, distributed, hopper, integrations, mma, operators, scores, sinks, triton)
    for mutant in area.MUTANTS
]
