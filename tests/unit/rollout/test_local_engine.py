"""The engine in a thread: what it says, what it drops, what it survives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
import torch
from engine_cases import policy, weights

from driftline.messages.errors import DriftlineError
from driftline.messages.types import Finish, Sampling
from driftline.services.gateway.client import Ask, EngineBusy, EngineFailed, Message, Piece
from driftline.services.rollout.engine import Engine, Request
from driftline.services.rollout.local import LocalEngine
from driftline.services.rollout.randomness import member_key

CONTEXT = 128


def engine(*, stops: bool = True, **settings: Any) -> Engine:
    return Engine(policy(0, stops=stops), version=3, max_batch=8, **settings)


def local(of: Engine | None = None, **settings: Any) -> LocalEngine:
    return LocalEngine(of or engine(), name="tiny", context=CONTEXT, **settings)


def ask(number: int = 0, **changes: Any) -> Ask:
    return Ask(**{"id": f"a{number}", "tokens": (256, 104, 105, 10 + number), "max_tokens": 20, "seed": number, **changes})


async def whole(served: LocalEngine, wanted: Ask) -> Piece:
    """All pieces together."""
    found = [piece async for piece in served.sample(wanted)]
    assert all(piece.finish is None for piece in found[:-1])
    assert all(len(piece.tokens) == len(piece.logprobs) == len(piece.versions) for piece in found)
    return Piece(sum((p.tokens for p in found), ()), sum((p.logprobs for p in found), ()), sum((p.versions for p in found), ()), found[-1].finish, found[-1].cached_tokens)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the engine's thread makes it true
            await asyncio.sleep(0.005)


def directly(wanted: Ask) -> tuple[list[int], list[float]]:
    """What the engine samples for it without a thread."""
    one = engine()
    one.submit_request(Request(wanted.id, wanted.tokens, Sampling(temperature=wanted.temperature, max_tokens=wanted.max_tokens), member_key(wanted.seed, "serve", wanted.draw)))
    for _ in range(200):
        one.step()
        done = one.take_completions()
        if done:
            return done[0].tokens.tolist(), done[0].logprobs.tolist()
    raise AssertionError("it does not end")


async def test_what_is_asked_is_what_the_engine_samples() -> None:
    async with local() as served:
        found = await asyncio.gather(*(whole(served, ask(i)) for i in range(12)))
        assert served.numbers()["tokens_sampled"] == sum(len(piece.tokens) for piece in found)
        assert served.card.version == 3
    for i, piece in enumerate(found):
        tokens, logprobs = directly(ask(i))
        assert list(piece.tokens) == tokens
        assert list(piece.logprobs) == pytest.approx(logprobs, abs=1e-4)
        assert set(piece.versions) == {3}
        assert piece.finish is (Finish.STOP if tokens[-1] == 257 else Finish.LENGTH)
    assert {piece.finish for piece in found} == {Finish.STOP, Finish.LENGTH}


async def test_tokens_are_told_as_they_come() -> None:
    async with local(engine(stops=False)) as served:
        pieces = [piece async for piece in served.sample(ask(max_tokens=30, ignore_eos=True))]
    assert len(pieces) > 10
    assert sum(len(piece.tokens) for piece in pieces) == 30


async def test_an_end_of_its_own_and_none_at_all() -> None:
    async with local() as served:
        free = await whole(served, ask(ignore_eos=True, max_tokens=40))
        assert len(free.tokens) == 40
        first = free.tokens[3]
        ended = await whole(served, ask(1, tokens=ask().tokens, seed=0, stop_ids=frozenset({first}), max_tokens=40))
    at = min(free.tokens.index(end) for end in (first, 257) if end in free.tokens)
    assert ended.tokens == free.tokens[: at + 1]
    assert ended.finish is Finish.STOP


async def test_the_engine_is_told_whose_turn_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    one, told = engine(), list[Request]()
    submit = one.submit_request
    monkeypatch.setattr(one, "submit_request", lambda request: (told.append(request), submit(request)))
    async with local(one) as served:
        await whole(served, ask(priority=-2, session="talk", stop_ids=frozenset({65}), draw=3))
    assert (told[0].priority, told[0].session, sorted(told[0].stop_ids or ()), told[0].key) == (2, "talk", [65, 257], member_key(0, "serve", 3))


async def test_who_leaves_is_dropped_from_the_engine() -> None:
    one = engine(stops=False)
    async with local(one) as served:
        async with aclosing(served.sample(ask(max_tokens=100, ignore_eos=True))) as pieces:
            await anext(pieces)
            assert one.active + one.waiting == 1
        await until(lambda: one.idle)
        assert one.tokens_sampled < 100
        again = await whole(served, ask(max_tokens=5))  # its name is free again
        assert len(again.tokens) == 5


async def test_an_id_that_is_being_sampled_is_refused() -> None:
    async with local(engine(stops=False)) as served, aclosing(served.sample(ask(max_tokens=100, ignore_eos=True))) as pieces:
        await anext(pieces)
        with pytest.raises(DriftlineError, match="request_id"):
            await whole(served, ask())
        assert (await anext(pieces)).tokens


async def test_a_full_queue_is_busy_and_what_is_queued_goes_on() -> None:
    async with local(engine(stops=False, queue_bytes=20_000)) as served:
        long = tuple([256] + [65] * 60)
        results = await asyncio.gather(*(whole(served, ask(i, tokens=long, max_tokens=3, ignore_eos=True)) for i in range(100)), return_exceptions=True)
    busy = [result for result in results if isinstance(result, EngineBusy)]
    done = [result for result in results if isinstance(result, Piece)]
    assert busy
    assert done
    assert len(busy) + len(done) == 100
    assert all(len(piece.tokens) == 3 for piece in done)


async def test_what_the_engine_has_not_taken_is_bounded_too() -> None:
    async with local(queue_bytes=2000) as served:
        with pytest.raises(EngineBusy, match="queue_mb"):
            await whole(served, ask(tokens=(256,) * 300))
        assert (await whole(served, ask())).tokens


async def test_a_prompt_that_is_none_is_the_asks_failure_alone() -> None:
    async with local() as served:
        with pytest.raises(DriftlineError) as failure:
            await whole(served, ask(tokens=(5000,)))
        assert not isinstance(failure.value, EngineFailed)
        assert (await whole(served, ask(1))).tokens


async def test_a_step_that_fails_fails_what_it_held_and_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    step, failing = one.step, [True]

    def fail() -> Any:
        if failing and one.active >= 2:
            failing.clear()
            raise ValueError("an odd number")
        return step()

    monkeypatch.setattr(one, "step", fail)
    async with local(one) as served:
        results = await asyncio.gather(*(whole(served, ask(i, ignore_eos=True)) for i in range(3)), return_exceptions=True)
        assert any(isinstance(result, EngineFailed) and "an odd number" in str(result) for result in results)
        assert not served.failure
        assert (await whole(served, ask(9))).tokens
        assert served.numbers()["failed_steps"] == 1


async def test_a_machine_that_fails_ends_it_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()

    def fail() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(one, "step", fail)
    async with local(one) as served:
        with pytest.raises(EngineFailed, match="out of memory"):
            await whole(served, ask())
        await until(lambda: served.failure)
        with pytest.raises(EngineFailed, match="out of memory"):
            await whole(served, ask(1))
        with pytest.raises(EngineFailed):
            await served.between_steps(lambda engine: engine.version)


async def test_weights_change_between_two_steps_and_every_token_says_which() -> None:
    one = engine(stops=False)
    async with local(one) as served, aclosing(served.sample(ask(max_tokens=100, ignore_eos=True))) as pieces:
        versions = list((await anext(pieces)).versions)
        await served.between_steps(lambda engine: engine.load(4, weights(1)))
        async for piece in pieces:
            versions += piece.versions
        assert served.card.version == 4
    assert versions == sorted(versions)
    assert set(versions) == {3, 4}
    assert len(versions) == 100


async def test_what_is_done_between_steps_raises_where_it_was_asked_for() -> None:
    async with local() as served:
        with pytest.raises(KeyError):
            await served.between_steps(lambda engine: {}["missing"])
        assert (await whole(served, ask())).tokens


async def test_closing_tells_who_waits() -> None:
    served = local(engine(stops=False))
    served.start()
    pieces = served.sample(ask(max_tokens=100, ignore_eos=True))
    await anext(pieces)
    await asyncio.to_thread(served.close)
    with pytest.raises(EngineFailed, match="closing"):
        async for _ in pieces:
            pass
    with pytest.raises(EngineFailed, match="closed"):
        await whole(served, ask(1))


def test_text_is_the_tokenizers() -> None:
    text = local().text
    assert text.encode_chat([Message("system", "a"), Message("user", "b")]) == [256, 97, 10, 98, 10]
    assert text.decode(text.encode("hé")) == "hé"
    assert text.eos_ids == (257,)
