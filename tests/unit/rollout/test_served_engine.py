"""The real engine behind the gateway, asked by the real `openai` client; and `driftline serve` as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import openai
import pytest
import torch
from engine_cases import config, policy
from gateway_cases import served, until

from driftline.commands.serve import serve
from driftline.messages.errors import ConfigError
from driftline.models.checkpoint import save_checkpoint
from driftline.models.lora.adapter import Adapter, Update
from driftline.models.lora.peft import write_peft
from driftline.services.rollout.engine import Engine
from driftline.services.rollout.local import LocalEngine
from driftline.services.rollout.serving import Served, open_local


def client_of(url: str, *, retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=retries, timeout=60)


def adapter(seed: int) -> Adapter:
    torch.manual_seed(seed)
    width = config().hidden_size
    return Adapter({"model.layers.2.self_attn.o_proj": Update(torch.randn(2, 16), torch.randn(width, 2), 8.0)})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    save_checkpoint(policy(0), tmp_path / "tiny")
    return tmp_path / "tiny"


async def test_whole_and_streamed_answers_are_the_same_sampling() -> None:
    async with LocalEngine(Engine(policy(0), version=2, max_batch=8), name="tiny", context=128) as local, served(local) as url, client_of(url) as client:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 24, "seed": 11, "n": 3, "logprobs": True}
        answer = await client.chat.completions.create(**asked)  # type: ignore[call-overload]
        stream = await client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
        texts, logprobs = ["", "", ""], [[], [], []]  # type: ignore[var-annotated]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                logprobs[choice.index] += [entry.logprob for entry in (choice.logprobs.content if choice.logprobs else [])]
        ids = (await client._client.post(f"{url}/inference/v1/generate", json={
            "token_ids": [256, 104, 105, 10], "sampling_params": {"max_tokens": 24, "seed": 11, "n": 3, "logprobs": 1}})).json()
        page = (await client._client.get(f"{url}/metrics")).text
    assert texts == [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    for choice, told, tokens in zip(answer.choices, logprobs, ids["choices"], strict=True):
        assert choice.logprobs is not None
        assert told == pytest.approx([entry.logprob for entry in choice.logprobs.content or []], abs=1e-4)
        assert told == pytest.approx([entry["logprob"] for entry in tokens["logprobs"]["content"]], abs=1e-4)
        assert tokens["policy_versions"] == [{"version": 2, "tokens": len(told)}]
    assert "driftline_engine_tokens_sampled" in page


async def test_three_hundred_requests_at_once_are_answered_or_told_to_come_again() -> None:
    async with LocalEngine(Engine(policy(0), version=0, max_batch=32, queue_bytes=20_000), name="tiny", context=128) as local, served(local) as url:
        limits = httpx.Limits(max_connections=300)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
            async def one(number: int) -> int:
                answer = await client.post("/v1/completions", json={"prompt": [256, 65 + number % 26], "max_tokens": 1, "ignore_eos": True})
                return answer.status_code

            found = await asyncio.gather(*(one(i) for i in range(300)))
        assert set(found) <= {200, 429}
        assert found.count(200) >= 20
        await until(lambda: local.numbers()["active"] + local.numbers()["waiting"] == 0)


async def test_an_adapter_is_a_model_of_its_own(place: Path, tmp_path: Path) -> None:
    write_peft(adapter(1), tmp_path / "adapter")
    async with open_local(Served(str(place), max_batch=4, adapters={"tuned": tmp_path / "adapter"}, context=100)) as local, served(local) as url, client_of(url) as client:
        models = [model.id for model in (await client.models.list()).data]
        found = {}
        for name in (*models, *models):
            answer = await client.completions.create(model=name, prompt="hello", max_tokens=12, seed=1, extra_body={"ignore_eos": True, "return_token_ids": True})
            found.setdefault(name, []).append(answer.choices[0].token_ids)  # type: ignore[attr-defined]
    assert models == ["tiny", "tuned"]
    assert found["tiny"][0] == found["tiny"][1]
    assert found["tuned"][0] == found["tuned"][1]
    assert found["tiny"][0] != found["tuned"][0]


def test_what_cannot_be_served_is_refused_by_name(place: Path) -> None:
    with pytest.raises(ConfigError, match="--context"):
        open_local(Served(str(place), context=10**9))
    with pytest.raises(ConfigError, match="--dtype"):
        open_local(Served(str(place), dtype="int8"))
    with pytest.raises(ConfigError, match="--device"):
        open_local(Served(str(place), device="abacus"))
    with pytest.raises(ConfigError, match="--drafter"):
        serve(str(place), drafter="somewhere")
    with pytest.raises(ConfigError, match="--adapter"):
        open_local(Served(str(place), adapters={"tiny": place}))


COMMAND = "from driftline.cli import main; main()"


async def test_serve_is_a_process_that_a_signal_ends(place: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", COMMAND, "serve", str(place), "--port", str(port), "--max-batch", "4", "--name", "mine", "--speculation", "ngram", stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "DRIFTLINE_API_KEY": "secret"})
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while b"serving mine" not in (line := await process.stderr.readline()):
                assert line, "it ended before it served"
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=3) as client:
            answer = await client.chat.completions.create(model="mine", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
            assert answer.usage is not None
            assert 1 <= answer.usage.completion_tokens <= 4
            assert json.loads((await client._client.get(f"http://127.0.0.1:{port}/health")).text)["ok"]
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
