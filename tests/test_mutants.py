"""The mistakes that .dev/mutants.py makes on purpose: whether each can still be made."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / ".dev" / "mutants.py"
MUTANTS = runpy.run_path(str(SCRIPT), run_name="mutants")["MUTANTS"]
FILES = sorted({mutant.file for mutant in MUTANTS})


@pytest.mark.parametrize("file", FILES)
def test_they_apply(file):
    text = (SCRIPT.parents[1] / file).read_text()
    mutants = [mutant for mutant in MUTANTS if mutant.file == file]
    assert not [mutant.name for mutant in mutants if mutant.old not in text or mutant.new == mutant.old]
    assert len({(mutant.name, mutant.old, mutant.new) for mutant in mutants}) == len(mutants), "one is there twice"


@pytest.mark.parametrize(
    "file", sorted({word for mutant in MUTANTS for word in mutant.tests.split() if word.endswith(".py")})
)
def test_the_tests_that_should_notice_are_there(file):
    assert (SCRIPT.parents[1] / file).is_file()
