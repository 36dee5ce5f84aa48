"""A learner at size on a CUDA device: packs without cross-talk, layers that are run again with the same bits and less memory, bf16 parameters beside fp32 masters.

Deterministic algorithms are asked for throughout, as the learner's process does: an operation that has none would raise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from driftline.messages.types import Finish, Graded, Group, Sampling, Task, Trajectory
from driftline.models.causal_lm import CausalLM
from driftline.models.config import K3Config
from driftline.models.dense.config import DenseConfig
from driftline.models.lora import add_lora
from driftline.models.packed import Packed
from driftline.models.quantisation import Quantisation
from driftline.models.random_weights import random_model
from driftline.models.recompute import Recompute
from driftline.policy_store.forms import Changes
from driftline.services.config import LearnerConfig
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.learner.shared_prompts import forward_groups
from driftline.services.learner.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

K3 = K3Config.model_validate({
    "vocab_size": 1024, "hidden_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 8, "intermediate_size": 1024, "q_lora_rank": 256, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 32, "num_experts_per_token": 4, "num_shared_experts": 1,
    "moe_intermediate_size": 256, "routed_expert_hidden_size": 512, "attn_res_block_size": 2,
    "linear_attn_config": {"num_heads": 4, "head_dim": 128, "full_attn_layers": (4, 5), "kda_layers": (1, 2, 3)},
})
DENSE = DenseConfig.of({
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 9,
    "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu",
}, "here")
CONFIG = LearnerConfig(lr=1e-4, eps_low=0.2, eps_high=0.2, micro_batch_groups=2, grad_clip=1e9)
LENGTHS = (70, 1, 0, 41, 128, 3)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


def model(which: str, experts: Quantisation = Quantisation.NONE) -> CausalLM:
    return random_model(K3 if which == "k3" else DENSE, seed=0, experts=experts, dtype=torch.bfloat16, device="cuda")


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def tokens_of(lengths: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, Packed]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1024, (1, sum(lengths)), generator=generator).cuda(), Packed.of(lengths, "cuda")


def batch() -> Batch:
    rng = np.random.default_rng(0)
    groups = []
    for index in range(4):
        prompt = rng.integers(0, 1024, 20 + 9 * index)
        task = Task(id=f"t/{index}", source="test", family="none", prompt="none", answer="")
        group = Group(run="size", group=f"g{index:08d}", index=index, task=task, members=4, sampling=Sampling(max_tokens=64), seed=0)
        members = []
        for member in range(4):
            tokens = np.concatenate([prompt, rng.integers(0, 1024, 5 + 13 * member)]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            members.append(Graded(run="size", reward=float(member % 2), trajectory=Trajectory(
                run="size", group=group.group, member=member, members=4, index=index, task=task, prompt_tokens=len(prompt), tokens=tokens, action_mask=mask,
                logprobs=np.where(mask, -6.9, 0).astype(np.float32), versions=np.where(mask, 0, -1).astype(np.int32), finish=Finish.LENGTH)))
        groups.append(BatchGroup(group, tuple(members), ()))
    return Batch(0, tuple(groups))


@pytest.mark.parametrize("which", ["k3", "dense"])
@pytest.mark.parametrize("continued", [False, True])
def test_packed_is_padded_and_no_sequence_sees_another(which: str, continued: bool) -> None:
    made = model(which)
    tokens, packed = tokens_of(LENGTHS)
    with torch.no_grad():
        cache = made(tokens_of((9 * 6,), 3)[0].view(6, 9), lengths=torch.tensor([4, 9, 1, 7, 2, 9], device="cuda")).cache if continued else None
        out = made(tokens, cache=cache, packed=packed)
        padded = made(packed.padded(tokens[0]), lengths=packed.lengths_s, cache=cache, replay=None if which == "dense" else packed.padded(out.routes[0], fill=-1))
        assert relative(out.hidden[0], packed.unpadded(padded.hidden)) < 0.03
        other = tokens.clone()
        other[0, packed.bounds[3] : packed.bounds[4]] = (other[0, packed.bounds[3] : packed.bounds[4]] + 1) % 1024
        changed = made(other, cache=cache, packed=packed).hidden
    for row, (a, b) in enumerate(zip(out.hidden[0].split(list(LENGTHS)), changed[0].split(list(LENGTHS)), strict=True)):
        assert torch.equal(a, b) == (row != 3 or not len(a)), row


def step(which: str, changes: dict[str, Any], *, lora: bool = False, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, Trainer]:
    made = model(which, Quantisation.MXFP4 if lora and which == "k3" else Quantisation.NONE)
    if lora:
        torch.manual_seed(0)
        add_lora(made, 8, targets=r".*proj$")
        made.to("cuda")
    trainer = Trainer(made if dtype is torch.bfloat16 else made.to(dtype), CONFIG.model_copy(update=changes))
    report = trainer.step(batch())
    assert report.values["grad_norm"] > 0
    return torch.cat([m.grad.flatten() for m in trainer.masters if m.grad is not None]), trainer


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("which", ["k3", "dense"])
def test_layers_that_are_run_again_give_the_same_gradient_bits(which: str, lora: bool) -> None:
    kept, again = (step(which, {"micro_batch_tokens": 512, "recompute": how}, lora=lora)[0] for how in ("none", "layers"))
    assert torch.equal(kept, again)


@pytest.mark.parametrize("which", ["k3", "dense"])
@pytest.mark.parametrize("budget", [0, 512])
def test_a_gradient_is_made_of_nothing_that_memory_held_before(which: str, budget: int) -> None:
    """Right-padded rows behind cached prompts of several lengths too: some cached columns are nobody's."""
    fresh, _ = step(which, {"micro_batch_tokens": budget})
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    for _ in range(2):
        poison = [torch.full((size,), torch.nan, device="cuda") for size in (2**8, 2**14, 2**18, 2**22, 2**26) for _ in range(32)]
        del poison
        found, _ = step(which, {"micro_batch_tokens": budget})
        assert torch.equal(found, fresh)


def test_packs_give_the_gradient_of_the_padded_batch_and_float32_parameters_nearly_the_same() -> None:
    """Dense: a router would turn rounding into another expert here and there."""
    padded, packed, cut = (step("dense", {"micro_batch_tokens": budget})[0] for budget in (0, 4096, 128))
    exact = step("dense", {}, dtype=torch.float32)[0]
    assert relative(packed, padded) < 0.05
    assert relative(cut, packed) < 0.05
    assert 1e-5 < relative(packed, exact) < 0.1


@pytest.mark.parametrize("which", ["k3", "dense"])
def test_less_memory_is_held_when_layers_are_run_again(which: str) -> None:
    made = model(which)
    tokens, packed = tokens_of((900, 700, 2000, 400))
    peaks = []
    for how in Recompute:
        made.recompute = how
        made.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = made(tokens, packed=packed)
        peaks.append(torch.cuda.memory_allocated() - before)
        torch.autograd.backward(out.hidden.float().square().mean())
        del out
    assert peaks[1] * 2 < peaks[0]


@pytest.mark.parametrize("which", ["k3", "dense"])
def test_changes_of_a_step_of_bf16_parameters_make_the_new_policy_of_the_old(which: str) -> None:
    trainer = step(which, {"micro_batch_tokens": 512})[1]
    assert trainer.by_changes
    assert all(m.dtype is torch.float32 for m in trainer.masters)
    before = {n: t.clone() for n, t in trainer.state().items()}
    emitted: dict[str, Any] = {}
    trainer.step(batch(), lambda name, content: emitted.update({name: content}))
    after = trainer.state()
    assert emitted.keys() == after.keys()
    changed = 0
    for name, shards in emitted.items():
        if len(shards) != 1:
            continue
        bits = before[name].view(torch.int16 if before[name].dtype is torch.bfloat16 else torch.int32).flatten()
        if isinstance(shards[0], Changes):
            bits[torch.from_numpy(shards[0].at).long()] ^= torch.from_numpy(shards[0].xor.view("int16" if bits.dtype is torch.int16 else "int32"))
        elif shards[0] is not None:
            bits.view(torch.uint8).copy_(torch.from_numpy(shards[0]))
        changed += shards[0] is not None
        assert torch.equal(bits.view(after[name].dtype).view_as(after[name]), after[name]), name
    assert changed > 10


@pytest.mark.parametrize("which", ["k3", "dense"])
def test_a_forward_of_groups_is_the_same_at_each_call(which: str) -> None:
    made = model(which)
    with torch.no_grad():
        first, second = (forward_groups(made, batch().groups, packed=True).logp for _ in range(2))
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
