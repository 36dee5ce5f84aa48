"""What a runner does around its graphs: which is replayed, on what, and when none is. The graph itself is a device's; here a capture remembers in its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runner_cases import SLOTS, VOCABULARY, Bank, Eager, Graphs, Model, Remembers, States, batch

from driftline.kernels.mode import Numerics, using
from driftline.services.rollout.runner import EagerRunner, Sampled, runner_for

torch.set_num_threads(1)


def same(one: Sampled, other: Sampled) -> None:
    assert np.array_equal(one.tokens, other.tokens)
    assert np.array_equal(one.logprobs.view(np.int32), other.logprobs.view(np.int32))
    assert np.array_equal(one.routes, other.routes)


ROWS = ([3], [3, 1], [1, 4, 5], [4, 1, 5, 7, 8], [8, 9, 10, 2, 1, 0, 7, 3], [2], [0, 9, 5, 3, 1, 2, 4])


@pytest.mark.parametrize("window", [1, 3])
def test_replayed_steps_are_eager_steps_whatever_rows_come_and_go(window: int) -> None:
    model, states, other = Model(), States(), States()
    graphs, eager = Graphs(model, states, Remembers()), Eager(model, other)
    for step in range(3):
        for rows in ROWS:
            asked = batch(rows, step=step, window=window)
            same(graphs.decode(asked), eager.decode(asked))
    assert torch.equal(states.held[:SLOTS], other.held[:SLOTS])
    assert graphs.tally.replayed == 3 * len(ROWS)
    assert graphs.tally.eager == 0


def test_making_a_graph_moves_no_row() -> None:
    model, states = Model(), States()
    states.held.copy_(torch.randn(states.held.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    before = states.held.clone()
    graphs = Graphs(model, states, Remembers())
    assert graphs.warm() == len(graphs.graphs) == 4
    assert torch.equal(states.held[:SLOTS], before[:SLOTS])
    assert not torch.equal(states.held[SLOTS], before[SLOTS])  # it did run, on rows of padding


def test_steps_of_one_bucket_share_a_graph_and_others_do_not() -> None:
    capture = Remembers()
    graphs = Graphs(Model(), States(), capture)
    for rows in ([1, 2, 3], [5, 6, 7, 8], [4, 2, 1]):
        graphs.decode(batch(rows))
    assert capture.made == 1
    graphs.decode(batch([1, 2]))
    graphs.decode(batch([1, 2], window=2))
    graphs.decode(batch([1, 2], window=2, pages=17))
    graphs.decode(batch([1, 2], temperature=[0.0, 1.0]))
    with using(Numerics.DETERMINISTIC):
        graphs.decode(batch([1, 2]))
    assert capture.made == graphs.tally.captured == 6
    assert graphs.tally.padding == 2


def test_a_window_of_one_token_that_folds_is_not_a_plain_step() -> None:
    graphs = Graphs(Model(), States(), Remembers())
    folding = batch([1, 2], accepted=np.array([2, 0], dtype=np.int32))
    assert graphs.key(folding) != graphs.key(batch([1, 2]))


def test_a_graph_that_cannot_be_made_says_why_once_and_steps_go_on() -> None:
    model, capture = Model(), Remembers(RuntimeError("operation not permitted when stream is capturing\nmore"))
    graphs, eager = Graphs(model, States(), capture), Eager(model, States())
    for step in range(3):
        same(graphs.decode(batch([1, 2, 3], step=step)), eager.decode(batch([1, 2, 3], step=step)))
    assert capture.made == 1
    assert list(graphs.refused.values()) == ["RuntimeError: operation not permitted when stream is capturing"]
    assert graphs.tally.eager == 3


def test_a_step_that_reads_values_is_found_before_it_is_captured() -> None:
    model, states = Model(), States()
    states.reads_host = True
    graphs = Graphs(model, states, Remembers())
    same(graphs.decode(batch([1, 2])), Eager(model, States()).decode(batch([1, 2])))
    assert next(iter(graphs.refused.values())).startswith("HostRead: aten.")


def test_what_is_no_matter_of_capturing_is_raised() -> None:
    with pytest.raises(KeyError):
        Graphs(Model(), States(), Remembers(KeyError("no such layer"))).decode(batch([1]))


def test_the_graph_unused_for_longest_is_dropped() -> None:
    capture = Remembers()
    graphs = Graphs(Model(), States(), capture, most_graphs=2)
    for rows in ([1], [1, 2], [3], [1, 2, 3]):  # the graph of one row is used again before the third is made
        graphs.decode(batch(rows))
    assert sorted(key.shape.rows for key in graphs.graphs) == [1, 4]
    graphs.decode(batch([1, 2]))
    assert capture.made == 4


def test_weights_that_change_in_place_are_the_next_steps_and_keep_their_graphs() -> None:
    model, capture = Model(), Remembers()
    graphs = Graphs(model, States(), capture)
    before = graphs.decode(batch([1, 2]))
    model.lm_head.weight.copy_(-model.lm_head.weight)
    graphs.weights_changed()
    fresh = Eager(model, States())
    fresh.decode(batch([1, 2]))
    after = graphs.decode(batch([1, 2]))
    same(after, fresh.decode(batch([1, 2])))
    assert not np.array_equal(before.logprobs, after.logprobs)
    assert capture.made == 1


def test_a_weight_that_moved_costs_the_graphs_that_read_it() -> None:
    model, capture = Model(), Remembers()
    graphs = Graphs(model, States(), capture)
    graphs.decode(batch([1, 2]))
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    graphs.weights_changed()
    assert graphs.graphs == ()
    graphs.decode(batch([1, 2]))
    assert capture.made == 2


def test_rows_with_adapters_are_computed_eagerly_and_the_others_with_none() -> None:
    model, bank = Model(), Bank()
    graphs = Graphs(model, States(), Remembers(), bank=bank)
    graphs.decode(batch([1, 2, 3], adapters=(0, -1, 2)))
    assert graphs.tally.eager == 1
    assert bank.asked == [(0, -1, 2)]
    graphs.decode(batch([1, 2, 3], adapters=(-1, -1, -1)))
    assert graphs.tally.replayed == 1
    assert bank.asked[1:] == [(-1,) * 4]  # of the bucket, once: a replay asks nobody


def test_a_row_with_an_adapter_and_no_bank_is_refused() -> None:
    with pytest.raises(ValueError, match="no bank"):
        Graphs(Model(), States(), Remembers()).decode(batch([1, 2], adapters=(0, -1)))


def test_steps_may_be_launched_before_the_first_is_waited_for() -> None:
    """The second step's replay writes where the first one's results were: they have left by then."""
    model = Model()
    graphs, eager = Graphs(model, States(), Remembers()), Eager(model, States())
    first, second = (graphs.begin_decode(batch([1, 2], step=step)) for step in (0, 1))
    one, two = second.result(), first.result()
    same(two, eager.decode(batch([1, 2])))
    same(one, eager.decode(batch([1, 2], step=1)))


def test_more_rows_than_there_are_graphs_for_are_computed_eagerly() -> None:
    model = Model()
    graphs = Graphs(model, States(), Remembers(), max_batch=2)
    same(graphs.decode(batch([1, 2, 3])), Eager(model, States()).decode(batch([1, 2, 3])))
    assert (graphs.tally.replayed, graphs.tally.eager) == (0, 1)
    with pytest.raises(ValueError, match="max_batch"):
        graphs.key(batch([1, 2, 3]))


def test_a_greedy_runner_is_warmed_for_what_it_will_do() -> None:
    capture = Remembers()
    graphs = Graphs(Model(), States(), capture, greedy=True)
    made = graphs.warm()
    graphs.decode(batch([1, 2, 3]))
    graphs.decode(batch([1, 2, 3], temperature=[0.0, 1.0, 0.0]))
    assert capture.made == made


def test_a_row_of_temperature_zero_takes_its_likeliest_token_and_changes_no_other() -> None:
    model = Model()
    mixed, plain = Graphs(model, States(), Remembers()), Eager(model, States())
    cold = mixed.decode(batch([1, 2, 3], temperature=[1.0, 0.0, 1.0]))
    warm = plain.decode(batch([1, 2, 3]))
    assert np.array_equal(cold.tokens[[0, 2]], warm.tokens[[0, 2]])
    logits = model.logits(warm.hidden[1, 0])
    assert cold.tokens[1, 0] == int(logits.argmax())
    assert cold.logprobs[1, 0] == pytest.approx(float(torch.log_softmax(logits, -1).max()))
    greedy = Eager(model, States(), greedy=True).decode(batch([1, 2, 3]))
    assert np.array_equal(greedy.tokens[:, 0], model.logits(warm.hidden[:, 0]).argmax(-1).numpy())


def test_a_window_draws_what_plain_steps_draw() -> None:
    """Fed with what plain decoding sampled, a window samples it again, position by position."""
    model, plain_states = Model(), States()
    plain, rows = Eager(model, plain_states), [2, 5]
    tokens, drawn = batch(rows).tokens, []
    for step in range(3):
        drawn.append(plain.decode(batch(rows, tokens=tokens, lengths=np.zeros(2, dtype=np.int32), positions=np.full(2, step))))
        tokens = drawn[-1].tokens
    window = np.concatenate([batch(rows).tokens, *(d.tokens for d in drawn[:2])], axis=1)
    scored = Graphs(model, States(), Remembers()).decode(batch(rows, window=3, tokens=window, lengths=np.zeros(2, dtype=np.int32)))
    assert np.array_equal(scored.tokens, np.concatenate([d.tokens for d in drawn], axis=1))


def test_rows_drawn_in_parts_are_drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = Model(), batch([1, 2, 3, 4, 5], temperature=[1.0, 0.0, 1.0, 0.5, 0.0])
    whole = Eager(model, States()).decode(asked)
    monkeypatch.setattr("driftline.services.rollout.runner.step.CHANCES", 2 * VOCABULARY)
    same(Eager(model, States()).decode(asked), whole)


def test_a_rule_is_given_the_window_and_says_what_stands() -> None:
    seen = []

    def rule(logits, tokens, counts, temperatures, keys, positions, probs):  # type: ignore[no-untyped-def]
        seen.append((logits.shape, probs is not None))
        return tokens + 1, logits.amax(-1), counts - 1

    model = Model()
    graphs = Graphs(model, States(), Remembers(), rule=rule)
    asked = batch([1, 2, 3], window=3, counts=np.array([2, 1, 1], dtype=np.int32), probs=torch.full((3, 2, VOCABULARY), 1 / VOCABULARY, dtype=torch.float64))
    judged = graphs.decode(asked)
    assert judged.accepted is not None
    assert judged.accepted.tolist() == [1, 0, 0]
    assert np.array_equal(judged.tokens, asked.tokens + 1)
    assert seen[-1] == ((4, 3, VOCABULARY), True)
    assert graphs.decode(batch([1, 2, 3])).accepted is None  # nothing was drafted


def test_what_a_drafter_taps_comes_with_the_step_and_of_its_rows_alone() -> None:
    model, states = Model(), States()
    taps = lambda: states.held[:4].clone()  # noqa: E731
    out = Graphs(model, states, Remembers(), taps=taps).decode(batch([0, 1, 2]))
    assert out.taps is not None
    assert torch.equal(out.taps, states.held[:3])


def test_a_model_on_a_cpu_gets_the_eager_runner() -> None:
    assert type(runner_for(Model(), None, 8)) is EagerRunner  # type: ignore[arg-type]
