"""The watch names what a captured step may not do, and keeps what it reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from driftline.services.rollout.runner.watch import HostRead, Watch

torch.set_num_threads(1)

SOME = torch.tensor([1, 0, 2])


@pytest.mark.parametrize("read", [
    lambda: SOME.sum().item(), lambda: int(SOME[0]), lambda: bool((SOME > 0).any()), lambda: SOME.nonzero(), lambda: SOME[SOME > 0], lambda: torch.equal(SOME, SOME),
    lambda: SOME.unique(), lambda: SOME.masked_select(SOME > 0), lambda: torch.repeat_interleave(SOME, SOME), lambda: SOME.bincount(), lambda: torch.where(SOME > 0),
], ids=["item", "int", "bool", "nonzero", "index", "equal", "unique", "masked_select", "repeat_interleave", "bincount", "where"])
@pytest.mark.parametrize("inference", [True, False])
def test_a_read_of_a_value_is_refused(read: Callable[[], object], inference: bool) -> None:
    with torch.inference_mode(inference), Watch(), pytest.raises(HostRead, match="waits for a"):
        read()


def test_what_a_step_does_is_not_refused() -> None:
    x = torch.randn(4, 8)
    with torch.inference_mode(), Watch():
        y = torch.softmax(x @ x.T, -1).cumsum(-1)
        found = torch.searchsorted(y, y[:, -1:] * 0.5, right=True)
        y.gather(-1, found.clamp_max(3))
        torch.where(y > 0.5, y, 0.0)[:, 1:].sort(stable=True)
        torch.repeat_interleave(SOME, SOME, output_size=3)
        x[SOME]


@pytest.mark.parametrize("copy", [
    lambda: torch.tensor([1.0, 2.0]).to("meta"), lambda: torch.zeros(2, device="meta").copy_(torch.ones(2)), lambda: torch.ones(2, device="meta").cpu(),
])
def test_a_copy_between_host_and_device_is_refused(copy: Callable[[], object]) -> None:
    """A page of the host that is gone at the next replay; "meta" stands for the device."""
    with torch.inference_mode(), Watch(), pytest.raises(HostRead, match="between the host and the device"):
        copy()


def test_a_number_beside_a_tensor_is_no_copy() -> None:
    with torch.inference_mode(), Watch():
        torch.zeros(2, device="meta") + torch.tensor(1.0)


def test_what_is_read_and_not_made_is_kept() -> None:
    table, weight = torch.randn(10, 4), torch.randn(4, 4)
    with torch.inference_mode(), Watch() as watch:
        made = torch.zeros(3, 4)
        made.add_(table[SOME] @ weight)
    kept = {t.untyped_storage().data_ptr() for t in watch.outside.values()}
    assert kept == {t.untyped_storage().data_ptr() for t in (table, weight, SOME)}
