"""Tests the first look: `python -m ffpa_attn.demo`."""

import re

import pytest
import torch
from ffpa_attn import demo


@pytest.mark.long(seconds=25)
def test_it_says_what_it_found(capsys):
    demo.main()
    said = capsys.readouterr().out
    if torch.cuda.is_available():
        errors = [
            list(map(float, line.split()[-2:])) for line in said.splitlines() if line.startswith(("ffpa", "SDPA"))
        ]
        assert len(errors) == 2 and all(0 < error < 0.1 for both in errors for error in both), said
        assert "The forward ran on " in said
    else:
        assert 0 < float(re.search(r"beside float64 is ([\d.]+)\.\n", said)[1]) < 0.05, said
        assert [line.split(",")[0] for line in said.splitlines() if line.startswith("On ")] == [
            "On sm_80",
            "On sm_89",
            "On sm_90",
        ]


def test_without_a_compiler(monkeypatch, capsys):
    """The demo says so, and goes on."""

    def none(*_, **__):
        raise demo.BuildError("there is no g++")

    monkeypatch.setattr("ffpa_attn.testing.emulate", none, raising=False)
    demo._in_the_emulator()
    said = capsys.readouterr().out
    assert "cannot be built here: there is no g++" in said and said.count("\nOn sm_") == 3
