"""Gradients of the expert MLP on a GPU, a microbatch of tokens at a time: its workspace is that of one microbatch, whatever the number of tokens.

    out[n] = sum over slots of gate * W2 h,  h = SiTU-GLU(W1 z, W3 z)
    dh = W2^T dy;  dgate = <h, dh>;  (dg, du) = gate dh * SiTU'(g, u);  dz = sum over slots, in order, of W1^T dg + W3^T du

Everything is made again from z: the forward keeps nothing. Rows of dz and dgates depend on their own token alone. Where the forward quantised its
activations, the gradient is that of the product without the rounding (straight through), taken at the unrounded z.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from driftline.kernels.moe.plan import plan
from driftline.kernels.mxfp4.weights import ExpertWeight

__all__ = ["MICROBATCH", "Gradients", "Wanted", "backward", "workspace_bytes"]

MICROBATCH = 8192
"""Tokens at a time unless said otherwise: enough rows an expert that K3's weights are not what is waited for."""


class Wanted(NamedTuple):
    """Which gradients; a weight's only where it is a bfloat16 tensor."""

    z: bool
    gates: bool
    w1: bool
    w3: bool
    w2: bool


class Gradients(NamedTuple):
    """None where not wanted. z [N, Z] and the weights in their dtypes, gates fp32 [N, k]."""

    z: torch.Tensor | None
    gates: torch.Tensor | None
    w1: torch.Tensor | None
    w3: torch.Tensor | None
    w2: torch.Tensor | None


def workspace_bytes(tokens: int, top_k: int, outer: int, hidden: int, *, to_w2: bool = False) -> int:
    """What `backward` holds beside its inputs and results for microbatches of so many tokens, the plan's tables (28 bytes a pair or less) apart."""
    return tokens * top_k * (2 * hidden * (3 if to_w2 else 2) + 2 * outer + 4 * -(-hidden // 64))


def backward(
    z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, w2: ExpertWeight, betas: tuple[float, float], dy: torch.Tensor,
    wanted: Wanted, microbatch: int | None = None,
) -> Gradients:
    """z, dy bfloat16 [N, Z], ids integers [N, k], gates fp32 [N, k], w1, w3 [E, I, Z] of one form, w2 [E, Z, I], betas (beta, linear_beta).

    Weights' gradients are sums over each expert's rows in the order of their pairs; over several microbatches they are rounded to the weight's dtype once a
    microbatch. A pair whose id is no expert gets no gradient and gives none.
    """
    from driftline.kernels.moe import triton_backward as kernels
    from driftline.kernels.moe.triton_tiles import form
    from driftline.kernels.moe.triton_wgrad import Side, weight_gradient

    (tokens, outer), top_k, (experts, hidden, _) = z.shape, ids.shape[1], w1.shape
    device, half = z.device, torch.bfloat16
    z, dy, gates, size = z.contiguous(), dy.contiguous(), gates.contiguous(), microbatch or MICROBATCH
    d_z = torch.empty((tokens, outer), dtype=half, device=device) if wanted.z else None
    d_gates = torch.empty((tokens, top_k), dtype=torch.float32, device=device) if wanted.gates else None
    weights = [torch.empty(w.shape, dtype=half, device=device) if ask and isinstance(w, torch.Tensor) else None
               for ask, w in ((wanted.w1, w1), (wanted.w3, w3), (wanted.w2, w2))]
    d_w1, d_w3, d_w2 = weights
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        some_z, some_dy, some_gates, rows = z[start:stop], dy[start:stop], gates[start:stop], (stop - start) * top_k
        blocks = kernels.blocks_for(form(w1), min(size, tokens) * top_k, experts)
        table = plan(ids[start:stop], experts, blocks.rows)
        dh, du = (torch.empty((rows, hidden), dtype=half, device=device) for _ in range(2))
        gated = torch.empty((rows, hidden), dtype=half, device=device) if d_w2 is not None else None
        kernels.d_hidden(some_dy, w2, table, top_k, dh, blocks)
        parts = kernels.inner(some_z, w1, w3, some_gates, dh, du, gated, table, betas, blocks)
        if d_gates is not None:
            kernels.d_gates(parts, table, d_gates[start:stop])
        for out, left, right in ((d_w1, Side(dh, False), Side(some_z, True)), (d_w3, Side(du, False), Side(some_z, True)),
                                 (d_w2, Side(some_dy, True), None if gated is None else Side(gated, False))):
            if out is not None and right is not None:
                weight_gradient(left, right, table, top_k, out, add=start > 0)
        del gated, parts
        if d_z is not None:
            back = torch.empty((rows, outer), dtype=half, device=device)
            kernels.d_input(dh, du, w1, w3, table, back, blocks)
            kernels.sum_slots(back, table, top_k, d_z[start:stop])
            del back
        del dh, du
    if not tokens:
        for out in weights:
            if out is not None:
                out.zero_()
    return Gradients(d_z, d_gates, d_w1, d_w3, d_w2)
