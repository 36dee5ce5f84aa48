"""KDA's backward from its raw inputs: nothing of the forward is kept, everything is recomputed.

`kda_backward` runs the kernels on a CUDA device with Triton and the torch formulas elsewhere, chosen by device and shape. A sequence's gradients do
not depend on the other sequences of the call, but for those of A_log and dt_bias, which sum over all tokens, in one fixed order.
"""

from __future__ import annotations

from typing import Final

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.kda.backward_reference import Grads, kda_backward_reference

__all__ = ["kda_backward"]

HEAD_WIDTH: Final = 128
"""Of the kernels; the reference takes any."""


def kda_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
                 lower_bound: float, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, do: torch.Tensor,
                 dfinal_state: torch.Tensor | None) -> Grads:
    """q, k, z [B, T, H, K], v, do [B, T, H, V], beta [B, T, H] (logits), a_log [H], dt_bias [H K], initial_state, dfinal_state [N, H, K, V] or None
    (zero); cu_seqlens int [N + 1] on the inputs' device with B = 1, or None for B sequences of T. q, k before their norm, z before its bias and gate.

    Returns dq, dk, dv, dz, dbeta in the inputs' dtypes and da_log [H], ddt_bias [H K], dinitial_state [N, H, K, V] in fp32 (on a CPU fp64 when an
    input is fp64). Raises ValueError for shapes or a bound that do not fit. Formulas: backward_reference.py."""
    batch, steps, heads, width = q.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    values = v.shape[-1]
    for name, tensor, shape in (
        ("k", k, (batch, steps, heads, width)), ("z", z, (batch, steps, heads, width)), ("v", v, (batch, steps, heads, values)),
        ("do", do, (batch, steps, heads, values)), ("beta", beta, (batch, steps, heads)), ("a_log", a_log, (heads,)),
        ("dt_bias", dt_bias, (heads * width,)), ("initial_state", initial_state, (sequences, heads, width, values)),
        ("dfinal_state", dfinal_state, (sequences, heads, width, values)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; with q {tuple(q.shape)} and {sequences} sequences it must be {shape}")
    if cu_seqlens is not None and (batch != 1 or cu_seqlens.is_floating_point()):
        raise ValueError(f"cu_seqlens needs B = 1 and integers, got B = {batch} and {cu_seqlens.dtype}: flatten the sequences into one row")
    if not -5.0 <= lower_bound < 0.0:
        raise ValueError(f"lower_bound is {lower_bound}; it must lie in [-5, 0), so that 16 tokens' decays stay inside fp32")
    if not runs_triton(q, k, v, z, beta, a_log, dt_bias, initial_state, cu_seqlens, do, dfinal_state):
        return kda_backward_reference(q, k, v, z, beta, a_log, dt_bias, lower_bound, initial_state, cu_seqlens, do, dfinal_state)
    if (width, values) != (HEAD_WIDTH, HEAD_WIDTH):
        raise ValueError(f"the kernels take K = V = {HEAD_WIDTH}, got K = {width} and V = {values}: run the reference on the CPU")
    if not q.dtype == k.dtype == v.dtype == torch.bfloat16:
        raise ValueError(f"the kernels take q, k and v in bfloat16, got {q.dtype}, {k.dtype} and {v.dtype}: convert them")
    from driftline.kernels.kda.triton_backward import backward

    do = do.to(v.dtype)
    q, k, v, z, beta, a_log, dt_bias, do = (x.contiguous() for x in (q, k, v, z, beta, a_log, dt_bias, do))
    initial_state, dfinal_state = (x if x is None else x.contiguous() for x in (initial_state, dfinal_state))
    return backward(q, k, v, z, beta, a_log, dt_bias, lower_bound, initial_state, cu_seqlens, do, dfinal_state)
