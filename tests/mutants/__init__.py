"""This package holds small mistakes, each of which a test should notice; `__main__.py` makes them one at a time."""

from . import (  # fmt: skip
    append,
    backward,
    building,
    calls,
    distributed,
    hopper,
    integrations,
    mma,
    operators,
    packed,
    paged,
    scores,
    sinks,
    triton,
)

AREAS = (
    append,
    backward,
    building,
    calls,
    distributed,
    hopper,
    integrations,
    mma,
    operators,
    packed,
    paged,
    scores,
    sinks,
    triton,
)
MUTANTS = [mutant for area in AREAS for mutant in area.MUTANTS]
