"""The pinned tiles of the product, compiled for Hopper at K3's shapes: what they take and which instructions are there.
Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from dense_sass import Instructions

from driftline.kernels.linear.tiles import FLOAT32, HALF, Tile, tile_for
from driftline.kernels.linear.triton import matmul
from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for

M, N, K = 8192, 7168, 7168


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype)


def compiled(tile: Tile, dtype: torch.dtype, *, a_rows: bool, b_rows: bool, accumulate: bool = False) -> CompiledKernel:
    with compiling_for(90) as kernels:
        matmul(matrix(M, K, dtype) if a_rows else matrix(K, M, dtype), matrix(N, K, dtype) if b_rows else matrix(K, N, dtype),
               matrix(M, N, torch.float32 if accumulate else dtype), a_rows=a_rows, b_rows=b_rows, accumulate=accumulate, tile=tile)
    (kernel,) = kernels
    assert kernel.grid == (tile.count(M, N),)
    assert kernel.warps == tile.warps
    return kernel


def check_matrix_units(kernel: CompiledKernel, tile: Tile) -> None:
    """Operands by the bulk copy engine into as many buffers as stages, multiplied from there one step behind, nothing spilt, results 16 bytes wide."""
    assert kernel.stack == 0
    assert kernel.shared <= SHARED_LIMIT
    found = Instructions(kernel)
    assert found.count("HGMMA") == tile.rows // 64 * tile.depth // 16 * 4 // tile.warps
    assert found.count("HMMA") == 0
    assert found.count("UTMALDG") >= 2 * tile.stages
    assert found.count("LDGSTS") == 0
    assert found.count("STG.E.128") >= tile.rows * tile.columns * 2 // 16 // (32 * tile.warps)
    assert "wgmma.wait_group.sync.aligned 1" in kernel.ptx
    assert found.count("WARPGROUP.DEPBAR") <= 2, "one wait a step and one after the last; a wait after every product is what the assembler does when in doubt"


@pytest.mark.parametrize("tile", HALF, ids=str)
def test_forward_of_every_tile_runs_on_the_matrix_units_out_of_shared_memory(tile: Tile) -> None:
    check_matrix_units(compiled(tile, torch.bfloat16, a_rows=True, b_rows=True), tile)


@pytest.mark.parametrize(("tile", "a_rows", "accumulate"), [(HALF[0], True, False), (HALF[0], False, False), (HALF[0], True, True), (HALF[0], False, True),
                                                            (HALF[1], True, False), (HALF[1], False, False), (HALF[4], False, True)])
def test_gradients_take_transposed_operands_without_another_path(tile: Tile, a_rows: bool, accumulate: bool) -> None:
    check_matrix_units(compiled(tile, torch.bfloat16, a_rows=a_rows, b_rows=False, accumulate=accumulate), tile)


@pytest.mark.parametrize(("a_rows", "b_rows"), [(True, True), (False, False)])
def test_fp32_is_multiplied_in_full(a_rows: bool, b_rows: bool) -> None:
    tile = FLOAT32[0]
    kernel = compiled(tile, torch.float32, a_rows=a_rows, b_rows=b_rows)
    found = Instructions(kernel)
    assert found.count("HGMMA") == found.count("HMMA") == 0, "TF32 would cut the operands to 11 bits"
    assert found.count("FFMA") >= tile.rows * tile.columns * tile.depth // (32 * tile.warps)
    assert kernel.stack <= 16
    assert kernel.shared <= SHARED_LIMIT


def test_the_number_of_rows_compiles_nothing_anew() -> None:
    with compiling_for(90) as kernels:
        for rows in (1, 7, 16, 33, 64):
            matmul(matrix(rows, K), matrix(N, K), matrix(rows, N))
    assert len(kernels) == 1


def test_k3s_shapes_take_the_tiles_that_were_fastest() -> None:
    """Of the shapes of a K3 layer: the largest tile at 8,192 rows of wide outputs, and at up to 64 rows the widest that gives most multiprocessors one."""
    for columns in (1536, 3584, 7168, 12288, 33792, 163840):
        assert tile_for(8192, columns, torch.bfloat16) == HALF[0]
    assert tile_for(8192, 576, torch.bfloat16) == HALF[1]
    taken = {columns: tile_for(64, columns, torch.bfloat16).columns for columns in (576, 1536, 3584, 7168, 12288, 33792)}
    assert taken == {576: 32, 1536: 32, 3584: 32, 7168: 64, 12288: 128, 33792: 128}
    assert all(tile_for(rows, columns, torch.bfloat16) == tile_for(64, columns, torch.bfloat16) for rows in (1, 2, 7) for columns in taken)


def test_few_rows_are_spread_over_a_whole_tile() -> None:
    """They compile nothing else, and change no result: see test_linear_device and interpreted_linear."""
    with compiling_for(90) as kernels:
        for rows in (1, 32, 33, 64):
            matmul(matrix(rows, K), matrix(N, K), matrix(rows, N))
    assert len(kernels) == 1
