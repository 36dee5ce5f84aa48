"""Which kernels a call runs on a device: staged ones where its width and dtype allow them, else those for any width. Settled by shape and dtype alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from driftline.kernels.attention_residual import staged, staged_backward, triton, triton_backward
from driftline.kernels.attention_residual.triton_backward import Sums

__all__ = ["backward", "forward"]


def forward(
    sources: torch.Tensor | Sequence[torch.Tensor], prefix: torch.Tensor, delta: torch.Tensor | None, query: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    output_weight: torch.Tensor | None, output_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mixed [N, D], moved [N, D]), as `reference.aggregate`. sources [N, rows, D] or up to eight tensors [N, D]; columns contiguous."""
    if staged.takes(sources, prefix):
        return staged.forward(sources, prefix, delta, query, norm_weight, eps, output_weight, output_eps)
    return triton.forward(sources, prefix, delta, query, norm_weight, eps, output_weight, output_eps)


def backward(
    sources: torch.Tensor | Sequence[torch.Tensor], gradients: torch.Tensor | Sequence[torch.Tensor] | None, kept: int, prefix: torch.Tensor, do: torch.Tensor,
    dmoved: torch.Tensor | None, query: torch.Tensor, norm_weight: torch.Tensor, eps: float, output_weight: torch.Tensor | None, output_eps: float,
) -> Sums:
    """As `reference.aggregate_backward`. The gradients of the sources go into `gradients`, laid out as the sources are: the first `kept` are added to, the
    others overwritten; None: they are not wanted. `prefix` is the one after the delta."""
    if staged.takes(sources, prefix):
        return staged_backward.backward(sources, gradients, kept, prefix, do, dmoved, query, norm_weight, eps, output_weight, output_eps)
    return triton_backward.backward(sources, gradients, kept, prefix, do, dmoved, query, norm_weight, eps, output_weight, output_eps)
