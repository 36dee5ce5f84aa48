"""Who computes: the device of the tensors and one setting, and nothing else."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from driftline.kernels import dispatch
from driftline.kernels.dispatch import runs_triton


class OnDevice:
    device = torch.device("cuda")


@pytest.fixture(autouse=True)
def _read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("has_triton", "_setting", "_checked_on"):
        monkeypatch.setattr(dispatch, name, getattr(dispatch, name).__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def test_tensors_of_the_host_and_mixed_ones_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIFTLINE_KERNELS", "triton")
    assert not runs_triton(torch.empty(1), None)
    assert not runs_triton(OnDevice(), torch.empty(1))  # type: ignore[arg-type]
    assert not runs_triton(None)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, the gpu extra")
@pytest.mark.parametrize(("setting", "hopper", "another"), [(None, True, False), ("triton", True, True), ("reference", False, False)])
def test_unset_kernels_run_where_they_have_been_checked(monkeypatch: pytest.MonkeyPatch, setting: str | None, hopper: bool, another: bool) -> None:
    monkeypatch.delenv("DRIFTLINE_KERNELS", raising=False)
    if setting:
        monkeypatch.setenv("DRIFTLINE_KERNELS", setting)
    assert runs_triton(OnDevice(), None) is hopper  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert runs_triton(OnDevice(), None) is another  # type: ignore[arg-type]


def test_without_triton_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIFTLINE_KERNELS", "triton")
    monkeypatch.setattr(dispatch, "find_spec", lambda _: None)
    assert not runs_triton(OnDevice())  # type: ignore[arg-type]


def test_an_unknown_setting_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIFTLINE_KERNELS", "fast")
    with pytest.raises(ValueError, match="DRIFTLINE_KERNELS is 'fast'"):
        runs_triton(OnDevice())  # type: ignore[arg-type]
