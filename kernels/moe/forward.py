"""The expert MLP on a GPU, a microbatch of tokens at a time: its workspace is that of one microbatch, whatever the number of tokens.

    plan: pairs sorted by expert;  prepare (for wide tiles gather): z rounded and in the order of the weights (and of the pairs);
    up: h = SiTU-GLU(W1 z, W3 z), rounded;  down: y = W2 h;  combine

Nothing here waits for the device or looks at a value: what runs is decided by shapes, dtypes and the form of the weights. A token's result depends on that
token alone, so neither the batch nor the microbatch changes its bits.
"""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.moe.activations import Activations
from driftline.kernels.moe.grouped import form_of, pinned
from driftline.kernels.moe.plan import plan
from driftline.kernels.mxfp4.weights import ExpertWeight, Mxfp4Weight

__all__ = ["MICROBATCH", "forward", "takes", "tokens_at_once", "workspace_bytes"]

MICROBATCH = 8192
"""Tokens at a time unless said otherwise: at K3's shapes about 146 rows an expert, one tile each, in 1.6 GiB of workspace."""

_STRIDE = 128
"""Columns in which the kernels step through K and through the second product's features."""


def takes(z: torch.Tensor, gates: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, w2: ExpertWeight) -> bool:
    """Whether the kernels run these, by device, dtype and shape: bfloat16 rows on a CUDA device, both widths multiples of 128."""
    tensors = [t for w in (w1, w3, w2) for t in ((w,) if isinstance(w, torch.Tensor) else w)]
    bfloat16 = z.dtype is torch.bfloat16 and all(t.dtype is torch.bfloat16 for t in (w1, w3, w2) if isinstance(t, torch.Tensor))
    return bfloat16 and w1.shape[1] % _STRIDE == 0 and w1.shape[2] % _STRIDE == 0 and runs_triton(z, gates, *tensors)


def tokens_at_once(microbatch: int | None, top_k: int, widest: int) -> int:
    """Tokens of a microbatch; fewer than asked for where an offset into the workspace would pass 31 bits."""
    return max(1, min(microbatch or MICROBATCH, (2**31 - 1) // max(top_k * widest, 1)))


def workspace_bytes(tokens: int, top_k: int, latent: int, inner: int, activations: Activations) -> int:
    """What a microbatch of so many tokens holds beside inputs and result: the rounded z, h and y; the plan's tables (20 bytes a pair) apart."""
    fp8 = activations is Activations.FP8_128
    width, scales = (1, 4 / 128) if fp8 else (2, 0)
    return int(tokens * (latent * (width + scales) + top_k * (inner * (width + scales) + 2 * latent)))


def forward(
    z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, w2: ExpertWeight, beta: float, linear_beta: float,
    activations: Activations, microbatch: int | None,
) -> torch.Tensor:
    """z bfloat16 [N, Z], ids, gates [N, k], w1, w3 [E, I, Z], w2 [E, Z, I] of one form, contiguous; returns bfloat16 [N, Z]."""
    from driftline.kernels.moe import triton_forward as products
    from driftline.kernels.moe import triton_rows as row_kernels

    tokens, latent = z.shape
    experts, inner, _ = w1.shape
    top_k = ids.shape[1]
    out = torch.zeros_like(z) if top_k == 0 else torch.empty_like(z)
    if ids.numel() == 0:
        return out
    form = form_of(w1)
    step = min(tokens_at_once(microbatch, top_k, max(latent, inner)), tokens)
    configuration = pinned(form, activations, step * top_k, experts, latent)
    fp8 = activations is Activations.FP8_128
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    h_all = torch.empty(step * top_k * inner, dtype=kind, device=z.device)
    hs_all = torch.empty(step * top_k * (inner // _STRIDE) if fp8 else 1, dtype=torch.float32, device=z.device)
    y_all = torch.empty(step * top_k * latent, dtype=torch.bfloat16, device=z.device)
    for start in range(0, tokens, step):
        part = slice(start, min(start + step, tokens))
        pairs = (part.stop - start) * top_k
        h, y = h_all[: pairs * inner].view(pairs, inner), y_all[: pairs * latent].view(pairs, latent)
        hs = hs_all[: pairs * (inner // _STRIDE)].view(inner // _STRIDE, pairs) if fp8 else hs_all
        rows = plan(ids[part], experts, configuration.grouping.block)
        if configuration.gathered and isinstance(w1, Mxfp4Weight) and isinstance(w3, Mxfp4Weight) and isinstance(w2, Mxfp4Weight):
            from driftline.kernels.moe import gluon_packed as packed

            # the gathered rows lie where y will be: they are read for the last time before it is written
            row_kernels.gather(z[part], rows, y, top_k=top_k, form=form, rounding=activations)
            packed.up(y, w1, w3, rows, h, beta=beta, linear_beta=linear_beta, grouping=configuration.grouping, product=configuration.up,
                      rounding=activations)
            packed.down(h, w2, rows, y, grouping=configuration.grouping, product=configuration.down)
        else:
            x, xs = row_kernels.prepare(z[part], form, activations)
            products.up(x, xs, w1, w3, rows, h, hs, top_k=top_k, beta=beta, linear_beta=linear_beta, grouping=configuration.grouping,
                        product=configuration.up, form=form, rounding=activations)
            products.down(h, hs, w2, rows, y, grouping=configuration.grouping, product=configuration.down, form=form, rounding=activations)
        row_kernels.combine(y, rows, gates[part], out[part])
    return out
