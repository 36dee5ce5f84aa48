"""The attention residual's pinned configurations, compiled for Hopper at K3's width: no padded lanes, wide loads, next to nothing spilled."""

from __future__ import annotations

import importlib
import re
from functools import cache

import pytest
import torch
import triton

from driftline.kernels.attention_residual import device
from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for

staged = importlib.import_module("driftline.kernels.attention_residual.staged")
kernels = importlib.import_module("driftline.kernels.attention_residual.triton")
torch.set_num_threads(1)

WIDTH, TOKENS, PIECES = 7168, 4096, 7
SPILLED = 320
"""Bytes of stack that a thread of the kernels for any width may take: some reloads in some thousand instructions."""
SPILLED_STAGED = {("backward", 8, True): 1536}
"""Of the staged kernels nothing, by the Triton 3.6 that they were timed with. 3.9 keeps more in one of them than there are registers, and in others a little."""
MULTIPROCESSOR = 233_472
"""Bytes of shared memory of one; a program takes 1,024 besides its own."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


@cache
def compiled(direction: str, rows: int, norm: bool, separate: bool, width: int = WIDTH) -> CompiledKernel:
    bank = [empty(TOKENS, width) for _ in range(rows)] if separate else empty(TOKENS, rows, width)
    prefix, vector = empty(TOKENS, width), empty(width)
    weight = vector if norm else None
    with compiling_for(90) as found:
        if direction == "forward":
            device.forward(bank, prefix, None if separate else prefix, vector, vector, 1e-5, weight, 1e-5)
        else:
            device.backward(bank, bank, 0 if separate else rows, prefix, prefix, None if separate else prefix, vector, vector, 1e-5, weight, 1e-5)
    return next(kernel for kernel in found if "mix" in kernel.name)


CASES = [("forward", 8, False, False), ("forward", 8, True, False), ("forward", 4, False, True), ("forward", 3, True, False),
         ("backward", 8, False, False), ("backward", 8, True, False), ("backward", 4, False, True), ("backward", 3, True, False)]


@pytest.mark.parametrize(("direction", "rows", "norm", "separate"), CASES)
def test_programs_fit_a_multiprocessor_and_copy_sixteen_bytes_at_a_time(direction: str, rows: int, norm: bool, separate: bool) -> None:
    kernel = compiled(direction, rows, norm, separate)
    print(kernel)
    launch = staged.launch_of(staged.FORWARD if direction == "forward" else staged.BACKWARD, rows, norm)[1]
    together = launch.programs // staged.MULTIPROCESSORS
    assert kernel.name == ("_mix_staged" if direction == "forward" else "_unmix_staged")
    assert kernel.grid == (launch.programs,)
    assert kernel.stack <= (0 if triton.__version__ < "3.7" else SPILLED_STAGED.get((direction, rows, norm), 64)), kernel
    assert kernel.registers * 32 * kernel.warps * together <= 65_536
    assert kernel.shared <= SHARED_LIMIT
    assert (kernel.shared + 1024) * together <= MULTIPROCESSOR
    sass = kernel.sass()
    assert sass.count("LDGSTS") == sass.count("LDGSTS.E.BYPASS.128") >= PIECES * 2


@pytest.mark.parametrize(("direction", "rows"), [("forward", 4), ("backward", 4)])
def test_a_stretch_costs_one_barrier(direction: str, rows: int) -> None:
    """More would mean that the compiler takes two slots for one, and puts a barrier between asking for one and reading another."""
    sass = compiled(direction, rows, False, True).sass()
    assert PIECES <= len(re.findall(r"\bBAR\.SYNC", sass)) < 2 * PIECES


@pytest.mark.parametrize(
    ("direction", "rows", "norm", "separate", "width"),
    [("forward", 8, False, False, WIDTH - 8), ("forward", 2, True, False, WIDTH), ("backward", 4, False, True, WIDTH - 8), ("backward", 1, False, False, WIDTH)],
)
def test_by_the_kernels_for_any_width_a_token_fits_the_registers_and_is_loaded_wide(
    direction: str, rows: int, norm: bool, separate: bool, width: int
) -> None:
    """7,160 columns are not whole stretches; of one or two bank rows any width is theirs."""
    kernel = compiled(direction, rows, norm, separate, width)
    assert kernel.name == ("_mix" if direction == "forward" else "_unmix")
    assert kernel.shared <= SHARED_LIMIT
    assert kernel.stack <= SPILLED, kernel
    wide = len(re.findall(r"LDG\.E[.A-Z0-9]*\.64", kernel.sass()))
    assert wide >= PIECES * (rows + 1), "the columns of a source are eight bytes a thread, 256 in a row a warp"
    table = kernels.FORWARD if direction == "forward" else kernels.BACKWARD
    launch = kernels.launch_of(table, rows, norm)[1]
    assert kernel.grid == (launch.programs,)
    assert kernel.registers * 32 * launch.warps * launch.programs <= 65_536 * kernels.MULTIPROCESSORS, "programs that are meant to run at once do"


def test_what_the_staged_kernels_take_is_settled_by_shape_and_dtype() -> None:
    def takes(width: int, dtype: torch.dtype = torch.bfloat16, rows: int = 3) -> bool:
        return bool(staged.takes(empty(2, rows, width, dtype=dtype), empty(2, width, dtype=dtype)))

    assert all(takes(width) for width in (2048, 4096, WIDTH))
    assert takes(WIDTH, rows=8)
    assert not any(takes(width) for width in (1024, 2304, WIDTH - 8, 8192))
    assert not any(takes(WIDTH, dtype) for dtype in (torch.float16, torch.float32))
    assert not any(takes(WIDTH, rows=rows) for rows in (0, 1, 2))
