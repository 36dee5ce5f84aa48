"""A prompt computed by one engine and gone on with by another gives what one engine gives; what does not fit is refused by name; nothing is lost between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from driftline.kernels.mode import Numerics, set_numerics, using
from driftline.messages.errors import DriftlineError, MalformedMessage
from driftline.messages.types import Finish, Sampling
from driftline.models.causal_lm import CausalLM
from driftline.models.config import tiny
from driftline.models.paged import Pool
from driftline.models.random_weights import random_model
from driftline.services.rollout.engine import Completion, Engine, EngineMemory, Request
from driftline.services.rollout.handover import (
    Decoder,
    Handover,
    HandoverRefused,
    Pair,
    Prefiller,
    RemotePrefiller,
    export,
    from_bytes,
    place,
    to_bytes,
)

MEMORY = EngineMemory(cache_bytes=24 * 2**20)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with using(Numerics.DETERMINISTIC):
        yield


def model(seed: int = 0, **changes: int) -> CausalLM:
    return random_model(tiny(max_position_embeddings=512, num_hidden_layers=3, **changes), seed=seed, dtype=torch.float32)


def engine(seed: int = 0, *, version: int = 0, routes: bool = True, max_batch: int = 8, memory: EngineMemory = MEMORY, **changes: int) -> Engine:
    torch.set_num_threads(1)
    return Engine(model(seed, **changes), version=version, max_batch=max_batch, record_routes=routes, memory=memory)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng([length, salt]).integers(0, 250, length)]


def request(name: str, length: int = 100, limit: int = 6, **fields: object) -> Request:
    return replace(Request(name, prompt(length), Sampling(max_tokens=limit), key=hash_of(name), stop_ids=()), **fields)  # type: ignore[arg-type]


def hash_of(name: str) -> int:
    return sum(ord(c) * 257**i for i, c in enumerate(name))


def finished(of: Engine | Pair, requests: list[Request]) -> dict[str, Completion]:
    for one in requests:
        of.submit_request(one)
    done: dict[str, Completion] = {}
    for _ in range(2000):
        if of.idle:
            return done
        of.step()
        done |= {c.id: c for c in of.take_completions()}
    raise AssertionError("it does not end")


def same(one: Completion, other: Completion) -> bool:
    return all(np.array_equal(a, b) for a, b in ((one.tokens, other.tokens), (one.logprobs, other.logprobs), (one.versions, other.versions), (one.routes, other.routes)))


def handed(of: Engine, one: Request) -> Handover:
    prefiller = Prefiller(of)
    prefiller.submit_request(one)
    while not prefiller.idle:
        for answer in prefiller.take():
            assert isinstance(answer, Handover)
            return answer
    raise AssertionError("nothing was handed over")


REQUESTS = [request("aligned", 128), request("one row", 1), request("ragged", 200), request("short", 63, limit=2), request("single", 70, limit=1)]


def test_a_pair_gives_what_one_engine_gives_bit_for_bit() -> None:
    alone = finished(engine(), REQUESTS)
    pair = Pair(Prefiller(engine()), Decoder(engine()))
    together = finished(pair, REQUESTS)
    assert together.keys() == alone.keys()
    assert all(same(together[name], alone[name]) for name in alone)
    assert all((together[n].prompt_tokens, together[n].finish) == (alone[n].prompt_tokens, alone[n].finish) for n in alone)
    assert pair.handed == 4  # a single token needs nobody to go on


@pytest.mark.parametrize("kind", ["rows", "states"])
def test_that_comparison_sees_a_row_or_a_state_that_is_not_the_exporters(kind: str) -> None:
    one = request("a", 100, limit=12)
    alone = finished(engine(), [one])["a"]
    handover = handed(engine(), one)
    changed = replace(handover, **{kind: tuple(t + 0.05 for t in getattr(handover, kind))})
    decoder = Decoder(engine())
    assert decoder.accept(changed)
    done: list[Completion] = []
    while not decoder.idle:
        done += decoder.step()
    assert not same(done[0], alone)


def test_the_decoder_computes_one_token_of_each_prompt() -> None:
    prefilling, decoding = engine(), engine()
    finished(Pair(Prefiller(prefilling), Decoder(decoding)), [request("a", 200), request("b", 130)])
    assert (prefilling.prompt_tokens, decoding.prompt_tokens) == (330, 2)


def test_bytes_carry_all_of_it() -> None:
    handover = handed(engine(), request("a", 77, adapter="", session="s", priority=3, tenant="t", stop_ids=(1, 2), first_draw=9))
    back = from_bytes(to_bytes(handover))
    assert back.request == replace(handover.request, tokens=handover.prompt)
    assert (back.layout, back.version, back.first_token, back.first_logprob, back.cached_tokens) == (
        handover.layout, handover.version, handover.first_token, handover.first_logprob, handover.cached_tokens)
    assert all(torch.equal(a, b) for a, b in zip((*back.rows, *back.states), (*handover.rows, *handover.states), strict=True))
    assert np.array_equal(back.routes, handover.routes)
    assert to_bytes(back) == to_bytes(handover)


def test_bytes_of_another_format_cut_or_changed_are_refused() -> None:
    data = to_bytes(handed(engine(), request("a", 65)))
    for wrong, why in ((data[:10], "shorter"), (data[:-1], "not those"), (b"XXXX" + data[4:], "reads"), (data[:4] + b"\x02" + data[5:], "format 2")):
        with pytest.raises(MalformedMessage, match=why):
            from_bytes(wrong)
    for at in (40, len(data) // 2, len(data) - 1):
        with pytest.raises(MalformedMessage, match="not those that were sent"):
            from_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def test_a_handover_of_another_version_model_or_layout_is_refused_by_name_and_takes_nothing() -> None:
    handover = handed(engine(), request("a"))
    for other, field in ((engine(version=1), "version"), (engine(intermediate_size=256), "base"), (engine(kv_lora_rank=32), "base")):
        free = other.cache.stats.free_page_bytes
        with pytest.raises(HandoverRefused, match=field):
            place(other, handover)
        other.cache.check()
        assert other.cache.stats.free_page_bytes == free
    theirs = replace(handover, layout=handover.layout._replace(states=tuple(p._replace(dtype="torch.bfloat16") for p in handover.layout.states)))
    with pytest.raises(HandoverRefused, match="states"):
        place(engine(), theirs)
    with pytest.raises(HandoverRefused, match="routes"):
        place(engine(), replace(handover, routes=None))
    with pytest.raises(ValueError, match="a prompt of 100 tokens"):
        place(engine(), replace(handover, rows=tuple(t[:-1] for t in handover.rows)))


def test_a_version_between_the_halves_is_computed_again_under_the_new_one() -> None:
    pair = Pair(Prefiller(engine()), Decoder(engine()))
    one, state = request("a", 90), dict(model(seed=5).state_dict())
    handover = handed(engine(), one)
    for half in (pair.prefiller.engine, pair.decoder.engine):  # type: ignore[attr-defined]
        half.adopt(1, partial(half.model.load_state_dict, state))
    pair._between.append(handover)
    done: list[Completion] = []
    while not pair.idle:
        pair.step()
        done += pair.take_completions()
    assert pair.refused == 1
    assert set(done[0].versions.tolist()) == {1}
    assert same(done[0], finished(engine(seed=5, version=1), [one])["a"])


def test_without_memory_the_decoder_takes_none_and_everything_ends_all_the_same() -> None:
    sizes = Pool.sizes(model())
    tight = engine(max_batch=2, memory=EngineMemory(cache_bytes=10 * sizes.page_bytes + 3 * sizes.state_bytes))
    wanted = [request(f"r{i}", 300, limit=40, tokens=prompt(300, i)) for i in range(6)]
    pair = Pair(Prefiller(engine()), Decoder(tight), waiting_bytes=1)
    assert finished(pair, wanted).keys() == {r.id for r in wanted}
    tight.cache.check()


def test_a_cancelled_request_is_forgotten_wherever_it_is() -> None:
    pair = Pair(Prefiller(engine()), Decoder(engine()))
    pair.submit_request(request("a", 90))
    assert pair.cancel("a") == 1
    assert pair.idle
    pair.submit_request(request("b", 90, limit=50))
    while pair.decoder.idle:
        pair.step()
    assert pair.cancel("b") == 1
    assert pair.idle


def test_rows_that_were_evicted_before_the_export_are_computed_again() -> None:
    first = engine()
    one = request("a", 90)
    prefiller = Prefiller(first)
    prefiller.submit_request(one)
    taking, answers = first.take_completions, []

    def evicted() -> list[Completion]:
        done = taking()
        if done:
            first.cache.forget(lambda key: True)
            first.take_completions = taking  # type: ignore[method-assign]
        return done

    first.take_completions = evicted  # type: ignore[method-assign]
    while not prefiller.idle:
        answers += prefiller.take()
    assert first.prompt_tokens == 180
    assert len(answers) == 1
    assert isinstance(answers[0], Handover)


def test_an_answer_that_ends_at_its_first_token_needs_no_decoder() -> None:
    one = request("a", 90)
    first = int(finished(engine(), [one])["a"].tokens[0])
    pair = Pair(Prefiller(engine()), Decoder(engine()))
    done = finished(pair, [replace(one, stop_ids=(first,))])["a"]
    assert done.finish is Finish.STOP
    assert done.tokens.tolist() == [first]
    assert pair.handed == 0


def test_exports_of_what_an_engine_never_computed_are_none() -> None:
    of = engine()
    assert export(of, request("a", 90), 3, -1.0, 0) is None
    of.cache.check()


def there() -> Engine:
    set_numerics(Numerics.DETERMINISTIC)
    return engine()


def broken() -> Engine:
    raise ValueError("no such weights")


def test_two_processes_give_what_one_engine_gives() -> None:
    alone = finished(engine(), REQUESTS)
    with RemotePrefiller(there) as remote:
        together = finished(Pair(remote, Decoder(engine())), REQUESTS)
        assert together.keys() == alone.keys()
        assert all(same(together[name], alone[name]) for name in alone)
        remote.submit_request(request("too long", 600))
        with pytest.raises(DriftlineError, match="a prompt of 600 tokens"):
            remote.take(wait_s=30)


def test_a_process_that_cannot_build_its_engine_says_why() -> None:
    with pytest.raises(DriftlineError, match="no such weights"):
        RemotePrefiller(broken)
