"""Inputs on which public implementations of the loss are known to go wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import structlog
import torch

from driftline.messages.errors import ConfigError
from driftline.services.learner import objective
from driftline.services.learner.objective import Denominators, LossOutput, Objective, ObjectiveConfig, loss
from driftline.services.learner.segments import LossInputError

torch.set_num_threads(1)

CLIPPED = [Objective.GSPO, Objective.GRPO, Objective.PPO]


def evaluate(
    config: ObjectiveConfig, new: list[list[float]], prox: list[list[float]], advantages: list[float],
    mask: list[list[int]] | None = None, dtype: torch.dtype = torch.float32, **kwargs: Any,
) -> tuple[LossOutput, torch.Tensor]:
    leaf = torch.tensor(new, dtype=dtype, requires_grad=True)
    where = torch.ones_like(leaf, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    out = loss(config, logp_new=leaf, logp_prox=torch.tensor(prox, dtype=dtype), mask=where,
               advantages=torch.tensor(advantages, dtype=dtype), denominators=Denominators.of(where), **kwargs)
    out.loss.backward()
    assert leaf.grad is not None
    return out, leaf.grad


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [89.0, 200.0, 1e30])
def test_an_overflowing_ratio_gives_a_finite_loss_and_no_gradient(
    name: Objective, dtype: torch.dtype, log_ratio: float
) -> None:
    # Without the log clamp: A = +1 gives a NaN gradient; without the cap: A = -1 gives a loss of 22026 or infinity.
    config = ObjectiveConfig(name=name)
    up, up_gradient = evaluate(config, [[log_ratio]], [[0.0]], [1.0], dtype=dtype)
    down, down_gradient = evaluate(config, [[log_ratio]], [[0.0]], [-1.0], dtype=dtype)
    assert up.loss.item() == pytest.approx(-1.0004, abs=1e-6)
    assert down.loss.item() == 3.0
    assert up_gradient.item() == down_gradient.item() == 0.0


@pytest.mark.parametrize("name", list(Objective))
def test_an_underflowing_ratio_stays_finite(name: Objective) -> None:
    for advantage in (1.0, -1.0):
        out, gradient = evaluate(ObjectiveConfig(name=name), [[-500.0]], [[-1.0]], [advantage])
        assert math.isfinite(out.loss.item())
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", list(Objective))
@pytest.mark.parametrize("advantage", [0.0, -0.0])
def test_advantage_zero_times_an_enormous_ratio_is_zero(name: Objective, advantage: float) -> None:
    out, gradient = evaluate(ObjectiveConfig(name=name), [[89.0, -1.0]], [[0.0, -1.0]], [advantage])
    assert out.loss.item() == 0.0
    assert (gradient == 0).all()


def test_a_ratio_of_five_with_a_positive_advantage_has_no_gradient() -> None:
    # OpenRLHF computed GSPO's clamp and never used it.
    out, gradient = evaluate(ObjectiveConfig(), [[math.log(5.0)]], [[0.0]], [1.0])
    assert gradient.item() == 0.0
    assert out.metrics["clip_high"] == 1.0


def test_the_sequence_ratio_is_a_mean_and_not_a_product() -> None:
    # 8000 tokens at -3.5e-4 nats: the product is 0.061, the geometric mean 0.99965.
    out, _ = evaluate(ObjectiveConfig(), [[-1.0 - 3.5e-4] * 8000], [[-1.0] * 8000], [1.0], dtype=torch.float64)
    assert out.metrics["ratio_mean"] == pytest.approx(0.99965, abs=1e-6)


def test_every_token_of_a_sequence_gets_the_sequence_ratio() -> None:
    # Dividing by the length without summing first gives each token its own [.1, .2].
    out, gradient = evaluate(ObjectiveConfig(eps_low=0.5, eps_high=0.5), [[-0.8, -0.6]], [[-1.0, -1.0]], [1.0],
                             dtype=torch.float64)
    assert out.loss.item() == pytest.approx(-math.exp(0.3))
    assert gradient[0].tolist() == pytest.approx([-math.exp(0.3) / 2] * 2)


def test_a_tiny_sequence_ratio_survives_beside_a_large_log_probability() -> None:
    # (kl + lp) - lp rounds 3.3e-4 away in low precision; the order here keeps it in float32 at any log-probability.
    for level in (-15.3, -1000.0):
        new = [[level] * 2]
        out, _ = evaluate(ObjectiveConfig(), new, [[level - 6.6e-4, level + 0.0]], [1.0])
        prox = torch.tensor([level - 6.6e-4, level], dtype=torch.float32)
        exact = (torch.tensor([level] * 2, dtype=torch.float32) - prox).double().mean().exp().item()
        assert out.metrics["ratio_mean"] == pytest.approx(exact, abs=1e-7)


@pytest.mark.parametrize("name", list(Objective))
@pytest.mark.parametrize("junk", [-300.0, math.inf, -math.inf, math.nan])
def test_a_masked_position_has_neither_value_nor_gradient(name: Objective, junk: float) -> None:
    config = ObjectiveConfig(name=name)
    clean, expected = evaluate(config, [[-1.0, -2.0]], [[-1.0, -2.0]], [1.0], [[1, 0]])
    for new, prox in ([[-1.0, junk]], [[-1.0, -2.0]]), ([[-1.0, -2.0]], [[-1.0, junk]]), ([[-1.0, junk]], [[-1.0, junk]]):
        out, gradient = evaluate(config, new, prox, [1.0], [[1, 0]])
        assert out.loss.item() == clean.loss.item()
        assert torch.equal(gradient, expected)


def test_a_token_dropped_by_a_mask_has_no_gradient_even_at_an_enormous_distance() -> None:
    # prime-rl multiplies by its mask: new -1, inference -100 gives 0 * inf = NaN.
    keep = torch.tensor([[True, False]])
    config = ObjectiveConfig(name=Objective.IMPORTANCE_SAMPLING)
    out, gradient = evaluate(config, [[-1.0, -1.0]], [[-1.0, -100.0]], [1.0], token_keep=keep)
    assert math.isfinite(out.loss.item())
    assert gradient[0, 1].item() == 0.0
    assert gradient[0, 0].item() != 0.0


def test_an_action_token_without_a_proximal_log_probability_is_dropped_and_counted() -> None:
    out, gradient = evaluate(ObjectiveConfig(), [[-1.0, -1.0, -1.0]], [[-1.0, math.nan, -math.inf]], [1.0])
    assert out.metrics["dropped"] == 2
    assert out.metrics["masked"] == pytest.approx(2 / 3)
    assert out.loss.item() == pytest.approx(-1 / 3)
    assert gradient[0].tolist() == pytest.approx([-1 / 3, 0, 0])


def test_a_model_that_returns_nan_is_not_hidden() -> None:
    for name in Objective:
        out, _ = evaluate(ObjectiveConfig(name=name), [[math.nan, -1.0]], [[-1.0, -1.0]], [1.0])
        assert math.isnan(out.loss.item())
        assert out.metrics["new_non_finite"] == 1


def test_an_empty_completion_is_not_counted_as_a_sequence() -> None:
    config = ObjectiveConfig(eps_low=0.2, eps_high=0.2)
    with_empty, _ = evaluate(config, [[-1.0, -1.0], [-9.0, -9.0]], [[-1.0, -1.0], [-1.0, -1.0]], [1.0, 1.0], [[1, 1], [0, 0]])
    assert with_empty.loss.item() == -1.0
    assert with_empty.metrics["sequences"] == 1


def test_a_masked_truncated_sample_stays_in_the_denominator() -> None:
    """Our policy: dropping tokens shrinks the loss and is reported, it never re-weighs the survivors."""
    keep = torch.tensor([[True] * 4, [False] * 4])
    out, _ = evaluate(ObjectiveConfig(), [[-1.0] * 4] * 2, [[-1.0] * 4] * 2, [-1.0, -1.0], token_keep=keep)
    assert out.loss.item() == 0.5
    assert out.metrics["masked"] == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", ["logp_new", "logp_prox"])
def test_half_precision_log_probabilities_are_refused(dtype: torch.dtype, which: str) -> None:
    tensors = {"logp_new": torch.zeros(1, 2), "logp_prox": torch.zeros(1, 2)}
    tensors[which] = tensors[which].to(dtype)
    with pytest.raises(LossInputError, match=f"{which}.*float32"):
        loss(ObjectiveConfig(), **tensors, mask=torch.ones(1, 2).bool(), advantages=torch.ones(1),
             denominators=Denominators(1, 2))


@pytest.mark.parametrize(("change", "message"), [
    ({"logp_prox": torch.zeros(1, 3)}, "logp_prox"),
    ({"logp_prox": torch.zeros(1, 2).double()}, "logp_prox"),
    ({"logp_prox": None}, "logp_prox"),
    ({"mask": torch.ones(1, 2)}, "mask.bool"),
    ({"mask": torch.ones(2, 2).bool()}, "mask.shape"),
    ({"advantages": torch.ones(2)}, "advantages"),
    ({"advantages": torch.ones(1, 2)}, "advantages"),  # per-sequence times per-token would broadcast silently
    ({"advantages": None}, "advantages"),
    ({"token_keep": torch.ones(1, 2)}, "token_keep"),
    ({"token_weight": torch.ones(2)}, "token_weight"),
    ({"seq_id": torch.zeros(2).long()}, "seq_id"),
])
def test_tensors_that_do_not_fit_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"logp_new": torch.zeros(1, 2), "logp_prox": torch.zeros(1, 2), "mask": torch.ones(1, 2).bool(),
                            "advantages": torch.ones(1), "denominators": Denominators(1, 2)}
    with pytest.raises(LossInputError, match=message):
        loss(ObjectiveConfig(), **{**good, **change})


@pytest.mark.parametrize("change", [
    {"eps_low": -0.1}, {"eps_low": 1.5}, {"clip_low_threshold": 1.1}, {"clip_high_threshold": 0.9},
    {"dual_clip": 1.0, "eps_high": 0.2}, {"dual_clip": 5.0, "delta": 4.0}, {"log_ratio_clamp": 100.0},
    {"name": Objective.CISPO, "cispo_low": 4.0},
])
def test_bounds_that_hold_nothing_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ObjectiveConfig(**change)


def test_names_are_taken_as_text_and_unknown_ones_refused() -> None:
    assert ObjectiveConfig(name="cispo").name is Objective.CISPO  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gpso"):
        ObjectiveConfig(name="gpso")  # type: ignore[arg-type]


def test_a_tight_clip_on_short_sequences_warns_once() -> None:
    objective._warn_short_once.cache_clear()
    with structlog.testing.capture_logs() as logs:
        evaluate(ObjectiveConfig(eps_low=0.2, eps_high=0.2), [[-1.0]], [[-1.0]], [1.0])
        evaluate(ObjectiveConfig(name=Objective.PPO), [[-1.0]], [[-1.0]], [1.0])
        evaluate(ObjectiveConfig(), [[-1.0] * 200], [[-1.0] * 200], [1.0])
        assert logs == []
        evaluate(ObjectiveConfig(), [[-1.0]], [[-1.0]], [1.0])
        evaluate(ObjectiveConfig(), [[-1.0]], [[-1.0]], [1.0])
    assert [entry["event"] for entry in logs] == ["gspo_clip_tight_for_short_sequences"]


def test_cross_entropy_is_the_mean_negative_log_probability() -> None:
    new = torch.tensor([[-1.0, -2.0, -9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    out = loss(ObjectiveConfig(name=Objective.CROSS_ENTROPY), logp_new=new, logp_prox=None, mask=mask, advantages=None,
               denominators=Denominators.of(mask))
    out.loss.backward()
    assert out.loss.item() == 1.5
    assert new.grad is not None
    assert new.grad[0].tolist() == [-0.5, -0.5, 0.0]


def test_dual_clip_leaves_positive_advantages_alone() -> None:
    # The wrong variant gives -3 here.
    out, _ = evaluate(ObjectiveConfig(name=Objective.PPO, eps_low=0.2, eps_high=0.2), [[math.log(5.0)]], [[0.0]], [1.0])
    assert out.loss.item() == pytest.approx(-1.2)
