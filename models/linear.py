"""The projections of the model: `torch.nn.Linear` over the operator whose rows do not know what they are computed beside, rounded once, its bias included."""

from __future__ import annotations

import torch
from torch import nn

from driftline.kernels.linear import linear

__all__ = ["Linear"]


class Linear(nn.Linear):
    """weight [out, in], bias [out] or None; x [..., in] of the weight's dtype to [..., out]."""

    def __init__(self, size_in: int, size_out: int, bias: bool = False) -> None:
        super().__init__(size_in, size_out, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return linear(x, self.weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        return (linear(x, self.weight, out_dtype=wide) + self.bias).to(x.dtype)
