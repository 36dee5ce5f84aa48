"""Routed experts: ordered top-k routing and the grouped expert MLP."""

from driftline.kernels.moe.reference import expert_mlp, route

__all__ = ["expert_mlp", "route"]
