"""States that change like policies do, and chains of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np

from driftline.messages.blobs import BlobRef
from driftline.messages.bus import Bus
from driftline.policy_store import BlobStore, HostTensor, PolicyWriter, State

T = TypeVar("T")


class Policy:
    """Weights that step: bf16 bits of which a share moves by one ulp, and a few small tensors. Larger than one shard."""

    def __init__(self, seed: int = 0, elements: int = 1_500_000) -> None:
        self.rng = np.random.default_rng(seed)
        weights = (self.rng.standard_normal(elements).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        self.state: State = {
            "layers.0.weight": HostTensor.from_numpy(weights, "bfloat16"),
            "norm": HostTensor.from_numpy(np.ones(33, np.float32)),
            "scale": HostTensor.from_numpy(np.asarray(2.5, np.float64)),
            "empty": HostTensor.from_numpy(np.zeros((0, 4), np.float32)),
            "frozen": HostTensor.from_numpy(np.arange(64, dtype=np.int64)),
        }

    def step(self, share: float = 0.01) -> State:
        weights = self.state["layers.0.weight"].numpy().copy()
        weights[self.rng.random(weights.size) < share] ^= 1
        norm = self.state["norm"].numpy() * np.float32(1.001)
        self.state = {
            **self.state,
            "layers.0.weight": HostTensor.from_numpy(weights, "bfloat16"),
            "norm": HostTensor.from_numpy(norm),
        }
        return copy_of(self.state)


def copy_of(state: State) -> State:
    return {name: tensor.copy() for name, tensor in state.items()}


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(
        a[name].layout == b[name].layout and np.array_equal(a[name].data, b[name].data) for name in a
    )


async def publish_chain(
    bus: Bus, blobs: BlobStore, run: str, policy: Policy, count: int, full_every: int = 3
) -> tuple[PolicyWriter, list[State]]:
    writer = PolicyWriter(bus, blobs, run, full_every)
    assert await writer.resume() is None
    states = []
    for version in range(count):
        state = policy.step() if version else copy_of(policy.state)
        await writer.publish(state, version=version, learner_step=version, consumed=[f"g{version}"], numerics={"lr": 0.1},
                             batch=BlobRef(f"{version:032x}", 100, 1) if version else None)
        states.append(copy_of(policy.state))
    return writer, states


async def cut_after(turns: int, work: Coroutine[Any, Any, T]) -> tuple[asyncio.Task[T], bool]:
    """Cancel `work` after that many turns of the loop; the task, which is done, and whether the work was before it was cancelled."""
    task = asyncio.create_task(work)
    for _ in range(turns):
        if task.done():
            break
        await asyncio.sleep(0)
    finished = task.done()
    task.cancel()
    await asyncio.wait([task])
    return task, finished
