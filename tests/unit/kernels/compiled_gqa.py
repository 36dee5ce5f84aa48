"""What the kernels of grouped queries' attention take of a Hopper GPU, in every configuration, at the widths of models that are around."""

from __future__ import annotations

import pytest
import torch
from gqa_cases import Case, Widths
from machine_code import product_loop, spills

from driftline.kernels.gqa import triton_backward, triton_forward
from driftline.kernels.gqa.layout import Layout
from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for

ROWS = 8192
WIDE, NARROW, ODD = Widths(32, 8, 128, 128), Widths(9, 3, 64, 64), Widths(32, 32, 96, 96)


def case(widths: Widths, *, named: bool = False) -> Case:
    ends = torch.tensor([0, ROWS])
    layout = Layout.packed(ends, ends, ROWS, ROWS, rows=torch.arange(ROWS, dtype=torch.int32) if named else None)
    shapes = ((widths.heads, widths.width), (widths.key_heads, widths.width), (widths.key_heads, widths.value))
    return Case(*(torch.empty(1, ROWS, *shape, dtype=torch.bfloat16) for shape in shapes), layout)


def check(kernel: CompiledKernel, width: int, keys: int, *, spilled: int = 0) -> list[str]:
    assert kernel.shared <= SHARED_LIMIT
    assert kernel.stack <= spilled, kernel
    loop = product_loop(kernel)
    assert spills(loop) <= spilled // 4
    assert any("LDGSTS.E.BYPASS.128" in line or "UTMALDG" in line for line in loop), "the next tile is copied past the registers, whole or 16 bytes at a time"
    assert sum("HGMMA" in line for line in loop) >= (width + keys) // 16
    return loop


@pytest.mark.parametrize(("configuration", "widths"), [*((one, WIDE) for one in triton_forward.CONFIGURATIONS), (triton_forward.DEFAULT, NARROW)])
def test_the_forward_fits_and_uses_the_matrix_unit(configuration: triton_forward.Configuration, widths: Widths) -> None:
    given = case(widths)
    with compiling_for(90) as compiled:
        triton_forward.forward(*given[:3], given.layout, given.sizes, 0.1, torch.bfloat16, configuration)
    [kernel] = compiled
    loop = check(kernel, widths.width, triton_forward.KEYS, spilled=32)
    assert sum(f"HGMMA.64x{triton_forward.KEYS}x16" in line for line in loop) >= widths.width // 16


@pytest.mark.parametrize(("widths", "named"), [(WIDE, True), (NARROW, True), (ODD, False)])
def test_the_parts_fit_and_use_the_matrix_unit(widths: Widths, named: bool) -> None:
    given = case(widths, named=named)
    with compiling_for(90) as compiled:
        triton_forward.decode(*given[:3], given.layout, given.sizes, 0.1, torch.bfloat16)
        triton_forward.forward(*given[:3], given.layout, given.sizes, 0.1, torch.bfloat16)
    part, combine, forward = compiled
    check(part, widths.width, triton_forward.KEYS)
    check(forward, widths.width, triton_forward.KEYS, spilled=96)  # addresses, of keys that the copy engine does not bring
    assert (combine.name, combine.stack) == ("_combine", 0)


@pytest.mark.parametrize(("which", "widths"), [*((which, WIDE) for which in range(len(triton_backward.KEYS))), (0, NARROW)])
def test_the_backward_fits_and_uses_the_matrix_unit(which: int, widths: Widths) -> None:
    given = case(widths)
    of_queries, of_keys = triton_backward.QUERIES[min(which, len(triton_backward.QUERIES) - 1)], triton_backward.KEYS[which]
    out, lse = torch.empty(1, ROWS, widths.heads, widths.value, dtype=torch.bfloat16), triton_forward.row_numbers(given.layout, given.sizes)
    with compiling_for(90) as compiled:
        triton_backward.backward(*given[:3], given.layout, out, lse, out, given.sizes, 0.1, of_queries, of_keys)
    prepare, keys, queries = compiled
    assert (prepare.name, prepare.stack) == ("_prepare", 0)
    assert (keys.name, queries.name) == ("_keys", "_queries")
    check(keys, 2 * widths.width, 2 * of_keys.rows, spilled=64)
    check(queries, 2 * widths.width, of_queries.keys, spilled=0 if which == 0 else 64)
