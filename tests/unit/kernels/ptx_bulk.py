"""Run the PTX of a kernel that copies tiles by descriptor (TMA) on the CPU: `ptx_machine`, and barriers that count bytes.

A tile lands, whole and swizzled, only when its barrier is waited for; before that its target holds nothing. A wait that nothing would end is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from ptx_machine import Launched, Line, Machine

from driftline.kernels.offline import CompiledKernel

__all__ = ["run_on_cpu"]

_WAIT = re.compile(r"\{\s*\.reg \.pred complete;\s*waitLoop:\s*mbarrier\.try_wait\.parity\.shared(?:::cta)?\.b64 complete, (\[[^\]]*\]), ([^;]*);\s*"
                   r"@!complete bra\.uni waitLoop;\s*\}")
_LOCAL = re.compile(r"\.reg \.b32 m, s;[^}]*?mov\.b32 \{[^}]*\}, m;")
"""The decoding's own registers, which PTX gives no sign of being ones."""
_FUNCTIONS: dict[str, Any] = {"abs": np.abs, "rcp": lambda x: 1 / x}
_DESCRIPTOR = 1 << 30


class BulkMachine(Machine):
    def __init__(self, kernel: CompiledKernel, descriptors: dict[int, Any]) -> None:
        ptx = re.sub(r"(?m)^\s*\.loc[^\n]*\n|//[^\n]*", "", kernel.ptx[kernel.ptx.index(".version") :])
        ptx = _WAIT.sub(r"mbarrier.wait \1, \2;", ptx)
        ptx = re.sub(r"mov\.b(32|64)\s+(%rd?\d+), \w+_param_(\d+);", lambda m: f"mov.b{m[1]} {m[2]}, {_DESCRIPTOR + int(m[3])};", ptx)
        ptx = ptx.replace("cvta.param.u64", "mov.b64").replace("bra.uni", "bra")
        ptx = _LOCAL.sub(lambda m: re.sub(r"\b([ms])\b(?=\s*[,;}])", r"%\1", m[0]), ptx)
        super().__init__(replace(kernel, ptx=ptx))
        self.descriptors = descriptors
        self.bars: dict[int, dict[str, Any]] = {}

    def _step(self, line: Line, live: Any) -> None:
        if line.parts[0] == "mbarrier":
            self._barrier(line, live)
        elif line.name.startswith("cp.async.bulk.tensor"):
            self._bulk(line, live)
        elif line.parts[0] == "elect":
            self.values[line.operands[0].split("|")[1]] = self.lane == 0
        elif line.parts[0] == "shfl" and "idx" in line.parts:
            self._set(line.operands[0], self._value(line.operands[1])[32 * self.warp + int(line.operands[2])], live)
        elif line.parts[:2] == ["mul", "hi"]:
            kind = line.parts[2]
            wide = self._typed(line.operands[1], kind).astype(np.int64) * self._typed(line.operands[2], kind).astype(np.int64)
            self._set(line.operands[0], (wide.view(np.uint64) >> np.uint64(32)).astype(np.uint32), live)
        elif line.parts[0] in _FUNCTIONS and line.parts[-1] == "f32":
            self._set(line.operands[0], _FUNCTIONS[line.parts[0]](self._typed(line.operands[1], "f32")).astype(np.float32).view(np.uint32), live)
        elif line.name == "cvt.rn.satfinite.e4m3x2.f32":
            high, low = (torch.from_numpy(self._typed(x, "f32").clip(-448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint16)
                         for x in line.operands[1:])
            self._set(line.operands[0], (high << np.uint16(8)) | low, live)
        elif line.name == "cvt.rn.f16x2.e4m3x2":
            pair = np.ascontiguousarray(self._value(line.operands[1], np.uint16)).view(np.uint8).reshape(-1, 2)
            wide = torch.from_numpy(pair.copy()).view(torch.float8_e4m3fn).to(torch.float16).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
            self._set(line.operands[0], wide[:, 0] | (wide[:, 1] << np.uint32(16)), live)
        elif line.name == "cvt.f32.f16":
            self._set(line.operands[0], self._value(line.operands[1], np.uint16).view(np.float16).astype(np.float32).view(np.uint32), live)
        elif line.name == "mul.rn.bf16x2":
            x, y = (self._value(operand) for operand in line.operands[1:])
            halves = [(b.view(np.float32) * c.view(np.float32)).view(np.uint32) >> np.uint32(16)
                      for b, c in ((x << np.uint32(16), y << np.uint32(16)), (x & np.uint32(0xFFFF0000), y & np.uint32(0xFFFF0000)))]
            self._set(line.operands[0], halves[0] | (halves[1] << np.uint32(16)), live)
        else:
            super()._step(line, live)

    def _barrier(self, line: Line, live: Any) -> None:
        at = int(self._address(next(x for x in line.operands if x[0] == "["))[0])
        if line.parts[1] == "init":
            self.bars[at] = {"done": 0, "bytes": 0, "pending": []}
        elif line.parts[1] == "inval":
            self.bars.pop(at, None)
        elif line.parts[1] == "arrive":
            if live.any():
                assert live.sum() == 1
                assert self.bars[at]["bytes"] == 0, "a barrier's bytes are asked for twice"
                self.bars[at]["bytes"] = int(line.operands[-1])
        else:
            bar, parity = self.bars[at], int(self._value(line.operands[1])[0])
            if bar["done"] % 2 == parity:
                assert 0 < bar["bytes"] == sum(content.size for _, content in bar["pending"]), f"a wait without end: {line.text}"
                for cells, content in bar["pending"]:
                    self.shared[cells], self.written[cells], self.fenced[cells] = content, True, True
                    self.write_epoch[cells] = -1
                bar.update(done=bar["done"] + 1, bytes=0, pending=[])

    def _bulk(self, line: Line, live: Any) -> None:
        target = self._address(line.operands[0])
        inner = re.match(r"\[\s*(%\w+)\s*,\s*\{([^}]*)\}", line.text[line.text.index("],") + 2 :].strip())
        assert inner is not None
        descriptor = self.descriptors[int(self._value(inner[1], np.uint64)[0]) - _DESCRIPTOR]
        column, row = (self._value(x.strip()).view(np.int32) for x in inner[2].split(","))
        bar = re.findall(r"\[[^\[\]]*\]", line.text)[-1]
        rows, table = descriptor.block_shape[0], descriptor.base
        for t in np.flatnonzero(live):
            n, k = np.arange(rows)[:, None], np.arange(64)[None, :]
            here = torch.zeros(rows, 64, dtype=table.dtype)
            last = min(rows, table.shape[0] - int(row[t]))
            part = table[int(row[t]) : int(row[t]) + last, int(column[t]) : int(column[t]) + 64]
            here[: part.shape[0]] = part
            cells = int(target[t]) + n * 128 + ((k * 2) ^ (n % 8 << 4))
            assert int(target[t]) % 1024 == 0
            cells = (cells[..., None] + np.arange(2)).reshape(-1)
            if (self.read_epoch[cells] == self.epoch).any():
                self.hazards.add(f"copy without a barrier after the read: {line.text}")
            self.written[cells] = False
            self.bars[int(self._address(bar)[0])]["pending"].append((cells, here.view(torch.uint8).numpy().reshape(-1)))


def run_on_cpu(launches: Sequence[Launched], tensors: Sequence[torch.Tensor]) -> set[str]:
    """As `ptx_machine.run_on_cpu`, for launches whose arguments may be descriptors of their tensors."""
    hazards: set[str] = set()
    for kernel, given in launches:
        places: dict[int, tuple[int, torch.Tensor]] = {}
        end = 1024
        plain: list[torch.Tensor] = [x for x in given if isinstance(x, torch.Tensor)]
        for tensor in [*tensors, *plain]:
            if tensor.data_ptr() not in places:
                places[tensor.data_ptr()] = (end, tensor)
                end += -(-tensor.nbytes // 1024) * 1024 + 1024
        memory = np.full(end, 0xFF, np.uint8)
        for at, tensor in places.values():
            memory[at : at + tensor.nbytes] = tensor.view(-1).view(torch.uint8).numpy()
        words: list[int] = []
        descriptors: dict[int, Any] = {}
        for x in given:
            if isinstance(x, torch.Tensor):
                words.append(places[x.data_ptr()][0])
            elif hasattr(x, "block_shape"):
                descriptors[len(words)] = replace(x, base=x.base.clone())
                words += [0, *x.shape, *x.strides]
            elif isinstance(x, float):
                words.append(int(np.float32(x).view(np.uint32)))
            else:
                words.append(int(x))
        for block in np.ndindex(*(*kernel.grid, 1, 1)[:3]):
            machine = BulkMachine(kernel, descriptors)
            machine.run([*words, 0, 0], block, memory)
            hazards |= machine.hazards
        for at, tensor in places.values():
            tensor.view(-1).view(torch.uint8).numpy()[:] = memory[at : at + tensor.nbytes]
    return hazards
