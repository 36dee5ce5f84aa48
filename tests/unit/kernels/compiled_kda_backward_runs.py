"""KDA's backward as the compiler leaves it for Hopper, its PTX run on the CPU: layouts, operands in shared memory, matrix instructions and barriers,
where interpreting the source sees none. Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import re

import pytest
import torch
from kda_backward_cases import BOUND, case, errors, gradients
from machine_descriptors import descriptors
from ptx_machine import Launched, launches_of, run_on_cpu

from driftline.kernels.kda.triton_backward import Gradients, backward
from driftline.kernels.kda.triton_backward_decay import sums

torch.set_num_threads(1)

LIMITS = {"dq": 0.006, "dk": 0.006, "dv": 0.006, "dz": 0.01, "dbeta": 0.02, "da_log": 0.06, "ddt_bias": 0.01, "dinitial_state": 0.006}


@pytest.mark.parametrize("bounds", [None, (0, 2, 2, 66)])
def test_the_compiled_code_gives_the_recurrences_gradients(bounds: tuple[int, ...] | None) -> None:
    """A chunk and two tokens; and packed: two tokens, none, and a chunk."""
    one = case(1, 66, 1, bounds=bounds)
    results: list[Gradients] = []
    launches = launches_of(lambda: results.append(
        backward(one.q, one.k, one.v, one.z, one.beta, one.a_log, one.dt_bias, BOUND, one.initial, one.bounds, one.do, one.dfinal)))
    (found,) = results
    for output in found:
        output.fill_(float("nan"))
    matrices = sums(torch.device("cpu"))
    tables = [x for launch in launches for x in launch.arguments if isinstance(x, torch.Tensor) and not x.is_floating_point()]
    given = [*(x for x in one if x is not None), *matrices, *tables, *found]
    tiles: list[list[int]] = []
    assert run_on_cpu(launches, given, tiles) == set()
    assert {name: error for name, error in errors(found, gradients(one)).items() if not error <= LIMITS[name]} == {}
    followed = 0
    for launch, taken in zip(launches, tiles, strict=True):
        if launch.kernel.name in ("products", "values", "gradients"):
            assembled = descriptors(launch.kernel.sass(), 2 if launch.kernel.name == "values" else 4)
            assert assembled == taken[: len(assembled)], launch.kernel
            followed += len(assembled)
    assert followed >= 984
    kernel = next(launch for launch in launches if launch.kernel.name == "values")
    stripped = type(kernel.kernel)(**{**vars(kernel.kernel), "ptx": re.sub(r"\tbar\.sync[^\n]*\n", "", kernel.kernel.ptx), "grid": (1,)})
    hazards = run_on_cpu([Launched(stripped, kernel.arguments)], given)
    assert any("without a barrier" in line for line in hazards), "what was left out would be seen"
