"""What every kernel benchmark does alike: the device's own ceilings, timing by events with a cold L2, peak memory, the table and its JSON.

    python benchmarks/kernels/<op>.py [--quick] [--sweep] [--only TEXT] [--commit ID]

Times are medians of event timings; before each timed call 256 MiB are written, so that inputs come from memory and not from the 50 MiB of L2 (not
with `graphed`, which is for calls that a launch takes longer to issue than to run: it times replays of a graph of several calls). Ceilings are
measured in the same process: a device-to-device copy of 4 GiB, counted as bytes read plus bytes written, and 8,192-cubed matrix products of
random numbers. A row's fraction is of the ceiling that bounds it: the larger of its bytes over the copy rate and its FLOPs over the matrix rate.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

os.environ.setdefault("DRIFTLINE_KERNELS", "triton")  # what is timed here

ROOT = Path(__file__).resolve().parents[2]
FLUSH_BYTES = 256 * 2**20


class Ceilings(NamedTuple):
    """Measured on this device: TB/s of a copy (read and written), TFLOP/s of dense products. fp8_tflops is 0 where torch has no such product."""

    copy_tbs: float
    bf16_tflops: float
    fp8_tflops: float


class Timing(NamedTuple):
    median_ms: float
    p10_ms: float
    p90_ms: float


@dataclass(frozen=True)
class Row:
    """One case. Times in ms; bytes and flops: the least the operator must move and do; peaks in bytes beside the inputs. `fp8`: whose matrix rate bounds it."""

    case: str
    ours_ms: float
    peer: str | None = None
    peer_ms: float | None = None
    bytes: float = 0
    flops: float = 0
    peak: int | None = None
    peer_peak: int | None = None
    note: str = ""
    fp8: bool = False


def arguments(description: str | None = None) -> argparse.Namespace:
    """--quick, --sweep, --only TEXT (cases whose name holds it), --commit ID. Exits with a line when there is no CUDA device."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few cases, for a check that it runs")
    parser.add_argument("--sweep", action="store_true", help="time the candidate configurations instead and write no results")
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    parser.add_argument("--commit", default="", help="the commit to write into the results (default: of the checkout)")
    parsed = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device; the tests run the kernels without one")
    return parsed


def measure(fn: Callable[[], object], *, rounds: int = 30, cold: bool = True) -> Timing:
    """Each call timed alone by events, after three that are not; L2 is flushed before each when `cold`. In a sweep, a call that raises (a candidate
    that needs more than the device has) is said and takes forever; the others go on."""
    try:
        return _measure(fn, rounds=rounds, cold=cold)
    except Exception as refused:
        if "--sweep" not in sys.argv:
            raise
        print(f"a candidate is refused: {type(refused).__name__}: {str(refused)[:200]}", flush=True)
        return Timing(math.inf, math.inf, math.inf)


def _measure(fn: Callable[[], object], *, rounds: int, cold: bool) -> Timing:
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda") if cold else None
    for _ in range(3):
        fn()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(rounds)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(rounds)]
    for i in range(rounds):
        if flush is not None:
            flush.fill_(i)
        starts[i].record()
        fn()
        ends[i].record()
    torch.cuda.synchronize()
    return _timing([a.elapsed_time(b) for a, b in zip(starts, ends, strict=True)])


def graphed(fn: Callable[[], object], *, calls: int = 20, rounds: int = 30) -> Timing:
    """One call's share of a replayed graph of `calls`: without the cost of issuing it from Python, and with a warm L2."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    whole = measure(graph.replay, rounds=rounds, cold=False)
    return Timing(*(t / calls for t in whole))


def shorten_tuning() -> None:
    """Make Triton's autotuner, which peers use, time a configuration for 20 ms instead of 100: enough for kernels of milliseconds, and minutes less."""
    from triton.runtime import driver
    from triton.testing import do_bench

    driver.active.get_benchmarker = lambda: partial(do_bench, warmup=5, rep=20)


def peak_bytes(fn: Callable[[], object]) -> int:
    """Most bytes allocated while it ran, above what was allocated before; what it returns counts."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = fn()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del held
    return peak


@cache
def ceilings() -> Ceilings:
    tbs = _copy_tbs()
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    bf16 = 2 * n**3 / measure(lambda: torch.mm(a, b, out=out), rounds=20, cold=False).median_ms / 1e9
    one = torch.ones((), device="cuda")
    a8, b8 = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    try:
        fp8 = 2 * n**3 / measure(lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16), rounds=20, cold=False).median_ms / 1e9
    except RuntimeError:
        fp8 = 0.0
    torch.cuda.empty_cache()
    return Ceilings(tbs, bf16, fp8)


def _copy_tbs() -> float:
    source = torch.randint(0, 2**31 - 1, (2**29,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure(lambda: target.copy_(source), rounds=20, cold=False).median_ms / 1e9


def floor_ms(row: Row, ceiling: Ceilings) -> float:
    """The time below which it cannot be on this device, by the bytes and FLOPs it must move and do; 0 where neither is said."""
    rate = ceiling.fp8_tflops if row.fp8 and ceiling.fp8_tflops else ceiling.bf16_tflops
    return max(row.bytes / ceiling.copy_tbs / 1e9, row.flops / rate / 1e9)


def line(row: Row, ceiling: Ceilings) -> dict[str, Any]:
    """The row as docs/performance.md has it. ratio: ours over the peer's, in time."""
    said = [row.note] if row.note else []
    if row.peer_ms:
        said.append(f"{row.peer_ms / row.ours_ms:.2f}x as fast")
    if row.bytes:
        said.append(f"{row.bytes / row.ours_ms / 1e9:.2f} TB/s")
    if row.flops:
        said.append(f"{row.flops / row.ours_ms / 1e9:.0f} TFLOP/s")
    floor = floor_ms(row, ceiling)
    if floor:
        said.append(f"{floor / row.ours_ms:.0%} of the ceiling")
    if row.peak is not None:
        said.append(f"peak {row.peak / 2**30:.2f} GiB" + (f" against {row.peer_peak / 2**30:.2f}" if row.peer_peak is not None else ""))
    ratio = None if not row.peer_ms else row.ours_ms / row.peer_ms
    return {"case": row.case, "ours": row.ours_ms, "unit": "ms", "peer": row.peer, "peer_value": row.peer_ms, "ratio": ratio, "bound": floor or None, "note": "; ".join(said)}


def finish(name: str, rows: Sequence[Row], *, commit: str = "", note: str = "", write: bool = True) -> None:
    """Print the table, and write benchmarks/results/h200/kernels_<name>.json (and into the folder that OUT names, if it does)."""
    ceiling = ceilings()
    lines = [line(row, ceiling) for row in rows]
    head = f"copy {ceiling.copy_tbs:.2f} TB/s, bf16 {ceiling.bf16_tflops:.0f} TFLOP/s, fp8 {ceiling.fp8_tflops:.0f} TFLOP/s"
    print(f"\n{name} on {torch.cuda.get_device_name()}: {head}")
    for row, out in zip(rows, lines, strict=True):
        peer = f"{row.peer}: {row.peer_ms:9.4f}" if row.peer_ms else ""
        print(f"{row.case:60} {row.ours_ms:9.4f} ms  {peer:36} {out['note']}")
    if not write:
        return
    if not commit:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, driver-side CUDA {torch.version.cuda}"
    body = {
        "command": " ".join(["python", *(a for i, a in enumerate(sys.argv) if a != "--commit" and (i == 0 or sys.argv[i - 1] != "--commit"))]),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "device": device,
        "note": "; ".join(part for part in (head, note) if part),
        "rows": lines,
    }
    for folder in (ROOT / "benchmarks/results/h200", *([Path(os.environ["OUT"])] if os.environ.get("OUT") else [])):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"kernels_{name}.json").write_text(json.dumps(body, indent=1) + "\n")


def spread(timings: Sequence[float]) -> float:
    """How far apart repeated medians of one case lie, relative: a difference between variants smaller than this is noise."""
    return (max(timings) - min(timings)) / statistics.median(timings)


def _timing(times: list[float]) -> Timing:
    times = sorted(times)
    return Timing(statistics.median(times), times[len(times) // 10], times[len(times) * 9 // 10])
