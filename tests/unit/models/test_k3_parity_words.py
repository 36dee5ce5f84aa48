"""The whole of K3 against its description written down a second time, and every trap in it: an implementation that fell into one would be that far off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from k3_in_words import Trap, hidden_in_words
from model_cases import random_model, random_tokens, small

from driftline.kernels.mode import Numerics, using
from driftline.models.model import K3ForCausalLM

TOKENS = 12



@pytest.fixture(params=Numerics, autouse=True)
def mode(request: pytest.FixtureRequest) -> Iterator[Numerics]:
    """Both orders of operations are the model."""
    numerics: Numerics = request.param
    with using(numerics):
        yield numerics


def drawn(**changes: object) -> K3ForCausalLM:
    """Every part away from what makes it trivial; inner activations small enough that an epsilon counts."""
    model = random_model(small(routed_scaling_factor=1.7, **changes), seed=20, dtype=torch.float64)
    rng = torch.Generator().manual_seed(21)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "conv1d" in name:
                parameter.normal_(std=0.6, generator=rng)
            elif name.endswith("dt_bias"):
                parameter.normal_(mean=-2.0, std=1.5, generator=rng)
            elif name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")):
                parameter.mul_(0.05)
            elif name.endswith((".w1", ".w3", "gate_proj.weight", "up_proj.weight")) and "routed" not in name:
                parameter.mul_(5.0)
            elif name.endswith("res.proj.weight"):
                parameter.normal_(std=0.5, generator=rng)
    return model


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return drawn()


@pytest.fixture(scope="module")
def without_norm() -> K3ForCausalLM:
    """The norm behind the experts' sum takes a common factor of their weights out again, so that only a model without it shows one."""
    return drawn(latent_moe_use_norm=False)


@torch.no_grad()
def both(model: K3ForCausalLM, trap: Trap | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = random_tokens(1, TOKENS, seed=22)
    return model(tokens).hidden[0], hidden_in_words(model.state_dict(), model.config, tokens[0], trap)


def test_the_model_is_its_description(model: K3ForCausalLM, without_norm: K3ForCausalLM) -> None:
    for each in (model, without_norm):
        torch.testing.assert_close(*both(each), rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize(("seed", "within"), [(0, True), (1, True), (2, False), (3, True), (4, False), (5, False), (7, True)])
def test_in_fp32_the_model_is_its_description_to_1e_5(seed: int, within: bool) -> None:
    """Beside the same parameters in fp64. Where a norm of something small enlarges fp32's roundings past 1e-5, no further off than the description itself in
    fp32, twice over."""
    single, tokens = random_model(small(), seed=seed, dtype=torch.float32), random_tokens(1, TOKENS, seed=seed)
    exact = {name: tensor.double() for name, tensor in single.state_dict().items()}
    want = hidden_in_words(exact, single.config, tokens[0])
    error = float((single(tokens).hidden[0] - want).abs().max())
    plain = float((hidden_in_words(single.state_dict(), single.config, tokens[0]) - want).abs().max())
    assert error <= (1e-5 if within else 2 * plain)


@pytest.mark.parametrize("trap", Trap, ids=lambda trap: trap.name.lower())
def test_a_trap_fallen_into_shows(model: K3ForCausalLM, without_norm: K3ForCausalLM, trap: Trap) -> None:
    """By far more than parity allows in fp64, and more than it allows in fp32."""
    ours, wrong = both(without_norm if trap in (Trap.NOT_RENORMALISED, Trap.UNSCALED_ROUTES) else model, trap)
    assert (ours - wrong).abs().max() > 1e-3, trap.value
