"""Looking at a policy: what `driftline policy ls | show | verify | diff` print, as rows.

Nothing here changes anything. `verify` reads and checks every path to a version that the store holds, not only the one a reader would
take, so it answers "could we still recover" and not only "does it work today".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from driftline.messages.errors import IntegrityError
from driftline.policy_store.codec import Codec
from driftline.policy_store.manifest import Manifest, VersionKind
from driftline.policy_store.paths import Edge, Path
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import HostTensor, State, state_digest

__all__ = ["PathCheck", "Report", "Row", "TensorChange", "TensorRow", "VersionDetail", "diff", "diff_states", "ls", "show", "verify", "verify_manifest"]


@dataclass(frozen=True)
class Row:
    """One version in a listing. `density` is the share of elements its delta changes; None for a version without one."""

    version: int
    kind: VersionKind
    digest: str
    learner_step: int
    consumed: int
    bytes_raw: int
    bytes_full: int
    bytes_delta: int
    density: float | None
    at: float


@dataclass(frozen=True)
class TensorRow:
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str
    shards: int
    codecs: dict[str, int]
    """Shards of the delta by codec (of the full for a version without a delta)."""


@dataclass(frozen=True)
class VersionDetail:
    row: Row
    parent: int | None
    chain_from: int | None
    seal: str
    consumed: tuple[str, ...]
    numerics: dict[str, object]
    tensors: tuple[TensorRow, ...]


@dataclass(frozen=True)
class PathCheck:
    path: str
    nbytes: int
    error: str

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(frozen=True)
class Report:
    """`ok` when at least one path gives the version; `intact` when all do."""

    version: int
    digest: str
    paths: tuple[PathCheck, ...]

    @property
    def ok(self) -> bool:
        return any(path.ok for path in self.paths)

    @property
    def intact(self) -> bool:
        return bool(self.paths) and all(path.ok for path in self.paths)


@dataclass(frozen=True)
class TensorChange:
    """`changed` of `elements`; all of them where the tensor is only in one version, or has another dtype or shape."""

    name: str
    change: str
    elements: int
    changed: int


async def ls(reader: PolicyReader, limit: int = 50) -> list[Row]:
    """The newest versions first."""
    head = await reader.head()
    rows: list[Row] = []
    if head is None or limit < 1:
        return rows
    async for manifest in reader.lineage(head.link):
        rows.append(row(manifest))
        if len(rows) == limit:
            break
    return rows


async def show(reader: PolicyReader, version: int) -> VersionDetail:
    return detail(await reader.manifest(version))


async def verify(reader: PolicyReader, version: int) -> Report:
    return await verify_manifest(reader, await reader.manifest(version))


async def verify_manifest(reader: PolicyReader, manifest: Manifest) -> Report:
    """Take every path to the version and compare what comes out with its digest."""
    checks: list[PathCheck] = []
    for path in await _every_path(reader, manifest):
        try:
            found = state_digest(await reader.walk(path))
        except IntegrityError as error:
            checks.append(PathCheck(str(path), path.nbytes, str(error)))
        else:
            wrong = "" if found == manifest.digest else f"the state's digest is {found}"
            checks.append(PathCheck(str(path), path.nbytes, wrong))
    return Report(manifest.version, manifest.digest, tuple(checks))


async def _every_path(reader: PolicyReader, manifest: Manifest) -> list[Path]:
    """The ways a reader may take, and those it would take without the longest shortcuts, down to the deltas alone: every shortcut and
    every delta that leads to the version is in one of them."""
    found: dict[str, Path] = {}
    without: set[Edge] = set()
    while True:
        more = [path for path in await reader.paths(manifest, without) if str(path) not in found]
        found |= {str(path): path for path in more}
        shortcuts = {step.edge for path in more for step in path.steps if step.shortcut}
        if not shortcuts:
            return list(found.values())
        without |= shortcuts


async def diff(reader: PolicyReader, old: int, new: int) -> list[TensorChange]:
    """Changed elements per tensor between two versions; unchanged tensors are left out."""
    return diff_states(await reader.materialise(old), await reader.materialise(new))


def diff_states(old: State, new: State) -> list[TensorChange]:
    changes = [_change(name, old.get(name), new.get(name)) for name in sorted(old.keys() | new.keys())]
    return [change for change in changes if change.changed or change.change != "values"]


def row(manifest: Manifest) -> Row:
    delta, full = manifest.delta, manifest.full
    return Row(
        version=manifest.version,
        kind=manifest.kind,
        digest=manifest.digest,
        learner_step=manifest.learner_step,
        consumed=len(manifest.consumed),
        bytes_raw=manifest.nbytes,
        bytes_full=full.nbytes if full is not None else 0,
        bytes_delta=delta.nbytes if delta is not None else 0,
        density=delta.changed / max(1, manifest.elements) if delta is not None else None,
        at=manifest.at,
    )


def detail(manifest: Manifest) -> VersionDetail:
    encoding = manifest.delta if manifest.delta is not None else manifest.full
    assert encoding is not None  # a manifest without bytes cannot be constructed
    codecs: dict[str, dict[str, int]] = {entry.name: {} for entry in manifest.tensors}
    for place in manifest.placements(encoding):
        counts = codecs[place.shard.name]
        name = Codec(place.codec).name.lower()
        counts[name] = counts.get(name, 0) + 1
    return VersionDetail(
        row=row(manifest),
        parent=manifest.parent.version if manifest.parent is not None else None,
        chain_from=manifest.chain[0].version if manifest.chain else None,
        seal=manifest.seal,
        consumed=manifest.consumed,
        numerics=dict(manifest.numerics),
        tensors=tuple(
            TensorRow(entry.name, entry.dtype, entry.shape, entry.layout.nbytes, entry.digest, entry.layout.shard_count,
                      codecs[entry.name])
            for entry in manifest.tensors
        ),
    )


def _change(name: str, old: HostTensor | None, new: HostTensor | None) -> TensorChange:
    match old, new:
        case HostTensor(), HostTensor() if old.layout == new.layout:
            width = np.dtype(f"<u{new.width}")
            differs = old.data.view(width) != new.data.view(width)
            return TensorChange(name, "values", new.elements, int(np.count_nonzero(differs)))
        case HostTensor(), HostTensor():
            return TensorChange(name, "layout", new.elements, new.elements)
        case None, HostTensor():
            return TensorChange(name, "added", new.elements, new.elements)
        case HostTensor(), _:
            return TensorChange(name, "removed", old.elements, old.elements)
        case _:
            raise IntegrityError("in neither version", field="tensor", value=name)
