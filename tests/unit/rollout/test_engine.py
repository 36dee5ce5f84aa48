"""The engine: what it reports is what the model says, and what it samples depends on weights, group and member alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_cases import completion, finish_all, group, held_by, policy, recomputed, sampled, weights

from driftline.messages.codec import decode, encode
from driftline.messages.types import Finish, Trajectory
from driftline.models.cache import Cache, KdaState, MlaRows
from driftline.models.state import load_state
from driftline.services.rollout.engine import Engine


def k3(ours: np.ndarray, theirs: np.ndarray) -> float:
    log_ratio = ours.astype(np.float64) - theirs.astype(np.float64)
    return float(np.mean(np.expm1(log_ratio) - log_ratio))


def test_reported_logprobs_are_those_of_a_full_forward() -> None:
    groups = [group(i, temperature=t) for i, t in enumerate((1.0, 0.6, 1.0, 1.7))]
    done = sampled(groups, max_batch=8)
    model = policy()
    assert len(done) == 12
    for trajectory in done.values():
        reported = trajectory.logprobs[trajectory.action_mask]
        assert k3(recomputed(model, trajectory), reported) < 1e-10
        assert (reported < 0).all()
    wrong = policy()
    with torch.no_grad():
        wrong.model.norm.weight[0] += 0.01
    some = next(iter(done.values()))
    assert k3(recomputed(wrong, some), some.logprobs[some.action_mask]) > 1e-8, "the comparison must be able to fail"


def test_a_trajectory_is_well_formed_and_survives_the_wire() -> None:
    """L19, S5 (docs/field_failures.md)."""
    done = sampled([group(0), group(1, prompt="é漢🙂")], record_routes=True)
    for (name, member), t in done.items():
        assert t.prompt_tokens == len(t.tokens) - int(t.action_mask.sum())
        assert t.tokens[0] == 256
        assert t.tokens[t.prompt_tokens - 1] == 10
        assert not t.action_mask[: t.prompt_tokens].any()
        assert (t.logprobs[: t.prompt_tokens] == 0).all()
        assert (t.versions[t.action_mask] == 0).all()
        assert (t.group, t.member, t.members) == (name, member, 3)
        assert t.started_at <= t.finished_at
        back = decode(encode(t))
        assert isinstance(back, Trajectory)
        assert np.array_equal(back.tokens, t.tokens)
        assert np.array_equal(back.logprobs, t.logprobs)


def test_tokens_do_not_depend_on_the_batch_the_order_or_the_limit() -> None:
    groups = [group(i, members=1 + i % 4) for i in range(7)]
    together = sampled(groups, dtype=torch.float64, max_batch=64)
    backwards = sampled(groups[::-1], dtype=torch.float64, max_batch=5)
    singly = {}
    for one in groups:
        singly |= sampled([one], dtype=torch.float64, max_batch=1)
    assert together.keys() == backwards.keys() == singly.keys()
    for key, trajectory in together.items():
        assert completion(trajectory) == completion(backwards[key]) == completion(singly[key]), key
        np.testing.assert_allclose(trajectory.logprobs, singly[key].logprobs, atol=1e-6)


def test_a_redelivered_member_samples_the_same_tokens() -> None:
    """L8 (docs/field_failures.md)."""
    whole = sampled([group(3, members=4)], dtype=torch.float64)
    engine = Engine(policy(dtype=torch.float64), version=0)
    engine.submit(group(5))
    engine.step()
    engine.submit(group(3, members=4), members=[2])
    again = finish_all(engine)
    assert completion(again["g00000003", 2]) == completion(whole["g00000003", 2])
    assert ("g00000003", 0) not in again


def test_members_groups_and_seeds_sample_differently() -> None:
    """L16 (docs/field_failures.md)."""
    prompt = "the same question"
    done = sampled([group(0, members=8, prompt=prompt), group(1, members=8, prompt=prompt)])
    other_seed = sampled([group(0, members=8, prompt=prompt, seed=8)])
    texts = [tuple(completion(t)) for t in (*done.values(), *other_seed.values())]
    assert len(set(texts)) > 20


def test_a_group_shares_one_prefill() -> None:
    engine = Engine(policy(), version=0)
    engine.submit(group(0, members=6))
    engine.submit(group(1, members=2))
    engine.step()
    lengths = [len(engine.tokenizer.encode_prompt(group(i).task.prompt)) for i in (0, 1)]
    assert engine.prompt_tokens == sum(lengths)
    assert engine.active + engine.waiting <= 8
    finish_all(engine)
    assert engine.prompt_tokens == sum(lengths), "nothing is prefilled again while decoding"


def test_every_sampled_token_is_counted_once() -> None:
    engine = Engine(policy(), version=0, max_batch=4)
    for i in range(4):
        engine.submit(group(i))
    done = finish_all(engine)
    assert engine.tokens_sampled == sum(len(completion(t)) for t in done.values())


def test_groups_enter_whole_in_order_and_within_the_limit() -> None:
    engine = Engine(policy(), version=0, max_batch=5)
    for i, members in enumerate((3, 3, 2)):
        engine.submit(group(i, members=members, max_tokens=3))
    engine.step()
    assert engine.waiting in (2, 5), "the second group does not fit beside the first, and nobody overtakes it"
    finish_all(engine)
    wide = Engine(policy(), version=0, max_batch=2)
    wide.submit(group(9, members=6, max_tokens=2))
    assert len(finish_all(wide)) == 6, "a group larger than the limit runs alone"


def test_a_version_that_arrives_midway_stamps_the_tokens_it_makes() -> None:
    """S4 (docs/field_failures.md)."""
    engine = Engine(policy(0, stops=False), version=4)
    engine.submit(group(0, members=4, max_tokens=10))
    for _ in range(4):
        engine.step()
    engine.load(5, weights(1))
    done = finish_all(engine)
    long = [t for t in done.values() if len(completion(t)) == 10]
    assert long
    for t in long:
        assert t.versions[t.action_mask].tolist() == [4] * 4 + [5] * 6
        assert t.oldest_version == 4
        first = t.logprobs[t.action_mask][:4]
        assert k3(recomputed(policy(0, stops=False), t)[:4], first) < 1e-10, "what was sampled before keeps its log-probability"


def test_rows_in_flight_go_on_with_their_caches_and_the_new_weights() -> None:
    """H21, S7, S19: Kept caches under new weights: one more token equals a decode by hand with the same mixture."""
    engine = Engine(policy(0, stops=False), version=0)
    engine.submit(group(0, members=2, max_tokens=8))
    engine.step()
    engine.step()
    held, last = Cache.cat([held_by(engine, row) for row in engine._rows]), torch.tensor([row.tokens[-1] for row in engine._rows])
    engine.load(1, weights(1))
    engine.step()
    with torch.no_grad():
        new = policy(1)
        logits = new.logits(new(last[:, None], cache=held).hidden[:, 0])
    want = torch.log_softmax(logits, -1)
    for i, row in enumerate(engine._rows):
        assert row.versions.tolist() == [0, 0, 1]
        assert row.logprobs[2] == pytest.approx(float(want[i, row.tokens[2]]), abs=1e-6)


def test_recomputing_rebuilds_the_caches_of_running_rows_under_the_new_weights() -> None:
    """S19 (docs/field_failures.md)."""
    engine = Engine(policy(0, stops=False), version=0)
    engine.submit(group(0, members=2, max_tokens=8))
    engine.submit(group(1, members=2, max_tokens=8))
    engine.step()
    engine.step()
    engine.step()
    engine.load(1, weights(1), recompute=True)
    new = policy(1)
    assert len(engine._rows) == 4
    for row in engine._rows:
        with torch.no_grad():
            alone = new(torch.tensor([row.prompt + row.tokens[:-1]])).cache
        for held, want in zip(held_by(engine, row).layers, alone.layers, strict=True):
            if isinstance(held, KdaState):
                assert isinstance(want, KdaState)
                torch.testing.assert_close(held.state, want.state, rtol=0, atol=1e-5)
                torch.testing.assert_close(held.tail, want.tail, rtol=0, atol=1e-5)
            else:
                assert isinstance(held, MlaRows)
                assert isinstance(want, MlaRows)
                torch.testing.assert_close(held.rows, want.rows, rtol=0, atol=1e-5)
    done = finish_all(engine)
    for t in done.values():
        made_by_new = t.versions[t.action_mask] == 1
        assert made_by_new.any()
        ours, theirs = recomputed(new, t)[made_by_new], t.logprobs[t.action_mask][made_by_new]
        assert k3(ours, theirs) < 1e-10, "with recomputed caches, new tokens are exactly the new policy's"


def test_loading_while_idle_and_recomputing_without_rows_is_plain_replacement() -> None:
    engine = Engine(policy(0), version=0)
    engine.load(3, weights(1), recompute=True)
    engine.submit(group(0))
    done = finish_all(engine)
    fresh = Engine(policy(1), version=3)
    fresh.submit(group(0))
    for key, t in finish_all(fresh).items():
        assert completion(done[key]) == completion(t)
        assert done[key].oldest_version == 3


def test_a_cancelled_group_is_forgotten_and_the_others_do_not_notice() -> None:
    alone = sampled([group(0), group(2)], dtype=torch.float64)
    engine = Engine(policy(dtype=torch.float64), version=0, max_batch=7)
    for i in range(4):
        engine.submit(group(i))
    engine.step()
    running = sum(row.group.group == "g00000001" for row in engine._rows)
    assert engine.cancel("g00000001") == running > 0
    assert engine.cancel("g00000003") == 3, "a waiting one too"
    assert engine.cancel("g00000001") == 0
    done = finish_all(engine)
    assert all(name in ("g00000000", "g00000002") for name, _ in done)
    assert all(completion(t) == completion(alone[key]) for key, t in done.items())


def test_cancelling_everything_leaves_an_idle_engine_that_works() -> None:
    engine = Engine(policy(), version=0)
    engine.submit(group(0, max_tokens=50))
    engine.step()
    engine.cancel("g00000000")
    assert engine.idle
    assert engine.step() == []
    engine.submit(group(1))
    assert len(finish_all(engine)) == 3


def test_submitting_no_members_is_nothing() -> None:
    engine = Engine(policy(), version=0)
    engine.submit(group(0), members=[])
    assert engine.idle


def test_reaching_max_tokens_is_length_and_the_end_token_is_stop() -> None:
    done = sampled([group(i, members=8, max_tokens=40) for i in range(3)])
    finishes = {t.finish for t in done.values()}
    assert finishes == {Finish.STOP, Finish.LENGTH}, "the case must show both"
    for t in done.values():
        tokens = completion(t)
        if t.finish is Finish.STOP:
            assert tokens[-1] == 257
            assert 257 not in tokens[:-1]
        else:
            assert len(tokens) == 40
            assert 257 not in tokens
        assert t.text == Engine(policy(), version=0).tokenizer.decode(tokens)
    one = sampled([group(0, max_tokens=1)])
    assert all(len(completion(t)) == 1 for t in one.values())


def test_routes_are_recorded_for_every_token_but_the_last() -> None:
    groups = [group(0, members=2), group(1, members=3)]
    done = sampled(groups, record_routes=True, max_batch=4)
    for t in done.values():
        assert t.routes is not None
        assert t.routes.shape == (len(t.tokens), 2, 2), "three layers, the first dense"
        assert t.routes.dtype == np.int16
        assert (t.routes[-1] == -1).all()
        assert ((t.routes[:-1] >= 0) & (t.routes[:-1] < 6)).all()
        with torch.no_grad():
            want = policy()(torch.from_numpy(t.tokens.astype(np.int64))[None, :-1]).routes[0]
        assert np.array_equal(t.routes[:-1], want.numpy())
    assert all(t.routes is None for t in sampled(groups).values())


def test_greedy_decoding_takes_the_most_probable_token_and_reports_its_probability() -> None:
    done = sampled([group(0, members=2, temperature=0.7)], greedy_decoding=True)
    one, two = done.values()
    assert completion(one) == completion(two)
    model = policy()
    tokens = torch.from_numpy(one.tokens.astype(np.int64))[None]
    with torch.no_grad():
        best = model.logits(model(tokens[:, :-1]).hidden[0, one.prompt_tokens - 1 :]).argmax(-1)
    assert best.tolist() == completion(one)
    assert k3(recomputed(model, one), one.logprobs[one.action_mask]) < 1e-10


def test_weights_that_do_not_fit_are_refused_and_the_engine_goes_on_with_the_old_ones() -> None:
    """H12 (docs/field_failures.md)."""
    engine = Engine(policy(), version=0)
    engine.submit(group(0))
    engine.step()
    broken = weights(1)
    broken["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(Exception, match=r"model\.norm\.weight"):
        engine.load(1, broken)
    done = finish_all(engine)
    assert all((t.versions[t.action_mask] == 0).all() for t in done.values())
    assert all(k3(recomputed(policy(), t), t.logprobs[t.action_mask]) < 1e-10 for t in done.values())


def test_an_engine_can_be_loaded_from_inference_weights() -> None:
    """Weights that were exported under inference mode are copied, not kept."""
    with torch.inference_mode():
        state = weights(1)
    engine = Engine(policy(0), version=0)
    engine.load(1, state)
    model = policy(0)
    load_state(model, state)
    assert all(torch.equal(a, b) for a, b in zip(engine.model.parameters(), model.parameters(), strict=True))
