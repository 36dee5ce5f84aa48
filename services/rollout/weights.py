"""An engine's parameters as a copy of the store's tensors: of a new version only what changed is carried over, and all of it at once.

    the mirror moves forward beside the engine, verified shard by shard (updates.py)   -> `seen` is told of every shard that changed
    stage, still beside the engine: new values gathered, converted, put on the device
    apply, while the engine stands still: one launch a width of elements, or on the CPU one write a shard

Guarantees: `stage` touches no parameter, so a failure until then leaves the old version served; `apply` sets values and adds none, so that what is
set twice is right; when it raises, or every `verify_every`-th time when the parameters are compared with the mirror and differ, the caller must
load everything from the mirror before it goes on. A parameter is compared bit for bit, or by the fingerprint of its bytes where it
is on a device in the mirror's own dtype.

Memory: about 20 bytes a changed element on the host while it is staged, 6 to 8 on the device; shards that are better copied whole wait on the device up to
`STAGED_BYTES` together, and in the mirror beyond that.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from driftline.kernels.policy_delta import Put, fingerprint
from driftline.messages.errors import IntegrityError
from driftline.models.state import policy_tensors, public_tensors
from driftline.policy_store.tensor import DTYPES, SHARD_BYTES, Bytes1D, HostTensor, Shard, State
from driftline.services.tensors import TORCH_DTYPES

__all__ = ["EngineWeights", "Staged", "TornWeights", "WeightCounts", "parameters_of"]

WHOLE_SHARE = 0.25
"""Above this share of changes a shard's own bytes are fewer than positions and values: 2 bytes against 6 a change, and no scattered write."""

VERIFY_EVERY = 50
STAGED_BYTES = 2 * 1024**3

_UNSIGNED: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Positions = npt.NDArray[np.int32]


class TornWeights(IntegrityError):
    """The parameters were compared with the mirror and are not the version."""


@dataclass
class WeightCounts:
    """What was carried over so far; `reloads` counts loads of everything after the first, `torn` those because the
    parameters were not the version."""

    changed: int = 0
    whole_shards: int = 0
    verified: int = 0
    reloads: int = 0
    torn: int = 0


class _Copy(NamedTuple):
    """A shard to copy whole."""

    to: torch.Tensor
    source: torch.Tensor


@dataclass(frozen=True)
class Staged:
    """Everything that makes the parameters the mirror's version; `reload`: it must be loaded whole instead. `held` lies beside the parameters and
    in their dtype, `waiting` in the mirror."""

    reload: bool = False
    puts: Sequence[Put] = ()
    held: Sequence[_Copy] = ()
    waiting: Sequence[_Copy] = ()
    changed: int = 0
    expected: _Expected | None = None


class _Expected(NamedTuple):
    """What the parameters must be afterwards: fingerprints of spans, and of the others the mirror's own values."""

    spans: list[torch.Tensor]
    fingerprints: torch.Tensor
    others: list[_Copy]


class _Known(NamedTuple):
    """Positions of a shard that changed, and the mirror's bits there at the time."""

    at: _Positions
    bits: npt.NDArray[Any]


@dataclass
class _Dirty:
    """What is known to have changed since the last `stage`, by (tensor, first byte); None for a whole shard."""

    shards: dict[tuple[str, int], list[_Known] | None] = field(default_factory=dict)
    afresh: bool = False


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and packed experts under their public names, as views."""
    return {public: view for name, held in policy_tensors(model) for public, view in public_tensors(name, held)}


class EngineWeights:
    def __init__(self, parameters: Mapping[str, torch.Tensor], *, verify_every: int | None = None, counts: WeightCounts | None = None) -> None:
        """`parameters`: views of where the engine reads its weights, all on one device; they must stay there. `verify_every`: how many
        versions apart they are compared with the mirror (VERIFY_EVERY; 0: never). `counts` is where to count."""
        for name, tensor in parameters.items():
            if not tensor.is_contiguous():
                raise IntegrityError("not contiguous", field=f"parameter {name}", value=tuple(tensor.stride()))
        self._flat = {name: tensor.detach().view(-1) for name, tensor in parameters.items()}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        self._device = next(iter(parameters.values())).device
        self._stream = _stream(self._device)
        self._verify_every, self._since_verified = VERIFY_EVERY if verify_every is None else verify_every, 0
        self._lock = threading.Lock()
        self._dirty = _Dirty()
        self.counts = counts or WeightCounts()

    def seen(self, shard: Shard, dtype: str, before: Bytes1D | None, after: Bytes1D) -> None:
        """A shard of the mirror moved forward; called from worker threads, for a shard by one at a time."""
        kind = _UNSIGNED[DTYPES[dtype].width]
        known: _Known | None = None
        if before is not None:
            new = after.view(kind)
            differs = before.view(kind) != new
            if np.count_nonzero(differs) <= WHOLE_SHARE * differs.size:
                at = np.flatnonzero(differs).astype(np.int32)
                known = _Known(at, new[at])  # here, where the shard was just verified and is in the cache: later it is not
        with self._lock:
            key = (shard.name, shard.start)
            earlier = self._dirty.shards.setdefault(key, [])
            if earlier is not None:
                self._dirty.shards[key] = None if known is None else [*earlier, known]

    def afresh(self) -> None:
        """The mirror was read anew: nothing is known of what changed."""
        with self._lock:
            self._dirty = _Dirty(afresh=True)

    def stage(self, state: State) -> Staged:
        """Gather what makes the parameters `state`, the mirror. Blocks; nothing else may move the mirror before `apply` returned."""
        with self._lock:
            dirty, self._dirty = self._dirty, _Dirty()
        try:
            with torch.cuda.stream(self._stream):  # past what the engine has queued; nothing on the CPU
                return self._staged(dirty, state)
        except BaseException:
            self.afresh()
            raise

    def _staged(self, dirty: _Dirty, state: State) -> Staged:
        if dirty.afresh or state.keys() != self._flat.keys() or any(self._misfits(name, state[name]) for name, _ in dirty.shards):
            return Staged(reload=True)
        staging = _Staging(self._device)
        for (name, start), positions in sorted(dirty.shards.items()):
            self._stage_shard(staging, name, start, positions, state[name])
        self._since_verified += 1
        expected = None
        if self._verify_every and self._since_verified >= self._verify_every:
            self._since_verified = 0
            expected = self._expect(state)
        staged = Staged(False, staging.puts(), staging.held, staging.waiting, staging.changed, expected)
        _finished(self._device)
        return staged

    def apply(self, staged: Staged) -> None:
        """Write what was staged, and wait until it is written. When this raises, the parameters are of no version."""
        for put in staged.puts:
            put.run()
        if staged.held:
            torch._foreach_copy_([copy.to for copy in staged.held], [copy.source for copy in staged.held])
        for copy in staged.waiting:
            copy.to.copy_(copy.source)
        _finished(self._device)
        self.counts.changed += staged.changed
        self.counts.whole_shards += len(staged.held) + len(staged.waiting)
        if staged.expected is not None:
            self._verify(staged.expected)

    def _misfits(self, name: str, host: HostTensor) -> bool:
        return host.shape != self._shapes[name] and not self._padded(name, host)

    def _padded(self, name: str, host: HostTensor) -> bool:
        """A vector that the release stores longer than the model needs (A_log, padded to 128 heads)."""
        return name.endswith("A_log") and len(host.shape) == 1 and host.elements > self._flat[name].numel()

    def _stage_shard(self, staging: _Staging, name: str, start: int, known: list[_Known] | None, host: HostTensor) -> None:
        flat, first = self._flat[name], start // host.width
        span = flat[first : first + SHARD_BYTES // host.width]
        if not span.numel():
            return  # of a padding
        if known is None or span.element_size() > 4 or sum(len(each.at) for each in known) > WHOLE_SHARE * span.numel():
            staging.copy(span, _mirrored(host, start, span.numel()))
            return
        at, bits = known[0].at, known[0].bits
        if len(known) > 1 or self._padded(name, host):  # of several versions the mirror has the last: a position that comes twice is the same
            at = np.concatenate([each.at for each in known])
            at = at[at < span.numel()]
            bits = host.data[start : start + SHARD_BYTES].view(_UNSIGNED[host.width])[at]
        staging.put(span, at, _converted(bits, host.dtype, span.dtype))

    def _expect(self, state: State) -> _Expected:
        spans: list[torch.Tensor] = []
        mirrored: list[torch.Tensor] = []
        others: list[_Copy] = []
        for name, flat in self._flat.items():
            host = state[name]
            for start in range(0, flat.numel() * host.width, SHARD_BYTES):
                span = flat[start // host.width : (start + SHARD_BYTES) // host.width]
                source = _mirrored(host, start, span.numel())
                if self._device.type == "cuda" and source.dtype == span.dtype:
                    spans.append(span)
                    mirrored.append(source)
                else:
                    others.append(_Copy(span, source))
        return _Expected(spans, torch.cat([fingerprint([source]) for source in mirrored]) if mirrored else torch.empty(0), others)

    def _verify(self, expected: _Expected) -> None:
        self.counts.verified += 1
        torn = [span for span, source in expected.others if not _same_bits(span, source.to(self._device, span.dtype))]
        if expected.spans:
            found = fingerprint(expected.spans).cpu()
            torn += [expected.spans[i] for i in (found != expected.fingerprints).nonzero().view(-1).tolist()]
        if torn:
            self.counts.torn += 1
            raise TornWeights("the engine's copy differs from the version", field="shards", value=len(torn),
                              remedy="load everything from the mirror")


@dataclass
class _Staging:
    """Shards collected into few large transfers."""

    device: torch.device
    held: list[_Copy] = field(default_factory=list)
    waiting: list[_Copy] = field(default_factory=list)
    changed: int = 0
    _held_bytes: int = 0
    _spans: dict[int, list[_Part]] = field(default_factory=dict)

    def put(self, span: torch.Tensor, at: _Positions, values: npt.NDArray[Any]) -> None:
        self.changed += at.size
        self._spans.setdefault(values.itemsize, []).append(_Part(span, at, values))

    def copy(self, span: torch.Tensor, source: torch.Tensor) -> None:
        self.changed += span.numel()
        self._held_bytes += span.numel() * span.element_size()
        if self._held_bytes <= STAGED_BYTES:
            self.held.append(_Copy(span, source.to(self.device).to(span.dtype)))
        else:
            self.waiting.append(_Copy(span, source))

    def puts(self) -> list[Put]:
        return [_transferred(spans, self.device) for spans in self._spans.values()]


class _Part(NamedTuple):
    """Values to set in one span."""

    span: torch.Tensor
    at: _Positions
    values: npt.NDArray[Any]


def _transferred(parts: Sequence[_Part], device: torch.device) -> Put:
    """One buffer, one copy to the device: addresses, where each span's changes begin, positions, values."""
    spans = [part.span for part in parts]
    starts = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([part.at.size for part in parts], out=starts[1:])
    sections = [
        np.array([span.data_ptr() for span in spans], np.int64), starts, np.concatenate([part.at for part in parts]),
        np.concatenate([part.values for part in parts]),
    ]
    ends = np.cumsum([-(-section.nbytes // 16) * 16 for section in sections])
    buffer = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = buffer.numpy()
    for section, end in zip(sections, [0, *ends[:-1]], strict=True):
        there[end : end + section.nbytes] = section.view(np.uint8)
    moved = buffer.to(device, non_blocking=True)

    def section_of(index: int, dtype: torch.dtype) -> torch.Tensor:
        begin = int(ends[index - 1]) if index else 0
        return moved[begin : begin + sections[index].nbytes].view(dtype)

    return Put(spans, section_of(2, torch.int32), section_of(3, _BITS[sections[3].itemsize]), section_of(1, torch.int64),
               addresses=section_of(0, torch.int64))


def _mirrored(host: HostTensor, start: int, elements: int) -> torch.Tensor:
    """A shard of the mirror as a tensor that shares its memory."""
    data = host.data[start : start + elements * host.width]
    return torch.from_numpy(data).view(TORCH_DTYPES[host.dtype])


def _converted(bits: npt.NDArray[Any], dtype: str, to: torch.dtype) -> npt.NDArray[Any]:
    """Values of the mirror as bits of the parameter's dtype."""
    stored = TORCH_DTYPES[dtype]
    if stored == to:
        return bits
    values = torch.from_numpy(bits.view(np.uint8)).view(stored).to(to)
    return values.view(torch.uint8).numpy().view(_UNSIGNED[to.itemsize])


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    kind = _BITS[one.element_size()]
    return torch.equal(one.view(kind), other.view(kind))


def _finished(device: torch.device) -> None:
    """Everything queued on this thread's stream has been done, or its failure is raised here."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
