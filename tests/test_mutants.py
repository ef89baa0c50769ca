"""Tests whether each mistake of tests/mutants/ can still be made."""

from pathlib import Path

import pytest
from mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted({mutant.file for mutant in MUTANTS})


@pytest.mark.parametrize("file", FILES)
def test_they_apply(file):
    text = (ROOT / file).read_text()
    mutants = [mutant for mutant in MUTANTS if mutant.file == file]
    assert not [mutant.name for mutant in mutants if mutant.old not in text or mutant.new == mutant.old]
    assert len({(mutant.name, mutant.old, mutant.new) for mutant in mutants}) == len(mutants), "one is there twice"


@pytest.mark.parametrize(
    "file", sorted({word for mutant in MUTANTS for word in mutant.tests.split() if word.endswith(".py")})
)
def test_the_tests_that_should_notice_are_there(file):
    assert (ROOT / file).is_file()
