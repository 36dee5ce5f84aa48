"""The short convolution's and the gated norm's kernels compiled for Hopper at K3's shapes: 36,864 channels; 96 heads of 128. Run by
test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from driftline.kernels.gated_norm import triton as norm
from driftline.kernels.offline import CompiledKernel, compiling_for
from driftline.kernels.short_conv import triton as conv

torch.set_num_threads(1)

STEPS, CHANNELS, ROWS = 8192, 36_864, 64


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@cache
def compiled() -> dict[str, CompiledKernel]:
    x, weight, tail = empty(1, STEPS, CHANNELS), empty(CHANNELS, 4, dtype=torch.float32), empty(1, 3, CHANNELS)
    slots, counts = empty(ROWS, dtype=torch.int32), empty(ROWS, dtype=torch.int32)
    o, gain = empty(STEPS, 96, 128), empty(128, dtype=torch.float32)
    launches: dict[str, Callable[[], object]] = {
        "prefill": lambda: conv.forward(x, weight, tail, None),
        "conv backward": lambda: conv.backward(x, weight, tail, x),
        "decode": lambda: conv.decode(empty(ROWS, 1, CHANNELS), weight, empty(256, 3, CHANNELS), slots),
        "replay": lambda: conv.replay(empty(ROWS, 4, CHANNELS), weight, empty(256, 7, CHANNELS), slots, counts),
        "norm": lambda: norm.forward(o, gain, o, 1e-5),
        "norm backward": lambda: norm.backward(o, gain, o, o, 1e-5),
    }
    found = {}
    with compiling_for(90) as kernels:
        for name, launch in launches.items():
            launch()
            found[name] = kernels[-1]
    assert len(kernels) == len(launches)
    return found


@pytest.mark.parametrize(("name", "programs"), [("prefill", 16), ("conv backward", 6), ("decode", 16), ("replay", 16), ("norm", 5), ("norm backward", 5)])
def test_enough_programs_fit_a_multiprocessor_and_nothing_is_spilled(name: str, programs: int) -> None:
    kernel = compiled()[name]
    assert kernel.stack == 0
    assert kernel.registers * kernel.warps * 32 * programs <= 65_536
    assert kernel.shared <= 32_768


@pytest.mark.parametrize("name", ["prefill", "conv backward", "decode", "replay", "norm", "norm backward"])
def test_values_move_in_wide_accesses_and_are_rounded_one_by_one(name: str) -> None:
    """16 bytes of a thread, and 8 in the convolution: more threads with less to hold keep more on the way."""
    kernel = compiled()[name]
    sass = kernel.sass()
    wide = "128" if "norm" in name else "64"
    assert f"LDG.E.{wide}" in sass or f"LDGSTS.E.BYPASS.{wide}" in sass
    assert f"STG.E.{wide}" in sass
    assert "LDG.E.U16" not in sass
    assert " ATOM" not in sass
    assert " RED" not in sass
    assert not [line for line in kernel.ptx.splitlines() if line.strip().startswith(("mul.f32", "add.f32", "sub.f32"))]
