"""KDA forward beside flash-linear-attention's on a CUDA device: the error of both against the recurrence in fp64. Apart from test_kda_device.py because
the peer's first calls compile for minutes; skipped where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "kernels"))
    from kda_cases import KEYS, raw, relative

    from driftline.kernels.kda.autograd import kda_by_kernels
    from driftline.kernels.kda.composed import kda_composed


def test_errors_are_no_larger_than_the_peers() -> None:
    """Outputs with 2 % for chance; states, which both round alike, with 10 %."""
    ops = pytest.importorskip("fla.ops.kda")
    larger = []
    for keys in KEYS:
        for gate in ("slow", "mixed"):
            x = raw(1, 1024, 20, keys=keys, gate=gate, device="cuda")
            wide = x.double()
            want, want_final = kda_composed(wide.q, wide.k, wide.v, wide.z, wide.beta, wide.a_log, wide.dt_bias)
            o, final = kda_by_kernels(x.q, x.k, x.v, x.z, x.beta, x.a_log, x.dt_bias, -5.0, None, None)
            peer, peer_final = ops.chunk_kda(
                x.q, x.k, x.v, x.z, x.beta, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=-5.0, A_log=x.a_log, dt_bias=x.dt_bias)
            ours, theirs = relative(o, want), relative(peer, want)
            ours_final, theirs_final = relative(final, want_final), relative(peer_final, want_final)
            print(f"{keys} {gate}: outputs {ours:.5f} beside {theirs:.5f}, states {ours_final:.5f} beside {theirs_final:.5f}")
            if ours > 1.02 * theirs or ours_final > 1.1 * theirs_final:
                larger.append((keys, gate))
    assert not larger
