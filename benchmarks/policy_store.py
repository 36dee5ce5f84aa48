"""Every way to code a policy version, on weights that move as an optimizer moves them, in one run and one table.

bfloat16 casts of float32 weights drawn from N(0, 0.02), decoupled decay 0.01, rounded to nearest even. `adam`: steps drawn from N(0, (0.23 lr)^2),
what is left of m / sqrt(v) when gradients are noise. `sign`: steps of exactly lr either way. Shards of 2 MiB, each coded alone, on one thread
and on two. Encoding starts from the two states (diffing included), decoding ends with the new weights in place (applying
included); every result is compared bit for bit. The forms take turns in every round, so that a disturbance meets all of them; the best
round counts and the median is beside it. `zipnn` gets the XOR, in a copy, since it overwrites what it is given.

The guarded rows add what a version really costs: base and result digests, packs, the manifest and the head, with blobs in memory.

    python benchmarks/policy_store.py [--device cpu-2core] [--elements 268435456] [--rounds 5] [--workloads adam-1e-6 ...]

In `rows`, `ratio` is how many times better ours is than XOR + zstd-3: smaller for sizes, faster for rates. `bound` is for sizes what entropy
allows a coder of positions and XOR values that knows nothing of the weights, for rates a memcpy of the same shards on the same threads.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
import zstandard

from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import topology
from driftline.policy_store import HostTensor, MemoryBlobs, PolicyReader, PolicyWriter
from driftline.policy_store.codec import DeltaForm, apply, encode_delta
from driftline.policy_store.native import native
from driftline.policy_store.tensor import SHARD_BYTES
from driftline.policy_store.workers import Workers

WORKLOADS = {"adam-1e-6": ("adam", 1e-6), "sign-1e-6": ("sign", 1e-6), "adam-1e-5": ("adam", 1e-5), "sign-1e-5": ("sign", 1e-5)}
EXPONENT = (7, 8)
THREADS = (1, 2)
SAMPLE = 1 << 24
VERSIONS = 6
Row = dict[str, object]
Bits = np.ndarray[Any, np.dtype[np.uint16]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def rounded(x: np.ndarray[Any, np.dtype[np.float32]]) -> Bits:
    """bfloat16 bits, to nearest even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def weights(kind: str, lr: float, elements: int) -> tuple[Bits, Bits]:
    """Old and new bits of one step."""
    rng = np.random.default_rng(7)
    old, new = np.empty(elements, np.uint16), np.empty(elements, np.uint16)
    for start in range(0, elements, 1 << 22):
        size = min(1 << 22, elements - start)
        w = rng.standard_normal(size, np.float32) * np.float32(0.02)
        if kind == "adam":
            step = rng.standard_normal(size, np.float32) * np.float32(0.23 * lr)
        else:
            step = np.where(rng.random(size) < 0.5, np.float32(lr), np.float32(-lr))
        old[start : start + size] = rounded(w)
        new[start : start + size] = rounded(w + step - np.float32(0.01 * lr) * w)
    return old, new


class Bounds(NamedTuple):
    """What entropy allows, in percent of the raw size, to a coder of positions and ..."""

    xor: float
    """... XOR values, memoryless."""
    difference: float
    """... integer differences, memoryless."""
    by_exponent: float
    """... integer differences, memoryless given the exponent of the old weight."""


def bounds(old: Bits, new: Bits) -> Bounds:
    def bits(xs: Bits, ys: np.ndarray[Any, Any]) -> float:
        moved = ys != 0
        _, counts = np.unique(ys[moved], return_counts=True)
        p = np.asarray([moved.sum(), moved.size - moved.sum()]) / moved.size
        q = counts / max(counts.sum(), 1)
        return float(-(p[p > 0] * np.log2(p[p > 0])).sum() * moved.size - (q * np.log2(q)).sum() * moved.sum())

    old, new = old[:SAMPLE], new[:SAMPLE]
    exponent = old >> 7 & 0xFF
    parts = [exponent == e for e in np.unique(exponent)]
    return Bounds(*(100 * total / (16 * old.size) for total in (
        bits(old, old ^ new), bits(old, new - old), sum(bits(old[part], new[part] - old[part]) for part in parts))))


class Form(NamedTuple):
    name: str
    encode: Callable[[Bytes, Bytes], Any]
    """Of the old shard and the new one."""
    apply: Callable[[Any, Bytes], None]
    """To the old shard, in place."""
    size: Callable[[Any], int] = len


class Contexts(threading.local):
    """zstd contexts of one thread: making one costs more than using it for a small shard."""

    def __init__(self) -> None:
        self.into = {level: zstandard.ZstdCompressor(level=level) for level in (1, 3)}
        self.out_of = zstandard.ZstdDecompressor()


contexts = Contexts()


def zstd(data: Bytes, level: int) -> bytes:
    return contexts.into[level].compress(data.data)


def unzstd(data: bytes) -> Bytes:
    return np.frombuffer(contexts.out_of.decompress(data), np.uint8)


def plain(level: int) -> Form:
    def encode(old: Bytes, new: Bytes) -> bytes:
        return zstd(old ^ new, level)

    def put(payload: bytes, out: Bytes) -> None:
        out ^= unzstd(payload)

    return Form(f"XOR, zstd-{level}", encode, put)


def split_encode(old: Bytes, new: Bytes) -> tuple[bytes, bytes]:
    xor = old ^ new
    return zstd(np.ascontiguousarray(xor[0::2]), 1), zstd(np.ascontiguousarray(xor[1::2]), 1)


def split_apply(payload: tuple[bytes, bytes], out: Bytes) -> None:
    out[0::2] ^= unzstd(payload[0])
    out[1::2] ^= unzstd(payload[1])


def bitmap_encode(old: Bytes, new: Bytes) -> tuple[bytes, bytes, bytes]:
    xor = old.view(np.uint16) ^ new.view(np.uint16)
    values = xor[xor != 0].view(np.uint8)
    return zstd(np.packbits(xor != 0), 1), zstd(np.ascontiguousarray(values[0::2]), 1), zstd(np.ascontiguousarray(values[1::2]), 1)


def bitmap_apply(payload: tuple[bytes, bytes, bytes], out: Bytes) -> None:
    mask, low, high = map(unzstd, payload)
    out_n = out.view(np.uint16)
    out_n[np.flatnonzero(np.unpackbits(mask, count=out_n.size))] ^= low | high.astype(np.uint16) << 8


def ours(form: DeltaForm) -> Form:
    return Form(f"{'ranked' if form is DeltaForm.SMALL else 'u8 gaps + XOR'} (ours, {form.value})",
                lambda old, new: encode_delta(old, new, 2, exponent=EXPONENT, form=form),
                lambda coded, out: apply(coded.codec, coded.payload, out, 2), lambda coded: len(coded.payload))


def zipnn() -> Form | None:
    if importlib.util.find_spec("zipnn") is None:
        return None
    from zipnn import ZipNN

    def put(payload: bytes, out: Bytes) -> None:
        out ^= np.frombuffer(ZipNN(bytearray_dtype="bfloat16", threads=1).decompress(payload), np.uint8)

    return Form("XOR, zipnn", lambda old, new: bytes(ZipNN(bytearray_dtype="bfloat16", threads=1).compress(bytearray(old ^ new))), put)


def forms() -> list[Form]:
    pairs = [plain(3), plain(1), Form("XOR, planes, zstd-1", split_encode, split_apply, lambda parts: sum(map(len, parts))),
             Form("bitmap + XOR, zstd-1", bitmap_encode, bitmap_apply, lambda parts: sum(map(len, parts))),
             ours(DeltaForm.FAST), ours(DeltaForm.SMALL), zipnn()]
    return [form for form in pairs if form is not None]


class Rates(NamedTuple):
    """MB/s of raw weights on so many threads, one per round."""

    encode: dict[int, list[float]]
    apply: dict[int, list[float]]


def shards(data: Bits) -> list[Bytes]:
    return [data.view(np.uint8)[start : start + SHARD_BYTES] for start in range(0, data.nbytes, SHARD_BYTES)]


def measure(old: Bits, new: Bits, rounds: int) -> tuple[dict[str, float], dict[str, Rates]]:
    """Size in percent and rates of every form, and the rates of a memcpy and of an in-place XOR as forms of that name."""
    old_s, new_s, mb = shards(old), shards(new), old.nbytes / 1e6
    out = old.copy()
    out_s = shards(out)
    sizes: dict[str, float] = {}
    rates = {name: Rates({t: [] for t in THREADS}, {t: [] for t in THREADS}) for name in (*(form.name for form in forms()), "memcpy", "XOR in place")}

    def timed(pool: ThreadPoolExecutor, work: Callable[..., Any], *inputs: Sequence[Any]) -> tuple[list[Any], float]:
        start = time.perf_counter()
        done = list(pool.map(work, *inputs))
        return done, mb / (time.perf_counter() - start)

    for count in THREADS:
        with ThreadPoolExecutor(count) as pool:
            for round_ in range(rounds):
                for name, work in (("memcpy", np.copyto), ("XOR in place", lambda a, b: np.bitwise_xor(a, b, out=a))):
                    rates[name].apply[count].append(timed(pool, work, out_s, new_s)[1])
                for form in forms():
                    coded, rate = timed(pool, form.encode, old_s, new_s)
                    rates[form.name].encode[count].append(rate)
                    np.copyto(out, old)
                    rates[form.name].apply[count].append(timed(pool, form.apply, coded, out_s)[1])
                    if not np.array_equal(out, new):
                        sys.exit(f"{form.name}: the result differs from the weights that were encoded")
                    sizes[form.name] = 100 * sum(map(form.size, coded)) / old.nbytes
                print(f"  {count} thread{'s' * (count > 1)}, round {round_ + 1} of {rounds}", file=sys.stderr)
    return sizes, rates


def codec_rows(workload: str, old: Bits, new: Bits, rounds: int) -> tuple[list[Row], list[str]]:
    """Rows of our two forms, and the lines of a table of all."""
    limits = bounds(old, new)
    changed = 100 * np.count_nonzero(old != new) / old.size
    sizes, rates = measure(old, new, rounds)
    peer = forms()[0].name
    copy = {t: max(rates["memcpy"].apply[t]) for t in THREADS}
    lines = [f"**{workload}**: {changed:.2f} % of the elements change. Entropy allows {limits.xor:.3f} % (XOR), {limits.difference:.3f} % (differences), "
             f"{limits.by_exponent:.3f} % (differences, exponent known). memcpy {copy[1]:,.0f} and {copy[2]:,.0f} MB/s, XOR in place "
             + " and ".join(f"{max(rates['XOR in place'].apply[t]):,.0f}" for t in THREADS) + " MB/s on one and two threads.", "",
             "| form | size % | encode 1T | 2T | decode + apply 1T | 2T | against XOR, zstd-3: smaller, encode, apply | of memcpy: encode, apply |",
             "|---|---|---|---|---|---|---|---|"]
    rows: list[Row] = []
    for form in forms():
        mine, theirs = rates[form.name], rates[peer]
        cells = [f"{max(values[t]):,.0f}" for values in mine for t in THREADS]
        against = [sizes[peer] / sizes[form.name], *(max(a[1]) / max(b[1]) for a, b in zip(mine, theirs, strict=True))]
        lines.append(f"| {form.name} | {sizes[form.name]:.3f} | " + " | ".join(cells) + " | " + ", ".join(f"{x:.2f}x" for x in against) + " | "
                     + ", ".join(f"{max(values[1]) / copy[1]:.0%}" for values in mine) + " |")
        if "ours" not in form.name:
            continue
        rows.append(row(f"{workload}, {form.name}, size", sizes[form.name], "% of raw", sizes[peer], against[0], limits.xor,
                        f"{changed:.2f} % changed; bound with differences {limits.difference:.3f}, with the exponent known {limits.by_exponent:.3f}"))
        for what, values, others in (("encode", mine.encode, theirs.encode), ("decode and apply", mine.apply, theirs.apply)):
            for t in THREADS:
                best = max(values[t])
                rows.append(row(f"{workload}, {form.name}, {what}, {t} thread{'s' * (t > 1)}", best, "MB/s", max(others[t]), best / max(others[t]),
                                copy[t], f"median {statistics.median(values[t]):.0f}, peer's {statistics.median(others[t]):.0f}; "
                                f"{best / copy[t]:.0%} of memcpy"))
    return rows, [*lines, ""]


async def version_rows(workload: str, old: Bits, new: Bits) -> list[Row]:
    """A whole version, published and followed."""
    run, mb, threads = "bench", old.nbytes / 1e6, max(THREADS)
    workers = Workers(threads)
    bus, blobs = MemoryBus(), MemoryBlobs()
    await bus.declare(topology(run))
    writer, reader = PolicyWriter(bus, blobs, run, 1000, workers=workers), PolicyReader(bus, blobs, run, workers=workers)
    await writer.resume()
    states = [{"w": HostTensor("bfloat16", bits.shape, bits.view(np.uint8))} for bits in (old, new)]
    await writer.publish(states[0], version=0, learner_step=0)
    state = await reader.materialise(0)
    publish, advance = [], []
    for version in range(1, VERSIONS + 1):
        start = time.perf_counter()
        await writer.publish(states[version % 2], version=version, learner_step=version)
        middle = time.perf_counter()
        state = await reader.advance(state, version - 1, version)
        publish.append(mb / (middle - start))
        advance.append(mb / (time.perf_counter() - middle))
        if not np.array_equal(state["w"].data, states[version % 2]["w"].data):
            sys.exit("the version read differs from the one published")
    await bus.close()
    workers.close()
    note = "digests of base and result, packs, manifest, head; blobs in memory"
    return [row(f"{workload}, {what} a version, {threads} threads", max(values), "MB/s", None, None, None, f"{note}; median {statistics.median(values):.0f}")
            for what, values in (("publish", publish), ("advance", advance))]


def digest_rows(data: Bytes, rounds: int) -> list[Row]:
    """What naming and checking a shard costs, by digest."""
    made: dict[str, Callable[[Bytes], object]] = {
        "xxh3-128 (accident)": lambda shard: xxhash.xxh3_128_digest(shard.data),
        "crc32 (accident)": lambda shard: zlib.crc32(shard.data),
        "sha256 (malice)": lambda shard: hashlib.sha256(shard.data).digest(),
    }
    if importlib.util.find_spec("blake3") is not None:
        from blake3 import blake3

        made["blake3 (malice)"] = lambda shard: blake3(shard.data).digest()
    parts = [data[start : start + SHARD_BYTES] for start in range(0, min(data.size, 128 * SHARD_BYTES), SHARD_BYTES)]
    mb = sum(part.size for part in parts) / 1e6
    best: dict[tuple[str, int], float] = {}
    for _ in range(rounds):
        for count in THREADS:
            with ThreadPoolExecutor(count) as pool:
                for name, work in made.items():
                    start = time.perf_counter()
                    list(pool.map(work, parts))
                    best[name, count] = max(best.get((name, count), 0.0), mb / (time.perf_counter() - start))
    return [row(f"digest of 2 MiB shards, {name}, {count} thread{'s' * (count > 1)}", rate, "MB/s", None, None, None, "what it guards against")
            for (name, count), rate in best.items()]


def row(case: str, value: float, unit: str, peer: float | None, ratio: float | None, bound: float | None, note: str) -> Row:
    def short(number: float | None) -> float | None:
        return None if number is None else float(f"{number:.4g}")

    return {"case": case, "ours": short(value), "unit": unit, "peer": None if peer is None else "XOR, zstd-3",
            "peer_value": short(peer), "ratio": short(ratio), "bound": short(bound), "note": note}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--device", default="cpu-2core")
    arguments.add_argument("--elements", type=int, default=256 * 1024 * 1024)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    arguments.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE/policy_store.json")
    given = arguments.parse_args()
    load = os.getloadavg()[0]
    rows: list[Row] = []
    lines: list[str] = []
    for workload in given.workloads:
        print(workload, file=sys.stderr)
        old, new = weights(*WORKLOADS[workload], given.elements)
        found, table = codec_rows(workload, old, new, given.rounds)
        print("\n".join(table), flush=True)
        rows += [*found, *asyncio.run(version_rows(workload, old, new))]
        lines += table
    rows += digest_rows(old.view(np.uint8), given.rounds)
    for entry in rows:
        print(f"{entry['case']:72} {entry['ours']:>10} {entry['unit']}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    kernels = "numpy alone" if native is None else ("portable kernels", "AVX2 kernels", "AVX-512 kernels")[native.level()]
    intro = (f"{given.elements * 2 / 1e6:,.0f} MB of bfloat16 in shards of 2 MiB; rates in MB/s of weights, the best of {given.rounds} rounds in turn; {kernels}; "
             f"load {load:.1f} at the start.")
    result = {
        "command": f"python benchmarks/policy_store.py --device {given.device} --elements {given.elements} --rounds {given.rounds}",
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": given.device,
        "note": "\n".join([intro, "", *lines]).rstrip(),
        "rows": rows,
    }
    path = given.out or Path(__file__).parent / "results" / given.device / "policy_store.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
