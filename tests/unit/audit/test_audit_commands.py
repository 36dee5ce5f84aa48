"""`driftline audit` and `driftline dead-letters` against a real broker: what they print, what they change, how they exit."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from audit_runs import Scripted, scripted

from driftline.commands import dead_letters as commands
from driftline.messages import ConfigError, NatsBus, dead_letters, topology
from driftline.messages.types import Retried
from driftline.services.audit.text import CLEAN
from driftline.services.dispatcher.admission import group_id


def driftline(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "driftline", *arguments], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    return done


async def command(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(driftline, *arguments, "--url", url)


async def test_a_clean_run_prints_one_line_of_findings_and_exits_0(nats_bus: NatsBus, nats_url: str, fresh_run: str) -> None:
    story = await scripted(nats_bus, fresh_run)
    await story.finish()
    done = await command(nats_url, "audit", fresh_run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == CLEAN
    assert "5 admitted = 5 ended + 0 open" in done.stdout
    assert "10 = 8 trained + 2 untrained (zero_variance 2) + 0 never arrived + 0 in flight" in done.stdout


async def test_findings_are_printed_with_their_ids_and_exit_1(nats_bus: NatsBus, nats_url: str, fresh_run: str) -> None:
    story = await scripted(nats_bus, fresh_run)
    await story.admit(6)
    await nats_bus.publish(story.names.retried(group_id(6), 1), Retried(run=fresh_run, group=story.group(6), at=0.0), id="r")
    done = await command(nats_url, "audit", fresh_run, "--finished")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-3:] == [
        "index_missing  5: no group was admitted with this number, and 6 was",
        f"unfinished  {group_id(6)}: admitted as number 6, never ended, and the run is over",
        "2 findings",
    ]
    document = json.loads((await command(nats_url, "audit", fresh_run, "--finished", "--json")).stdout)
    assert [(finding["kind"], finding["id"]) for finding in document["findings"]] == [("index_missing", "5"), ("unfinished", group_id(6))]
    assert (document["admitted"], document["retries"], document["trajectories"]["in_flight"]) == (6, 1, 2)


async def test_a_run_file_gives_the_bounds_and_must_be_the_runs_own(nats_bus: NatsBus, nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    await scripted(nats_bus, fresh_run)
    file = tmp_path / "run.toml"
    file.write_text(f'[run]\nname = "{fresh_run}"\nmax_lag = 1\ngroups_per_step = 2\n')
    done = await command(nats_url, "audit", fresh_run, "--run-file", str(file))
    assert done.returncode == 1, done.stderr
    assert f"over_admitted  {group_id(4)}: was let in as the 5th open group; the bound is (1 + 1) * 2" in done.stdout
    other = await command(nats_url, "audit", "another", "--run-file", str(file))
    assert (other.returncode, "is the run file of" in other.stderr) == (2, True)


async def test_a_run_that_does_not_exist_is_named_and_exits_2(nats_url: str) -> None:
    for arguments in (("audit", "nowhere"), ("dead-letters", "ls", "nowhere")):
        done = await command(nats_url, *arguments)
        assert done.returncode == 2
        assert "'nowhere': the broker has no such run" in done.stderr


def test_a_broker_that_is_away_exits_3() -> None:
    done = driftline("audit", "x", "--url", "nats://127.0.0.1:1")
    assert (done.returncode, "127.0.0.1:1" in done.stderr) == (3, True)


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        (commands.requeue, {}), (commands.requeue, {"numbers": [1], "all_": True}), (commands.requeue, {"kind": "graded", "all_": True}),
        (commands.show, {}), (commands.drop, {"yes": True}), (commands.drop, {"all_": True}),
    ],
)  # fmt: skip
def test_nothing_is_done_without_saying_to_which_and_yes(change: Callable[..., None], arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        change("x", url="nats://127.0.0.1:1", **arguments)


async def buried(bus: NatsBus, run: str) -> Scripted:
    """Letter 1 is a retry's group that is open, 2 is of a group that has ended, 3 is no message."""
    story = await scripted(bus, run)
    await story.admit(5)
    consumers = {spec.durable: spec for spec in topology(run).consumers}
    for index in (5, 4):
        await bus.publish(story.names.groups, story.group(index), id=f"q{index}")
        [delivery] = await bus.pull(consumers["rollout"], batch=1, timeout_s=5)
        await delivery.dead_letter("poison \x1b[31m")
    await bus.publish_bytes(story.names.graded(group_id(5)), bytes(range(256)) * 2, id="junk")
    assert await bus.pull(consumers["learner"], batch=1, timeout_s=0.5) == []
    return story


async def test_letters_are_listed_and_shown_decoded_or_as_bytes(nats_bus: NatsBus, nats_url: str, fresh_run: str) -> None:
    await buried(nats_bus, fresh_run)
    listed = (await command(nats_url, "dead-letters", "ls", fresh_run)).stdout
    assert [line.split()[0] for line in listed.splitlines()] == ["1", "2", "3"]
    assert "\x1b" not in listed
    assert f"groups        {group_id(5)}" in listed
    rows = json.loads((await command(nats_url, "dead-letters", "ls", fresh_run, "--json", "--kind", "graded")).stdout)
    assert [(row["seq"], row["kind"], row["group"], row["size"]) for row in rows] == [(3, "graded", group_id(5), 512)]
    shown = (await command(nats_url, "dead-letters", "show", fresh_run, "1", "3")).stdout
    assert f"x-original-subject: dl.v1.{fresh_run}.groups" in shown
    assert 'group/1 {' in shown
    assert f'"group": "{group_id(5)}"' in shown
    assert "does not decode" in shown
    assert "00000040  40 41 42 43 44 45 46 47 48 49 4a 4b 4c 4d 4e 4f  @ABCDEFGHIJKLMNO" in shown
    assert "and 256 bytes more" in shown


async def test_requeueing_all_queues_what_can_be_and_says_why_not_of_the_rest(nats_bus: NatsBus, nats_url: str, fresh_run: str) -> None:
    story = await buried(nats_bus, fresh_run)
    done = await command(nats_url, "dead-letters", "requeue", fresh_run, "--all")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [f"1 queued on {story.names.groups}"]
    assert f"its group {group_id(4)} has ended as zero_variance" in done.stderr
    assert "still cannot be read" in done.stderr
    assert [letter.seq for letter in await dead_letters(nats_bus, fresh_run)] == [2, 3]
    [raw] = await nats_bus.read(story.names.stream("GROUPS"), story.names.groups)
    assert raw.headers["Nats-Msg-Id"] == f"requeue/DL-{fresh_run}-DEAD/1"
    forced = await command(nats_url, "dead-letters", "requeue", fresh_run, "2", "--force")
    assert (forced.returncode, forced.stdout) == (0, f"2 queued on {story.names.groups}\n")


async def test_dropping_needs_a_yes_and_takes_only_what_was_named(nats_bus: NatsBus, nats_url: str, fresh_run: str) -> None:
    await buried(nats_bus, fresh_run)
    assert (await command(nats_url, "dead-letters", "drop", fresh_run, "2")).returncode == 2
    assert len(await dead_letters(nats_bus, fresh_run)) == 3
    done = await command(nats_url, "dead-letters", "drop", fresh_run, "2", "--yes")
    assert (done.returncode, done.stdout) == (0, "2 dropped\n")
    assert [letter.seq for letter in await dead_letters(nats_bus, fresh_run)] == [1, 3]
    missing = await command(nats_url, "dead-letters", "drop", fresh_run, "2", "--yes")
    assert (missing.returncode, "no such dead letter" in missing.stderr) == (2, True)
    assert (await command(nats_url, "dead-letters", "drop", fresh_run, "--kind", "groups", "--yes")).stdout == "1 dropped\n"
