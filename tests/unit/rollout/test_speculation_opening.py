"""What a run's settings open: nothing, n-grams, a trained drafter of this model; and what they refuse by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from driftline.kernels.mode import Numerics, using
from driftline.messages.errors import ConfigError
from driftline.models.config import tiny
from driftline.models.drafter import Drafter, DrafterConfig, save_drafter
from driftline.models.model import K3ForCausalLM
from driftline.services.rollout.speculation.learned import TrainedDrafter
from driftline.services.rollout.speculation.ngram import NgramDrafter
from driftline.services.rollout.speculation.opening import speculator_for
from driftline.services.rollout_config import RolloutConfig, Speculation, SpeculationRule


def _model(width: int = 64) -> K3ForCausalLM:
    torch.manual_seed(0)
    return K3ForCausalLM(tiny(num_hidden_layers=2, hidden_size=width, vocab_size=24)).eval()


def test_off_is_nobody_and_ngram_needs_no_files() -> None:
    model = _model()
    assert speculator_for(RolloutConfig(), model) is None
    speculator = speculator_for(RolloutConfig(speculation=Speculation.NGRAM, draft_tokens=5), model)
    assert speculator is not None
    assert isinstance(speculator.drafter, NgramDrafter)
    assert (speculator.window, speculator.taps, speculator.rule) == (6, (), SpeculationRule.MATCH)
    assert speculator.pays is not None, "off by itself where it does not pay"


def test_a_trained_drafter_comes_from_its_directory_and_fits_its_model(tmp_path: Path) -> None:
    model = _model()
    save_drafter(Drafter(DrafterConfig.of(model.config)), tmp_path)
    rollout = RolloutConfig(speculation=Speculation.DRAFTER, drafter=str(tmp_path))
    speculator = speculator_for(rollout, model)
    assert speculator is not None
    assert isinstance(speculator.drafter, TrainedDrafter)
    assert speculator.taps == (1, 2)
    with pytest.raises(ConfigError, match="hidden_size"):
        speculator_for(rollout, _model(width=128))
    with pytest.raises(ConfigError, match=r"rollout\.drafter"):
        speculator_for(RolloutConfig(speculation=Speculation.DRAFTER, drafter=str(tmp_path / "none")), model)


def test_rejection_is_refused_in_deterministic_mode() -> None:
    rollout = RolloutConfig(speculation=Speculation.NGRAM, speculation_rule=SpeculationRule.REJECTION)
    assert speculator_for(rollout, _model()) is not None
    with using(Numerics.DETERMINISTIC), pytest.raises(ConfigError, match="speculation_rule"):
        speculator_for(rollout, _model())
