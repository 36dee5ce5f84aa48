"""KDA forward on a device: chunks by `prepare_chunks`, then the state's walk over them, a panel of tokens at a time.

What a row of a batch gets depends on that row alone: chunks begin at multiples of 64 tokens from each sequence's own start, and segments, where they are
used (`segments.py`), at multiples of 1,024. The workspace is that of a panel, at most PANEL token-heads of WORKSPACE_BYTES, whatever the length; a
panel hands its state to the next in fp32, so where panels end does not show in the bits. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from driftline.kernels.kda.segments import SEGMENT, segmented

__all__ = ["CHUNK", "PANEL", "WALK", "WALK_CANDIDATES", "WIDTH", "WORKSPACE_BYTES", "Inputs", "Launch", "Layout",
           "Workspace", "compose", "forward", "layout_of", "prepare", "walk", "walk_launch"]

CHUNK = 64
"""Tokens a chunk; a carried state at a multiple of it continues with the same bits."""

WIDTH = 128
"""Key and value channels a head, the only width that the kernels have."""

PANEL = 1 << 20
"""Token-heads prepared at a time: 1.03 GiB of workspace."""

WORKSPACE_BYTES = 3 * 2 * WIDTH + 2 * 2 * CHUNK + 4 * WIDTH // CHUNK + 4
"""Bytes a token-head of workspace: three tiles of bfloat16, two squares of the chunk, decay and beta."""


class Launch(NamedTuple):
    """How a kernel that carries states is launched: value columns a program, warps."""

    columns: int
    warps: int


MULTIPROCESSORS = 132
"""Of an H100 or H200; only the order and the size of launches go by it, no bit."""

BEGUN = 2 * MULTIPROCESSORS
"""Programs of `prepare_chunks` that run at a time: that many later is the one for which a program prefetches."""

WALK = Launch(columns=128, warps=8)
WALK_OF_FEW = Launch(columns=64, warps=4)
"""Half the columns and a shorter chain a chunk, while all programs find a multiprocessor."""

COMPOSE = Launch(columns=32, warps=8)
WALK_CANDIDATES = (WALK, WALK_OF_FEW)
"""What timing may choose between; the bits are the same for all of them."""

_GRID = 65_535
"""Chunks a launch can have on its second axis."""


class Inputs(NamedTuple):
    """What the kernels read: q, k, z [B, T, H, 128], v [B, T, H, 128], beta [B, T, H], last two axes of a tensor contiguous; a_log [H], dt_bias [H * 128],
    initial_state [N, H, 128, 128] or None, all three fp32 and contiguous."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    z: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float
    initial_state: torch.Tensor | None


@dataclass(frozen=True)
class Layout:
    """Where pieces of a number of tokens lie: table and offsets of `chunk_table` for packed sequences, else None and plain arithmetic.

    `pieces` is how many there are at most; `a_step` of them lie side by side, one of each row of a batch."""

    sequences: int
    pieces: int
    a_step: int
    table: torch.Tensor | None
    offsets: torch.Tensor | None


@dataclass(frozen=True)
class Workspace:
    """A panel's chunks as the walk reads them, tiles [panel, H, ...]."""

    k_grow: torch.Tensor
    q_grow: torch.Tensor
    k_tail: torch.Tensor
    inverse: torch.Tensor
    a_qk: torch.Tensor
    decay: torch.Tensor
    betas: torch.Tensor

    @staticmethod
    def of(chunks: int, heads: int, device: torch.device) -> Workspace:
        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(chunks, heads, *shape, dtype=dtype, device=device)

        wide, square = (CHUNK, WIDTH), (CHUNK, CHUNK)
        return Workspace(empty(*wide), empty(*wide), empty(*wide), empty(*square), empty(*square), empty(WIDTH, dtype=torch.float32),
                         empty(CHUNK, dtype=torch.float32))

    def part(self, first: int, count: int) -> Workspace:
        """The tiles of so many of its chunks."""
        at = slice(first, first + count)
        return Workspace(self.k_grow[at], self.q_grow[at], self.k_tail[at], self.inverse[at], self.a_qk[at], self.decay[at], self.betas[at])


def layout_of(batch: int, steps: int, cu_seqlens: torch.Tensor | None, tokens: int) -> Layout:
    """The pieces of `tokens` tokens of every sequence, each sequence's counted from its own start."""
    if cu_seqlens is None:
        return Layout(batch, batch * -(-steps // tokens), batch, None, None)
    from driftline.kernels.kda.triton_chunks import chunk_table

    sequences = cu_seqlens.numel() - 1
    pieces = steps // tokens + sequences if sequences else 0
    table = torch.empty(pieces, 4, dtype=torch.int32, device=cu_seqlens.device)
    offsets = torch.empty(sequences + 1, dtype=torch.int32, device=cu_seqlens.device)
    chunk_table[(sequences + 1,)](cu_seqlens, table, offsets, sequences, pieces, C=tokens, BLOCK=128, num_warps=4, enable_fp_fusion=True)
    return Layout(sequences, pieces, 1, table, offsets)


def prepare(x: Inputs, layout: Layout, space: Workspace, first: int, last: int) -> None:
    """The chunks [first, last) of every head into the workspace, from its beginning."""
    from driftline.kernels.kda.triton_chunks import prepare_chunks

    steps, heads = x.q.shape[1:3]
    ahead = -(-BEGUN // (heads * layout.a_step)) * CHUNK
    for start in range(first, last, _GRID):
        count = min(last - start, _GRID)
        to = space if count == last - first else space.part(start - first, count)
        prepare_chunks[(heads, count)](
            x.q, x.k, x.z, x.beta, x.a_log, x.dt_bias, x.q if layout.table is None else layout.table, to.k_grow, to.q_grow, to.k_tail, to.inverse,
            to.a_qk, to.decay, to.betas, start, layout.sequences, steps, heads, ahead, *x.q.stride()[:2], *x.k.stride()[:2], *x.z.stride()[:2],
            *x.beta.stride()[:2], SCALE=WIDTH**-0.5, LOWER=x.lower_bound, VARLEN=layout.table is not None, C=CHUNK, K=WIDTH, num_warps=4,
            enable_fp_fusion=True)


def walk(x: Inputs, layout: Layout, space: Workspace, cu_seqlens: torch.Tensor | None, o: torch.Tensor, final: torch.Tensor, first: int, last: int,
          launch: Launch, segments: Layout | None = None, transfer: torch.Tensor | None = None, entries: torch.Tensor | None = None) -> None:
    """The state over the chunks [first, last), outputs on the way; with segments, over each, and with `transfer` their transfers instead of outputs."""
    from driftline.kernels.kda.triton_scan import walk_chunks

    heads = x.q.shape[2]
    varlen = layout.table is not None
    columns = 2 * WIDTH if transfer is not None else WIDTH

    def given(t: torch.Tensor | None) -> torch.Tensor:
        return x.q if t is None else t

    walk_chunks[(columns // launch.columns * (layout.sequences if segments is None else segments.pieces), heads)](
        x.v, space.k_grow, space.q_grow, space.k_tail, space.inverse, space.a_qk, space.decay, space.betas, given(cu_seqlens), given(layout.offsets),
        given(segments.table if segments else None), given(segments.offsets if segments else None), given(x.initial_state), final, given(transfer),
        given(entries), o, first, last, layout.sequences, x.q.shape[1], heads, *x.v.stride()[:2], SEGMENT=SEGMENT // CHUNK if segments else 0,
        SUMMARY=transfer is not None, HAS_INITIAL=x.initial_state is not None, VARLEN=varlen, C=CHUNK, K=WIDTH, V=WIDTH, BV=launch.columns,
        WARPS=launch.warps, num_warps=launch.warps, enable_fp_fusion=True)


def compose(x: Inputs, segments: Layout, transfer: torch.Tensor, entries: torch.Tensor, final: torch.Tensor) -> None:
    """The state that each segment begins with, from the transfers of those before it."""
    from driftline.kernels.kda.triton_scan import compose_segments

    heads = x.q.shape[2]
    compose_segments[(WIDTH // COMPOSE.columns * segments.sequences, heads)](
        transfer, x.q if x.initial_state is None else x.initial_state, entries, final, x.q if segments.offsets is None else segments.offsets,
        segments.sequences, segments.pieces // segments.a_step, heads, HAS_INITIAL=x.initial_state is not None, VARLEN=segments.table is not None, K=WIDTH,
        V=WIDTH, BV=COMPOSE.columns, STAGES=2, num_warps=COMPOSE.warps, num_stages=2, enable_fp_fusion=True)


def walk_launch(walks: int) -> Launch:
    """For so many states walked at once. Every launch gives the same bits."""
    return WALK_OF_FEW if walks * (WIDTH // WALK_OF_FEW.columns) <= MULTIPROCESSORS else WALK


def forward(x: Inputs, cu_seqlens: torch.Tensor | None, *, launch: Launch | None = None, panel: int = PANEL, in_segments: bool | None = None) -> tuple[
        torch.Tensor, torch.Tensor]:
    """o [B, T, H, 128] in v's dtype and the final state [N, H, 128, 128] fp32. cu_seqlens [N + 1] int32 or int64 with B = 1, or None and N = B.

    The keywords are for timing. launch None: WALK in segments, else by `walk_launch`. Only `in_segments` (None: by the rule for the number of heads)
    changes bits."""
    batch, steps, heads, _ = x.q.shape
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    layout = layout_of(batch, steps, cu_seqlens, CHUNK)
    device = x.q.device
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=device)
    final = torch.empty(layout.sequences, heads, WIDTH, WIDTH, dtype=torch.float32, device=device)
    if not layout.pieces or not layout.sequences or not heads:
        if x.initial_state is None:
            final.zero_()
        else:
            final.copy_(x.initial_state)
        return o, final
    if segmented(heads) if in_segments is None else in_segments:
        segments = layout_of(batch, steps, cu_seqlens, SEGMENT)
        space = Workspace.of(layout.pieces, heads, device)
        prepare(x, layout, space, 0, layout.pieces)
        transfer = torch.empty(segments.pieces, heads, WIDTH, 2 * WIDTH, dtype=torch.float32, device=device)
        entries = torch.empty(segments.pieces, heads, WIDTH, WIDTH, dtype=torch.float32, device=device)
        if segments.pieces > segments.a_step:
            walk(x, layout, space, cu_seqlens, o, final, 0, layout.pieces, launch or WALK, segments, transfer=transfer)
        if segments.pieces > segments.a_step or segments.table is not None:
            compose(x, segments, transfer, entries, final)
        walk(x, layout, space, cu_seqlens, o, final, 0, layout.pieces, launch or WALK, segments, entries=entries)
        return o, final
    size = max(panel // (heads * CHUNK) // layout.a_step, 1) * layout.a_step
    space = Workspace.of(min(size, layout.pieces), heads, device)
    for first in range(0, layout.pieces, size):
        last = min(first + size, layout.pieces)
        prepare(x, layout, space, first, last)
        walk(x, layout, space, cu_seqlens, o, final, first, last, launch or walk_launch(heads * layout.sequences))
    return o, final
