"""A frozen linear with a trained low-rank update beside it: `x W^T + b + (x A^T B^T) scale`, each product rounded as the base's is."""

from __future__ import annotations

import torch
from torch import nn

from driftline.kernels.linear import linear
from driftline.models.linear import Linear
from driftline.models.lora.adapter import Scaling, Update
from driftline.models.lora.latent import LatentUpdate

__all__ = ["LoraLinear", "added", "drawn"]


class LoraLinear(Linear):
    """lora_A [r, in], lora_B [out, r], in the weight's dtype. B starts at zero, so adding an adapter changes nothing; the base's parameters are its own."""

    def __init__(self, base: Linear, rank: int, alpha: float, scaling: Scaling = Scaling.RANK) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        self.alpha, self.scaling = alpha, scaling
        self.scale = scaling.factor(alpha, rank)
        self.lora_A = nn.Parameter(drawn((rank, base.in_features), base.weight.dtype, base.weight.device))
        self.lora_B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + linear(linear(x, self.lora_A), self.lora_B) * self.scale

    @property
    def update(self) -> Update:
        """Its own, detached: the same memory."""
        return Update(self.lora_A.detach(), self.lora_B.detach(), self.alpha, self.scaling)

    def effective_weight(self) -> torch.Tensor:
        """W + scale B A, in at least fp32, rounded once to W's dtype."""
        return added(self.weight, Update(self.lora_A, self.lora_B, self.alpha, self.scaling))

    def latent_update(self, heads: int, nope: int) -> LatentUpdate:
        """As an up-projection of `heads` heads, with the gradient of its halves; see `latent`."""
        return LatentUpdate.of(Update(self.lora_A, self.lora_B, self.alpha, self.scaling), heads, nope)

    def merged(self) -> Linear:
        """A plain linear of the effective weight, trained whole."""
        plain = Linear(1, 1)
        plain.in_features, plain.out_features = self.in_features, self.out_features
        plain.weight = nn.Parameter(self.effective_weight().detach())
        plain.register_parameter("bias", self.bias)
        return plain


def added(weight: torch.Tensor, update: Update) -> torch.Tensor:
    """weight [.., out, in] plus the update, computed in at least fp32 and rounded once to the weight's dtype."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + update.delta(wide)).to(weight.dtype)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[.., r, in] uniform in +-1 / sqrt(in), as PEFT draws it for one linear, for each of a stack too. Drawn in fp32 on the CPU: one seed makes the same adapter
    on every device and, but for its rounding, in every dtype. On the meta device nothing is drawn."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    bound = shape[-1] ** -0.5
    return torch.empty(shape, dtype=torch.float32, device="cpu").uniform_(-bound, bound).to(device=device, dtype=dtype)
