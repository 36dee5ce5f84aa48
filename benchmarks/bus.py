"""What the Bus costs beside raw nats-py: messages and megabytes a second, stored and acknowledged, in the same run on the same broker.

    python benchmarks/bus.py [--seconds 1.5] [--repeats 3] [--out benchmarks/results/cpu-2core/bus.json]

Both sides publish the same frames with a message id into a file-backed work queue, and take them out again; what the Bus takes out it
also decodes. "one" has one publish in flight, "window" 64. Taking out is a pull of a batch and a confirmed acknowledgement of each, the
batch at once, as services do it (`ack_sync`); the note has nats-py's `ack()` beside it, which may be lost. The sides alternate, each figure
is the median of the repeats, and ratio is Bus over raw. Client and server are pinned to a core each where there are two. The load
average before and after is in every row: on a busy machine the rates mean little, and the client's CPU per message most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import nats
import numpy as np
import uvloop

from driftline.messages import (
    ConsumerSpec,
    Discard,
    Message,
    NatsBus,
    NatsServer,
    Retention,
    StreamSpec,
    Topology,
    encode,
    register,
)
from driftline.messages.types import array_field

SIZES = {"1 KiB": 1024, "64 KiB": 64 * 1024, "512 KiB": 512 * 1024}
BATCHES = (1, 32, 128)
WINDOW = 64
STORED = 96 << 20
"""Bytes put into the queue before they are taken out, at most."""


@register
class Payload(Message):
    """A message of any size that does not compress."""

    schema_name: ClassVar[str] = "bench_payload"
    data: Annotated[np.ndarray, array_field("u1")]


def payload(frame_bytes: int) -> Payload:
    """Its frame has exactly `frame_bytes`, arrays being padded to 16."""
    empty = len(encode(Payload(run="bench", data=np.zeros(1, np.uint8)))) - 16
    size = (frame_bytes - empty) // 16 * 16
    return Payload(run="bench", data=np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))


class Side:
    """One way to publish and to take out. `publish(n)` stores n messages; `take(n, batch)` pulls and acknowledges n."""

    def __init__(self, publish: Callable[..., Awaitable[None]], take: Callable[..., Awaitable[None]]) -> None:
        self.publish, self.take = publish, take


def topology() -> Topology:
    work = StreamSpec("DL-bench-WORK", ("dl.v1.bench.work.>",), Retention.WORK_QUEUE, Discard.NEW, 1 << 30)
    return Topology("bench", (work,), (ConsumerSpec(work.name, "workers", "dl.v1.bench.work.>", max_ack_pending=65536),))


SUBJECT = "dl.v1.bench.work.a"


async def windowed(count: int, window: int, one: Callable[[], Awaitable[Any]]) -> None:
    """`count` calls of `one`, `window` at a time."""
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await one()

    await asyncio.gather(*(worker() for _ in range(min(window, count))))


def bus_side(bus: NatsBus, frame: bytes) -> Side:
    consumer = topology().consumers[0]

    async def publish(count: int, window: int) -> None:
        await windowed(count, window, lambda: bus.publish_bytes(SUBJECT, frame, id=uuid.uuid4().hex))

    async def take(count: int, batch: int) -> None:
        while count > 0:
            deliveries = await bus.pull(consumer, batch=min(batch, count), timeout_s=10)
            await asyncio.gather(*(delivery.ack() for delivery in deliveries))
            count -= len(deliveries)

    return Side(publish, take)


def raw_side(client: Any, frame: bytes, *, confirmed: bool) -> Side:
    js = client.jetstream(timeout=30)
    pulling: list[Any] = []

    async def publish(count: int, window: int) -> None:
        await windowed(count, window, lambda: js.publish(SUBJECT, frame, headers={"Nats-Msg-Id": uuid.uuid4().hex}))

    async def take(count: int, batch: int) -> None:
        if not pulling:
            pulling.append(await js.pull_subscribe_bind("workers", "DL-bench-WORK", pending_bytes_limit=256 << 20))
        while count > 0:
            messages = await pulling[0].fetch(min(batch, count), timeout=10)
            await asyncio.gather(*(m.ack_sync(timeout=10) if confirmed else m.ack() for m in messages))
            count -= len(messages)
        await client.flush()

    return Side(publish, take)


ROOT = Path(__file__).resolve().parents[1]

Rate = tuple[float, float]
"""Messages per second, and microseconds of this process's CPU per message: the second hardly depends on what else runs."""


async def measure(
    work: Callable[[int], Awaitable[None]], seconds: float, most: int, *, before: Callable[[int], Awaitable[None]] | None = None,
    after: Callable[[int], Awaitable[None]] | None = None,
) -> Rate:
    """The rate of `work(n)`, with n grown until it takes about `seconds` or reaches `most`. `before` and `after` are not timed."""
    count = min(16, most)
    while True:
        if before is not None:
            await before(count)
        began, spent = time.perf_counter(), time.process_time()
        await work(count)
        took, used = time.perf_counter() - began, time.process_time() - spent
        if after is not None:
            await after(count)
        if took >= seconds / 2 or count >= most:
            return count / took, 1e6 * used / count
        count = min(most, max(count * 2, int(count * seconds / max(took, 1e-4))))


async def run(seconds: float, repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        async with NatsServer(Path(folder)) as server, await NatsBus.connect(server.url, name="bench") as bus:
            cores = sorted(os.sched_getaffinity(0))
            if len(cores) > 1 and server.pid is not None:
                os.sched_setaffinity(0, {cores[0]})
                for task in os.listdir(f"/proc/{server.pid}/task"):
                    os.sched_setaffinity(int(task), {cores[1]})
            await bus.declare(topology())
            client = await nats.connect(server.url, pending_size=64 << 20)
            for name, size in SIZES.items():
                frame = encode(payload(size))
                ours, theirs = bus_side(bus, frame), raw_side(client, frame, confirmed=True)
                quick = raw_side(client, frame, confirmed=False)
                most = STORED // size
                for window_name, window in (("one", 1), ("window", WINDOW)):
                    found: dict[str, list[Rate]] = {"bus": [], "raw": []}
                    before = os.getloadavg()[0]
                    for _ in range(repeats):
                        found["raw"].append(await measure(partial(theirs.publish, window=window), seconds, most, after=partial(quick.take, batch=32)))
                        found["bus"].append(await measure(partial(ours.publish, window=window), seconds, most, after=partial(quick.take, batch=32)))
                    rows.append(row(f"publish, {window_name}", name, len(frame), found, before))
                for batch in BATCHES:
                    found = {"bus": [], "raw": [], "raw_unconfirmed": []}
                    before = os.getloadavg()[0]
                    for _ in range(repeats):
                        found["raw"].append(await measure(partial(theirs.take, batch=batch), seconds, most, before=partial(theirs.publish, window=WINDOW)))
                        found["bus"].append(await measure(partial(ours.take, batch=batch), seconds, most, before=partial(theirs.publish, window=WINDOW)))
                        found["raw_unconfirmed"].append(await measure(partial(quick.take, batch=batch), seconds, most, before=partial(theirs.publish, window=WINDOW)))
                    rows.append(row(f"pull {batch} and ack", name, len(frame), found, before))
            await client.close()
    return rows


def row(what: str, size: str, frame: int, found: dict[str, list[Rate]], before: float) -> dict[str, Any]:
    rates = {side: statistics.median(rate for rate, _ in values) for side, values in found.items()}
    used = {side: statistics.median(cpu for _, cpu in values) for side, values in found.items()}
    mb_s = {side: value * frame / 1e6 for side, value in rates.items()}
    note = (f"{mb_s['bus']:.3g} against {mb_s['raw']:.3g} MB/s; CPU of the client {used['bus']:.0f} against {used['raw']:.0f} µs a message; "
            f"load {before:.1f} to {os.getloadavg()[0]:.1f}")
    if "raw_unconfirmed" in rates:
        note += f"; raw with unconfirmed acks {rates['raw_unconfirmed']:.0f} msg/s"
    made = {
        "case": f"{what}, {size}", "ours": round(rates["bus"], 1), "unit": "msg/s", "peer": "raw nats-py", "peer_value": round(rates["raw"], 1),
        "ratio": round(statistics.median(b / r for (b, _), (r, _) in zip(found["bus"], found["raw"], strict=True)), 3), "bound": None, "note": note,
    }
    print(json.dumps(made, ensure_ascii=False), flush=True)
    return made


def write(path: Path, rows: list[dict[str, Any]], command: str) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    path.write_text(json.dumps({
        "command": command, "commit": commit, "date": time.strftime("%Y-%m-%d"), "device": f"cpu-{os.cpu_count()}core",
        "note": f"Stored in a file stream and acknowledged; window {WINDOW}; client and server on a core each. The Bus also decodes what it pulls.",
        "rows": rows,
    }, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one measurement, about")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(run(options.seconds, options.repeats))
    if options.out is not None:
        write(options.out, rows, "python benchmarks/bus.py " + " ".join(sys.argv[1:]))


if __name__ == "__main__":
    main()
