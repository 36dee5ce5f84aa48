"""What a learner's step needs of its device, part by part, before anything is allocated; and a refusal in words where it cannot fit.

Weights, masters, moments and gradients are counted exactly, from the model's names and shapes. Activations are estimated for the kernels, which keep their inputs:
what projections make and what attention and the products of gates leave, by the kind of layer; the backward pass then has one layer's again, and its
gradients. What the allocator loses between tensors, and what a library takes for itself, is `MARGIN` of the device. On a CPU the references keep more, and nothing is refused.
Beside the steps of `benchmarks/learner_step.py` on an H200, sums were 1.07 to 1.43 times the allocator's peaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

import torch
from torch import nn

from driftline.kernels.moe.activations import Activations
from driftline.kernels.moe.forward import MICROBATCH, workspace_bytes
from driftline.messages.errors import ConfigError
from driftline.models.architectures import configuration, skeleton
from driftline.models.attention import KdaAttention, MlaAttention
from driftline.models.causal_lm import CausalLM
from driftline.models.families import model_config
from driftline.models.locate import located
from driftline.models.lora import adapt
from driftline.models.mlp import LatentMoe
from driftline.models.quantisation import Quantisation
from driftline.models.recompute import Recompute
from driftline.models.state import policy_dtype, policy_tensors
from driftline.services.config import Config, ExpertsForm
from driftline.services.policy_model import lora_of

__all__ = ["MARGIN", "Load", "MemoryPlan", "Part", "load_of", "plan_memory", "plan_of"]

MARGIN = 0.06
"""Of a device's memory: fragments between tensors, the context, cuBLAS."""

OPTIMIZER_BYTES = 3 * 4 * (1 << 24)
"""Three float32 copies of the parameters that are stepped together (`trainer.CHUNK_ELEMENTS`)."""

CHANGES_BYTES = 2 * (1 << 28) * 16 // 10
"""Two batches of changes on their way to the host (`device_delta.BATCH_BYTES`), and their scratch."""

GIB = 2**30


class Part(StrEnum):
    WEIGHTS = "weights"
    MASTERS = "masters"
    MOMENTS = "moments"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    BACKWARD = "backward"
    CACHES = "caches"
    PROBE = "probe"
    WORKSPACE = "workspace"


@dataclass(frozen=True)
class Load:
    """The largest micro-batch: `tokens` forwarded together, of `sequences` completions; the longest prompt and completion in tokens."""

    tokens: int
    sequences: int
    prompt: int
    completion: int

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "prompt", "completion"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: a micro-batch has at least one")


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each part at its largest, and what they were reckoned for."""

    parts: Mapping[Part, int]
    load: Load
    recompute: Recompute

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def lines(self) -> list[str]:
        """One a part, largest first, and the sum."""
        ordered = sorted(self.parts.items(), key=lambda item: -item[1])
        return [f"{part:<12} {size / GIB:10.3f} GiB" for part, size in ordered if size] + [f"{'together':<12} {self.total / GIB:10.3f} GiB"]

    def require(self, memory: int, device: str) -> None:
        """Raises ConfigError, with all parts and what would help, when `memory` bytes of the device are too few."""
        if self.total <= memory * (1 - MARGIN):
            return
        raise ConfigError(
            f"a step of this learner does not fit {device}, which has {memory / GIB:.1f} GiB: " + "; ".join(" ".join(line.split()) for line in self.lines()),
            field="learner", value=f"{self.load.tokens} tokens in a micro-batch", remedy=self._remedy(memory * (1 - MARGIN)),
        )

    def _remedy(self, memory: float) -> str:
        by_tokens = self.parts[Part.ACTIVATIONS] + self.parts[Part.BACKWARD] + self.parts[Part.CACHES]
        if self.total - by_tokens > memory:
            if self.parts[Part.MASTERS] > self.parts[Part.WEIGHTS] // 4:
                return "train adapters only (learner.lora_rank): masters, moments and gradients are 16 bytes for each trained parameter"
            return "the weights alone leave no room: use a larger device, or experts packed to MXFP4 (policy.experts = \"pack\")"
        if self.recompute is Recompute.NONE:
            return "keep layers' inputs only (learner.recompute = \"layers\"), or lower learner.micro_batch_tokens"
        return "lower learner.micro_batch_tokens"


def plan_memory(model: CausalLM, load: Load, *, dtype: torch.dtype, recompute: Recompute, probed: bool = False) -> MemoryPlan:
    """`model`: with its adapters, anywhere, the meta device too. `dtype`: what its parameters are held in; what a release keeps in float32 is.

    `probed`: a numerics probe holds what is trained once more, as it is held here.
    """
    named = list(policy_tensors(model))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    largest = max((p.numel() for p in model.parameters() if p.requires_grad), default=0)
    held = {name: t.numel() * _held(name, t, dtype).itemsize for name, t in named}
    again = sum(held[name] for name, p in model.named_parameters() if p.requires_grad)
    layers = [_Layer.of(layer, dtype.itemsize, getattr(model.config, "moe_intermediate_size", 0)) for layer in _layers(model)]
    hidden = model.config.hidden_size * dtype.itemsize
    kept = [layer.stream(hidden) if recompute is Recompute.LAYERS else layer.token for layer in layers]
    columns = [layer.column for layer in layers]
    grown = max(columns) if recompute is Recompute.LAYERS else sum(columns)  # of prompt and completion together: a layer's last no longer than its activations
    widest = max(layer.token for layer in layers)
    return MemoryPlan(MappingProxyType({
        Part.WEIGHTS: sum(held.values()),
        Part.PROBE: again if probed else 0,
        Part.MASTERS: 4 * trained,
        Part.MOMENTS: 8 * trained,
        Part.GRADIENTS: 4 * trained + 2 * largest * dtype.itemsize,
        Part.ACTIVATIONS: load.tokens * (sum(kept) + hidden + _bank(model) * hidden),
        Part.BACKWARD: load.tokens * (widest + 5 * hidden + _bank(model) * hidden),
        Part.CACHES: load.sequences * (sum(2 * layer.state + load.prompt * layer.column for layer in layers) + (load.prompt + load.completion) * grown),
        Part.WORKSPACE: OPTIMIZER_BYTES + CHANGES_BYTES + max(layer.workspace(load.tokens) for layer in layers),
    }), load, recompute)


def plan_of(config: Config, dtype: torch.dtype) -> MemoryPlan:
    """Of a run's learner, from the checkpoint's configuration alone; `dtype`: what it computes in. Raises as `model_config`."""
    described, place = model_config(config.policy.init), located(config.policy.init)
    stored = configuration(place)[1] if place.is_dir() else Quantisation.NONE
    form = {ExpertsForm.KEEP: stored, ExpertsForm.UNPACK: Quantisation.NONE, ExpertsForm.PACK: Quantisation.MXFP4}[config.policy.experts]
    model = skeleton(described, form)
    if config.learner.lora_rank:
        adapt(model, lora_of(config))
    return plan_memory(model, load_of(config), dtype=dtype, recompute=Recompute(config.learner.recompute), probed=config.learner.probe_members > 0)


def load_of(config: Config) -> Load:
    """The largest micro-batch of a run. Prompts, whose length no setting says, are taken to be as long as completions."""
    completion, members, learner = config.sampling.max_tokens, config.run.group_size, config.learner
    if learner.micro_batch_tokens:
        most = min(config.run.groups_per_step * members, max(members, learner.micro_batch_tokens // completion))
        return Load(learner.micro_batch_tokens, most, completion, completion)
    groups = min(learner.micro_batch_groups, config.run.groups_per_step)
    return Load(groups * (members + 1) * completion, groups * members, completion, completion)


@dataclass(frozen=True)
class _Layer:
    """Bytes: `token` kept of a token; `state` and `column` cached of a sequence, and of one of its tokens. `routed`: top-k, latent and inner width of its
    experts."""

    token: int
    state: int
    column: int
    routed: tuple[int, int, int] | None

    @classmethod
    def of(cls, layer: nn.Module, size: int, inner: int) -> _Layer:
        attention = layer.get_submodule("self_attn")
        linears = {name: m for name, m in layer.named_modules() if isinstance(m, nn.Linear) and m.weight.shape[0] > 1}
        outputs = sum(m.weight.shape[0] for m in linears.values())
        # Products and attention's results are kept as the inputs of what follows them; the other inputs are rows of the stream, or its norms.
        inputs = sum(m.weight.shape[1] for name, m in linears.items() if name.endswith(("o_proj", "down_proj")))
        hidden = min(m.weight.shape[1] for name, m in linears.items() if name.endswith(("q_proj", "q_a_proj")))
        moe = next((m for m in layer.modules() if isinstance(m, LatentMoe)), None)
        routed = None
        if moe is not None:
            routed = (moe.top_k, moe.routed_expert_down_proj.weight.shape[0], inner)
        token = size * (outputs + inputs + 3 * hidden) + (12 * moe.top_k if moe is not None else 0)
        if isinstance(attention, KdaAttention):  # and what the convolution made of q, k and v, and the result before its norm
            return cls(token + size * 4 * attention.heads * attention.dim, 4 * attention.heads * attention.dim**2, 0, routed)
        if isinstance(attention, MlaAttention):  # and the result in float32, rounded, and its gate
            return cls(token + size * 4 * attention.heads * attention.v_dim, 0, size * _rows(attention, "kv_a_proj_with_mqa"), routed)
        keys = _rows(attention, "k_proj")  # and queries and keys before they were turned
        return cls(token + size * (_rows(attention, "q_proj") + keys), 0, size * (keys + _rows(attention, "v_proj")), routed)

    def stream(self, hidden: int) -> int:
        """Kept of a token when the layer is run again: prefix and last output, and the experts it chose."""
        return 2 * hidden + (8 * self.routed[0] if self.routed else 0)

    def workspace(self, tokens: int) -> int:
        if self.routed is None:
            return 0
        top_k, latent, inner = self.routed
        return 2 * workspace_bytes(min(tokens, MICROBATCH), top_k, latent, inner, Activations.SAME)


def _layers(model: CausalLM) -> Iterator[nn.Module]:
    yield from (module for module in model.modules() if hasattr(module, "self_attn"))


def _rows(module: nn.Module, name: str) -> int:
    """Outputs of one of its projections."""
    return int(module.get_submodule(name).get_parameter("weight").shape[0])


def _bank(model: CausalLM) -> int:
    """Rows of a token in K3's bank of block sums; its gradient has as many."""
    return sum(getattr(layer, "opens_block", False) for layer in _layers(model))


def _held(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(policy_dtype(name, dtype), dtype) if tensor.is_floating_point() else tensor.dtype
