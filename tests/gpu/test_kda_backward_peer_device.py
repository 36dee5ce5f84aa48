"""KDA's gradients beside flash-linear-attention's on a CUDA device: the error of both against the recurrence in fp64. Apart from
test_kda_backward_device.py because the peer's first calls tune for minutes; skipped where it is not installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "kernels"))
    from kda_backward_cases import BOUND, Kind, case, errors, gradients

    from driftline.kernels.kda.backward import kda_backward

TOLERATED = {"dq": 0.008, "dk": 0.008, "dv": 0.008, "dz": 0.02, "dbeta": 0.02, "da_log": 0.02, "ddt_bias": 0.02, "dinitial_state": 0.008}


def test_errors_are_no_larger_than_the_peers() -> None:
    """With 10 % for chance, where they are more than what the peer's own tests tolerate."""
    os.environ["FLA_FLASH_KDA"] = "0"
    ops = pytest.importorskip("fla.ops.kda")
    larger = []
    for kind in Kind:
        one = case(1, 512, 20, kind, device="cuda")
        wanted = gradients(one)
        found = kda_backward(one.q, one.k, one.v, one.z, one.beta, one.a_log, one.dt_bias, BOUND, one.initial, None, one.do, one.dfinal)
        leaves = [x.detach().requires_grad_() for x in (one.q, one.k, one.v, one.z, one.beta, one.a_log, one.dt_bias, one.initial)]
        q, k, v, z, beta, a_log, dt_bias, initial = leaves
        out, final = ops.chunk_kda(
            q, k, v, z, beta, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=BOUND, A_log=a_log, dt_bias=dt_bias)
        peers = torch.autograd.grad([out, final], leaves, [one.do, one.dfinal])
        ours, theirs = errors(found, wanted), errors(peers, wanted)
        print(kind.value, {name: (round(ours[name], 5), round(theirs[name], 5)) for name in ours})
        larger += [(kind.value, name, ours[name], theirs[name]) for name in ours if not ours[name] <= max(1.1 * theirs[name], TOLERATED[name])]
    assert not larger
