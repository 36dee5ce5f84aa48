# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,override"
"""Attention of grouped queries on any device in an order of operations that no shape changes: deterministic mode's form where no kernel runs.

torch's matrix products, sums and functions of many elements take other instructions for other shapes and places, and so give other bits. Here every element
goes through additions, multiplications, divisions, maxima and roundings of its own, each of which IEEE 754 defines to the bit, in an order that is that of its
query's keys: sums are of blocks of `BLOCK` keys, each by halves, then block after block. So a query's bits depend on the query and on the keys it sees and on
nothing else, by construction. It costs memory traffic of every product's terms. The gradient is the reference's.
"""

from __future__ import annotations

import math

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.gqa import reference
from driftline.kernels.gqa.layout import Layout

__all__ = ["BLOCK", "attention", "exponential", "halves"]

BLOCK = 64
"""Keys of a block: another is another order of sums, other bits."""

_TERMS = 2**21
"""Terms of products that are held at once: bounds the memory, not the bits."""

_LOG2_E = math.log2(math.e)
_LN_2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN_2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
"""ln 2 in two parts, the first with so few bits that its product with a whole number below 2^11 is exact (W. J. Cody and W. Waite, 1980)."""
_COEFFICIENTS = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))


def halves(x: torch.Tensor) -> torch.Tensor:
    """The sum over the first axis, by adding its halves until one element is left; zeros stand for what it lacks of a power of two. x is overwritten."""
    width = x.shape[0]
    while width > 1:
        half = 1 << (width - 1).bit_length() - 1
        x[: width - half] += x[half:width]
        width = half
    return x[0]


def exponential(x: torch.Tensor) -> torch.Tensor:
    """exp of fp32 or fp64 at most 0 by operations that round alike in every place, exactly 0 below -700: in fp64, by its series, rounded to x's dtype."""
    wide = x.double().clamp(min=-701.0)
    power = torch.round(wide * _LOG2_E)
    rest = wide - power * _LN_2_HIGH - power * _LN_2_LOW
    total = torch.full_like(rest, _COEFFICIENTS[0])
    for c in _COEFFICIENTS[1:]:
        total = total * rest + c
    scale = ((power.long() + 1023) << 52).view(torch.float64)
    return torch.where(x < -700.0, 0.0, total * scale).to(x.dtype)


def _batch(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """q [D, B, T, Hkv, G]; keys [D, B, Hkv, N], values [N, B, Hkv, Dv], N a multiple of BLOCK; seen [B, T]: keys from the first that a query sees. Returns
    [B, T, Hkv, G, Dv]."""
    count = keys.shape[3]
    score = torch.cat([halves(q[..., None] * block[:, :, None, :, None]) for block in keys.split(BLOCK, 3)], dim=-1) * scale
    hidden = torch.arange(count, device=q.device) >= seen[:, :, None, None, None]
    top = score.masked_fill_(hidden, -torch.inf).amax(-1, keepdim=True)
    p = exponential(score - torch.where(top == -torch.inf, 0, top)).permute(4, 0, 1, 2, 3).contiguous()
    total, out = p.new_zeros(p.shape[1:]), p.new_zeros(*p.shape[1:], values.shape[3])
    for part, block in zip(p.split(BLOCK), values.split(BLOCK), strict=True):
        out += halves(part[..., None] * block[:, :, None, :, None])
        total += halves(part)
    return out / torch.where(total > 0, total, 1)[..., None]


def _forward(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scale: float, out_dtype: torch.dtype) -> torch.Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    heads, key_heads, value = q.shape[2], keys.shape[2], values.shape[3]
    query = q.flatten(0, 1).unflatten(1, (key_heads, heads // key_heads)).to(wide)
    out = query.new_zeros(query.shape[0], key_heads, heads // key_heads, value)
    if layout.valid is not None:
        groups = [(0, layout.sequences, layout.longest_q, layout.longest_k)]
    else:
        lengths, counts = layout.starts_q.diff().tolist(), layout.counts.tolist()
        groups = [(i, i + 1, length, count) for i, (length, count) in enumerate(zip(lengths, counts, strict=True))]
    for first, last, steps, count in groups:
        if steps == 0 or count == 0:
            continue
        key = _gathered(keys, layout, first, last, count).to(wide).permute(3, 0, 2, 1).contiguous()
        held = _gathered(values, layout, first, last, count).to(wide).transpose(0, 1).contiguous()
        begin = int(layout.starts_q[first])
        mine = query[begin : begin + (last - first) * steps].view(last - first, steps, *query.shape[1:]).permute(4, 0, 1, 2, 3).contiguous()
        seen = layout.seen[begin : begin + (last - first) * steps].view(last - first, steps)
        width = max(1, _TERMS // (BLOCK * heads * max(value, q.shape[3]) * (last - first)))
        parts = []
        for t in range(0, steps, width):
            # Blocks of keys that none of these queries sees would add zeros.
            most = -(-min(count - steps + t + width, count) // BLOCK) * BLOCK
            parts.append(_batch(mine[:, :, t : t + width], key[..., :most], held[:most], seen[:, t : t + width], scale))
        out[begin : begin + (last - first) * steps] = torch.cat(parts, 1).flatten(0, 1)
    rounded: torch.Tensor = out.to(out_dtype).view(*q.shape[:3], value)
    return rounded


def _gathered(x: torch.Tensor, layout: Layout, first: int, last: int, count: int) -> torch.Tensor:
    """[last - first, count and up to BLOCK - 1 zeros, Hkv, D]: the sequences' own keys or values, in order."""
    begin = int(layout.starts_k[first])
    rows = slice(begin, begin + (last - first) * count)
    mine = x.flatten(0, 1)[rows if layout.rows is None else layout.rows[rows].long()].view(last - first, count, *x.shape[2:])
    return torch.nn.functional.pad(mine, (0, 0, 0, 0, 0, -count % BLOCK))


class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, keys, values, layout: Layout, scale: float, out_dtype: torch.dtype):
        ctx.save_for_backward(q, keys, values)
        ctx.rest = layout, scale, out_dtype
        return _forward(q, keys, values, layout, scale, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = reference.attention(*leaves, *ctx.rest)
        return *torch.autograd.grad(out, leaves, grad), None, None, None


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scale: float, out_dtype: torch.dtype) -> torch.Tensor:
    """As `reference.attention`."""
    out: torch.Tensor = _Ordered.apply(q, keys, values, layout, scale, out_dtype)
    return out
