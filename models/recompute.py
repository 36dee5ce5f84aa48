"""Activations given up in the forward and computed again in the backward pass, with the same bits: the gradients are those of a forward that kept them.

What is kept of a recomputed part is its inputs. The second run takes the first one's numerics wherever the backward pass happens to run; whatever the first run
decided (a router's choice, a row written into a bank) is for the part to remember and read again, never to decide again.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from driftline.kernels.mode import numerics, using

__all__ = ["Recompute", "recomputed"]

T = TypeVar("T")


class Recompute(StrEnum):
    """What a model's forward does not keep for its backward pass: NONE keeps all, LAYERS keeps what goes from layer to layer."""

    NONE = "none"
    LAYERS = "layers"


def recomputed(part: Callable[[], T]) -> T:
    """`part()`, whose intermediate results are computed again, by a second call, when a gradient needs them.

    `part` closes over its inputs; it draws no random numbers and gives the same results at each call, so whatever else it looks up (an adapter chosen for a row) must
    be as it was when the gradient is taken. It must not hold what it returned, nor anything that
    was made from it with gradients: the graph would then hold itself and never be freed. Without gradients this is `part()`.
    """
    if not torch.is_grad_enabled():
        return part()
    mode = numerics()

    def run() -> T:
        with using(mode):
            return part()

    out: T = checkpoint(run, use_reentrant=False, preserve_rng_state=False)
    return out
