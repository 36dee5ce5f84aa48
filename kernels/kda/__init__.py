"""Kimi Delta Attention: the gated delta rule with a decay per key channel."""

from driftline.kernels.kda.chunk import kda_chunk
from driftline.kernels.kda.operator import PADDING, kda
from driftline.kernels.kda.reference import bounded_gate, kda_recurrent, kda_step, l2_normalise

__all__ = ["PADDING", "bounded_gate", "kda", "kda_chunk", "kda_recurrent", "kda_step", "l2_normalise"]
