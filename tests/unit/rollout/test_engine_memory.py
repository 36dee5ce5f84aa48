"""In deterministic mode nothing that an engine does with its memory changes a bit of what it samples: hits, rows that make room, eviction, the host, slots that
others had. Each comparison is shown to fail where the memory is spoilt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import finish_all, group
from request_cases import finished, made, prompt, request, same, turns

from driftline.kernels.mode import Numerics, using
from driftline.messages.errors import ConfigError, DriftlineError
from driftline.models.paged import Pool
from driftline.services.rollout.engine import Completion, Engine, EngineMemory
from driftline.services.rollout.prefix import HostTier, PrefixCache
from driftline.services.rollout.speculation import NgramDrafter, Speculator

NONE = EngineMemory(prefix_cache=False)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with using(Numerics.DETERMINISTIC):
        yield


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Completion]]:
    """With nothing cached and room for everybody."""
    with using(Numerics.DETERMINISTIC):
        return turns(made(memory=NONE))


def sized(monkeypatch: pytest.MonkeyPatch, *, pages: int, slots: int, host: int = 0, **settings: Any) -> Engine:
    """An engine whose pool has exactly so many pages and slots."""
    from driftline.services.rollout.engine import memory, rows

    def plan(*_: Any, **__: Any) -> memory.Plan:
        return memory.Plan(pages, slots, (pages - 1) * 64 - 8)

    monkeypatch.setattr(rows, "plan", plan)
    return made(memory=EngineMemory(host_bytes=host), **settings)


def long_answers(engine: Engine) -> list[dict[str, Completion]]:
    """Four requests that all grow by some pages while they run."""
    for i in range(4):
        engine.submit_request(request(f"r{i}", prompt(i, 30 + 9 * i), key=i, max_tokens=170))
    return [finished(engine)]


@pytest.fixture(scope="module")
def roomy() -> list[dict[str, Completion]]:
    with using(Numerics.DETERMINISTIC):
        return long_answers(made(memory=NONE))


def spoil(pool: Pool) -> None:
    with torch.no_grad():
        for tensor in (*pool._paged(), *pool._recurrent()):
            tensor.mul_(1.5)


def test_a_turn_that_hits_its_sessions_rows_computes_only_what_is_new(plain: list[dict[str, Completion]]) -> None:
    engine = made()
    hits = turns(engine)
    assert same(hits, plain)
    for turn, done in enumerate(hits):
        for completion in done.values():
            before = hits[turn - 1][completion.id.replace(f"t{turn}", f"t{turn - 1}")] if turn else None
            assert completion.cached_tokens == (before.prompt_tokens + len(before.tokens) - 1 if before else 0), "all but the last token, which was never fed"
    whole = sum(c.prompt_tokens for done in plain for c in done.values())
    assert engine.prompt_tokens == whole - sum(c.cached_tokens for done in hits for c in done.values())


def test_rows_that_were_spoilt_in_the_cache_are_noticed(plain: list[dict[str, Completion]]) -> None:
    assert not same(turns(made(), between=lambda engine, _: spoil(engine.pool)), plain)


@pytest.mark.parametrize(("drafts", "host"), [(False, 0), (True, 2**20)])
def test_rows_that_make_room_for_others_go_on_as_if_nothing_had_been(roomy: list[dict[str, Completion]], drafts: bool, host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sized(monkeypatch, pages=9, slots=64, host=host, speculator=Speculator(NgramDrafter()) if drafts else None)
    done = long_answers(engine)
    assert engine.preemptions > 0, "the case must make somebody wait"
    assert (engine.cache.stats.moves.restored_pages > 0) == (host > 0), "it goes on from the host, or is computed again"
    assert same(done, roomy)


def test_a_group_whose_members_make_room_is_the_same_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [group(i, members=4, max_tokens=150, prompt="a question of some length " * (i + 1)) for i in range(3)]
    results = []
    for pages, slots in ((400, 64), (11, 13)):
        engine = sized(monkeypatch, pages=pages, slots=slots, max_batch=12)
        for one in groups:
            engine.submit(one)
        results.append(finish_all(engine))
        engine.cache.check()
    assert engine.preemptions > 0
    for key, t in results[0].items():
        assert np.array_equal(t.tokens, results[1][key].tokens)
        assert np.array_equal(t.logprobs, results[1][key].logprobs)
        assert np.array_equal(t.routes, results[1][key].routes)


def test_a_state_that_is_lost_on_the_way_out_is_noticed(roomy: list[dict[str, Completion]], monkeypatch: pytest.MonkeyPatch) -> None:
    real = PrefixCache.preempt

    def preempt(cache: PrefixCache, lease: Any, *args: Any, **more: Any) -> Any:
        cache._pool.clear_states([lease.slot])
        return real(cache, lease, *args, **more)

    monkeypatch.setattr(PrefixCache, "preempt", preempt)
    engine = sized(monkeypatch, pages=9, slots=64, host=2**20)
    done = long_answers(engine)
    assert engine.preemptions > 0
    assert not same(done, roomy)


def test_what_went_to_the_host_and_came_back_is_what_it_was(plain: list[dict[str, Completion]], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sized(monkeypatch, pages=14, slots=4, host=2**20, max_batch=3)
    done = turns(engine)
    moves = engine.cache.stats.moves
    assert moves.restored_pages > 0
    assert moves.restored_states > 0
    assert same(done, plain)


def test_bytes_that_changed_on_the_host_are_noticed(plain: list[dict[str, Completion]], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sized(monkeypatch, pages=14, slots=4, host=2**20, max_batch=3)
    real = HostTier.get

    def get(tier: HostTier, *args: Any) -> None:
        tier._bytes.zero_()
        real(tier, *args)

    monkeypatch.setattr(HostTier, "get", get)
    done = turns(engine)
    assert engine.cache.stats.moves.restored_states > 0
    assert not same(done, plain)


@pytest.mark.parametrize("forgetful", [False, True])
def test_a_slot_that_another_row_had_is_as_new(plain: list[dict[str, Completion]], forgetful: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgetful: the state is left as the row before had it, and the comparison sees that."""
    engine = made(max_batch=4, memory=NONE)
    for i in range(40):
        engine.submit_request(request(f"before{i}", [i + 1] * (i + 1), max_tokens=5))
    finished(engine)
    if forgetful:
        monkeypatch.setattr(Pool, "clear_states", lambda *_: None)
    assert same(turns(engine), plain) is not forgetful


def test_after_a_step_that_failed_nothing_is_left_of_it(plain: list[dict[str, Completion]]) -> None:
    engine = made()
    decode, calls = engine.runner.decode, 0

    def failing(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            spoil(engine.pool)
            raise ValueError("a step failed")
        return decode(batch)

    engine.runner.decode = failing  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="a step failed"):
        turns(engine)
    engine.forget()
    assert engine.idle
    engine.cache.check()
    assert engine.cache.stats.leased_page_bytes == engine.cache.stats.cached_page_bytes == 0
    assert same(turns(engine), plain)


def test_memory_that_holds_no_sequence_is_refused_and_a_prompt_that_does_not_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.cache_mb.*give at least"):
        made(memory=EngineMemory(cache_bytes=1000))
    engine = sized(monkeypatch, pages=5, slots=64)
    with pytest.raises(DriftlineError, match=r"the cache leaves 228 .*rollout\.cache_mb"):
        engine.submit_request(request("long", [1] * 229))
    engine.submit_request(request("fits", [1] * 228))
    assert len(finished(engine)["fits"].tokens) == 20
