"""A stand-in for a service: `python scripted_child.py ROLE RUN URL [FOLDER]`, over a real broker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from driftline.messages.nats_bus import NatsBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import (
    Admitted,
    EvalResult,
    Group,
    Metrics,
    Outcome,
    OutcomeEvent,
    RunFinished,
    Task,
)
from driftline.services.runtime import finished


def second_life(folder: Path) -> None:
    for expected in folder.glob("* is expected"):
        file = folder / f"{expected.name.removesuffix(' is expected')}.pids"
        while not (file.exists() and len(file.read_text().splitlines()) >= 2):
            time.sleep(0.01)


async def learner(bus: NatsBus, run: str, folder: Path) -> None:
    """Two steps of a run, with everything a picture is made of, then the end; not before those that are expected to had their second life."""
    await asyncio.to_thread(second_life, folder)
    subjects = Subjects(run)
    for index, how in enumerate((Outcome.TRAINED, Outcome.TRAINED, Outcome.STALE)):
        group = Group(run=run, group=f"g{index:08d}", index=index, members=2,
                      task=Task(id="t", source="test", family="test", prompt="p"))
        await bus.publish(subjects.admitted(group.group), Admitted(run=run, group=group, at=0.0), id=f"a{index}")
        event = OutcomeEvent(run=run, group=group.group, outcome=how, lag=index, reason="lag 3 > 2" if how is Outcome.STALE else "")
        await bus.publish(subjects.outcome(group.group), event, id=f"o{index}")
    sampled = Metrics(run=run, service="rollout", instance="0", values={"tokens_sampled": 100, "tokens_per_s": 10})
    await bus.publish(subjects.metrics("rollout"), sampled, id="r")
    for version in (0, 2):
        result = EvalResult(run=run, version=version, tasks=4, samples=2, reward_sampled=0.25 * (1 + version), reward_greedy=0.5)
        await bus.publish(subjects.evaluation(version), result, id=f"e{version}")
    for version in (1, 2):
        values = {"reward_train": 0.1 * version, "k3_lag0": 1e-9, "k3": 1e-4, "lag_max": 1.0, "tokens_trained": 50.0,
                  "version": version, "entropy": 1.0}
        step = Metrics(run=run, service="learner", step=version, values=values, series={"lag_histogram": [3, 1]})
        await bus.publish(subjects.metrics("learner"), step, id=f"m{version}")
    await bus.publish(subjects.finished, RunFinished(run=run, version=2, reason="2 steps"), id="end")


async def main() -> None:
    role, run, url = sys.argv[1:4]
    folder = Path(sys.argv[4])
    with (folder / f"{role}.pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
        first = pids.tell() <= len(f"{os.getpid()}\n")
    async with await NatsBus.connect(url, name=role) as bus:
        match role:
            case "learner":
                await learner(bus, run, folder)
            case "broker-killer" if first:
                (child,) = [int(pid) for pid in (folder / "broker.pid").read_text().split()]
                os.kill(child, signal.SIGKILL)
                os._exit(1)
            case "flaky" if first:
                print("flaky: first life ends", flush=True)
                os._exit(1)
            case "hopeless":
                print("hopeless: the disk is on fire", flush=True)
                os._exit(1)
        await finished(bus, run)


if __name__ == "__main__":
    asyncio.run(main())
