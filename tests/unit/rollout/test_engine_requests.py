"""Requests one by one: what they are given back, what is refused, turns of a session across versions, tenants beside each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import finish_all, group, policy, weights
from request_cases import finished, made, prompt, request

from driftline.kernels.mode import Numerics, using
from driftline.messages.errors import ConfigError, DriftlineError
from driftline.messages.types import Finish
from driftline.services.rollout.engine import Completion, Engine, QueueFull
from driftline.services.rollout.randomness import member_key


def test_a_request_samples_what_a_groups_member_with_its_key_and_prompt_samples() -> None:
    with using(Numerics.DETERMINISTIC):
        engine = made()
        engine.submit(group(0, members=2, temperature=0.8))
        members = finish_all(engine)
        (row,) = [t for (_, member), t in members.items() if member == 1]
        engine.submit_request(request("r", row.tokens[: row.prompt_tokens].tolist(), key=member_key(7, "g00000000", 1), max_tokens=12, stop_ids=None))
        done = finished(engine)["r"]
    assert done.tokens.tolist() == row.tokens[row.prompt_tokens :].tolist()
    assert np.array_equal(done.logprobs, row.logprobs[row.prompt_tokens :])
    assert done.routes is not None
    assert np.array_equal(done.routes[-len(done.tokens) :], row.routes[row.prompt_tokens :])  # type: ignore[index]
    assert (done.finish, done.prompt_tokens, done.cache_versions) == (row.finish, row.prompt_tokens, (0,))


def test_the_second_half_of_an_answer_is_drawn_as_if_it_had_been_one() -> None:
    """`first_draw` goes on where the draws before it ended."""
    with using(Numerics.DETERMINISTIC):
        tokens = prompt(3, 50)
        engine = made()
        engine.submit_request(request("whole", tokens, max_tokens=30))
        engine.submit_request(request("first", tokens, max_tokens=13, session="s"))
        done = finished(engine)
        engine.submit_request(request("second", [*tokens, *done["first"].tokens.tolist()], max_tokens=17, first_draw=13, session="s"))
        done |= finished(engine)
    assert [*done["first"].tokens, *done["second"].tokens] == done["whole"].tokens.tolist()
    assert [*done["first"].logprobs, *done["second"].logprobs] == done["whole"].logprobs.tolist()
    assert done["second"].cached_tokens == 50 + 12


def test_progress_is_everything_once_and_before_the_completion() -> None:
    engine = made()
    for i in range(3):
        engine.submit_request(request(f"r{i}", prompt(i, 20), key=i, max_tokens=4 + 3 * i))
    told: dict[str, tuple[list[int], list[float]]] = {f"r{i}": ([], []) for i in range(3)}
    done: dict[str, Completion] = {}
    while not engine.idle:
        engine.step()
        for name, tokens, logprobs in engine.take_progress():
            assert tokens
            told[name][0].extend(tokens)
            told[name][1].extend(logprobs)
        done |= {c.id: c for c in engine.take_completions()}
    assert engine.take_progress() == []
    for name, completion in done.items():
        assert told[name][0] == completion.tokens.tolist()
        assert np.float32(told[name][1]).tolist() == completion.logprobs.tolist()
        assert completion.finish is Finish.LENGTH


def test_it_ends_at_the_ids_it_was_given() -> None:
    engine = made()
    engine.submit_request(request("free", prompt(0, 20), max_tokens=30))
    first = finished(engine)["free"].tokens.tolist()
    engine.submit_request(request("stopped", prompt(0, 20), max_tokens=30, stop_ids=(first[7],)))
    stopped = finished(engine)["stopped"]
    assert stopped.finish is Finish.STOP
    assert stopped.tokens.tolist() == first[: first.index(first[7]) + 1]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"tokens": []}, "give at least one"), ({"tokens": [1, 264]}, r"each from 0 to 263"), ({"tokens": [-1]}, "each from 0"),
        ({"tokens": [1], "adapter": "mine"}, r"no such adapter is loaded"), ({"tokens": [1], "max_tokens": 2**20}, "the model leaves 0 "),
    ],
)
def test_what_cannot_be_sampled_from_is_refused_by_name(wrong: dict[str, Any], what: str) -> None:
    engine = made()
    with pytest.raises(DriftlineError, match=what) as refused:
        engine.submit_request(request("r", **wrong))
    assert "request r" in str(refused.value)
    assert isinstance(refused.value, ConfigError) == ("adapter" in wrong)
    assert engine.idle


def test_a_full_queue_refuses_and_takes_again_later() -> None:
    engine = made(queue_bytes=4000, max_batch=1)
    taken = 4000 // (512 + 4 * 50)
    for i in range(taken):
        engine.submit_request(request(f"r{i}", prompt(i, 50), max_tokens=2))
    with pytest.raises(QueueFull, match=r"rollout\.queue_mb"):
        engine.submit_request(request("more", prompt(0, 50), max_tokens=2))
    engine.step()
    engine.submit_request(request("later", prompt(9, 50), max_tokens=2))
    assert len(finished(engine)) == taken + 1


def test_a_cancelled_request_is_gone_wherever_it_was() -> None:
    engine = made(max_batch=2, prefill_tokens=64)
    for i, length in enumerate((20, 500, 20)):
        engine.submit_request(request(f"r{i}", prompt(i, length), key=i))
    engine.step()
    assert (engine.active, engine.waiting) == (2, 1)
    assert [engine.cancel(f"r{i}") for i in (0, 1, 2, 2)] == [1, 1, 1, 0], "running, halfway through its prompt, waiting, gone"
    assert engine.idle
    assert engine.take_completions() == []
    engine.cache.check()
    assert engine.cache.stats.leased_page_bytes == 0


def stale(engine: Engine) -> Completion:
    """A session's second turn, after a version came between."""
    first = prompt(0, 100)
    engine.submit_request(request("t0", first, session="s"))
    said = finished(engine)["t0"].tokens.tolist()
    engine.load(1, weights(1))
    follow = [*first, *said, *prompt(1, 30)]
    engine.submit_request(request("t1", follow, session="s"))
    engine.submit_request(request("other", follow, session="another"))
    engine.submit_request(request("nobody", follow))
    done = finished(engine)
    for name in ("other", "nobody"):
        assert done[name].cache_versions == (1,), "what an older policy computed is its own session's alone"
    return done["t1"]


def all_said(second: Completion) -> list[int]:
    """All tokens up to and with that turn's."""
    engine = made()
    engine.submit_request(request("t0", prompt(0, 100)))
    return [*prompt(0, 100), *finished(engine)["t0"].tokens.tolist(), *prompt(1, 30), *second.tokens.tolist()]


def test_a_session_goes_on_with_rows_of_an_older_policy_only_where_that_is_asked_for_and_says_so() -> None:
    fresh, kept = stale(made()), stale(made(resume_stale=True))
    assert (fresh.cached_tokens, fresh.cache_versions) == (0, (1,))
    assert (kept.cached_tokens, kept.cache_versions) == (119, (0, 1))
    assert kept.versions.tolist() == [1] * 20


def test_the_turn_after_that_hits_what_several_versions_wrote() -> None:
    engine = made(resume_stale=True)
    history = all_said(stale(engine))
    engine.submit_request(request("t2", [*history, *prompt(2, 10)], session="s"))
    done = finished(engine)["t2"]
    assert done.cached_tokens == len(history) - 1
    assert done.cache_versions == (0, 1)


def test_a_version_in_the_middle_leaves_nothing_that_a_new_prompt_hits() -> None:
    """A row of two versions, and then its very prompt again, under the second and under a third."""
    engine = made()
    tokens = prompt(0, 200)
    engine.submit_request(request("both", tokens))
    for _ in range(5):
        engine.step()
    engine.load(1, weights(1))
    both = finished(engine)["both"]
    assert both.cache_versions == (0, 1)
    assert both.versions.tolist() == [0] * 5 + [1] * 15
    for version in (1, 2):
        if version == 2:
            engine.load(2, weights(2))
        engine.submit_request(request("again", tokens))
        again = finished(engine)["again"]
        assert (again.cached_tokens, again.cache_versions) == (0, (version,))
        fresh = Engine(policy(version), version=version)
        fresh.submit_request(request("again", tokens))
        assert finished(fresh)["again"].tokens.tolist() == again.tokens.tolist()
    engine.submit_request(request("hit", [*tokens, *again.tokens.tolist()]))
    assert finished(engine)["hit"].cached_tokens == len(tokens) + len(again.tokens) - 1, "and under the same one it is hit"


def test_a_version_begins_again_the_prompts_that_are_halfway() -> None:
    engine = made(prefill_tokens=64)
    engine.submit_request(request("long", prompt(0, 300)))
    engine.step()
    assert (engine.active, engine.tokens_sampled) == (1, 0)
    engine.load(1, weights(1))
    done = finished(engine)["long"]
    assert done.cache_versions == (1,)
    assert set(done.versions.tolist()) == {1}
    fresh = Engine(policy(1), version=1)
    fresh.submit_request(request("long", prompt(0, 300)))
    np.testing.assert_allclose(finished(fresh)["long"].logprobs, done.logprobs, atol=1e-4)


def test_a_tenants_flood_does_not_hold_up_another() -> None:
    engine = made(max_batch=2)
    for i in range(30):
        engine.submit_request(request(f"flood{i}", prompt(i, 20), max_tokens=3, tenant="flood"))
    engine.submit_request(request("late", prompt(99, 20), max_tokens=3, tenant="late"))
    order: list[str] = []
    while not engine.idle:
        engine.step()
        order += [c.id for c in engine.take_completions()]
    assert order.index("late") < 6
    assert len(order) == 31


def test_an_update_that_failed_samples_nothing() -> None:
    engine = made()
    engine.submit_request(request("r", prompt(0, 10)))

    def write() -> None:
        with torch.no_grad():
            next(engine.model.parameters()).add_(1.0)
        raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        engine.adopt(1, write)
    with pytest.raises(DriftlineError, match="load a whole version"):
        engine.step()
    engine.load(1, weights(1))
    assert finished(engine)["r"].cache_versions == (1,)


def test_its_numbers_are_those_of_its_cache_and_its_queue() -> None:
    engine = made(max_batch=1)
    for i in range(3):
        engine.submit_request(request(f"r{i}", prompt(0, 100), session="s"))
    engine.step()
    numbers = engine.numbers()
    assert numbers["queued_bytes"] == 2 * (512 + 4 * 100)
    assert numbers["leased_bytes"] == 2 * engine.pool.page_bytes + engine.pool.state_bytes
    finished(engine)
    numbers = engine.numbers()
    assert numbers["prefix_hit_tokens"] == 64, "the second knew where to leave a state, and the third hit it"
    assert numbers["prefix_hit_rate"] == 64 / 300
    assert (numbers["leased_bytes"], numbers["queued_bytes"], numbers["preemptions"]) == (0, 0, 0)
    assert numbers["cached_bytes"] > 0
