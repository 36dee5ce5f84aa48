"""How long a run is without a part of it: from `kill -9` to the first thing that the restarted part does.

One run of real processes (two rollout engines), kept alive by the supervisor's Keeper with its usual first pause of 0.5 s. A part is killed
when the run has made two versions since it last recovered, `--repeats` times each. `bound` is what the same event takes in the undisturbed
run: the longest time without one in 20 s.

    python benchmarks/recovery.py [--device cpu-2core] [--repeats 5]
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import nats
import structlog

from driftline.messages.codec import decode
from driftline.messages.nats_bus import NatsBus
from driftline.messages.server import NatsServer
from driftline.messages.subjects import Subjects
from driftline.messages.types import Trajectory
from driftline.services.config import Config
from driftline.services.runtime import configure_logging, run_topology
from driftline.services.supervisor.folder import RunFolder
from driftline.services.supervisor.keeper import Keeper
from driftline.services.supervisor.local import service_specs
from driftline.services.supervisor.restarts import RestartPolicy
from driftline.services.telemetry import http_port

RUN = "recovery"
PORT = 19400
CALM_S = 20.0
WAIT_S = 120.0
# Every kill is as the first of its kind: the pauses of a service that keeps dying are not what is measured.
POLICY = RestartPolicy(budget=1000, window_s=1.0)
Row = dict[str, object]


class Watch:
    """When each kind of thing last happened, heard from the broker as it is stored."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self._happened = asyncio.Event()

    def saw(self, kind: str) -> None:
        self.times.setdefault(kind, []).append(time.monotonic())
        self._happened.set()

    async def first(self, kind: str, after: float) -> float:
        """Seconds from `after` to the first event of this kind behind it."""
        async with asyncio.timeout(WAIT_S):
            while True:
                late = [at for at in self.times.get(kind, ()) if at > after]
                if late:
                    return late[0] - after
                self._happened.clear()
                await self._happened.wait()

    async def versions(self, count: int) -> None:
        after = time.monotonic()
        for _ in range(count):
            after += await self.first("version", after)

    def calm(self, kind: str, since: float) -> float:
        """The longest time without it since `since`. Members come in bursts, so the median would say nothing."""
        times = [since, *(at for at in self.times.get(kind, ()) if at > since)]
        return max((b - a for a, b in pairwise(times)), default=float("nan"))


class Bench:
    def __init__(self, config: Config, folder: RunFolder, server: NatsServer) -> None:
        self.config, self.folder, self.server, self.watch = config, folder, server, Watch()
        self.keeper = Keeper(service_specs(config, folder, server.url), folder.logs, POLICY)

    async def listen(self, client: Any) -> None:
        subjects, saw = Subjects(RUN), self.watch.saw

        def when(kind: str) -> Callable[[Any], Awaitable[None]]:
            async def hear(_: Any) -> None:
                saw(kind)

            return hear

        async def trajectory(message: Any) -> None:
            found = decode(message.data)
            saw("trajectory")
            if isinstance(found, Trajectory):
                saw(found.engine)

        await client.subscribe(subjects.head, cb=when("version"))
        await client.subscribe(f"{subjects.root}.graded.>", cb=when("graded"))
        await client.subscribe(f"{subjects.root}.ledger.admitted.>", cb=when("admitted"))
        await client.subscribe(f"{subjects.root}.eval.>", cb=when("eval"))
        await client.subscribe(f"{subjects.root}.trajectories.>", cb=trajectory)
        await client.flush()

    def kill(self, name: str) -> float:
        os.kill(self.keeper.alive[name], signal.SIGKILL)
        return time.monotonic()

    async def serves(self, name: str, after: float) -> float:
        """Until the process that follows says that it has started."""
        log, known = self.keeper.log(name), self.keeper.log(name).stat().st_size
        async with asyncio.timeout(WAIT_S):
            while b'"service started"' not in log.read_bytes()[known:]:  # noqa: ASYNC110 - a log announces nothing
                await asyncio.sleep(0.02)
        return time.monotonic() - after

    async def restart_broker(self, graceful: bool) -> float:
        began = time.monotonic()
        if graceful:
            await self.server.stop()
        else:
            await self.server.kill()
        await self.server.start()
        return began

    async def healthy(self, after: float) -> float:
        """Until no service says any more that the broker does not answer; watched until the run has made two more versions."""
        names = [("learner", ""), ("rollout", "0"), ("rollout", "1"), ("dispatcher", ""), ("grader", ""), ("evaluator", ""), ("policy-store", "")]
        ports = [http_port(PORT, name, instance) for name, instance in names]
        going = asyncio.create_task(self.watch.versions(2))
        last = after
        while not going.done():
            if not all(await asyncio.gather(*map(_healthz, ports))):
                last = time.monotonic()
            await asyncio.sleep(0.1)
        await going
        return last - after


async def _healthz(port: int) -> bool:
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
            answer = await reader.readline()
            writer.close()
    except (OSError, TimeoutError):
        return False
    return b" 200 " in answer


async def measure(bench: Bench, repeats: int) -> dict[str, list[float]]:
    """Seconds, by case."""
    watch, found = bench.watch, dict[str, list[float]]()

    def add(case: str, seconds: float) -> None:
        found.setdefault(case, []).append(seconds)
        print(f"  {case}: {seconds:.2f} s", flush=True)

    for _ in range(repeats):
        at = bench.kill("learner")
        add("learner killed, next version", await watch.first("version", at))
        await watch.versions(2)
        at = bench.kill("rollout-0")
        other = await watch.first("rollout-1", at)
        add("rollout killed, next trajectory of the other engine", other)
        add("rollout killed, next trajectory of the restarted engine", await watch.first("rollout-0", at))
        await watch.versions(2)
        for name, kind, words in (("grader", "graded", "next graded trajectory"), ("dispatcher", "admitted", "next admission")):
            at = bench.kill(name)
            add(f"{name} killed, {words}", await watch.first(kind, at))
            await watch.versions(2)
        for name in ("evaluator", "policy-store"):
            at = bench.kill(name)
            add(f"{name} killed, serving again", await bench.serves(name, at))
            await watch.versions(2)
        for graceful, how in ((False, "killed"), (True, "stopped")):
            at = await bench.restart_broker(graceful)
            healthy = asyncio.create_task(bench.healthy(at))
            add(f"broker {how} and started, next version", await watch.first("version", at))
            add(f"broker {how} and started, every service healthy", await healthy)
            await watch.versions(2)
    return found


async def bench(folder: Path, repeats: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    config = Config.model_validate({
        "run": {"name": RUN, "dir": str(folder), "steps": 100_000, "groups_per_step": 4, "group_size": 8, "max_lag": 2},
        "tasks": {"params": {"min_word_len": 6, "max_word_len": 9}, "heldout": 8},
        "sampling": {"max_tokens": 14}, "rollout": {"engines": 2},
        "learner": {"eps_low": 0.2, "eps_high": 0.2, "checkpoint_every": 2, "probe_members": 8},
        "evaluator": {"every": 20, "samples": 1}, "telemetry": {"http_port": PORT},
    })
    run_folder = RunFolder.create(config)
    with (folder / "bench.log").open("w") as stream:
        configure_logging("bench", stream=stream)
        async with NatsServer(folder / "store") as server, await NatsBus.connect(server.url, name="bench") as bus:
            await bus.declare(run_topology(config))
            this = Bench(config, run_folder, server)
            client = await nats.connect(server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, error_cb=_expected)
            await this.listen(client)
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(this.keeper.run())
                await this.watch.versions(4)
                since = time.monotonic()
                await asyncio.sleep(CALM_S)
                calm = {kind: this.watch.calm(kind, since) for kind in this.watch.times}
                found = await measure(this, repeats)
                this.keeper.kill()
                await keeping
            await client.close()
        structlog.reset_defaults()
    return found, calm


async def _expected(error: Exception) -> None:
    """The broker is killed here on purpose."""


def rows(found: dict[str, list[float]], calm: dict[str, float]) -> list[Row]:
    events = {"next version": "version", "next trajectory of the other engine": "rollout-1", "next trajectory of the restarted engine": "rollout-0",
              "next graded trajectory": "graded", "next admission": "admitted"}
    made: list[Row] = []
    for case, seconds in found.items():
        usual = calm.get(events.get(case.split(", ")[1], ""))
        made.append({
            "case": case, "ours": round(statistics.median(seconds), 2), "unit": "s", "peer": None, "peer_value": None, "ratio": None,
            "bound": None if usual is None else float(f"{usual:.2g}"),
            "note": f"median; longest {max(seconds):.2f} s, shortest {min(seconds):.2f} s of {len(seconds)}",
        })
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu-2core")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="driftline-recovery-") as folder:
        found, calm = asyncio.run(bench(Path(folder), given.repeats))
    table = rows(found, calm)
    print(f"{'case':58} {'median':>7} {'usual':>7}  note")
    for row in table:
        usual = "-" if row["bound"] is None else f"{row['bound']}"
        print(f"{row['case']!s:58} {row['ours']!s:>7} {usual:>7}  {row['note']}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    result = {
        "command": f"python benchmarks/recovery.py --device {given.device} --repeats {given.repeats}", "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "device": given.device,
        "note": f"Load average at the start {load:.1f}. `bound`: the longest time without such an event in 20 undisturbed seconds.", "rows": table,
    }
    path = Path(__file__).parent / "results" / given.device / "recovery.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
