"""Gradients of the expert MLP on a GPU, a microbatch of tokens at a time: its workspace is that of one microbatch, whatever the number of tokens.

    out[n] = sum over slots of gate * W2 h,  h = SiTU-GLU(W1 z, W3 z)
    dh = W2^T dy;  dgate = <h, dh>;  (dg, du) = gate dh * SiTU'(g, u);  dz = sum over slots, in order, of W1^T dg + W3^T du

Everything is made again from z: the forward keeps nothing. Rows of dz and dgates depend on their own token alone. Where the forward quantised its
activations, the gradient is that of the product without the rounding (straight through), taken at the unrounded z.
"""

from __future__ import annotations

from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

from driftline.kernels.moe.plan import Plan, plan
from driftline.kernels.mxfp4.weights import ExpertWeight, Mxfp4Weight

if TYPE_CHECKING:
    from driftline.kernels.moe.triton_backward import Blocks

__all__ = ["MICROBATCH", "Gradients", "Products", "Wanted", "backward", "pinned", "workspace_bytes"]

MICROBATCH = 8192
"""Tokens at a time unless said otherwise: enough rows an expert that K3's weights are not what is waited for."""


class Products(Enum):
    """How the grouped products are made. GATHERED: rows are read where they lie (`triton_backward`), any weights and any device. SORTED: rows are copied into
    sorted order and Hopper's copy engine reads them there (`gluon_backward`); where it does not take the weights or the device, GATHERED is taken."""

    GATHERED = 0
    SORTED = 1


class Wanted(NamedTuple):
    """Which gradients; a weight's only where it is a bfloat16 tensor."""

    z: bool
    gates: bool
    w1: bool
    w3: bool
    w2: bool


def pinned(weight: ExpertWeight, wanted: Wanted) -> Products:
    """The faster on an NVIDIA H200 at 8,192 tokens: SORTED for MXFP4 (37.5 ms against 57.0 of 896 experts) and where weights' gradients are wanted (50.1 against
    54.2 of 112), GATHERED for z and gates alone of bfloat16 weights (30.7 against 33.2)."""
    return Products.SORTED if isinstance(weight, Mxfp4Weight) or wanted.w1 or wanted.w3 or wanted.w2 else Products.GATHERED


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


class _Some(NamedTuple):
    """A microbatch: its rows z, dy [n, Z], its gates [n, k] and what its gradients go to (d_z [n, Z], d_gates [n, k], or None); whether weights' are added to."""

    z: torch.Tensor
    dy: torch.Tensor
    gates: torch.Tensor
    table: Plan
    d_z: torch.Tensor | None
    d_gates: torch.Tensor | None
    add: bool


def backward(
    z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, w2: ExpertWeight, betas: tuple[float, float], dy: torch.Tensor,
    wanted: Wanted, microbatch: int | None = None, products: Products | None = None,
) -> Gradients:
    """z, dy bfloat16 [N, Z], ids integers [N, k], gates fp32 [N, k], w1, w3 [E, I, Z] of one form, w2 [E, Z, I], betas (beta, linear_beta).

    Weights' gradients are sums over each expert's rows in the order of their pairs; over several microbatches they are rounded to the weight's dtype once a
    microbatch. A pair whose id is no expert gets no gradient and gives none.
    """
    from driftline.kernels.moe import triton_backward as kernels
    from driftline.kernels.moe.triton_tiles import form

    (tokens, outer), top_k, experts = z.shape, ids.shape[1], w1.shape[0]
    device, half = z.device, torch.bfloat16
    z, dy, gates, size = z.contiguous(), dy.contiguous(), gates.contiguous(), microbatch or MICROBATCH
    d_z = torch.empty((tokens, outer), dtype=half, device=device) if wanted.z else None
    d_gates = torch.empty((tokens, top_k), dtype=torch.float32, device=device) if wanted.gates else None
    weights = [torch.empty(w.shape, dtype=half, device=device) if ask and isinstance(w, torch.Tensor) else None
               for ask, w in ((wanted.w1, w1), (wanted.w3, w3), (wanted.w2, w2))]
    hopper = _hopper(w1, w3, w2) if (products or pinned(w1, wanted)) is Products.SORTED else None
    shape = form(w1), min(size, tokens) * top_k, experts
    blocks, inner_blocks = kernels.blocks_for(*shape), kernels.inner_blocks_for(*shape)
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        table = plan(ids[start:stop], experts, hopper.BLOCK if hopper else blocks.rows)
        some = _Some(z[start:stop], dy[start:stop], gates[start:stop], table, None if d_z is None else d_z[start:stop],
                     None if d_gates is None else d_gates[start:stop], start > 0)
        if hopper:
            _sorted(hopper, some, w1, w3, w2, betas, weights)
        else:
            _gathered(blocks, inner_blocks, some, w1, w3, w2, betas, weights)
    if not tokens:
        for out in weights:
            if out is not None:
                out.zero_()
    return Gradients(d_z, d_gates, *weights)


def _hopper(*weights: ExpertWeight) -> ModuleType | None:
    """The products for Hopper where all weights are such that it takes them: by device, form and shape."""
    if weights[0].device.type != "cuda" or torch.cuda.get_device_capability(weights[0].device) != (9, 0):
        return None
    from driftline.kernels.moe import gluon_backward

    return gluon_backward if all(map(gluon_backward.takes, weights)) else None


def _spaces(some: _Some, hidden: int, to_w2: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dh (then dg), du and, where W2's gradient is wanted, the gate times h."""
    rows = some.gates.numel()
    dh, du = (torch.empty((rows, hidden), dtype=torch.bfloat16, device=some.z.device) for _ in range(2))
    return dh, du, torch.empty_like(dh) if to_w2 else None


def _sorted(products: ModuleType, some: _Some, w1: ExpertWeight, w3: ExpertWeight, w2: ExpertWeight, betas: tuple[float, float],
            weights: list[torch.Tensor | None]) -> None:
    """Rows of dy, of z and of dz lie in sorted order in one space, one after the other."""
    from driftline.kernels.moe import triton_backward as kernels
    from driftline.kernels.moe.gluon_wgrad import weight_gradient

    (_, hidden, outer), (_, top_k), table, add = w1.shape, some.gates.shape, some.table, some.add
    d_w1, d_w3, d_w2 = weights
    dh, du, gated = _spaces(some, hidden, d_w2 is not None)
    rows = torch.empty((dh.shape[0], outer), dtype=dh.dtype, device=dh.device)
    kernels.sort_rows(some.dy, table, top_k, rows)
    products.d_hidden(rows, w2, table, dh)
    kernels.sort_rows(some.z, table, top_k, rows, renamed=not isinstance(w1, torch.Tensor))
    parts = products.inner(rows, w1, w3, some.gates, dh, du, gated, table, betas)
    if some.d_gates is not None:
        kernels.d_gates(parts, table, some.d_gates)
    for out, left in ((d_w1, dh), (d_w3, du)):
        if out is not None:
            weight_gradient(left, rows, table, out, add=add)
    if d_w2 is not None and gated is not None:
        kernels.sort_rows(some.dy, table, top_k, rows)
        weight_gradient(rows, gated, table, d_w2, add=add)
    if some.d_z is not None:
        products.d_input(dh, du, w1, w3, table, rows)
        kernels.sum_slots(rows, table, top_k, some.d_z)


def _gathered(blocks: Blocks, inner_blocks: Blocks, some: _Some, w1: ExpertWeight, w3: ExpertWeight, w2: ExpertWeight, betas: tuple[float, float],
              weights: list[torch.Tensor | None]) -> None:
    """Rows of dy and of z are read where they lie."""
    from driftline.kernels.moe import triton_backward as kernels
    from driftline.kernels.moe.triton_wgrad import Side, weight_gradient

    (_, hidden, outer), (_, top_k), table = w1.shape, some.gates.shape, some.table
    d_w1, d_w3, d_w2 = weights
    dh, du, gated = _spaces(some, hidden, d_w2 is not None)
    kernels.d_hidden(some.dy, w2, table, top_k, dh, blocks)
    parts = kernels.inner(some.z, w1, w3, some.gates, dh, du, gated, table, betas, inner_blocks)
    if some.d_gates is not None:
        kernels.d_gates(parts, table, some.d_gates)
    for out, left, right in ((d_w1, Side(dh, False), Side(some.z, True)), (d_w3, Side(du, False), Side(some.z, True)),
                             (d_w2, Side(some.dy, True), None if gated is None else Side(gated, False))):
        if out is not None and right is not None:
            weight_gradient(left, right, table, top_k, out, add=some.add)
    del gated, parts
    if some.d_z is not None:
        back = torch.empty((dh.shape[0], outer), dtype=dh.dtype, device=dh.device)
        kernels.d_input(dh, du, w1, w3, table, back, blocks)
        kernels.sum_slots(back, table, top_k, some.d_z)
