"""Block attention residuals: a learned softmax over earlier block outputs replaces the plain residual stream."""

from driftline.kernels.attention_residual.reference import attention_residual

__all__ = ["attention_residual"]
