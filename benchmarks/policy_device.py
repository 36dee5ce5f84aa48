"""Policy versions on the device: what a step changed, found while it is rounded, out to the host, and into an engine that stands still for it.

bfloat16 weights with fp32 masters drawn from N(0, 0.02): 7 / 8 of the bytes are matrices of 64 MiB, the rest experts of 256 KiB in stacks of 256. A step moves the masters
by lr N(0, 0.23^2) ("adam": the steady state under noise gradients) or by lr exactly ("sign"), lr 1e-6. Everything is in one process on one device, every
result is compared bit for bit with what it must be, and times are medians: of the device by events, of a pause by the wall clock.

    python benchmarks/policy_device.py [--gib 4] [--updates 50] [--commit ID]

`bound` is a device-to-device copy measured here, in bytes read and written a second; `ours` of a kernel counts the bytes it cannot avoid (both
operands read once). The peer is plain torch on the same tensors: nonzero and indexing for the kernels, a copy of all weights for an engine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from driftline.kernels.policy_delta import (
    Comparison,
    Put,
    Rounding,
    SpanChanges,
    apply_xor,
    fingerprint,
    reference,
)
from driftline.models.state import public_tensors
from driftline.policy_store.codec import encode_changes, encode_delta
from driftline.policy_store.forms import Changes
from driftline.policy_store.native import native
from driftline.policy_store.tensor import SHARD_BYTES, HostTensor, Shard, State, shards_of
from driftline.services.learner.device_delta import DENSE_SHARE, DeviceDelta, ShardContent, Source
from driftline.services.rollout.weights import EngineWeights

LR = 1e-6
ROUNDS = 7
SHARD = SHARD_BYTES // 2
EXPONENT = (7, 8)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
THREADS = min(4, os.cpu_count() or 1)
TENSORS_A_JOB = 32
R = TypeVar("R")
Row = dict[str, object]
Changed = dict[str, list[ShardContent]]


class Policy:
    """Masters and parameters, and the steps that move them."""

    def __init__(self, gib: float) -> None:
        stacks = max(1, round(gib * 2**30 / 8 / 2**26))
        shapes = {f"model.layers.{i}.self_attn.o_proj.weight": (8192, 4096) for i in range(7 * stacks)}
        shapes |= {f"model.layers.{i}.mlp.experts.w1": (256, 256, 512) for i in range(stacks)}
        self._random = torch.Generator(DEVICE).manual_seed(1)
        self.masters = {n: torch.randn(s, device=DEVICE, generator=self._random).mul_(0.02) for n, s in shapes.items()}
        self.parameters = {n: master.to(torch.bfloat16) for n, master in self.masters.items()}
        self.sources = [Source(n, self.parameters[n], self.masters[n]) for n in shapes]
        self.nbytes = sum(p.nbytes for p in self.parameters.values())

    def step(self, kind: str) -> None:
        for master in self.masters.values():
            noise = torch.randn(master.shape, device=DEVICE, generator=self._random)
            master.add_(noise, alpha=0.23 * LR) if kind == "adam" else master.add_(noise.sign_(), alpha=LR)

    def public(self, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(sorted((public, view) for name, p in parameters.items() for public, view in public_tensors(name, p)))


def spans(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [part for tensor in tensors.values() for part in tensor.view(-1).split(SHARD)]


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def device_seconds(work: Callable[[], object], before: Callable[[], object] = lambda: None, rounds: int = ROUNDS) -> float:
    """The median; `before` is not timed."""
    taken = []
    for _ in range(rounds + 1):
        before()
        synchronize()
        if DEVICE.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1000)
        else:
            taken.append(seconds(work))
    return statistics.median(taken[1:])


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def peak_bytes(work: Callable[[], object]) -> int:
    """What `work` takes of the device's memory beside what is taken already."""
    if DEVICE.type != "cuda":
        work()
        return 0
    synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def row(case: str, ours: float, unit: str, peer: str | None = None, peer_value: float | None = None, bound: float | None = None, note: str = "") -> Row:
    """`ratio`: how many times better ours is; a unit that ends in /s is better when it is more."""
    def short(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.4g}")

    ratio = None if not peer_value or not ours else ours / peer_value if unit.endswith("/s") else peer_value / ours
    return {"case": case, "ours": short(ours), "unit": unit, "peer": peer, "peer_value": short(peer_value), "ratio": short(ratio), "bound": short(bound),
            "note": note}


def check(right: bool, what: str) -> None:
    if not right:
        sys.exit(f"not bit for bit: {what}")


def equal_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int16), other[n].view(torch.int16)) for n, a in one.items())


def torch_compare(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], *, write: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The obvious way, a tensor at a time."""
    out = []
    for name, held in old.items():
        rounded = new[name].to(torch.bfloat16)
        xor = (held.view(torch.int16) ^ rounded.view(torch.int16)).view(-1)
        at = xor.nonzero().view(-1)
        out.append((at, xor[at]))
        if write:
            held.copy_(rounded)
    return out


def copy_rate(policy: Policy) -> float:
    source = torch.cat([p.view(-1) for p in policy.parameters.values()][: 2 + len(policy.parameters) // 2])
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_seconds(lambda: target.copy_(source)) / 1e9


def kernel_rows(policy: Policy, kind: str) -> list[Row]:
    rows: list[Row] = []
    copy = copy_rate(policy)
    before = {n: p.clone() for n, p in policy.parameters.items()}
    policy.step(kind)
    after = {n: m.to(torch.bfloat16) for n, m in policy.masters.items()}
    elements = policy.nbytes // 2

    found = Comparison(spans(before), spans(after)).run()
    share = float(found.counts.sum()) / elements
    label = f"{kind}, {share:.2%} changed"
    plain = Comparison(spans(before), spans(after), dense_share=DENSE_SHARE)
    ours = device_seconds(lambda: plain.run(wait=False))
    theirs = device_seconds(lambda: torch_compare(before, after, write=False), rounds=3)
    ours_peak, their_peak = peak_bytes(plain.run), peak_bytes(lambda: torch_compare(before, after, write=False))
    note = f"{policy.nbytes / 2**30:.0f} GiB of bfloat16, {len(found.counts)} shards; {100 * 2 * policy.nbytes / ours / 1e9 / copy:.0f} % of the copy"
    rows.append(row(f"{label}: diff", 2 * policy.nbytes / ours / 1e9, "GB/s", "torch nonzero", 2 * policy.nbytes / theirs / 1e9, copy, note))
    rows.append(row(f"{label}: diff, memory beside", ours_peak / 2**20, "MiB", "torch nonzero", their_peak / 2**20))

    def reset() -> None:
        for name, parameter in policy.parameters.items():
            parameter.copy_(before[name])

    fused = Comparison(spans(policy.parameters), spans(policy.masters), Rounding.BFLOAT16, dense_share=DENSE_SHARE)
    reset()
    again = fused.run(write=True)
    check(equal_bits(policy.parameters, after), "round_and_diff wrote other values than torch")
    check(torch.equal(again.at, found.at) and torch.equal(again.xor, found.xor), "round_and_diff found other changes than diff")
    ours = device_seconds(lambda: fused.run(write=True, wait=False), reset)
    theirs = device_seconds(lambda: torch_compare(policy.parameters, policy.masters, write=True), reset, rounds=3)
    rounding = device_seconds(lambda: [p.copy_(policy.masters[n]) for n, p in policy.parameters.items()])
    ours_peak = peak_bytes(lambda: fused.run(write=True))
    moved = 3 * policy.nbytes
    rows.append(row(f"{label}: round_and_diff", moved / ours / 1e9, "GB/s", "torch nonzero", moved / theirs / 1e9, copy,
                    f"master and parameter read once; {100 * moved / ours / 1e9 / copy:.0f} % of the copy"))
    rows.append(row(f"{label}: round_and_diff", 1000 * ours, "ms", "rounding alone (copy_)", 1000 * rounding, 1000 * moved / copy / 1e9,
                    f"memory beside {ours_peak / 2**20:.0f} MiB; peer reads the master and writes the parameter, and finds nothing"))

    starts, flat = found.starts, spans(policy.parameters)
    bits = torch.cat([a[f.long()] for a, f in per_span(spans(after), found)])
    put = Put(flat, found.at, bits.view(torch.int16), starts, addresses=torch.tensor([s.data_ptr() for s in flat], device=DEVICE))
    reset()
    put.run()
    check(equal_bits(policy.parameters, after), "put")
    ours = device_seconds(put.run)
    old, new, views = policy.public(before), policy.public(after), policy.public(policy.parameters)
    wide = {n: torch_indices(old[n], new[n]) for n in old}
    theirs = device_seconds(lambda: [views[n].view(-1).index_copy_(0, at, v) for n, (at, v) in wide.items()], rounds=3)
    changed = found.at.numel()
    rows.append(row(f"{label}: put, one launch", 1000 * ours, "ms", "torch index_copy_, a launch a tensor", 1000 * theirs, None,
                    f"{changed / ours / 1e9:.1f} G changes/s over {len(wide)} tensors, values already on the device"))
    reset()
    one = next(iter(wide))
    at, value = wide[one]
    apply_xor(views[one], at.to(torch.int32), value.view(torch.int16) ^ old[one].view(torch.int16).view(-1)[at])
    check(torch.equal(views[one].view(torch.int16), new[one].view(torch.int16)), "apply_xor")

    ours = device_seconds(lambda: fingerprint(flat))
    check(torch.equal(fingerprint(flat[:3]).cpu(), reference.fingerprint([s.cpu() for s in flat[:3]])), "fingerprint")
    rows.append(row(f"{label}: fingerprint", policy.nbytes / ours / 1e9, "GB/s", None, None, copy, "of every shard, its table built each time"))
    for name, parameter in policy.parameters.items():
        parameter.copy_(after[name])
    return rows


def per_span(of: list[torch.Tensor], found: SpanChanges) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    bounds = found.starts.tolist()
    for span, a, b in zip(of, bounds, bounds[1:], strict=False):
        yield span, found.at[a:b]


def torch_indices(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at = (old.view(torch.int16) != new.view(torch.int16)).view(-1).nonzero().view(-1)
    return at, new.view(-1)[at]


class Mirror:
    """The host's copy of the policy, as a learner's writer and an engine keep it, and what moves it forward."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.state: State = {
            name: HostTensor("bfloat16", tuple(t.shape), t.detach().view(-1).view(torch.uint8).to("cpu", copy=True).numpy()) for name, t in tensors.items()
        }
        self.shards: dict[str, list[Shard]] = {}
        for shard in shards_of((name, tensor.layout) for name, tensor in sorted(self.state.items())):
            self.shards.setdefault(shard.name, []).append(shard)

    def pack(self, name: str, contents: list[ShardContent]) -> int:
        """Encode and move forward, as the writer does; returns the bytes."""
        size = 0
        for shard, content in zip(self.shards[name], contents, strict=True):
            out = self.state[name].data[shard.start : shard.stop]
            if isinstance(content, Changes):
                size += len(encode_changes(out, content, 2, exponent=EXPONENT).payload)
            elif content is not None:
                size += len(encode_delta(out, content, 2, exponent=EXPONENT).payload)
            move(out, content)
        return size

    def move(self, name: str, contents: list[ShardContent]) -> None:
        for shard, content in zip(self.shards[name], contents, strict=True):
            move(self.state[name].data[shard.start : shard.stop], content)

    def follow(self, weights: EngineWeights, name: str, contents: list[ShardContent]) -> None:
        """Move forward as a reader does, and tell the engine's weights."""
        for shard, content in zip(self.shards[name], contents, strict=True):
            if content is not None:
                out = self.state[name].data[shard.start : shard.stop]
                before = out.copy()
                move(out, content)
                weights.seen(shard, "bfloat16", before, out)


def in_lots(pool: ThreadPoolExecutor, work: Callable[[str, list[ShardContent]], R], items: Iterable[tuple[str, list[ShardContent]]]) -> list[R]:
    """A job for each tensor would have the threads wait for the interpreter's lock and little else."""
    def lot(part: list[tuple[str, list[ShardContent]]]) -> list[R]:
        return [work(*item) for item in part]

    jobs, part = [], []
    for item in items:
        part.append(item)
        if len(item[1]) > 1 or len(part) >= TENSORS_A_JOB:
            jobs.append(pool.submit(lot, part))
            part = []
    jobs.append(pool.submit(lot, part))
    return [result for job in jobs for result in job.result()]


def move(out: np.ndarray, content: ShardContent) -> None:
    if isinstance(content, Changes):
        out.view(np.uint16)[content.at] ^= content.xor
    elif content is not None:
        out[:] = content


def step_out(policy: Policy, delta: DeviceDelta) -> Changed:
    return dict(delta.start().tensors())


def encode_rows(policy: Policy, kind: str, pool: ThreadPoolExecutor) -> list[Row]:
    delta = DeviceDelta(policy.sources, torch.bfloat16)
    mirror = Mirror(policy.public(policy.parameters))
    out_s, packed_s, sizes, shares = [], [], [], []
    for _ in range(4):
        policy.step(kind)
        synchronize()
        began = time.perf_counter()
        started = delta.start()
        contents = list(started.tensors())
        out_s.append(time.perf_counter() - began)
        in_lots(pool, mirror.move, contents)
        shares.append(started.changed / (policy.nbytes // 2))
    for _ in range(2):
        policy.step(kind)
        synchronize()
        began = time.perf_counter()
        sizes.append(sum(in_lots(pool, mirror.pack, delta.start().tensors())))
        packed_s.append(time.perf_counter() - began)
    peak = peak_bytes(lambda: step_out(policy, delta))
    today = today_seconds(policy, kind, pool)
    gb, label = policy.nbytes / 1e9, f"{kind}, {statistics.median(shares):.2%} changed"
    ours, packed = statistics.median(out_s[1:]), min(packed_s)
    return [
        row(f"{label}: masters on the device to changes on the host", gb / ours, "GB/s", None, None, None,
            f"{1000 * ours:.0f} ms; of policy bytes; rounding into the parameters included; device memory beside {peak / 2**20:.0f} MiB"),
        row(f"{label}: masters on the device to coded shards on the host", gb / packed, "GB/s", "all weights to the host, diffed there", gb / today, None,
            f"{1000 * packed:.0f} ms; {100 * statistics.median(sizes) / policy.nbytes:.3f} % of the weights; {THREADS} threads; native codec: {native is not None}"),
    ]


def today_seconds(policy: Policy, kind: str, pool: ThreadPoolExecutor) -> float:
    """Round, copy every weight to pageable memory, compare and encode there."""
    mirror = Mirror(policy.public(policy.parameters))
    policy.step(kind)
    synchronize()
    began = time.perf_counter()
    for name, parameter in policy.parameters.items():
        parameter.copy_(policy.masters[name])
    jobs = [
        pool.submit(encode_whole, mirror, name, tensor.cpu().view(-1).view(torch.uint8).numpy())
        for name, tensor in policy.public(policy.parameters).items()
    ]
    for job in jobs:
        job.result()
    return time.perf_counter() - began


def encode_whole(mirror: Mirror, name: str, data: np.ndarray) -> None:
    for shard in mirror.shards[name]:
        out = mirror.state[name].data[shard.start : shard.stop]
        encode_delta(out, data[shard.start : shard.stop], 2, exponent=EXPONENT)
        out[:] = data[shard.start : shard.stop]


def engine_rows(policy: Policy, kind: str, updates: int, pool: ThreadPoolExecutor) -> list[Row]:
    delta = DeviceDelta(policy.sources, torch.bfloat16)
    engine = {n: p.clone() for n, p in policy.parameters.items()}
    views = policy.public(engine)
    mirror = Mirror(views)
    weights = EngineWeights(views, verify_every=0)
    pauses, stages, peak, changed = [], [], 0, 0
    changes: Changed = {}
    for update in range(updates + 2):
        policy.step(kind)
        changes = step_out(policy, delta)
        in_lots(pool, partial(mirror.follow, weights), changes.items())
        began = time.perf_counter()
        staged = weights.stage(mirror.state)
        stages.append(time.perf_counter() - began)
        synchronize()
        if update == updates + 1:
            peak = peak_bytes(lambda staged=staged: weights.apply(staged))
        else:
            pauses.append(seconds(lambda staged=staged: weights.apply(staged)))
        changed = staged.changed
    check(equal_bits(engine, policy.parameters), "the engine's weights after the updates")
    pauses, stages = pauses[1:], stages[1:]
    median, worst = statistics.median(pauses), float(np.percentile(pauses, 99))

    hosts = {n: torch.from_numpy(t.data).view(torch.bfloat16).view(t.shape) for n, t in mirror.state.items()}
    pageable = statistics.median(seconds(lambda: [v.copy_(hosts[n]) for n, v in views.items()]) for _ in range(2))
    pinned = {n: p.detach().cpu().pin_memory() if DEVICE.type == "cuda" else p for n, p in engine.items()}
    from_pinned = statistics.median(seconds(lambda: [p.copy_(pinned[n], non_blocking=True) for n, p in engine.items()]) for _ in range(5))
    sparse = statistics.median(seconds(lambda: torch_patch(views, mirror, changes)) for _ in range(2))
    check(equal_bits(engine, policy.parameters), "the engine's weights after loading all of them")
    full = EngineWeights(views, verify_every=1)
    unchanged = full.stage(mirror.state)
    verify = seconds(lambda: full.apply(unchanged))
    label = f"{kind}, {2 * changed / policy.nbytes:.2%} changed"
    note = f"{policy.nbytes / 2**30:.0f} GiB in {len(views)} tensors; staging {1000 * statistics.median(stages):.0f} ms beside the engine"
    return [
        row(f"{label}: pause, median of {len(pauses)} updates", 1000 * median, "ms", "all weights from pageable memory", 1000 * pageable, None, note),
        row(f"{label}: pause, p99", 1000 * worst, "ms", "all weights from pinned memory", 1000 * from_pinned, None,
            f"device memory beside during the pause {peak / 2**20:.0f} MiB more than the staged {6 * changed / 2**20:.0f} MiB"),
        row(f"{label}: pause, median", 1000 * median, "ms", "changes by plain torch, a copy and an index_copy_ a tensor", 1000 * sparse, None, "same changes"),
        row(f"{label}: pause with every parameter compared afterwards", 1000 * verify, "ms", None, None, None, "fingerprints; every 50 versions by default"),
    ]


def torch_patch(views: dict[str, torch.Tensor], mirror: Mirror, changes: Changed) -> None:
    for name, contents in changes.items():
        flat = views[name].view(-1)
        for shard, content in zip(mirror.shards[name], contents, strict=True):
            if isinstance(content, Changes):
                at = torch.from_numpy(content.at).to(DEVICE).long() + shard.start // 2
                values = mirror.state[name].data[shard.start : shard.stop].view(np.uint16)[content.at]
                flat.index_copy_(0, at, torch.from_numpy(values.view(np.int16)).to(DEVICE).view(torch.bfloat16))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--device", default="h200", help="the folder of results")
    arguments.add_argument("--gib", type=float, default=4.0)
    arguments.add_argument("--updates", type=int, default=50)
    arguments.add_argument("--commit", default="", help="what to name as measured; git's where there is one")
    arguments.add_argument("--out", default="", help="another folder for the result")
    given = arguments.parse_args()
    result = {
        "command": f"python benchmarks/policy_device.py --gib {given.gib:g} --updates {given.updates}",
        "commit": given.commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "device": given.device,
        "note": f"{torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'CPU'}, torch {torch.__version__}, {os.cpu_count()} cores, {THREADS} threads; "
                f"lr {LR:g}; bound: a device-to-device copy, bytes read and written",
    }
    path = (Path(given.out) if given.out else Path(__file__).parent / "results" / given.device) / "policy_device.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for kind, updates in (("adam", given.updates), ("sign", max(2, given.updates // 5))):
            policy = Policy(given.gib)
            parts: tuple[Callable[[], list[Row]], ...] = (
                partial(kernel_rows, policy, kind), partial(engine_rows, policy, kind, updates, pool), partial(encode_rows, policy, kind, pool),
            )
            for part in parts:
                rows += part()
                path.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
            show(rows[-12:])
            del policy, parts, part
    print(f"wrote {path}")


def show(rows: list[Row]) -> None:
    for entry in rows:
        texts = ["-" if entry[k] is None else f"{entry[k]:.4g}" for k in ("ours", "peer_value", "ratio", "bound")]
        print(f"{entry['case']:70} {texts[0]:>9} {entry['unit']:5} {texts[1]:>9} {texts[2]:>7} {texts[3]:>7}  {entry['note']}", flush=True)


if __name__ == "__main__":
    main()
