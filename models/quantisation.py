"""In which form a checkpoint holds its routed experts. What `config.json` says is either one of these forms in full or refused: a scheme read in part would
load other weights without a word.

Only w1, w3 and w2 of the routed experts are ever packed; attention, shared experts, dense layers, latent projections, router and head keep their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from driftline.messages.errors import ConfigError

__all__ = ["Quantisation"]

_FORMAT = "mxfp4-pack-quantized"
_METHODS = ("compressed-tensors", "mxfp4")
_WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": 32, "symmetric": True, "dynamic": False}
_ACTIVATIONS = ("input_activations", "output_activations")


class Quantisation(Enum):
    """NONE: `weight` in the checkpoint's dtype. MXFP4: `weight_packed` uint8 [N, K / 2] and `weight_scale` uint8 [N, K / 32] (kernels.mxfp4.Mxfp4Weight)."""

    NONE = "none"
    MXFP4 = "mxfp4"

    @classmethod
    def of(cls, body: Mapping[str, Any], file: str) -> Quantisation:
        """What the object of a `config.json` says, in its `text_config` or beside it; NONE if nothing. Raises ConfigError naming `file` and field."""
        text = body.get("text_config")
        found = (text.get("quantization_config") if isinstance(text, Mapping) else None) or body.get("quantization_config")
        if found is None:
            return cls.NONE
        at = f"{file}: quantization_config"
        scheme = _object(found, at)
        _expect(scheme, "quant_method", _METHODS, at)
        _expect(scheme, "kv_cache_scheme", (None,), at)
        groups = _object(scheme.get("config_groups"), f"{at}.config_groups")
        if not groups:
            raise ConfigError("no group of weights", field=f"{at}.config_groups", value=groups, remedy="restore the file from its source")
        for name, value in groups.items():
            where = f"{at}.config_groups.{name}"
            group = _object(value, where)
            _expect({"format": group.get("format") or scheme.get("format")}, "format", (_FORMAT,), where, needed=True)
            weights = _object(group.get("weights"), f"{where}.weights")
            for field, only in _WEIGHTS.items():
                _expect(weights, field, (only,), f"{where}.weights", needed=field in ("num_bits", "group_size"))
            for field in _ACTIVATIONS:
                _expect(group, field, (None,), where)
        return cls.MXFP4

    def document(self) -> dict[str, Any] | None:
        """The `quantization_config` of a checkpoint in this form; None for NONE."""
        if self is Quantisation.NONE:
            return None
        return {
            "quant_method": "compressed-tensors", "format": _FORMAT, "quantization_status": "compressed", "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "format": _FORMAT, "targets": [r"re:.*block_sparse_moe\.experts\.[0-9]+\.w[123]$"],
                    "weights": {**_WEIGHTS, "strategy": "group", "scale_dtype": "torch.uint8"},
                    **dict.fromkeys(_ACTIVATIONS),
                },
            },
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj$", "re:.*routed_expert_(down|up)_proj$"],
        }


def _object(value: object, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError("not an object of fields", field=at, value=value, remedy="restore the file from its source")
    return value


def _expect(fields: Mapping[str, Any], name: str, allowed: tuple[Any, ...], at: str, *, needed: bool = False) -> None:
    if name not in fields and not needed:
        return
    value = fields.get(name)
    if not any(value == only and type(value) is type(only) for only in allowed):
        raise ConfigError(f"this decoder reads {name} = {' or '.join(repr(only) for only in allowed)} only", field=f"{at}.{name}", value=value,
                          remedy="use a checkpoint whose routed experts are MXFP4 as released, or one without quantization_config")
