"""The log-probability kernels, compiled for Hopper at K3's vocabulary: what they take and which instructions are there.
Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import torch
from dense_sass import Instructions

from driftline.kernels.logprob import triton as kernels
from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for

N, V, D = 8192, 163840, 7168


def compiled(dtype: torch.dtype, *, rows: int = N, vocabulary: int = V, round_logits: bool = False, backward: bool = False) -> dict[str, CompiledKernel]:
    hidden, weight, ids = torch.empty(rows, D, dtype=dtype), torch.empty(vocabulary, D, dtype=dtype), torch.empty(rows, dtype=torch.int64)
    row = torch.empty(rows)
    with compiling_for(90) as found:
        if backward:
            kernels.gradients(hidden, weight, ids, row, row, row, to_hidden=True, to_weight=True, round_logits=round_logits)
        else:
            kernels.forward(hidden, weight, ids, row, round_logits=round_logits)
    return {kernel.name: kernel for kernel in found}


def check_product(kernel: CompiledKernel, *, spilt: int, wide_stores: int) -> None:
    found = Instructions(kernel)
    assert kernel.stack <= spilt
    assert kernel.shared <= SHARED_LIMIT
    assert found.count("HGMMA") == 4
    assert found.count("UTMALDG") >= 2 * kernels.TILES[2][0].stages
    assert found.count("STG.E.128") == wide_stores
    assert found.count("MUFU") >= 128, "an exponential for each of a thread's 128 logits"
    assert "wgmma.wait_group.sync.aligned 1" in kernel.ptx
    assert found.count("WARPGROUP.DEPBAR") <= 2, "one wait a step and one after the last"


def test_a_tile_of_logits_becomes_three_numbers_a_row() -> None:
    """After 112 steps of K a few words of stack are nothing; a table of them would be."""
    for round_logits in (False, True):
        found = compiled(torch.bfloat16, round_logits=round_logits)
        check_product(found["_statistics"], spilt=64, wide_stores=0)
        assert found["_statistics"].grid == (N // 128 * V // 256,)
        assert found["_combine"].stack == 0


def test_few_rows_take_half_a_tile_of_the_same_columns() -> None:
    found = compiled(torch.bfloat16, rows=64)
    check_product(found["_statistics"], spilt=64, wide_stores=0)
    assert (found["_statistics"].grid, found["_statistics"].warps) == ((V // 256,), 4)
    assert {tile.columns for tile in kernels.TILES[2]} == {256}, "another number of columns is another tree of sums"
    check_product(compiled(torch.bfloat16, rows=64, backward=True)["_gradient"], spilt=0, wide_stores=16)


def test_a_vocabulary_that_ends_inside_of_a_tile_still_fits() -> None:
    check_product(compiled(torch.bfloat16, vocabulary=V - 8)["_statistics"], spilt=512, wide_stores=0)


def test_gradients_are_written_16_bytes_wide_and_multiplied_on() -> None:
    found = compiled(torch.bfloat16, backward=True)
    check_product(found["_gradient"], spilt=0, wide_stores=16)
    assert found["_matmul"].stack == 0
    assert Instructions(found["_matmul"]).count("HGMMA") == 4


def test_fp32_states_are_multiplied_in_full() -> None:
    found = compiled(torch.float32, rows=256)
    assert Instructions(found["_statistics"]).count("HGMMA") == 0
    assert found["_statistics"].stack == 0


def test_nothing_compiles_anew_for_another_number_of_rows() -> None:
    hidden, weight, ids, row = torch.empty(64, D, dtype=torch.bfloat16), torch.empty(V, D, dtype=torch.bfloat16), torch.empty(64, dtype=torch.int64), torch.empty(64)
    with compiling_for(90) as found:
        for rows in (1, 7, 16, 64):
            kernels.forward(hidden[:rows], weight, ids[:rows], row[:rows])
    assert sorted(kernel.name for kernel in found) == ["_combine", "_statistics"]
