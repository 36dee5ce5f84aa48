"""A drafter's sizes, and the target's it was made for: another target is refused by name, before a tensor is read."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from driftline.messages.errors import ConfigError
from driftline.models.causal_lm import ModelConfig

__all__ = ["MODEL_TYPE", "DrafterConfig"]

MODEL_TYPE = "driftline_drafter"

_HEAD_DIM = 64
_REDUCED = 16_384
"""Tokens that a drafter of a larger vocabulary may draft: a head over all of K3's 163,840 would cost as much as the layer it sits on."""


class DrafterConfig(BaseModel):
    """`taps`: layers of the target whose inputs are read; its number of layers stands for what the last one leaves. `window`: positions that the drafter's
    attention sees. `draft_vocab_size`: tokens that can be drafted. Raises ConfigError."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: str = MODEL_TYPE
    target_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=2)
    vocab_size: int = Field(ge=2)
    draft_vocab_size: int = Field(ge=2)
    taps: tuple[int, ...] = Field(min_length=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    intermediate_size: int = Field(ge=1)
    window: int = Field(default=256, ge=16)
    rope_theta: float = Field(default=10_000.0, gt=0)
    rms_norm_eps: float = Field(default=1e-5, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model_type != MODEL_TYPE:
            raise ConfigError("not a drafter", field="model_type", value=self.model_type, remedy=f"a directory that driftline drafter train wrote has {MODEL_TYPE}")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(f"more tokens than the target's {self.vocab_size}", field="draft_vocab_size", value=self.draft_vocab_size, remedy="at most as many")
        if any(not 0 <= tap <= self.target_layers for tap in self.taps) or list(self.taps) != sorted(set(self.taps)):
            raise ConfigError("taps are layers of the target, ascending", field="taps", value=self.taps, remedy=f"0 to {self.target_layers}, each once")
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ConfigError("heads that do not divide", field="num_key_value_heads", value=(self.num_attention_heads, self.num_key_value_heads, self.head_dim),
                              remedy="heads in equal groups, of an even width")
        return self

    @classmethod
    def of(cls, target: ModelConfig, *, draft_vocab_size: int | None = None, taps: tuple[int, ...] | None = None, window: int = 256) -> DrafterConfig:
        """A drafter of one layer as wide as the target's; taps low, in the middle and at the end."""
        layers, width = target.num_hidden_layers, target.hidden_size
        heads = max(1, width // _HEAD_DIM)
        head_dim = _HEAD_DIM if width >= _HEAD_DIM else width // 2 * 2
        return cls(
            target_layers=layers, hidden_size=width, vocab_size=target.vocab_size, draft_vocab_size=draft_vocab_size or min(target.vocab_size, _REDUCED),
            taps=tuple(sorted({min(1, layers), layers // 2, layers})) if taps is None else taps, num_attention_heads=heads, num_key_value_heads=heads,
            head_dim=head_dim, intermediate_size=-(-8 * width // 3 // 16) * 16, window=window,
        )

    def check(self, target: ModelConfig) -> None:
        """Raises ConfigError where the target is not the one that it was made for."""
        for field, mine, theirs in (
            ("hidden_size", self.hidden_size, target.hidden_size), ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_hidden_layers", self.target_layers, target.num_hidden_layers),
        ):
            if mine != theirs:
                raise ConfigError(f"the drafter was made for a model with {mine}", field=field, value=theirs,
                                  remedy="train one for this model: driftline drafter train")
