"""Memory that a kernel is to write holds NaN, or the largest integer, before: a device's is zero at first and holds what was there last from then on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _memory_without_content(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the files that interpret kernels: a result that depends on what nobody wrote is not near any reference."""
    if not request.path.name.startswith("interpreted_"):
        yield
        return
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
