"""Model files: what other tools need beside the weights (config.json, the tokenizer), kept with the run's policy.

A version is weights and nothing else; these few small files belong to all of a run's versions, so they are stored once, as one message on
`<root>.policy.files`, the newest of which counts. Names come off the wire and become file names, so only names of `KNOWN` are ever
accepted, here and from a folder: no path, no code, nothing that a loader executes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from driftline.messages.bus import Bus
from driftline.messages.errors import ConfigError, IntegrityError
from driftline.messages.registry import register
from driftline.messages.subjects import Subjects
from driftline.messages.types import Message, array_field

__all__ = ["ADAPTER_CONFIG", "CONFIG", "GENERATION", "KNOWN", "TOKENIZERS", "ModelFile", "ModelFiles", "files_in", "load_files", "store_files"]

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
TOKENIZERS: Final = frozenset({
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tiktoken.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json",
})
KNOWN: Final = TOKENIZERS | {CONFIG, GENERATION, ADAPTER_CONFIG, "preprocessor_config.json", "processor_config.json", "LICENSE"}
TOTAL_LIMIT: Final = 128 * 1024 * 1024
"""Bytes of all of them: twice the largest tokenizers there are."""


class ModelFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)

    name: str
    content: Annotated[np.ndarray, array_field("u1")]

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in KNOWN:
            raise ValueError(f"name = {value[:80]!r}: not a file that may lie beside weights")
        return value


@register
class ModelFiles(Message):
    """The files beside the weights of a run's versions. `content` of each: uint8 [size]."""

    schema_name: ClassVar[str] = "model_files"

    files: tuple[ModelFile, ...] = Field(max_length=len(KNOWN))


async def store_files(bus: Bus, run: str, files: Mapping[str, bytes]) -> None:
    """Make these the files of the run's policy. BrokerDenied without the learner's or the admin's rights."""
    message = ModelFiles(run=run, files=tuple(
        ModelFile(name=name, content=np.frombuffer(files[name], np.uint8)) for name in sorted(files)
    ))
    # A name of its own: the same files stored, replaced and stored again within the window of duplicates are three messages.
    await bus.publish(_subject(run), message, id=f"{run}/files/{uuid.uuid4().hex}")


async def load_files(bus: Bus, run: str) -> dict[str, bytes]:
    """The files of the run's policy by name; none where nobody stored any."""
    stored = await bus.last(Subjects(run).stream("POLICY"), _subject(run))
    if stored is None:
        return {}
    if not isinstance(stored.message, ModelFiles):
        raise IntegrityError("not model files", field="policy.files", value=type(stored.message).__name__)
    return {file.name: file.content.tobytes() for file in stored.message.files}


def files_in(folder: Path) -> dict[str, bytes]:
    """The files of `KNOWN` that a folder holds. ConfigError when one cannot be read, is too large, or is no JSON although called so."""
    found: dict[str, bytes] = {}
    total = 0
    for name in sorted(KNOWN):
        path = folder / name
        try:
            if not path.is_file():
                continue
            total += path.stat().st_size
            if total > TOTAL_LIMIT:
                raise ConfigError(f"with the files before it more than {TOTAL_LIMIT} bytes", field="file", value=str(path),
                                  remedy="only configuration and a tokenizer belong beside weights")
            found[name] = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", field="file", value=str(path)) from error
        if path.suffix == ".json":
            check_json(path, found[name])
    return found


def check_json(path: Path, content: bytes) -> None:
    try:
        json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", field="file", value=str(path), remedy="copy it again from its source") from error


def _subject(run: str) -> str:
    return f"{Subjects(run).root}.policy.files"
