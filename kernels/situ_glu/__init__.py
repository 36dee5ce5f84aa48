"""SiTU-GLU, K3's bounded gated activation: on a CUDA device one kernel each way, elsewhere the reference; the same call, differentiable on both."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.situ_glu import reference

__all__ = ["situ_glu"]


class _SituGlu(torch.autograd.Function):
    """Keeps gate and up and nothing else: the hyperbolic tangents are made again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
        from driftline.kernels.situ_glu import triton as kernels

        ctx.save_for_backward(gate, up)
        ctx.betas = (beta, linear_beta)
        return kernels.forward(gate, up, beta, linear_beta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        from driftline.kernels.situ_glu import triton as kernels

        gate, up = ctx.saved_tensors
        return *kernels.backward(gate, up, grad, *ctx.betas), None, None


def situ_glu(gate: torch.Tensor, up: torch.Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> torch.Tensor:
    """`beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)`, so |out| <= beta linear_beta. Source: K3 report, section 2.

    gate, up [..., I] of one shape, dtype and device, any strides; the result [..., I] has that dtype, computed in at least fp32 and rounded once.
    Raises ValueError when the two do not match, are not floating point, or a bound is not positive.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        kinds = [f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (gate, up)]
        raise ValueError(f"up: {kinds[1]}, but gate is {kinds[0]}; give both halves of one projection, in one dtype on one device")
    if not gate.dtype.is_floating_point:
        raise ValueError(f"gate: {gate.dtype} has no fractions; give a floating-point tensor")
    for name, bound in (("beta", beta), ("linear_beta", linear_beta)):
        if not bound > 0:
            raise ValueError(f"{name}: {bound} bounds nothing; give a positive number (K3: 4 and 25)")
    if runs_triton(gate, up) and gate.dtype in (torch.bfloat16, torch.float16, torch.float32):
        out: torch.Tensor = _SituGlu.apply(gate, up, beta, linear_beta)  # type: ignore[no-untyped-call]
        return out
    return reference.situ_glu(gate, up, beta, linear_beta)
