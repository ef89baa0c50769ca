"""What a call says does not end it where nobody can hear it."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from ffpa_attn import env
from ffpa_attn.support import progress

# This program makes a call with a log of its choice, and with the warning of a fallback.
CALL = """
import os, sys
from dataclasses import replace
import torch, ffpa_attn
from ffpa_attn.backends import choice
choose = choice.choose
choice.choose = lambda *args: replace(choose(*args), fallback="nothing else could do it")
q = torch.randn(1, 1, 4, 32).half()
{stderr}
assert ffpa_attn.ffpa(q, q, q).isfinite().all()
print("computed")
"""
STDERR = {
    "closed": "sys.stderr.close()",
    "broken": "r, w = os.pipe(); os.close(r); sys.stderr = open(w, 'w', buffering=1)",
    "none": "sys.stderr = None",
}


@pytest.mark.parametrize("stderr", STDERR.values(), ids=STDERR)
def test_a_call_whose_words_nobody_hears(stderr):
    environment = env.child_environment(FFPA_LOG="1", PYTHONPATH=str(Path(progress.__file__).parents[2]))
    run = subprocess.run(
        [sys.executable, "-W", "always", "-c", CALL.format(stderr=stderr)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.stdout == "computed\n", run.stderr


def test_a_filter_still_makes_it_an_exception():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="hear this"):
            progress.warn("hear this", 1)
