"""Services may start in any order, stop and come back, be added and be taken away: the run is the same run, and ends.

Field failures of these kinds: H23 (hang at start), H6 and S13 (an engine that starts when versions exist already), H7, H8 and H10 (the end
of the run: nothing is awaited that will never come, and the last version is measured), H33 (every service stops when asked), H13, L20, D3.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from chaos_services import ALL, broker, callers, complete, services, small

from driftline.messages.nats_bus import NatsBus
from driftline.messages.recording import load_batch
from driftline.messages.server import NatsServer
from driftline.policy_store.blobs import JetStreamBlobs
from driftline.policy_store.reader import PolicyReader

pytestmark = pytest.mark.slow

LEARNER_LAST = ("rollout-0", "evaluator", "grader", "policy-store", "dispatcher", "learner")
LEARNER_FIRST = ("learner", "policy-store", "evaluator", "grader", "rollout-0", "dispatcher")
PRODUCERS_LAST = ("dispatcher", "learner", "evaluator", "policy-store", "grader", "rollout-0")


@pytest.mark.parametrize("order", [LEARNER_LAST, LEARNER_FIRST, PRODUCERS_LAST], ids=["learner_last", "learner_first", "producers_last"])
async def test_a_run_whose_services_start_one_after_another_goes_to_its_end(tmp_path: Path, order: tuple[str, ...]) -> None:
    config = small("ordered", tmp_path)
    async with NatsServer(tmp_path / "store") as server, services(config, server.url) as running, broker(server, "ordered") as seen:
        for name in order:
            await running.start(name)
            await running.serving(name)
        assert await running.ended() == dict.fromkeys(ALL, 0)
        end, report = await seen.end(), await seen.audited()
        assert (end.version, end.failed) == (3, False)
        assert complete(report), report
        assert await seen.measured() == {0, 3}


async def test_services_that_are_there_before_the_broker_wait_for_it(tmp_path: Path) -> None:
    config = small("early", tmp_path, broker={"connect_timeout_s": 240})
    port = _free_port()
    server = NatsServer(tmp_path / "store", port)
    async with services(config, server.url) as running:
        await running.start(*ALL)
        await callers(port, ALL)
        async with server, broker(server, "early") as seen:
            assert await running.ended() == dict.fromkeys(ALL, 0)
            report = await seen.audited()
            assert complete(report), report
            assert (await seen.end()).version == 3


async def test_an_engine_is_added_and_another_taken_away_while_the_run_goes_on(tmp_path: Path) -> None:
    config = small("engines", tmp_path, run={"steps": 8})
    async with NatsServer(tmp_path / "store") as server, services(config, server.url) as running, broker(server, "engines") as seen:
        await running.start(*ALL)
        await seen.reach(1)
        # Nothing is admitted while the engines change places, so the run cannot be over before they have.
        assert await running.stop("dispatcher") == 0
        await running.start("rollout-1")
        await running.serving("rollout-1")
        assert await running.stop("rollout-0") == 0
        await running.start("dispatcher")
        assert await running.ended() == dict.fromkeys((*(name for name in ALL if name != "rollout-0"), "rollout-1"), 0)
        report = await seen.audited()
        assert complete(report), report
        assert await _engines(seen.bus, "engines", 1) == {"rollout-0"}
        assert await _engines(seen.bus, "engines", 8) == {"rollout-1"}


async def test_every_service_stops_when_asked_and_its_return_goes_on_with_the_run(tmp_path: Path) -> None:
    config = small("returns", tmp_path, run={"steps": 24})
    async with NatsServer(tmp_path / "store") as server, services(config, server.url) as running, broker(server, "returns") as seen:
        await running.start(*ALL)
        version = 0
        for name in (name for name in ALL if name != "dispatcher"):
            await running.serving(name)
            version = await seen.reach(version + 1)
            assert await running.stop(name) == 0, running.log(name)[-2000:]
            # While a service starts nothing is admitted: the run must not be over before each had its turn.
            assert await running.stop("dispatcher") == 0, running.log("dispatcher")[-2000:]
            await running.start(name)
            await running.serving(name)
            await running.start("dispatcher")
            await running.serving("dispatcher")
        assert await running.ended() == dict.fromkeys(ALL, 0)
        report = await seen.audited()
        assert complete(report), report
        assert (await seen.end()).version == 24


async def test_a_service_that_comes_after_the_end_ends_at_once(tmp_path: Path) -> None:
    config = small("over", tmp_path, run={"steps": 1})
    async with NatsServer(tmp_path / "store") as server, services(config, server.url) as running, broker(server, "over") as seen:
        await running.start(*ALL)
        assert await running.ended() == dict.fromkeys(ALL, 0)
        before = await seen.audited()
        await running.start(*ALL, "rollout-1")
        assert await running.ended() == dict.fromkeys((*ALL, "rollout-1"), 0)
        assert await seen.audited() == before
        assert complete(before), before


async def _engines(bus: NatsBus, run: str, version: int) -> set[str]:
    """Which engines sampled what a version was trained on."""
    manifest = await PolicyReader(bus, JetStreamBlobs(bus, run), run).manifest(version)
    assert manifest.batch is not None
    batch = await load_batch(bus, run, version, manifest.batch.ref)
    return {member.trajectory.engine for group in batch for member in group.members}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
