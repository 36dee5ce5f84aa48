"""The attention residual's pinned configurations, compiled for Hopper at K3's width: no padded lanes, wide loads, next to nothing spilled."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for

kernels = importlib.import_module("driftline.kernels.attention_residual.triton")
unkernels = importlib.import_module("driftline.kernels.attention_residual.triton_backward")
torch.set_num_threads(1)

WIDTH, TOKENS, PIECES = 7168, 4096, 7
SPILLED = 160
"""Bytes of stack that a thread may take: a few reloads in some thousand instructions. What the kernels do for it saves hundreds."""


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def compiled(direction: str, rows: int, norm: bool, separate: bool) -> CompiledKernel:
    bank = [empty(TOKENS, WIDTH) for _ in range(rows)] if separate else empty(TOKENS, rows, WIDTH)
    prefix, vector = empty(TOKENS, WIDTH), empty(WIDTH)
    weight = vector if norm else None
    with compiling_for(90) as found:
        if direction == "forward":
            kernels.forward(bank, prefix, None if separate else prefix, vector, vector, 1e-5, weight, 1e-5)
        else:
            unkernels.backward(bank, bank, 0 if separate else rows, prefix, prefix, None if separate else prefix, vector, vector, 1e-5, weight, 1e-5)
    return next(kernel for kernel in found if kernel.name in ("_mix", "_unmix"))


@pytest.mark.parametrize(
    ("direction", "rows", "norm", "separate"),
    [("forward", 8, False, False), ("forward", 8, True, False), ("forward", 4, False, True), ("forward", 2, True, False), ("forward", 1, True, False),
     ("backward", 8, False, False), ("backward", 8, True, False), ("backward", 4, False, True), ("backward", 4, True, False), ("backward", 2, True, False),
     ("backward", 1, False, False)],
)
def test_a_token_fits_the_registers_and_is_loaded_wide(direction: str, rows: int, norm: bool, separate: bool) -> None:
    kernel = compiled(direction, rows, norm, separate)
    print(kernel)
    assert kernel.shared <= SHARED_LIMIT
    assert kernel.stack <= SPILLED, kernel
    wide = len(re.findall(r"LDG\.E[.A-Z0-9]*\.64", kernel.sass()))
    assert wide >= PIECES * (rows + 1), "the columns of a source are eight bytes a thread, 256 in a row a warp"
    table = kernels.FORWARD if direction == "forward" else kernels.BACKWARD
    launch = kernels.launch_of(table, rows, norm)[1]
    assert kernel.grid == (launch.programs,)
    assert kernel.registers * 32 * launch.warps * launch.programs <= 65_536 * kernels.MULTIPROCESSORS, "programs that are meant to run at once do"
