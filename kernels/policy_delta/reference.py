"""The policy-delta operators in plain torch, on any device: what the kernels must equal bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from driftline.kernels.policy_delta.spans import BITS, Rounding, SpanChanges, checked, checked_block

__all__ = ["apply_xor", "compare", "fingerprint", "put", "xor_blocks"]

_LOW = 0xFFFFFFFF


def compare(
    old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], rounding: Rounding = Rounding.NONE, *, write: bool = False, dense_share: float = 1.0
) -> SpanChanges:
    """Where `new`, rounded, differs from `old`; with `write`, `old` then holds it. Spans of more than `dense_share` changes are not listed."""
    checked(old, new, rounding)
    ats, xors, starts, counts = [], [], [0], []
    for held, value in zip(old, new, strict=True):
        xor = _bits(held, rounding) ^ _bits(_rounded(value, rounding), rounding)
        at = xor.nonzero().view(-1)
        counts.append(at.numel())
        if at.numel() <= dense_share * held.numel():
            ats.append(at.to(torch.int32))
            xors.append(xor[at])
        starts.append(starts[-1] + (at.numel() if at.numel() <= dense_share * held.numel() else 0))
        if write:
            held.view(-1).copy_(_rounded(value, rounding))
    device, width = old[0].device if old else torch.device("cpu"), rounding.width(old[0]) if old else 2
    return SpanChanges(
        torch.cat(ats) if ats else torch.empty(0, dtype=torch.int32, device=device),
        torch.cat(xors) if xors else torch.empty(0, dtype=BITS[width], device=device),
        torch.tensor(starts, dtype=torch.int64, device=device), torch.tensor(counts, dtype=torch.int64, device=device),
    )


def xor_blocks(base: Sequence[torch.Tensor], new: Sequence[torch.Tensor], *, block: int) -> torch.Tensor:
    """`new` becomes base XOR new, bit for bit and in place. Returns int32 [blocks]: of every `block` elements of a span (the last block of a span may be
    shorter, and none runs into the next span) how many are not zero then, the spans' blocks laid end to end."""
    checked(base, new, Rounding.NONE, longest=None)
    checked_block(block)
    counts = []
    for held, value in zip(base, new, strict=True):
        bits = _bits(value, Rounding.NONE)
        bits ^= _bits(held, Rounding.NONE)
        changed = bits != 0
        counts.append(torch.cat([changed, changed.new_zeros(-changed.numel() % block)]).view(-1, block).sum(1, dtype=torch.int32))
    return torch.cat(counts) if counts else torch.empty(0, dtype=torch.int32)


def _rounded(value: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    flat = value.detach().view(-1)
    match rounding:
        case Rounding.NONE:
            return flat
        case Rounding.BFLOAT16:
            return flat.to(torch.bfloat16)
        case Rounding.BFLOAT16_IN_FLOAT32:
            return flat.to(torch.bfloat16).to(torch.float32)


def _bits(value: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    flat = value.detach().view(-1)
    if rounding is Rounding.BFLOAT16_IN_FLOAT32:
        return (flat.view(torch.int32) >> 16).to(torch.int16)
    return flat.view(BITS[flat.element_size()])


def apply_xor(spans: Sequence[torch.Tensor], changes: SpanChanges) -> None:
    """XOR the changes into the spans, in place."""
    bounds = changes.starts.tolist()
    for i, span in enumerate(spans):
        at, xor = changes.at[bounds[i] : bounds[i + 1]].long(), changes.xor[bounds[i] : bounds[i + 1]]
        bits = span.view(-1).view(xor.dtype)
        bits[at] ^= xor


def put(spans: Sequence[torch.Tensor], at: torch.Tensor, values: torch.Tensor, starts: torch.Tensor) -> None:
    """Set elements: `values[j]` (bits of the spans' width) at position `at[j]` of span i, for j in `starts[i]:starts[i + 1]`."""
    bounds = starts.tolist()
    for i, span in enumerate(spans):
        span.view(-1).view(values.dtype)[at[bounds[i] : bounds[i + 1]].long()] = values[bounds[i] : bounds[i + 1]]


def fingerprint(spans: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [spans]: of each span's bytes as little-endian 32-bit words w_i (zeros after the last byte), the sum of w_i c_i modulo 2^64, where
    c_i = mix(i) | 1 is odd: a span that differs in one word always differs, any other with the odds of 64 bits. It guards against accident.

    mix: x = i k1; x ^= x >> 15; x *= k2; x ^= x >> 13, in 32 bits (a murmur3 finaliser with one round less).
    """
    if not spans:
        return torch.empty(0, dtype=torch.int64)
    longest = max(-(-span.numel() * span.element_size() // 4) for span in spans)
    factors = _factors(longest, spans[0].device)
    sums = []
    for span in spans:
        data = span.detach().contiguous().view(-1).view(torch.uint8)
        if data.numel() % 4 or data.data_ptr() % 4:
            data = torch.cat([data, data.new_zeros(-data.numel() % 4)])
        words = data.view(torch.int32).long() & _LOW
        sums.append((words * factors[: words.numel()]).sum())
    return torch.stack(sums)


def _factors(count: int, device: torch.device) -> torch.Tensor:
    x = torch.arange(count, dtype=torch.int64, device=device) * 0x9E3779B1 & _LOW
    x ^= x >> 15
    x = x * 0x85EBCA6B & _LOW
    x ^= x >> 13
    return x | 1
