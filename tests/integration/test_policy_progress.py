"""Bars where a person looks, nothing anywhere else, and work that stops when whoever waited for it does."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path

import pytest
from policy_commands import declared, published, weights

from driftline.commands.policy_move import Wanted, _write
from driftline.commands.policy_open import OpenRun
from driftline.commands.progress import Meter, Stopped, in_thread
from driftline.messages.blobs import BlobRef
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import topology
from driftline.policy_store import MemoryBlobs, PolicyReader, PolicyWriter


async def ran(*arguments: object, stderr: int) -> tuple[asyncio.subprocess.Process, bytes]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "driftline", "policy", *map(str, arguments), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=stderr,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    return process, out


async def test_a_terminal_sees_bars_and_a_pipe_sees_json(nats_url: str, fresh_run: str) -> None:
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 2)
    ours, theirs = os.openpty()
    try:
        process, out = await ran("verify", fresh_run, "--json", "--url", nats_url, stderr=theirs)
        drawn = os.read(ours, 65536).decode(errors="replace")
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 0
    assert json.loads(out)["intact"] is True
    assert "version 1" in drawn
    assert "/s" in drawn
    read, write = os.pipe()
    try:
        process, out = await ran("verify", fresh_run, "--json", "--url", nats_url, stderr=write)
    finally:
        os.close(write)
    with os.fdopen(read, "rb") as said:
        assert said.read() == b""
    assert process.returncode == 0
    assert json.loads(out)["intact"] is True


async def test_cancelled_work_is_stopped_at_its_next_count_and_waited_for() -> None:
    meter, began = Meter(), threading.Event()
    counts = 0

    def work() -> None:
        nonlocal counts
        while True:
            began.set()
            meter.add(1)
            counts += 1

    job = asyncio.ensure_future(in_thread(meter, work))
    await asyncio.to_thread(began.wait)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    seen = counts
    await asyncio.sleep(0)
    assert counts == seen == meter.total
    with pytest.raises(Stopped):
        meter.add(1)


class Stalling(MemoryBlobs):
    """Answers nothing once `asked` is set; until then everything."""

    def __init__(self) -> None:
        super().__init__()
        self.stalls, self.asked = False, asyncio.Event()

    async def get(self, ref: BlobRef) -> bytes:
        if self.stalls:
            self.asked.set()
            await asyncio.Event().wait()
        return await super().get(ref)


async def test_an_export_that_is_interrupted_leaves_nothing(memory_bus: MemoryBus, fresh_run: str, tmp_path: Path) -> None:
    await memory_bus.declare(topology(fresh_run))
    blobs, meter = Stalling(), Meter()
    writer = PolicyWriter(memory_bus, blobs, fresh_run)
    await writer.resume()
    manifest = await writer.publish(weights(), version=0, learner_step=0)
    run = OpenRun(fresh_run, memory_bus, blobs, PolicyReader(memory_bus, blobs, fresh_run), meter)  # type: ignore[arg-type]
    blobs.stalls = True
    job = asyncio.ensure_future(_write(run, manifest, tmp_path / "out", Wanted({}, 2**40, False)))
    await blobs.asked.wait()
    assert os.listdir(tmp_path) == ["out.partial"]
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert os.listdir(tmp_path) == []
    blobs.stalls = False
    await _write(run, manifest, tmp_path / "out", Wanted({"config.json": b"{}"}, 2**40, False))
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
