"""SiTU-GLU, K3's bounded gated activation."""

from driftline.kernels.situ_glu.reference import situ_glu

__all__ = ["situ_glu"]
