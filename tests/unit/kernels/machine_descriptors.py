"""The descriptors of shared memory that a compiled kernel's warpgroup products take, followed through its machine code.

CUDA 12.8's assembler leaves a sum unwritten when one place in shared memory is read by products under two kinds of descriptor; the product then reads
anywhere. So integers that are the same in all threads are followed from the constants on, through general and uniform registers, carries and the stack,
and what a product takes is compared with what the PTX says. Loops go round as often as asked; what depends on anything else is None.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["BASE", "descriptors"]

BASE = 0x400
"""Where a block's shared memory begins on Hopper."""

_WORD = 0xFFFFFFFF
_REGISTER = re.compile(r"(UR|R)(\d+)$")


class _Instruction(NamedTuple):
    predicated: bool
    parts: list[str]
    operands: list[str]


def _parsed(sass: str) -> tuple[list[_Instruction], dict[str, int]]:
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\.(L_x_\d+):", line.strip()):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?);", line):
            operands = [x.strip().replace(".reuse", "") for x in re.split(r",(?![^\[]*\])", found[3])]
            code.append(_Instruction(found[1] is not None, found[2].split("."), operands))
    return code, labels


class _Thread:
    def __init__(self) -> None:
        self.held: dict[tuple[str, int], int] = {}
        self.carries: dict[str, int | None] = {}
        self.stack: dict[int, int | None] = {}

    def value(self, operand: str) -> int | None:
        if operand[0] in "-~":
            value = self.value(operand[1:])
            return None if value is None else (-value if operand[0] == "-" else ~value) & _WORD
        if operand in ("RZ", "URZ", "SRZ"):
            return 0
        if register := _REGISTER.match(operand):
            return self.held.get((register[1], int(register[2])))
        return int(operand, 0) & _WORD if re.match(r"(0x[0-9a-f]+|\d+)$", operand) else None

    def pair(self, kind: str, at: int) -> int | None:
        low, high = self.held.get((kind, at)), self.held.get((kind, at + 1))
        return None if low is None or high is None else low | high << 32

    def put(self, kind: str, at: int, value: int | None) -> None:
        self.held.pop((kind, at), None)
        if value is not None:
            self.held[kind, at] = value & _WORD

    def wide(self, operand: str) -> int | None:
        if operand[0] == "-" and not operand[1].isdigit():
            value = self.wide(operand[1:])
            return None if value is None else -value
        register = _REGISTER.match(operand)
        return self.pair(register[1], int(register[2])) if register else 0 if operand in ("RZ", "URZ") else int(operand, 0)

    def added(self, one: _Instruction) -> int | None:
        """IADD3: up to two predicates for carries out, three terms, with .X carries in."""
        rest = one.operands[1:]
        into = []
        while re.match(r"U?P[\dT]$", rest[0]):
            into.append(rest.pop(0))
        total = [self.value(x) for x in rest[:3]]
        if "X" in one.parts:
            total += [0 if x in ("!PT", "!UPT") else self.carries.get(x) for x in rest[3:]]
        for carry in into:
            self.carries[carry] = None
        if any(x is None for x in total):
            return None
        found = sum(x for x in total if x is not None)
        if into:
            self.carries[into[0]] = found >> 32 & 1
        return found

    def computed(self, one: _Instruction) -> int | None:
        name = one.parts[0].removeprefix("U") if one.parts[0] != "ULDC" else ""
        terms = [self.value(x) for x in one.operands[1:] if not re.match(r"!?U?P[\dT]$", x)]
        if name == "IADD3":
            return self.added(one)
        if name in ("S2R", "S2UR"):
            return 0 if "CgaCtaId" in one.operands[1] else None
        if None in terms or not terms:
            return None
        x, y, z = (*(t or 0 for t in terms), 0, 0)[:3]
        signed = z - (1 << 32) if z >> 31 and "U32" not in one.parts else z
        if name in ("MOV", "R2UR"):
            return x
        if name == "VIADD":
            return x + y
        if name == "LEA" and "HI" not in one.parts:
            return (x << z & _WORD) + y
        if name == "SHF":
            right = signed >> y if "HI" in one.parts else (z << 32 | x) >> y
            return right if "R" in one.parts else (z << 32 | x) << y >> 32 if "HI" in one.parts else x << y
        if name == "SGXT":
            low = x & (1 << y) - 1
            return low - (1 << y) if "U32" not in one.parts and low >> y - 1 else low
        if name == "LOP3":
            table = terms[3] or 0
            minterms = [(x if b & 4 else ~x) & (y if b & 2 else ~y) & (z if b & 1 else ~z) for b in range(8) if table >> b & 1]
            return sum(m & _WORD for m in minterms)
        return x * y + z if name == "IMAD" and not {"HI", "WIDE"} & set(one.parts) else None


def descriptors(sass: str, turns: int) -> list[int | None]:
    """Of every warpgroup product, in order: the left operand's descriptor where it is in shared memory, and the right one's, as if the block's shared memory
    began at zero. turns: how often each loop is gone round."""
    code, labels = _parsed(sass)
    thread, found = _Thread(), []
    gone: dict[int, int] = {}
    at = 0
    while at < len(code):
        one = code[at]
        at += 1
        name, operands = one.parts[0], one.operands
        if name == "EXIT" and not one.predicated:
            break
        if name == "BRA":
            to = labels[re.findall(r"L_x_\d+", operands[-1])[0]]
            gone[at] = gone.get(at, 0) + 1
            if to < at and one.predicated and gone[at] % turns:
                at = to
            elif not one.predicated:
                if to < at:
                    break
                at = to
        elif name == "HGMMA":
            first = int(re.findall(r"gdesc\[UR(\d+)\]", " ".join(operands))[0])
            taken = [thread.pair("UR", first)] if "gdesc" in operands[1] else []
            found += [None if d is None else d - (BASE >> 4) for d in (*taken, thread.pair("UR", first + 2))]
        elif name == "STL":
            place, register = re.findall(r"0x[0-9a-f]+", operands[0]), _REGISTER.match(operands[1])
            for i in range(int(one.parts[1]) // 32 if one.parts[-1].isdigit() else 1):
                thread.stack[(int(place[0], 16) if place else 0) + 4 * i] = thread.held.get((register[1], int(register[2]) + i)) if register else 0
        elif (into := _REGISTER.match(operands[0])) and not name.startswith(("ST", "RED")):
            kind, first = into[1], int(into[2])
            values: list[int | None] = [None] * (4 if "128" in one.parts else 2 if {"64", "WIDE"} & set(one.parts) else 1)
            if name == "LDL":
                place = re.findall(r"0x[0-9a-f]+", operands[1])
                values = [thread.stack.get((int(place[0], 16) if place else 0) + 4 * i) for i in range(len(values))]
            elif name == "CS2R":
                values = [0 if operands[1] == "SRZ" else None] * 2
            elif name == "UIADD3" and "64" in one.parts:
                terms = [thread.wide(x) for x in operands[1:]]
                total = None if None in terms else sum(t or 0 for t in terms) & (1 << 64) - 1
                values = [total, None if total is None else total >> 32]
            elif not one.predicated:
                values[0] = thread.computed(one)
            for i, value in enumerate(values):
                thread.put(kind, first + i, None if one.predicated else value)
    return found
