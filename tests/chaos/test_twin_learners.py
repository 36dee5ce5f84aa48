"""Two learners on one run: one of them leads, the other stops with a reason, and nothing is trained twice.

Field failures of these kinds: L1 (a batch applied twice), L20 (a command of a session that is over), W1, S2, H27.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from chaos_services import ALL, TWIN, broker, complete, services, small

from driftline.messages.server import NatsServer
from driftline.services.runtime import Exit

pytestmark = pytest.mark.slow


async def test_a_second_learner_is_refused_while_the_first_is_at_work(tmp_path: Path) -> None:
    config = small("twins", tmp_path, run={"steps": 3})
    async with NatsServer(tmp_path / "store") as server, services(config, server.url) as running, broker(server, "twins") as seen:
        await running.start("learner")
        await seen.reach(0)
        await running.start(TWIN)
        assert await running.exit_code(TWIN) == Exit.CONFLICT
        assert "is the learner of this run" in running.log(TWIN)
        await running.start(*(name for name in ALL if name != "learner"))
        assert await running.ended() == dict.fromkeys(ALL, 0)
        report = await seen.audited()
        assert complete(report), report


async def test_a_learner_that_wakes_after_it_was_replaced_stops_and_changes_nothing(tmp_path: Path) -> None:
    config = small("zombie", tmp_path, run={"steps": 12}, learner={"lease_s": 2.0})
    async with NatsServer(tmp_path / "store") as server, services(config, server.url) as running, broker(server, "zombie") as seen:
        await running.start(*ALL)
        await seen.reach(2)
        running.signal("learner", signal.SIGSTOP)
        await running.start(TWIN)
        at = await seen.reach(3)
        await seen.reach(at + 2)  # versions that only the second can have made
        running.signal("learner", signal.SIGCONT)
        # Or it finds first that the answer it had waited for is long overdue.
        assert await running.exit_code("learner") in (Exit.CONFLICT, Exit.BROKER), running.log("learner")[-2000:]
        names = {name for name in ALL if name != "learner"} | {TWIN}
        assert await running.ended() == dict.fromkeys(names, 0)
        report = await seen.audited()
        assert complete(report), report
        assert (await seen.end()).version == 12
