"""`driftline policy ...` as a person calls it, in this process, and runs for it to look at."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from typer.testing import CliRunner

from driftline.cli import app, exit_code
from driftline.messages.errors import DriftlineError
from driftline.messages.nats_bus import NatsBus
from driftline.messages.subjects import topology
from driftline.policy_store import HostTensor, JetStreamBlobs, PolicyWriter, State

MIB = 2**20


@dataclass(frozen=True)
class Said:
    """What a command printed and how it ended, as `main` ends it."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """stdout, which must be one JSON document and nothing else."""
        return json.loads(self.out)


def _invoke(arguments: list[str], env: dict[str, str] | None) -> Said:
    result = CliRunner().invoke(app, arguments, env=env)
    if isinstance(result.exception, DriftlineError):
        return Said(exit_code(result.exception), result.stdout, f"{result.stderr}error: {result.exception}")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Said(result.exit_code, result.stdout, result.stderr)


async def policy(*arguments: object, url: str, credentials: object = None) -> Said:
    """`driftline policy ARGUMENTS --url URL`, in a thread of its own: the command runs a loop of its own."""
    env = {} if credentials is None else {"DRIFTLINE_CREDENTIALS": str(credentials)}
    return await asyncio.to_thread(_invoke, ["policy", *map(str, arguments), "--url", url], env)


def weights(seed: int = 0, elements: int = 40_000) -> State:
    """A small model's: bf16 matrices, an fp32 norm, and a tensor nothing trains."""
    rng = np.random.default_rng(seed)
    bits = (rng.standard_normal(elements).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return {
        "layers.0.weight": HostTensor.from_numpy(bits.reshape(-1, 100), "bfloat16"),
        "layers.1.weight": HostTensor.from_numpy(bits[::-1].reshape(-1, 100).copy(), "bfloat16"),
        "norm": HostTensor.from_numpy(np.ones(33, np.float32)),
        "frozen": HostTensor.from_numpy(np.arange(64, dtype=np.int64)),
    }


def stepped(state: State, step: int) -> State:
    """One weight in fifty of the first matrix, one ulp away."""
    bits = state["layers.0.weight"].numpy().copy()
    bits.reshape(-1)[step % 50 :: 50] ^= 1
    return {**state, "layers.0.weight": HostTensor.from_numpy(bits, "bfloat16")}


@asynccontextmanager
async def declared(url: str, run: str) -> AsyncIterator[NatsBus]:
    async with await NatsBus.connect(url, name="test") as bus:
        await bus.declare(topology(run, queue_bytes=16 * MIB, blob_bytes=64 * MIB))
        yield bus


async def published(bus: NatsBus, run: str, count: int, *, full_every: int = 3, start: State | None = None) -> list[State]:
    """A run of `count` versions; what each was."""
    writer = PolicyWriter(bus, JetStreamBlobs(bus, run), run, full_every)
    await writer.resume()
    states: list[State] = []
    state = start or weights()
    for version in range(count):
        state = stepped(state, version) if version else state
        await writer.publish(state, version=version, learner_step=version, consumed=[f"{run}/g{version}/0"], numerics={"lr": 0.1, "worst": float("nan")})
        states.append(state)
    return states
