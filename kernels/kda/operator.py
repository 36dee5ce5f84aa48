"""KDA from raw inputs, one call for the device and the CPU: q/k norm, gate, beta, the recurrence by chunks, packed sequences and carried states.

CUDA tensors in bfloat16 with heads of 128 channels take the kernels (`forward.py`, differentiable by `autograd.py`); everything else takes the
torch functions of `reference.py` and `chunk.py`, composed, in fp32 or wider and differentiable by torch. The choice looks at devices, dtypes and shapes,
and one token a row without gradients, a step of decoding, takes the recurrence's kernel as it takes the recurrence on the CPU. In deterministic mode every
number of tokens takes the recurrence (`sequential.py`, `kda_decode/sequence.py`), with the chunks' gradient.
"""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.kda.composed import kda_composed
from driftline.kernels.kda.forward import WIDTH, Inputs
from driftline.kernels.kda.sequential import kda_sequential
from driftline.kernels.mode import deterministic

__all__ = ["PADDING", "kda", "kernel_inputs"]

PADDING = -1e4
"""z and beta of a position that is none: its beta is 0 and its decay 1 (for A_log above -6, where 1e4 e^A_log still empties the sigmoid), so the state passes it
unchanged. Not minus infinity, of which the gradient to A_log would be made NaN."""

_KERNEL_GATES = (torch.bfloat16, torch.float32)


def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    z: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    lower_bound: float = -5.0,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kimi Delta Attention (arXiv:2510.26692) with everything around it: returns o [B, T, H, V] in v's dtype and the final state [N, H, K, V].

    q, k [B, T, H, K] before their norm, v [B, T, H, V], z [B, T, H, K] gate input without its bias, beta [B, T, H] logits, a_log [H] and dt_bias [H * K]
    fp32. With S the state, q^ and k^ normalised over K (eps 1e-6 inside the root), g = lower_bound sigmoid(exp(a_log) (z + dt_bias)) in nats and
    b = sigmoid(beta), token by token: `S <- diag(e^g) S; S <- S + k^ (b (v - S^T k^))^T; o = K^-0.5 S^T q^`.

    lower_bound lies in [-5, 0). initial_state [N, H, K, V] fp32 or None for zeros. cu_seqlens [N + 1], int32 or int64, from 0 to T and never
    falling, packs N sequences into one row (B = 1); without it N = B. A position with z = beta = PADDING leaves the state as it was.

    >>> o, state = kda(q, k, v, z, beta, a_log, dt_bias, cu_seqlens=torch.tensor([0, 15, 15, 500]))

    Raises ValueError for shapes, dtypes or devices that do not fit, naming the argument. What cu_seqlens holds is read on the device and not checked.
    """
    _check(q, k, v, z, beta, a_log, dt_bias, lower_bound, initial_state, cu_seqlens)
    given = (q, k, v, z, beta, a_log, dt_bias, initial_state)
    narrow = q.dtype == k.dtype == v.dtype == torch.bfloat16 and z.dtype in _KERNEL_GATES and beta.dtype in _KERNEL_GATES
    if narrow and q.shape[-1] == v.shape[-1] == WIDTH and runs_triton(*given, cu_seqlens):
        if q.shape[1] == 1 and cu_seqlens is None and not torch.is_grad_enabled():
            from driftline.kernels.kda_decode.sequence import kda_sequence

            return kda_sequence(q, k, v, z, beta, a_log, dt_bias, lower_bound, initial_state, None)
        from driftline.kernels.kda.autograd import kda_by_kernels

        return kda_by_kernels(q, k, v, z, beta, a_log, dt_bias, lower_bound, initial_state, cu_seqlens)
    form = kda_sequential if deterministic() else kda_composed
    return form(q, k, v, z, beta, a_log, dt_bias, lower_bound, initial_state, cu_seqlens)


def kernel_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float,
    initial_state: torch.Tensor | None,
) -> Inputs:
    """The arguments as the kernels read them: heads side by side, tokens at any distance (slices of a wider projection are read where they lie)."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x if x.stride(-1) == 1 and (x.dim() == 3 or x.stride(-2) == x.shape[-1]) else x.contiguous()

    state = None if initial_state is None else initial_state.float().contiguous()
    return Inputs(rows(q), rows(k), rows(v), rows(z), rows(beta), a_log.float().contiguous(), dt_bias.float().contiguous(), lower_bound, state)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
) -> None:
    if q.dim() != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}; give [B, T, H, K]")
    batch, steps, heads, width = q.shape
    if v.dim() != 4:
        raise ValueError(f"v has shape {tuple(v.shape)}; give [B, T, H, V] with the B, T, H of q, {(batch, steps, heads)}")
    expected = {"k": (k, q.shape), "z": (z, q.shape), "v": (v, (batch, steps, heads, v.shape[-1])), "beta": (beta, (batch, steps, heads)),
                "a_log": (a_log, (heads,)), "dt_bias": (dt_bias, (heads * width,))}
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; with q {tuple(q.shape)} give {tuple(shape)}")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype}; give a floating dtype")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q on {q.device}; move one of them")
    if not -5.0 <= lower_bound < 0.0:
        raise ValueError(f"lower_bound is {lower_bound}; give one in [-5, 0): below that 16 tokens leave the range of fp32")
    sequences = batch
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; give int32 or int64 [N + 1]")
        if batch != 1:
            raise ValueError(f"cu_seqlens is given with {batch} rows in q; pack the sequences into one row, or leave it out")
        if cu_seqlens.device != q.device:
            raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and q on {q.device}; move it")
        sequences = cu_seqlens.numel() - 1
    if initial_state is not None:
        if tuple(initial_state.shape) != (sequences, heads, width, v.shape[-1]):
            raise ValueError(f"initial_state has shape {tuple(initial_state.shape)}; give [N, H, K, V] = {(sequences, heads, width, v.shape[-1])}")
        if initial_state.device != q.device:
            raise ValueError(f"initial_state is on {initial_state.device} and q on {q.device}; move it")
