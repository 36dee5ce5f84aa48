"""A product for Triton's interpreter in which an element knows nothing of its place.

The interpreter's own hands a tile to the host's BLAS, whose sums depend on where in the tile an element is, and multiplies the bits of bfloat16 as
integers. This one adds one product after the other, in fp32: what the order of the real one is, as far as whole steps go.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton.language import bfloat16
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["dot_in_order"]


def _values(handle: Any) -> np.ndarray:
    if handle.dtype.scalar == bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right, total = _values(a), _values(b), d.data.copy()
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[None, k, :]
    return TensorHandle(total, d.dtype.scalar)


@pytest.fixture
def dot_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)
