"""Arithmetic in which an element's bits depend on its own operands: what operators are made of in deterministic mode where no kernel of theirs runs.

A matrix product of a BLAS, a sum, and on a CPU even an exponential give a row other bits in a tensor of another size. Here products go through blocks of a
fixed shape, sums through one tree, and exponentials through whole vectors. Additions, multiplications, divisions and roots are exact to the last bit in every
tensor and need none of it. All of these read the mode (`driftline.kernels.mode`): in FAST they are torch's own functions.
"""

from driftline.kernels.fixed.attention import attention_rows
from driftline.kernels.fixed.gradient import exactly
from driftline.kernels.fixed.pointwise import exp, log, sigmoid, silu, tanh
from driftline.kernels.fixed.products import product
from driftline.kernels.fixed.sums import softmax, total

__all__ = ["attention_rows", "exactly", "exp", "log", "product", "sigmoid", "silu", "softmax", "tanh", "total"]
