"""The settings of a run's policy: what it starts from, how its versions are encoded, where they live, how long, who passes them on."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from driftline.messages.errors import ConfigError
from driftline.policy_store.forms import DeltaForm
from driftline.policy_store.location import FILE, JETSTREAM, place_of

__all__ = ["Compute", "Device", "ExpertsForm", "PolicyConfig", "PolicyStoreConfig", "RelayConfig", "Section", "anchored_store", "clash"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def clash(field: str, value: object, problem: str, remedy: str) -> ValueError:
    """A refusal with its remedy; the text survives pydantic, which wraps ValueErrors."""
    return ValueError(str(ConfigError(problem, field=field, value=value, remedy=remedy)))


Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]+)?)$")]


class Compute(StrEnum):
    """The dtype that weights are held and multiplied in: the policy's own, or float32 (of the same rounded values). `auto`: float32 on a CPU, the
    policy's on a GPU."""

    AUTO = "auto"
    POLICY = "policy"
    FLOAT32 = "float32"


class ExpertsForm(StrEnum):
    """How a model holds routed experts: as the checkpoint stores them, as plain weights, or packed to MXFP4 (which rounds, and freezes them)."""

    KEEP = "keep"
    UNPACK = "unpack"
    PACK = "pack"


class PolicyConfig(Section):
    """`init`: 'base' (shipped), a checkpoint folder, a .gguf file, or 'package:NAME', the .gguf file of an installed package. `dtype`: what versions are
    stored in.

    `store`: where the bytes of versions live: 'jetstream' (in the broker), 'file:FOLDER' (a folder all services reach) or
    's3://BUCKET/PREFIX' (`s3_endpoint`, `s3_region`; the keys come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY).

    A full is stored every `full_every` versions, and sooner when the deltas since the last one exceed `full_share` of its size."""

    init: str = "base"
    dtype: Annotated[str, Field(pattern="^(bfloat16|float32)$")] = "bfloat16"
    compute: Compute = Compute.AUTO
    experts: ExpertsForm = ExpertsForm.KEEP
    full_every: int = Field(default=10, ge=1)
    full_share: float = Field(default=1.0, gt=0)
    delta_form: DeltaForm = DeltaForm.SMALL
    store: str = JETSTREAM
    s3_endpoint: str = ""
    s3_region: str = ""

    @model_validator(mode="after")
    def _store(self) -> Self:
        try:
            place_of(self.store, endpoint=self.s3_endpoint, region=self.s3_region)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self


class RelayConfig(Section):
    """Engines that pass packs on to each other, so that the store is read about once and not by each of them. `host` is what it listens
    on and `advertise` what others call it by (empty: the host); `port` 0 takes a free one; `cache_bytes` bounds what is kept for others."""

    enabled: bool = False
    host: str = "127.0.0.1"
    advertise: str = ""
    port: int = Field(default=0, ge=0, le=65535)
    fanout: int = Field(default=4, ge=1, le=64)
    cache_bytes: int = Field(default=2 * 2**30, ge=2**20)
    wait_s: float = Field(default=10.0, gt=0)


class PolicyStoreConfig(Section):
    """Kept: the newest `keep_versions` (0 collects nothing), what is younger than `keep_s`, what is pinned, version 0 while `keep_start` (every
    recording starts there). `keep_bytes` (0: no bound) lets the oldest of these go, pins excepted, until the rest fits.
    Nothing is deleted before it was unneeded for `grace_s`. `shortcuts`: deltas over 2, 4, 8, ... versions are stored for those who
    come late. `mirror` keeps the newest `mirror_keep` versions as files in the run folder."""

    keep_versions: int = Field(default=20, ge=0)
    keep_s: float = Field(default=0.0, ge=0)
    keep_bytes: int = Field(default=0, ge=0)
    keep_start: bool = True
    grace_s: float = Field(default=30.0, ge=0)
    shortcuts: bool = True
    mirror: bool = True
    mirror_keep: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _retention(self) -> Self:
        if self.keep_versions == 0 and (self.keep_s or self.keep_bytes):
            raise clash("policy_store.keep_versions", 0, "0 collects nothing, so keep_s and keep_bytes would do nothing",
                        "set keep_versions to at least 1")
        return self


def anchored_store(store: str, base: Path) -> str:
    """A relative folder of a run file made absolute, so that a resolved copy means the same from anywhere."""
    return f"{FILE}{base / store.removeprefix(FILE)}" if store.startswith(FILE) and store != FILE else store
