"""In deterministic mode a token's bits are the same by every way through a model; in fast mode they are not, so the comparison can fail."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from deterministic_cases import WAYS, all_same, alone, flip_a_bit, process_in, same, sequences

from driftline.kernels.mode import Numerics, deterministic, numerics, set_numerics, using
from driftline.models.causal_lm import CausalLM
from driftline.models.config import tiny
from driftline.models.dense.config import Architecture, DenseConfig
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.model import K3ForCausalLM

torch.set_num_threads(1)


def k3() -> CausalLM:
    torch.manual_seed(0)
    model = K3ForCausalLM(tiny())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("res.proj.weight", "e_score_correction_bias", "A_log")):
                parameter.normal_(std=0.3)
    return model.eval()


def dense() -> CausalLM:
    torch.manual_seed(0)
    config = DenseConfig(model_type=Architecture.QWEN3, vocab_size=300, hidden_size=96, intermediate_size=200, num_hidden_layers=3, num_attention_heads=6,
                         num_key_value_heads=2, head_dim=16, qk_norm=True, qkv_bias=True)
    model = DenseForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=1.0 if parameter.dim() == 1 else 0.0, std=0.1)
    return model.eval()


@cache
def made(kind: str) -> CausalLM:
    return {"k3": k3, "dense": dense}[kind]()


@cache
def wanted(kind: str) -> list[torch.Tensor]:
    with process_in(Numerics.DETERMINISTIC), torch.no_grad():
        return alone(made(kind), sequences(made(kind)))


KINDS = ("k3", "dense")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_token_has_the_same_bits_by_every_way(kind: str, way: str) -> None:
    model = made(kind)
    with process_in(Numerics.DETERMINISTIC), torch.inference_mode():
        assert all_same(WAYS[way](model, sequences(model)), wanted(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_fast_mode_is_told_apart(kind: str) -> None:
    model = made(kind)
    with torch.inference_mode():
        rows = sequences(model)
        whole = alone(model, rows)
        assert not all_same(WAYS["token_by_token"](model, rows), whole)
        assert not all_same(whole, wanted(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_bit_of_one_weight_is_told_apart(kind: str) -> None:
    model = {"k3": k3, "dense": dense}[kind]()
    flip_a_bit(model.get_parameter("model.layers.0.self_attn.v_proj.weight"))
    with process_in(Numerics.DETERMINISTIC), torch.inference_mode():
        assert not all_same(alone(model, sequences(model)), wanted(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_differentiated_computes_the_same_bits(kind: str) -> None:
    model = made(kind)
    with process_in(Numerics.DETERMINISTIC):
        rows = sequences(model)
        found = WAYS["in_a_batch"](model, rows)
        assert found[0].requires_grad
        assert all_same([h.detach() for h in found], wanted(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_fast_mode_to_rounding(kind: str) -> None:
    model = made(kind)
    grads = {}
    for mode in Numerics:
        with process_in(mode):
            rows = sequences(model)
            hidden = torch.cat([h[:-1] for h in WAYS["in_a_batch"](model, rows)])
            targets = torch.cat([row[1:] for row in rows])
            loss = model.logprobs(hidden, targets, 0.7)[0].mean()
            names, leaves = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
            grads[mode] = dict(zip(names, torch.autograd.grad(loss, leaves, allow_unused=True), strict=True))
    fast, exact = grads[Numerics.FAST], grads[Numerics.DETERMINISTIC]
    assert {n for n, g in fast.items() if g is None} == {n for n, g in exact.items() if g is None}
    for name, gradient in fast.items():
        if gradient is not None:
            assert exact[name] is not None
            assert (exact[name] - gradient).norm() <= 3e-3 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_of_a_row_do_not_know_of_the_others(kind: str) -> None:
    model = made(kind)
    with process_in(Numerics.DETERMINISTIC), torch.no_grad():
        hidden = torch.cat(wanted(kind))
        rng = torch.Generator().manual_seed(5)
        ids = torch.randint(0, model.config.vocab_size, (len(hidden),), generator=rng)
        scales = torch.rand(len(hidden), generator=rng) + 0.5
        logp, entropy = model.logprobs(hidden, ids, scales)
        for at in (slice(0, 1), slice(3, 20), slice(100, 101), slice(40, 130)):
            part = model.logprobs(hidden[at], ids[at], scales[at])
            assert same(part[0], logp[at])
            assert same(part[1], entropy[at])
        plain = torch.log_softmax(model.logits(hidden).double() / scales[:, None].double(), -1)
        torch.testing.assert_close(logp.double(), plain.gather(-1, ids[:, None]).squeeze(-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy.double(), -(plain.exp() * plain).sum(-1), rtol=1e-4, atol=1e-4)


def test_the_mode_is_read_when_a_model_is_called_and_goes_back() -> None:
    assert numerics() is Numerics.FAST
    with using(Numerics.DETERMINISTIC):
        assert deterministic()
        with using(Numerics.FAST):
            assert not deterministic()
        assert deterministic()
    assert not deterministic()
    with pytest.raises(ValueError, match="exact"):
        set_numerics("exact")  # type: ignore[arg-type]
