"""The KDA forward kernels as the compiler leaves them for Hopper, their PTX run on the CPU: layouts, moves through shared memory, matrix instructions
and barriers, where interpreting the source sees none. Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import re

import pytest
import torch
from kda_cases import raw, relative
from ptx_machine import Launched, launches_of, run_on_cpu

from driftline.kernels.kda import forward as fw
from driftline.kernels.kda.composed import kda_composed
from driftline.kernels.kda.operator import kernel_inputs

torch.set_num_threads(1)


def test_packed_sequences_walked_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel there is: the table, preparing, transfers, composing and walking; tails, a length of 0 and one of 1."""
    monkeypatch.setattr(fw, "SEGMENT", 128)
    x, cu = raw(1, 201, 2), torch.tensor([0, 0, 1, 201])
    state = 0.3 * torch.randn(3, 2, 128, 128, generator=torch.Generator().manual_seed(1))
    inputs = kernel_inputs(x.q, x.k, x.v, x.z, x.beta, x.a_log, x.dt_bias, -5.0, state)
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    launches = launches_of(lambda: results.append(fw.forward(inputs, cu)))
    assert len(launches) == 6
    (o, final), = results
    for output in results[0]:
        output.fill_(float("nan"))
    given = [x.q, x.k, x.v, x.z, x.beta, inputs.a_log, inputs.dt_bias, state, cu, o, final]
    assert run_on_cpu(launches, given) == set()
    wide = x.double()
    want, want_final = kda_composed(wide.q, wide.k, wide.v, wide.z, wide.beta, wide.a_log, wide.dt_bias, -5.0, state.double(), cu)
    assert relative(o, want) < 0.006
    assert relative(final, want_final) < 0.006


def test_a_batch_walked_plainly_and_a_barrier_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fw, "segmented", lambda heads: False)
    x = raw(2, 70, 2)
    inputs = kernel_inputs(x.q, x.k, x.v, x.z, x.beta, x.a_log, x.dt_bias, -5.0, None)
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    launches = launches_of(lambda: results.append(fw.forward(inputs, None)))
    (o, final), = results
    given = [x.q, x.k, x.v, x.z, x.beta, inputs.a_log, inputs.dt_bias, o, final]
    assert run_on_cpu(launches, given) == set()
    wide = x.double()
    want, want_final = kda_composed(wide.q, wide.k, wide.v, wide.z, wide.beta, wide.a_log, wide.dt_bias)
    assert relative(o, want) < 0.006
    assert relative(final, want_final) < 0.006
    for kernel, arguments in launches:
        stripped = type(kernel)(**{**vars(kernel), "ptx": re.sub(r"\tbar\.sync[^\n]*\n", "", kernel.ptx), "grid": (1,)})
        found = run_on_cpu([Launched(stripped, arguments)], given)
        assert any("without a barrier" in line for line in found), "what was left out would be seen"
