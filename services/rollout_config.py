"""The `[rollout]` section of a run's file. No torch is imported here."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from driftline.services.policy_config import Device, Section

__all__ = ["EngineKind", "PolicyUpdate", "RolloutConfig", "Speculation", "SpeculationRule"]


class PolicyUpdate(StrEnum):
    """What an engine does with running sequences when a version arrives."""

    IN_FLIGHT = "in_flight"
    DRAIN = "drain"
    INTERRUPT = "interrupt"


class Speculation(StrEnum):
    """Who drafts: nobody, the text before (n-grams), or a trained drafter."""

    OFF = "off"
    NGRAM = "ngram"
    DRAFTER = "drafter"


class SpeculationRule(StrEnum):
    """MATCH draws every token as if nothing had been drafted, and drafts save steps where they agree; REJECTION accepts more of them, on another path of the
    same distribution."""

    MATCH = "match"
    REJECTION = "rejection"


class EngineKind(StrEnum):
    """Ours, or a server of another system that samples for us."""

    DRIFTLINE = "driftline"
    VLLM = "vllm"
    SGLANG = "sglang"


class RolloutConfig(Section):
    """`advance_s`, `read_s`: how long a move to a newer policy by deltas, and reading a whole version, may take.

    `cache_mb`, `host_cache_mb`: memory for cached tokens and states on the device (0: by what is free) and, behind it, on the host. `prefill_tokens`: at most so
    many prompt tokens are computed beside a step of decoding. `queue_mb`: requests that wait, at most. `drafter`: a directory of `driftline drafter train`.
    `engine_files`: a directory that the server at `engine_url` reads too; versions are laid there.
    """

    engines: int = Field(default=2, ge=1, le=1024)
    max_batch: int = Field(default=64, ge=1)
    cache_mb: int = Field(default=0, ge=0)
    host_cache_mb: int = Field(default=0, ge=0)
    prefix_cache: bool = True
    prefill_tokens: int = Field(default=2048, ge=64)
    queue_mb: int = Field(default=256, ge=1)
    speculation: Speculation = Speculation.OFF
    speculation_rule: SpeculationRule = SpeculationRule.MATCH
    draft_tokens: int = Field(default=3, ge=1, le=15)
    drafter: str = ""
    cuda_graphs: bool = True
    engine: EngineKind = EngineKind.DRIFTLINE
    engine_url: str = ""
    engine_files: str = ""
    policy_update: PolicyUpdate = PolicyUpdate.IN_FLIGHT
    threads: int = Field(default=1, ge=1)
    device: Device = "cpu"
    data_failures: int = Field(default=2, ge=1)
    advance_s: float = Field(default=120.0, gt=0)
    read_s: float = Field(default=600.0, gt=0)

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.speculation is Speculation.DRAFTER and not self.drafter:
            raise ValueError("speculation = 'drafter' needs rollout.drafter: a directory that driftline drafter train wrote; or use 'ngram'")
        if (self.engine is EngineKind.DRIFTLINE) != (not self.engine_url):
            raise ValueError(f"engine = '{self.engine}' with engine_url = '{self.engine_url}': give a server's address with engine = 'vllm' or 'sglang', and only with these")
        if self.engine_url and not self.engine_files:
            raise ValueError(f"engine = '{self.engine}' has no engine_files: name a directory that the server at {self.engine_url} reads too")
        return self
