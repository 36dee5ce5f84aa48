"""How a head is turned by its position: frequencies of the schemes that depend on nothing but a position, in the fp32 steps the public models were trained with.

A scheme whose frequencies follow the length of the sequence (`dynamic`, `longrope`) would turn cached keys other than recomputed ones, and is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from driftline.messages.errors import ConfigError

__all__ = ["Rope", "RopeType", "amplitude", "frequencies"]


class RopeType(StrEnum):
    """`rope_type` of the files."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


_NEEDS = {
    RopeType.DEFAULT: (), RopeType.LINEAR: ("factor",), RopeType.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    RopeType.YARN: ("factor", "original_max_position_embeddings"),
}
_TAKES = {
    RopeType.YARN: ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


class Rope(BaseModel):
    """A scheme and its numbers, under the files' names; those a scheme does not use are None."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rope_type: RopeType = RopeType.DEFAULT
    rope_theta: float = Field(default=10000.0, gt=1.0)
    factor: float | None = Field(default=None, gt=0.0)
    low_freq_factor: float | None = Field(default=None, gt=0.0)
    high_freq_factor: float | None = Field(default=None, gt=0.0)
    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    attention_factor: float | None = Field(default=None, gt=0.0)
    beta_fast: float | None = Field(default=None, gt=0.0)
    beta_slow: float | None = Field(default=None, gt=0.0)
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        needed = [name for name in _NEEDS[self.rope_type] if getattr(self, name) is None]
        if needed:
            raise ValueError(f"rope_type = {self.rope_type} needs {', '.join(needed)}")
        if self.low_freq_factor is not None and self.high_freq_factor is not None and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor = {self.low_freq_factor} must be below high_freq_factor = {self.high_freq_factor}")
        return self

    @classmethod
    def of(cls, body: Mapping[str, Any], rope_theta: float, at: str) -> Rope:
        """From an object of a config.json: `rope_parameters`, or `rope_scaling` with `rope_theta` beside it. `rope_theta`: the family's, where the file says none.

        Raises ConfigError for a scheme, or a field of one, that is not computed here.
        """
        place = "rope_parameters" if body.get("rope_parameters") is not None else "rope_scaling"
        found = body.get(place) or {}
        if not isinstance(found, Mapping):
            raise ConfigError("not an object of fields", field=f"{at}: {place}", value=found, remedy="restore the file from its source")
        said = dict(found)
        # Files of some releases have the name twice; the newer name counts.
        kind = said.pop("rope_type", None) or said.get("type") or RopeType.DEFAULT.value
        said.pop("type", None)
        theta = said.pop("rope_theta", None)
        theta = theta if theta is not None else body.get("rope_theta")
        if not isinstance(kind, str) or kind not in set(RopeType):
            raise ConfigError("no rotation of this kind: one that follows the length of the sequence turns cached keys otherwise than recomputed ones",
                              field=f"{at}: {place}.rope_type", value=kind, remedy=f"one of {', '.join(RopeType)}")
        if said.pop("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError("whole heads are rotated", field=f"{at}: {place}.partial_rotary_factor", value=found["partial_rotary_factor"],
                              remedy="use a checkpoint with partial_rotary_factor = 1.0")
        scheme = RopeType(kind)
        if "original_max_position_embeddings" in _NEEDS[scheme]:
            before = body.get("original_max_position_embeddings") or said.get("original_max_position_embeddings")
            said["original_max_position_embeddings"] = before if before is not None else body.get("max_position_embeddings")
        taken = {*_NEEDS[scheme], *_TAKES.get(scheme, ())}
        extra = sorted(name for name, value in said.items() if name not in taken and value is not None)
        # A plain rotation with a scheme's leftovers means the plain one; anything else unread could change the function.
        if extra and not (scheme is RopeType.DEFAULT and set(extra) <= {"factor", "original_max_position_embeddings"}):
            raise ConfigError(f"not a field of rope_type = {scheme} here", field=f"{at}: {place}.{extra[0]}", value=said[extra[0]],
                              remedy=f"fields of it are {', '.join(sorted(taken)) or 'none'}")
        try:
            return cls.model_validate({"rope_type": scheme, "rope_theta": rope_theta if theta is None else theta,
                                       **{name: said[name] for name in taken if said.get(name) is not None}})
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(first["msg"], field=f"{at}: {place}{''.join(f'.{part}' for part in first['loc'])}", value=first.get("input"),
                              remedy="restore the file from its source") from error

    def document(self) -> tuple[float, dict[str, Any] | None]:
        """`rope_theta` and `rope_scaling` of a config.json."""
        scaling = {name: value for name, value in self.model_dump(mode="json").items() if value is not None and name != "rope_theta"}
        return self.rope_theta, None if self.rope_type is RopeType.DEFAULT else scaling


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """fp32 [head_dim / 2] on the CPU: radians a position turns each pair of a head's columns by."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    plain = 1.0 / (rope.rope_theta**exponent)
    match rope.rope_type:
        case RopeType.LINEAR:
            return plain / _known(rope.factor)
        case RopeType.LLAMA3:
            return _llama3(rope, plain)
        case RopeType.YARN:
            return _yarn(rope, head_dim)
        case _:
            return plain


def amplitude(rope: Rope) -> float:
    """What cosine and sine are multiplied by; 1 but for `yarn`."""
    if rope.rope_type is not RopeType.YARN:
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = _known(rope.factor)

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    return scale(rope.mscale) / scale(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else scale(1.0)


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between mixed."""
    factor, low, high = _known(rope.factor), _known(rope.low_freq_factor), _known(rope.high_freq_factor)
    context = _known(rope.original_max_position_embeddings)
    wave = 2 * math.pi / plain
    share = (context / wave - low) / (high - low)
    mixed = (1 - share) * plain / factor + share * plain
    kept = torch.where(wave > context / low, plain / factor, plain)
    return torch.where((wave >= context / high) & (wave <= context / low), mixed, kept)


def _yarn(rope: Rope, head_dim: int) -> torch.Tensor:
    """Columns that turn often over the original context are kept, those that turn less than once stretched, with a ramp between (arXiv:2309.00071)."""
    context, theta = _known(rope.original_max_position_embeddings), rope.rope_theta

    def column(turns: float) -> float:
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = column(rope.beta_fast or 32), column(rope.beta_slow or 1)
    if rope.truncate is None or rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as the public code has it: a ramp of no width
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)
    power = theta ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)
    kept = 1 - ramp
    return 1.0 / (_known(rope.factor) * power) * (1 - kept) + 1.0 / power * kept


def _known(value: float | None) -> float:
    if value is None:
        raise ValueError("a number that this kind of rotation needs is not set; make the Rope through its constructor, which checks it")
    return value
