"""POST /inference/v1/generate as vLLM's users send it: token ids in and out."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from gateway_cases import served, until
from scripted_engine import ScriptedEngine

SCRIPT = list("hello \U0001f600 world".encode())


async def test_the_request_of_a_training_client() -> None:
    """What renderers' client sends for verifiers and prime-rl, through the openai client's own transport, and what it checks of the answer."""
    engine = ScriptedEngine()
    wanted = {"model": "tiny", "token_ids": [256, 104, 105, 10], "cache_salt": "7", "priority": -2,
              "sampling_params": {"temperature": 1.0, "max_tokens": 64, "seed": 3, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop_token_ids": [257], "logprobs": 1,
                                  "skip_special_tokens": False}}
    async with served(engine) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        raw = await client.post(f"{url}/inference/v1/generate", cast_to=httpx.Response, body=wanted, options={"headers": {"X-Session-ID": "rollout-5"}})
        cards = await client.get("/models", cast_to=dict)
    answer = raw.json()
    choice = answer["choices"][0]
    assert choice["token_ids"] == [*SCRIPT, 257]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5 - i / 8 for i in range(len(SCRIPT) + 1)]
    assert choice["finish_reason"] == "stop"
    assert choice["policy_versions"] == [{"version": 7, "tokens": 4}, {"version": 8, "tokens": len(SCRIPT) - 3}]
    assert answer["prompt_token_ids"] == [256, 104, 105, 10]
    assert answer["request_id"]
    assert answer["usage"]["completion_tokens"] == len(SCRIPT) + 1
    assert cards["data"][0]["max_model_len"] == 512
    ask = engine.asks[0]
    assert (ask.tokens, ask.seed, ask.session, ask.priority, ask.stop_ids, ask.max_tokens) == ((256, 104, 105, 10), 3, "rollout-5", -2, frozenset({257}), 64)


async def test_the_oldest_clients_and_vllms_own_tests_send_less() -> None:
    engine = ScriptedEngine()
    async with served(engine) as url, httpx.AsyncClient(base_url=url) as client:
        bare = await client.post("/inference/v1/generate", json={"token_ids": [1, 2, 3], "sampling_params": {}})
        limited = await client.post("/inference/v1/generate", json={"request_id": "mine", "token_ids": [1, 2, 3], "stream": False,
                                                                     "sampling_params": {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "n": 2}})
    assert bare.json()["choices"][0]["logprobs"] is None
    assert engine.asks[0].max_tokens == 512 - 3
    assert limited.json()["request_id"] == "mine"
    assert [choice["finish_reason"] for choice in limited.json()["choices"]] == ["length", "length"]
    assert len({ask.id for ask in engine.asks}) == 3
    assert all(ask.ignore_eos for ask in engine.asks[1:])


async def test_two_requests_of_one_name_are_two() -> None:
    engine = ScriptedEngine(hang_after=2)
    async with served(engine) as url, httpx.AsyncClient(base_url=url) as client, asyncio.TaskGroup() as tasks:
        wanted = {"request_id": "mine", "token_ids": [1, 2], "sampling_params": {}}
        asked = [tasks.create_task(client.post("/inference/v1/generate", json=wanted)) for _ in range(2)]
        await until(lambda: len(engine.running) == 2)
        engine.release.set()
    assert [task.result().json()["request_id"] for task in asked] == ["mine", "mine"]


async def test_a_stream_of_token_ids() -> None:
    async with served(ScriptedEngine()) as url, httpx.AsyncClient(base_url=url) as client:
        events = []
        async with client.stream("POST", "/inference/v1/generate", json={
            "token_ids": [1, 2], "stream": True, "stream_options": {"include_usage": True}, "sampling_params": {"max_tokens": 9, "logprobs": 0}}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            events = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    rows = [row for chunk in chunks for row in chunk["choices"]]
    assert [i for row in rows for i in row["token_ids"]] == SCRIPT[:9]
    assert [entry["token"] for row in rows for entry in row["logprobs"]["content"]] == [f"token_id:{i}" for i in SCRIPT[:9]]
    assert rows[-1]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize(("wanted", "param"), [
    ({"sampling_params": {}}, "token_ids"), ({"token_ids": [], "sampling_params": {}}, "token_ids"), ({"token_ids": [1, 300], "sampling_params": {}}, "token_ids"),
    ({"token_ids": [True], "sampling_params": {}}, "token_ids"), ({"token_ids": [1], "sampling_params": {"logprobs": 5}}, "sampling_params.logprobs"),
    ({"token_ids": [1], "sampling_params": {"top_k": 20}}, "sampling_params.top_k"), ({"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
    ({"token_ids": [1], "sampling_params": {"min_tokens": 5}}, "sampling_params.min_tokens"), ({"token_ids": [1], "sampling_params": 3}, "sampling_params"),
    ({"token_ids": [1], "sampling_params": {"stop_token_ids": [-1]}}, "sampling_params.stop_token_ids"), ({"token_ids": [1], "features": {"mm_hashes": 1}}, "features"),
    ({"token_ids": [1], "sampling_params": {"stop_str": "a"}}, "sampling_params.stop_str"), ({"token_ids": [1] * 512, "sampling_params": {}}, "prompt"),
])
async def test_what_cannot_be_sampled_is_refused_by_name(wanted: dict[str, object], param: str) -> None:
    async with served(ScriptedEngine()) as url, httpx.AsyncClient(base_url=url) as client:
        refusal = await client.post("/inference/v1/generate", json=wanted)
    assert refusal.status_code == 400
    assert refusal.json()["error"]["param"] == param


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/embeddings", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)])
async def test_other_paths_have_openais_error_too(method: str, path: str, status: int) -> None:
    async with served(ScriptedEngine()) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == "path"


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b'{"a":' + b"[" * 100_000])
async def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    async with served(ScriptedEngine()) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/completions", content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "body"


async def test_a_body_that_is_too_long_is_refused_before_it_is_read() -> None:
    async with served(ScriptedEngine(), body_bytes=1000) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x" * 2000})
    assert answer.status_code == 413


async def test_the_pages_of_health_and_numbers() -> None:
    async with served(ScriptedEngine()) as url, httpx.AsyncClient(base_url=url) as client:
        await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
        await client.post("/v1/completions", json={"prompt": "x", "top_p": 0.5})
        health, page = await client.get("/health"), (await client.get("/metrics")).text
    assert health.json() == {"ok": True, "cause": None, "version": 7}
    for line in ('driftline_gateway_requests_total{route="completions",status="200"} 1.0', 'driftline_gateway_requests_total{route="completions",status="400"} 1.0',
                 "driftline_gateway_sampled_tokens_total 3.0", "driftline_gateway_cached_tokens_total 2.0", "driftline_engine_tokens_sampled 5.0"):
        assert line in page
