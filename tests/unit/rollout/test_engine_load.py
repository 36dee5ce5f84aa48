"""Many more sequences than fit: what waits and what is done costs nothing that stays, and who waits for a tool holds no place."""

from __future__ import annotations

import gc
import tracemalloc
from array import array
from collections.abc import Iterator
from zlib import crc32

import pytest
from engine_cases import config, policy

from driftline.messages.types import Sampling
from driftline.models.model import K3ForCausalLM
from driftline.services.rollout.engine import Completion, Engine, EngineMemory, QueueFull, Request

LEFT = 100
"""Bytes a trajectory, for what changes in what is cached; its tokens alone are more."""
MEMORY = EngineMemory(cache_bytes=2**20, host_bytes=2**18)


def request(name: str, tokens: array[int], *, max_tokens: int = 3, session: str = "") -> Request:
    return Request(id=name, tokens=tokens, sampling=Sampling(temperature=1.0, max_tokens=max_tokens), key=crc32(name.encode()), session=session)


def prompt(number: int, length: int = 20) -> array[int]:
    return array("i", ((number * 37 + i * i) % 256 for i in range(length)))


def engine(max_batch: int = 16, **settings: object) -> Engine:
    model = K3ForCausalLM(config(max_position_embeddings=1024))  # so that little memory is enough for one
    model.load_state_dict(policy(stops=False).state_dict())
    return Engine(model, version=0, max_batch=max_batch, memory=MEMORY, **settings)  # type: ignore[arg-type]


def steps(one: Engine, most: int = 10_000) -> Iterator[list[Completion]]:
    for _ in range(most):
        if one.idle:
            return
        one.step()
        one.take_progress()
        yield one.take_completions()
    raise AssertionError("it never came to an end")


def wave(one: Engine, first: int, count: int) -> set[str]:
    """`count` trajectories are queued together and sampled."""
    for i in range(first, first + count):
        one.submit_request(request(f"s{i}", prompt(i), session=f"s{i}"))
    return {completion.id for done in steps(one) for completion in done}


@pytest.mark.slow
@pytest.mark.parametrize("leaks", [False, True])
def test_thousands_of_trajectories_leave_no_memory_behind(leaks: bool) -> None:
    one = engine()
    kept: list[array[int]] = []
    wave(one, 0, 600)  # the cache, the host tier and what is remembered of branches fill up
    one.cache.check()
    tracemalloc.start()
    held = []
    for i in range(3):
        finished = wave(one, 1000 * (i + 1), 600)
        assert len(finished) == 600
        kept += [prompt(i) for i in range(600)] if leaks else []  # an engine that keeps even the prompts is found
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    one.cache.check()
    assert one.cache.stats.leased_page_bytes == 0
    assert (held[2] - held[0] >= 1200 * LEFT) == leaks, "every trajectory leaves something"
    stats = one.cache.stats
    assert stats.cached_page_bytes + stats.free_page_bytes == (one.pool.pages - 1) * one.pool.page_bytes
    assert stats.moves.lost_pages > 1000, "leaves were many more than fit"


def test_a_slow_tool_holds_no_place_in_the_batch() -> None:
    """More sessions than places: while a tool works, its session's rows are a leaf, and others run where it did; its next turn computes what is new alone."""
    one = engine(max_batch=4)
    first = wave(one, 0, 4)
    assert len(first) == 4
    assert (one.active, one.waiting, one.idle) == (0, 0, True)
    assert one.cache.stats.leased_state_bytes == 0
    one.submit_request(request("slow", prompt(900, 150), session="slow"))
    turn = next(completion for done in steps(one) for completion in done)
    others = wave(one, 100, 8)  # the tool is still at work
    assert len(others) == 8
    sofar = prompt(900, 150) + array("i", turn.tokens.tolist())
    one.submit_request(request("slow again", sofar + prompt(7, 5), session="slow"))
    again = next(completion for done in steps(one) for completion in done)
    assert again.cached_tokens == len(sofar) - 1  # the last token was sampled and never fed
    assert again.prompt_tokens == len(sofar) + 5


def submitted_until_refused(one: Engine) -> int:
    for i in range(1000):
        try:
            one.submit_request(request(f"s{i}", prompt(i)))
        except QueueFull:
            return i
    raise AssertionError("nothing was refused")


def test_what_waits_is_refused_by_bytes_and_taken_again_later() -> None:
    one = engine(queue_bytes=20_000)
    taken = submitted_until_refused(one)
    assert 10 < taken < 40
    with pytest.raises(QueueFull, match="queue_mb"):
        one.submit_request(request("one more", prompt(5)))
    assert len({completion.id for done in steps(one) for completion in done}) == taken
    one.submit_request(request("later", prompt(5)))
    assert [completion.id for done in steps(one) for completion in done] == ["later"]


def test_the_oldest_of_many_begins_first_and_none_is_forgotten() -> None:
    one = engine(max_batch=4)
    for i in range(40):
        one.submit_request(request(f"s{i}", prompt(i), max_tokens=2))
    order = [int(completion.id[1:]) for done in steps(one) for completion in done]
    assert sorted(order) == list(range(40))
    assert all(abs(place - number) <= 4 for place, number in enumerate(order)), "one was overtaken by more than a batch"
