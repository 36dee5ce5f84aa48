"""One update of a 1,024 GiB policy to 64 engines: simulated, from what coding one shard costs on this machine.

The costs of a shard (seconds of one core to encode, to decode and apply, and bytes) are measured first, on bf16 weights ~ N(0, 0.02) after
an AdamW-like step at a learning rate of 1e-6, for the report's form (XOR + zstd-3 of each shard) and both forms of ours; all of them with
the digests a version needs. `fleet_simulation` then plays the update over the links given. docs/policy_scale.md has the assumptions.

    python benchmarks/policy_fleet.py [--device cpu-2core] [--costs benchmarks/results/cpu-2core/policy_store.json]

`ours` is the time until the last engine has applied everything. `peer` is the report's form, read by every engine from one store, over
the same links; `ratio` is how many times quicker ours is. `bound` is what the busiest part of an ideal spreading takes, in which
all stages overlap, every link sends a byte once and nothing waits for the head.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import zstandard
from fleet_simulation import Announce, Fleet, Outcome, Tree, Update, simulate

from driftline.policy_store.applying import PACKS_IN_FLIGHT
from driftline.policy_store.codec import apply, encode_delta
from driftline.policy_store.forms import DeltaForm
from driftline.policy_store.packing import PACK_BYTES
from driftline.policy_store.tensor import DTYPES, SHARD_BYTES, shard_digest
from driftline.services.policy_config import RelayConfig

GIB = 2**30
GBIT = 1e9 / 8
CHECKPOINT = 1024 * GIB
ENGINES = 64
LEARNERS = 8
WORKERS = 16
LINKS_GBIT = (10.0, 25.0, 100.0, 400.0)
HEADLINE_GBIT = 100.0
FANOUT = RelayConfig().fanout
WINDOW = PACKS_IN_FLIGHT
LATENCY_S = 250e-6
DURABLE_S = 2e-3
MEMORY_BYTES_S = 300e9
ENCODE_PASSES, APPLY_PASSES = 3, 2
"""How often a weight's byte crosses the memory bus: base and new are read and the base is moved forward; read and written in place."""

SAMPLE_SHARDS = 32
ROUNDS = 7
MOST_PACKS = 4096
REPORT, FAST, SMALL, RAW = "xor + zstd-3", "fast", "small", "uncoded"
Row = dict[str, object]


@dataclass(frozen=True)
class Cost:
    """Of one shard, on one core."""

    encode_s: float
    apply_s: float
    nbytes: float


@dataclass(frozen=True)
class Case:
    """What is varied. Links in Gb/s; the store has `store_links` of them."""

    form: str
    gbit: float = HEADLINE_GBIT
    tree: Tree = Tree.NONE
    fanout: int = FANOUT
    workers: int = WORKERS
    window: int = WINDOW
    store_links: int = 1
    apply_gbs: float | None = None
    """Weights applied on the engine's accelerators, at so many GB/s of a node, and not by its workers."""
    announce: Announce = Announce.HEAD

    def __str__(self) -> str:
        ways = {Tree.NONE: "all from the store", Tree.FIXED: f"one tree, fanout {self.fanout}", Tree.BY_PACK: f"relayed, fanout {self.fanout}"}
        more = [ways[self.tree], f"{self.gbit:g} Gb/s"]
        plain = Case(self.form)
        if self.workers != plain.workers:
            more.append(f"{self.workers} workers a node")
        if self.window != plain.window:
            more.append(f"{self.window} packs in flight")
        if self.store_links != plain.store_links:
            more.append(f"store of {self.store_links} links")
        if self.apply_gbs is not None:
            more.append(f"applied on the accelerators at {self.apply_gbs:g} GB/s")
        if self.announce is Announce.PACK:
            more.append("packs announced ahead of the head")
        return f"{self.form}, {', '.join(more)}"


def update_of(case: Case, cost: Cost) -> Update:
    """The checkpoint as packs, and what a node with this many workers takes for one."""
    shards = CHECKPOINT / SHARD_BYTES
    packed = shards * cost.nbytes
    packs = min(MOST_PACKS, max(1, round(packed / PACK_BYTES)))
    per_pack = shards / packs
    raw = CHECKPOINT / packs
    by_workers = max(per_pack * cost.apply_s / case.workers, APPLY_PASSES * raw / MEMORY_BYTES_S)
    return Update(
        packs=packs, pack_bytes=packed / packs, raw_bytes=raw,
        encode_s=max(per_pack * cost.encode_s / case.workers, ENCODE_PASSES * raw / MEMORY_BYTES_S),
        apply_s=by_workers if case.apply_gbs is None else raw / (case.apply_gbs * 1e9),
    )


def fleet_of(case: Case) -> Fleet:
    link = case.gbit * GBIT
    return Fleet(
        engines=ENGINES, learners=LEARNERS, learner_link=link, store_in=link * case.store_links, store_out=link * case.store_links,
        engine_link=link, latency_s=LATENCY_S, durable_s=DURABLE_S, window=case.window, tree=case.tree, fanout=case.fanout,
        announce=case.announce,
    )


def bound_s(update: Update, fleet: Fleet) -> float:
    packed = update.packs * update.pack_bytes
    return max(
        update.packs * update.encode_s / fleet.learners, packed / fleet.learners / fleet.learner_link, packed / fleet.store_in,
        packed / fleet.store_out, packed / fleet.engine_link, update.packs * update.apply_s,
    )


def cases(apply_gbs: Sequence[float]) -> Iterator[Case]:
    """The sweep over links; then, at one speed, each assumption moved alone."""
    for gbit in LINKS_GBIT:
        for form in (REPORT, FAST, SMALL):
            for tree in (Tree.NONE, Tree.BY_PACK):
                yield Case(form, gbit, tree)
    yield Case(RAW)
    yield Case(RAW, tree=Tree.BY_PACK)
    relayed = Case(SMALL, tree=Tree.BY_PACK)
    for gbit in (25.0, HEADLINE_GBIT):
        for fanout in (1, 2, 16):
            yield replace(relayed, gbit=gbit, fanout=fanout)
    yield replace(relayed, gbit=25.0, tree=Tree.FIXED)
    yield from (replace(relayed, workers=workers) for workers in (2, 4, 64))
    for gbit in (25.0, HEADLINE_GBIT):
        yield from (replace(relayed, gbit=gbit, window=window) for window in (1, 8, 24))
    for speed in apply_gbs:
        yield from (replace(relayed, gbit=gbit, apply_gbs=speed) for gbit in LINKS_GBIT)
    yield replace(relayed, announce=Announce.PACK)
    for form in (REPORT, SMALL):
        yield Case(form, store_links=16)


def sample() -> tuple[np.ndarray, np.ndarray]:
    """Old and new bits of bf16 weights around one step: fp32 masters, each step lr * N(0, 0.23^2) and decay 0.01, rounded to even.

    0.23 is the steady spread of m / sqrt(v) under noise gradients at beta1 = 0.9.
    """
    rng = np.random.default_rng(11)
    master = rng.standard_normal(SAMPLE_SHARDS * SHARD_BYTES // 2, np.float32) * np.float32(0.02)
    step = rng.standard_normal(master.size, np.float32) * np.float32(0.23) + np.float32(0.01) * master
    return rounded(master), rounded(master - np.float32(1e-6) * step)


def rounded(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def measured() -> dict[str, Cost]:
    old, new = (np.split(bits.view(np.uint8), SAMPLE_SHARDS) for bits in sample())
    exponent = DTYPES["bfloat16"].exponent
    compressor, decompressor = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()

    def report_encode(base: np.ndarray, fresh: np.ndarray) -> bytes:
        return compressor.compress((base ^ fresh).data)

    def report_apply(payload: bytes, out: np.ndarray) -> None:
        out ^= np.frombuffer(decompressor.decompress(payload), np.uint8)

    costs = {REPORT: timed(old, new, report_encode, report_apply, len)}
    for name, form in ((FAST, DeltaForm.FAST), (SMALL, DeltaForm.SMALL)):
        costs[name] = timed(
            old, new,
            lambda base, fresh, form=form: encode_delta(base, fresh, 2, exponent=exponent, form=form),
            lambda encoded, out: apply(encoded.codec, encoded.payload, out, 2, exponent=exponent),
            lambda encoded: len(encoded.payload),
        )
    costs[RAW] = timed(old, new, lambda base, fresh: fresh, lambda payload, out: np.copyto(out, payload), len)
    return costs


def timed(old: list[np.ndarray], new: list[np.ndarray], encode: Callable, put: Callable, size: Callable) -> Cost:
    """CPU seconds of one thread, the best of `ROUNDS` passes: digests of base and result too, as a version's writer and reader take them."""
    best_encode = best_apply = float("inf")
    payloads: list = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        payloads = []
        for base, fresh in zip(old, new, strict=True):
            shard_digest(base)
            payloads.append(encode(base, fresh))
            shard_digest(fresh)
        best_encode = min(best_encode, time.thread_time() - start)
        out = [base.copy() for base in old]
        start = time.thread_time()
        for payload, target in zip(payloads, out, strict=True):
            put(payload, target)
            shard_digest(target)
        best_apply = min(best_apply, time.thread_time() - start)
        if not all(np.array_equal(found, wanted) for found, wanted in zip(out, new, strict=True)):
            sys.exit("the result differs from the weights that were encoded")
    count = len(old)
    return Cost(best_encode / count, best_apply / count, sum(map(size, payloads)) / count)


def costs_in(path: Path) -> dict[str, Cost]:
    """Of an earlier result of this script; or of one of benchmarks/policy_store.py, from its rows of one thread, which are without digests."""
    body = json.loads(path.read_text())
    if "costs" in body:
        return {form: Cost(**fields) for form, fields in body["costs"].items()}

    def found(form: str, what: str) -> Row:
        (only,) = (entry for entry in body["rows"]
                   if entry["case"].startswith("adam-1e-6, ") and f"(ours, {form})" in entry["case"] and entry["case"].endswith(what))
        return only

    def seconds(rate: float) -> float:
        return SHARD_BYTES / 1e6 / rate

    costs = {}
    for form, value in ((REPORT, "peer_value"), (FAST, "ours"), (SMALL, "ours")):
        rows = [found(FAST if form == REPORT else form, what) for what in ("encode, 1 thread", "decode and apply, 1 thread", "size")]
        encode, put, size = (float(entry[value]) for entry in rows)
        costs[form] = Cost(seconds(encode), seconds(put), SHARD_BYTES * size / 100)
    copied = seconds(float(found(FAST, "encode, 1 thread")["bound"]))
    return costs | {RAW: Cost(copied, copied, SHARD_BYTES)}


def cost_rows(costs: dict[str, Cost], note: str) -> list[Row]:
    rows: list[Row] = []
    peer = costs[REPORT]
    for form, cost in costs.items():
        other = form not in (REPORT, RAW)
        for what, mine, theirs, unit in (
            ("encode a shard", cost.encode_s * 1e6, peer.encode_s * 1e6, "µs of one core"),
            ("decode and apply a shard", cost.apply_s * 1e6, peer.apply_s * 1e6, "µs of one core"),
            ("a shard", 100 * cost.nbytes / SHARD_BYTES, 100 * peer.nbytes / SHARD_BYTES, "% of raw"),
        ):
            rows.append(row(f"one shard: {form}, {what}", mine, unit, REPORT if other else None, theirs if other else None,
                            theirs / mine if other else None, None, note))
    return rows


def played(costs: dict[str, Cost], apply_gbs: Sequence[float]) -> Iterator[tuple[Case, Outcome, float]]:
    for case in cases(apply_gbs):
        update, fleet = update_of(case, costs[case.form]), fleet_of(case)
        yield case, simulate(update, fleet), bound_s(update, fleet)


def case_rows(costs: dict[str, Cost], apply_gbs: Sequence[float]) -> list[Row]:
    rows: list[Row] = []
    reports: dict[tuple[float, int], float] = {}
    results = sorted(played(costs, apply_gbs), key=lambda each: each[0].form != REPORT or each[0].tree is not Tree.NONE)
    for case, outcome, bound in results:
        here = (case.gbit, case.store_links)
        alone = case.form == REPORT and case.tree is Tree.NONE
        if alone:
            reports[here] = outcome.last_s
        peer = None if alone else reports.get(here)
        stage = outcome.bottleneck
        note = (
            f"durable at {outcome.durable_s:.3g} s; pause of an engine {outcome.pause_s:.3g} s applying as packs come, "
            f"{outcome.apply_s:.3g} s after fetching all; out of the store {outcome.store_out_bytes / GIB:.4g} GiB, relayed "
            f"{outcome.relayed_bytes / GIB:.4g} GiB; busiest: {stage.value}, {outcome.busy_s[stage]:.3g} s"
        )
        rows.append(row(str(case), outcome.last_s, "s", f"{REPORT}, all from the store" if peer else None, peer,
                        peer / outcome.last_s if peer else None, bound, note))
    return rows


def row(case: str, ours: float, unit: str, peer: str | None, peer_value: float | None, ratio: float | None, bound: float | None,
        note: str) -> Row:
    def short(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.4g}")

    return {"case": case, "ours": short(ours), "unit": unit, "peer": peer, "peer_value": short(peer_value), "ratio": short(ratio),
            "bound": short(bound), "note": note}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--device", default="cpu-2core")
    arguments.add_argument("--costs", type=Path, help="take the costs from an earlier result, of this script or of policy_store.py, instead of measuring")
    arguments.add_argument("--apply-gbs", type=float, nargs="*", default=[], help="also engines that apply on their accelerators at so many GB/s a node")
    arguments.add_argument("--out", type=Path, help="where to write the result; default benchmarks/results/<device>/policy_fleet.json")
    given = arguments.parse_args()
    load = os.getloadavg()[0]
    if given.costs is None:
        costs = measured()
        note = f"shards of 2 MiB, digests included; CPU time of one thread, best of {ROUNDS}"
    else:
        note = f"shards of 2 MiB; from {given.costs}"
        costs = costs_in(given.costs)
    rows = cost_rows(costs, note) + case_rows(costs, given.apply_gbs)
    print(f"{'case':78} {'ours':>9} {'peer':>9} {'ratio':>6} {'bound':>9}  unit")
    for entry in rows:
        cells = [entry["ours"], entry["peer_value"], entry["ratio"], entry["bound"]]
        texts = ["-" if cell is None else f"{cell:.4g}" for cell in cells]
        print(f"{entry['case']:78} {texts[0]:>9} {texts[1]:>9} {texts[2]:>6} {texts[3]:>9}  {entry['unit']}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    again = ("" if given.costs is None else f" --costs {given.costs}") + "".join(
        f" {part:g}" if number else f" --apply-gbs {part:g}" for number, part in enumerate(given.apply_gbs))
    result = {
        "command": f"python benchmarks/policy_fleet.py --device {given.device}{again}",
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": given.device,
        "note": (
            f"Simulated from measured costs of a shard (load average {load:.1f}): {CHECKPOINT // GIB} GiB, {LEARNERS} learners, {ENGINES} engines, "
            f"{WORKERS} workers a node, one store with one link of the given speed, {LATENCY_S * 1e6:.0f} µs one way, {WINDOW} packs in flight, "
            f"memory at most {MEMORY_BYTES_S / 1e9:.0f} GB/s a node, unless the case says otherwise; docs/policy_scale.md."
        ),
        "costs": {form: asdict(cost) for form, cost in costs.items()},
        "rows": rows,
    }
    path = given.out or Path(__file__).parent / "results" / given.device / "policy_fleet.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
