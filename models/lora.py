"""LoRA: a low-rank update `x A^T B^T * alpha / rank` beside frozen linears and, stacked, beside the routed experts (arXiv:2106.09685).

The adapters are ordinary named tensors of the policy. A version of a LoRA run is the base plus adapters, so its delta is the adapters alone: unchanged
tensors cost nothing.
"""

from __future__ import annotations

import math
import re

import torch
from torch import nn

from driftline.kernels.linear import linear
from driftline.messages.errors import ConfigError
from driftline.models.linear import Linear
from driftline.models.mlp import Experts, PackedExperts

__all__ = ["LoraExpert", "LoraLinear", "add_lora", "merge_lora"]


class LoraLinear(Linear):
    """A frozen linear with a trained low-rank update. B starts at zero, so adding LoRA changes nothing."""

    def __init__(self, base: Linear, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight
        self.register_parameter("bias", None)
        self.scale = alpha / rank
        self.lora_A = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + linear(linear(x, self.lora_A), self.lora_B) * self.scale

    def effective_weight(self) -> torch.Tensor:
        return self.weight + self.lora_B @ self.lora_A * self.scale


class LoraExpert(nn.Module):
    """Parametrisation of one stacked expert matrix [E, O, I]: base + B A * scale per expert."""

    def __init__(self, base: torch.Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        experts, size_out, size_in = base.shape
        self.scale = alpha / rank
        self.lora_A = nn.Parameter(base.new_empty(experts, rank, size_in))
        self.lora_B = nn.Parameter(base.new_zeros(experts, size_out, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, base: torch.Tensor) -> torch.Tensor:
        return base + self.lora_B @ self.lora_A * self.scale


class LoraExperts(nn.Module):
    """Routed experts whose three matrices carry a low-rank update; `w1`, `w3`, `w2` read as the updated stacks."""

    def __init__(self, base: Experts, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.delta = nn.ModuleDict({name: LoraExpert(getattr(base, name), rank, alpha) for name in ("w1", "w3", "w2")})

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        if name in ("w1", "w3", "w2"):
            updated: torch.Tensor = self.delta[name](getattr(self.base, name))
            return updated
        return super().__getattr__(name)


def add_lora(model: nn.Module, rank: int, alpha: float | None = None, targets: str = r".*(proj|experts)$") -> list[str]:
    """Freeze the model and add adapters to every linear and expert stack whose module name matches `targets`.

    Experts that are held packed stay as they are: a low-rank update beside MXFP4 has no kernel, and unpacking them unasked would take 3.8 times their memory.
    Returns the adapted module names. Raises ConfigError when rank is not positive or nothing matches.
    """
    if rank < 1:
        raise ConfigError("rank must be at least 1", field="learner.lora_rank", value=rank, remedy="use 0 for full-weight training")
    try:
        pattern = re.compile(targets)
    except re.error as error:
        raise ConfigError(f"not a regular expression: {error}", field="learner.lora_targets", value=targets,
                          remedy="use a regular expression over module names, e.g. .*(q_proj|v_proj)$") from error
    scale = float(alpha if alpha is not None else rank)
    before, adapted, packed = list(model.parameters()), [], False
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            full = f"{name}.{child_name}" if name else child_name
            # `proj` of an attention residual is a query vector of size [1, D]; a rank-r update of it would be larger than it.
            if not pattern.match(full) or full.endswith("res.proj"):
                continue
            if isinstance(child, Linear) and not isinstance(child, LoraLinear):
                setattr(module, child_name, LoraLinear(child, rank, scale))
            elif isinstance(child, Experts):
                setattr(module, child_name, LoraExperts(child, rank, scale))
            else:
                packed = packed or isinstance(child, PackedExperts)
                continue
            adapted.append(full)
    if not adapted and packed:
        raise ConfigError("matches only routed experts packed to MXFP4, which take no adapter", field="learner.lora_targets", value=targets,
                          remedy="target other linears too, or start from a checkpoint with unpacked experts")
    if not adapted:
        raise ConfigError("matches no linear or expert module", field="learner.lora_targets", value=targets,
                          remedy="use a regular expression over module names, e.g. .*(q_proj|v_proj)$")
    for parameter in before:
        parameter.requires_grad_(False)
    return adapted


def merge_lora(model: nn.Module) -> None:
    """Fold every adapter into its base and restore the plain modules, in place."""
    for module in list(model.modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, LoraLinear):
                plain = Linear(child.in_features, child.out_features)
                plain.weight = nn.Parameter(child.effective_weight().detach())
                setattr(module, child_name, plain)
            elif isinstance(child, LoraExperts):
                with torch.no_grad():
                    for which in ("w1", "w3", "w2"):
                        getattr(child.base, which).copy_(getattr(child, which))
                setattr(module, child_name, child.base)
