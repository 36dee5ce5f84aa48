"""Policy versions on a CUDA device: the compiled kernels against the reference, a step's changes out of a learner and into an engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from driftline.kernels import policy_delta
from driftline.kernels.policy_delta import Comparison, SpanChanges, reference
from driftline.models.config import tiny
from driftline.models.model import K3ForCausalLM
from driftline.models.state import export_state, load_state, round_to_policy_
from driftline.policy_store.forms import Changes
from driftline.policy_store.tensor import SHARD_BYTES, State, shards_of, state_digest
from driftline.services.learner.device_delta import DeviceDelta, Source
from driftline.services.rollout.weights import EngineWeights, TornWeights, parameters_of
from driftline.services.tensors import from_host, to_host

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def noise(elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits at all, on the device."""
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8, device="cuda", generator=random).view(dtype)


def nudged(base: torch.Tensor, share: float, seed: int = 1) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    kind = BITS[base.element_size()]
    chosen = torch.rand(base.numel(), device="cuda", generator=random) < share
    return torch.where(chosen, noise(base.numel(), base.dtype, 1000 + seed).view(kind), base.view(kind)).view(base.dtype)


def same(one: SpanChanges, other: SpanChanges) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_compiled_kernels_find_what_the_reference_finds(dtype: torch.dtype, share: float) -> None:
    sizes = [1, 33, 8192, 8193, 3_000_001]
    old = [noise(size, dtype, i) for i, size in enumerate(sizes)]
    new = [nudged(span, share, i) for i, span in enumerate(old)]
    expected = reference.compare(old, new)
    found = Comparison(old, new).run()
    assert same(found, expected)
    assert same(Comparison(old, new).run(), found), "the order is the positions', whatever the schedule"
    whole, other = noise(100_001, dtype), nudged(noise(100_001, dtype), share)
    assert same(Comparison([whole[1:70_000]], [other[3:70_002]]).run(), reference.compare([whole[1:70_000]], [other[3:70_002]])), "off a word"
    at, xor = policy_delta.diff(whole, other)
    policy_delta.apply_xor(whole, at, xor)
    assert torch.equal(whole.view(torch.uint8), other.view(torch.uint8))


def test_rounding_writes_what_torch_writes_on_the_device_for_every_class_of_bits() -> None:
    """Every sign, exponent and upper mantissa, each with lower halves around the tie: NaNs, denormals, infinities and overflow among them."""
    upper = torch.arange(1 << 16, device="cuda", dtype=torch.int64) << 16
    masters = torch.cat([upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    master = masters.where(masters < 2**31, masters - 2**32).to(torch.int32).view(torch.float32)
    param = noise(master.numel(), torch.bfloat16)
    before = param.clone()
    at, xor = policy_delta.round_and_diff(master, param)
    assert torch.equal(param.view(torch.int16), master.to(torch.bfloat16).view(torch.int16))
    policy_delta.apply_xor(before, at, xor)
    assert torch.equal(before.view(torch.int16), param.view(torch.int16))


def test_a_fingerprint_is_the_hosts() -> None:
    whole = noise(5_000_003, torch.float8_e4m3fn)
    for spans in ([whole, whole[:16384], whole[:16385]], [whole[1:70_000], whole[2:5]]):
        assert torch.equal(policy_delta.fingerprint(spans).cpu(), policy_delta.fingerprint([span.cpu() for span in spans]))


def learner(dtype: torch.dtype) -> tuple[torch.nn.Module, list[Source]]:
    """A tiny K3 in fp32 that holds the policy's values, or a layer larger than a shard in bfloat16."""
    torch.manual_seed(0)
    model: torch.nn.Module = K3ForCausalLM(tiny()) if dtype is torch.float32 else torch.nn.Linear(1500, 1501).to(dtype)
    model = model.cuda()
    round_to_policy_(model)
    return model, [Source(name, p, p.detach().float().clone()) for name, p in model.named_parameters()]


def move(state: State, delta: DeviceDelta, weights: EngineWeights) -> None:
    """The mirror takes what left the learner's device and tells the engine's weights."""
    shards = {(shard.name, shard.start): shard for shard in shards_of((name, state[name].layout) for name in sorted(state))}
    for name, contents in delta.start().tensors():
        for number, content in enumerate(contents):
            shard = shards[name, number * SHARD_BYTES]
            out = state[name].data[shard.start : shard.stop]
            before = out.copy()
            if isinstance(content, Changes):
                out.view(np.uint16 if state[name].width == 2 else np.uint32)[content.at] ^= content.xor
            elif content is not None:
                out[:] = content
            if content is not None:
                weights.seen(shard, state[name].dtype, before, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_goes_from_the_learners_device_to_the_engines_bit_for_bit(dtype: torch.dtype) -> None:
    model, sources = learner(dtype)
    state = {name: tensor.copy() for name, tensor in to_host(export_state(model)).items()}
    engine, _ = learner(dtype)
    load_state(engine, from_host(state))
    weights = EngineWeights(parameters_of(engine), verify_every=2)
    delta = DeviceDelta(sources, torch.bfloat16)
    random = torch.Generator("cuda").manual_seed(1)
    for share in (0.01, 0.2, 1.0, 0.01):
        for source in sources:
            assert source.master is not None
            source.master.add_((torch.rand(source.master.shape, device="cuda", generator=random) < share) * 0.01)
        move(state, delta, weights)
        weights.apply(weights.stage(state))
        wanted = state_digest(to_host(export_state(model)))
        assert state_digest(state) == wanted
        assert state_digest(to_host(export_state(engine))) == wanted
    assert (weights.counts.verified, weights.counts.torn) == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_torn_copy_on_the_device_is_found(dtype: torch.dtype) -> None:
    model, _ = learner(dtype)
    state = {name: tensor.copy() for name, tensor in to_host(export_state(model)).items()}
    weights = EngineWeights(parameters_of(model), verify_every=1)
    weights.apply(weights.stage(state))
    parameter = next(p for p in model.parameters() if p.numel() > 1000)
    with torch.no_grad():
        parameter.view(-1)[777] += 1.0
    with pytest.raises(TornWeights):
        weights.apply(weights.stage(state))
