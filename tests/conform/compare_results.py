"""Compares a GPU's results with the emulator's: ``compare_results.py gpu.bin emu.bin [--list functions.txt] [--arch
90]``.

Cases are compared bit for bit, but for the approximate functions, whose bound in ulps is part of the file. Fails when
anything differs, and when fewer functions or configurations were compared than the list asks for.
"""

import argparse
import struct
import sys
from collections import Counter
from pathlib import Path

import numpy as np

HEADER = struct.Struct("<64sdQ")


def read(path):
    """Returns {case name: (ulp bound, words)}."""
    data, offset, cases = Path(path).read_bytes(), 0, {}
    while offset < len(data):
        name, bound, count = HEADER.unpack_from(data, offset)
        offset += HEADER.size
        cases[name.rstrip(b"\0").decode()] = (bound, np.frombuffer(data, np.uint32, count, offset))
        offset += 4 * count
    return cases


def read_list(path, arch):
    """Returns {function: configurations that must be compared} for everything that the architecture has."""
    wanted = {}
    for line in Path(path).read_text().splitlines():
        line = line.split("#")[0].split()
        if line and int(line[1]) <= arch:
            wanted[line[0]] = int(line[2])
    return wanted


def ordered(words):
    """Returns floats' bits as integers that count ulps."""
    signed = words.view(np.int32).astype(np.int64)
    return np.where(signed < 0, -(signed & 0x7FFFFFFF), signed)


def differences(gpu, emulated, bound):
    """Returns (how many values differ by more than the bound, the largest distance in ulps, or 0 for exact cases)."""
    if not bound:
        return int((gpu != emulated).sum()), 0
    distance = np.abs(ordered(gpu) - ordered(emulated))
    return int((distance > bound).sum()), int(distance.max(initial=0))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpu")
    parser.add_argument("emulator")
    parser.add_argument("--list", default=Path(__file__).with_name("functions.txt"))
    parser.add_argument("--arch", type=int, default=90)
    arguments = parser.parse_args()
    gpu, emulated = read(arguments.gpu), read(arguments.emulator)
    wrong = []
    compared = Counter()
    values = 0
    for name in sorted(gpu.keys() | emulated.keys()):
        if name not in gpu or name not in emulated:
            wrong.append(f"{name}: only one side has it")
            continue
        (bound, left), (_, right) = gpu[name], emulated[name]
        if left.shape != right.shape:
            wrong.append(f"{name}: {left.size} against {right.size} values")
            continue
        count, worst = differences(left, right, bound)
        note = f", within {worst} ulp (bound {bound:g})" if bound else ""
        print(f"{name:36s} {left.size:8d} values, {count} differ{note}")
        if count:
            wrong.append(f"{name}: {count} of {left.size} values differ")
        compared[name.split("/")[0]] += 1
        values += left.size
    wanted = read_list(arguments.list, arguments.arch)
    for function, configurations in wanted.items():
        if compared[function] < configurations:
            wrong.append(
                f"{function}: {compared[function]} configurations compared, the list asks for {configurations}"
            )
    listed = sum(1 for function in compared if function in wanted)
    print(f"compared {listed} listed functions, {sum(compared.values())} configurations, {values} values")
    for line in wrong:
        print(f"WRONG {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
