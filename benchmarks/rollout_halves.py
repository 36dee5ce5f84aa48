"""Cases: prompts computed in the same engine or in another one, and attention groups that compute their prompts in the same steps."""

from __future__ import annotations

import multiprocessing
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from rollout_cache import says, workload_of
from rollout_models import CACHE_BYTES, DEVICE, ON_GPU, engine_of, k3_model, say_of
from rollout_rows import Given, Row, row
from rollout_workload import Run, Workload, drive

from driftline.services.rollout.engine import Engine
from driftline.services.rollout.handover import Decoder, Pair, RemotePrefiller
from driftline.services.rollout.pairing import Costs, Pairing, simulate
from driftline.services.rollout.pairing import Workload as Turns
from driftline.services.rollout.runner import DecodeBatch, PrefillBatch

__all__ = ["disaggregated", "pairing"]


def _engine(device: int, positions: int, batch: int) -> Engine:
    """In whichever process it is asked for."""
    if ON_GPU:
        torch.cuda.set_device(device)
        import learner_step
        import rollout_models

        learner_step.DEVICE = rollout_models.DEVICE = torch.device("cuda", device)
    else:
        torch.set_num_threads(1)
    return engine_of(k3_model(positions), max_batch=batch, cache_bytes=CACHE_BYTES // 3)


def _inline_half(device: int, load: Workload, limit_s: float, pipe: Any) -> None:
    """Half of the trajectories in one engine, in a process of its own."""
    engine = _engine(device, load.longest + 64, load.trajectories)
    drive(engine, load._replace(turns=1, branch=0, sampled=4, seed=99), limit_s=60)
    pipe.send("ready")
    pipe.recv()
    run = drive(engine, load, limit_s=limit_s)
    pipe.send((run.tokens_per_s, run.seconds, run.turns, run.hit_rate))


def disaggregated(given: Given) -> list[Row]:
    """The same workload on two engines that do both, and on one that computes prompts and one that decodes; two devices where there are two, else shared."""
    load = workload_of(given)
    if given.quick:
        load = load._replace(trajectories=8, members=4, turns=5, branch=2)
    elif not ON_GPU:
        load = load._replace(trajectories=16, turns=12, branch=6)
    second = 1 if given.devices > 1 else 0
    half = load._replace(trajectories=load.trajectories // 2)
    share = given.left / 3  # of the work itself: beside it processes begin, and kernels are built in each
    inline = _inline(half, (0, second), share)
    run, handed, nbytes, refused = _pair(load, second, share)
    where = "2 devices" if second else "one device, shared" if ON_GPU else "one CPU, shared"
    note = f"two processes, {where}; {says(load)}"
    rate, seconds = sum(r[0] for r in inline), max(r[1] for r in inline)
    return [
        row("tokens sampled, prompts and decoding apart", run.tokens_per_s, "tokens/s", peer="inline, two engines", peer_value=rate,
            note=f"{run.turns} turns in {run.seconds:.1f} s; inline {sum(r[2] for r in inline)} in {seconds:.1f} s; {note}"),
        row("a hand-over", nbytes / max(1, handed) / 2**20, "MiB", note=f"{handed} of them, {refused} refused; all rows, states, routes and who wrote them; of each turn the whole prompt's"),
        row("prompt tokens that were cached where they are computed", 100 * run.hit_rate, "%", peer="inline, two engines", peer_value=100 * inline[0][3]),
    ]


def _inline(half: Workload, devices: tuple[int, int], limit_s: float) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for i, device in enumerate(devices):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_inline_half, args=(device, half._replace(seed=i), limit_s, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        if not pipe.poll(120):
            raise TimeoutError("an engine was not built in 120 s")
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join(20)
    return results


def _pair(load: Workload, second: int, limit_s: float) -> tuple[Run, int, int, int]:
    decoding = _engine(0, load.longest + 64, load.trajectories)
    drive(decoding, load._replace(turns=1, branch=0, sampled=4, seed=99), limit_s=60)
    with RemotePrefiller(partial(_engine, second, load.longest + 64, load.trajectories)) as remote:
        pair = Pair(remote, Decoder(decoding))
        drive(pair, load._replace(turns=1, branch=0, sampled=4, seed=97), limit_s=60)
        handed, nbytes = pair.handed, pair.handed_bytes
        run = drive(pair, load, limit_s=limit_s)
        return run, pair.handed - handed, pair.handed_bytes - nbytes, pair.refused


def pairing(given: Given) -> list[Row]:
    """Costs measured here, groups in lockstep simulated."""
    costs, note = measured_costs(given)
    rows = [
        row("cost of a step that decodes", 1e3 * costs.decode_s, "ms", note=f"and {1e6 * costs.decode_row_s:.3g} us a row; {note}"),
        row("cost of a step's prompts", 1e3 * costs.prefill_s, "ms", note=f"and {1e6 * costs.prefill_token_s:.3g} us a token"),
    ]
    step = costs.of(64, 0)
    turns = Turns(trajectories=64, turns=8 if given.quick else 30, prompt=256, sampled=32, tool_s=40 * step, prefill_tokens=2048)
    for groups in (2, 4):
        apart = simulate(Pairing(groups, 0.0), costs, turns)
        for windows in (2, 8):
            paired = simulate(Pairing(groups, windows * step), costs, turns)
            rows.append(row(f"{groups} groups in lockstep, a window of {windows} steps", paired.tokens_per_s, "tokens/s, simulated", peer="not paired", peer_value=apart.tokens_per_s,
                            note=f"steps with prompts {paired.long_steps} of {paired.steps}, not paired {apart.long_steps} of {apart.steps}; a prompt waits p50/p99 "
                                 f"{1e3 * paired.wait(0.5):.1f}/{1e3 * paired.wait(0.99):.1f} ms, not paired {1e3 * apart.wait(0.5):.1f}/{1e3 * apart.wait(0.99):.1f}"))
    return rows


def measured_costs(given: Given) -> tuple[Costs, str]:
    """Of an engine's runner at histories of 256 tokens; medians."""
    sizes = ((16, 64, 128), (64, 512, 2048)) if ON_GPU else ((4, 16, 32), (64, 256, 512))
    model = k3_model(4096)
    most, context = max(sizes[0]), 256
    engine = engine_of(model, max_batch=most, cache_bytes=CACHE_BYTES // 4)
    pages = -(-(context + max(sizes[1])) // 64) + 1

    def tables(rows: int, width: int) -> np.ndarray:
        return (1 + np.arange(rows * width, dtype=np.int32) % (engine.pool.pages - 1)).reshape(rows, width)

    def decode(rows: int) -> None:
        engine.runner.decode(DecodeBatch(np.full((rows, 1), 5, dtype=np.int64), np.arange(rows, dtype=np.int32), tables(rows, 5), np.full(rows, context, dtype=np.int32),
                                         np.arange(rows, dtype=np.uint64), np.zeros(rows, dtype=np.int64), np.ones(rows, dtype=np.float32)))

    def prefill(tokens: int) -> None:
        engine.runner.prefill(PrefillBatch(
            np.full(tokens, 5, dtype=np.int64), [tokens], np.zeros(1, dtype=np.int32), tables(1, pages), np.full(1, context, dtype=np.int32),
            np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.float32), sample=False))
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    def median(what: Any, size: int) -> float:
        what(size)
        times = []
        for _ in range(3 if given.quick else 7):
            began = time.perf_counter()
            what(size)
            times.append(time.perf_counter() - began)
        return float(np.median(times))

    costs = Costs.fitted([(n, median(decode, n)) for n in sizes[0]], [(n, median(prefill, n)) for n in sizes[1]])
    return costs, f"{say_of(model)}, {sizes[0]} rows and {sizes[1]} tokens, least squares"
