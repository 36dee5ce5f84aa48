"""The expert MLP's backward through the compiler for Hopper, every pinned configuration at K3's shapes: 896 experts, 8,192 tokens of 3,584, 16 a token."""

from __future__ import annotations

import re

import pytest
import torch

from driftline.kernels.moe import gluon_backward as products
from driftline.kernels.moe import gluon_wgrad
from driftline.kernels.moe import triton_backward as kernels
from driftline.kernels.moe.plan import plan
from driftline.kernels.moe.triton_tiles import Form
from driftline.kernels.moe.triton_wgrad import Side, weight_gradient
from driftline.kernels.mxfp4.weights import ExpertWeight, Fp8Weight, Mxfp4Weight
from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for

EXPERTS, TOKENS, TOP, OUTER, HIDDEN = 896, 8192, 16, 3584, 3072
IDS = torch.zeros(TOKENS, TOP, dtype=torch.int32)
HELD = 32
"""Experts whose weights are there: nothing that is compiled depends on it, and 896 in bfloat16 are more than some machines promise."""
BETAS = (4.0, 25.0)


def stack(form: Form, out: int, width: int) -> ExpertWeight:
    match form:
        case Form.BFLOAT16:
            return torch.empty(HELD, out, width, dtype=torch.bfloat16)
        case Form.MXFP4:
            return Mxfp4Weight(torch.empty(HELD, out, width // 2, dtype=torch.uint8), torch.empty(HELD, out, width // 32, dtype=torch.uint8))
        case Form.FP8:
            return Fp8Weight(torch.empty(HELD, out, width, dtype=torch.float8_e4m3fn), torch.empty(HELD, out, width // 128))


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def compiled(form: Form, blocks: kernels.Blocks, inner: kernels.Blocks, *, keep: bool = True) -> list[CompiledKernel]:
    w1, w3, w2 = stack(form, HIDDEN, OUTER), stack(form, HIDDEN, OUTER), stack(form, OUTER, HIDDEN)
    z, dh, du, out, gates = half(TOKENS, OUTER), half(TOKENS * TOP, HIDDEN), half(TOKENS * TOP, HIDDEN), half(TOKENS * TOP, OUTER), torch.empty(TOKENS, TOP)
    table = plan(IDS, EXPERTS, blocks.rows)
    with compiling_for(90) as found:
        kernels.d_hidden(z, w2, table, TOP, dh, blocks)
        kernels.inner(z, w1, w3, gates, dh, du, half(TOKENS * TOP, HIDDEN) if keep else None, table, BETAS, inner)
        kernels.d_input(dh, du, w1, w3, table, out, blocks)
    assert [kernel.name for kernel in found] == ["_d_hidden", "_inner", "_d_input"]
    return found


def product_loops(code: str) -> list[list[str]]:
    """The instructions of each loop that has matrix products in it. What lies behind an exit is no part of one: a wait's repeats are put there."""
    labels: dict[str, int] = {}
    found: list[str] = []
    bodies: dict[int, list[str]] = {}
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?(.*?);", line):
            found.append(instruction[1])
            back = re.search(r"BRA.*?(\.L_x_\d+)", instruction[1])
            if back and back[1] in labels:
                bodies[labels[back[1]]] = found[labels[back[1]] :]
    return [body for body in bodies.values() if any("HGMMA" in i for i in body) and not any(i.startswith("EXIT") for i in body)]


@pytest.mark.parametrize(("form", "few"), list(kernels.PINNED), ids=str)
def test_products_run_on_the_matrix_unit_from_asynchronous_copies_without_spills(form: Form, few: bool) -> None:
    pinned, inner = kernels.PINNED[form, few], kernels.INNER.get((form, few), kernels.PINNED[form, few])
    assert inner.rows == pinned.rows
    for kernel, loops in zip(compiled(form, pinned, inner, keep=form is Form.BFLOAT16), (1, 1, 2), strict=True):
        blocks = inner if kernel.name == "_inner" else pinned
        assert kernel.stack <= (160 if blocks == blocks._replace(rows=128, warps=4) else 0), kernel
        assert kernel.shared <= SHARED_LIMIT, kernel
        bodies = product_loops(kernel.sass())
        assert len(bodies) == loops
        for body in bodies:
            names = [instruction.split(".")[0].split()[0] for instruction in body]
            assert names.count("HGMMA") == blocks.depth // 16 * max(1, blocks.rows // (16 * blocks.warps))
            assert names.count("LDGSTS") >= 4
            assert not {"LDL", "STL", "HMMA"} & set(names), "what is spilled is spilled in the epilogue alone"
        # weights that are packed become bfloat16 by products of powers of two, two at a time, and not through fp32
        assert ("mul.rn.bf16x2" in kernel.ptx) == (form is Form.MXFP4)


def test_weights_gradients_are_written_sixteen_bytes_at_a_time() -> None:
    table, z, d = plan(IDS, EXPERTS, 64), half(TOKENS, OUTER), half(TOKENS * TOP, HIDDEN)
    with compiling_for(90) as found:
        weight_gradient(Side(d, False), Side(z, True), table, TOP, half(HELD, HIDDEN, OUTER), add=False)
        weight_gradient(Side(z, True), Side(d, False), table, TOP, half(HELD, OUTER, HIDDEN), add=True)
    for kernel in found:
        assert kernel.stack == 0, kernel
        assert kernel.shared <= SHARED_LIMIT
        assert kernel.count("HGMMA") == 8
        assert kernel.count(r"STG\.E\.128") == 16


def test_the_sums_over_slots_and_blocks_read_wide() -> None:
    table = plan(IDS, EXPERTS, 64)
    with compiling_for(90) as found:
        kernels.sum_slots(half(TOKENS * TOP, OUTER), table, TOP, half(TOKENS, OUTER))
        kernels.d_gates(torch.empty(48, TOKENS * TOP), table, torch.empty(TOKENS, TOP))
    assert [kernel.stack for kernel in found] == [0, 0]
    assert found[0].count(r"LDG\.E\.128") == TOP


def never_written(ptx: str) -> set[str]:
    """Registers that code reads and that nothing in it writes: what a compiler took to be of no consequence."""
    body = re.sub(r"//[^\n]*", "", ptx)
    body = body[body.index("{", body.index(".entry")) :]
    register = r"%(?:rs|rd|r|p)\d+\b"
    written: set[str] = set()
    for line in body.splitlines():
        if target := re.match(r"\s*(?:@!?%p\d+\s+)?[\w.:]+\s+(\{[^}]*\}|%\w+(?:\|%\w+)?)", line):
            written |= set(re.findall(register, target[1]))
    return set(re.findall(register, body)) - written


@pytest.mark.parametrize("form", [Form.MXFP4, Form.BFLOAT16])
def test_hoppers_products_never_wait_for_what_they_need_not(form: Form) -> None:
    packed = form is Form.MXFP4
    w1, w3, w2 = stack(form, HIDDEN, OUTER), stack(form, HIDDEN, OUTER), stack(form, OUTER, HIDDEN)
    dh, du, rows, gates = half(TOKENS * TOP, HIDDEN), half(TOKENS * TOP, HIDDEN), half(TOKENS * TOP, OUTER), torch.empty(TOKENS, TOP)
    table = plan(IDS, EXPERTS, products.BLOCK)
    with compiling_for(90) as found:
        products.d_hidden(rows, w2, table, dh)
        products.inner(rows, w1, w3, gates, dh, du, None if packed else dh, table, BETAS)
        products.d_input(dh, du, w1, w3, table, rows)
    assert [kernel.name for kernel in found] == ["_across", "_inner", "_across"]
    for kernel in found:
        assert kernel.stack <= (128 if packed and kernel.name == "_inner" else 0), kernel
        assert kernel.shared <= SHARED_LIMIT
        assert not never_written(kernel.ptx)
        bodies = product_loops(kernel.sass())
        assert len(bodies) == 4 * (2 if packed and kernel.name == "_across" else 1), "a loop for each width, and for each half of the scales that are copied"
        for body in bodies:
            names = [instruction.split(".")[0].split()[0] for instruction in body]
            assert not {"LDL", "STL", "HMMA", "LDGSTS"} & set(names)
            assert names.count("HGMMA") in (8, 16)
            assert "UTMALDG" in names
            assert ("LDSM" in names) == packed
            # one step's products (in two widths, two groups of them) may still run whenever something is waited for
            assert {i.split()[-1] for i in body if i.startswith("WARPGROUP.DEPBAR")} <= {"0x1", "0x2"}
        assert ("mul.rn.bf16x2" in kernel.ptx) == packed


def test_hoppers_weights_gradients_are_written_sixteen_bytes_at_a_time() -> None:
    table, rows, d = plan(IDS, EXPERTS, products.BLOCK), half(TOKENS * TOP, OUTER), half(TOKENS * TOP, HIDDEN)
    with compiling_for(90) as found:
        gluon_wgrad.weight_gradient(d, rows, table, half(HELD, HIDDEN, OUTER), add=False)
        gluon_wgrad.weight_gradient(rows, d, table, half(HELD, OUTER, HIDDEN), add=True)
    for kernel, stack_bytes in zip(found, (0, 96), strict=True):
        assert kernel.stack <= stack_bytes, kernel
        assert kernel.shared <= SHARED_LIMIT
        assert not never_written(kernel.ptx)
        (body,) = product_loops(kernel.sass())
        names = [instruction.split(".")[0].split()[0] for instruction in body]
        assert names.count("HGMMA") == 8
        assert not {"LDL", "STL"} & set(names)
        assert {i.split()[-1] for i in body if i.startswith("WARPGROUP.DEPBAR")} == {"0x1"}
        assert kernel.sass().count("STG.E.128") == 16
