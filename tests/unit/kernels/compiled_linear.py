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


@pytest.mark.parametrize("tile", HALF, ids=str)
def test_forward_of_every_tile_runs_on_the_matrix_units_out_of_shared_memory(tile: Tile) -> None:
    check_matrix_units(compiled(tile, torch.bfloat16, a_rows=True, b_rows=True), tile)


@pytest.mark.parametrize(("tile", "a_rows", "accumulate"), [(HALF[0], True, False), (HALF[0], False, False), (HALF[0], True, True), (HALF[0], False, True),
                                                            (HALF[4], False, True)])
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


def test_k3s_shapes_leave_few_multiprocessors_idle_where_there_is_work() -> None:
    """Of the shapes of a K3 layer: all from 8,192 rows on, and most at 64, where the tile has to be small instead."""
    for columns in (7168, 12288, 33792, 163840):
        assert tile_for(8192, columns, torch.bfloat16) == HALF[0]
        assert tile_for(64, columns, torch.bfloat16).count(64, columns) >= 90
    for columns in (576, 1536, 3584):
        small = tile_for(64, columns, torch.bfloat16)
        assert all(small.count(64, columns) >= tile.count(64, columns) for tile in HALF if tile.columns >= 64)
