"""By how much a position turns: its cosines and sines depend on that position alone, not on which are asked for with it or how far the table has grown.

They are fp32 (fp64 for a model in fp64), of fp32 angles as the public models have them, and come from tables made in blocks of one size.
"""

from __future__ import annotations

import torch

from driftline.models.dense.positions import Rope, amplitude, frequencies

__all__ = ["Tables"]

_BLOCK = 256
"""Positions made at a time: few enough that torch computes a block in one thread, whose vector loop has no tail that depends on its place."""


class Tables:
    """Cosines and sines of every position asked for so far, kept for each device and dtype. No part of a model's state."""

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self._frequencies = frequencies(rope, head_dim)
        self._amplitude = amplitude(rope)
        self._made: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def at(self, positions: torch.Tensor, below: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [..., head_dim / 2] of `dtype` (fp32 or fp64), at int64 positions [...], all of which are under `below`."""
        cos, sin = self._upto(below, positions.device, dtype)
        return cos[positions], sin[positions]

    def _upto(self, below: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        empty = torch.empty(0, self._frequencies.numel(), dtype=dtype, device=device)
        cos, sin = self._made.get((device, dtype), (empty, empty))
        if cos.shape[0] < below:
            # A table first asked for while sampling serves training too, which may not keep a tensor of inference mode.
            with torch.inference_mode(False), torch.no_grad():
                wanted = max(below, 2 * cos.shape[0])
                made = [self._block(start, device, dtype) for start in range(cos.shape[0], wanted, _BLOCK)]
                cos, sin = (torch.cat([held, *new]) for held, new in zip((cos, sin), zip(*made, strict=True), strict=True))
            self._made[device, dtype] = cos, sin
        return cos, sin

    def _block(self, start: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        place = torch.arange(start, start + _BLOCK, device=device)
        angle = (place[:, None].float() * self._frequencies.to(device)).to(dtype)
        return angle.cos() * self._amplitude, angle.sin() * self._amplitude
