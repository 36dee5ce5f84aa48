"""A part of the run that goes away for good: the others say so, and the run ends instead of waiting for ever.

Field failures of these kinds: H3 (a dead producer and a learner that polls for hours), H1, H19 (work that was lost while it ran), H16, H28,
H4 and H17 (places that are given back), H30, L4, L12.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from chaos_services import ALL, broker, complete, outcomes_of, services, small
from loop_processes import driftline

from driftline.messages.server import NatsServer
from driftline.messages.types import Outcome

pytestmark = pytest.mark.slow

HURRIED = {"group_deadline_s": 4.0, "max_failed_groups": 4}
PATIENCE = {"deadline_s": 2.0}


@pytest.mark.parametrize("victim", ["rollout-0", "grader"])
async def test_a_run_whose_only_producer_is_dead_for_good_ends_as_failed(tmp_path: Path, victim: str) -> None:
    config = small("deserted", tmp_path, run={"steps": 40, **HURRIED}, grader=PATIENCE)
    async with NatsServer(tmp_path / "store") as server, services(config, server.url) as running, broker(server, "deserted") as seen:
        await running.start(*ALL)
        await seen.reach(1)
        assert await running.stop(victim, signal.SIGKILL) == -signal.SIGKILL
        end = await seen.end()
        assert end.failed
        assert "in a row" in end.reason
        codes = await running.ended()
        assert codes == {name: 0 for name in ALL if name != victim}, {name: running.log(name)[-500:] for name in codes}
        report = await seen.audited()
        assert complete(report), report
        assert outcomes_of(report, Outcome.EXPIRED) >= 4
        assert all("members missing" in reason for reason in report.reasons[Outcome.EXPIRED.value])
        async with driftline(tmp_path, "status", "deserted", "--url", server.url) as command:
            said = await command.ended()
        assert said.code == 0, said.output
        assert "in a row failed" in " ".join(said.output.split())
        assert "expired" in said.output


async def test_a_run_whose_producer_comes_back_in_time_goes_on(tmp_path: Path) -> None:
    """What expired meanwhile has given its place back, and its number is not used again."""
    config = small("back", tmp_path, run={"steps": 4, "group_deadline_s": 4.0, "max_failed_groups": 0}, grader=PATIENCE)
    async with NatsServer(tmp_path / "store") as server, services(config, server.url) as running, broker(server, "back") as seen:
        await running.start(*ALL)
        await seen.reach(1)
        await running.stop("rollout-0", signal.SIGKILL)
        await seen.outcome(Outcome.EXPIRED)
        await running.start("rollout-1")
        assert await running.ended() == dict.fromkeys((*(name for name in ALL if name != "rollout-0"), "rollout-1"), 0)
        report = await seen.audited()
        assert complete(report), report
        assert (await seen.end()).version == 4
        assert report.cursor == report.admitted
