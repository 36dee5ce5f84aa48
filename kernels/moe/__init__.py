"""Routed experts: ordered top-k routing and the grouped expert MLP. See docs/kernels/moe.md and docs/kernels/router.md."""

from __future__ import annotations

import torch

from driftline.kernels.mode import deterministic
from driftline.kernels.moe import exact, forward, reference
from driftline.kernels.moe.activations import Activations
from driftline.kernels.moe.router import route
from driftline.kernels.mxfp4.weights import ExpertWeight, Fp8Weight, Mxfp4Weight

__all__ = ["Activations", "expert_mlp", "route"]


def expert_mlp(
    z: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
    w1: ExpertWeight,
    w3: ExpertWeight,
    w2: ExpertWeight,
    beta: float,
    linear_beta: float,
    *,
    activations: Activations = Activations.SAME,
    microbatch: int | None = None,
) -> torch.Tensor:
    """The gated sum over each token's experts, in the order of its slots: sum of gate * W2 SiTU-GLU(W1 z, W3 z; beta, linear_beta) (K3 report, section 2).

    z [N, Z] floating; ids integers [N, k], gates [N, k]; w1, w3 [E, I, Z] and w2 [E, Z, I], all three as tensors, Mxfp4Weight or Fp8Weight. Returns [N, Z] of
    z's dtype. An id outside 0..E-1 (padding: -1) adds nothing. `activations`: how the rows of both products are rounded; SAME and FP8_32 go with tensors, every
    one with Mxfp4Weight, FP8_128 with Fp8Weight. `microbatch`: tokens at a time on a GPU, which bounds the workspace and changes no bit.

    Differentiable in z, gates and tensor weights; packed weights are frozen, and a rounding of activations passes gradients straight through. On a CUDA device,
    for bfloat16 and widths that are multiples of 128, kernels of which a token's bits depend on that token alone; elsewhere torch. Raises ValueError.
    """
    _check(z, ids, gates, w1, w3, w2, activations, microbatch)
    if not forward.takes(z, gates, w1, w3, w2):
        if deterministic():
            return exact.expert_mlp(z, ids, gates, w1, w3, w2, beta, linear_beta, activations=activations)
        return reference.expert_mlp(z, ids, gates, w1, w3, w2, beta, linear_beta, activations=activations)
    for name, weight in (("w1", w1), ("w3", w3), ("w2", w2)):
        parts = (weight,) if isinstance(weight, torch.Tensor) else tuple(weight)
        if not all(part.is_contiguous() and part.data_ptr() % 16 == 0 for part in parts):
            raise ValueError(f"{name} is not contiguous from an address that 16 divides; store it so once, for a copy at each call would take longer than the product")
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in (z, gates, w1, w3, w2)):
        from driftline.kernels.moe.autograd import expert_mlp_with_grad

        return expert_mlp_with_grad(z, ids, gates, w1, w3, w2, beta, linear_beta, activations=activations, microbatch=microbatch)
    return forward.forward(z.detach().contiguous(), ids, gates.detach().contiguous(), w1, w3, w2, beta, linear_beta, activations, microbatch)


_ALLOWED: dict[type, tuple[Activations, ...]] = {
    torch.Tensor: (Activations.SAME, Activations.FP8_32),
    Mxfp4Weight: tuple(Activations),
    Fp8Weight: (Activations.FP8_128,),
}


def _check(
    z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, w2: ExpertWeight, activations: Activations,
    microbatch: int | None,
) -> None:
    if z.ndim != 2 or not z.is_floating_point():
        raise ValueError(f"z has shape {tuple(z.shape)} and dtype {z.dtype}; give one floating row a token, [N, Z]")
    if ids.ndim != 2 or ids.is_floating_point() or ids.shape[0] != z.shape[0]:
        raise ValueError(f"ids has shape {tuple(ids.shape)} and dtype {ids.dtype}; give one row of integers a token, [{z.shape[0]}, k]")
    if gates.shape != ids.shape:
        raise ValueError(f"gates has shape {tuple(gates.shape)}; give one gate an id, {tuple(ids.shape)}")
    kind = next((k for k in _ALLOWED if isinstance(w1, k)), None)
    if kind is None:
        raise ValueError(f"w1 is a {type(w1).__name__}; give a tensor, an Mxfp4Weight or an Fp8Weight")
    if not isinstance(w3, kind) or not isinstance(w2, kind):
        raise ValueError(f"w1 is a {type(w1).__name__}, w3 a {type(w3).__name__} and w2 a {type(w2).__name__}; give all three in one form")
    if len(w1.shape) != 3 or w1.shape[2] != z.shape[1]:
        raise ValueError(f"w1 has shape {tuple(w1.shape)}; for rows of {z.shape[1]} columns give [E, I, {z.shape[1]}]")
    experts, inner, latent = w1.shape
    if tuple(w3.shape) != (experts, inner, latent) or tuple(w2.shape) != (experts, latent, inner):
        raise ValueError(f"w3 has shape {tuple(w3.shape)} and w2 {tuple(w2.shape)}; beside w1 {tuple(w1.shape)} give {(experts, inner, latent)} and "
                         f"{(experts, latent, inner)}")
    if activations not in _ALLOWED[kind]:
        raise ValueError(f"activations={activations} with weights as {kind.__name__}; use one of {[a.name for a in _ALLOWED[kind]]} or another form")
    if activations is Activations.FP8_128 and (inner % 128 or latent % 128):
        raise ValueError(f"activations={activations} over rows of {latent} and {inner} columns; its groups of 128 must divide both, or use FP8_32")
    if activations is Activations.FP8_32 and (inner % 32 or latent % 32):
        raise ValueError(f"activations={activations} over rows of {latent} and {inner} columns; its groups of 32 must divide both, or use SAME")
    if microbatch is not None and microbatch < 1:
        raise ValueError(f"microbatch={microbatch}; a microbatch has at least one token, or None for the pinned number")
