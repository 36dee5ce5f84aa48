"""RMSNorm with K3's rounding order."""

from driftline.kernels.rmsnorm.reference import rmsnorm

__all__ = ["rmsnorm"]
