"""The router's kernels through the compiler for Hopper, at K3's shapes: 8,192 rows of 7,168, 896 experts, 16 chosen."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.moe import triton_router as kernels
from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for

TOP = 16


def operands(rows: int, wide: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty(rows, 7168, dtype=torch.bfloat16), torch.empty(896, 7168, dtype=torch.float32 if wide else torch.bfloat16), torch.empty(896)


def fits(compiled: list[CompiledKernel]) -> None:
    for kernel in compiled:
        assert kernel.stack == 0, kernel
        assert kernel.shared <= SHARED_LIMIT, kernel


@pytest.mark.parametrize("rows", [8192, 64])
def test_scores_are_matrix_products_whose_chunks_fp32_adds(rows: int) -> None:
    """A chunk of 128 is eight steps of the matrix unit; were the chunks added there too, an fp32 addition an accumulator would be missing."""
    with compiling_for(90) as compiled:
        kernels.select(*operands(rows), TOP, 1.0, None)
    fits(compiled)
    scores, select = compiled
    assert scores.count("HGMMA") == 8
    assert scores.count("LDGSTS") >= 16
    assert "mma" not in select.ptx
    tile = kernels.TILE
    held = tile.rows * tile.experts // (32 * tile.warps)
    added = scores.count("FFMA") + scores.count("FADD")
    assert (added >= held) == (rows == 8192)


def test_an_fp32_weight_is_split_and_not_cut() -> None:
    with compiling_for(90) as compiled:
        kernels.scores(*operands(8192, wide=True)[:2])
    fits(compiled)
    assert [kernel.name for kernel in compiled] == ["_split", "_scores"]
    assert all("tf32" not in kernel.ptx for kernel in compiled)


@pytest.mark.parametrize("tile", kernels.TILES[1:], ids=str)
def test_every_candidate_of_the_sweep_compiles(tile: kernels.Tile) -> None:
    with compiling_for(90) as compiled:
        kernels.scores(*operands(8192)[:2], tile)
    fits(compiled)


def test_gradients_read_sixteen_bytes_at_a_time() -> None:
    x, weight, _ = operands(8192)
    slots = torch.empty(8192, TOP)
    with compiling_for(90) as compiled:
        kernels.gradients(x, weight, torch.zeros(8192, TOP, dtype=torch.int64), slots, slots, 1.0, True, True)
    fits(compiled)
    by_name = {kernel.name: kernel for kernel in compiled}
    assert by_name["_d_rows"].count(r"LDG\.E\.128") == TOP
    assert by_name["_d_weight"].count(r"LDG\.E\.128") == 4
