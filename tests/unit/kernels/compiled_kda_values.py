"""The KDA forward kernels as the compiler leaves them for Hopper, their PTX run on the CPU, against the recurrence in fp64 and bit for bit against
themselves. Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kda_cases import DOUBLED, LATE, LATE_ANCHOR, Raw, altered, edited, raw, relative
from ptx_machine import launches_of, run_on_cpu

from driftline.kernels.kda import forward as fw
from driftline.kernels.kda import segments, triton_chunks
from driftline.kernels.kda.composed import kda_composed
from driftline.kernels.kda.operator import kernel_inputs
from driftline.kernels.offline import CompiledKernel, compiling_for

torch.set_num_threads(1)

Result = tuple[torch.Tensor, torch.Tensor]


KERNELS: list[CompiledKernel] = []


@pytest.fixture(autouse=True, scope="module")
def compiler() -> Iterator[None]:
    """One for the whole file, so that nothing is compiled twice."""
    global KERNELS
    with compiling_for(90) as KERNELS:
        yield


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few heads as if they were many."""
    monkeypatch.setattr(fw, "segmented", lambda heads: False)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fw, "SEGMENT", 128)


def forward(inputs: fw.Inputs, cu: torch.Tensor | None = None, **options: Any) -> Result:
    """`fw.forward`, whose launches are run on the CPU; no shared memory is read or overwritten without a barrier between."""
    results: list[Result] = []
    launches = launches_of(lambda: results.append(fw.forward(inputs, cu, **options)), KERNELS)
    if launches:
        for output in results[0]:
            output.fill_(float("nan"))
        given = [x for x in (*inputs, cu, *results[0]) if isinstance(x, torch.Tensor)]
        assert run_on_cpu(launches, given) == set()
    return results[0]


def run(x: Raw, state: torch.Tensor | None = None, cu: torch.Tensor | None = None, panel: int = fw.PANEL) -> Result:
    return forward(kernel_inputs(*x, -5.0, state), cu, panel=panel)


def exact(x: Raw, state: torch.Tensor | None = None, cu: torch.Tensor | None = None) -> Result:
    return kda_composed(*x.double(), -5.0, None if state is None else state.double(), cu)


def states(count: int, heads: int = 1, seed: int = 9) -> torch.Tensor:
    return 0.3 * torch.randn(count, heads, 128, 128, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("keys", "gate", "bound"), [
    ("random", "slow", 0.006), ("random", "fast", 0.006), ("random", "fastest", 0.006), ("random", "mixed", 0.006), ("identical", "slow", 0.015),
    ("near_identical", "slow", 0.015), ("correlated", "mixed", 0.01)])
def test_outputs_and_state_are_those_of_the_recurrence(plain: None, keys: str, gate: str, bound: float) -> None:
    x, state = raw(1, 150, 1, keys=keys, gate=gate), states(1)
    o, final = run(x, state)
    want, want_final = exact(x, state)
    assert relative(o, want) < bound
    assert relative(final, want_final) < bound


def test_sixty_four_equal_tokens_at_the_slowest_gate_stay_finite_and_right(plain: None) -> None:
    """What breaks an inverse by doubling: one key, no decay, beta near 1 (and a decay of nothing is 0 exactly)."""
    x = raw(1, 192, 1, keys="identical", gate="slow")
    x = x._replace(z=torch.full_like(x.z, -60.0), beta=torch.full_like(x.beta, 8.0))
    o, final = run(x)
    want, want_final = exact(x)
    assert relative(o, want) < 0.03
    assert relative(final, want_final) < 0.06, "the state is the last value alone, all others cancelled"


def test_packed_sequences_of_any_length_get_what_each_gets_alone(plain: None) -> None:
    cu = torch.tensor([0, 64, 64, 65, 200, 229])
    x, state = raw(1, 229, 2), states(5, 2)
    o, final = run(x, state, cu)
    for n in range(5):
        start, stop = int(cu[n]), int(cu[n + 1])
        if start == stop:
            assert torch.equal(final[n], state[n]), "a sequence without tokens keeps its state"
            continue
        alone, alone_final = run(x.tokens(start, stop), state[n : n + 1])
        assert torch.equal(o[:, start:stop], alone)
        assert torch.equal(final[n : n + 1], alone_final)


@pytest.mark.parametrize("cu", [None, [0, 1, 130, 300]])
def test_where_panels_end_does_not_show(plain: None, cu: list[int] | None) -> None:
    bounds = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    x = raw(2 if cu is None else 1, 300 if cu else 200, 1)
    state = states(3 if cu else 2)
    whole = run(x, state, bounds)
    for panel in (64, 128):
        assert all(torch.equal(a, b) for a, b in zip(run(x, state, bounds, panel), whole, strict=True))


def test_gates_in_fp32_have_the_bits_of_the_same_gates_in_bfloat16(plain: None) -> None:
    x = raw(1, 70, 1)
    assert all(torch.equal(a, b) for a, b in zip(run(x._replace(z=x.z.float(), beta=x.beta.float())), run(x), strict=True))


def test_more_chunks_than_a_launch_can_have_take_several(plain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = raw(1, 200, 2)
    whole = run(x)
    monkeypatch.setattr(fw, "_GRID", 3)
    assert all(torch.equal(a, b) for a, b in zip(run(x), whole, strict=True))


def test_a_row_of_a_batch_gets_what_it_gets_alone(plain: None) -> None:
    x, state = raw(3, 70, 2), states(3, 2)
    o, final = run(x, state)
    row = Raw(x.q[1:2], x.k[1:2], x.v[1:2], x.z[1:2], x.beta[1:2], x.a_log, x.dt_bias)
    alone, alone_final = run(row, state[1:2])
    assert torch.equal(o[1:2], alone)
    assert torch.equal(final[1:2], alone_final)


def test_pieces_of_whole_chunks_with_a_carried_state_have_the_bits_of_the_whole(plain: None) -> None:
    x = raw(1, 200, 1)
    o, final = run(x)
    for cut, same in ((64, True), (128, True), (32, False)):
        first, state = run(x.tokens(0, cut))
        second, last = run(x.tokens(cut, 200), state)
        assert torch.equal(torch.cat([first, second], 1), o) is same
        assert torch.equal(last, final) is same


@pytest.mark.parametrize("token", [1, 37, 63, 100])
def test_what_follows_does_not_change_a_bit_of_what_came_before(plain: None, token: int) -> None:
    x = raw(1, 128, 1)
    before, _ = run(x)
    after, _ = run(edited(x, token))
    assert torch.equal(before[:, :token], after[:, :token])
    assert not torch.equal(before[:, token], after[:, token])


def test_an_anchor_after_the_row_would_be_found(plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = altered(triton_chunks, tmp_path, LATE, grow=LATE_ANCHOR)
    monkeypatch.setattr(triton_chunks, "prepare_chunks", wrong.prepare_chunks)
    x = raw(1, 64, 1)
    before, _ = run(x)
    after, _ = run(edited(x, 37))
    assert relative(before, exact(x)[0]) < 0.006, "the same function but for rounding"
    assert not torch.equal(before[:, :37], after[:, :37])


def test_an_inverse_by_doubling_would_be_found(plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = raw(1, 128, 1, keys="near_identical")
    right = relative(run(x)[0], exact(x)[0])
    wrong = altered(triton_chunks, tmp_path, DOUBLED, solved="_doubled(diagonal)")
    monkeypatch.setattr(triton_chunks, "prepare_chunks", wrong.prepare_chunks)
    assert not relative(run(x)[0], exact(x)[0]) < 3 * right


def test_segments_are_the_same_function_and_the_first_has_the_same_bits(short_segments: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, state = raw(2, 300, 1), states(2)
    o, final = run(x, state)
    want, want_final = exact(x, state)
    assert relative(o, want) < 0.006
    assert relative(final, want_final) < 0.006
    monkeypatch.setattr(fw, "segmented", lambda heads: False)
    plain_o, plain_final = run(x, state)
    assert torch.equal(o[:, :128], plain_o[:, :128])
    assert not torch.equal(o[:, 128:], plain_o[:, 128:])
    assert relative(o, plain_o) < 0.004
    assert relative(final, plain_final) < 0.004


def test_segments_of_packed_sequences_begin_at_each_ones_start(short_segments: None) -> None:
    cu = torch.tensor([0, 130, 130, 131, 400])
    x, state = raw(1, 400, 1), states(4)
    o, final = run(x, state, cu)
    for n, (start, stop) in enumerate(((0, 130), (130, 130), (130, 131), (131, 400))):
        if start == stop:
            assert torch.equal(final[n], state[n])
            continue
        alone, alone_final = run(x.tokens(start, stop), state[n : n + 1])
        assert torch.equal(o[:, start:stop], alone)
        assert torch.equal(final[n : n + 1], alone_final)


def test_segments_forget_nothing_at_the_slowest_gate(short_segments: None) -> None:
    """A walk that starts from nothing after enough decay would lose a state that never decays."""
    x, state = raw(1, 384, 1, gate="slow"), 10 * states(1)
    x = x._replace(z=torch.full_like(x.z, -60.0), beta=torch.full_like(x.beta, -60.0))
    _, final = run(x, state)
    assert relative(final, state) < 1e-6


def test_slices_of_a_wider_projection_are_read_where_they_lie(plain: None) -> None:
    x = raw(2, 70, 2)
    mixed = torch.stack([x.q, x.k, x.v], 2)
    q, k, v = mixed.unbind(2)
    assert not q.is_contiguous()
    inputs = kernel_inputs(q, k, v, *x[3:], -5.0, None)
    assert inputs.q.data_ptr() == q.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(forward(inputs), run(x), strict=True))


def test_positions_that_neither_decay_nor_write_leave_the_state(plain: None) -> None:
    x, state = raw(1, 140, 1), states(1)
    for tensor in (x.z, x.beta):
        tensor[:, 50:] = -1e4
    _, final = run(x, state)
    _, want = run(x.tokens(0, 50), state)
    assert torch.equal(final, want)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 700), max_size=9), st.sampled_from([64, 128]))
def test_the_table_names_every_piece_of_every_sequence(lengths: list[int], tokens: int) -> None:
    cu = torch.tensor([0, *lengths]).cumsum(0)
    layouts: list[fw.Layout] = []
    launches = launches_of(lambda: layouts.append(fw.layout_of(1, int(cu[-1]), cu, tokens)), KERNELS)
    assert run_on_cpu(launches, [cu]) == set()
    (layout,) = layouts
    want = [[n, int(cu[n]) + i * tokens, min(tokens, length - i * tokens), i] for n, length in enumerate(lengths) for i in range(-(-length // tokens))]
    assert layout.table is not None
    assert layout.offsets is not None
    assert layout.table[: len(want)].tolist() == want
    assert bool((layout.table[len(want) :, 0] == -1).all())
    assert layout.offsets.tolist() == [sum(-(-m // tokens) for m in lengths[:n]) for n in range(len(lengths) + 1)]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("in_segments", [False, True])
def test_sequences_without_any_token_keep_their_states(lengths: list[int], in_segments: bool) -> None:
    x, state = raw(1, 1, 1).tokens(0, 0), states(len(lengths))
    inputs = kernel_inputs(x.q, x.k, x.v, x.z, x.beta, x.a_log, x.dt_bias, -5.0, state)
    o, final = forward(inputs, torch.zeros(len(lengths) + 1, dtype=torch.int32), in_segments=in_segments)
    assert o.shape == x.v.shape
    assert torch.equal(final, state)


def test_the_rule_for_segments_reads_heads_alone_and_its_length_is_whole_chunks() -> None:
    assert segments.segmented(12)
    assert not segments.segmented(96)
    assert segments.SEGMENT % fw.CHUNK == 0
