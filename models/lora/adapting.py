"""Adapters on a model and off it again: a target's module is replaced by one that holds the base's own parameters beside the update's, and nothing else changes.

The updates are ordinary named tensors of the policy. A version of a LoRA run is the base plus adapters, so its delta is the adapters alone: unchanged tensors
cost nothing. Merging gives plain modules in new memory and keeps what it replaced, so undoing it gives back the bits that were there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.linear import Linear
from driftline.models.lora.adapter import Adapter, Update
from driftline.models.lora.config import TARGETS, LoraConfig
from driftline.models.lora.experts import MATRICES, LoraExpert, LoraExperts, merged_experts
from driftline.models.lora.linear import LoraLinear
from driftline.models.mlp import Experts, PackedExperts

__all__ = ["Merged", "Target", "adapt", "adapter_of", "add_lora", "dtype_of", "merge_lora", "put_adapter", "targeted"]


@dataclass(frozen=True)
class Target:
    """A module that takes an update, and where it hangs."""

    parent: nn.Module
    child: str
    name: str
    module: Linear | Experts | PackedExperts


def targeted(model: nn.Module) -> Iterator[Target]:
    """Every module that takes an update and has none. A tied head is none of them: its weight is the embedding's."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parent in list(model.named_modules()):
        if isinstance(parent, LoraExperts):
            continue
        for child, module in list(parent.named_children()):
            plain = isinstance(module, Linear) and not isinstance(module, LoraLinear) and id(module.weight) not in embeddings
            if plain or isinstance(module, Experts | PackedExperts):
                yield Target(parent, child, f"{name}.{child}" if name else child, module)


def adapt(model: nn.Module, config: LoraConfig) -> list[str]:
    """Freeze the model and put a new update beside every target, its B zero: no output changes. Returns the adapted modules' names.

    The random half follows from torch's CPU generator. Raises ConfigError when nothing matches, before anything is changed.
    """
    matches = config.matcher()
    wanted = [target for target in targeted(model) if matches(target.name)]
    if not wanted:
        raise ConfigError("matches no linear or expert module", field="learner.lora_targets", value=config.targets,
                          remedy="use a regular expression over module names, e.g. .*(q_proj|v_proj)$; a head that is tied to the embedding takes no update")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for target in wanted:
        if isinstance(target.module, Linear):
            made: nn.Module = LoraLinear(target.module, config.rank, config.lora_alpha, config.scaling)
        else:
            made = LoraExperts.drawn(target.module, config.rank, config.lora_alpha, config.scaling, dtype_of(target))
        setattr(target.parent, target.child, made)
    return [target.name for target in wanted]


def add_lora(model: nn.Module, rank: int, alpha: float | None = None, targets: str = TARGETS) -> list[str]:
    """`adapt` with alpha / rank as the factor."""
    return adapt(model, LoraConfig(rank, alpha, targets))


def adapter_of(model: nn.Module, base: str = "") -> Adapter:
    """The model's updates, detached and in the model's memory. Raises ConfigError when it has none."""
    updates: dict[str, Update] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            updates[name] = module.update
        elif isinstance(module, LoraExperts):
            updates |= {f"{name}.{which}": update for which, update in module.updates.items()}
    if not updates:
        raise ConfigError("this model has no adapter", field="model", value=type(model).__name__, remedy="put one on first")
    return Adapter(updates, base)


def put_adapter(model: nn.Module, adapter: Adapter) -> list[str]:
    """Freeze the model and put an adapter that exists beside its modules, in copies of the weights' dtype and device. Returns the adapted modules' names.

    Raises IntegrityError, before anything is changed, when a module it names is not there, has an update already, or is of another shape.
    """
    targets = {target.name: target for target in targeted(model)}
    by_target: dict[str, dict[str, Update]] = {}
    for name, update in adapter.updates.items():
        stem, _, which = name.rpartition(".")
        place = (stem, which) if update.experts is not None and which in MATRICES else (name, "")
        by_target.setdefault(place[0], {})[place[1]] = update
    for name, parts in by_target.items():
        for which, update in parts.items():
            parts[which] = _fitting(name, which, update, targets)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, parts in by_target.items():
        target = targets[name]
        if isinstance(target.module, Linear):
            setattr(target.parent, target.child, _linear(target.module, parts[""]))
        else:
            delta = {which: _expert(parts[which], dtype_of(target), _device(target)) for which in MATRICES if which in parts}
            setattr(target.parent, target.child, LoraExperts(target.module, delta))
    return list(by_target)


def _fitting(name: str, which: str, update: Update, targets: dict[str, Target]) -> Update:
    """The update, with zeros for the experts that it does not reach."""
    remedy = "the adapter is of another base"
    if name not in targets:
        raise IntegrityError("the model has no such linear or expert module without an update", field=name, value=update.shape, remedy=remedy)
    module = targets[name].module
    if isinstance(module, Linear) != (which == ""):
        raise IntegrityError("an update of stacked experts and one of a linear are not the same", field=name, value=update.shape, remedy=remedy)
    wanted = tuple(module.weight.shape) if isinstance(module, Linear) else tuple(getattr(module, which).shape)
    whole = update.of_experts(wanted[0])
    if whole.shape != wanted:
        raise IntegrityError("B A has another shape than the weight", field=f"{name}.{which}".rstrip("."), value=update.shape, remedy=f"expected {wanted}: {remedy}")
    return whole


def _linear(base: Linear, update: Update) -> LoraLinear:
    with torch.device("meta"):
        shell = Linear(base.in_features, base.out_features)
    made = LoraLinear(shell, update.rank, update.alpha, update.scaling)
    made.weight = base.weight
    made.register_parameter("bias", base.bias)
    made.lora_A, made.lora_B = (_parameter(half, base.weight.dtype, base.weight.device) for half in (update.a, update.b))
    return made


def _expert(update: Update, dtype: torch.dtype, device: torch.device) -> LoraExpert:
    experts, size_out, size_in = update.shape
    made = LoraExpert((experts, size_out, size_in), update.rank, update.alpha, update.scaling, dtype=dtype, device=torch.device("meta"))
    made.lora_A, made.lora_B = (_parameter(half, dtype, device) for half in (update.a, update.b))
    return made


def _parameter(half: torch.Tensor, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(half.detach().to(device=device, dtype=dtype, copy=True).contiguous())


def dtype_of(target: Target) -> torch.dtype:
    """Of the layer's weights, where the experts themselves are codes."""
    return next(parameter.dtype for parameter in target.parent.parameters() if parameter.dim() == 2 or isinstance(target.module, Experts))


def _device(target: Target) -> torch.device:
    module = target.module
    device: torch.device = module.weight.device if isinstance(module, Linear) else module.w1.device
    return device


@dataclass(frozen=True)
class Merged:
    """A merge that can be undone: the modules it replaced, which hold the base and the updates as they were."""

    modules: tuple[tuple[nn.Module, str, nn.Module], ...]

    def undo(self) -> None:
        """Put the adapted modules back, bit for bit. What was changed in the merged ones since is dropped with them."""
        for parent, child, module in self.modules:
            setattr(parent, child, module)


def merge_lora(model: nn.Module) -> Merged:
    """Replace every adapted module by a plain one with the update in its weights, in new memory: drop what is returned and the old ones are freed.

    Sums are in at least fp32 and rounded once to the weight's dtype. Packed experts are packed again, which rounds: an update smaller than MXFP4's steps is lost.
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for child, module in list(parent.named_children()):
            if isinstance(module, LoraLinear | LoraExperts):
                plain = module.merged() if isinstance(module, LoraLinear) else merged_experts(module)
                setattr(parent, child, plain)
                replaced.append((parent, child, module))
    return Merged(tuple(replaced))
