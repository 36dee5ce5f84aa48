"""MXFP4 weights: the packed forms of expert matrices, and the ways between them that lose nothing or say what they lost. See docs/kernels/moe.md.

The same functions on any device: by the kernels where the tensors are on a CUDA device and Triton is there, else by the reference.
"""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.mxfp4 import reference
from driftline.kernels.mxfp4.reference import LARGEST_SCALE, Transcoded, dequantised, pack
from driftline.kernels.mxfp4.weights import ExpertWeight, Fp8Weight, Mxfp4Weight

__all__ = ["LARGEST_SCALE", "ExpertWeight", "Fp8Weight", "Mxfp4Weight", "Transcoded", "dequantised", "pack", "to_fp8", "unpack"]


def unpack(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """packed uint8 [.., N, K / 2], scale uint8 [.., N, K / 32] to [.., N, K] of `dtype`. See `reference.unpack`."""
    words = packed.ndim >= 2 and packed.shape[-1] % 16 == 0 and packed.is_contiguous() and scale.is_contiguous() and packed.data_ptr() % 16 == 0
    if words and dtype in (torch.bfloat16, torch.float32) and runs_triton(packed, scale):
        from driftline.kernels.mxfp4 import triton

        reference.check(packed, scale)
        return triton.unpack(packed, scale, dtype)
    return reference.unpack(packed, scale, dtype)


def to_fp8(weight: Mxfp4Weight) -> Transcoded:
    """[E, N, K], K a multiple of 128, to E4M3 with a power of two a row and 128 of K. See `reference.to_fp8`."""
    packed, scale = weight
    aligned = packed.is_contiguous() and scale.is_contiguous() and packed.data_ptr() % 16 == 0 and scale.data_ptr() % 4 == 0
    if aligned and packed.ndim == 3 and packed.shape[-1] % 64 == 0 and runs_triton(packed, scale):
        from driftline.kernels.mxfp4 import triton

        reference.check(packed, scale)
        return Transcoded(*triton.to_fp8(weight))
    return reference.to_fp8(weight)
