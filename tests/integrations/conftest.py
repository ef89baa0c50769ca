"""Tests of ways that lead to ffpa ask which calls it gets."""

import pytest
from ffpa_attn.integrations import sdpa_override


@pytest.fixture
def taken(monkeypatch):
    """Gives a list that grows with each call that ffpa gets."""
    calls, ffpa = [], sdpa_override.ffpa
    monkeypatch.setattr(
        sdpa_override, "ffpa", lambda *args, **options: (calls.append(options), ffpa(*args, **options))[1]
    )
    return calls
