# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""KDA's backward as six launches a group of heads: the forward's preparation of chunks, products with its inverse, scan (both ways), values, gradients
(a chunk each) and fold (the sums over tokens).

Everything is recomputed from the raw inputs; nothing is read of what a forward may have kept. The workspace is 2,324 bytes a token and head of the
group, the groups being as few as keep it under WORKSPACE_BYTES; which heads share a group changes no bit. Every sum has one fixed order, there are
no atomics, and a sequence's gradients do not depend on its neighbours, except dA_log and ddt_bias, which sum over all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from driftline.kernels.kda.forward import Inputs, Workspace, layout_of, prepare
from driftline.kernels.kda.triton_backward_decay import BLOCK, CHUNK, WIDTH, sums
from driftline.kernels.kda.triton_backward_gradients import fold, gradients
from driftline.kernels.kda.triton_backward_products import products
from driftline.kernels.kda.triton_backward_scan import scan
from driftline.kernels.kda.triton_backward_values import values

__all__ = ["PINNED", "WORKSPACE_BYTES", "Config", "Gradients", "backward", "heads_at_once", "workspace_bytes"]

WORKSPACE_BYTES = 16 * 2**30
"""Of a call's scratch, at most (one head's need, if that is more)."""


@dataclass(frozen=True)
class Config:
    """wide: channels of a key that one step of `gradients` takes, or of a value that one of `values` does. registers: a thread's, at most: 255 let two
    programs of 4 warps share a multiprocessor, 168 three. values: value channels of a scan's program (64 or 128). stages: with two, Triton waits for a chunk's copies right after
    it issued them; with three they run while the chunk before is multiplied."""

    products_warps: int = 4
    products_registers: int = 168
    scan_warps: int = 4
    scan_values: int = 64
    scan_stages: int = 3
    values_warps: int = 4
    values_wide: int = 128
    values_registers: int = 255
    gradients_warps: int = 4
    gradients_wide: int = 32
    gradients_registers: int = 255


PINNED = Config()
"""By the times of each launch on an NVIDIA H200 at 8,192 tokens of 96 heads: docs/kernels/kda_backward.md."""


class Gradients(NamedTuple):
    """Of q, k, v, z, beta in their dtypes; of A_log [H], dt_bias [H K] and the initial state [N, H, K, V] in fp32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    z: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    initial_state: torch.Tensor


class _Chunks(NamedTuple):
    """slots: room for chunks, an upper bound where only the device knows the lengths. owner int32 [slots]: the sequence, -1 for none; first int32
    [sequences]: its first chunk."""

    slots: int
    each: int
    owner: torch.Tensor
    first: torch.Tensor
    bounds: torch.Tensor


def workspace_bytes(chunks: int, heads: int) -> int:
    """w, u, qbar, ktail [64, 128] and T, Aqk [64, 64] in bf16; S, dS [128, 128] in bf16; the decay, beta, and the shares of dt_bias and A_log, in fp32."""
    return chunks * heads * (2 * (4 * CHUNK * WIDTH + 2 * CHUNK * CHUNK + 2 * WIDTH * WIDTH) + 4 * (2 * WIDTH + CHUNK + 1))


def heads_at_once(chunks: int, heads: int, limit: int = WORKSPACE_BYTES) -> int:
    """Heads of a group: groups of nearly equal size, as few as fit."""
    most = max(1, limit // workspace_bytes(chunks, 1))
    groups = -(-heads // most)
    return -(-heads // groups)


def _chunks(batch: int, steps: int, bounds: torch.Tensor | None, device: torch.device) -> _Chunks:
    if bounds is None:
        each = -(-steps // CHUNK)
        none = torch.empty(0, dtype=torch.int32, device=device)
        return _Chunks(batch * each, each, none, none, none)
    sequences = bounds.numel() - 1
    slots = steps // CHUNK + sequences
    ends = torch.cumsum((bounds[1:] - bounds[:-1] + CHUNK - 1) // CHUNK, 0)
    owner = torch.searchsorted(ends, torch.arange(slots, device=device, dtype=ends.dtype), right=True)
    owner = torch.where(owner < sequences, owner, -1).to(torch.int32)
    first = torch.cat([ends.new_zeros(1), ends[:-1]]).to(torch.int32)
    return _Chunks(slots, 0, owner, first, bounds)


def shaped(buffer: torch.Tensor, chunks: int, heads: int) -> torch.Tensor:
    """The beginning of a workspace [chunks, more heads, rows, columns], for fewer heads."""
    size = chunks * heads * buffer.shape[2] * buffer.shape[3]
    return buffer.view(-1)[:size].view(chunks, heads, *buffer.shape[2:])


def prepared(part: Inputs, space: Workspace, cu_seqlens: torch.Tensor | None) -> None:
    """The forward's preparation of some heads: k e^G, scale q e^G, k e^(G_64 - G), T, Aqk, the decay and beta. The chunks of a batch's row lie together."""
    if cu_seqlens is not None:
        layout = layout_of(1, part.q.shape[1], cu_seqlens, CHUNK)
        prepare(part, layout, space, 0, layout.pieces)
        return
    layout = layout_of(1, part.q.shape[1], None, CHUNK)
    for row in range(part.q.shape[0]):
        one = part._replace(**{name: getattr(part, name)[row : row + 1] for name in ("q", "k", "v", "z", "beta")})
        prepare(one, layout, space.part(row * layout.pieces, layout.pieces), 0, layout.pieces)


def backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
             lower_bound: float, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, do: torch.Tensor,
             dfinal_state: torch.Tensor | None, config: Config = PINNED, limit: int = WORKSPACE_BYTES) -> Gradients:
    """Arguments as `kda_backward` has checked them: contiguous, K = V = 128."""
    batch, steps, heads, _ = q.shape
    device = q.device
    chunks = _chunks(batch, steps, cu_seqlens, device)
    sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    at_once = heads_at_once(max(chunks.slots, 1), heads, limit)
    dq, dk, dv, dz, dbeta = (torch.empty_like(x) for x in (q, k, v, z, beta))
    da_log = torch.empty(heads, dtype=torch.float32, device=device)
    ddt_bias = torch.empty(heads * WIDTH, dtype=torch.float32, device=device)
    dinitial = torch.empty(sequences, heads, WIDTH, WIDTH, dtype=torch.float32, device=device)
    place = (chunks.owner, chunks.first, chunks.bounds)
    matrices = sums(device)
    varlen = cu_seqlens is not None
    shape = {"VARLEN": varlen, "CHUNK": CHUNK, "WIDTH": WIDTH, "enable_fp_fusion": True}

    def tiles(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(chunks.slots, at_once, rows, columns, dtype=dtype, device=device)

    w, u, qbar, ktail = (tiles(CHUNK, WIDTH) for _ in range(4))
    t, p = tiles(CHUNK, CHUNK), tiles(CHUNK, CHUNK)
    decay, dbias, betas = tiles(1, WIDTH, torch.float32), tiles(1, WIDTH, torch.float32), tiles(1, CHUNK, torch.float32)
    a_log, dt_bias = a_log.float().contiguous(), dt_bias.float().contiguous()
    share = tiles(1, 1, torch.float32)
    states, dstates = tiles(WIDTH, WIDTH), tiles(WIDTH, WIDTH)
    for head0 in range(0, heads, at_once):
        group = min(at_once, heads - head0)
        sizes = (steps, chunks.each, heads, head0, group)
        if chunks.slots:
            at = slice(head0, head0 + group)
            part = Inputs(q[:, :, at], k[:, :, at], v[:, :, at], z[:, :, at], beta[:, :, at], a_log[at], dt_bias[head0 * WIDTH : (head0 + group) * WIDTH],
                          lower_bound, None)
            prepared(part, Workspace(*(shaped(x, chunks.slots, group) for x in (w, qbar, ktail, t, p, decay, betas))), cu_seqlens)
            products[(chunks.slots, group)](
                v, t, p, betas, *place, w, qbar, u, *sizes, **shape, num_warps=config.products_warps, num_stages=1, maxnreg=config.products_registers)
        if sequences:
            scan[(2 * WIDTH // config.scan_values, group, sequences)](
                w, u, qbar, ktail, decay, do, initial_state if initial_state is not None else decay, dfinal_state if dfinal_state is not None else decay,
                states, dstates, dinitial, *place[1:], *sizes, **shape, INITIAL=initial_state is not None, DFINAL=dfinal_state is not None,
                BV=config.scan_values, STAGES=config.scan_stages, num_warps=config.scan_warps)
        if chunks.slots:
            values[(chunks.slots, group)](
                beta, do, *place, u, w, ktail, t, p, dstates, dv, dbeta, *sizes, **shape, BV=config.values_wide, num_warps=config.values_warps,
                num_stages=1, maxnreg=config.values_registers)
            gradients[(chunks.slots, group)](
                q, k, z, a_log, dt_bias, do, *matrices, *place, u, w, qbar, ktail, t, p, decay, states, dstates, dq, dk, dv, dz, dbias, share, *sizes, 0, lower_bound,
                **shape, BLOCK=BLOCK, WIDE=config.gradients_wide, num_warps=config.gradients_warps, num_stages=1, maxnreg=config.gradients_registers)
        fold[(group,)](dbias, ddt_bias, chunks.slots, group, head0, WIDE=WIDTH, LINES=16, num_warps=4, enable_fp_fusion=True)
        fold[(group,)](share, da_log, chunks.slots, group, head0, WIDE=1, LINES=1024, num_warps=4, enable_fp_fusion=True)
    return Gradients(dq, dk, dv, dz, dbeta, da_log, ddt_bias, dinitial)
