"""What the dense operators are held to on a device, as functions that say yes or no, so that a test can also show each of them saying no."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["BATCHES", "Rows", "batch_invariant", "captured", "drawn", "poisoned_memory", "prefix_stable", "relative_error", "repeats_alike", "written"]

BATCHES = (1, 2, 7, 64, 512)
Rows = Callable[..., Sequence[torch.Tensor]]
"""An operator as a function of tensors that have a row for each row of its results."""


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, device="cuda", generator=random).mul_(scale).to(dtype)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """What is allocated inside is NaN until it is written."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


def written(fn: Callable[[], Sequence[torch.Tensor]]) -> bool:
    """Whether every element of what it returns was written."""
    with poisoned_memory():
        results = fn()
    return not any(bool(result.isnan().any()) for result in results)


def relative_error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the whole tensor, in fp64; infinite where anything is NaN."""
    error = float((out.double() - wanted.double()).norm() / wanted.double().norm())
    return error if error == error else float("inf")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def repeats_alike(fn: Callable[[], Sequence[torch.Tensor]], times: int) -> bool:
    """Whether it has one result, bit for bit; nothing waits for the device before the end."""
    first = [_bits(result).clone() for result in fn()]
    other = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(times - 1):
        for held, result in zip(first, fn(), strict=True):
            other |= (held != _bits(result)).any()
    return not bool(other)


def batch_invariant(fn: Rows, *rows: torch.Tensor) -> bool:
    """Whether a row of a batch has the bits that it has alone: for the first and the last row of batches of every size, from both ends of the rows."""
    alone: dict[int, list[torch.Tensor]] = {}

    def single(i: int) -> list[torch.Tensor]:
        if i not in alone:
            alone[i] = [_bits(result) for result in fn(*(tensor[i : i + 1] for tensor in rows))]
        return alone[i]

    count = rows[0].shape[0]
    for size in BATCHES:
        for start in {0, count - size}:
            results = [_bits(result) for result in fn(*(tensor[start : start + size] for tensor in rows))]
            for i in {0, size // 2, size - 1}:
                if not all(torch.equal(result[i : i + 1], one) for result, one in zip(results, single(start + i), strict=True)):
                    return False
    return True


def prefix_stable(fn: Rows, *rows: torch.Tensor, kept: int = 200) -> bool:
    """Whether the first `kept` rows' results stay the same when all later inputs change: matrices' sign, and the order of one number a row."""
    changed = []
    for tensor in rows:
        other = tensor.clone()
        other[kept:] = tensor[kept:].flip(0) if tensor.dim() == 1 else -tensor[kept:]
        changed.append(other)
    return all(torch.equal(_bits(a[:kept]), _bits(b[:kept])) for a, b in zip(fn(*rows), fn(*changed), strict=True))


def captured(fn: Callable[[], Sequence[torch.Tensor]]) -> Callable[[], Sequence[torch.Tensor]]:
    """The same as a graph to replay. Capturing fails for what waits for the device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = fn()

    def replay() -> Sequence[torch.Tensor]:
        graph.replay()
        return results

    return replay
