"""What the first call of every operator costs at K3's shapes, forward and backward, with an empty compile cache.

    python benchmarks/kernels/cold_start.py [--quick] [--only TEXT] [--commit ID]

`driftline.kernels.first_calls` has the calls. They are made one after another in this process, each timed from the call to the end of its kernels, and then all
again with another empty cache as `driftline kernels compile` makes them, in processes of their own: wall time, their starting included. The peer is FLA 0.6.0,
whose first `chunk_kda` forward and backward took 277 s on an H200 (all but some seconds of it tuning).
"""

from __future__ import annotations

import os
import tempfile
import time

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="driftline-cold-")

import harness
import torch

from driftline.kernels.first_calls import CALLS, compiled, first_call

FLA_MS = 277_000.0
PROCESSES = 8


def main() -> None:
    asked = harness.arguments(__doc__)
    torch.mm(torch.ones(64, 64, device="cuda", dtype=torch.bfloat16), torch.ones(64, 64, device="cuda", dtype=torch.bfloat16))
    names = [name for name in CALLS if asked.only in name]
    rows, spent = [], 0.0
    for name in [] if asked.quick else names:
        first, second = first_call(name, "cuda"), first_call(name, "cuda")
        spent += first.seconds
        rows.append(harness.Row(name, 1e3 * first.seconds, note=f"second call {1e3 * second.seconds:.1f} ms"))
        print(f"{name:40} {first.seconds:7.2f} s, then {1e3 * second.seconds:.1f} ms", flush=True)
    if spent:
        rows.append(harness.Row("all of them, one after another", 1e3 * spent, "FLA's chunk_kda alone (quoted)", FLA_MS))
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="driftline-cold-")
    start = time.perf_counter()
    for done in compiled(names, processes=PROCESSES):
        print(f"{done.name:40} {done.seconds:7.2f} s in a process of its own, {time.perf_counter() - start:.1f} s since the start", flush=True)
    rows.append(harness.Row(f"all of them, {PROCESSES} processes", 1e3 * (time.perf_counter() - start), "FLA's chunk_kda alone (quoted)", FLA_MS))
    harness.finish("cold_start", rows, commit=asked.commit, note="wall time of first calls, empty compile cache", write=not (asked.only or asked.quick))


if __name__ == "__main__":
    main()
