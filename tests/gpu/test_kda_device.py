"""KDA forward on a CUDA device, at K3's widths: against the recurrence in fp64, and bit for bit against itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "kernels"))
    from kda_cases import DOUBLED, LATE, LATE_ANCHOR, Raw, altered, edited, raw, relative

    from driftline.kernels import dispatch
    from driftline.kernels.kda import forward as fw
    from driftline.kernels.kda import kda, triton_chunks
    from driftline.kernels.kda.composed import kda_composed
    from driftline.kernels.kda.operator import kernel_inputs

MANY, FEW = 96, 12
"""Heads of the whole layer, walked plainly, and of one of eight devices, walked in segments."""

BOUNDS = {"random": 0.006, "identical": 0.03, "near_identical": 0.03, "correlated": 0.02}
"""Relative error of outputs and state that operands in bfloat16 explain; keys that repeat cancel what was written, so their rounding weighs more."""


def fill_new_memory(fill: bool) -> None:
    """Whether every tensor that is made without values holds NaN."""
    torch.use_deterministic_algorithms(fill, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    fill_new_memory(True)
    yield
    fill_new_memory(False)


def forget_the_setting() -> None:
    """What dispatch read of the environment, so that it reads it again."""
    dispatch._setting.cache_clear()
    dispatch.has_triton.cache_clear()


def states(count: int, heads: int) -> torch.Tensor:
    return 0.3 * torch.randn(count, heads, 128, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(9))


def exact(x: Raw, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.double()
    return kda_composed(wide.q, wide.k, wide.v, wide.z, wide.beta, wide.a_log, wide.dt_bias, -5.0, None if state is None else state.double())


def run(x: Raw, state: torch.Tensor | None = None, cu: torch.Tensor | None = None, launch: fw.Launch | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = kernel_inputs(x.q, x.k, x.v, x.z, x.beta, x.a_log, x.dt_bias, -5.0, state)
    return fw.forward(inputs, cu, launch=launch)


@pytest.mark.parametrize("heads", ["MANY", "FEW"])
@pytest.mark.parametrize("gate", ["slow", "fast", "fastest", "mixed"])
@pytest.mark.parametrize("keys", ["random", "identical", "near_identical", "correlated"])
def test_outputs_and_state_are_those_of_the_recurrence(keys: str, gate: str, heads: str) -> None:
    count, steps = (MANY, 300) if heads == "MANY" else (FEW, 2500)
    x, state = raw(1, steps, count, keys=keys, gate=gate, device="cuda"), states(1, count)
    o, final = run(x, state)
    want, want_final = exact(x, state)
    assert torch.isfinite(o).all()
    assert relative(o, want) < BOUNDS[keys]
    assert relative(final, want_final) < BOUNDS[keys]


def test_one_key_for_sixteen_thousand_tokens_stays_finite() -> None:
    """The inputs on which an inverse by doubling left the range of fp16."""
    x = raw(1, 16_384, 1, keys="identical", device="cuda")
    x = x._replace(z=torch.full_like(x.z, -12.0), beta=torch.full_like(x.beta, 8.0), dt_bias=torch.zeros_like(x.dt_bias))
    o, final = run(x)
    assert torch.isfinite(o).all()
    assert torch.isfinite(final).all()
    assert o.abs().max() < 10


@pytest.mark.parametrize("heads", [52, 4])
def test_packed_sequences_of_any_length_get_what_each_gets_alone(heads: int) -> None:
    lengths = [0, 15, 1, 64, 0, 1500, 2049, 63, 1]
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    x, state = raw(1, sum(lengths), heads, device="cuda"), states(len(lengths), heads)
    o, final = run(x, state, cu)
    start = 0
    for n, length in enumerate(lengths):
        stop = start + length
        if length:
            alone, alone_final = run(x.tokens(start, stop), state[n : n + 1])
            assert torch.equal(o[:, start:stop], alone)
            assert torch.equal(final[n : n + 1], alone_final)
        else:
            assert torch.equal(final[n], state[n])
        start = stop


@pytest.mark.parametrize("heads", [52, 4])
def test_row_of_any_batch_gets_what_it_gets_alone(heads: int) -> None:
    x = raw(512, 130, heads, device="cuda")

    def rows(first: int, count: int) -> Raw:
        at = slice(first, first + count)
        return Raw(x.q[at], x.k[at], x.v[at], x.z[at], x.beta[at], x.a_log, x.dt_bias)

    for batch in (2, 7, 64, 512):
        o, final = run(rows(0, batch))
        for row in (0, batch // 2, batch - 1):
            alone, alone_final = run(rows(row, 1))
            assert torch.equal(o[row], alone[0])
            assert torch.equal(final[row], alone_final[0])


@pytest.mark.parametrize("heads", [MANY, FEW])
def test_a_thousand_repeats_have_one_result(heads: int) -> None:
    x = raw(1, 192 if heads == MANY else 1100, heads, device="cuda")
    o, final = run(x)
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        again, again_final = run(x)
        differs |= (again.view(torch.int16) != o.view(torch.int16)).any() | (again_final.view(torch.int32) != final.view(torch.int32)).any()
    assert not differs


@pytest.mark.parametrize("token", [1, 37, 640, 1024, 1030])
@pytest.mark.parametrize("heads", [52, 4])
def test_what_follows_does_not_change_a_bit_of_what_came_before(heads: int, token: int) -> None:
    x = raw(1, 1100, heads, device="cuda")
    before, _ = run(x)
    after, _ = run(edited(x, token))
    assert torch.equal(before[:, :token], after[:, :token])
    assert not torch.equal(before[:, token], after[:, token])
    short, _ = run(x.tokens(0, token))
    assert torch.equal(short, before[:, :token])


def test_an_anchor_after_the_row_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = raw(1, 64, 52, device="cuda")
    monkeypatch.setattr(triton_chunks, "prepare_chunks", altered(triton_chunks, tmp_path, LATE, grow=LATE_ANCHOR).prepare_chunks)
    before, _ = run(x)
    after, _ = run(edited(x, 37))
    assert relative(before, exact(x)[0]) < 0.01, "the same function but for rounding"
    assert not torch.equal(before[:, :37], after[:, :37])


def test_an_inverse_by_doubling_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = raw(1, 256, 52, keys="near_identical", device="cuda")
    right = relative(run(x)[0], exact(x)[0])
    monkeypatch.setattr(triton_chunks, "prepare_chunks", altered(triton_chunks, tmp_path, DOUBLED, solved="_doubled(diagonal)").prepare_chunks)
    assert not relative(run(x)[0], exact(x)[0]) < 3 * right


@pytest.mark.parametrize(("heads", "cut"), [(52, 640), (4, 1024)])
def test_pieces_with_a_carried_state_have_the_bits_of_the_whole(heads: int, cut: int) -> None:
    x = raw(1, 1100, heads, device="cuda")
    o, final = run(x)
    first, state = run(x.tokens(0, cut))
    second, last = run(x.tokens(cut, 1100), state)
    assert torch.equal(torch.cat([first, second], 1), o)
    assert torch.equal(last, final)


def test_every_way_to_launch_the_walk_gives_the_same_bits() -> None:
    x, state = raw(1, 700, 52, device="cuda"), states(1, 52)
    o, final = run(x, state)
    for launch in fw.WALK_CANDIDATES:
        other, other_final = run(x, state, launch=launch)
        assert torch.equal(other, o), launch
        assert torch.equal(other_final, final), launch


def test_offsets_beyond_two_to_the_thirty_first_are_reached() -> None:
    """2^31 elements of q come before the last tokens: what they get is what they get alone, from the state before them."""
    steps = 174_784
    fill_new_memory(False)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, steps, *shape, device="cuda", dtype=torch.bfloat16)

    x = Raw(normal(MANY, 128), normal(MANY, 128), normal(MANY, 128), normal(MANY, 128), normal(MANY), torch.zeros(MANY, device="cuda"),
            torch.zeros(MANY * 128, device="cuda"))
    assert x.q.numel() > 2**31
    o, final = run(x)
    cut = steps - 128
    _, state = run(x.tokens(0, cut))
    alone, last = run(x.tokens(cut, steps), state)
    assert torch.equal(o[:, cut:], alone)
    assert torch.equal(final, last)
    assert torch.isfinite(o[:, ::4096]).all()


def test_slices_of_a_wider_projection_are_read_where_they_lie() -> None:
    x = raw(2, 200, 52, device="cuda")
    q, k, v = torch.stack([x.q, x.k, x.v], 2).unbind(2)
    assert all(torch.equal(a, b) for a, b in zip(run(x._replace(q=q, k=k, v=v)), run(x), strict=True))


def forget_setting() -> None:
    """The setting is read once a process."""
    dispatch.has_triton.cache_clear()
    dispatch._setting.cache_clear()


def test_the_call_takes_the_kernels_when_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    x = raw(1, 200, 52, device="cuda")
    results = []
    for setting in ("triton", "reference"):
        monkeypatch.setenv("DRIFTLINE_KERNELS", setting)
        forget_setting()
        results.append(kda(x.q, x.k, x.v, x.z, x.beta, x.a_log, x.dt_bias))
    forget_setting()
    (o, final), (composed, _) = results
    assert torch.equal(o, run(x)[0])
    assert torch.equal(final, run(x)[1])
    assert not torch.equal(o, composed)
    assert relative(o, composed) < 0.006


@pytest.mark.parametrize("heads", [MANY, FEW])
def test_nothing_waits_for_the_device_and_a_graph_replays_it(heads: int) -> None:
    x, state = raw(1, 1500, heads, device="cuda"), states(2, heads)
    cu = torch.tensor([0, 400, 1500], device="cuda")
    o, final = run(x, state, cu)
    torch.cuda.synchronize()
    fill_new_memory(False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, captured_final = run(x, state, cu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    assert torch.equal(captured, o)
    assert torch.equal(captured_final, final)


def test_memory_beyond_inputs_and_outputs_is_a_panels_workspace() -> None:
    fill_new_memory(False)
    x = raw(1, 32_768, MANY, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, final = run(x)
    spent = torch.cuda.max_memory_allocated() - before - o.nbytes - final.nbytes
    assert spent <= 1.02 * fw.PANEL * fw.WORKSPACE_BYTES
