"""What leaves the device of an optimizer step: the policy of before and that make the policy of after, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from driftline.messages.errors import ConfigError
from driftline.models.config import tiny
from driftline.models.model import K3ForCausalLM
from driftline.models.state import export_state, round_to_policy_
from driftline.policy_store.forms import Changes
from driftline.policy_store.tensor import SHARD_BYTES, State, state_digest
from driftline.services.learner import device_delta
from driftline.services.learner.device_delta import DeviceDelta, ShardContent, Source, Started
from driftline.services.tensors import to_host

torch.set_num_threads(1)

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def policy(dtype: torch.dtype = torch.bfloat16) -> tuple[K3ForCausalLM, list[Source]]:
    torch.manual_seed(3)
    model = K3ForCausalLM(tiny())
    round_to_policy_(model, dtype)
    return model, [Source(name, p, p.detach().clone()) for name, p in model.named_parameters()]


def host(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> State:
    return {name: tensor.copy() for name, tensor in to_host(export_state(model, dtype)).items()}


def step(sources: list[Source], share: float, size: float = 0.01) -> None:
    random = torch.Generator().manual_seed(5)
    for source in sources:
        if source.master is not None:
            moved = torch.rand(source.master.shape, generator=random) < share
            source.master.add_(moved * size)


def apply(state: State, name: str, shards: list[ShardContent]) -> None:
    data, width = state[name].data, state[name].width
    assert len(shards) == -(-data.size // SHARD_BYTES)
    for number, content in enumerate(shards):
        out = data[number * SHARD_BYTES : (number + 1) * SHARD_BYTES]
        if isinstance(content, Changes):
            out.view(UNSIGNED[width])[content.at] ^= content.xor
        elif content is not None:
            out[:] = content


def read(started: Started, state: State) -> list[ShardContent]:
    contents: list[ShardContent] = []
    names = set()
    for name, shards in started.tensors():
        apply(state, name, shards)
        names.add(name)
        contents += shards
    assert names == state.keys(), "every tensor once"
    return contents


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_changes_of_a_step_make_the_new_policy_of_the_old(dtype: torch.dtype) -> None:
    model, sources = policy(dtype)
    state = host(model, dtype)
    delta = DeviceDelta(sources, dtype)
    for share in (0.02, 0.1):
        step(sources, share)
        read(delta.start(), state)
        assert state_digest(state) == state_digest(host(model, dtype))


def test_a_step_that_changes_nothing_yields_nothing() -> None:
    model, sources = policy()
    started = DeviceDelta(sources, torch.bfloat16).start()
    assert set(read(started, host(model))) == {None}
    assert started.changed == 0


def test_a_shard_of_which_much_changed_comes_whole() -> None:
    model, sources = policy()
    state = host(model)
    delta = DeviceDelta(sources, torch.bfloat16)
    step(sources, 0.9, size=1.0)
    contents = read(delta.start(), state)
    assert not any(isinstance(content, Changes) for content in contents)
    assert state_digest(state) == state_digest(host(model))
    wholes = [content for content in contents if isinstance(content, np.ndarray)]
    copies = [whole.copy() for whole in wholes]
    step(sources, 1.0, size=1.0)
    delta.start()
    assert all(map(np.array_equal, wholes, copies)), "what was handed out does not move with the model"


def test_after_a_version_that_was_not_committed_everything_can_be_said_again() -> None:
    model, sources = policy()
    state = host(model)
    delta = DeviceDelta(sources, torch.bfloat16)
    step(sources, 0.02)
    list(delta.start().tensors())  # and the draft failed
    step(sources, 0.02)
    read(delta.start(whole=True), state)
    assert state_digest(state) == state_digest(host(model))


def test_what_is_not_read_is_rounded_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_delta, "BATCH_BYTES", 1)
    model, sources = policy()
    delta = DeviceDelta(sources, torch.bfloat16)
    step(sources, 0.05)
    started = delta.start()
    next(started.tensors())
    started.finish()
    state = host(model)
    assert set(read(delta.start(), state)) == {None}, "nothing is left to round"


def test_untrained_parameters_are_unchanged_and_never_read() -> None:
    model, sources = policy()
    frozen = [s._replace(master=None) if "norm" in s.name else s for s in sources]
    state = host(model)
    step(frozen, 0.05)
    read(DeviceDelta(frozen, torch.bfloat16).start(), state)
    assert state_digest(state) == state_digest(host(model))


def test_a_tensor_of_many_shards_in_many_batches_stays_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_delta, "BATCH_BYTES", SHARD_BYTES)
    layer = nn.Linear(1024, 2500, bias=True)
    round_to_policy_(layer)
    sources = [Source(name, p, p.detach().clone()) for name, p in layer.named_parameters()]
    state = host(layer)
    step(sources, 0.01)
    read(DeviceDelta(sources, torch.bfloat16).start(), state)
    assert state_digest(state) == state_digest(host(layer))


def test_bfloat16_parameters_are_rounded_in_place() -> None:
    layer = nn.Linear(64, 64).to(torch.bfloat16)
    sources = [Source(name, p, p.detach().float()) for name, p in layer.named_parameters()]
    state = host(layer)
    step(sources, 0.2)
    read(DeviceDelta(sources, torch.bfloat16).start(), state)
    assert all(torch.equal(s.parameter, s.master.to(torch.bfloat16)) for s in sources if s.master is not None)
    assert state_digest(state) == state_digest(host(layer))


def test_a_parameter_that_cannot_hold_the_policy_is_refused() -> None:
    layer = nn.Linear(4, 4).to(torch.bfloat16)
    with pytest.raises(ConfigError, match="weight"):
        DeviceDelta([Source("weight", layer.weight, layer.weight.detach().float())], torch.float32)
