"""Reads a disassembled Hopper kernel and says which of its wgmma may take a shared-memory descriptor that is none.

ptxas 12.8, of Triton 3.6, drops or misplaces the copy of a register that descriptors are made from: products then read
what an older value points at. Here values are followed through the code as ranges: at every wgmma a descriptor's upper
word, which says how a tile is laid out, is one constant that the PTX has, and the lower one is an address of 14 bits.
"""

import re
import struct
from typing import NamedTuple

Range = tuple[int, int]
ANY: Range = (0, 2**32 - 1)
_WORD = 2**32
_RESERVED_BYTES = 0x400  # address at which a kernel's own shared memory begins

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L\w+):")
_REGISTER = re.compile(r"^(U?R)(\d+)(?:\.\w+)*$")

_JUMPS = ("BRA", "JMP", "BRX")


class Instruction(NamedTuple):
    address: str
    predicate: str | None
    name: str
    operands: list[str]
    target: str | None


def parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    instructions, labels = [], {}
    for line in sass.split("\n"):
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(instructions)
            continue
        found = _LINE.search(line)
        if found:
            target = re.search(r"\((\.L\w+)\)", found[4])
            operands = [x.strip() for x in re.split(r",(?![^\[]*\])", found[4])]
            instructions.append(Instruction(found[1], found[2], found[3], operands, target and target[1]))
    return instructions, labels


def _followers(instructions, labels) -> list[list[int]]:
    result = []
    for i, (_, predicate, name, operands, target) in enumerate(instructions):
        jumps, conditional = name.split(".")[0] in _JUMPS, predicate is not None or len(operands) > 1
        ends = (name.split(".")[0] in (*_JUMPS, "EXIT", "RET")) and not conditional
        nexts = [] if ends else [i + 1]
        if jumps and target in labels:
            nexts.append(labels[target])
        result.append([n for n in nexts if n < len(instructions)])
    return result


def _value(operand: str, state: dict) -> Range:
    operand = operand.removesuffix(".reuse")
    if operand in ("RZ", "URZ"):
        return 0, 0
    if re.fullmatch(r"-?0x[0-9a-f]+", operand):
        number = int(operand, 16) % _WORD
        return number, number
    return state.get(operand, ANY)


def _sum(*values: Range) -> tuple[Range, Range]:
    """Returns (the sum's word, its carry)."""
    low, high = sum(x[0] for x in values), sum(x[1] for x in values)
    if low // _WORD == high // _WORD:
        return (low % _WORD, high % _WORD), (low // _WORD, low // _WORD)
    return ANY, (low // _WORD, high // _WORD)


def _two(register: str) -> tuple[str, str]:
    """Returns a register and the next."""
    prefix, number = re.match(r"(U?R)(\d+)", register).groups()
    return register, f"{prefix}{int(number) + 1}"


def _pair(operand: str, state: dict) -> tuple[int, int] | None:
    """Returns a value of 64 bits as a range, or None if it may be any."""
    negative, name = operand.startswith("-"), operand.removeprefix("-")
    if name in ("URZ", "RZ"):
        return 0, 0
    if re.fullmatch(r"0x[0-9a-f]+", name):
        low = high = int(name, 16)
    else:
        lower, upper = (state.get(x, ANY) for x in _two(name))
        if upper[0] != upper[1]:
            return None
        low, high = (upper[0] * _WORD + x for x in lower)
    return (-high, -low) if negative else (low, high)


def _sum_of_64(a, b) -> tuple[Range, Range]:
    if a is None or b is None:
        return ANY, ANY
    low, high = a[0] + b[0], a[1] + b[1]
    upper = low // _WORD % _WORD
    if low // _WORD != high // _WORD:
        return ANY, ANY
    return (low % _WORD, high % _WORD), (upper, upper)


def _carries(operands: list[str]) -> list[str]:
    return [x for x in operands if re.fullmatch(r"!?U?P[0-9T]", x)]


def _results(x: Instruction, state: dict) -> dict[str, Range]:
    """Returns what an instruction leaves, where it is one of those that make descriptors."""
    name, operands = x.name, x.operands
    kind = name.removeprefix("U")
    first = operands[0]
    predicates = _carries(operands[1:])
    given = [y for y in operands[1:] if y not in predicates]
    if kind in ("MOV", "IMAD.MOV.U32", "IMAD.U32", "IMAD.MOV") and (kind == "MOV" or given[:2] == ["RZ", "RZ"]):
        return {first: _value(given[0] if kind == "MOV" else given[2], state)}
    if name == "R2UR":
        return {first: _value(given[-1], state)}
    if name == "S2UR" or name == "S2R":
        return {first: (0, 0) if operands[1] == "SR_CgaCtaId" else ANY}
    if kind in ("IADD3", "IADD3.X"):
        values = [_value(y, state) for y in given[:3]]
        if kind.endswith(".X"):
            came = [p for p in predicates if p not in ("!UPT", "!PT")]
            values += [state.get(p, (0, 1)) for p in came]
        total, carry = _sum(*values)
        leaves = {first: total}
        if not kind.endswith(".X") and len(operands) > 1 and operands[1] in predicates:
            leaves[operands[1]] = carry
        return leaves
    if kind == "IADD3.64":
        low, high = _sum_of_64(*(_pair(y, state) for y in given[:2]))
        return dict(zip(_two(first), (low, high), strict=True))
    if name.startswith(("STL", "LDL")):
        stored, place = (operands[1], first) if name.startswith("STL") else (first, operands[1])
        base, step = re.fullmatch(r"\[(R\d+)(?:\+(0x[0-9a-f]+))?\]", place).groups()
        words = 4 if ".128" in name else 2 if ".64" in name else 1
        number = int(stored.removesuffix(".reuse")[1:]) if stored[1:2].isdigit() else None
        leaves = {}
        for i in range(words):
            slot, register = f"{base}+{int(step or '0', 16) + 4 * i}", f"R{number + i}" if number is not None else "RZ"
            if name.startswith("STL"):
                leaves[slot] = _value(register, state)
            else:
                leaves[register] = state.get(slot, ANY)
        return leaves
    if name.startswith("CS2R") and operands[1] == "SRZ":
        return dict.fromkeys(_two(first)[: 1 if name.endswith(".32") else 2], (0, 0))
    if name.startswith("HFMA2") and given[0] in ("-RZ", "RZ") and given[1] == "RZ" and len(given) == 4:
        halves = [int.from_bytes(struct.pack("<e", float(y)), "little") for y in given[2:]]
        return {first: (halves[0] << 16 | halves[1],) * 2}
    if kind == "VIADD":
        return {first: _sum(*(_value(y, state) for y in given[:2]))[0]}
    if kind == "IMAD.X" and given[:2] == ["RZ", "RZ"]:
        return {first: _sum(_value(given[2], state), *(state.get(p, (0, 1)) for p in predicates[:1]))[0]}
    if kind in ("SGXT.U32",):
        value, bits = _value(given[0], state), _value(given[1], state)
        most = 2 ** bits[0] - 1
        return {first: value if value[1] <= most else (0, most)}
    if kind in ("SHF.R.U32.HI", "SHF.R.U32"):
        shift, value = _value(given[1], state), _value(given[2] if kind.endswith("HI") else given[0], state)
        return {first: (value[0] >> shift[0], value[1] >> shift[0])} if shift[0] == shift[1] else {first: ANY}
    if kind == "LOP3.LUT":
        masks = [_value(y, state) for y in given[:3]]
        if given[3] == "0xc0":  # a & b
            return {first: (0, min(masks[0][1], masks[1][1]))}
        if given[3] == "0x3c":  # a ^ b: three of them let two registers change places
            for one, other in ((0, 1), (1, 0)):
                mixed = state.get(f"^{given[one]}", ())
                if masks[other] in mixed:
                    return {first: mixed[1 - mixed.index(masks[other])]}
            return {first: ANY, f"^{first}": (masks[0], masks[1])}
        return {first: ANY}
    if kind == "SEL":
        a, b = _value(given[0], state), _value(given[1], state)
        return {first: (min(a[0], b[0]), max(a[1], b[1]))}
    if kind == "LEA":
        values = [_value(y, state) for y in given[:3]]
        if all(a == b for a, b in values):
            return {first: ((values[0][0] << values[2][0]) % _WORD + values[1][0],) * 2}
    return {}


def _written(x: Instruction) -> list[str]:
    """Returns the registers and predicates that an instruction may write, at least."""
    names = []
    for position, operand in enumerate(x.operands[:2]):
        operand = operand.removesuffix(".reuse")
        if re.fullmatch(r"U?P\d", operand):
            names.append(operand)
        found = _REGISTER.match(operand)
        if position == 0 and found and not x.name.startswith(("ST", "RED", "BAR", "EXIT")):
            wide = 1
            if x.name.startswith("HGMMA"):
                wide = int(re.match(r"HGMMA\.\d+x(\d+)", x.name)[1]) // 2
            elif ".64" in x.name or ".WIDE" in x.name or x.name.startswith("CS2R"):
                wide = 2
            elif found[1] == "R" and (x.name.startswith(("LDSM", "HMMA", "IMMA", "QMMA")) or ".128" in x.name):
                wide = 4
            names += [f"{found[1]}{int(found[2]) + i}" for i in range(wide)]
    return names


def _after(x: Instruction, state: dict) -> dict:
    results = _results(x, state)
    changed = dict.fromkeys(_written(x), ANY) | results
    for name in changed:
        if re.fullmatch(r"U?P\d", name) and name not in results:
            changed[name] = (0, 1)
    if not changed:
        return state
    after = dict(state)
    for name, value in changed.items():
        after.pop(f"^{name}", None)
        if x.predicate and not name.startswith("^"):
            before = state.get(name, ANY)
            value = min(before[0], value[0]), max(before[1], value[1])
        after[name] = value
    return after


def _span(a: Range, b: Range) -> Range:
    return min(a[0], b[0]), max(a[1], b[1])


def _joined(a: dict, b: dict) -> dict:
    """Joins the states of two ways to a place; what is not in both is ANY."""
    both = {}
    for name in a.keys() & b.keys():
        if name.startswith("^"):
            both[name] = tuple(map(_span, a[name], b[name]))
        else:
            both[name] = _span(a[name], b[name])
    return both


def _states(instructions, labels) -> list[dict | None]:
    followers = _followers(instructions, labels)
    states: list[dict | None] = [None] * len(instructions)
    visits = [0] * len(instructions)
    states[0], pending = {}, [0]
    while pending:
        i = pending.pop()
        after = _after(instructions[i], states[i])
        for n in followers[i]:
            if states[n] is None:
                new = after
            elif states[n] is after:
                continue
            else:
                new = _joined(states[n], after)
                if new == states[n]:
                    continue
                visits[n] += 1
                if visits[n] > 8:  # a value that still grows may be anything
                    new = {name: value for name, value in new.items() if states[n].get(name) == value}
            states[n] = new
            pending.append(n)
    return states


def _descriptors(x: Instruction) -> list[int]:
    """Returns uniform registers at which a wgmma's descriptors begin: A's, if it is in shared memory, and B's."""
    at = [int(n) for y in x.operands for n in re.findall(r"gdesc\[UR(\d+)\]", y)]
    if not at:
        return []
    a_in_registers = bool(re.match(r"^R\d+", x.operands[1]))
    return [n + 2 for n in at] if a_in_registers else [n + step for n in at for step in (0, 2)]


def wrong(sass: str, ptx: str, shared_bytes: int) -> list[str]:
    """Returns what may be no descriptor, one line each."""
    uppers = set()
    for number in re.findall(r"-?\d{15,}", ptx):
        upper = int(number) % 2**64 >> 32
        uppers.add(upper)
    instructions, labels = parse(sass)
    found = []
    for x, state in zip(instructions, _states(instructions, labels), strict=True):
        if state is None:
            continue
        for n in _descriptors(x):
            low, high = state.get(f"UR{n}", ANY), state.get(f"UR{n + 1}", ANY)
            if high[0] != high[1] or high[0] not in uppers:
                found.append(f"{x.address} {x.name}: UR{n + 1} is {high[0]:#x} to {high[1]:#x}")
            elif low[0] == low[1] and not 0 <= ((low[0] & 0x3FFF) << 4) - _RESERVED_BYTES < shared_bytes:
                found.append(f"{x.address} {x.name}: UR{n} is {low[0]:#x}, and there are {shared_bytes} bytes")
    return found
