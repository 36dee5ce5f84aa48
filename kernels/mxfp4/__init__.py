"""MXFP4 weights: the packed forms of expert matrices, and the exact ways between them."""

from driftline.kernels.mxfp4.weights import ExpertWeight, Fp8Weight, Mxfp4Weight

__all__ = ["ExpertWeight", "Fp8Weight", "Mxfp4Weight"]
