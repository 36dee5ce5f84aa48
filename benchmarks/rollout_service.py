"""Cases: what a new version costs an engine that is at work, and thousands of trajectories that wait for it."""

from __future__ import annotations

import resource
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rollout_models import ON_GPU, dense_model, engine_of, k3_model, released, say_of, warmed
from rollout_rows import Given, Row, row
from rollout_workload import Workload, drive

from driftline.messages.types import Sampling
from driftline.models.state import export_state
from driftline.policy_store.tensor import DTYPES, State, shards_of
from driftline.services.rollout.engine import Engine, Request
from driftline.services.rollout.runner import runner_for
from driftline.services.rollout.weights import EngineWeights, parameters_of
from driftline.services.tensors import to_host

__all__ = ["load", "updates"]

VERSIONS = 200
UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def updates(given: Given) -> list[Row]:
    """Versions applied between decode steps of running rows, of which so many elements changed; all rows must finish, each with the tokens it asked for."""
    rows: list[Row] = []
    versions = 20 if given.quick else VERSIONS
    shares = (0.01, 0.1, 1.0)
    for i, share in enumerate(shares):
        model = dense_model(1024) if ON_GPU else k3_model(1024)
        rows += _updates(model, share, versions, given.left / (len(shares) - i))
        del model
        released()
    return rows


def _updates(model: Any, share: float, versions: int, limit_s: float) -> list[Row]:
    until = time.perf_counter() + limit_s
    batch, asked = (64, 16) if ON_GPU else (16, 16)
    dtype = next(model.parameters()).dtype
    state = to_host(export_state(model, dtype))
    weights = EngineWeights(parameters_of(model), verify_every=50)
    weights.afresh()
    engine = engine_of(model, max_batch=batch, cache_bytes=2**30 if ON_GPU else 120 * 2**20)
    if weights.stage(state).reload:
        engine.load(0, export_state(model, dtype))
    flips = _flips(state, share)
    submitted, finished, right = 0, 0, 0
    pauses: list[float] = []
    staged_s: list[float] = []
    steps: list[float] = []
    version = 0
    if ON_GPU:
        warmed(engine, 1, 64)
    pool = ThreadPoolExecutor(8 if ON_GPU else 1)

    def moved(flip: tuple[Any, str, Any, np.ndarray]) -> None:
        shard, dtype_name, where, mask = flip
        data = state[shard.name].data[shard.start : shard.stop].view(UINT[DTYPES[dtype_name].width])
        before = data.copy()
        data[where] ^= mask
        weights.seen(shard, dtype_name, before.view(np.uint8), data.view(np.uint8))

    while version < versions and (version < 5 or time.perf_counter() < until):
        while engine.active + engine.waiting < 2 * batch:
            engine.submit_request(Request(f"r{submitted}", [1 + submitted % 200] * 8, Sampling(max_tokens=asked), submitted, stop_ids=()))
            submitted += 1
        for _ in range(2):
            at = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - at)
        version += 1
        at = time.perf_counter()
        list(pool.map(moved, flips))
        staged = weights.stage(state)
        staged_s.append(time.perf_counter() - at)
        at = time.perf_counter()
        engine.adopt(version, partial(weights.apply, staged))
        pauses.append(time.perf_counter() - at)
        for done in engine.take_completions():
            finished += 1
            right += len(done.tokens) == asked and bool(np.isfinite(done.logprobs).all())
    while not engine.idle:
        engine.step()
    done_last = engine.take_completions()
    finished, right = finished + len(done_last), right + sum(len(done.tokens) == asked for done in done_last)
    changed = sum(len(where) if isinstance(where, np.ndarray) else mask.size for _, _, where, mask in flips)
    total = sum(t.elements for t in state.values())
    p50, p99 = np.quantile(pauses, [0.5, 0.99])
    note = (f"{version} versions, {100 * changed / total:.3g} % of {total / 1e6:.3g}M elements each; gathered beside the engine in {1e3 * np.median(staged_s):.3g} ms; a step takes "
            f"{1e3 * np.median(steps):.3g} ms; {weights.counts.verified} times compared with the mirror; {say_of(model)}")
    del engine
    released()
    name = f"{100 * share:g} % changed"
    return [
        row(f"pause of a version, {name}, p50", 1e3 * p50, "ms", note=note),
        row(f"pause of a version, {name}, p99", 1e3 * p99, "ms"),
        row(f"requests that failed, {name}", float(submitted - right), "requests", bound=0.0, note=f"of {submitted}; {finished} finished over {version} versions"),
    ]


def _flips(state: State, share: float) -> list[tuple[Any, str, Any, np.ndarray]]:
    """Of each shard which elements change, and their lowest bit: a version and the next are each other's opposite."""
    rng = np.random.default_rng(0)
    flips = []
    for shard in shards_of((name, state[name].layout) for name in sorted(state)):
        dtype = state[shard.name].dtype
        width = DTYPES[dtype].width
        size = (shard.stop - shard.start) // width
        count = max(1, round(share * size))
        where: Any = slice(None) if share >= 1 else np.unique(rng.integers(0, size, count))
        flips.append((shard, dtype, where, np.ones(size if share >= 1 else len(where), dtype=UINT[width])))
    return flips


class _Timed:
    """A runner and the seconds spent in it: the rest of a step is scheduling."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.seconds = runner, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._runner, name)
        if name not in ("prefill", "decode", "begin_prefill", "begin_decode"):
            return found

        def timed(*given: Any, **named: Any) -> Any:
            at = time.perf_counter()
            answer = found(*given, **named)
            self.seconds += time.perf_counter() - at
            return _TimedPending(answer, self) if name.startswith("begin") else answer

        return timed


class _TimedPending:
    def __init__(self, pending: Any, owner: _Timed) -> None:
        self._pending, self._owner = pending, owner

    def result(self) -> Any:
        at = time.perf_counter()
        answer = self._pending.result()
        self._owner.seconds += time.perf_counter() - at
        return answer


def resident() -> int:
    """Bytes this process holds in memory."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # no /proc: the most it ever held
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load(given: Given) -> list[Row]:
    """Thousands of trajectories queued at once, with one whose tool takes long; memory, scheduling, and how full the batch is meanwhile."""
    count, batch = (300, 16) if given.quick else (4000, 64)
    work = Workload(trajectories=count, turns=2, members=8, system=64, task=16, sampled=8, tool=8, branch=0, tool_steps=8, slow=400, seed=5)
    model = k3_model(256)
    timed: list[_Timed] = []

    def runner(*given: Any, **named: Any) -> Any:
        timed.append(_Timed(runner_for(*given, **named)))
        return timed[-1]

    engine = engine_of(model, max_batch=batch, cache_bytes=160 * 2**20, runner=runner)
    drive(engine, work._replace(trajectories=2 * batch, turns=2, slow=0, seed=6), limit_s=30)
    watched = _Watched(engine, timed[-1])
    began = resident()
    run = drive(watched, work, limit_s=given.left)
    engine.cache.check()
    scheduling, active = np.array(watched.scheduling_s), np.array(watched.active_rows)
    quarters = [int(watched.resident[len(watched.resident) * i // 4]) for i in (1, 2, 3)] + [watched.resident[-1]]
    busy = active[watched.waiting_rows_array() > 0]
    note = f"{count} trajectories queued at once, {run.turns} turns and {len(scheduling)} steps in {run.seconds:.0f} s, {batch} rows; {say_of(model)}"
    return [
        row("scheduling of a step, p50", 1e3 * float(np.quantile(scheduling, 0.5)), "ms", note=f"a step without what the runner computes; {note}"),
        row("scheduling of a step, p99", 1e3 * float(np.quantile(scheduling, 0.99)), "ms", note=f"first quarter {1e3 * _p99(scheduling, 0):.3g}, last quarter {1e3 * _p99(scheduling, 3):.3g}"),
        row("memory at the end beside that after a quarter", (quarters[3] - quarters[0]) / 2**20, "MiB",
            note=f"resident {', '.join(f'{q / 2**20:.0f}' for q in quarters)} MiB at the quarters, {began / 2**20:.0f} before; answers are not kept"),
        row("rows at work while others waited", float(busy.mean()) if busy.size else None, "rows", bound=float(batch),
            note="counted when a step ends and those that finished have left: an eighth of 8-token answers; one trajectory's tool took 400 steps meanwhile and held no row"),
    ]


def _p99(values: np.ndarray, quarter: int) -> float:
    part = np.array_split(values, 4)[quarter]
    return float(np.quantile(part, 0.99)) if part.size else 0.0


class _Watched:
    def __init__(self, engine: Engine, timed: _Timed) -> None:
        self._engine, self._timed = engine, timed
        self.scheduling_s: list[float] = []
        self.active_rows: list[int] = []
        self._waiting: list[int] = []
        self.resident: list[int] = []

    @property
    def idle(self) -> bool:
        return self._engine.idle

    def submit_request(self, request: Request) -> None:
        self._engine.submit_request(request)

    def step(self) -> object:
        inside, at = self._timed.seconds, time.perf_counter()
        answer = self._engine.step()
        self.scheduling_s.append(time.perf_counter() - at - (self._timed.seconds - inside))
        self.active_rows.append(self._engine.active)
        self._waiting.append(self._engine.waiting)
        self.resident.append(resident())
        return answer

    def waiting_rows_array(self) -> np.ndarray:
        return np.array(self._waiting)

    def take_completions(self) -> list[Any]:
        return self._engine.take_completions()
