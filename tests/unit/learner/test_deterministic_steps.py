"""Sampling and training in turns, in deterministic mode: at every step the learner's log-probabilities are the engine's, whatever it trains and however it goes about it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from learning_samples import batch_of, small_model

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from deterministic_cases import process_in

from driftline.kernels.mode import Numerics
from driftline.models.lora import add_lora
from driftline.models.state import export_state, load_state
from driftline.services.config import LearnerConfig
from driftline.services.learner.trainer import Trainer

torch.set_num_threads(1)


def trainer(*, adapted: bool = False, **settings: object) -> Trainer:
    model = small_model()
    if adapted:
        torch.manual_seed(1)
        add_lora(model, 3, None, r".*proj$|.*experts$")
    return Trainer(model, LearnerConfig.model_validate({"lr": 1e-2, "objective": "grpo", **settings}))


def digest(of: Trainer) -> bytes:
    return b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in export_state(of.model).values())


def steps(learner: Trainer, mode: Numerics, count: int = 3, *, record_routes: bool = False) -> list[tuple[float, float, float]]:
    """(bitwise-equal fraction, max |d|, k3) of every step; each batch is sampled by a model that was given the version."""
    found = []
    with process_in(mode):
        for head in range(count):
            rollout = small_model(9)
            if any("lora" in name for name, _ in learner.model.named_parameters()):
                add_lora(rollout, 3, None, r".*proj$|.*experts$")
            load_state(rollout, export_state(learner.model))
            report = learner.step(batch_of(rollout, head=head, record_routes=record_routes))
            drift = report.drift.drift.numerics
            assert drift is not None
            assert drift.tokens > 50
            assert report.values["grad_norm"] > 0
            found.append((drift.bitwise_equal, drift.max_abs, drift.k3))
    return found


@pytest.mark.parametrize("settings", [
    {}, {"micro_batch_groups": 1}, {"micro_batch_tokens": 64}, {"recompute": "layers"}, {"router_replay": True}, {"recompute": "layers", "micro_batch_tokens": 96},
    {"adapted": True},
], ids=str)
def test_train_is_rollout_at_every_step(settings: dict[str, object]) -> None:
    replay = bool(settings.get("router_replay"))
    assert steps(trainer(**settings), Numerics.DETERMINISTIC, record_routes=replay) == [(1.0, 0.0, 0.0)] * 3  # type: ignore[arg-type]


def test_fast_mode_is_told_apart() -> None:
    assert any(equal < 1.0 for equal, _, _ in steps(trainer(), Numerics.FAST))


def test_the_same_steps_give_the_same_weights_again() -> None:
    first, second = trainer(), trainer()
    steps(first, Numerics.DETERMINISTIC)
    steps(second, Numerics.DETERMINISTIC)
    assert digest(first) == digest(second)
