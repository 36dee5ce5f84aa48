"""What a manifest says of its arithmetic: the mode, the kernels, and a fingerprint that is measured."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.mode import KERNEL_SET, Numerics
from driftline.kernels.rmsnorm import exact
from driftline.services.config import Config
from driftline.services.learner.determinism import compute_deterministically
from driftline.services.learner.numerics import fingerprint, numerics_facts

torch.set_num_threads(1)


def config(mode: str) -> Config:
    return Config.model_validate({"run": {"name": "n", "numerics": mode}})


def test_the_mode_and_the_kernels_are_stated() -> None:
    facts = numerics_facts(config("deterministic"), "continued")
    assert facts["numerics"] == "deterministic"
    assert facts["kernels"] == f"{KERNEL_SET} torch"
    assert facts["compute"] == "float32"
    assert numerics_facts(config("fast"), "continued")["numerics"] == "fast"


def test_the_fingerprint_is_the_same_again_and_another_in_another_mode_or_dtype() -> None:
    asked = {(m, d): fingerprint.__wrapped__(m, "cpu", d, 1) for m in Numerics for d in (torch.float32, torch.bfloat16)}
    assert len(set(asked.values())) == 4
    assert asked[Numerics.FAST, torch.float32] == fingerprint.__wrapped__(Numerics.FAST, "cpu", torch.float32, 1)


def test_another_order_of_a_sum_shows_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint.__wrapped__(Numerics.DETERMINISTIC, "cpu", torch.float32, 1)
    monkeypatch.setattr(exact, "total", lambda x: x.flip(-1).cumsum(-1)[..., -1])
    assert fingerprint.__wrapped__(Numerics.DETERMINISTIC, "cpu", torch.float32, 1) != before


def test_a_device_is_told_one_order_and_to_fill_no_buffer_that_a_kernel_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    compute_deterministically("cpu")
    assert asked == []
    compute_deterministically("cuda")
    assert asked == [True]
    assert torch.utils.deterministic.fill_uninitialized_memory is False
