# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,attr-defined,assignment,var-annotated"
"""The attention residual in Gluon for widths of whole stretches: while a token is worked on, the next one's sources are on their way into shared memory.

A token's row is its own: what is computed for it, and in which order, does not depend on how many tokens there are, which program takes it or what the
others hold. A program of eight warps walks its tokens; a token comes in stretches of 1,024 columns, each a tile of its R bank rows (R a power of two; where
a row is not there, zeros) beside a line of the moving prefix. There are as many slots in shared memory as a token has stretches. A stretch is waited for,
taken into registers, summed, and its place is asked for again, for the next token: so all but one of the slots are always on their way, while sums are
exchanged and results written too.

A thread holds every source's four columns of each stretch, as bfloat16: each later pass over them widens them anew, by a shift and a mask that the
compiler is not told, because it would otherwise keep every widened value and need twice the registers there are.

Each slot is an allocation of its own and is named by a constant: only so does the compiler see that asking for one and reading another need no barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from driftline.kernels.attention_residual.rows import Rows, apart

__all__ = ["BACKWARD", "FORWARD", "MULTIPROCESSORS", "OPAQUE", "STRETCH", "WARPS", "Launch", "forward", "launch_of", "takes"]

MULTIPROCESSORS = 132

STRETCH, WARPS = 1024, 8
MOST_STRETCHES = 7
"""Of K3's width: as many as fit the registers and the shared memory."""

LEAST_ROWS = 3
"""Below, the kernels for any width do: there is little to read, and these were not shown to be quicker."""

OPAQUE = (16, -65536, 16, -65536)
"""What widens a bfloat16 (a shift for the low half of a word, a mask for the high one), twice, for kernels that pass over their values three times."""


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched for R bank rows. `programs`: at most so many; `registers`: the most a thread may take, so that as many programs fit a
    multiprocessor as are meant to; `sums_shared`: the sums over tokens lie in shared memory, not in registers; `early`: of gradients that are added to,
    a stretch is read while the one before is worked on."""

    programs: int
    registers: int
    sums_shared: bool = False
    early: bool = False


Table = dict[tuple[int, bool], Launch]

_ONE, _TWO = Launch(MULTIPROCESSORS, 255), Launch(2 * MULTIPROCESSORS, 128)
FORWARD: Table = {(4, False): _TWO, (4, True): _TWO, (8, False): _ONE, (8, True): _ONE}

_ONE_SHARED = Launch(MULTIPROCESSORS, 255, sums_shared=True)
BACKWARD: Table = {(4, False): _ONE, (4, True): _ONE_SHARED, (8, False): Launch(MULTIPROCESSORS, 255, sums_shared=True, early=True), (8, True): _ONE_SHARED}
"""The pinned configurations, by R and whether an output norm is fused: chosen by the shape of the call alone."""

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

_WARPS, _VECTOR, _THREADS, _CHUNK = gl.constexpr(WARPS), gl.constexpr(STRETCH // WARPS // 32), gl.constexpr(32 * WARPS), gl.constexpr(STRETCH)
_PLAIN2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_PLAIN1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_COPY1 = gl.constexpr(gl.BlockedLayout([8], [32], [WARPS], [0]))


def takes(sources: torch.Tensor | Sequence[torch.Tensor], prefix: torch.Tensor) -> bool:
    """Whether these kernels are for such sources: bfloat16, two to seven stretches wide, and at least three beside the prefix."""
    width, held = prefix.shape[-1], (sources,) if isinstance(sources, torch.Tensor) else sources
    count = sources.shape[1] if isinstance(sources, torch.Tensor) else len(sources)
    shaped = count >= LEAST_ROWS and width % STRETCH == 0 and 2 <= width // STRETCH <= MOST_STRETCHES
    return shaped and prefix.dtype == torch.bfloat16 and all(s.dtype == torch.bfloat16 for s in held)


def launch_of(table: Table, bank_rows: int, norm: bool) -> tuple[int, Launch]:
    """(R, its launch): the smallest R of the table that holds so many sources beside the prefix."""
    r = min(r for r, fused in table if fused == norm and r >= bank_rows)
    return r, table[r, norm]


@gluon.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@gluon.jit
def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@gluon.jit
def widened(x, shift, mask):
    """Of bfloat16 in fp32, exactly: one instruction a value."""
    return gl.inline_asm_elementwise("shl.b32 $0, $2, $3; and.b32 $1, $2, $5;", "=r,=r,r,r,r,r,r", [x, shift, mask], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def parts(x):
    """The columns of a thread one by one: four tensors [R, threads], or [threads]."""
    if len(x.shape) == 2:
        even, odd = gl.split(gl.reshape(x, [x.shape[0], _THREADS, _VECTOR // 2, 2]))
    else:
        even, odd = gl.split(gl.reshape(x, [_THREADS, _VECTOR // 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def under(line, tile):
    """A line as often as the tile has rows."""
    return gl.broadcast(line[None, :], tile)[0]


@gluon.jit
def dot(xs, ys, total, first: gl.constexpr):
    """Sums of products over a thread's own columns, in their order, on top of `total`; `first`: there is no total yet."""
    for i in gl.static_range(len(xs)):
        x, y = gl.broadcast(xs[i], ys[i])
        if first and i == 0:
            total = x * y
        else:
            total = gl.fma(x, y, total)
    return total


@gluon.jit
def beside(line, like, row, at: gl.constexpr, others):
    """`others` [R, threads] with its row `at` replaced by a line of the prefix's sums: what there is of the prefix is exchanged along with the bank's."""
    return gl.where(row == at, gl.convert_layout(line, gl.SliceLayout(0, like.type.layout))[None, :], others)


@gluon.jit
def taken(sums, source, at: gl.constexpr):
    return gl.sum(gl.where(source == at, sums, 0.0), axis=0)


@gluon.jit
def softmax(score, score1, source, rows):
    """p [R] of the bank's sources and p of the prefix; 0 for a source that is not there. Nothing is divided twice: a zero query gives 1 / L rounded once."""
    masked = gl.where(source < rows, score, float("-inf"))
    top = gl.maximum(gl.max(masked, axis=0), score1)
    e = gl.exp(masked - top)
    e1 = gl.exp(score1 - top)
    total = gl.sum(e, axis=0) + e1
    return gl.div_rn(e, total + gl.zeros_like(e)), gl.div_rn(e1, total)


@gluon.jit
def slots(kind: gl.constexpr, rows, R: gl.constexpr, PIECES: gl.constexpr, TWO: gl.constexpr, TILE: gl.constexpr):
    """Room for one token: tiles [R, 1024], lines of the prefix, and lines of what comes with it (none: those of the prefix). Rows that are not there are 0."""
    tiles = ()
    lines = ()
    others = ()
    for c in gl.static_range(PIECES):
        tiles = tiles + (gl.allocate_shared_memory(kind, [R, _CHUNK], _PLAIN2),)  # noqa: RUF005
        lines = lines + (gl.allocate_shared_memory(kind, [_CHUNK], _PLAIN1),)  # noqa: RUF005
        if TWO:
            others = others + (gl.allocate_shared_memory(kind, [_CHUNK], _PLAIN1),)  # noqa: RUF005
        else:
            others = others + (lines[c],)  # noqa: RUF005
    if rows < R:
        for c in gl.static_range(PIECES):
            tiles[c].store(gl.zeros([R, _CHUNK], kind, TILE))
        barrier()
    return tiles, lines, others


@gluon.jit
def _heads(values, strides, token, R: gl.constexpr, ROW: gl.constexpr, COPY: gl.constexpr):
    """Pointers [R, 1] to a token's sources: rows ROW elements apart, or (ROW 0) each at a pointer of its own."""
    source = gl.arange(0, R, gl.SliceLayout(1, COPY))
    if ROW > 0:
        heads = values[0] + token * strides[0] + source * ROW
    else:
        heads = values[0] + (token * strides[0] + source * 0)
        for i in gl.static_range(1, R):
            heads = gl.where(source == i, values[i] + token * strides[i], heads)
    return heads[:, None]


@gluon.jit
def ask(tile, line, other, values, strides, one, one_stride, two, two_stride, token, tokens, rows, c: gl.constexpr, R: gl.constexpr, ROW: gl.constexpr,
        TWO: gl.constexpr):
    """Begin to bring stretch c of a token's rows into a slot; nothing where there is no such token."""
    SPREAD: gl.constexpr = min(R, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [SPREAD, _WARPS // SPREAD], [1, 0])
    if token < tokens:
        at = gl.cast(token, gl.int64)
        row = (c * _CHUNK + gl.arange(0, _CHUNK, gl.SliceLayout(0, COPY)))[None, :]
        column = c * _CHUNK + gl.arange(0, _CHUNK, _COPY1)
        cells = gl.multiple_of(gl.max_contiguous(_heads(values, strides, at, R, ROW, COPY) + row, [1, 8]), [1, 16])
        _copy(tile, cells, mask=(gl.arange(0, R, gl.SliceLayout(1, COPY)) < rows)[:, None])
        _copy(line, gl.multiple_of(one + at * one_stride + column, [16]))
        if TWO:
            _copy(other, gl.multiple_of(two + at * two_stride + column, [16]))
    async_copy.commit_group()


@gluon.jit
def directions(query, norm, columns, PIECES: gl.constexpr):
    """norm * query in fp32, in shared memory: each thread reads what it wrote itself. All loads are on their way before the first is used."""
    n = ()
    for c in gl.static_range(PIECES):
        n = n + (gl.load(query + c * _CHUNK + columns).to(gl.float32) * gl.load(norm + c * _CHUNK + columns).to(gl.float32),)  # noqa: RUF005
    held = ()
    for c in gl.static_range(PIECES):
        held = held + (gl.allocate_shared_memory(gl.float32, [_CHUNK], _PLAIN1, n[c]),)  # noqa: RUF005
    return held


# One token is no case of its own: its bits are to be those it has among others.
@gluon.jit(do_not_specialize=["tokens", "rows"])
def _mix_staged(values, strides, prefix, prefix_stride, delta, delta_stride, moved, query, norm, output_weight, out, tokens, rows, eps, output_eps, shift, mask,
                R: gl.constexpr, D: gl.constexpr, ROW: gl.constexpr, ADD: gl.constexpr, NORM: gl.constexpr):
    PIECES: gl.constexpr = D // _CHUNK
    TILE: gl.constexpr = gl.BlockedLayout([R, _VECTOR], [1, 32], [1, _WARPS], [1, 0])
    LINE: gl.constexpr = gl.SliceLayout(0, TILE)
    kind: gl.constexpr = prefix.dtype.element_ty
    columns = gl.arange(0, _CHUNK, LINE)
    source = gl.arange(0, R, gl.SliceLayout(1, TILE))
    tiles, lines, others = slots(kind, rows, R, PIECES, ADD, TILE)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    for c in gl.static_range(PIECES - 1):
        ask(tiles[c], lines[c], others[c], values, strides, prefix, prefix_stride, delta, delta_stride, first, tokens, rows, c, R, ROW, ADD)
    n = directions(query, norm, columns, PIECES)
    for token in range(first, tokens, step):
        at = gl.cast(token, gl.int64)
        v = ()
        u = ()
        for c in gl.static_range(PIECES):
            async_copy.wait_group(PIECES - 2)
            # The stretch is there for every warp, and every warp has taken the one before.
            barrier()
            xb = tiles[c].load(TILE)
            yb = lines[c].load(LINE)
            if ADD:
                yb = (yb.to(gl.float32) + others[c].load(LINE).to(gl.float32)).to(kind)
                gl.store(moved + at * D + c * _CHUNK + columns, yb)
            ask(tiles[c - 1], lines[c - 1], others[c - 1], values, strides, prefix, prefix_stride, delta, delta_stride,
                token + (c + PIECES - 1) // PIECES * step, tokens, rows, (c + PIECES - 1) % PIECES, R, ROW, ADD)
            x = xb.to(gl.float32)
            y = yb.to(gl.float32)
            xs = parts(x)
            ys = parts(y)
            m = n[c].load(LINE)
            if c == 0:
                square, along, square1, along1 = 0.0, 0.0, 0.0, 0.0
            square = dot(xs, xs, square, c == 0)
            along = dot(xs, parts(under(m, x)), along, c == 0)
            square1 = dot(ys, ys, square1, c == 0)
            along1 = dot(ys, parts(m), along1, c == 0)
            v = v + (xb,)  # noqa: RUF005
            u = u + (yb,)  # noqa: RUF005
        row = gl.arange(0, R, gl.SliceLayout(1, square.type.layout))[:, None]
        ones = beside(square1, square, row, 0, beside(along1, square, row, 1, gl.zeros_like(square)))
        square_sum, along_sum, sums = gl.reduce((square, along, ones), 1, add3)
        sums = gl.convert_layout(sums, gl.SliceLayout(1, TILE))
        square_sum1 = taken(sums, source, 0)
        along_sum1 = taken(sums, source, 1)
        square_sum = gl.convert_layout(square_sum, gl.SliceLayout(1, TILE))
        along_sum = gl.convert_layout(along_sum, gl.SliceLayout(1, TILE))
        p, p1 = softmax(along_sum * gl.rsqrt(square_sum / D + eps), along_sum1 * gl.rsqrt(square_sum1 / D + eps), source, rows)
        mixed = ()
        for c in gl.static_range(PIECES):
            o = (gl.sum(widened(v[c], shift, mask) * p[:, None], axis=0) + widened(u[c], shift, mask) * p1).to(kind)
            if NORM:
                ws = parts(o.to(gl.float32))
                if c == 0:
                    power = 0.0
                power = dot(ws, ws, power, c == 0)
                mixed = mixed + (o,)  # noqa: RUF005
            else:
                gl.store(out + at * D + c * _CHUNK + columns, o, eviction_policy="evict_first")
        if NORM:
            scale = gl.rsqrt(gl.sum(power, axis=0) / D + output_eps)
            for c in gl.static_range(PIECES):
                h = (widened(mixed[c], shift, mask) * scale).to(kind).to(gl.float32)
                weight = gl.load(output_weight + c * _CHUNK + columns).to(kind).to(gl.float32)
                gl.store(out + at * D + c * _CHUNK + columns, (h * weight).to(kind), eviction_policy="evict_first")
    async_copy.wait_group(0)


def forward(
    sources: torch.Tensor | Sequence[torch.Tensor], prefix: torch.Tensor, delta: torch.Tensor | None, query: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    output_weight: torch.Tensor | None, output_eps: float, launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mixed [N, D], moved [N, D]), one launch, for what it `takes`: sources [N, rows, D] or up to eight tensors [N, D], columns contiguous. moved is the prefix
    itself without a delta. `launch` stands in for the pinned configuration."""
    tokens, width = prefix.shape
    count = sources.shape[1] if isinstance(sources, torch.Tensor) else len(sources)
    r, pinned = launch_of(FORWARD, count, output_weight is not None)
    launch = launch or pinned
    out = torch.empty(tokens, width, dtype=prefix.dtype, device=prefix.device)
    moved = prefix if delta is None else torch.empty_like(out)
    if not tokens:
        return out, moved
    read = apart(prefix)
    rows = Rows(apart(sources) if isinstance(sources, torch.Tensor) else [apart(s) for s in sources], r, read)
    added = None if delta is None else apart(delta)
    _mix_staged[(min(tokens, launch.programs),)](
        rows.tensors, rows.strides, read, read.stride(0), added, 0 if added is None else added.stride(0), moved, query, norm_weight, output_weight, out, tokens,
        count, eps, output_eps, *OPAQUE[:2], R=r, D=width, ROW=rows.row, ADD=delta is not None, NORM=output_weight is not None, num_warps=WARPS,
        maxnreg=launch.registers, enable_fp_fusion=True,
    )
    return out, moved
