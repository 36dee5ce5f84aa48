"""Requests of several turns through an engine: what a turn asks for is all that was said before, and what a tool answered."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from engine_cases import policy

from driftline.messages.types import Sampling
from driftline.services.rollout.engine import Completion, Engine, Request


def request(name: str, tokens: Sequence[int], *, max_tokens: int = 20, key: int = 1, **more: Any) -> Request:
    return Request(name, array("i", tokens), Sampling(temperature=0.8, max_tokens=max_tokens), key, stop_ids=more.pop("stop_ids", ()), **more)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def finished(engine: Engine) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    for _ in range(5000):
        if engine.idle:
            break
        engine.step()
        done |= {completion.id: completion for completion in engine.take_completions()}
    assert engine.idle
    engine.cache.check()
    return done


def turns(
    engine: Engine, *, sessions: int = 4, count: int = 3, length: int = 90, answer: int = 30, max_tokens: int = 20,
    between: Callable[[Engine, int], None] = lambda _engine, _turn: None,
) -> list[dict[str, Completion]]:
    """`count` turns of each session, all sessions side by side; `between` is called after each turn."""
    texts = {i: prompt(i, length + 7 * i) for i in range(sessions)}
    out = []
    for turn in range(count):
        for i, tokens in texts.items():
            engine.submit_request(request(f"s{i}t{turn}", tokens, key=i, first_draw=turn * max_tokens, session=f"s{i}", max_tokens=max_tokens))
        done = finished(engine)
        out.append(done)
        for i in texts:
            texts[i] = texts[i] + done[f"s{i}t{turn}"].tokens.tolist() + prompt(100 * turn + i, answer)
        between(engine, turn)
    return out


def made(**settings: Any) -> Engine:
    return Engine(policy(stops=False), version=0, record_routes=True, **settings)


def same(a: Sequence[dict[str, Completion]], b: Sequence[dict[str, Completion]]) -> bool:
    """To the bit: tokens, log-probabilities, routes."""
    assert [x.keys() for x in a] == [x.keys() for x in b]
    pairs = [(one[key], other[key]) for one, other in zip(a, b, strict=True) for key in one]
    return all(
        np.array_equal(x.tokens, y.tokens) and np.array_equal(x.logprobs, y.logprobs) and np.array_equal(x.routes, y.routes)  # type: ignore[arg-type]
        for x, y in pairs
    )
