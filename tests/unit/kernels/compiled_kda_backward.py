"""KDA's backward compiled for Hopper at K3's shapes: what each kernel takes, and that its products are matrix instructions. Run by
test_kernels_interpreted.py."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from machine_descriptors import descriptors

from driftline.kernels.kda import triton_backward
from driftline.kernels.kda.triton_backward import PINNED, backward, heads_at_once, workspace_bytes
from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for

torch.set_num_threads(1)

SPILLED = {"chunk_table": 0, "prepare_chunks": 64, "products": 80, "scan": 0, "values": 0, "gradients": 768, "fold": 0}
"""Bytes a thread that may go to the stack, and stay in the first cache. products gives up registers for a third program on a multiprocessor;
gradients holds eleven tiles of [64, 32] at a time."""


@cache
def compiled() -> tuple[CompiledKernel, ...]:
    """Of three sequences in a row, one of them empty: what one sequence takes and the search for a chunk's place."""
    steps, heads = 8192, 96

    def half(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16)

    q, k, v, z, do = (half(1, steps, heads, 128) for _ in range(5))
    bounds = torch.tensor([0, 1000, 1000, steps])
    state = torch.empty(3, heads, 128, 128)
    with compiling_for(90) as kernels:
        backward(q, k, v, z, half(1, steps, heads), torch.empty(heads), torch.empty(heads * 128), -5.0, state, bounds, do, state)
    return tuple(kernels)


def from_registers(kernel: CompiledKernel) -> int:
    """Matrix instructions whose left operand is in registers: accumulators, then a second list in braces where a descriptor would be."""
    found = re.findall(r"wgmma\.mma_async[^;]*;", kernel.ptx, re.DOTALL)
    return sum(len(re.findall(r"\{[^}]*\}", one[one.index("{") :])) > 1 for one in found)


def test_every_kernel_compiles_into_what_a_hopper_block_has() -> None:
    kernels = compiled()
    assert {kernel.name for kernel in kernels} == {"chunk_table", "prepare_chunks", "products", "scan", "values", "gradients", "fold"}
    for kernel in kernels:
        assert kernel.shared <= SHARED_LIMIT, kernel
        assert kernel.stack <= SPILLED[kernel.name], kernel


def test_products_are_warpgroup_instructions_that_read_both_operands_from_shared_memory() -> None:
    """The assemblers of CUDA 12.8 and 12.9 may overwrite an operand in registers before the instruction has read it."""
    for kernel in compiled():
        if kernel.name not in ("fold", "chunk_table", "prepare_chunks"):
            assert kernel.count("HGMMA") > 0, kernel
            assert kernel.count("HMMA") == 0, kernel
            assert from_registers(kernel) == 0, kernel
            assert "LDG.E.128" in kernel.sass() or kernel.count("LDGSTS") > 0, kernel


def test_every_product_takes_descriptors_that_the_code_computes() -> None:
    """compiled_kda_backward_runs.py compares them with the PTX's, for small tensors."""
    for kernel in compiled():
        if kernel.name in ("products", "values", "gradients"):
            found = descriptors(kernel.sass(), 4)
            assert len(found) >= (24 if kernel.name == "products" else 64)
            assert all(tile is not None and 0 <= (tile & 0x3FFF) << 4 < kernel.shared for tile in found), kernel
            without = re.sub(r"[^\n]*SR_CgaCtaId[^\n]*\n", "", kernel.sass())
            assert None in descriptors(without, 4), "what is left out would be seen"


def test_the_scan_loads_the_next_chunk_while_it_multiplies() -> None:
    scan = next(kernel for kernel in compiled() if kernel.name == "scan")
    assert scan.count("LDGSTS") > 0
    assert scan.grid == (2 * 128 // PINNED.scan_values, 96, 3)


def test_the_workspace_is_what_its_page_says_and_long_inputs_share_it() -> None:
    assert workspace_bytes(1, 1) / 64 == pytest.approx(2324.06, abs=0.01)
    assert heads_at_once(128, 96) == 96
    assert heads_at_once(2048, 96) == 48
    assert workspace_bytes(2048, 48) < triton_backward.WORKSPACE_BYTES
