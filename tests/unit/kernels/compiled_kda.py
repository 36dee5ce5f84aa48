"""The KDA forward kernels compiled for Hopper at K3's shapes: 96 heads of 128 over 8,192 tokens, and 12, which are walked in segments. Run by
test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import torch

from driftline.kernels.kda import forward as fw
from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for

torch.set_num_threads(1)

STEPS = 8192
SPILLED = {"prepare_chunks": 64, "walk_chunks": 16, "compose_segments": 64, "chunk_table": 0}
"""Bytes of stack a thread at most."""


def compiled(heads: int, sequences: int | None, gates: torch.dtype = torch.bfloat16) -> dict[str, list[CompiledKernel]]:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    q, k, v = empty(1, STEPS, 3, heads, 128).unbind(2)
    state = None if sequences is None else empty(sequences, heads, 128, 128, dtype=torch.float32)
    cu = None if sequences is None else empty(sequences + 1, dtype=torch.int64)
    inputs = fw.Inputs(q, k, v, empty(1, STEPS, heads, 128, dtype=gates), empty(1, STEPS, heads, dtype=gates), empty(heads, dtype=torch.float32),
                       empty(heads * 128, dtype=torch.float32), -5.0, state)
    with compiling_for(90) as kernels:
        fw.forward(inputs, cu)
    found: dict[str, list[CompiledKernel]] = {}
    for kernel in kernels:
        found.setdefault(kernel.name, []).append(kernel)
    return found


def check(found: dict[str, list[CompiledKernel]]) -> None:
    for name, kernels in found.items():
        for kernel in kernels:
            assert kernel.shared <= SHARED_LIMIT, kernel
            assert kernel.stack <= SPILLED[name], kernel
            assert (kernel.count("HMMA") > 0) is (name == "prepare_chunks"), kernel


def products(kernel: CompiledKernel) -> tuple[int, int]:
    """wgmma instructions, and how often the code waits for some to finish: one wait a product, or the compiler has serialised them."""
    return kernel.count("HGMMA"), kernel.sass().count("WARPGROUP.DEPBAR")


def test_many_heads_take_two_launches_with_wide_accesses_and_the_state_in_registers() -> None:
    found = compiled(96, None)
    check(found)
    assert {name: len(kernels) for name, kernels in found.items()} == {"prepare_chunks": 1, "walk_chunks": 1}
    prepare, walk = found["prepare_chunks"][0], found["walk_chunks"][0]
    assert prepare.grid == (96, STEPS // 64)
    assert 2 * (prepare.shared + 1024) <= 228 * 1024, "two programs fit a multiprocessor"
    assert prepare.count(r"LDG\.E\.128") >= 8, "z, 16 bytes an access"
    assert prepare.count(r"LDGSTS\.E\.BYPASS\.128") == 2 * 8, "q and k, copied"
    assert prepare.count(r"STG\.E\.128") >= 3 * 8
    assert prepare.count("HMMA") == 2 * 64 + 2 * 16 + 9 * 2, "scores, norms and the inverse"
    assert walk.grid == (1, 96)
    assert walk.count(r"LDGSTS\.E\.BYPASS\.128") == 2 * 21, "six tiles and a vector copied ahead, 16 bytes an access, from two places"
    assert products(walk) == (8 + 8 + 4 + 4 + 4, 4)
    assert walk.shared > 2 * 80 * 1024, "two chunks at a time"


def test_few_heads_of_packed_sequences_with_states_compile_too() -> None:
    found = compiled(12, 4)
    check(found)
    assert {name: len(kernels) for name, kernels in found.items()} == {"chunk_table": 2, "prepare_chunks": 1, "walk_chunks": 2, "compose_segments": 1}
    assert [k.count("HGMMA") for k in found["walk_chunks"]] == [16, 28]
    assert found["compose_segments"][0].count("HGMMA") > 0


def test_gates_may_be_fp32() -> None:
    found = compiled(96, None, torch.float32)
    check(found)
    assert {name: len(kernels) for name, kernels in found.items()} == {"prepare_chunks": 1, "walk_chunks": 1}
