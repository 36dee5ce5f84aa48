"""Behaviour weights against the public rules, and what must never be read as on-policy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from driftline.messages.errors import ConfigError
from driftline.services.learner.correction import Correction, CorrectionConfig, Level, correct
from driftline.services.learner.segments import LossInputError

torch.set_num_threads(1)

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "rl_golden.json").read_text())


def of_ratios(config: CorrectionConfig, ratios: list[float], mask: list[bool] | None = None) -> Correction:
    behave = torch.zeros(1, len(ratios), dtype=torch.float64)
    where = torch.ones_like(behave, dtype=torch.bool) if mask is None else torch.tensor([mask])
    return correct(config, logp_prox=torch.tensor([ratios], dtype=torch.float64).log(), logp_behave=behave, mask=where)


def flat(value: Any) -> list[float]:
    value = value["w"] if isinstance(value, dict) and "w" in value else value
    return value[0] if isinstance(value[0], list) else value


@pytest.mark.parametrize(("key", "config"), [
    ("E4.verl_tis_token_2", CorrectionConfig(tis_cap=2.0)),
    ("E4.slime_tis_2", CorrectionConfig(tis_cap=2.0)),
    ("E4.areal_clamp_2", CorrectionConfig(tis_cap=2.0)),
    ("E4.verl_icepop_0.5_5", CorrectionConfig(icepop=(0.5, 5.0))),
    ("E4.slime_icepop", CorrectionConfig(icepop=(0.5, 5.0))),
    ("E4.areal_mask[.5,5]", CorrectionConfig(icepop=(0.5, 5.0))),
    ("E4.fireworks_tis cap5 icepop2", CorrectionConfig(tis_cap=5.0, icepop=(0.5, 2.0))),
    ("E4.fireworks_tis level=sequence(geo mean) cap5", CorrectionConfig(tis_cap=5.0, level=Level.SEQUENCE)),
    ("E4.areal_sequence_geo", CorrectionConfig(tis_cap=5.0, level=Level.SEQUENCE)),
])
def test_weights_agree_with(key: str, config: CorrectionConfig) -> None:
    weight = of_ratios(config, GOLDEN["E4.ratios"]).weight
    assert weight is not None
    assert weight[0].tolist() == pytest.approx(flat(GOLDEN[key]), abs=2e-7)


def test_the_bounds_bound_the_ratio_and_not_its_inverse() -> None:
    # verl's token_k1 with "0.5_5" keeps [0.2, 2].
    keep = of_ratios(CorrectionConfig(icepop=(0.5, 5.0)), GOLDEN["E4.ratios"]).keep
    assert keep[0].tolist() == [bool(v) for v in GOLDEN["E4.skyrl_token_mask[.5,5]"][0]] == [False, True, True, True, True, False]


def test_denominators_do_not_shrink_with_the_mask() -> None:
    log_ratios = torch.tensor([[0.1, -1.5, 0.8, -10.0, 0.3]], dtype=torch.float64)
    found = correct(CorrectionConfig(icepop=(0.5, 2.0)), logp_prox=log_ratios, logp_behave=torch.zeros_like(log_ratios),
                    mask=torch.ones(1, 5).bool())
    assert found.weight is not None
    assert found.weight[0].tolist() == pytest.approx(GOLDEN["E4c.slime#657 weights"][0], abs=1e-8)
    assert found.weight.mean().item() == pytest.approx(0.49101, abs=1e-5)  # by 5, not by the 2 survivors


@pytest.mark.parametrize("behave", [-math.inf, math.inf, math.nan])
def test_an_action_token_without_behaviour_is_dropped_and_counted(behave: float) -> None:
    # AReaL reads it as on-policy: keep, weight 1.
    found = correct(CorrectionConfig(tis_cap=2.0), logp_prox=torch.tensor([[-1.0, -1.0]]),
                    logp_behave=torch.tensor([[behave, -1.0]]), mask=torch.ones(1, 2).bool())
    assert found.keep.tolist() == [[False, True]]
    assert found.weight is not None
    assert found.weight.tolist() == [[0.0, 1.0]]
    assert found.missing.item() == 1


@pytest.mark.parametrize("junk", [-math.inf, math.nan, 1e4])
@pytest.mark.parametrize("level", list(Level))
def test_masked_positions_change_nothing(junk: float, level: Level) -> None:
    mask = torch.tensor([[True, False, True]])
    config = CorrectionConfig(tis_cap=2.0, icepop=(0.1, 5.0), level=level)
    prox, behave = torch.tensor([[-1.0, junk, -0.5]]), torch.tensor([[-1.2, junk, -0.4]])
    found = correct(config, logp_prox=prox, logp_behave=behave, mask=mask)
    clean = correct(config, logp_prox=torch.nan_to_num(prox, 0, 0, 0), logp_behave=torch.zeros(1, 3) + behave.where(mask, 0.0),
                    mask=mask)
    assert found.weight is not None
    assert clean.weight is not None
    assert torch.equal(found.weight, clean.weight)
    assert found.keep.tolist() == [[True, False, True]]
    assert found.missing.item() == 0


def test_a_long_sequence_of_tiny_drifts_keeps_its_weight() -> None:
    # The product is 0.061.
    drift = torch.full((1, 8000), -3.5e-4)
    found = correct(CorrectionConfig(tis_cap=2.0, level=Level.SEQUENCE), logp_prox=drift, logp_behave=torch.zeros_like(drift),
                    mask=torch.ones(1, 8000).bool())
    assert found.weight is not None
    assert found.weight[0, 0].item() == pytest.approx(0.99965, abs=1e-6)


def test_sequence_level_is_the_same_packed() -> None:
    prox, mask = -torch.rand(3, 5, dtype=torch.float64), torch.rand(3, 5) < 0.7
    config = CorrectionConfig(tis_cap=1.05, icepop=(0.9, 2.0), level=Level.SEQUENCE)
    padded = correct(config, logp_prox=prox, logp_behave=prox * 0.9, mask=mask)
    packed = correct(config, logp_prox=prox.flatten(), logp_behave=prox.flatten() * 0.9, mask=mask.flatten(),
                     seq_id=torch.arange(3).repeat_interleave(5))
    assert padded.weight is not None
    assert packed.weight is not None
    assert torch.equal(padded.weight.flatten(), packed.weight)
    assert torch.equal(padded.keep.flatten(), packed.keep)


def test_weights_carry_no_gradient_and_do_not_overflow() -> None:
    prox = torch.tensor([[0.0, 0.0]], requires_grad=True)
    found = correct(CorrectionConfig(tis_cap=1e30), logp_prox=prox, logp_behave=torch.tensor([[-300.0, 300.0]]),
                    mask=torch.ones(1, 2).bool())
    assert found.weight is not None
    assert not found.weight.requires_grad
    assert torch.isfinite(found.weight).all()


def test_nothing_configured_weighs_nothing() -> None:
    found = of_ratios(CorrectionConfig(), [0.1, 9.0], [True, False])
    assert found.weight is None
    assert found.keep.tolist() == [[True, False]]
    assert of_ratios(CorrectionConfig(icepop=(0.5, 2.0), weigh=False), [0.1, 1.0]).weight is None


def test_half_precision_is_refused() -> None:
    # -11.7 on the wire as bfloat16 is -11.6875: a ratio wrong by 1.3 %.
    with pytest.raises(LossInputError, match="logp_behave"):
        correct(CorrectionConfig(), logp_prox=torch.zeros(1, 1), logp_behave=torch.zeros(1, 1).bfloat16(),
                mask=torch.ones(1, 1).bool())


@pytest.mark.parametrize("change", [{"tis_cap": 0.0}, {"icepop": (2.0, 0.5)}, {"icepop": (-1.0, 2.0)}])
def test_a_rule_that_drops_everything_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CorrectionConfig(**change)
