"""Low-rank updates themselves: what they are drawn as, which modules take one, that small ones are not rounded away, and that their gradients are right in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from dense_model_cases import ours
from k3_checkpoint_cases import packed_checkpoint
from lora_cases import disturbed
from model_cases import random_model, random_tokens

from driftline.kernels.grouped_linear import groups_of
from driftline.kernels.mode import Numerics, using
from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.causal_lm import CausalLM
from driftline.models.checkpoint import load_checkpoint
from driftline.models.linear import Linear
from driftline.models.lora import (
    ALL_LINEAR,
    LoraConfig,
    LoraExperts,
    LoraLinear,
    Scaling,
    Update,
    adapt,
    adapter_of,
    merge_lora,
)
from driftline.models.lora.experts import combined, repacked
from driftline.models.lora.linear import added
from driftline.models.mlp import Experts
from driftline.models.state import export_state, round_to_policy_


def leaves(names: list[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def test_targets_are_a_regular_expression_a_list_of_last_parts_or_every_linear() -> None:
    assert leaves(adapt(ours("llama"), LoraConfig(2, targets=r".*layers\.1\..*(q|up)_proj"))) == {"q_proj", "up_proj"}
    assert adapt(ours("llama"), LoraConfig(2, targets=("layers.0.self_attn.q_proj", "down_proj"))) == [
        "model.layers.0.self_attn.q_proj", *(f"model.layers.{i}.mlp.down_proj" for i in range(3))]
    everything = leaves(adapt(ours("llama"), LoraConfig(2, targets=ALL_LINEAR)))
    assert everything == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert adapt(ours("llama"), LoraConfig(2, targets=("lm_head",))) == ["lm_head"]
    model = random_model()
    linears = {name for name, module in model.named_modules() if isinstance(module, Linear | Experts)} - {"lm_head"}
    assert set(adapt(model, LoraConfig(2, targets=ALL_LINEAR))) == linears


@pytest.mark.parametrize("config", [
    {"rank": 0}, {"rank": 2, "alpha": 0.0}, {"rank": 2, "alpha": float("nan")}, {"rank": 2, "targets": "("}, {"rank": 2, "targets": ()}, {"rank": 2, "targets": ("",)},
])
def test_a_configuration_that_adapts_nothing_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refused:
        LoraConfig(**config)  # type: ignore[arg-type]
    assert refused.value.field.startswith("learner.lora_")
    assert refused.value.remedy


def test_a_list_that_names_no_module_is_refused_and_freezes_nothing() -> None:
    model = ours("llama")
    with pytest.raises(ConfigError, match="matches no linear"):
        adapt(model, LoraConfig(2, targets=("proj",)))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_one_seed_draws_one_adapter_whatever_the_dtype_and_experts_draw_as_linears_do() -> None:
    """An expert's A [r, in] has the bound 1 / sqrt(in) of one linear, not one of the whole stack."""
    drawn = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = random_model().to(dtype)
        torch.manual_seed(11)
        adapt(model, LoraConfig(8, targets=ALL_LINEAR))
        drawn.append(adapter_of(model))
    for name, update in drawn[1].updates.items():
        bound = update.a.shape[-1] ** -0.5
        assert 0.8 * bound < float(update.a.abs().max()) <= bound, name
        assert torch.equal(drawn[0].updates[name].a, update.a.double())
        assert torch.equal(drawn[2].updates[name].a, update.a.bfloat16())
        assert not update.b.any()


def test_rslora_multiplies_by_alpha_over_the_root_of_the_rank() -> None:
    model = Linear(5, 3)
    with torch.no_grad():
        adapted = LoraLinear(model, 4, 6.0, Scaling.ROOT)
        adapted.lora_B.normal_()
        x = torch.randn(2, 5)
        torch.testing.assert_close(adapted(x), model(x) + x @ (adapted.lora_B @ adapted.lora_A).T * 3.0)
        torch.testing.assert_close(adapted.effective_weight(), model.weight + adapted.lora_B @ adapted.lora_A * 3.0)


@torch.no_grad()
def test_a_bias_is_kept_beside_an_update_and_through_a_merge() -> None:
    base = Linear(5, 3, bias=True)
    adapted = LoraLinear(base, 2, 2.0)
    adapted.lora_B.normal_()
    x = torch.randn(4, 5)
    want = torch.nn.functional.linear(x, adapted.effective_weight(), base.bias)
    torch.testing.assert_close(adapted(x), want)
    torch.testing.assert_close(adapted.merged()(x), want)


@torch.no_grad()
def test_a_bias_is_added_before_the_one_rounding() -> None:
    layer = Linear(64, 32, bias=True).bfloat16()
    x = torch.randn(50, 64).bfloat16()
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    assert (layer(x).double() - exact).abs().max() <= (exact.abs() * 2**-8).max()
    twice = (torch.nn.functional.linear(x, layer.weight) + layer.bias).double()
    assert (layer(x).double() - exact).norm() < (twice - exact).norm()


@pytest.mark.parametrize("which", ["kv_b_proj", "experts", "packed experts"])
@torch.no_grad()
def test_an_update_below_the_last_bit_of_the_weights_still_counts(which: str, tmp_path: Path) -> None:
    """Folded into them it would be rounded away: bfloat16 keeps 8 bits, MXFP4 two or three. Computed in fp32 on the policy's bfloat16 values, as on a CPU."""
    model: CausalLM = load_checkpoint(str(packed_checkpoint(tmp_path))) if which == "packed experts" else random_model(dtype=torch.float32)
    round_to_policy_(model)
    tokens = random_tokens(2, 12)
    before = model(tokens).hidden
    adapt(model, LoraConfig(1, 1.0, targets=rf".*{which.split()[-1]}$"))
    for name, parameter in model.named_parameters():
        if name.endswith(("kv_b_proj.lora_A", "delta.w1.lora_A")):
            parameter.fill_(2**-7)
        if name.endswith(("kv_b_proj.lora_B", "delta.w1.lora_B")):
            parameter.fill_(2**-7)
    lost = []
    for module in model.modules():
        if isinstance(module, LoraExperts) and which == "packed experts":
            lost.append((repacked(*(part[0] for part in module.base.w1), module.updates["w1"].of_expert(0))[0] == module.base.w1.packed[0]).float().mean())
        elif isinstance(module, LoraLinear | LoraExperts):
            held, update = (module.weight, module.update) if isinstance(module, LoraLinear) else (module.base.w1, module.updates["w1"])
            lost.append((added(held.bfloat16(), Update(update.a.bfloat16(), update.b.bfloat16(), 1.0)) == held).float().mean())
    assert lost
    assert min(lost) > 0.8, "what the test is about"
    assert (model(tokens).hidden - before).abs().max() > 1e-5


@pytest.fixture(params=["unpacked", "packed", "dense"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], CausalLM]]:
    if request.param == "dense":
        yield lambda: ours("qwen2")
    elif request.param == "packed":
        directory = packed_checkpoint(tmp_path_factory.mktemp("packed"))
        yield lambda: load_checkpoint(str(directory))
    else:
        yield lambda: random_model(dtype=torch.float32)


def gradients(model: CausalLM, tokens: torch.Tensor, replay: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    hidden = model(tokens, replay=replay).hidden
    along = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    torch.autograd.backward((hidden * along).sum())
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def test_both_modes_give_the_gradient_of_the_merged_weights(make: Callable[[], CausalLM]) -> None:
    """Of effective weights G: dA = scale B^T G, dB = scale G A^T, with G from a model that was merged, in fp32."""
    tokens = random_tokens(3, 14) % 97
    model = make()
    torch.manual_seed(0)
    adapt(model, LoraConfig(3, 5.0, ALL_LINEAR))
    disturbed(model, 1)
    replay = model(tokens).routes.detach()
    replay = replay if replay.shape[2] else None  # type: ignore[assignment]
    found = {}
    for mode in Numerics:
        model.zero_grad()
        with using(mode):
            found[mode] = gradients(model, tokens, replay)
    torch.testing.assert_close(found[Numerics.FAST][0], found[Numerics.DETERMINISTIC][0], rtol=0, atol=5e-5)
    assert len(found[Numerics.FAST][1]) == sum(p.requires_grad for p in model.parameters())
    for name, grad in found[Numerics.FAST][1].items():
        torch.testing.assert_close(grad, found[Numerics.DETERMINISTIC][1][name], rtol=1e-3, atol=1e-4 * float(grad.abs().max()), msg=name)
    updates = adapter_of(model).updates
    packed = any(".base.w1_packed" in name for name, _ in model.named_buffers())
    merge_lora(model)
    for parameter in model.parameters():
        parameter.requires_grad_()
    _, whole = gradients(model, tokens, replay)
    for name, update in updates.items():
        if packed and update.experts is not None:
            continue  # packed weights have no gradient
        of_weight = whole[name if update.experts is not None else f"{name}.weight"]
        stem = name.replace(".experts.", ".experts.delta.")
        for half, wanted in (("A", update.b.mT @ of_weight), ("B", of_weight @ update.a.mT)):
            grad = found[Numerics.FAST][1][f"{stem}.lora_{half}"]
            if not packed:
                torch.testing.assert_close(grad, wanted * update.scale, rtol=2e-3, atol=2e-4 * float(grad.abs().max()), msg=f"{name} {half}")


def test_undoing_a_merge_gives_back_every_bit(make: Callable[[], CausalLM]) -> None:
    model = make().to(torch.bfloat16)
    adapt(model, LoraConfig(3, 5.0, ALL_LINEAR))
    disturbed(model, 1)
    before, names = export_state(model, torch.bfloat16), [name for name, _ in model.named_parameters()]
    merged = merge_lora(model)
    assert set(export_state(model)) < set(before)
    merged.undo()
    after = export_state(model, torch.bfloat16)
    assert [name for name, _ in model.named_parameters()] == names
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("a", "b"), [((2, 3), (4, 3)), ((2,), (4, 2)), ((5, 2, 3), (6, 4, 2)), ((2, 3), (5, 4, 2))])
def test_halves_that_do_not_fit_are_no_update(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    with pytest.raises(IntegrityError):
        Update(torch.zeros(a), torch.zeros(b), 1.0)


def test_the_gated_sum_s_gradient_matches_finite_differences() -> None:
    random = torch.Generator().manual_seed(0)
    rows = groups_of(torch.tensor([[1, 0], [2, -1], [0, 1]]), 3)
    y, gates = (torch.randn(*shape, dtype=torch.float64, generator=random).requires_grad_() for shape in ((6, 5), (3, 2)))
    assert torch.autograd.gradcheck(lambda y, gates: combined(y, rows, gates), (y, gates))
