"""What of KDA's benchmark and of its adapter for the peer's tests needs no device."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from benchmark_scripts import script

from driftline.kernels.kda.reference import bounded_gate, kda_recurrent

torch.set_num_threads(1)


def test_rows_name_their_shape_and_count_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton, the gpu extra")
    bench = script("kda", monkeypatch)
    shapes = bench.shapes(False, "")
    assert {(s.steps, s.heads) for s in shapes} == {(t, h) for t in bench.STEPS for h in bench.HEADS}
    assert [s.name for s in bench.shapes(False, "backward T=8192 H=12")] == ["T=8192 H=12 fast gates", "T=8192 H=12 slow gates"]
    forward, backward = bench.rows(shapes[0], bench.Measured(1.0, 2.0, 3, 4), None, None)
    assert (forward.ours_ms, backward.ours_ms, forward.peer_ms) == (1.0, 2.0, None)
    assert backward.bytes == 2308 * 4096 * 96


@pytest.mark.parametrize("in_kernel", [False, True])
def test_the_peers_call_gives_the_recurrence_through_our_operator(in_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another scale, queries of any length, gates and strengths given as they are or as their raw inputs; the state is theirs too."""
    tests = script("kda_public_tests", monkeypatch)
    q, k, v, z = (torch.randn(1, 20, 2, 128) for _ in range(4))
    k = torch.nn.functional.normalize(k, dim=-1)
    a_log, beta = torch.randn(2) * 0.3, torch.randn(1, 20, 2)
    nats, strength = bounded_gate(z, a_log), torch.sigmoid(beta)
    state = torch.randn(1, 2, 128, 128)
    kwargs = {"use_gate_in_kernel": True, "A_log": a_log, "lower_bound": -5.0, "use_beta_sigmoid_in_kernel": True} if in_kernel else {}
    out, final = tests.chunk_kda(q, k, v, z if in_kernel else nats, beta if in_kernel else strength, scale=0.7, initial_state=state, output_final_state=True, **kwargs)
    wanted, last = kda_recurrent(q * (0.7 * 128**0.5), k, v, nats, strength, state)
    assert (out - wanted).norm() < 0.01 * wanted.norm()
    assert (final - last).norm() < 0.01 * last.norm()


def test_what_ours_lacks_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = script("kda_public_tests", monkeypatch)
    x, beta = torch.randn(1, 4, 1, 64), torch.rand(1, 4, 1)
    with pytest.raises(pytest.skip.Exception, match="heads of 128"):
        tests.chunk_kda(x, x, x, -x.abs(), beta)
    x = torch.nn.functional.normalize(torch.randn(1, 4, 1, 128), dim=-1)
    with pytest.raises(pytest.skip.Exception, match="below -5"):
        tests.chunk_kda(x, x, x, x * 0 - 9.0, beta)
    with pytest.raises(pytest.skip.Exception, match="cp_context"):
        tests.chunk_kda(x, x, x, x * 0 - 1.0, beta, cp_context=object())
    with pytest.raises(pytest.skip.Exception, match="unit length"):
        tests.chunk_kda(x, x * 2, x, x * 0 - 1.0, beta)
