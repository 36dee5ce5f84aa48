"""Causal depthwise convolution of width 4 with a carried tail."""

from driftline.kernels.short_conv.reference import short_conv

__all__ = ["short_conv"]
