"""Run the PTX of a kernel that Triton compiled for Hopper on the CPU: all threads of a block in lockstep, on a memory of their own.

It shows what interpreting the source cannot: that layouts, moves through shared memory, matrix instructions and their descriptors do what was asked.
An address outside memory, a misaligned one and a read of shared memory that nothing wrote are refused; shared memory that another warp wrote or reads with no
barrier between, and ordinary writes that wgmma reads with no fence between, are reported as hazards. Shared memory is as large as the kernel asked for.
Branches must be uniform in a block; asynchronous copies land when they are waited for. What ptxas makes of the PTX is not seen (machine_code.py looks).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from driftline.kernels.offline import CompiledKernel, compiling_for

__all__ = ["Launched", "Machine", "launches_of", "run_on_cpu"]

Array = np.ndarray[Any, Any]
U16, U32, U64 = np.uint16, np.uint32, np.uint64
_UNSIGNED = {"16": U16, "32": U32, "64": U64}
_SIGNED = {"16": np.int16, "32": np.int32, "64": np.int64}
_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "lt": lambda x, y: x < y, "gt": lambda x, y: x > y, "le": lambda x, y: x <= y, "ge": lambda x, y: x >= y, "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y, "num": lambda x, y: (x == x) & (y == y), "nan": lambda x, y: (x != x) | (y != y)}
_ARITHMETIC: dict[str, Callable[..., Array]] = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "min": np.minimum, "max": np.maximum, "and": lambda x, y: x & y,
    "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y, "not": lambda x: ~x, "neg": lambda x: -x, "mad": lambda x, y, z: x * y + z}
_FLOATS: dict[str, Callable[..., Array]] = _ARITHMETIC | {
    "div": lambda x, y: x / y, "fma": lambda x, y, z: x.astype(np.float64) * y + z, "min": np.fmin, "max": np.fmax}
_FLOAT_UNITS: dict[str, Callable[[Array], Array]] = {"ex2": np.exp2, "rsqrt": lambda x: 1 / np.sqrt(x)}
_DECODED: dict[str, Callable[[Array], Array]] = {
    "bf16": lambda x: (x.astype(U32) << 16).view(np.float32), "f16": lambda x: x.view(np.float16).astype(np.float32),
    "tf32": lambda x: (x & U32(0xFFFFE000)).view(np.float32)}
_IGNORED = ("wgmma.fence", "wgmma.commit", "wgmma.wait", "membar", "griddepcontrol", "prefetch")
_NOBODY, _SEVERAL = -1, -2


class Launched(NamedTuple):
    """A launch that was compiled and not run, with the arguments that its code still takes: Triton folds an integer of 1."""

    kernel: CompiledKernel
    arguments: tuple[Any, ...]


class Line(NamedTuple):
    predicate: str
    negated: bool
    name: str
    parts: list[str]
    operands: list[str]
    text: str


def _floats(bits: Array) -> Array:
    return bits.astype(U32).view(np.float32)


def _to_bfloat16(values: Array) -> Array:
    bits = values.view(U32)
    return ((bits + U32(0x7FFF) + ((bits >> 16) & U32(1))) >> 16) & U32(0xFFFF)


def _to_float16(values: Array) -> Array:
    return values.astype(np.float16).view(U16).astype(U32)


def _inside(braces: str) -> list[str]:
    return [x.strip() for x in braces.strip("{} ").split(",")]


def _parse(ptx: str) -> tuple[list[Line], dict[str, int]]:
    body = re.sub(r"//[^\n]*", "", ptx[ptx.index("{", ptx.index(".entry")) + 1 :])
    lines: list[Line] = []
    labels: dict[str, int] = {}
    held = ""
    for raw in body.splitlines():
        text = raw.strip()
        if not text or text in "{}" or text.startswith((".loc", ".reg", ".pragma")):
            continue
        if text.startswith((".section", ".b8", ".file")):
            break
        label = re.match(r"^(\$\w+):", text)
        if label:
            labels[label[1]] = len(lines)
            continue
        held = f"{held} {text}".strip()
        if held.endswith(";"):
            for part in filter(None, (p.strip() for p in held.split(";"))):
                found = re.match(r"^(?:@(!?)(%p\d+)\s+)?([\w.:]+)\s*(.*)$", part)
                assert found is not None, part
                operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", found[4])
                lines.append(Line(found[2] or "", bool(found[1]), found[3], found[3].split("."), operands, part))
            held = ""
    return lines, labels


class Machine:
    """One kernel's PTX. `run` runs one block on `memory`, bytes that pointers are offsets into, and adds to `hazards`, and to `tiles`
    the descriptors that products take."""

    def __init__(self, kernel: CompiledKernel) -> None:
        self.lines, self.labels = _parse(kernel.ptx)
        self.parameters = re.findall(r"\.param \.\w+[^\n,]*?(\w+_param_\d+)", kernel.ptx)
        self.threads, self.room = 32 * kernel.warps, kernel.shared
        self.thread = np.arange(self.threads)
        self.warp, self.lane = self.thread // 32, self.thread % 32
        self.hazards: set[str] = set()
        self.tiles: list[int] = []

    def run(self, arguments: Sequence[int], block: tuple[int, int, int], memory: Array) -> None:
        assert len(arguments) == len(self.parameters), "arguments do not match the kernel's parameters"
        self.values: dict[str, Array] = {}
        self.given, self.block, self.memory = dict(zip(self.parameters, arguments, strict=True)), block, memory
        self.shared = np.zeros(self.room, np.uint8)
        self.written, self.fenced = np.zeros(self.room, bool), np.ones(self.room, bool)
        self.writer, self.reader, self.write_epoch, self.read_epoch = (np.full(self.room, _NOBODY) for _ in range(4))
        self.epoch, at = 0, 0
        self.copies: list[list[tuple[Array, Array, Array, str]]] = [[]]
        with np.errstate(all="ignore"):
            while at < len(self.lines):
                line = self.lines[at]
                at += 1
                live = np.ones(self.threads, bool)
                if line.predicate:
                    live = ~self.values[line.predicate] if line.negated else self.values[line.predicate]
                if line.parts[0] == "ret":
                    return
                if line.parts[0] == "bra":
                    assert live.all() or not live.any(), f"threads part: {line.text}"
                    at = self.labels[line.operands[-1]] if live.all() else at
                else:
                    self._step(line, live)

    def _value(self, operand: str, kind: Any = U32) -> Array:
        if operand.startswith("%tid"):
            return self.thread.astype(U32)
        if operand.startswith("%ctaid"):
            return np.full(self.threads, self.block["xyz".index(operand[-1])], U32)
        if operand[0] == "%":
            return self.values[operand]
        number = 0 if operand == "global_smem" else int(operand[2:], 16) if operand.startswith("0f") else int(operand.rstrip("U"), 0)
        return np.full(self.threads, number % (1 << 8 * np.dtype(kind).itemsize), U64).astype(kind)

    def _set(self, name: str, value: Array, live: Array) -> None:
        if not live.all():
            value = np.where(live, value, self.values.get(name, np.zeros(self.threads, value.dtype)).astype(value.dtype))
        self.values[name] = value

    def _address(self, operand: str) -> Array:
        found = re.match(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        assert found is not None, operand
        return self._value(found[1], U64).astype(np.int64) + (int(found[2], 0) if found[2] else 0)

    def _step(self, line: Line, live: Array) -> None:
        name, parts, a = line.parts[0], line.parts, line.operands
        if line.name.startswith(_IGNORED):
            return
        if name == "bar":
            self.epoch += 1
        elif name == "fence":
            self.fenced[:] = True
        elif name in ("ld", "st"):
            self._parameter(line) if parts[1] == "param" else self._access(line, live)
        elif name == "cp":
            self._copy(line, live)
        elif name in ("ldmatrix", "stmatrix"):
            self._matrices(line, live)
        elif line.name.startswith("wgmma.mma_async"):
            self._multiply(line)
        elif line.name.startswith("mma.sync.aligned.m16n8k16"):
            self._multiply_in_a_warp(line)
        elif name == "mov":
            self._move(parts[1], a, live)
        elif name == "cvt":
            self._set(a[0], self._converted(parts[-2], parts[-1], a[1:]), live)
        elif name == "selp":
            kind = _UNSIGNED[parts[1][1:]]
            self._set(a[0], np.where(self.values[a[3]], self._value(a[1], kind), self._value(a[2], kind)), live)
        elif name == "setp":
            self._set(a[0], _COMPARE[parts[1]](*(self._typed(x, parts[-1]) for x in a[1:])), live)
        elif name == "bfe":
            first, width = int(a[2]), int(a[3])
            field = (self._value(a[1]) >> U32(first)) & U32((1 << width) - 1)
            high = U32((0xFFFFFFFF << width) & 0xFFFFFFFF) if parts[1] == "s32" else U32(0)
            self._set(a[0], np.where((field >> U32(width - 1)) & U32(1), field | high, field).astype(U32), live)
        elif name == "shfl":
            by = self._value(a[2]).astype(np.int64)
            lane = self.lane ^ by if "bfly" in parts else by % 32 if "idx" in parts else np.where(self.lane < by, self.lane, self.lane - by)
            assert {"bfly", "idx", "up"} & set(parts), line.text
            self._set(a[0], self._value(a[1])[32 * self.warp + lane], live)
        elif name == "redux":
            self._set(a[0], self._value(a[1]).astype(np.int64).reshape(-1, 32).sum(1).repeat(32).astype(U32), live)
        elif name in _FLOAT_UNITS:
            self._set(a[0], _FLOAT_UNITS[name](_floats(self._value(a[1]))).astype(np.float32).view(U32), live)
        else:
            self._set(a[0], self._arithmetic(name, parts, a[1:]), live)

    def _typed(self, operand: str, kind: str) -> Array:
        if kind == "f32":
            return _floats(self._value(operand))
        value = self._value(operand, _UNSIGNED[kind[1:]]).astype(_UNSIGNED[kind[1:]])
        return value.view(_SIGNED[kind[1:]]) if kind[0] == "s" else value

    def _arithmetic(self, name: str, parts: list[str], a: list[str]) -> Array:
        kind = parts[-1]
        if kind == "pred":
            return _ARITHMETIC[name](*(self.values[x] for x in a))
        if kind == "f32":
            return _FLOATS[name](*(self._typed(x, kind) for x in a)).astype(np.float32).view(U32)
        if name == "neg" and kind.endswith("f16x2"):
            return self._value(a[0]) ^ U32(0x80008000)
        if name == "neg" and kind.endswith("f16"):
            return self._value(a[0], U16) ^ U16(0x8000)
        unsigned = _UNSIGNED[kind[1:]]
        if name in ("shl", "shr"):
            value = self._typed(a[0], kind)
            by = self._value(a[1]).astype(value.dtype)
            moved: Array = value << by if name == "shl" else value >> by
            return moved.view(unsigned)
        if name == "div":
            x, y = (self._typed(operand, kind) for operand in a)
            return np.trunc(x.astype(np.float64) / y).astype(x.dtype).view(unsigned)
        if name == "prmt":
            both = self._value(a[0]).astype(U64) | (self._value(a[1]).astype(U64) << U64(32))
            chosen = [(both >> (((self._value(a[2]) >> U32(4 * i)) & U32(7)).astype(U64) * U64(8)) & U64(0xFF)) << U64(8 * i) for i in range(4)]
            permuted: Array = (chosen[0] | chosen[1] | chosen[2] | chosen[3]).astype(U32)
            return permuted
        if "wide" in parts:
            product: Array = (self._typed(a[0], kind).astype(np.int64) * self._typed(a[1], kind).astype(np.int64)).view(U64)
            if name == "mad":
                product = product + self._value(a[2], U64).astype(U64)
            return product
        return _ARITHMETIC[name](*(self._typed(x, kind) for x in a)).view(unsigned)

    def _move(self, kind: str, a: list[str], live: Array) -> None:
        if a[0][0] == "{":
            low, high = _inside(a[0])
            word = self._value(a[1])
            self._set(low, (word & U32(0xFFFF)).astype(U16), live)
            self._set(high, (word >> U32(16)).astype(U16), live)
        elif a[1][0] == "{":
            half, bits = (U32, 32) if kind == "b64" else (U16, 16)
            first, second = (self._value(x, half).astype(U64) for x in _inside(a[1]))
            self._set(a[0], (first | (second << U64(bits))).astype(_UNSIGNED[str(2 * bits)]), live)
        elif kind == "pred":
            self._set(a[0], self.values[a[1]] if a[1][0] == "%" else np.full(self.threads, bool(int(a[1]))), live)
        else:
            self._set(a[0], self._value(a[1], _UNSIGNED[kind[1:]]), live)

    def _converted(self, to: str, kind: str, a: list[str]) -> Array:
        if to in ("bf16x2", "f16x2"):
            narrow = _to_bfloat16 if to == "bf16x2" else _to_float16
            high, low = (narrow(_floats(self._value(x))) for x in a)
            return (high << U32(16)) | low
        if kind == "f32":
            value = _floats(self._value(a[0]))
            if to == "tf32":
                return (value.view(U32) + U32(0x1000)) & U32(0xFFFFE000)
            return (_to_bfloat16(value) if to == "bf16" else _to_float16(value)).astype(U16)
        if to == "f32":
            return _DECODED["bf16"](self._value(a[0], U16)).view(U32)
        value = self._value(a[0])
        value = value.view(_SIGNED[str(8 * value.itemsize)]) if kind[0] == "s" else value
        wide = _SIGNED if to[0] == "s" else _UNSIGNED
        return value.astype((_SIGNED if kind[0] == "s" else _UNSIGNED)[kind[1:]]).astype(wide[to[1:]]).view(_UNSIGNED[to[1:]])

    def _parameter(self, line: Line) -> None:
        value, kind = self.given[line.operands[1].strip("[]")], line.parts[2]
        if line.operands[0].startswith("%rd"):
            self.values[line.operands[0]] = np.full(self.threads, value, np.int64 if kind[0] == "s" else U64).view(U64)
        else:
            self.values[line.operands[0]] = np.full(self.threads, value & 0xFFFFFFFF, U64).astype(U32)

    def _access(self, line: Line, live: Array) -> None:
        vector = next((int(p[1]) for p in line.parts if p in ("v2", "v4")), 1)
        width = int(line.parts[-1][1:]) // 8
        kind = {1: np.uint8, 2: U16, 4: U32, 8: U64}[width]
        load = line.parts[0] == "ld"
        registers, place = line.operands if load else line.operands[::-1]
        names, at, count = _inside(registers), self._address(place), width * vector
        assert not (at[live] % count).any(), f"misaligned: {line.text}"
        if load:
            cells = self._read_shared(at, count, live, line.text) if line.parts[1] == "shared" else self._read_global(at, count, live, line.text)
            words = np.ascontiguousarray(cells).view(kind)
            for i in range(vector):
                self._set(names[i], words[:, i].copy(), live)
            return
        cells = np.stack([self._value(x, kind).astype(kind) for x in names], 1).view(np.uint8).reshape(self.threads, count)
        if line.parts[1] == "shared":
            self._write_shared(at, cells, live, line.text)
        else:
            assert self._held(at[live], count).all(), f"outside memory: {line.text}"
            self.memory[(at[:, None] + np.arange(count))[live]] = cells[live]

    def _held(self, at: Array, count: int) -> Array:
        held: Array = (at > 0) & (at + count <= self.memory.size)
        return held

    def _read_global(self, at: Array, count: int, live: Array, text: str) -> Array:
        assert self._held(at[live], count).all(), f"outside memory: {text}"
        return self.memory[np.where(live, at, 0)[:, None] + np.arange(count)]

    def _read_shared(self, at: Array, count: int, live: Array, text: str) -> Array:
        assert ((at[live] >= 0) & (at[live] + count <= self.room)).all(), f"outside shared memory: {text}"
        cells = np.where(live, at, 0)[:, None] + np.arange(count)
        chosen, mine = cells[live], self.warp[live][:, None]
        assert self.written[chosen].all(), f"nothing was written: {text}"
        if ((self.write_epoch[chosen] == self.epoch) & (self.writer[chosen] != mine)).any():
            self.hazards.add(f"read without a barrier after the write: {text}")
        others = (self.read_epoch[chosen] == self.epoch) & (self.reader[chosen] != mine)
        self.reader[chosen] = np.where(others, _SEVERAL, mine)
        self.read_epoch[chosen] = self.epoch
        return self.shared[cells]

    def _write_shared(self, at: Array, cells: Array, live: Array, text: str, copied: bool = False) -> None:
        assert ((at[live] >= 0) & (at[live] + cells.shape[1] <= self.room)).all(), f"outside shared memory: {text}"
        chosen, mine = (at[:, None] + np.arange(cells.shape[1]))[live], self.warp[live][:, None]
        if ((self.read_epoch[chosen] == self.epoch) & (self.reader[chosen] != mine)).any():
            self.hazards.add(f"write without a barrier after the read: {text}")
        self.shared[chosen], self.written[chosen], self.fenced[chosen] = cells[live], True, copied
        self.writer[chosen], self.write_epoch[chosen] = mine, self.epoch

    def _copy(self, line: Line, live: Array) -> None:
        if "commit_group" in line.parts:
            self.copies.append([])
        elif "wait_group" in line.parts:
            while len(self.copies) > int(line.operands[0]) + 1:
                for at, cells, threads, text in self.copies.pop(0):
                    self._write_shared(at, cells, threads, text, copied=True)
        else:
            at, count = self._address(line.operands[0]), int(line.operands[2], 0)
            size = self._value(line.operands[3]).astype(np.int64) if len(line.operands) > 3 else np.full(self.threads, count)
            cells = self._read_global(self._address(line.operands[1]), count, live & (size > 0), line.text)
            chosen = (at[:, None] + np.arange(count))[live]
            if ((self.read_epoch[chosen] == self.epoch) & (self.reader[chosen] != self.warp[live][:, None])).any():
                self.hazards.add(f"copy without a barrier after the read: {line.text}")
            self.written[chosen] = False
            self.copies[-1].append((at, np.where(np.arange(count) < size[:, None], cells, 0).astype(np.uint8), live.copy(), line.text))

    def _matrices(self, line: Line, live: Array) -> None:
        load = line.parts[0] == "ldmatrix"
        registers, place = line.operands if load else line.operands[::-1]
        names, at, first = _inside(registers), self._address(place), 32 * self.warp
        for j, name in enumerate(names):
            if "trans" not in line.parts:
                row = at[first + 8 * j + self.lane // 4] + 4 * (self.lane % 4)
                if load:
                    self._set(name, np.ascontiguousarray(self._read_shared(row, 4, live, line.text)).view(U32)[:, 0].copy(), live)
                else:
                    self._write_shared(row, self._value(name).view(np.uint8).reshape(self.threads, 4), live, line.text)
                continue
            halves = []
            for half in range(2):
                cell = at[first + 8 * j + 2 * (self.lane % 4) + half] + 2 * (self.lane // 4)
                if load:
                    halves.append(np.ascontiguousarray(self._read_shared(cell, 2, live, line.text)).view(U16)[:, 0].astype(U32))
                else:
                    bits = ((self._value(name) >> U32(16 * half)) & U32(0xFFFF)).astype(U16)
                    self._write_shared(cell, bits.view(np.uint8).reshape(self.threads, 2), live, line.text)
            if load:
                self._set(name, halves[0] | (halves[1] << U32(16)), live)

    def _multiply(self, line: Line) -> None:
        a = line.operands
        shape = re.search(r"n(\d+)k(\d+)", line.name)
        assert shape is not None
        columns, depth = int(shape[1]), int(shape[2])
        width, decoded = 32 // depth, _DECODED[line.parts[-1]]
        out, held = _inside(a[0]), a[1][0] == "{"
        adds = bool(self.values[a[3]].all()) if a[3][0] == "%" else bool(int(a[3]))
        across = [bool(int(x)) for x in a[6:]] or [False, False]
        warp, lane = self.warp[:128], self.lane[:128]
        for group in range(self.threads // 128):
            mine = slice(128 * group, 128 * group + 128)
            if held:
                left = self._left(_inside(a[1]), mine, depth, width, decoded)
            else:
                left = self._operand(a[1], mine, 64, depth, width, across[0], decoded, line.text)
            right = self._operand(a[2], mine, columns, depth, width, across[-1], decoded, line.text)
            product = left.astype(np.float64) @ right.T.astype(np.float64)
            for i, name in enumerate(out):
                total = self.values.get(name, np.zeros(self.threads, U32)).copy()
                element = product[16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2]
                total[mine] = (element + (total[mine].view(np.float32) if adds else 0.0)).astype(np.float32).view(U32)
                self.values[name] = total

    def _multiply_in_a_warp(self, line: Line) -> None:
        """mma.m16n8k16 of two-byte operands in registers."""
        out, left, right, so_far = (_inside(x) for x in line.operands)
        decoded = _DECODED[line.parts[-2]]
        group, at, warps = self.lane // 4, 2 * (self.lane % 4), self.threads // 32
        rows, columns = np.zeros((warps, 16, 16)), np.zeros((warps, 8, 16))
        for half in range(2):
            for r, name in enumerate(left):
                rows[self.warp, group + 8 * (r % 2), at + half + 8 * (r // 2)] = decoded(((self._value(name) >> U32(16 * half)) & U32(0xFFFF)).astype(U16))
            for r, name in enumerate(right):
                columns[self.warp, group, at + half + 8 * r] = decoded(((self._value(name) >> U32(16 * half)) & U32(0xFFFF)).astype(U16))
        product = rows @ columns.transpose(0, 2, 1)
        added = [_floats(self._value(name)) for name in so_far]
        for i, name in enumerate(out):
            self.values[name] = (product[self.warp, group + 8 * (i // 2), at + i % 2] + added[i]).astype(np.float32).view(U32)

    def _left(self, names: list[str], mine: slice, depth: int, width: int, decoded: Callable[[Array], Array]) -> Array:
        """A left operand [64, depth] in registers."""
        warp, lane = self.warp[:128], self.lane[:128]
        rows = np.zeros((64, depth), np.float32)
        for r, word in enumerate(self._value(name)[mine] for name in names):
            row, column = 16 * warp + lane // 4 + 8 * (r % 2), 4 * (r // 2) * (1 if width == 4 else 2)
            if width == 4:
                rows[row, lane % 4 + column] = decoded(word)
            else:
                for half in range(2):
                    rows[row, 2 * (lane % 4) + half + column] = decoded(((word >> U32(16 * half)) & U32(0xFFFF)).astype(U16))
        return rows

    def _operand(self, name: str, mine: slice, rows: int, depth: int, width: int, across: bool, decoded: Callable[[Array], Array], text: str) -> Array:
        """An operand [rows, depth] in shared memory."""
        descriptors = self._value(name, U64)[mine]
        assert (descriptors == descriptors[0]).all(), f"threads disagree about the tile: {text}"
        self.tiles.append(int(descriptors[0]))
        cells = _tile(int(descriptors[0]), rows, depth, width, across)[..., None] + np.arange(width)
        assert ((cells >= 0) & (cells < self.room)).all(), f"wgmma reads outside shared memory: {text}"
        assert self.written[cells].all(), f"wgmma reads what nothing wrote: {text}"
        if not self.fenced[cells].all():
            self.hazards.add(f"wgmma reads without a fence after the write: {text}")
        if (self.write_epoch[cells] == self.epoch).any():
            self.hazards.add(f"wgmma reads without a barrier after the write: {text}")
        self.reader[cells], self.read_epoch[cells] = _SEVERAL, self.epoch
        return decoded(np.ascontiguousarray(self.shared[cells]).view(U32 if width == 4 else U16)[..., 0])


def _tile(descriptor: int, columns: int, depth: int, width: int, across: bool) -> Array:
    """Where the elements [columns, depth] of an operand begin, by its descriptor: depth lies together, or columns do (`across`)."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    span = {1: 128, 2: 64, 3: 32}[descriptor >> 62 & 3]
    n, k = np.arange(columns)[:, None], np.arange(depth)[None, :]
    if across:
        atom = span // width
        at = start + n % atom * width + n // atom * leading + k % 8 * span + k // 8 * stride
    else:
        at = start + n % 8 * span + n // 8 * stride + k * width
    swizzled: Array = at ^ ((at >> 7 & {128: 7, 64: 3, 32: 1}[span]) << 4)
    return swizzled


def launches_of(op: Callable[[], object], kernels: list[CompiledKernel] | None = None) -> list[Launched]:
    """What the op launches, compiled for Hopper and not run, in order. `kernels`: of a `compiling_for` that is open, in which nothing is compiled twice."""
    jit: Any = importlib.import_module("triton.runtime.jit").JITFunction
    found: list[Launched] = []
    with compiling_for(90) if kernels is None else nullcontext(kernels) as compiled:
        compile_only = jit.run

        def run(self: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> Any:
            done = compile_only(self, *args, grid=grid, warmup=warmup, **kwargs)
            match = [k for k in compiled if k.cubin == done.asm["cubin"]]
            folded = [not isinstance(x, torch.Tensor) and x == 1 and not p.do_not_specialize for x, p in zip(args, self.params, strict=False)]
            found.append(Launched(replace(match[-1], grid=tuple(grid)), tuple(x for x, gone in zip(args, folded, strict=True) if not gone)))
            return done

        jit.run = run
        try:
            op()
        finally:
            jit.run = compile_only
    return found


def _word(argument: float) -> int:
    """A number as a kernel's parameter: an integer, or an fp32's bits."""
    return argument if isinstance(argument, int) else int(np.float32(argument).view(U32))


def run_on_cpu(launches: Sequence[Launched], tensors: Sequence[torch.Tensor], tiles: list[list[int]] | None = None) -> set[str]:
    """Run the launches in order on the tensors that they were given, in place; returns the hazards. `tensors` are those to fill and
    read back besides what the launches name. tiles: gets the descriptors of each launch's products, program after program."""
    places: dict[int, tuple[int, torch.Tensor]] = {}
    end = 1024

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())

    def held(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    for tensor in [*tensors, *(x for launch in launches for x in launch.arguments if isinstance(x, torch.Tensor))]:
        if held(tensor) not in places:
            places[held(tensor)] = (end, whole(tensor))
            end += -(-places[held(tensor)][1].nbytes // 1024) * 1024 + 1024
    memory = np.full(end, 0xFF, np.uint8)
    for key in {held(tensor) for tensor in tensors}:
        at, cells = places[key]
        memory[at : at + cells.nbytes] = cells.numpy()
    hazards: set[str] = set()
    for kernel, given in launches:
        machine = Machine(kernel)
        words = [places[held(x)][0] + int(x.storage_offset()) * x.itemsize if isinstance(x, torch.Tensor) else _word(x) for x in given]
        grid = (*kernel.grid, 1, 1)[:3]
        for block in np.ndindex(*grid):
            machine.run([*words, 0, 0], block, memory)
        hazards |= machine.hazards
        if tiles is not None:
            tiles.append(machine.tiles)
    for at, cells in places.values():
        cells.numpy()[:] = memory[at : at + cells.nbytes]
    return hazards
