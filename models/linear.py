"""The projections of the model: `torch.nn.Linear` without a bias, over the operator whose rows do not know what they are computed beside."""

from __future__ import annotations

import torch
from torch import nn

from driftline.kernels.linear import linear

__all__ = ["Linear"]


class Linear(nn.Linear):
    """weight [out, in]; x [..., in] of the weight's dtype to [..., out]."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__(size_in, size_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)
