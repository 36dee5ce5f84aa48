"""A learner at size: packs, bf16 parameters beside fp32 masters, sums in fp32, layers run again. None of it changes what is learnt beyond rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from learning_samples import batch_of, grade, group, sample, small_model

from driftline.kernels.mode import Numerics, using
from driftline.models.causal_lm import CausalLM, ModelOutput
from driftline.models.dense.config import DenseConfig
from driftline.models.logprob import token_logprobs
from driftline.models.lora import add_lora
from driftline.models.model import K3ForCausalLM
from driftline.models.random_weights import random_model
from driftline.models.state import policy_dtype
from driftline.policy_store.forms import Changes
from driftline.services.config import LearnerConfig
from driftline.services.learner import objective, shared_prompts
from driftline.services.learner import trainer as trainer_module
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.learner.gradients import summed_into
from driftline.services.learner.micro_batches import by_tokens
from driftline.services.learner.objective import LossOutput
from driftline.services.learner.shared_prompts import forward_groups
from driftline.services.learner.trainer import Emitted, Trainer
from driftline.services.learner.watch import StepDrift

torch.set_num_threads(1)
CONFIG = LearnerConfig(lr=1e-2, eps_low=0.2, eps_high=0.2, micro_batch_groups=8, grad_clip=1e9)

DENSE = DenseConfig.of({
    "model_type": "llama", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": True, "hidden_act": "silu",
}, "here")


def in_policy_dtype(model: CausalLM, dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(policy_dtype(name, dtype))
    return model


def trained(changes: dict[str, Any], *, model: Callable[[], CausalLM] = small_model, batch: Batch | None = None) -> tuple[dict[str, float], torch.Tensor]:
    """(values of one step, its gradient)."""
    trainer = Trainer(model(), CONFIG.model_copy(update=changes))
    values = dict(trainer.step(batch or batch_of(small_model())).values)
    return values, torch.cat([m.grad.flatten() for m in trainer.masters if m.grad is not None])


def small_dense() -> CausalLM:
    return random_model(DENSE, dtype=torch.float32)


def near(a: torch.Tensor, b: torch.Tensor, relative: float) -> bool:
    return float((a - b).norm()) < relative * float(b.norm())


@pytest.mark.parametrize("model", [small_model, small_dense])
@pytest.mark.parametrize("budget", [8, 40, 64, 4096])
def test_packs_of_any_budget_give_the_gradient_of_the_padded_batch(budget: int, model: Callable[[], CausalLM]) -> None:
    batch = batch_of(model())
    values, gradient = trained({"micro_batch_tokens": budget}, model=model, batch=batch)
    wanted, exact = trained({}, model=model, batch=batch)
    assert near(gradient, exact, 1e-5)
    for name in ("loss", "k3", "entropy", "ratio_mean", "tokens_trained", "sequences_trained"):
        assert values[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("model", [small_model, small_dense])
def test_in_deterministic_mode_a_token_has_the_same_bits_packed_and_padded(model: Callable[[], CausalLM]) -> None:
    made = model()
    batch = batch_of(made)

    def equal() -> bool:
        packed, padded = (forward_groups(made, batch.groups, packed=p).logp for p in (True, False))
        alone = torch.cat([forward_groups(made, part.groups, packed=True).logp for part in by_tokens(batch.groups, 1)])
        order = [number for part in by_tokens(batch.groups, 1) for number in part.numbers]
        rows = [int(t.action_mask.sum()) for t in batch.trajectories]
        whole = torch.split(packed, rows)
        return torch.equal(packed, padded) and torch.equal(torch.cat([whole[n] for n in order]), alone)

    with using(Numerics.DETERMINISTIC):
        assert equal()
    with using(Numerics.FAST):
        assert not equal()


def test_a_pack_has_the_log_probabilities_of_whole_sequences_and_of_the_padded_form() -> None:
    model = small_model().double()
    batch = batch_of(model)
    packed, padded = (forward_groups(model, batch.groups, packed=p) for p in (True, False))
    whole = []
    for t in batch.trajectories:
        tokens = torch.from_numpy(t.tokens).long()[None]
        logits = model.logits(model(tokens[:, :-1]).hidden[0, t.prompt_tokens - 1 :])
        whole.append(token_logprobs(logits, tokens[0, t.prompt_tokens :])[0])
    assert (packed.logp - torch.cat(whole)).abs().max() < 1e-10
    assert (packed.logp - padded.logp).abs().max() < 1e-10
    assert torch.equal(packed.sequence, padded.sequence)
    assert torch.equal(packed.behave, padded.behave)


def test_another_group_of_the_pack_changes_no_bit_of_ours() -> None:
    model = small_model()
    batch = batch_of(model)
    other = sample(model, [group(7, prompt="what is something else altogether?")])["g00000007"]
    swapped = (batch.groups[0], BatchGroup(batch.groups[1].group, tuple(grade(t) for t in other), ()), batch.groups[2])
    ours, theirs = (forward_groups(model, groups, packed=True) for groups in (batch.groups, swapped))
    first = [flat.logp[flat.sequence < 4] for flat in (ours, theirs)]
    with using(Numerics.DETERMINISTIC):
        exact = [flat.logp[flat.sequence < 4] for flat in (forward_groups(model, g, packed=True) for g in (batch.groups, swapped))]
    assert (first[0] - first[1]).abs().max() < 1e-5
    assert torch.equal(*exact)
    assert not torch.equal(ours.logp[ours.sequence >= 4][:4], theirs.logp[theirs.sequence >= 4][:4])


@pytest.mark.parametrize("model", [small_model, lambda: in_policy_dtype(small_model()), small_dense, lambda: in_policy_dtype(small_dense())])
@pytest.mark.parametrize("budget", [0, 40])
def test_layers_that_are_run_again_give_the_same_step(model: Callable[[], CausalLM], budget: int) -> None:
    kept, again = (trained({"recompute": how, "micro_batch_tokens": budget}, model=model) for how in ("none", "layers"))
    assert torch.equal(kept[1], again[1])
    assert {**kept[0], "train_s": 0} == {**again[0], "train_s": 0}


def test_replayed_routes_survive_packing_and_layers_that_are_run_again() -> None:
    batch = batch_of(small_model(), record_routes=True)
    settings: list[dict[str, Any]] = [{}, {"micro_batch_tokens": 64}, {"micro_batch_tokens": 64, "recompute": "layers"}]
    gradients = [trained({**each, "router_replay": True}, batch=batch)[1] for each in settings]
    assert near(gradients[1], gradients[0], 1e-5)
    assert torch.equal(gradients[2], gradients[1])


def test_masters_gradients_and_moments_are_float32_beside_bf16_parameters() -> None:
    trainer = Trainer(in_policy_dtype(small_model()), CONFIG)
    report = trainer.step(batch_of(small_model()))
    assert report.values["grad_norm"] > 0
    dtypes = {name: p.dtype for name, p in trainer.model.named_parameters()}
    assert dtypes["lm_head.weight"] is torch.bfloat16
    assert dtypes["model.layers.0.self_attn.A_log"] is torch.float32
    for master in trainer.masters:
        assert master.grad is not None
        assert {master.dtype, master.grad.dtype, trainer.optimizer.state[master]["exp_avg"].dtype} == {torch.float32}
    assert all(p.grad is None for p in trainer.parameters)


def test_the_published_policy_is_what_bf16_parameters_hold_and_steps_add_up_below_their_resolution() -> None:
    trainer = Trainer(in_policy_dtype(small_model()), CONFIG.model_copy(update={"lr": 1e-6}))
    before, masters = trainer.state(), [m.clone() for m in trainer.masters]
    for _ in range(3):
        trainer.step(batch_of(small_model()))
    after = trainer.state()
    held = dict(trainer.model.named_parameters())
    assert torch.equal(after["lm_head.weight"], held["lm_head.weight"].detach())
    moved = sum(int((a != b).sum()) for a, b in zip(before.values(), after.values(), strict=True))
    assert moved < 0.2 * sum(t.numel() for t in before.values())
    shares = [float((m != old).float().mean()) for n, m, old in zip(trainer.names, trainer.masters, masters, strict=True) if n.endswith("o_proj.weight")]
    assert min(shares) > 0.9


def test_bf16_parameters_give_the_step_of_float32_ones_up_to_their_rounding() -> None:
    """Both hold the same values; what differs is the arithmetic between them."""
    batch = batch_of(small_model(), record_routes=True)
    replayed = {"router_replay": True}
    narrow, wide = trained(replayed, model=lambda: in_policy_dtype(small_model()), batch=batch)[1], trained(replayed, batch=batch)[1]
    assert 1e-5 < float((narrow - wide).norm() / wide.norm()) < 0.15


def test_gradients_of_bf16_parameters_are_summed_in_float32() -> None:
    """256 times a part below bf16's resolution of the sum: in bf16 each would be lost."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    master = torch.zeros(3)
    with summed_into([master], [parameter]):
        torch.autograd.backward((parameter * 256).sum())
        for _ in range(256):
            torch.autograd.backward((parameter * 0.5).sum())
            assert parameter.grad is None
    assert master.grad is not None
    assert master.grad.tolist() == [384.0] * 3
    torch.autograd.backward(parameter.sum())
    assert parameter.grad is not None
    assert master.grad.tolist() == [384.0] * 3


def test_a_gradient_that_no_pass_reaches_is_none_and_an_old_one_is_gone() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    masters = [torch.zeros(2) for _ in range(2)]
    masters[1].grad = torch.ones(2)
    with summed_into(masters, parameters):
        torch.autograd.backward(parameters[0].sum())
    assert masters[1].grad is None
    assert masters[0].grad is not None


def test_micro_batches_of_bf16_parameters_differ_by_rounding_alone() -> None:
    """Cut into the smallest parts, the gradient is no further from float32's than uncut: only each part is rounded."""
    batch = batch_of(small_model(), record_routes=True)
    exact = trained({"router_replay": True}, batch=batch)[1]
    cut, whole = (
        trained({"micro_batch_tokens": each, "router_replay": True}, model=lambda: in_policy_dtype(small_model()), batch=batch)[1] for each in (8, 4096)
    )
    assert near(cut, whole, 0.02)
    assert float((cut - exact).norm()) < 1.1 * float((whole - exact).norm())


def test_a_frozen_base_has_no_master_and_no_gradient() -> None:
    model = in_policy_dtype(small_model())
    add_lora(model, 2)
    trainer = Trainer(model, CONFIG.model_copy(update={"micro_batch_tokens": 64, "recompute": "layers"}))
    assert sum(m.numel() for m in trainer.masters) == sum(p.numel() for n, p in model.named_parameters() if "lora" in n)
    before = model.lm_head.weight.clone()
    trainer.step(batch_of(small_model()))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(before, model.lm_head.weight)
    assert any(float(m.abs().sum()) > 0 for n, m in zip(trainer.names, trainer.masters, strict=True) if "lora_B" in n)


def test_changes_found_beside_bf16_parameters_make_the_new_policy_of_the_old() -> None:
    trainer = Trainer(in_policy_dtype(small_model()), CONFIG)
    trainer.by_changes = True
    before = {n: t.clone() for n, t in trainer.state().items()}
    emitted: dict[str, Emitted] = {}
    trainer.step(batch_of(small_model()), lambda name, content: emitted.update({name: content}))
    after = trainer.state()
    assert emitted.keys() == after.keys()
    for name, content in emitted.items():
        assert not isinstance(content, torch.Tensor)
        bits = before[name].view(torch.int16 if before[name].dtype is torch.bfloat16 else torch.int32).flatten()
        (shard,) = content
        if isinstance(shard, Changes):
            bits[torch.from_numpy(shard.at).long()] ^= torch.from_numpy(shard.xor.view("int16" if bits.dtype is torch.int16 else "int32"))
        elif shard is not None:
            bits.view(torch.uint8).copy_(torch.from_numpy(shard))
        assert torch.equal(bits.view(after[name].dtype).view_as(after[name]), after[name]), name
    assert any(content[0] is not None for content in emitted.values())


def test_a_step_that_is_not_allowed_changes_nothing_and_is_no_refusal() -> None:
    trainer = Trainer(small_model(), CONFIG)
    batch = batch_of(small_model())
    before = trainer.snapshot()
    seen: list[StepDrift] = []
    emitted: list[str] = []

    def refused(drift: StepDrift) -> bool:
        seen.append(drift)
        return False

    report = trainer.step(batch, lambda name, _: emitted.append(name), allow=refused)
    assert report.halted
    assert not emitted
    assert trainer.skipped == 0
    assert seen == [report.drift]
    assert report.drift.drift.all.tokens == report.values["tokens_trained"] > 0
    assert all(torch.equal(before[n], t) for n, t in trainer.snapshot().items() if not n.startswith("rng"))
    other = Trainer(small_model(), CONFIG)
    taken = [t.step(batch, allow=lambda _: True) for t in (trainer, other)]
    assert not taken[0].halted
    assert all(torch.equal(a, b) for a, b in zip(trainer.masters, other.masters, strict=True))


def test_flips_are_counted_against_the_recorded_routes() -> None:
    batch = batch_of(small_model(), record_routes=True)
    same = Trainer(small_model(), CONFIG.model_copy(update={"router_replay": True, "micro_batch_tokens": 64, "recompute": "layers"}), count_flips=True)
    other = Trainer(small_model(5), CONFIG.model_copy(update={"router_replay": True}), count_flips=True)
    reports = [t.step(batch) for t in (same, other)]
    assert reports[0].values["flip_rows"] > 0
    assert reports[0].values["flips"] < 0.02
    assert reports[1].values["flips"] > 0.2
    assert reports[0].drift.flips is not None
    assert "flips" not in Trainer(small_model(), CONFIG).step(batch).values


def test_log_probabilities_are_asked_for_at_action_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    model = small_model()
    batch = batch_of(model)
    real = K3ForCausalLM.logprobs

    def counted(self: K3ForCausalLM, hidden: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append(len(hidden))
        return real(self, hidden, *more)

    monkeypatch.setattr(K3ForCausalLM, "logprobs", counted)
    monkeypatch.setattr(K3ForCausalLM, "logits", lambda self, hidden: pytest.fail("logits of a whole row"))
    for packed in (False, True):
        forward_groups(model, batch.groups, packed=packed)
    actions = sum(int(t.action_mask.sum()) for t in batch.trajectories)
    assert rows == [actions, actions]


def test_the_loss_of_a_pack_sees_the_advantages_of_its_own_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members are sorted into packs; a number that stayed behind would train one on another's advantage."""
    pairs: set[tuple[int, float]] = set()
    real = objective.loss

    def spied(*args: Any, **kwargs: Any) -> LossOutput:
        pairs.update(zip(kwargs["seq_id"].tolist(), kwargs["advantages"][kwargs["seq_id"]].tolist(), strict=True))
        return real(*args, **kwargs)

    monkeypatch.setattr(trainer_module, "loss", spied)
    batch = batch_of(small_model())
    seen = []
    for budget in (0, 40):
        pairs.clear()
        Trainer(small_model(), CONFIG.model_copy(update={"micro_batch_tokens": budget})).step(batch)
        seen.append(set(pairs))
    assert seen[0] == seen[1]
    assert len(seen[0]) == len(batch.trajectories)


BEGINNING = "A template and two solved examples, which every question of this task begins with: "


def few_shot(model: CausalLM, **options: bool) -> Batch:
    """Three groups whose prompts share 83 bytes; one asks nothing more."""
    groups = [group(i, prompt=BEGINNING + question) for i, question in enumerate(("one", "", "another, longer"))]
    sampled = sample(model, groups, 0, **options)
    return Batch(0, tuple(BatchGroup(g, tuple(grade(t) for t in sampled[g.group]), ()) for g in groups))


def fed_tokens(monkeypatch: pytest.MonkeyPatch, model: CausalLM) -> list[int]:
    """Of each forward from now on, padding included."""
    fed: list[int] = []
    real = type(model).forward

    def counted(self: CausalLM, tokens: torch.Tensor, *more: Any, **named: Any) -> ModelOutput:
        fed.append(tokens.numel())
        out: ModelOutput = real(self, tokens, *more, **named)
        return out

    monkeypatch.setattr(type(model), "forward", counted)
    return fed


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("model", [small_model, small_dense])
def test_what_all_prompts_begin_with_is_forwarded_once(model: Callable[[], CausalLM], packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model().double()
    batch = few_shot(made)
    assert min(len(t.tokens) for t in batch.trajectories) > 83
    shared = forward_groups(made, batch.groups, packed=packed)
    fed = fed_tokens(monkeypatch, made)
    forward_groups(made, batch.groups, packed=packed)
    assert fed[0] >= 83
    assert fed[1] < 3 * 20, "the rests of three prompts"
    monkeypatch.setattr(shared_prompts, "LEAST_BEGINNING", 10**6)
    apart = forward_groups(made, batch.groups, packed=packed)
    assert (shared.logp - apart.logp).abs().max() < 1e-10
    trained = [p for p in made.parameters() if p.requires_grad]
    for a, b in zip(*(torch.autograd.grad(f.logp.sum(), trained, allow_unused=True) for f in (shared, apart)), strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_replayed_routes_of_a_common_beginning_are_shared_where_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model().double()
    groups = few_shot(model, record_routes=True).groups
    fed = fed_tokens(monkeypatch, model)
    shared = forward_groups(model, groups, replay=True)
    assert len(fed) == 3
    moved = []
    for graded in groups[2].members:
        t = graded.trajectory
        assert t.routes is not None
        routes = t.routes.copy()
        routes[3] = (routes[3] + 1) % 4
        moved.append(graded.model_copy(update={"trajectory": t.model_copy(update={"routes": routes})}))
    edited = (*groups[:2], BatchGroup(groups[2].group, tuple(moved), ()))
    fed.clear()
    other = forward_groups(model, edited, replay=True)
    assert len(fed) == 2
    assert (shared.logp - other.logp)[shared.sequence < 8].abs().max() < 1e-10
    assert (shared.logp - other.logp)[shared.sequence >= 8].abs().max() > 1e-9


@pytest.mark.parametrize("model", [small_model, small_dense])
def test_a_deterministic_step_run_again_has_the_same_gradient_and_one_near_the_fast_one(model: Callable[[], CausalLM]) -> None:
    batch = batch_of(model())
    with using(Numerics.DETERMINISTIC):
        kept, again = (trained({"micro_batch_tokens": 64, "recompute": how}, model=model, batch=batch)[1] for how in ("none", "layers"))
    assert torch.equal(kept, again)
    assert near(kept, trained({"micro_batch_tokens": 64}, model=model, batch=batch)[1], 1e-4)
