"""Routed rows and expert weights in every form, small or at K3's shapes, for tests of the expert MLP."""

from __future__ import annotations

from typing import NamedTuple

import torch

from driftline.kernels.moe.activations import Activations
from driftline.kernels.moe.grouped import Form
from driftline.kernels.mxfp4.reference import pack, to_fp8
from driftline.kernels.mxfp4.weights import ExpertWeight, Mxfp4Weight

BETAS = (4.0, 25.0)
COMBINATIONS = ((Form.MXFP4, Activations.SAME), (Form.MXFP4, Activations.FP8_32), (Form.MXFP4, Activations.FP8_128), (Form.FP8, Activations.FP8_128),
                (Form.BFLOAT16, Activations.SAME), (Form.BFLOAT16, Activations.FP8_32))


class Case(NamedTuple):
    """z bfloat16 [N, Z], ids int64 and gates fp32 [N, k], w1, w3 [E, I, Z], w2 [E, Z, I]."""

    z: torch.Tensor
    ids: torch.Tensor
    gates: torch.Tensor
    w1: ExpertWeight
    w3: ExpertWeight
    w2: ExpertWeight


def weight(form: Form, experts: int, out: int, width: int, random: torch.Generator) -> ExpertWeight:
    """Of a size that keeps the products near one."""
    wide = torch.randn(experts, out, width, generator=random, device=random.device) * (1.5 / width**0.5)
    if form is Form.BFLOAT16:
        return wide.bfloat16()
    packed = Mxfp4Weight(*pack(wide))
    return packed if form is Form.MXFP4 else to_fp8(packed).weight


def case(form: Form, tokens: int, top_k: int, experts: int, latent: int, inner: int, *, seed: int = 0, device: str = "cpu") -> Case:
    """Different experts for each token's slots, the first experts much more often than the last."""
    random = torch.Generator(device).manual_seed(seed)
    z = torch.randn(tokens, latent, generator=random, device=device).bfloat16()
    taste = torch.rand(tokens, experts, generator=random, device=device) * torch.linspace(1.0, 0.2, experts, device=device)
    ids = taste.topk(top_k, dim=-1).indices
    gates = torch.rand(tokens, top_k, generator=random, device=device)
    return Case(z, ids, gates, weight(form, experts, inner, latent, random), weight(form, experts, inner, latent, random),
                weight(form, experts, latent, inner, random))
