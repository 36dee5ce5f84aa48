"""Adapters as PEFT keeps them: a directory of `adapter_config.json` and `adapter_model.safetensors`, read whole or refused, written whole or not at all.

    M                       base_model.model.M.lora_A.weight [r, in]   base_model.model.M.lora_B.weight [out, r]
    P.experts.w1            base_model.model.P.experts.<e>.w1.lora_A.weight, one linear for each expert

The configuration says what is in no tensor: alpha, the scaling, and patterns of modules with another alpha. What is not plain LoRA of linear layers is refused by
its field. Bits stay as they are. Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.lora.adapter import Adapter, Scaling, Update
from driftline.models.lora.names import EXPERT, apart, text_model_s

__all__ = ["CONFIG", "WEIGHTS", "read_peft", "write_peft"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_TENSOR = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")

_COPIES = (".base_layer.weight", "embed_tokens.weight", "lm_head.weight")
"""What PEFT saves of the base beside an adapter whose targets are the head or the embedding, unless told not to."""

_PLAIN: Mapping[str, object] = {
    "use_dora": False, "bias": "none", "modules_to_save": None, "fan_in_fan_out": False, "target_parameters": None, "layer_replication": None,
    "trainable_token_indices": None, "lora_bias": False, "use_qalora": False, "use_bdlora": None, "alora_invocation_tokens": None, "arrow_config": None,
    "exclude_modules": None, "megatron_config": None,
}
"""What a configuration may say and still be nothing but scale times B A beside linear layers."""

_HARMLESS = ("exclude_modules", "megatron_config")
"""They say how an adapter was made, and not what it computes."""


def read_peft(directory: str | Path) -> Adapter:
    """The adapter in a directory, on the CPU in the files' dtypes; what is of a multimodal model's text model under the names of that alone.

    Raises ConfigError for a missing or foreign file, IntegrityError for tensors that do not fit.
    """
    place = Path(directory)
    document = _document(place / CONFIG)
    try:
        tensors = load_file(place / WEIGHTS)
    except FileNotFoundError:
        raise ConfigError("no such file", field="adapter", value=str(place / WEIGHTS), remedy="an adapter is adapter_config.json and adapter_model.safetensors") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"not a readable safetensors file: {error}", field="adapter", value=str(place / WEIGHTS), remedy="copy it again from its source") from error
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.match(name)
        if found is None:
            copied = name.endswith(_COPIES)
            raise ConfigError("a copy of the base's weights, which an adapter is not" if copied else "not the A or B of a low-rank update of a linear layer",
                              field=str(place / WEIGHTS), value=name,
                              remedy="save it again with PEFT's save_pretrained(save_embedding_layers=False)" if copied
                              else "only plain LoRA is read: merge it with PEFT's merge_and_unload() first")
        halves.setdefault(found["module"], {})[found["side"]] = tensor
    scaling = Scaling.ROOT if document.get("use_rslora") else Scaling.RANK
    alpha, patterns = float(document["lora_alpha"]), dict(document.get("alpha_pattern") or {})
    updates = {}
    for module, sides in sorted(halves.items()):
        if sides.keys() != {"A", "B"}:
            raise IntegrityError(f"only lora_{min(sides)} is there", field=str(place / WEIGHTS), value=module, remedy="an update is A and B")
        updates[text_model_s(module)] = Update(sides["A"], sides["B"], _matched(patterns, module, alpha), scaling)
    if not updates:
        raise IntegrityError("holds no tensor", field="adapter", value=str(place / WEIGHTS), remedy="an adapter has an update for at least one module")
    base = document.get("base_model_name_or_path")
    return Adapter(_stacked(updates), base if isinstance(base, str) else "")


def write_peft(adapter: Adapter, directory: str | Path, *, linears: Collection[str] = ()) -> None:
    """Write the adapter into a directory, in place of one that is there. linears: the names of all of its model's linear layers, where they are known: targets are
    then named by their last parts if that means the same modules, as people write them. Raises ConfigError when its updates are of both scalings."""
    place = Path(directory)
    plain = apart(adapter.updates)
    scalings = {update.scaling for update in plain.values()}
    if len(scalings) != 1:
        raise ConfigError("one adapter_config.json has one scaling", field="adapter", value=sorted(scalings), remedy="write two adapters")
    ranks, alphas = ({module: getattr(update, what) for module, update in plain.items()} for what in ("rank", "alpha"))
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    content: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": adapter.base or None, "inference_mode": True, "bias": "none",
        "r": rank, "lora_alpha": _whole(alpha), "lora_dropout": 0.0, "fan_in_fan_out": False, "use_rslora": scalings == {Scaling.ROOT}, "use_dora": False,
        "modules_to_save": None, "target_modules": _targets(plain, linears),
        "rank_pattern": {f"^{re.escape(module)}$": value for module, value in sorted(ranks.items()) if value != rank},
        "alpha_pattern": {f"^{re.escape(module)}$": _whole(value) for module, value in sorted(alphas.items()) if value != alpha},
    }
    tensors = {f"base_model.model.{module}.lora_{side}.weight": half.detach().cpu().contiguous().clone()
               for module, update in plain.items() for side, half in (("A", update.a), ("B", update.b))}
    partial = [place / f".{name}.partial" for name in (CONFIG, WEIGHTS)]
    try:
        place.mkdir(parents=True, exist_ok=True)
        partial[0].write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(tensors, partial[1], metadata={"format": "pt"})
        (place / CONFIG).unlink(missing_ok=True)  # without it nothing reads the old weights as the new ones
        os.replace(partial[1], place / WEIGHTS)
        os.replace(partial[0], place / CONFIG)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", field="adapter", value=str(place), remedy="name another place, or free space there") from error
    finally:
        for path in partial:
            if path.exists():
                path.unlink()


def _document(path: Path) -> dict[str, Any]:
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no such file", field="adapter", value=str(path), remedy="name the directory of an adapter, with adapter_config.json in it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"not a readable JSON file: {error}", field="adapter", value=str(path), remedy="copy it again from its source") from error
    if not isinstance(document, dict) or document.get("peft_type") != "LORA":
        raise ConfigError("not LoRA's", field="adapter_config.json peft_type", value=document.get("peft_type") if isinstance(document, dict) else None,
                          remedy="other adapters are not read: merge it with PEFT first")
    for key, plain in _PLAIN.items():
        if key not in _HARMLESS and document.get(key, plain) not in (plain, None, False, []):
            raise ConfigError("not plain LoRA", field=f"adapter_config.json {key}", value=document[key],
                              remedy="merge it with PEFT's merge_and_unload() first, and take the merged model")
    alphas = {"lora_alpha": document.get("lora_alpha"), **{f"alpha_pattern {key}": value for key, value in (document.get("alpha_pattern") or {}).items()}}
    for field, alpha in alphas.items():
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not alpha > 0:
            raise ConfigError("not a scale", field=f"adapter_config.json {field}", value=alpha, remedy="a number above 0")
    return document


def _matched(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that is the module's name or, from a dot on, its end, as PEFT matches them."""
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return float(value)
        except re.error as error:
            raise ConfigError(f"not a regular expression: {error}", field="adapter_config.json alpha_pattern", value=pattern, remedy="name modules") from error
    return default


def _stacked(updates: Mapping[str, Update]) -> dict[str, Update]:
    """One update for each matrix that the experts of a layer have: ranks below the largest and experts between the adapted ones get zeros. How many more there are no
    file says; the model does when it is put there."""
    out: dict[str, Update] = {}
    members: dict[str, dict[int, Update]] = {}
    for module, update in updates.items():
        found = EXPERT.match(module)
        if found is None:
            out[module] = update
        else:
            members.setdefault(f"{found['experts']}.{found['which']}", {})[int(found["number"])] = update
    counts: dict[str, int] = {}
    for name, parts in members.items():
        experts = name.rpartition(".")[0]
        counts[experts] = max(counts.get(experts, 0), max(parts) + 1)
    for name, parts in members.items():
        out[name] = _stack(name, parts, counts[name.rpartition(".")[0]])
    return out


def _stack(name: str, parts: Mapping[int, Update], count: int) -> Update:
    first = parts[min(parts)]
    rank = max(update.rank for update in parts.values())
    largest = next(update for update in parts.values() if update.rank == rank)
    a = first.a.new_zeros(count, rank, first.a.shape[1])
    b = first.b.new_zeros(count, first.b.shape[0], rank)
    for number, update in parts.items():
        if update.shape != first.shape or update.a.dtype != first.a.dtype:
            raise IntegrityError("experts of one layer have one shape and dtype", field=f"{name} of expert {number}", value=update.shape, remedy=f"expected {first.shape}")
        ratio = update.scale / largest.scale
        if math.frexp(ratio)[0] != 0.5:  # only a power of two can be taken into B without rounding it
            raise ConfigError("experts of one layer have one scale here", field=f"{name} of expert {number}", value=update.scale,
                              remedy=f"expected {largest.scale}: give them one rank and one alpha, or merge it with PEFT first")
        a[number, : update.rank] = update.a
        b[number, :, : update.rank] = update.b * ratio
    return Update(a, b, largest.alpha, largest.scaling)


def _targets(adapted: Collection[str], linears: Collection[str]) -> list[str]:
    modules, known = set(adapted), set(linears)
    leaves = {module.rpartition(".")[2] for module in modules}
    if modules <= known and not any(module.rpartition(".")[2] in leaves for module in known - modules):
        return sorted(leaves)
    return sorted(modules)


def _whole(alpha: float) -> int | float:
    return int(alpha) if float(alpha).is_integer() else alpha
