"""The audit over a real broker: a short scripted run, and what is done to it afterwards."""

from __future__ import annotations

import asyncio

import pytest
from audit_runs import Scripted, scripted

from driftline.messages import Bus, ConfigError, topology
from driftline.messages.recording import RecordedVersion, store_version
from driftline.messages.types import Outcome
from driftline.policy_store.manifest import manifest_subject
from driftline.services.audit.read import audit
from driftline.services.audit.report import Bounds, FindingKind, Report
from driftline.services.dispatcher.admission import group_id


def kinds(report: Report) -> list[tuple[FindingKind, str]]:
    return [(finding.kind, finding.id) for finding in report.findings]


async def test_a_whole_run_has_no_finding_and_its_numbers_are_the_ledgers(bus: Bus, fresh_run: str) -> None:
    story = await scripted(bus, fresh_run)
    await story.finish()
    report = await audit(bus, fresh_run, bounds=Bounds(2, 2))
    assert report.findings == ()
    assert report.finished == "scripted to its end"
    assert (report.cursor, report.admitted, report.open, report.ended, report.events) == (5, 5, 0, 5, 14)
    assert report.outcomes == {"trained": 4, "zero_variance": 1}
    assert (report.trajectories.total, report.trajectories.trained, report.trajectories.untrained) == (10, 8, {"zero_variance": 2})
    assert (report.versions.head, report.versions.manifests, report.versions.unverified) == (2, 3, 0)
    assert (report.capacity, report.peak_open) == (6, 5)


async def test_open_groups_and_their_queues_are_in_flight_until_the_run_is_over(bus: Bus, fresh_run: str) -> None:
    story = await scripted(bus, fresh_run)
    await story.admit(5)
    await bus.publish(story.names.groups, story.group(5), id="q5")
    await bus.publish_bytes(story.names.graded(group_id(5)), b"a member", id="g5")
    await bus.publish_bytes(story.names.graded(group_id(0)), b"again", id="g0")
    report = await audit(bus, fresh_run)
    assert (report.findings, report.open) == ((), 1)
    assert {plane: (c.in_flight, c.residue) for plane, c in report.queues.items()} == {"groups": (1, 0), "graded": (1, 1)}
    assert kinds(await audit(bus, fresh_run, finished=True)) == [(FindingKind.UNFINISHED, group_id(5))]


async def test_a_learner_killed_between_head_and_outcomes_leaves_no_finding_until_the_run_is_over(bus: Bus, fresh_run: str) -> None:
    story = await scripted(bus, fresh_run)
    await story.admit(5)
    await story.take(5, 3)
    await story.version(story.ids(5))
    assert (await audit(bus, fresh_run)).findings == ()
    assert kinds(await audit(bus, fresh_run, finished=True)) == [
        (FindingKind.UNFINISHED, group_id(5)), *((FindingKind.CONSUMED_UNTRAINED, id) for id in story.ids(5)),
    ]  # fmt: skip


async def test_what_is_wrong_in_the_broker_is_named(bus: Bus, fresh_run: str) -> None:
    story = await scripted(bus, fresh_run)
    await story.admit(6)
    await story.end(6, Outcome.STALE)
    await story.end(4, Outcome.STALE, id="again")
    await story.version(story.ids(0))
    await bus.publish_bytes(story.names.outcome("g1"), b"not a frame", id="junk")
    await bus.publish_bytes(story.names.trajectory("nobodys"), b"?", id="stray")
    await bus.publish_bytes(story.names.groups, b"?", id="no group")
    report = await audit(bus, fresh_run, finished=True)
    assert (FindingKind.INDEX_MISSING, "5") in kinds(report)
    assert (FindingKind.ENDED_TWICE, group_id(4)) in kinds(report)
    assert (FindingKind.TRAINED_TWICE, story.ids(0)[0]) in kinds(report)
    assert (FindingKind.STRAY_DELIVERY, "nobodys") in kinds(report)
    assert {kind for kind, _ in kinds(report)} == {
        FindingKind.INDEX_MISSING, FindingKind.ENDED_TWICE, FindingKind.TRAINED_TWICE, FindingKind.CONSUMED_UNTRAINED,
        FindingKind.STRAY_DELIVERY, FindingKind.UNREADABLE,
    }  # fmt: skip


async def test_an_event_deleted_from_the_ledger_is_missed(bus: Bus, fresh_run: str) -> None:
    story = await scripted(bus, fresh_run)
    ledger = story.names.stream("LEDGER")
    [raw] = await bus.read(ledger, story.names.admitted(group_id(1)))
    assert await bus.delete(ledger, raw.seq)
    assert (FindingKind.INDEX_MISSING, "1") in kinds(await audit(bus, fresh_run))


async def test_versions_whose_manifests_were_collected_are_compared_with_their_records(bus: Bus, fresh_run: str) -> None:
    story = await scripted(bus, fresh_run)
    policy = story.names.stream("POLICY")
    for manifest in story.manifests[:2]:
        await bus.purge(policy, manifest_subject(fresh_run, manifest.link))
    report = await audit(bus, fresh_run, finished=True)
    assert (report.findings, report.versions.manifests, report.versions.unverified) == ((), 1, 2)
    first = story.manifests[1]
    await store_version(bus, RecordedVersion(run=fresh_run, version=1, digest=first.digest, seal=first.seal, learner_step=1,
                                             consumed=tuple(story.ids(0))))
    report = await audit(bus, fresh_run, finished=True)
    assert (report.versions.records, report.versions.unverified) == (1, 0)
    assert kinds(report) == [(FindingKind.OUTCOME_DIFFERS, group_id(1))]


async def test_a_dead_letter_of_an_admitted_group_is_a_number_and_of_another_a_finding(bus: Bus, fresh_run: str) -> None:
    story = await scripted(bus, fresh_run)
    learner = next(spec for spec in topology(fresh_run).consumers if spec.durable == "learner")
    await bus.publish_bytes(story.names.graded(group_id(4)), b"junk", id="known")
    await bus.publish_bytes(story.names.graded("nobodys"), b"junk", id="unknown")
    assert await bus.pull(learner, batch=8, timeout_s=0.3) == []
    report = await audit(bus, fresh_run)
    assert report.dead_letters == {"graded": 2}
    assert kinds(report) == [(FindingKind.STRAY_LETTER, "nobodys")]


async def test_a_long_ledger_is_read_in_pages(bus: Bus, fresh_run: str) -> None:
    story = Scripted(bus, fresh_run)
    await story.start()
    for index in range(100):
        await story.admit(index)
        await story.end(index, Outcome.STALE)
    report = await audit(bus, fresh_run, finished=True)
    assert (report.findings, report.events, report.ended) == ((), 200, 100)


async def test_a_run_that_does_not_exist_is_named(bus: Bus) -> None:
    with pytest.raises(ConfigError, match="run = 'nowhere': the broker has no such run"):
        await audit(bus, "nowhere")


async def test_a_run_that_has_only_been_declared_has_no_finding(bus: Bus, fresh_run: str) -> None:
    await bus.declare(topology(fresh_run))
    report = await audit(bus, fresh_run, finished=True)
    assert (report.findings, report.admitted, report.versions.head) == ((), 0, -1)




async def test_audits_of_a_run_that_goes_on_meanwhile_find_nothing(bus: Bus, fresh_run: str) -> None:
    """Every reading is of a moving run: outcomes follow their version, versions follow the reading of the ledger."""
    story = Scripted(bus, fresh_run)
    await story.start()

    async def live() -> None:
        for first in range(0, 40, 4):
            await story.admit(*range(first, first + 4))
            for index in range(first, first + 4):
                await bus.publish(story.names.groups, story.group(index), id=f"q{index}")
            await story.step(first, first + 1)
            await story.end(first + 2, Outcome.STALE)
            await story.step(first + 3)

    running = asyncio.create_task(live())
    reports = []
    while not running.done():
        reports.append(await audit(bus, fresh_run, bounds=Bounds(1, 2)))
    await running
    assert [report.findings for report in reports] == [()] * len(reports)
    assert len({report.events for report in reports}) > 1
    assert (await audit(bus, fresh_run, finished=True)).findings == ()
