"""A step of decoding from arrays of the host to arrays of the host: CUDA graphs beside eager launches, by rows and windows.

    python benchmarks/decode_step.py [--models k3,smollm2,small] [--rows 1 64 256] [--limit SECONDS] [--out FILE] [--commit ID]

Models (random weights, bfloat16 on a GPU, sampling at temperature 1 included): `k3`, 4 layers of 7168 with 896 experts in MXFP4; `smollm2`, SmolLM2-135M's sizes; `small`, K3's
layout with 4 layers of 1024 and 64 experts, also in windows of 4. Every row has 600 tokens before it. On a CPU the smallest sizes run, eagerly. A row's `ours` is the median of eight steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from learner_step import DEVICE, ON_GPU, random_model, smollm2_config, tiny_dense_config

from driftline.models.causal_lm import CausalLM
from driftline.models.config import tiny
from driftline.models.paged import PAGE, Pool
from driftline.models.quantisation import Quantisation
from driftline.models.sizes import like_k3
from driftline.services.rollout.runner import DecodeBatch, EagerRunner, GraphRunner, Runner

HELD = 600
STEPS = 8


class Model(NamedTuple):
    title: str
    make: Callable[[], CausalLM]
    windows: tuple[int, ...]


def models() -> dict[str, Model]:
    if not ON_GPU:
        return {"k3": Model("K3's layout, 5 layers of 128", lambda: random_model(tiny(), Quantisation.NONE), (1, 4)),
                "smollm2": Model("dense, 4 layers of 96", lambda: random_model(tiny_dense_config(), Quantisation.NONE), (1,))}
    return {
        "k3": Model("K3, 4 layers of 7168, 896 experts in MXFP4", lambda: random_model(like_k3(4, 7168), Quantisation.MXFP4), (1,)),
        "smollm2": Model("SmolLM2's sizes", lambda: random_model(smollm2_config(), Quantisation.NONE), (1,)),
        "small": Model("K3, 4 layers of 1024, 64 experts in MXFP4", lambda: random_model(like_k3(4, 1024, num_experts=64), Quantisation.MXFP4), (1, 4)),
    }


def batch(rows: int, window: int, step: int) -> DecodeBatch:
    """Step number `step` of `rows` rows, each with pages of its own; of a window the token before it stood and no draft."""
    pages = (HELD + STEPS + 1 + window) // PAGE + 1
    return DecodeBatch(
        np.full((rows, window), 5 + step, dtype=np.int64), np.arange(rows, dtype=np.int32), 1 + np.arange(rows * pages, dtype=np.int32).reshape(rows, pages),
        np.full(rows, HELD + step, dtype=np.int32), np.arange(rows, dtype=np.uint64), np.full(rows, step, dtype=np.int64), np.ones(rows, dtype=np.float32),
        accepted=np.ones(rows, dtype=np.int32) if window > 1 else None,
    )


def median_ms(runner: Runner, rows: int, window: int) -> float:
    """Behind a first step that compiles and captures."""
    runner.decode(batch(rows, window, 0))
    times = []
    for step in range(1, STEPS + 1):
        began = time.perf_counter()
        runner.decode(batch(rows, window, step))
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def measured(model: Model, counts: list[int], until: float) -> list[dict[str, Any]]:
    lm = model.make().eval().requires_grad_(False)
    pages = (HELD + STEPS + 1 + max(model.windows)) // PAGE + 1
    pool = Pool.make(lm, pages=1 + max(counts) * pages, slots=max(counts), window=max(model.windows))
    eager = EagerRunner(lm, pool)
    graphs = GraphRunner(lm, pool, max(counts)) if ON_GPU else None
    found = []
    for window in model.windows:
        for rows in counts:
            if time.perf_counter() > until:
                return found
            launched = median_ms(eager, rows, window)
            ours = launched if graphs is None else median_ms(graphs, rows, window)
            note = f"{rows / ours * 1e3:.0f} tokens/s" if window == 1 else "windows of 4, one token of each kept"
            if ON_GPU:
                note += f"; {torch.cuda.memory_reserved() / 2**30:.1f} GiB reserved"
            if graphs is not None and graphs.refused:
                note += f"; without a graph: {list(graphs.refused.values())[-1]}"
            found.append({"case": f"{model.title}: {rows} rows, {window} token{'s' if window > 1 else ''} each", "ours": ours, "unit": "ms", "peer": "eager" if graphs else None,
                          "peer_value": launched if graphs else None, "ratio": launched / ours if graphs else None, "bound": None, "note": note})
            print(f"{found[-1]['case']:70} {ours:8.2f} ms  eager {launched:8.2f} ms  {note}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(models()))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--limit", type=float, default=120.0, help="no case begins after so many seconds")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, help="the JSON file; nothing is written without it")
    given = parser.parse_args()
    if unknown := set(given.models.split(",")) - set(models()):
        parser.error(f"--models names {sorted(unknown)}; there are {sorted(models())}")
    if not ON_GPU:
        torch.set_num_threads(1)
    until, rows = time.perf_counter() + given.limit, []
    with torch.inference_mode():
        for name in given.models.split(","):
            rows += measured(models()[name], given.rows, until)
            if ON_GPU:
                torch.cuda.empty_cache()
    if given.out is not None:
        commit = given.commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        given.out.write_text(json.dumps({
            "command": f"python benchmarks/decode_step.py --models {given.models}", "commit": commit, "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "device": torch.cuda.get_device_name() if ON_GPU else str(DEVICE), "note": "", "rows": rows,
        }, indent=2) + "\n")


if __name__ == "__main__":
    main()
