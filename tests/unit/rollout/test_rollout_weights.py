"""An engine's parameters after what changed was carried over: the mirror's version bit for bit, or known not to be."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_cases import eventually, groups_of, queue, running, tiny
from rollout_cases import CONFIG, RUN, Gate, lies_ready, publish_shifted, shifted, stored, versions

from driftline.messages.bus import Bus
from driftline.messages.errors import IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.models.config import tiny as tiny_model
from driftline.models.model import K3ForCausalLM
from driftline.models.state import export_state, load_state
from driftline.policy_store.blobs import BlobStore, MemoryBlobs
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import SHARD_BYTES, HostTensor, State, shards_of, state_digest
from driftline.services.rollout import weights as module
from driftline.services.rollout.engine import Engine
from driftline.services.rollout.service import RolloutService
from driftline.services.rollout.weights import EngineWeights, TornWeights, parameters_of
from driftline.services.runtime import run_topology
from driftline.services.tensors import from_host, to_host

torch.set_num_threads(1)

UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def noise(dtype: str, shape: tuple[int, ...], seed: int) -> HostTensor:
    """Any bits, NaNs among them."""
    empty = HostTensor.empty(HostTensor(dtype, (0,), np.empty(0, np.uint8)).layout._replace(shape=shape))
    return HostTensor(dtype, shape, np.random.default_rng(seed).integers(0, 256, empty.data.size, np.uint8))


def mirror(seed: int = 0) -> State:
    return {"big": noise("bfloat16", (3, 500_000), seed), "small": noise("bfloat16", (7,), seed + 1), "wide": noise("float32", (9, 5), seed + 2),
            "scalar": noise("float32", (), seed + 3), "empty": noise("float32", (0, 4), 0)}


def engine_side(state: State, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """What an engine computes with: the mirror's values, in fp32 or in their own dtype."""
    return {name: tensor.to(dtype or tensor.dtype, copy=True) for name, tensor in from_host(state).items()}


def change(state: State, weights: EngineWeights, share: float, seed: int) -> None:
    """Move the mirror as a verified delta does, shard by shard, telling of each that changes."""
    rng = np.random.default_rng(seed)
    for shard in shards_of((name, state[name].layout) for name in sorted(state)):
        out = state[shard.name].data[shard.start : shard.stop]
        bits = out.view(UNSIGNED[state[shard.name].width])
        chosen = np.flatnonzero(rng.random(bits.size) < share)
        if chosen.size:
            before = out.copy()
            bits[chosen] = rng.integers(0, 1 << 16, chosen.size).astype(bits.dtype)
            weights.seen(shard, state[shard.name].dtype, before, out)


def bits_equal(parameters: dict[str, torch.Tensor], state: State) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    wanted = from_host(state)
    return all(torch.equal(bits(p), bits(wanted[name].to(p.dtype))) for name, p in parameters.items() if p.numel())


@settings(max_examples=12, deadline=None)
@given(shares=st.lists(st.sampled_from([0.0, 0.00001, 0.01, 0.2, 0.6, 1.0]), min_size=1, max_size=4), wide=st.booleans(), seed=st.integers(0, 99))
def test_after_any_number_of_versions_at_once_the_parameters_are_the_mirror(shares: list[float], wide: bool, seed: int) -> None:
    state = mirror(seed)
    parameters = engine_side(state, torch.float32 if wide else None)
    weights = EngineWeights(parameters, verify_every=1)
    for i, share in enumerate(shares):
        change(state, weights, share, seed + i)
    weights.apply(weights.stage(state))
    assert bits_equal(parameters, state)
    change(state, weights, 0.01, seed + 50)
    weights.apply(weights.stage(state))
    assert bits_equal(parameters, state)
    assert weights.counts.torn == 0


def test_staging_touches_no_parameter() -> None:
    state = mirror()
    parameters = engine_side(state)
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    weights = EngineWeights(parameters)
    change(state, weights, 0.3, 1)
    staged = weights.stage(state)
    assert bits_equal(parameters, to_host(before))
    weights.apply(staged)
    assert bits_equal(parameters, state)


def test_applying_what_is_applied_changes_nothing() -> None:
    state = mirror()
    parameters = engine_side(state)
    weights = EngineWeights(parameters)
    change(state, weights, 0.1, 1)
    staged = weights.stage(state)
    weights.apply(staged)
    weights.apply(staged)
    assert bits_equal(parameters, state)


def test_whole_shards_beyond_the_bound_wait_in_the_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAGED_BYTES", SHARD_BYTES + 100)
    state = mirror()
    parameters = engine_side(state)
    weights = EngineWeights(parameters)
    change(state, weights, 1.0, 1)
    staged = weights.stage(state)
    assert staged.held
    assert staged.waiting
    weights.apply(staged)
    assert bits_equal(parameters, state)
    assert weights.counts.whole_shards == len(staged.held) + len(staged.waiting)


def test_a_mirror_that_was_read_anew_is_loaded_whole() -> None:
    state = mirror()
    weights = EngineWeights(engine_side(state))
    change(state, weights, 0.1, 1)
    weights.afresh()
    assert weights.stage(state).reload
    assert not weights.stage(state).reload, "once"


def test_tensors_that_came_went_or_changed_shape_are_not_patched() -> None:
    state = mirror()
    for other in ({**state, "more": noise("float32", (2,), 9)}, {name: t for name, t in state.items() if name != "small"}):
        assert EngineWeights(engine_side(state)).stage(other).reload
    weights = EngineWeights(engine_side(state))
    reshaped = {**state, "small": noise("bfloat16", (8,), 9)}
    change(reshaped, weights, 0.5, 1)
    assert weights.stage(reshaped).reload


def test_a_gate_that_the_release_pads_takes_what_the_model_has_of_it() -> None:
    state: State = {"layers.0.A_log": noise("float32", (128,), 1)}
    parameters = {"layers.0.A_log": torch.empty(4)}
    weights = EngineWeights(parameters, verify_every=1)
    for share in (1.0, 0.1):
        change(state, weights, share, 3)
        weights.apply(weights.stage(state))
        assert torch.equal(parameters["layers.0.A_log"].view(torch.int32), from_host(state)["layers.0.A_log"][:4].view(torch.int32))


def test_a_failure_while_staging_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = mirror()
    weights = EngineWeights(engine_side(state))
    change(state, weights, 0.1, 1)
    with monkeypatch.context() as patched:
        patched.setattr(module, "_transferred", lambda *_: (_ for _ in ()).throw(MemoryError("staging")))
        with pytest.raises(MemoryError):
            weights.stage(state)
    assert weights.stage(state).reload


def test_a_torn_copy_is_found_when_it_is_compared_and_only_then() -> None:
    state = mirror()
    parameters = engine_side(state)
    weights = EngineWeights(parameters, verify_every=3)
    parameters["big"].view(torch.int16)[2, 17] ^= 1
    for _ in range(2):
        weights.apply(weights.stage(state))
    with pytest.raises(TornWeights):
        weights.apply(weights.stage(state))
    assert (weights.counts.verified, weights.counts.torn) == (1, 1)


def test_one_expert_of_a_stack_is_patched_by_its_own_name() -> None:
    model = K3ForCausalLM(tiny_model())
    state = {name: tensor.copy() for name, tensor in to_host(export_state(model)).items()}
    load_state(model, from_host(state))
    weights = EngineWeights(parameters_of(model))
    name = next(name for name in sorted(state) if ".experts.1." in name)
    change({name: state[name]}, weights, 0.1, 2)
    weights.apply(weights.stage(state))
    assert 0 < weights.counts.changed < state[name].elements
    assert state_digest(to_host(export_state(model))) == state_digest(state)


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(CONFIG))
    return memory_bus


@pytest.fixture
async def blobs(bus: MemoryBus) -> MemoryBlobs:
    blobs = MemoryBlobs()
    await publish_shifted(bus, blobs, RUN, 0)
    return blobs


def engine_digest(service: RolloutService) -> str:
    assert service._engine is not None
    return state_digest(to_host(export_state(service._engine.model)))


async def test_of_a_new_version_only_what_changed_reaches_the_engine(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    service = RolloutService(bus, blobs, CONFIG)
    async with running(service):
        await eventually(lambda: service._engine is not None)
        for version in (1, 2):
            await publish_shifted(bus, blobs, RUN, version)
            await eventually(lambda version=version: service.counts.updates == version)
        assert engine_digest(service) == state_digest(shifted(2))
        assert 0 < service.carried.changed <= 2 * shifted(0)["model.norm.weight"].elements
        assert service.carried.reloads == 0


async def test_an_update_that_fails_midway_is_made_good_from_the_mirror_before_another_token(
    bus: MemoryBus, blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EngineWeights.apply

    def torn(weights: EngineWeights, staged: Any) -> None:
        real(weights, staged)
        weights._flat["model.norm.weight"][0] = 7.0
        raise RuntimeError("device lost a write")

    monkeypatch.setattr(EngineWeights, "apply", torn)
    service = RolloutService(bus, blobs, CONFIG)
    async with running(service):
        await eventually(lambda: service._engine is not None)
        await publish_shifted(bus, blobs, RUN, 1)
        await eventually(lambda: service.counts.updates == 1)
        assert engine_digest(service) == state_digest(shifted(1))
        await queue(bus, groups_of(CONFIG, [0]))
        assert all(versions(t) == {1} for t in await stored(bus, 4))
    assert service.carried.reloads == 1


async def test_an_update_that_fails_either_way_ends_the_service(bus: MemoryBus, blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("the device is gone")

    service = RolloutService(bus, blobs, CONFIG)
    async with running(service) as task:
        await eventually(lambda: service._engine is not None)
        monkeypatch.setattr(EngineWeights, "apply", fails)
        monkeypatch.setattr(Engine, "load", fails)
        await publish_shifted(bus, blobs, RUN, 1)
        with pytest.raises(BaseExceptionGroup) as raised:
            await task
    assert raised.group_contains(RuntimeError, match="the device is gone")


async def test_a_torn_copy_is_loaded_anew_and_counted(bus: MemoryBus, blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VERIFY_EVERY", 3)
    service = RolloutService(bus, blobs, CONFIG)
    async with running(service):
        await eventually(lambda: service._engine is not None)
        assert service._engine is not None
        with torch.no_grad():
            next(service._engine.model.parameters()).view(-1)[3] += 1.0
        for version in range(1, 3):
            await publish_shifted(bus, blobs, RUN, version)
            await eventually(lambda version=version: service.counts.updates == version)
        assert engine_digest(service) != state_digest(shifted(2)), "nobody looked yet"
        await publish_shifted(bus, blobs, RUN, 3)
        await eventually(lambda: service.counts.updates == 3)
        assert engine_digest(service) == state_digest(shifted(3))
    assert (service.carried.torn, service.carried.reloads) == (1, 1)


class Held(PolicyReader):
    """A store that answers when it is let."""

    def __init__(self, bus: Bus, blobs: BlobStore) -> None:
        super().__init__(bus, blobs, RUN)
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def advance(self, *args: Any, **more: Any) -> State:
        self.asked.set()
        await self.go.wait()
        return await super().advance(*args, **more)


async def test_an_engine_goes_on_with_what_it_has_while_a_version_is_fetched(bus: MemoryBus, blobs: MemoryBlobs, gate: Gate) -> None:
    """What is running is not held up by a slow store, and is served by the old version whole; what comes after waits for the new one."""
    config = tiny(RUN, rollout={"max_batch": 16})
    reader = Held(bus, blobs)
    service = RolloutService(bus, blobs, config, reader=reader)
    first, second = groups_of(config, range(2))
    gate.close()
    async with running(service):
        await queue(bus, [first])
        await gate.entered()
        await publish_shifted(bus, blobs, RUN, 1)
        await reader.asked.wait()
        await queue(bus, [second])
        gate.open()
        assert all(versions(t) == {0} for t in await stored(bus, 4)), "the running group ended before the version came"
        assert service._engine is not None
        assert service._engine.version == 0
        reader.go.set()
        assert all(versions(t) == {1} for t in await stored(bus, 4))


async def test_a_version_fetched_while_rows_run_is_applied_between_two_steps(bus: MemoryBus, blobs: MemoryBlobs, gate: Gate) -> None:
    service = RolloutService(bus, blobs, tiny(RUN, rollout={"max_batch": 16}))
    gate.close()
    async with running(service):
        await queue(bus, groups_of(CONFIG, [0]))
        await gate.entered()
        await publish_shifted(bus, blobs, RUN, 1)
        await eventually(lambda: lies_ready(service, 1))
        gate.open()
        assert any(versions(t) == {0, 1} for t in await stored(bus, 4))


def test_an_engine_of_no_version_makes_no_token() -> None:
    engine = Engine(K3ForCausalLM(tiny_model()), version=0)

    def fails() -> None:
        raise RuntimeError("midway")

    with pytest.raises(RuntimeError):
        engine.adopt(1, fails)
    with pytest.raises(Exception, match="midway"):
        engine.step()
    engine.load(1, export_state(engine.model))
    assert engine.step() == []


def test_parameters_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(IntegrityError, match="contiguous"):
        EngineWeights({"w": torch.zeros(4, 4).t()})
