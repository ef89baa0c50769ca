"""Injects some of the faults that `faults.py` injects by the hundred."""

import faults
import pytest


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("kind", faults.BUILDS)
def test_after_a_fault_the_library_is_there_and_right(monkeypatch, fault, kind):
    monkeypatch.setattr(faults, "FAULTS", (fault,))
    monkeypatch.setattr(faults, "BUILDS", {kind: faults.BUILDS[kind]})
    assert faults.inject(1, processes=3, seed=0) == {fault.__name__: 1}
