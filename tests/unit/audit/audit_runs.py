"""A run's services, played: what each would write to the broker, for audits and dead letters."""

from __future__ import annotations

import numpy as np

from driftline.messages import Bus, Subjects, topology
from driftline.messages.types import Admitted, Group, Outcome, OutcomeEvent, RunFinished, Taken, Task
from driftline.policy_store import HostTensor, JetStreamBlobs, PolicyWriter
from driftline.policy_store.manifest import Manifest
from driftline.services.dispatcher.admission import group_id


class Scripted:
    """Each call writes what one service would."""

    def __init__(self, bus: Bus, run: str) -> None:
        self.bus, self.run, self.names = bus, run, Subjects(run)
        self.writer = PolicyWriter(bus, JetStreamBlobs(bus, run), run, 10)
        self.manifests: list[Manifest] = []

    async def start(self) -> None:
        await self.bus.declare(topology(self.run))
        await self.writer.resume()
        await self.version([])

    def group(self, index: int) -> Group:
        task = Task(id=f"t{index}", source="test", family="spell", prompt="abc")
        return Group(run=self.run, group=group_id(index), index=index, task=task, members=2)

    def ids(self, *indices: int) -> list[str]:
        return [f"{self.run}/{group_id(index)}/{member}" for index in indices for member in (0, 1)]

    async def admit(self, *indices: int) -> None:
        for index in indices:
            group = self.group(index)
            await self.bus.publish(self.names.admitted(group.group), Admitted(run=self.run, group=group, at=0.0), id=f"a{index}", expect_last=0)

    async def take(self, index: int, version: int) -> None:
        event = Taken(run=self.run, group=group_id(index), version=version, epoch=1)
        await self.bus.publish(self.names.outcome(group_id(index)), event, id=f"t{index}")

    async def end(self, index: int, outcome: Outcome, version: int = -1, id: str = "o") -> None:
        used = (0, 1) if outcome is Outcome.TRAINED else ()
        event = OutcomeEvent(run=self.run, group=group_id(index), outcome=outcome, version=version, arrived=(0, 1), trained=used)
        await self.bus.publish(self.names.outcome(group_id(index)), event, id=f"{id}{index}")

    async def version(self, consumed: list[str]) -> None:
        number = len(self.manifests)
        state = {"w": HostTensor.from_numpy(np.full(8, number, np.float32))}
        self.manifests.append(await self.writer.publish(state, version=number, learner_step=number, consumed=consumed))

    async def step(self, *indices: int) -> None:
        version = len(self.manifests)
        for index in indices:
            await self.take(index, version)
        await self.version(self.ids(*indices))
        for index in indices:
            await self.end(index, Outcome.TRAINED, version)

    async def finish(self) -> None:
        await self.bus.publish(self.names.finished, RunFinished(run=self.run, version=0, reason="scripted to its end"), id="f")


async def scripted(bus: Bus, run: str) -> Scripted:
    """Groups 0 to 4: two versions of two groups, and one group without variance."""
    story = Scripted(bus, run)
    await story.start()
    await story.admit(0, 1, 2, 3, 4)
    await story.step(0, 1)
    await story.end(4, Outcome.ZERO_VARIANCE)
    await story.step(2, 3)
    return story
