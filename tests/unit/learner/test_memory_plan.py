"""What a step needs is said before anything is allocated: exactly what is counted, near what is estimated, and why it does not fit."""

from __future__ import annotations

import pytest
import torch
from loop_cases import tiny as tiny_run
from torch.profiler import ProfilerActivity, profile

from driftline.messages.errors import ConfigError
from driftline.models.architectures import skeleton
from driftline.models.config import K3Config, tiny
from driftline.models.dense.config import DenseConfig
from driftline.models.families import model_config
from driftline.models.lora import add_lora
from driftline.models.packed import Packed
from driftline.models.quantisation import Quantisation
from driftline.models.random_weights import random_model
from driftline.models.recompute import Recompute
from driftline.models.sizes import like_k3
from driftline.services.config import Config, ExpertsForm, LearnerConfig
from driftline.services.learner.memory_plan import Load, MemoryPlan, Part, load_of, plan_memory, plan_of
from driftline.services.learner.trainer import Trainer

torch.set_num_threads(1)
DENSE = DenseConfig.of({
    "model_type": "llama", "vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 3,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": True, "hidden_act": "silu",
}, "here")
LOAD = Load(tokens=160, sequences=4, prompt=1, completion=40)


def plan(config: K3Config | DenseConfig, *, experts: Quantisation = Quantisation.NONE, rank: int = 0, where: Load = LOAD, recompute: Recompute = Recompute.NONE) -> MemoryPlan:
    model = skeleton(config, experts)
    if rank:
        add_lora(model, rank, targets=r".*proj$")
    return plan_memory(model, where, dtype=torch.bfloat16, recompute=recompute)


@pytest.mark.parametrize("config", [tiny(), DENSE])
def test_weights_masters_and_moments_are_those_of_the_trainer(config: K3Config | DenseConfig) -> None:
    model = random_model(config, dtype=torch.bfloat16)
    parts = plan_memory(model, LOAD, dtype=torch.bfloat16, recompute=Recompute.NONE).parts
    assert parts == plan(config).parts, "the same without its memory"
    trainer = Trainer(model, LearnerConfig())
    for master in trainer.masters:
        master.grad = torch.zeros_like(master)
    trainer.optimizer.step()
    states = [trainer.optimizer.state[m] for m in trainer.masters]
    assert parts[Part.WEIGHTS] == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert parts[Part.MASTERS] == sum(m.nbytes for m in trainer.masters)
    assert parts[Part.MOMENTS] == sum(s[key].nbytes for s in states for key in ("exp_avg", "exp_avg_sq"))
    assert parts[Part.GRADIENTS] >= parts[Part.MASTERS]


def test_a_frozen_base_has_weights_alone_and_packed_experts_are_counted_as_they_are_held() -> None:
    whole, packed, adapted = plan(tiny()), plan(tiny(), experts=Quantisation.MXFP4), plan(tiny(), experts=Quantisation.MXFP4, rank=2)
    experts = 4 * 16 * 3 * 64 * 64  # layers, experts, matrices
    assert whole.parts[Part.WEIGHTS] - packed.parts[Part.WEIGHTS] == experts * 2 - experts * 17 // 32
    assert 20 * adapted.parts[Part.MASTERS] < whole.parts[Part.MASTERS]
    assert adapted.parts[Part.MOMENTS] == 2 * adapted.parts[Part.MASTERS]


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("tokens", [40, 120])
def test_activations_of_a_dense_decoder_are_near_what_the_allocator_holds(recompute: Recompute, tokens: int) -> None:
    model = random_model(DENSE, dtype=torch.float32)
    model.recompute = recompute
    packed = Packed.of((tokens,) * 4, "cpu")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        hidden = model(torch.zeros(1, packed.tokens, dtype=torch.int64), packed=packed).hidden
    held = sum(event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")
    planned = plan_memory(model, Load(packed.tokens, 4, 1, tokens), dtype=torch.float32, recompute=recompute).parts
    assert hidden.requires_grad
    assert 0.6 * held < planned[Part.ACTIVATIONS] + planned[Part.CACHES] < 2 * held


def test_layers_that_are_run_again_need_less_and_more_tokens_more() -> None:
    kept, again = (plan(tiny(), recompute=how) for how in Recompute)
    assert 3 * again.parts[Part.ACTIVATIONS] < kept.parts[Part.ACTIVATIONS]
    assert again.parts[Part.BACKWARD] == kept.parts[Part.BACKWARD]
    twice = plan(tiny(), where=Load(320, 4, 1, 40))
    assert twice.parts[Part.ACTIVATIONS] == 2 * kept.parts[Part.ACTIVATIONS]
    assert twice.parts[Part.WEIGHTS] == kept.parts[Part.WEIGHTS]


def test_four_layers_of_k3_fit_a_device_of_141_gb_with_adapters_and_not_without() -> None:
    config = like_k3(4, 7168, vocab_size=163840)
    where = Load(8192, 32, 512, 1024)
    adapted = plan(config, experts=Quantisation.MXFP4, rank=64, where=where, recompute=Recompute.LAYERS)
    adapted.require(141 * 10**9, "cuda:0")
    with pytest.raises(ConfigError, match=r"does not fit cuda:0, which has 131\.3 GiB: .*weights.*train adapters only"):
        plan(config, where=where, recompute=Recompute.LAYERS).require(141 * 10**9, "cuda:0")


def test_a_refusal_says_what_would_help() -> None:
    gib = 2**30
    adapted = plan(tiny(), rank=2)
    with pytest.raises(ConfigError, match="a larger device"):
        adapted.require(gib // 2, "cuda:0")
    many = Load(10**6, 64, 64, 64)
    with pytest.raises(ConfigError, match=r"learner.recompute = \"layers\""):
        plan(DENSE, where=many).require(4 * gib, "cuda:0")
    with pytest.raises(ConfigError, match=r"\(lower learner.micro_batch_tokens\)"):
        plan(DENSE, where=many, recompute=Recompute.LAYERS).require(4 * gib, "cuda:0")
    plan(DENSE, where=many, recompute=Recompute.LAYERS).require(64 * gib, "cuda:0")


def test_every_part_is_in_the_lines_and_they_add_up() -> None:
    made = plan(DENSE)
    lines = made.lines()
    assert lines[-1].split()[0] == "together"
    assert {line.split()[0] for line in lines[:-1]} == {part.value for part in Part} - {"probe"}
    assert made.total == sum(made.parts.values())


def run(**learner: int) -> Config:
    base: Config = tiny_run("memory")
    return base.model_copy(update={
        "run": base.run.model_copy(update={"group_size": 4, "groups_per_step": 4}), "sampling": base.sampling.model_copy(update={"max_tokens": 32}),
        "learner": base.learner.model_copy(update=learner),
    })


def test_a_runs_plan_is_of_its_checkpoint_and_its_largest_micro_batch() -> None:
    assert load_of(run(micro_batch_groups=2)) == Load(2 * 5 * 32, 8, 32, 32)
    packed = run(micro_batch_tokens=1024)
    assert load_of(packed) == Load(1024, 16, 32, 32), "no more sequences than a step has"
    assert load_of(run(micro_batch_tokens=64)) == Load(64, 4, 32, 32)
    found = plan_of(packed, torch.float32)
    config = model_config(packed.policy.init)
    assert isinstance(config, K3Config)
    frozen = 4 * config.moe_layers * config.num_experts
    assert found.parts[Part.MASTERS] == found.parts[Part.WEIGHTS] - frozen, "all but the routers' biases are trained"
    assert found.parts[Part.PROBE] == found.parts[Part.MASTERS], "in float32 as the masters"
    assert plan_of(run(probe_members=0), torch.float32).parts[Part.PROBE] == 0
    narrow = packed.model_copy(update={"policy": packed.policy.model_copy(update={"experts": ExpertsForm.PACK})})
    assert plan_of(narrow, torch.float32).parts[Part.WEIGHTS] < found.parts[Part.WEIGHTS]
    adapted = plan_of(run(lora_rank=2), torch.float32)
    assert adapted.parts[Part.MASTERS] < found.parts[Part.MASTERS] // 4


def test_a_load_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="sequences is 0"):
        Load(1, 0, 1, 1)
