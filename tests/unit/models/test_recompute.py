"""Layers that are run again in the backward pass: the same gradients to the bit, less memory, and nothing decided twice."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from model_cases import random_model, random_tokens, small
from torch.profiler import ProfilerActivity, profile

from driftline.kernels.attention_residual.bank import Bank, Storage
from driftline.kernels.mode import Numerics, numerics, using
from driftline.models import causal_lm
from driftline.models.config import tiny
from driftline.models.lora import add_lora
from driftline.models.mlp import LatentMoe
from driftline.models.model import K3ForCausalLM
from driftline.models.packed import Packed
from driftline.models.quantisation import Quantisation
from driftline.models.random_weights import random_model as fresh_model
from driftline.models.recompute import Recompute, recomputed

torch.set_num_threads(1)


def gradients(model: K3ForCausalLM, how: Recompute, *, packed: bool = False, replay: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Of a prompt's pass and its completions' pass, forked twice, as a learner runs them."""
    model.recompute = how
    model.zero_grad(set_to_none=True)
    prompt, more = random_tokens(2, 6), random_tokens(1, 22, seed=1)
    pack = Packed.of((9, 1, 7, 5), "cpu")
    cache = model(prompt, lengths=torch.tensor([6, 4])).cache.repeat(2)
    if packed:
        hidden = model(more, cache=cache, packed=pack, replay=replay).hidden
    else:
        hidden = model(pack.padded(more[0]), lengths=pack.lengths_s, cache=cache).hidden[pack.real]
    torch.autograd.backward((hidden.float() ** 2).mean())
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_a_forward_that_kept_everything(dtype: torch.dtype, packed: bool) -> None:
    model = random_model(dtype=dtype)
    kept, again = gradients(model, Recompute.NONE, packed=packed), gradients(model, Recompute.LAYERS, packed=packed)
    assert kept.keys() == again.keys()
    assert len(kept) > 50
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_a_bank_of_several_rows_has_its_gradients_from_layers_that_are_run_again() -> None:
    """Each block's sum is read by every later layer: a row written twice, or read before it is there, would show here."""
    model = random_model(small(num_hidden_layers=9, attn_res_block_size=2, linear_attn_config={
        "num_heads": 2, "head_dim": 8, "full_attn_layers": (4, 8, 9), "kda_layers": (1, 2, 3, 5, 6, 7)}))
    kept, again = gradients(model, Recompute.NONE), gradients(model, Recompute.LAYERS)
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert float(again["model.layers.0.self_attn.o_proj.weight"].abs().sum()) > 0


def test_the_second_run_writes_no_row_and_chooses_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    asked: list[bool] = []
    rows: list[int] = []
    forward, write = LatentMoe.forward, Bank.write

    def routed(self: LatentMoe, x: torch.Tensor, replay: torch.Tensor | None = None, complete: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(replay is not None)
        return forward(self, x, replay, complete)

    def written_by(self: Bank, prefix: torch.Tensor) -> Bank:
        rows.append(self.rows)
        return write(self, prefix)

    monkeypatch.setattr(LatentMoe, "forward", routed)
    monkeypatch.setattr(Bank, "write", written_by)
    model.recompute = Recompute.LAYERS
    out = model(random_tokens(2, 5))
    first, written = len(asked), len(rows)
    assert not any(asked)
    assert written == 3
    torch.autograd.backward(out.hidden.sum())
    assert len(asked) > first
    assert all(asked[first:])
    assert len(rows) == written


def test_replayed_experts_are_read_again() -> None:
    model = random_model()
    with torch.no_grad():
        free = model(random_tokens(1, 22, seed=1), packed=Packed.of((9, 1, 7, 5), "cpu")).routes
    replay = (free + 1) % model.config.num_experts
    kept, again = (gradients(model, how, packed=True, replay=replay) for how in Recompute)
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    free_again = gradients(model, Recompute.LAYERS, packed=True)
    assert any(not torch.equal(again[name], free_again[name]) for name in again)


@pytest.mark.parametrize("targets", [r".*proj$", r".*(proj|experts)$"])
def test_adapters_over_packed_experts_have_the_same_gradients(targets: str) -> None:
    """Nothing before the first adapter has a gradient, and packed experts are unpacked again in the backward pass."""
    model = fresh_model(tiny(num_hidden_layers=3), experts=Quantisation.MXFP4, dtype=torch.float32)
    assert isinstance(model, K3ForCausalLM)
    add_lora(model, 2, targets=targets)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.02)
    kept, again = gradients(model, Recompute.NONE, packed=True), gradients(model, Recompute.LAYERS, packed=True)
    assert kept.keys() == again.keys()
    assert len(kept) > 30
    assert all("lora" in name and torch.equal(kept[name], again[name]) for name in kept)


def test_less_is_kept() -> None:
    """By the allocator: what a layer closes over is kept too, and no hook of autograd sees it."""
    model = random_model()
    sizes = []
    for how in Recompute:
        model.recompute = how
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            hidden = model(random_tokens(2, 40)).hidden
        sizes.append(sum(event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"))
        del hidden
    assert 0 < sizes[1] * 4 < sizes[0]


def test_a_graph_that_was_not_run_back_is_freed() -> None:
    """A recomputed part that held what it made would hold its own graph, and with it the bank."""
    model = random_model()
    model.recompute = Recompute.LAYERS
    banks: list[weakref.ref[Storage]] = []
    hook = model.model.layers[0].register_forward_hook(lambda _, args, out: banks.append(weakref.ref(out[0].bank.storage)))
    gc.disable()
    try:
        out = model(random_tokens(1, 5))
        hook.remove()
        assert banks[0]() is not None
        del out
        assert banks[0]() is None
    finally:
        gc.enable()


def test_the_second_run_has_the_numerics_of_the_first() -> None:
    seen: list[Numerics] = []
    x = torch.ones(2, requires_grad=True)

    def part() -> torch.Tensor:
        seen.append(numerics())
        return x.exp()

    with using(Numerics.DETERMINISTIC):
        out = recomputed(part)
    torch.autograd.backward(out.sum())
    assert seen == [Numerics.DETERMINISTIC] * 2
    with torch.no_grad():
        recomputed(part)
    assert len(seen) == 3


def test_an_adapted_head_holds_the_logits_of_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    add_lora(model, 2, targets=r"lm_head$")
    hidden, tokens, temperature = torch.randn(37, 32, dtype=torch.float64), random_tokens(1, 37)[0], torch.rand(37, dtype=torch.float64) + 0.5
    sizes: list[int] = []
    logits = K3ForCausalLM.logits

    def counted(self: K3ForCausalLM, rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return logits(self, rows)

    monkeypatch.setattr(K3ForCausalLM, "logits", counted)
    found = []
    for rows in (64, 10):
        monkeypatch.setattr(causal_lm, "HEAD_ROWS", rows)
        model.zero_grad(set_to_none=True)
        logp, entropy = model.logprobs(hidden, tokens, temperature)
        torch.autograd.backward(logp.sum())
        gradient = next(p.grad for n, p in model.named_parameters() if n.endswith("lora_B"))
        assert gradient is not None
        found.append((logp.detach(), entropy, gradient))
    assert sizes == [37, 10, 10, 10, 7, 7, 10, 10, 10]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        model.logprobs(hidden, tokens)
    assert sizes[-1] == 37
