"""Adapters: a policy's low-rank updates under the names PEFT uses, back again, and folded into the weights they update.

    ours                                      PEFT's (https://huggingface.co/docs/peft/developer_guides/checkpoint)
    M.lora_A [r, in]   M.lora_B [out, r]      base_model.model.M.lora_A.weight   base_model.model.M.lora_B.weight
    P.experts.delta.w1.lora_A [E, r, in]      base_model.model.P.experts.<e>.w1.lora_A.weight [r, in] for each expert

The bits stay as they are. The scale is alpha / r, and alpha is in no tensor: it has to come with them. Merging computes
W + (B A) alpha / r in float32 and rounds once to W's dtype, as the model that trained them does.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.policy_store.floats import from_float32, to_float32
from driftline.policy_store.tensor import HostTensor, Layout

__all__ = ["AdapterConfig", "Source", "from_peft", "is_adapter", "merged", "modules", "to_peft"]

PREFIX: Final = "base_model.model."

_OURS = re.compile(r"^(?P<module>.+)\.lora_(?P<side>[AB])$")
_STACKED = re.compile(r"^(?P<experts>.+\.experts)\.delta\.(?P<which>w[123])$")
_EXPERT = re.compile(r"^(?P<experts>.+\.experts)\.(?P<number>0|[1-9][0-9]*)\.(?P<which>w[123])$")
_PEFT = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")

_PLAIN: Final[Mapping[str, object]] = {
    "use_dora": False, "use_rslora": False, "bias": "none", "modules_to_save": None, "fan_in_fan_out": False, "alpha_pattern": {},
    "target_parameters": None, "layer_replication": None, "trainable_token_indices": None, "lora_bias": False, "use_qalora": False, "use_bdlora": False,
}
"""What an adapter may say and still be alpha / r times B A of linear layers."""


class Source(NamedTuple):
    """Where a tensor under a name of the other side comes from: a tensor of ours, whole or one expert's part."""

    name: str
    expert: int | None

    def of(self, tensor: HostTensor) -> HostTensor:
        """Its bytes, a view."""
        if self.expert is None:
            return tensor
        part = Layout(tensor.dtype, tensor.shape[1:])
        return HostTensor(part.dtype, part.shape, tensor.data[self.expert * part.nbytes : (self.expert + 1) * part.nbytes])


def is_adapter(name: str) -> bool:
    return _OURS.match(name) is not None


def to_peft(layouts: Mapping[str, Layout]) -> dict[str, tuple[Layout, Source]]:
    """PEFT's tensors, each with its layout and where it comes from."""
    found: dict[str, tuple[Layout, Source]] = {}
    for name, layout in layouts.items():
        parts = _OURS.match(name)
        if parts is None:
            continue
        for module, part, source in _modules_of(parts["module"], name, layout):
            found[f"{PREFIX}{module}.lora_{parts['side']}.weight"] = (part, source)
    return found


def _modules_of(module: str, name: str, layout: Layout) -> Iterator[tuple[str, Layout, Source]]:
    stacked = _STACKED.match(module)
    if stacked is None:
        yield module, layout, Source(name, None)
        return
    for expert in range(layout.shape[0]):
        yield f"{stacked['experts']}.{expert}.{stacked['which']}", Layout(layout.dtype, layout.shape[1:]), Source(name, expert)


def from_peft(layouts: Mapping[str, Layout]) -> dict[str, tuple[Layout, tuple[str, ...]]]:
    """Our tensors, each with its layout and PEFT's that make it, end to end. ConfigError on a tensor that is no low-rank update."""
    found: dict[str, tuple[Layout, tuple[str, ...]]] = {}
    experts: dict[str, dict[int, str]] = {}
    for name, layout in layouts.items():
        parts = _PEFT.match(name)
        if parts is None:
            raise ConfigError("not the A or B of a low-rank update of a linear layer", field="tensor", value=name,
                              remedy="only plain LoRA is taken in: merge it with PEFT's merge_and_unload() first")
        ours = f"{parts['module']}.lora_{parts['side']}"
        found[ours] = (layout, (name,))
        expert = _EXPERT.match(parts["module"])
        if expert is not None:
            stack = f"{expert['experts']}.delta.{expert['which']}.lora_{parts['side']}"
            experts.setdefault(stack, {})[int(expert["number"])] = ours
    for stack, members in experts.items():
        one = found[members[min(members)]][0]
        if sorted(members) == list(range(len(members))) and all(found[ours][0] == one for ours in members.values()):
            names = tuple(found.pop(members[number])[1][0] for number in range(len(members)))
            found[stack] = (Layout(one.dtype, (len(members), *one.shape)), names)
    return found


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says of a plain LoRA adapter: of each module its rank, and one alpha."""

    alpha: float
    ranks: Mapping[str, int]
    base: str = ""

    @classmethod
    def of(cls, layouts: Mapping[str, Layout], alpha: float | None, base: str = "") -> AdapterConfig:
        """From our adapters' shapes. ConfigError without alpha, which is in no tensor; IntegrityError on an A without its B."""
        if alpha is None:
            raise ConfigError("the weights do not say it, and without it the adapters have no scale", field="lora_alpha", value=None,
                              remedy="give --lora-alpha, or --run-file with the run's settings (learner.lora_alpha; its rank by default)")
        return cls(alpha, {module: pair.rank for module, pair in modules(layouts).items()}, base)

    @classmethod
    def parse(cls, content: bytes) -> AdapterConfig:
        """Of a file somebody wrote. ConfigError when it is not plain LoRA. `ranks` is empty: shapes say them."""
        document = json.loads(content)
        if not isinstance(document, dict) or document.get("peft_type") != "LORA":
            raise ConfigError("not LoRA's", field="adapter_config.json peft_type", value=document.get("peft_type") if isinstance(document, dict) else None,
                              remedy="other adapters are not taken in: merge it with PEFT first")
        for key, plain in _PLAIN.items():
            if document.get(key, plain) not in (plain, None):
                raise ConfigError("not plain LoRA", field=f"adapter_config.json {key}", value=document[key],
                                  remedy="merge it with PEFT's merge_and_unload() first, and take the merged model")
        alpha, base = document.get("lora_alpha"), document.get("base_model_name_or_path")
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not alpha > 0:
            raise ConfigError("not a scale", field="adapter_config.json lora_alpha", value=alpha, remedy="a number above 0")
        return cls(float(alpha), {}, base if isinstance(base, str) else "")

    def document(self, weights: Iterable[str]) -> bytes:
        """adapter_config.json. `weights`: the names of the base's weights, where they are known."""
        common = Counter(self.ranks.values()).most_common(1)[0][0]
        alpha = int(self.alpha) if self.alpha.is_integer() else self.alpha
        # With another rank PEFT would scale by alpha / that rank, which is what ours do too.
        content: dict[str, Any] = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": self.base or None, "inference_mode": True, "bias": "none",
            "r": common, "lora_alpha": alpha, "lora_dropout": 0.0, "fan_in_fan_out": False, "use_rslora": False, "use_dora": False,
            "modules_to_save": None, "target_modules": targets(self.ranks, weights),
            "rank_pattern": {module: rank for module, rank in sorted(self.ranks.items()) if rank != common}, "alpha_pattern": {},
        }
        return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"


def targets(adapted: Iterable[str], weights: Iterable[str]) -> list[str]:
    """PEFT's target_modules: last parts of names where that means exactly the adapted modules, and whole names otherwise."""
    modules_ = set(adapted)
    plain = {name.removesuffix(".weight") for name in weights if name.endswith(".weight")}
    leaves = {module.rpartition(".")[2] for module in modules_}
    if plain and modules_ <= plain and not any(module.rpartition(".")[2] in leaves for module in plain - modules_):
        return sorted(leaves)
    return sorted(modules_)


class Pair(NamedTuple):
    """The two halves of one module's update, and its rank."""

    a: Source
    b: Source
    rank: int


def modules(layouts: Mapping[str, Layout]) -> dict[str, Pair]:
    """The updates by the module they belong to, stacked experts one by one. IntegrityError when halves do not fit."""
    halves: dict[str, dict[str, tuple[Layout, Source]]] = {}
    for name, entry in to_peft(layouts).items():
        parts = _PEFT.match(name)
        assert parts is not None  # made just now
        halves.setdefault(parts["module"], {})[parts["side"]] = entry
    found: dict[str, Pair] = {}
    for module, sides in sorted(halves.items()):
        if sides.keys() != {"A", "B"}:
            raise IntegrityError(f"only lora_{min(sides)} is there", field="module", value=module, remedy="an update is A and B")
        (a, of_a), (b, of_b) = sides["A"], sides["B"]
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise IntegrityError(f"A {list(a.shape)} and B {list(b.shape)} are no update of a linear layer", field="module", value=module)
        found[module] = Pair(of_a, of_b, a.shape[0])
    return found


def merged(weight: HostTensor, a: HostTensor, b: HostTensor, alpha: float) -> HostTensor:
    """weight [out, in] + (b [out, r] a [r, in]) alpha / r, rounded to the weight's dtype. IntegrityError when they do not fit."""
    rank = a.shape[0]
    if weight.shape != (b.shape[0], a.shape[1]):
        raise IntegrityError(f"B A is {[b.shape[0], a.shape[1]]}", field="weight", value=list(weight.shape), remedy="the adapter is of another base")
    update: npt.NDArray[np.float32] = to_float32(b) @ to_float32(a)
    update *= np.float32(alpha / rank)
    update += to_float32(weight)
    return from_float32(update, weight.dtype)
