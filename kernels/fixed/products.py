"""`a w^T` in which a row's result depends on that row alone, on any device: the kernel's where it runs, else a BLAS called with blocks of one shape.

A BLAS orders the sums of a product by its shape, by where its operands lie and by its threads. So rows are taken LEAST at a time, from aligned memory, with
zeros behind the last, and behind a K that is no multiple of STEP, where they add nothing. That rows of such a block do not depend on where in it they stand, nor on the threads, is asked once a shape (`verified`), and a BLAS
of which it does not hold is refused. Larger blocks are used where the same question shows them to give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from driftline.kernels.dispatch import runs_triton

__all__ = ["LEAST", "STEP", "by_blocks", "packed_alike", "product", "verified", "write", "write_batch"]

LEAST = 16
"""Rows of the smallest block."""

STEP = 16
"""What K is a multiple of, and the fewest columns: a BLAS takes less by edge code, in which a row's place does show."""

LARGER = (256, 64)
"""Blocks that are used where they are shown to give the same bits."""

PACK = 32
"""Blocks of a batched product."""

_LINE = 64
"""Bytes that the address of an operand is a multiple of."""


def product(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """a [M, K], w [N, K] of one floating dtype on one device -> [M, N] of it: each element one sum over K in an order that K, N and the dtype settle. Not
    differentiable. Raises ValueError where the BLAS of this machine cannot be held to it."""
    if a.device.type == "cuda" and a.dtype != torch.float64 and runs_triton(a, w):
        from driftline.kernels.linear.triton import matmul

        return matmul(a, w, a.new_empty(a.shape[0], w.shape[0]))
    return by_blocks(a, w)


def by_blocks(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As `product`, by torch's matrix product of fixed shapes."""
    rows, depth = a.shape
    columns = w.shape[0]
    if rows == 0 or columns == 0 or depth == 0:
        return a.new_zeros(rows, columns)
    a = _whole(a, LEAST, -(-depth // STEP) * STEP)
    w = _whole(w, 1, a.shape[1], least=STEP)
    out = a.new_empty(a.shape[0], w.shape[0])
    write(a, w, out, verified(a.shape[1], w.shape[0], a.dtype, a.device, torch.get_num_threads()))
    return out[:rows] if columns == out.shape[1] else out[:rows, :columns].contiguous()


def _whole(matrix: torch.Tensor, rows: int, columns: int, *, least: int = 0) -> torch.Tensor:
    """The matrix contiguous at an aligned address, with zeros up to a multiple of `rows`, `least` of them at least, and up to `columns`."""
    height = max(-(-matrix.shape[0] // rows) * rows, least)
    if matrix.shape == (height, columns) and matrix.is_contiguous() and matrix.data_ptr() % _LINE == 0:
        return matrix
    whole = matrix.new_zeros(height, columns)
    whole[: matrix.shape[0], : matrix.shape[1]] = matrix
    return whole


def write(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, sizes: tuple[int, ...]) -> None:
    """a [M, K] w^T into out [M, N] by blocks of `sizes`, of which LEAST divides M; all contiguous, from aligned addresses."""
    rows = a.shape[0]
    even = LEAST * a.shape[1] * a.element_size() % _LINE == 0 and LEAST * out.shape[1] * a.element_size() % _LINE == 0
    start = 0
    for size in sizes:
        while rows - start >= size:
            if even:
                torch.mm(a[start : start + size], w.t(), out=out[start : start + size])
            else:
                out[start : start + size] = a[start : start + size].clone() @ w.t()
            start += size


def write_batch(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """a [B, M, K] w[b]^T into out [B, M, N], w [B, N, K]: the bits of `write` for each b. Few rows of many matrices go PACK blocks at a time, so that a call is not
    made for each; where this machine's batched product is shown to give the same bits."""
    batch, rows, depth = a.shape
    threads = torch.get_num_threads()
    sizes = verified(depth, out.shape[2], a.dtype, a.device, threads)
    count = batch * rows // LEAST
    if rows >= LARGER[-1] or count < PACK // 4 or not packed_alike(depth, out.shape[2], a.dtype, a.device, threads):
        for b in range(batch):
            write(a[b], w[b], out[b], sizes)
        return
    blocks = a.reshape(count, LEAST, depth)
    matrices = w if rows == LEAST else w.repeat_interleave(rows // LEAST, 0)
    short = -count % PACK
    if short:
        blocks = torch.cat([blocks, blocks.new_zeros(short, LEAST, depth)])
        matrices = torch.cat([matrices, matrices.new_zeros(short, *w.shape[1:])])
    found = [torch.bmm(blocks[i : i + PACK], matrices[i : i + PACK].mT) for i in range(0, count, PACK)]
    out.copy_(torch.cat(found)[:count].view(out.shape))


@cache
def packed_alike(depth: int, columns: int, dtype: torch.dtype, device: torch.device, threads: int) -> bool:
    """Whether a batched product of PACK blocks gives each the bits of a product of its own, asked of operands from a fixed seed."""
    source = torch.Generator().manual_seed(depth * 1_000_003 + columns)
    a = torch.randn(PACK, LEAST, depth, generator=source, dtype=torch.float32).to(dtype).to(device)
    w = torch.randn(PACK, columns, depth, generator=source, dtype=torch.float32).to(dtype).to(device)
    return _same(torch.bmm(a, w.mT), torch.stack([x.clone() @ y.t() for x, y in zip(a, w, strict=True)]))


@cache
def verified(depth: int, columns: int, dtype: torch.dtype, device: torch.device, threads: int) -> tuple[int, ...]:
    """The blocks that may be used for [., depth] times [columns, depth], largest first; LEAST is the last. `threads`: of torch now.

    Asked of operands drawn from a fixed seed: rows at every place of a block, among other neighbours, on one thread. Another order of a sum shows in some
    bit of the many that are compared. Raises ValueError where the smallest block's rows are not their own."""
    source = torch.Generator().manual_seed(depth * 1_000_003 + columns)
    largest = LARGER[0]
    a = torch.randn(largest, depth, generator=source, dtype=torch.float32).to(dtype).to(device)
    w = torch.randn(columns, depth, generator=source, dtype=torch.float32).to(dtype).to(device)

    def in_blocks(rows: torch.Tensor, size: int) -> torch.Tensor:
        return torch.cat([rows[i : i + size].clone() @ w.t() for i in range(0, rows.shape[0], size)])

    plain = in_blocks(a, LEAST)
    for shift in range(1, LEAST):
        turned = torch.roll(a[: 2 * LEAST], shift, 0)
        if not _same(torch.roll(in_blocks(turned, LEAST), -shift, 0), plain[: 2 * LEAST]):
            raise _refused("a row's place in a block", depth, columns, dtype, device)
    if device.type == "cpu" and threads != 1 and not _same(_on_one_thread(in_blocks, a[: 2 * LEAST], threads), plain[: 2 * LEAST]):
        raise _refused("the number of threads", depth, columns, dtype, device)
    return *(size for size in LARGER if _same(in_blocks(a, size), plain)), LEAST


def _on_one_thread(in_blocks: Callable[[torch.Tensor, int], torch.Tensor], rows: torch.Tensor, threads: int) -> torch.Tensor:
    torch.set_num_threads(1)
    try:
        return in_blocks(rows, LEAST)
    finally:
        torch.set_num_threads(threads)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def _refused(what: str, depth: int, columns: int, dtype: torch.dtype, device: torch.device) -> ValueError:
    return ValueError(f"run.numerics is deterministic, and this machine's product [{LEAST}, {depth}] x [{depth}, {columns}] in {dtype} on {device.type} depends on "
                      f"{what}: choose fast, or another BLAS, or one thread")
