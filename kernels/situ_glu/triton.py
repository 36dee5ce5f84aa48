# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""SiTU-GLU as Triton kernels: one pass forward (two reads, one write), one pass backward (three reads, two writes), all arithmetic in fp32.

Each element's bits depend on that element alone: no reductions, one block size, one contraction setting. The two formulas are jit functions of
their own, so that a matrix product can run them on its accumulators: `situ` and `situ_partials`.

tanh and the sigmoid are made of one exponential each, of a negative number: e = exp(-2|x|), tanh|x| = (1 - e) / (1 + e), sech^2 x = 4 e / (1 + e)^2. So
nothing overflows, and 1 - tanh^2 is not a difference of two numbers near one. Below |x| = 1/4, where 1 - e cancels, tanh is its series to x^9
(next term: 1e-8 of the value).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["backward", "forward", "situ", "situ_partials"]

BLOCK, WARPS = 2048, 4
"""Elements a program takes: 16 a thread, two 16-byte accesses an operand in bfloat16."""



INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _exp2(x):
    """2^x, x <= 0, in one instruction: what is too small for a normal number is zero."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _reciprocal(x):
    """1 / x, x in [1, 8], to its last bit or the one before, in one instruction."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _signed(size, x):
    """size >= 0 with the sign of x."""
    return (size.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _series(x, square):
    return x * (1.0 + square * (-0.33333333333 + square * (0.13333333333 + square * (-0.05396825397 + square * 0.02186948854))))


@triton.jit
def _tanh(x):
    """tanh x and sech^2 x of an fp32."""
    e = _exp2(tl.abs(x) * -2.8853900817779268)
    rest = _reciprocal(1.0 + e)
    square = x * x
    return tl.where(square < 0.0625, _series(x, square), _signed((1.0 - e) * rest, x)), 4.0 * e * rest * rest


@triton.jit
def _sigmoid(x):
    """sigmoid(x) and sigmoid(-x) of an fp32: both without a difference."""
    e = _exp2(tl.abs(x) * -1.4426950408889634)
    large = _reciprocal(1.0 + e)
    small = e * large
    return tl.where(x < 0, small, large), tl.where(x < 0, large, small)


@triton.jit
def _tanh_parts(x):
    """tanh x as a numerator and a denominator between 1 and 2."""
    e = _exp2(tl.abs(x) * -2.8853900817779268)
    square = x * x
    near = square < 0.0625
    return tl.where(near, _series(x, square), _signed(1.0 - e, x)), tl.where(near, 1.0, 1.0 + e)


@triton.jit
def situ(g, u, beta, linear_beta, over_beta, over_linear_beta):
    """`beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)`; g, u fp32 of one shape, over_* the reciprocals."""
    # one quotient for the three factors: three exponentials and one reciprocal an element, where six would be slower than memory
    tg, below_g = _tanh_parts(g * over_beta)
    tu, below_u = _tanh_parts(u * over_linear_beta)
    e = _exp2(tl.abs(g) * -1.4426950408889634)
    return (tg * tu) * (tl.where(g < 0, e, 1.0) * (beta * linear_beta)) * _reciprocal(below_g * below_u * (1.0 + e))


@triton.jit
def situ_partials(g, u, beta, linear_beta, over_beta, over_linear_beta):
    """(value, its derivative by g, its derivative by u), as `situ` takes its arguments; the value is `situ`'s but for its last bits."""
    tg, hg = _tanh(g * over_beta)
    tu, hu = _tanh(u * over_linear_beta)
    s, t = _sigmoid(g)
    left, right = beta * tg * s, linear_beta * tu
    return left * right, (hg * s + left * t) * right, hu * left


@triton.jit
def _places(cols, gate_row, up_row, BLOCK: tl.constexpr):
    """Where this program's elements are: in the gate, in the up projection, in a contiguous tensor; and whether they are there at all."""
    blocks = tl.cdiv(cols, BLOCK)
    row = tl.program_id(0) // blocks
    col = (tl.program_id(0) - row * blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = row.to(tl.int64)
    return wide * gate_row + col, wide * up_row + col, wide * cols + col, col < cols


@triton.jit
def _forward(gate, up, out, cols, gate_row, up_row, beta, linear_beta, over_beta, over_linear_beta, BLOCK: tl.constexpr):
    at_gate, at_up, at, inside = _places(cols, gate_row, up_row, BLOCK)
    g = tl.load(gate + at_gate, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + at_up, mask=inside, other=0).to(tl.float32)
    tl.store(out + at, situ(g, u, beta, linear_beta, over_beta, over_linear_beta).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gate, up, grad, d_gate, d_up, cols, gate_row, up_row, beta, linear_beta, over_beta, over_linear_beta, BLOCK: tl.constexpr):
    at_gate, at_up, at, inside = _places(cols, gate_row, up_row, BLOCK)
    g = tl.load(gate + at_gate, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + at_up, mask=inside, other=0).to(tl.float32)
    dy = tl.load(grad + at, mask=inside, other=0).to(tl.float32)
    _, by_gate, by_up = situ_partials(g, u, beta, linear_beta, over_beta, over_linear_beta)
    tl.store(d_gate + at, (by_gate * dy).to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + at, (by_up * dy).to(d_up.dtype.element_ty), mask=inside)




def _rows(tensor: torch.Tensor, flat: bool) -> tuple[torch.Tensor, int]:
    """The tensor as rows that a row stride reaches (a half of a fused projection is not copied), and that stride."""
    if flat:
        return tensor, 0
    rows = tensor.flatten(0, -2) if tensor.ndim > 1 else tensor[None]
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def _layout(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int, int, int]:
    flat = gate.is_contiguous() and up.is_contiguous()
    (g, gate_row), (u, up_row) = _rows(gate, flat), _rows(up, flat)
    cols = gate.numel() if flat else gate.shape[-1]
    return g, u, cols, gate_row, up_row, gate.numel() // cols * triton.cdiv(cols, BLOCK)


def forward(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """gate, up [..., I] of one shape and dtype (bfloat16, float16, float32), any strides; [..., I] contiguous of that dtype."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        g, u, cols, gate_row, up_row, programs = _layout(gate, up)
        _forward[(programs,)](g, u, out, cols, gate_row, up_row, beta, linear_beta, 1 / beta, 1 / linear_beta, BLOCK=BLOCK, num_warps=WARPS,
                              enable_fp_fusion=True)
    return out


def backward(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, beta: float, linear_beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and of up, contiguous, in their dtype; grad [..., I] is the output's."""
    d_gate, d_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    if gate.numel():
        g, u, cols, gate_row, up_row, programs = _layout(gate, up)
        _backward[(programs,)](g, u, grad.contiguous(), d_gate, d_up, cols, gate_row, up_row, beta, linear_beta, 1 / beta, 1 / linear_beta, BLOCK=BLOCK,
                               num_warps=WARPS, enable_fp_fusion=True)
    return d_gate, d_up
