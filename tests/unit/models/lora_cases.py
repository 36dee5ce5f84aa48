"""Adapters with something in them, for models of any kind."""

from __future__ import annotations

import torch
from torch import nn

from driftline.models.lora import Adapter, LoraConfig, Scaling, Update, adapt, adapter_of


def disturbed(model: nn.Module, seed: int, std: float = 0.2) -> nn.Module:
    """The model, its updates' B no longer zero."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.copy_(torch.randn(parameter.shape, generator=random) * std)
    return model


def drawn_adapter(model: nn.Module, seed: int, *, rank: int = 3, targets: str = "all-linear", alpha: float = 6.0, scaling: Scaling = Scaling.RANK) -> Adapter:
    """An adapter for this model, which is a throwaway: it is left adapted."""
    torch.manual_seed(seed)
    adapt(model, LoraConfig(rank, alpha, targets, scaling))
    return adapter_of(disturbed(model, seed))


def same(a: Adapter, b: Adapter) -> bool:
    def equal(x: Update, y: Update) -> bool:
        return torch.equal(x.a, y.a) and torch.equal(x.b, y.b) and x.scale == y.scale

    return a.updates.keys() == b.updates.keys() and all(equal(update, b.updates[name]) for name, update in a.updates.items())
