"""Builds the emulator's test module once per session, and wraps it for the tests."""

from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent


class Run:
    """One run of a test kernel: the outcome and what the emulator found."""

    def __init__(self, status, report):
        self.status = status
        self.errors = report["errors"]
        self.bank_conflicts = report["bank_conflicts"]
        self.counters = report["counters"]

    @property
    def kinds(self):
        return {error["kind"] for error in self.errors}

    def conflicts_of(self, instruction):
        return [entry for entry in self.bank_conflicts if entry["instruction"] == instruction]


def apart(array):
    """Returns a copy with 64 KiB of slack on both sides: an access past its end meets no other tensor."""
    slack = 1 << 16
    buffer = np.full(array.nbytes + 2 * slack, 0xFF, np.uint8)
    view = buffer[slack : slack + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


class Emulator:
    def __init__(self, module):
        self.module = module

    def run(self, name, inputs=(), outputs=(), integers=(), numbers=(), **options):
        self.module.configure(**options)
        inputs, results = [apart(array) for array in inputs], [apart(array) for array in outputs]
        status, report = self.module.run(name, inputs, results, list(integers), list(numbers))
        for output, result in zip(outputs, results, strict=True):
            output[...] = result
        assert bool(status) == bool(report["errors"]), "a launch fails exactly when its report has errors"
        return Run(status, report)

    def run_case(self, name, input_words, output_words, **options):
        """Runs a case on an array of words; returns its output and the run."""
        output = np.full(output_words, 0xCDCDCDCD, dtype=np.uint32)
        run = self.run(name, [np.ascontiguousarray(input_words, dtype=np.uint32)], [output], **options)
        return output, run


@pytest.fixture(scope="session")
def emulator():
    from ffpa_attn.testing import load_emulated_module

    sources = [HERE / "module.cpp", *sorted(HERE.glob("*.cu"))]
    return Emulator(load_emulated_module("ffpa_emulator_tests", sources, include_dirs=[HERE]))
