"""The backward's products for Hopper as they are compiled, run on a CPU: layouts, the copy engine's swizzles, transposing loads and operands' descriptors."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import ptx_bulk
import pytest
import torch
from expert_cases import choices, error, matrices
from ptx_machine import launches_of

from driftline.kernels.moe import gluon_backward as kernels
from driftline.kernels.moe import gluon_wgrad
from driftline.kernels.moe.plan import plan
from driftline.kernels.moe.triton_tiles import Form
from driftline.kernels.offline import CompiledKernel
from driftline.kernels.situ_glu.reference import situ_glu

torch.set_num_threads(1)

SIZE, TOP = 512, 1
_LOCAL = re.compile(r"\.reg \.b32 m(?:, s)?;.*?\n\}", re.DOTALL)


class _Machine(ptx_bulk.BulkMachine):
    """Boxes of any element and swizzle, and the decoding's instructions."""

    def __init__(self, kernel: CompiledKernel, descriptors: dict[int, Any]) -> None:
        local = _LOCAL.sub(lambda m: re.sub(r"(?<=[\s,])([ms])(?=[,;])", r"%\1", m[0]), kernel.ptx)
        super().__init__(replace(kernel, ptx=local), descriptors)

    def _step(self, line: Any, live: Any) -> None:
        if line.name == "min.u16x2":
            halves = [np.ascontiguousarray(self._value(x)).view(np.uint16) for x in line.operands[1:]]
            self._set(line.operands[0], np.minimum(*halves).view(np.uint32), live)
        else:
            super()._step(line, live)

    def _bulk(self, line: Any, live: Any) -> None:
        target = self._address(line.operands[0])
        inner = re.match(r"\[\s*(%\w+)\s*,\s*\{([^}]*)\}", line.text[line.text.index("],") + 2 :].strip())
        assert inner is not None
        descriptor = self.descriptors[int(self._value(inner[1], np.uint64)[0]) - ptx_bulk._DESCRIPTOR]
        column, row = (self._value(x.strip()).view(np.int32) for x in inner[2].split(","))
        bar = re.findall(r"\[[^\[\]]*\]", line.text)[-1]
        table, swizzle = descriptor.base, descriptor.layout.swizzle_byte_width
        each, rows = table.element_size(), descriptor.block_shape[0]
        wide = min(descriptor.block_shape[1], (swizzle or 16) // each)
        for t in np.flatnonzero(live):
            first, left = int(row[t]), int(column[t])
            assert left * each % 16 == 0, f"a column that the copy engine refuses: {line.text}"
            here = torch.zeros(rows, wide, dtype=table.dtype)
            part = table[first : first + rows, left : left + wide]
            here[: part.shape[0], : part.shape[1]] = part
            cells = np.arange(rows)[:, None] * (wide * each) + np.arange(wide * each)[None, :]
            cells = int(target[t]) + (cells ^ ((cells >> 7 & {128: 7, 64: 3, 32: 1, 0: 0}[swizzle]) << 4)).reshape(-1)
            assert int(target[t]) % 1024 == 0
            if (self.read_epoch[cells] == self.epoch).any():
                self.hazards.add(f"copy without a barrier after the read: {line.text}")
            self.written[cells] = False
            self.bars[int(self._address(bar)[0])]["pending"].append((cells, here.view(torch.uint8).numpy().reshape(-1)))


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_bulk, "BulkMachine", _Machine)


@pytest.mark.parametrize("form", [Form.MXFP4, Form.BFLOAT16])
def test_the_products_are_float64s(form: Form) -> None:
    """150 rows of one expert, in a tile of 128 and 32, and 20 of another."""
    pairs = [matrices(form, (2, SIZE, SIZE), i) for i in range(3)]
    (w1, w3, w2), (v1, v3, v2) = [w for w, _ in pairs], [v.double() for _, v in pairs]
    ids = (torch.arange(170) >= 150).long()[:, None]
    table = plan(ids, 2, kernels.BLOCK)
    gates = torch.rand(170, 1, generator=torch.Generator().manual_seed(1)) + 0.5
    random = torch.Generator().manual_seed(2)
    z, dy = (torch.randn(170, SIZE, generator=random).bfloat16() for _ in range(2))
    which = ids[:, 0]

    def product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[which == e].double() @ matrix[e] for e in range(2)])

    renamed = z.view(-1, SIZE // 32, 4, 2, 4).permute(0, 1, 4, 2, 3).reshape(-1, SIZE).contiguous() if form is Form.MXFP4 else z
    dh, du, out = (torch.full((170, SIZE), torch.nan).bfloat16() for _ in range(3))
    held: list[torch.Tensor] = []
    first = launches_of(lambda: kernels.d_hidden(dy, w2, table, dh))
    second = launches_of(lambda: held.append(kernels.inner(renamed, w1, w3, gates, dh, du, None, table, (4.0, 25.0))))
    third = launches_of(lambda: kernels.d_input(dh, du, w1, w3, table, out))
    dh.fill_(torch.nan)
    assert ptx_bulk.run_on_cpu(first, [dh]) == set()
    assert error(dh, product(dy, v2)) < 0.003
    some = dh.double()
    assert ptx_bulk.run_on_cpu(second, [dh, du]) == set()
    leaves = [product(z, v.transpose(1, 2)).requires_grad_() for v in (v1, v3)]
    h = situ_glu(leaves[0], leaves[1], 4.0, 25.0)
    by_g, by_u = torch.autograd.grad(h.sum(), leaves)
    assert error(dh, by_g * some * gates) < 0.004
    assert error(du, by_u * some * gates) < 0.004
    assert error(held[0].sum(0), (h.detach().bfloat16().double() * some).sum(1)) < 1e-3
    assert ptx_bulk.run_on_cpu(third, [out]) == set()
    assert error(out, product(dh, v1) + product(du, v3)) < 0.003


def test_weights_gradients_are_float64s() -> None:
    ids, _ = choices(100, 3, 1)
    table = plan(ids, 3, 64)
    random = torch.Generator().manual_seed(3)
    left, right = (torch.randn(100, SIZE, generator=random).bfloat16() for _ in range(2))
    out = torch.full((3, SIZE, SIZE), torch.nan).bfloat16()
    assert ptx_bulk.run_on_cpu(launches_of(lambda: gluon_wgrad.weight_gradient(left, right, table, out, add=False)), [out]) == set()
    for e in range(3):
        some = slice(int(table.starts[e]), int(table.starts[e + 1]))
        assert error(out[e], left[some].double().T @ right[some].double()) < 0.003
