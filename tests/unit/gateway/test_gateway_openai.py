"""The real `openai` client against the gateway on a port."""

from __future__ import annotations

import asyncio
import math

import openai
import pytest
from gateway_cases import served, until
from scripted_engine import ScriptedEngine

SCRIPT = "hello \U0001f600 world"


def client_of(url: str, **settings: object) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10, **settings)  # type: ignore[arg-type]


async def test_a_chat_completion_whole() -> None:
    engine = ScriptedEngine()
    async with served(engine) as url, client_of(url) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}], n=2, seed=5, temperature=0.7, logprobs=True,
            max_completion_tokens=100, top_p=1, presence_penalty=0)
    assert [choice.message.content for choice in answer.choices] == [SCRIPT, SCRIPT]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    sampled = len(SCRIPT.encode()) + 1
    assert len(content) == sampled
    assert [entry.logprob for entry in content[:2]] == [-0.5, -0.625]
    assert content[0].token == "h"
    assert content[0].bytes == [104]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * sampled
    assert answer.usage.prompt_tokens == len(engine.asks[0].tokens)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert [(ask.seed, ask.draw, ask.temperature, ask.max_tokens) for ask in sorted(engine.asks, key=lambda ask: ask.draw)] == [(5, 0, 0.7, 100), (5, 1, 0.7, 100)]
    assert engine.asks[0].tokens == engine.asks[1].tokens


async def test_a_chat_completion_streamed() -> None:
    async with served(ScriptedEngine()) as url, client_of(url) as client:
        stream = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], n=2, stream=True, logprobs=True,
                                                      stream_options={"include_usage": True})
        texts, reasons, logprobs, usages, roles = ["", ""], [None, None], [0, 0], [], set()
        async for chunk in stream:
            assert chunk.object == "chat.completion.chunk"
            if chunk.usage:
                usages.append(chunk.usage.completion_tokens)
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles |= {(choice.index, choice.delta.role)} if choice.delta.role else set()
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]  # type: ignore[call-overload]
                logprobs[choice.index] += len((choice.logprobs and choice.logprobs.content) or [])
    sampled = len(SCRIPT.encode()) + 1
    assert texts == [SCRIPT, SCRIPT]
    assert reasons == ["stop", "stop"]
    assert logprobs == [sampled, sampled]
    assert roles == {(0, "assistant"), (1, "assistant")}
    assert usages == [2 * sampled]


async def test_completions_of_texts_and_of_token_ids() -> None:
    engine = ScriptedEngine()
    async with served(engine) as url, client_of(url) as client:
        texts = await client.completions.create(model="tuned", prompt=["ab", "c"], n=2, max_tokens=3, logprobs=0, extra_body={"return_token_ids": True})
        ids = await client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=5)
        streamed = [chunk async for chunk in await client.completions.create(model="tiny", prompt="x", stream=True, stop=[" w"], max_tokens=90)]
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert [choice.finish_reason for choice in texts.choices] == ["length"] * 4
    assert [choice.text for choice in texts.choices] == ["hel"] * 4
    logprobs = texts.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["h", "e", "l"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.token_logprobs == [-0.5, -0.625, -0.75]
    assert texts.choices[0].token_ids == list(b"hel")  # type: ignore[attr-defined]
    assert texts.choices[2].prompt_token_ids == list(b"c")  # type: ignore[attr-defined]
    assert {ask.adapter for ask in engine.asks[:4]} == {"tuned"}
    assert sorted(ask.draw for ask in engine.asks[:4]) == [0, 1, 2, 3]
    assert texts.usage is not None
    assert texts.usage.prompt_tokens == 3
    assert ids.choices[0].text == "hello"
    assert engine.asks[4].tokens == (1, 2, 3)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "hello \U0001f600"
    assert streamed[-1].choices[0].finish_reason == "stop"


async def test_what_is_behind_a_stop_string_is_dropped_and_its_sampling_ended() -> None:
    engine = ScriptedEngine(script="one STOP two three")
    async with served(engine) as url, client_of(url) as client:
        answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], stop="STOP", logprobs=True,
                                                      extra_body={"return_token_ids": True})
        kept = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], stop="STOP",
                                                    extra_body={"include_stop_str_in_output": True})
    choice = answer.choices[0]
    assert choice.message.content == "one "
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == "STOP"  # type: ignore[attr-defined]
    assert choice.token_ids == list(b"one STOP")  # type: ignore[attr-defined]
    assert len(choice.logprobs.content or []) == len(b"one STOP")  # type: ignore[union-attr]
    assert kept.choices[0].message.content == "one STOP"
    assert len(engine.closed) == 2


async def test_models_are_listed_with_their_context() -> None:
    async with served(ScriptedEngine()) as url, client_of(url) as client:
        models = [model async for model in client.models.list()]
        one = await client.models.retrieve("tuned")
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
    assert [model.id for model in models] == ["tiny", "tuned"]
    assert models[0].max_model_len == 512  # type: ignore[attr-defined]
    assert one.parent == "tiny"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("changed", "param"), [
    ({"top_p": 0.9}, "top_p"), ({"presence_penalty": 0.5}, "presence_penalty"), ({"logit_bias": {"5": 1}}, "logit_bias"), ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
    ({"temperature": 11}, "temperature"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 600}, "max_tokens"), ({"n": 1000}, "n"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"), ({"extra_body": {"top_k": 5}}, "top_k"), ({"extra_body": {"min_p": 0.1}}, "min_p"),
    ({"extra_body": {"never_heard_of": 1}}, "never_heard_of"), ({"response_format": {"type": "json_object"}}, "response_format"), ({"seed": "x"}, "seed"),
    ({"messages": [{"role": "tool", "content": "5", "tool_call_id": "x"}]}, "messages[0].tool_call_id"), ({"messages": [{"role": "system", "content": "5"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content"), ({"stop": ["a"] * 20}, "stop"),
])
async def test_what_is_not_sampled_is_refused_by_name(changed: dict[str, object], param: str) -> None:
    engine = ScriptedEngine()
    wanted: dict[str, object] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **changed}
    async with served(engine) as url, client_of(url) as client:
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.chat.completions.create(**wanted)  # type: ignore[call-overload]
    assert refusal.value.param == param
    assert param in str(refusal.value.body)
    assert refusal.value.type == "invalid_request_error"
    assert not engine.asks


async def test_a_model_that_is_not_there_is_not_found() -> None:
    async with served(ScriptedEngine()) as url, client_of(url) as client:
        with pytest.raises(openai.NotFoundError, match="tiny, tuned") as refusal:
            await client.completions.create(model="gpt", prompt="x")
    assert refusal.value.code == "model_not_found"


async def test_temperature_zero_is_the_coldest_there_is() -> None:
    engine = ScriptedEngine()
    async with served(engine) as url, client_of(url) as client:
        await client.completions.create(model="tiny", prompt="x", temperature=0)
    assert engine.asks[0].temperature == pytest.approx(1e-4)


async def test_without_a_seed_two_requests_are_of_two_seeds() -> None:
    engine = ScriptedEngine()
    async with served(engine) as url, client_of(url) as client:
        for _ in range(2):
            await client.completions.create(model="tiny", prompt="x")
    assert engine.asks[0].seed != engine.asks[1].seed


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_engine_says_when_to_come_back(stream: bool) -> None:
    async with served(ScriptedEngine(full=True)) as url, client_of(url) as client:
        with pytest.raises(openai.RateLimitError) as refusal:
            await client.completions.create(model="tiny", prompt="x", stream=stream)
    assert refusal.value.response.headers["retry-after"] == "3"
    assert refusal.value.code == "engine_busy"


async def test_the_client_tries_a_full_engine_again_by_itself() -> None:
    engine = ScriptedEngine(full=True)

    async def room() -> None:
        await until(lambda: engine.asks)
        engine.full = False

    async with served(engine) as url, client_of(url) as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(room())
        answer = await client.with_options(max_retries=2).completions.create(model="tiny", prompt="x", max_tokens=5)
    assert answer.choices[0].text == "hello"
    assert len(engine.asks) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_takes_its_sampling_with_it(stream: bool) -> None:
    engine = ScriptedEngine(hang_after=3)
    async with served(engine) as url, client_of(url) as client:
        async def ask() -> None:
            answer = await client.completions.create(model="tiny", prompt="x", n=3, stream=stream)
            if stream:
                async for _ in answer:  # type: ignore[union-attr]
                    pass

        asking = asyncio.create_task(ask())
        await until(lambda: len(engine.running) == 3)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not engine.running)
        page = (await client._client.get(f"{url}/metrics")).text
    assert len(engine.closed) == 3
    assert 'driftline_gateway_cancelled_total{route="completions"} 1.0' in page


async def test_a_failure_before_the_first_token_is_a_status() -> None:
    async with served(ScriptedEngine(fail_after=0)) as url, client_of(url) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as failure:
                await client.completions.create(model="tiny", prompt="x", stream=stream)
            assert failure.value.status_code == 503


async def test_a_failure_in_the_middle_of_a_stream_is_an_event() -> None:
    engine = ScriptedEngine(fail_after=4)
    async with served(engine) as url, client_of(url) as client:
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        texts = [(await anext(stream)).choices[0].text for _ in range(4)]
        with pytest.raises(openai.APIError, match="a step failed"):
            await anext(stream)
    assert texts == ["h", "e", "l", "l"]
    assert not engine.running


async def test_an_engine_that_is_gone_is_said_at_once() -> None:
    engine = ScriptedEngine(failure="a step failed: out of memory")
    async with served(engine) as url, client_of(url) as client:
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await client.completions.create(model="tiny", prompt="x")
        health = await client._client.get(f"{url}/health")
    assert health.status_code == 503
    assert health.json()["cause"] == "a step failed: out of memory"


async def test_only_who_has_the_key_comes_in() -> None:
    async with served(ScriptedEngine(), api_key="secret") as url:
        async with client_of(url) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model="tiny", prompt="x")
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            assert (await client.completions.create(model="tiny", prompt="x", max_tokens=1)).choices[0].text == "h"
            assert (await client._client.get(f"{url}/health")).status_code == 200


async def test_log_probabilities_are_numbers() -> None:
    async with served(ScriptedEngine()) as url, client_of(url) as client:
        answer = await client.completions.create(model="tiny", prompt="x", logprobs=1)
    values = answer.choices[0].logprobs.token_logprobs  # type: ignore[union-attr]
    assert values
    assert all(value is not None and math.isfinite(value) for value in values)
