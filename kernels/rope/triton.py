# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Rotary position embedding: a program some heads of some tokens, each element read and written once. A token's bits do not depend on the batch.

Contraction of a product and a sum into one rounding is off, so that the operations are the reference's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["rotated", "takes"]

_ELEMENTS = 4096
"""Of a program."""


@triton.jit
def _rotate(x, cos, sin, out, rows, HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, H: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
            BACK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    i = tl.arange(0, H)[None, :]
    inside = live & (i < HALF)
    angle = (row // HEADS)[:, None] * HALF + i
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    if BACK:
        s = -s
    at = row[:, None] * WIDTH
    if INTERLEAVED:
        both = tl.arange(0, 2 * H)[None, :]
        whole = tl.load(x + at + both, mask=live & (both < 2 * HALF), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(whole, (ROWS, H, 2)))
        turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (ROWS, 2 * H))
        tl.store(out + at + both, turned.to(out.dtype.element_ty), mask=live & (both < 2 * HALF))
    else:
        a = tl.load(x + at + i, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + at + HALF + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at + i, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
        tl.store(out + at + HALF + i, (b * c + a * s).to(out.dtype.element_ty), mask=inside)
    if WIDTH > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, REST)[None, :]
        tl.store(out + at + rest, tl.load(x + at + rest, mask=live & (rest < WIDTH)), mask=live & (rest < WIDTH))


def takes(x: torch.Tensor, cos: torch.Tensor) -> bool:
    """Whether the kernel is for these."""
    return x.dtype in (torch.bfloat16, torch.float16, torch.float32) and x.shape[-1] <= 1024


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool) -> torch.Tensor:
    """x [..., H, D] turned by cos, sin [..., R / 2] fp32, or `back` by them."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    heads, width, half = x.shape[-2], x.shape[-1], cos.shape[-1]
    rows = x.numel() // width
    if rows == 0:
        return out
    held = max(1, _ELEMENTS // triton.next_power_of_2(width))
    _rotate[(triton.cdiv(rows, held),)](
        x, cos, sin, out, rows, HEADS=heads, WIDTH=width, HALF=half, H=triton.next_power_of_2(half), REST=triton.next_power_of_2(max(width - 2 * half, 1)),
        INTERLEAVED=interleaved, BACK=back, ROWS=held, num_warps=4, enable_fp_fusion=False,
    )
    return out
