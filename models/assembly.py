"""A model from tensors that are given one at a time: its memory is allocated once, in the dtypes it keeps, and beside it there is never more than one tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from driftline.models.architectures import AnyConfig, skeleton
from driftline.models.causal_lm import CausalLM
from driftline.models.quantisation import Quantisation
from driftline.models.state import policy_dtype, policy_tensors, public_tensors

__all__ = ["assembled"]


def assembled(
    config: AnyConfig, experts: Quantisation, read: Callable[[str], torch.Tensor], *, dtype: torch.dtype, device: torch.device | str,
    order: Callable[[str], tuple[str, ...]] | None = None,
) -> CausalLM:
    """The model of `config` on `device`, its routed experts in form `experts`, every tensor of it `read(name)` by public name, of any device and floating dtype.

    Parameters are held in `dtype`, but what the release keeps in fp32 never in less. `order`: of the reads, by name; None for the model's.
    """
    model = skeleton(config, experts)
    _allocate(model, dtype, torch.device(device))
    targets = {public: view for name, tensor in policy_tensors(model) for public, view in public_tensors(name, tensor)}
    with torch.no_grad():
        for name in targets if order is None else sorted(targets, key=order):
            targets[name].copy_(read(name))
    return model


def _allocate(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Memory for every tensor of a model on the meta device, uninitialised. Tied parameters stay one."""
    made: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                kept = torch.promote_types(policy_dtype(f"{prefix}.{name}", dtype), dtype)
                made[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=kept, device=device), requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device=device))
