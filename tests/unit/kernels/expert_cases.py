"""Expert matrices in every form with their exact values, and the expert MLP's gradients in float64."""

from __future__ import annotations

import torch

from driftline.kernels.moe.reference import expert_mlp
from driftline.kernels.moe.triton_tiles import Form
from driftline.kernels.mxfp4.weights import ExpertWeight, Fp8Weight, Mxfp4Weight

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def matrices(form: Form, shape: tuple[int, int, int], seed: int, device: str = "cpu") -> tuple[ExpertWeight, torch.Tensor]:
    """[E, N, K] of about unit gain in this form, and the same values in float64 (bfloat16 on a device that has many of them)."""
    experts, out, width = shape
    random = torch.Generator(device).manual_seed(seed)
    match form:
        case Form.BFLOAT16:
            weight = (torch.randn(shape, generator=random, device=device) * width**-0.5).bfloat16()
            return weight, weight.double() if device == "cpu" else weight
        case Form.MXFP4:
            codes = torch.randint(0, 16, shape, generator=random, device=device, dtype=torch.uint8)
            middle = 127 - round(torch.tensor(float(width)).log2().item() / 2) - 2
            scale = torch.randint(middle - 2, middle + 2, (experts, out, width // 32), generator=random, device=device, dtype=torch.uint8)
            table = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=torch.float32, device=device)
            values = table[codes.long()] if device == "cpu" else torch.stack([table[c.long()] for c in codes])
            values = values * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)
            packed = codes[..., 0::2] | codes[..., 1::2] << 4
            return Mxfp4Weight(packed, scale), values.double() if device == "cpu" else values.bfloat16()
        case Form.FP8:
            values = (torch.randn(shape, generator=random, device=device) * 16).to(torch.float8_e4m3fn)
            middle = -4 - round(torch.tensor(float(width)).log2().item() / 2)
            scale = torch.exp2(torch.randint(middle - 1, middle + 2, (experts, out, width // 128), generator=random, device=device).float())
            wide = values.float() * scale.repeat_interleave(128, -1)
            return Fp8Weight(values, scale), wide.double() if device == "cpu" else wide.bfloat16()


def choices(tokens: int, experts: int, top_k: int, seed: int = 3, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 [N, k] without repeats in a row, gates fp32 [N, k] that sum to one."""
    random = torch.Generator(device).manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=random, device=device).argsort(-1)[:, :top_k].contiguous()
    gates = torch.rand(tokens, top_k, generator=random, device=device) + 0.1
    return ids, gates / gates.sum(-1, keepdim=True)


def exact(
    z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, weights: tuple[torch.Tensor, ...], dy: torch.Tensor, betas: tuple[float, float]
) -> tuple[torch.Tensor, ...]:
    """The gradients of z, gates, w1, w3 and w2, float64."""
    leaves = [t.double().requires_grad_() for t in (z, gates, *weights)]
    out = expert_mlp(leaves[0], ids, leaves[1], *leaves[2:], *betas)
    return torch.autograd.grad(out, leaves, dy.double())


def error(found: torch.Tensor | None, wanted: torch.Tensor) -> float:
    assert found is not None
    assert found.shape == wanted.shape
    assert torch.isfinite(found).all()
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
