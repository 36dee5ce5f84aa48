"""The rollout service over a server of another system: groups of the bus sampled there, versions of the bus handed over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_servers import Fake, FakeSglang, FakeVllm, digest_of, distribution
from loop_cases import eventually, finish, groups_of, queue, running, tiny
from rollout_cases import RUN, is_idle, publish_shifted, shifted, stored, versions

from driftline.messages.errors import ConfigError
from driftline.messages.memory import MemoryBus
from driftline.messages.types import Trajectory
from driftline.models.lora.peft import read_peft
from driftline.models.shards import Shards
from driftline.models.state import export_state
from driftline.policy_store.blobs import MemoryBlobs
from driftline.policy_store.writer import PolicyWriter
from driftline.services.config import Config
from driftline.services.policy_model import build_model
from driftline.services.rollout.external import open_engine
from driftline.services.rollout.service import RolloutService
from driftline.services.runtime import run_topology
from driftline.services.tensors import from_host, to_host

BOTH = pytest.mark.parametrize("fake", [FakeVllm, FakeSglang], ids=["vllm", "sglang"])


def settings(fake: type[Fake], url: str, files: Path, **rollout: Any) -> Config:
    kind = "vllm" if fake is FakeVllm else "sglang"
    return tiny(RUN, run={"steps": 3, "groups_per_step": 2, "group_size": 4, "max_lag": 4},
                rollout={"engine": kind, "engine_url": url, "engine_files": str(files), "max_batch": 16, "engines": 1, **rollout})


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(tiny(RUN)))
    return memory_bus


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


def drawn_by(trajectory: Trajectory, digest: str, version: int) -> None:
    tokens = trajectory.tokens.tolist()
    for at in range(trajectory.prompt_tokens, len(tokens)):
        if trajectory.versions[at] == version:
            assert trajectory.logprobs[at] == pytest.approx(distribution(digest, tokens[:at], trajectory.temperature)[tokens[at]], abs=1e-5)


@BOTH
async def test_a_run_samples_there_and_a_version_is_handed_over_while_it_does(fake: type[Fake], bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    await publish_shifted(bus, blobs, RUN, 0)
    server = fake()
    with server.served() as url:
        config, files = settings(fake, url, tmp_path), tmp_path / RUN / "rollout-0"
        groups = groups_of(config, range(4))
        service = RolloutService(bus, blobs, config)
        server.hold_at = 2
        async with running(service) as task:
            await queue(bus, groups[:2])
            await eventually(lambda: len(server.running) == 8)
            first = digest_of(files / "v00000000")
            server.hold_at = None
            await publish_shifted(bus, blobs, RUN, 1)
            await eventually(lambda: service._engine is not None and service._engine.version == 1)
            server.release()
            await queue(bus, groups[2:])
            done = await stored(bus, 16, config)
            await eventually(lambda: is_idle(bus, config))
            await finish(bus, RUN, 1)
            await task
        second = digest_of(files / "v00000001")
        assert {t.group for t in done} == {group.group for group in groups}
        for trajectory in done:
            drawn_by(trajectory, first, 0)
            drawn_by(trajectory, second, 1)
        assert {version for t in done[8:] for version in versions(t)} == {1}
        assert {version for t in done[:8] for version in versions(t)} == {0, 1}
        assert service.counts.updates == 1
        handed = Shards.of(files / "v00000001")
        wanted = from_host(shifted(1))
        assert handed.files.keys() == wanted.keys()
        assert (handed.read("model.norm.weight") == wanted["model.norm.weight"]).all()
        assert (files / "v00000001" / "config.json").is_file()


@BOTH
async def test_a_run_of_adapters_hands_over_what_peft_reads(fake: type[Fake], bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    server = fake()
    with server.served() as url:
        config = settings(fake, url, tmp_path)
        lora = {"lora_rank": 2, "lora_alpha": 6.0, "lora_targets": ["model.layers.1.self_attn.o_proj", "model.layers.2.block_sparse_moe.experts"]}
        config = config.model_copy(update={"learner": config.learner.model_copy(update=lora)})
        model = build_model(config, device="cpu", threads=1)
        writer = PolicyWriter(bus, blobs, RUN, 10)
        await writer.resume()
        states = []
        for version in range(2):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora" in name:
                        parameter.normal_()
            states.append(export_state(model, torch.bfloat16))
            await writer.publish(to_host(states[-1]), version=version, learner_step=version, consumed=())
            if not version:
                service = RolloutService(bus, blobs, config)
                task = asyncio.create_task(service.run())
                await eventually(lambda: service._engine is not None)  # noqa: B023 - of this turn alone
        try:
            await eventually(lambda: service._engine is not None and service._engine.version == 1)
            await queue(bus, groups_of(config, range(2)))
            done = await stored(bus, 8, config)
        finally:
            task.cancel()
            await asyncio.wait({task})
    place = tmp_path / RUN / "rollout-0" / "v00000001"
    for trajectory in done:
        assert versions(trajectory) == {1}
        drawn_by(trajectory, digest_of(place), 1)
    found = read_peft(place)
    assert {update.scale for update in found.updates.values()} == {3.0}
    halves = {name: tensor for name, tensor in states[1].items() if "lora" in name}
    assert halves
    for name, update in found.updates.items():
        stem = name.replace(".experts.", ".experts.delta.")
        assert torch.equal(update.a, halves.pop(f"{stem}.lora_A"))
        assert torch.equal(update.b, halves.pop(f"{stem}.lora_B"))
    assert not halves


@BOTH
async def test_a_server_that_goes_away_gives_the_groups_back(fake: type[Fake], bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    await publish_shifted(bus, blobs, RUN, 0)
    server = fake()
    with server.served() as url:
        config = settings(fake, url, tmp_path)
        config = config.model_copy(update={"broker": config.broker.model_copy(update={"lost_after_s": 0.2})})
        groups = groups_of(config, range(2))
        service = RolloutService(bus, blobs, config)
        async with running(service) as task:
            await eventually(lambda: service._engine is not None)
            server.away = True
            await queue(bus, groups)
            with pytest.raises(BaseExceptionGroup) as failure:
                await task
        assert failure.group_contains(ConnectionError)
        server.away = False
        second = RolloutService(bus, blobs, config, "1")
        async with running(second) as task:
            assert len(await stored(bus, 8, config)) == 8


def test_what_another_server_cannot_do_is_refused(tmp_path: Path) -> None:
    config = settings(FakeVllm, "http://127.0.0.1:9", tmp_path)
    replayed = config.model_copy(update={"learner": config.learner.model_copy(update={"router_replay": True})})
    with pytest.raises(ConfigError, match="router_replay"):
        open_engine(replayed, tokenizer=None, name="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"rollout\.engines"):
        open_engine(settings(FakeVllm, "http://127.0.0.1:9", tmp_path, engines=2), tokenizer=None, name="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="our own"):
        open_engine(tiny(RUN, rollout={"engines": 1}), tokenizer=None, name="x")  # type: ignore[arg-type]
