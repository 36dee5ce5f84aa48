"""What people and the wire get wrong, against the real commands: a sentence and an exit code, or one failed member, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from loop_cases import admit, groups_of, head_at, outcomes, sampled, tiny
from loop_processes import WAIT_S, driftline, service_arguments, write_config

from driftline.messages.codec import encode
from driftline.messages.dead_letters import dead_letters
from driftline.messages.nats_bus import NatsBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import Graded, Metrics, Outcome, Trajectory
from driftline.policy_store.blobs import JetStreamBlobs
from driftline.policy_store.reader import PolicyReader
from driftline.services.runtime import run_topology

REWARD = '''
import time

def tasks(index, rng):
    return f"say {rng.randint(0, 10**9)}", "ok"

def reward(prompt, answer, completion):
    if completion == "raise":
        raise KeyError("on purpose")
    if completion == "hang":
        time.sleep(3600)
    if completion == "nan":
        return float("nan")
    return float(completion == answer)
'''


async def refused(folder: Path, *arguments: str) -> tuple[int, str]:
    async with driftline(folder, *arguments) as process:
        ended = await process.ended()
    assert "Traceback" not in ended.output
    return ended.code, ended.output


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[run\nname = 1", ["broken.toml", "not valid TOML"]),
        ("[run]\nstepps = 3\n", ["run.stepps", "run.steps"]),
        ("[lerner]\nlr = 1.0\n", ["lerner", "learner"]),
        ("[run]\nsteps = 'many'\n", ["run.steps", "many"]),
        ("[run]\ngroup_size = 1\n", ["min_group_members", "group_size"]),
        ('[policy]\ninit = "nowhere"\n', ["policy.init", "nowhere", "driftline pretrain"]),
        ('[tasks]\nfamily = "spel_backward"\n', ["tasks.family", "spel_backward"]),
        ('[tasks]\nsource = "python:absent.py"\n', ["tasks.source", "absent.py"]),
    ],
    ids=["not toml", "unknown field", "unknown section", "wrong type", "group of one", "no checkpoint", "no such family", "no such file"],
)
async def test_a_wrong_run_file_is_refused_with_the_field_before_anything_starts(tmp_path: Path, text: str, named: list[str]) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(text)
    code, output = await refused(tmp_path, "run", str(file))
    assert code == 2
    assert not [word for word in named if word not in output], output
    assert not (tmp_path / "runs").exists()


async def test_a_run_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    code, output = await refused(tmp_path, "run", str(tmp_path / "absent.toml"))
    assert code == 2
    assert "absent.toml" in output


@pytest.mark.parametrize("service", ["grader", "dispatcher"])
async def test_a_service_without_its_broker_says_which_setting_named_it(tmp_path: Path, service: str) -> None:
    config = write_config(tiny("alone", broker={"connect_timeout_s": 1.0}), tmp_path / "run.toml")
    code, output = await refused(tmp_path, *service_arguments(service, config, "nats://127.0.0.1:9"))
    assert code == 3
    assert "broker.url" in output
    assert "nats://127.0.0.1:9" in output


async def test_a_run_on_a_broker_that_is_not_there_fails_with_the_setting(tmp_path: Path) -> None:
    config = tiny("alone", run={"dir": str(tmp_path / "runs")}, broker={"url": "nats://127.0.0.1:9", "connect_timeout_s": 1.0})
    code, output = await refused(tmp_path, "run", str(write_config(config, tmp_path / "run.toml")), "--plain")
    assert code == 3
    assert "broker.url" in output


class Future(Trajectory):
    """What a newer release might send."""

    schema_version: ClassVar[int] = 99


def cut_short(trajectory: Trajectory) -> bytes:
    return encode(trajectory.model_copy(update={"logprobs": trajectory.logprobs[:-1]}))


def of_a_future_version(trajectory: Trajectory) -> bytes:
    return encode(Future.model_construct(**dict(trajectory)))


def cut_off(trajectory: Trajectory) -> bytes:
    return encode(trajectory)[:40]


def no_frame(trajectory: Trajectory) -> bytes:
    return b"hello"


WRONG: dict[str, tuple[Callable[[Trajectory], bytes], str]] = {
    "lengths": (cut_short, "logprobs has"),
    "version": (of_a_future_version, "99"),
    "cut": (cut_off, ""),
    "bytes": (no_frame, ""),
}


def say(trajectories: list[Trajectory], *texts: str) -> list[Trajectory]:
    return [t.model_copy(update={"text": text}) for t, text in zip(trajectories, texts, strict=True)]


@pytest.mark.slow
async def test_bad_rewards_and_bad_messages_cost_a_member_or_a_letter_and_no_process(tmp_path: Path, nats_url: str, fresh_run: str) -> None:
    (tmp_path / "own.py").write_text(REWARD)
    config = tiny(
        fresh_run, run={"groups_per_step": 1, "steps": 2}, tasks={"source": f"python:{tmp_path / 'own.py'}", "family": "", "params": {}},
        grader={"deadline_s": 1.0},
    )
    file, subjects = write_config(config, tmp_path / "run.toml"), Subjects(fresh_run)
    hopeless, halved, whole = groups_of(config, range(3))

    async def send(bus: NatsBus, trajectories: list[Trajectory]) -> None:
        for t in trajectories:
            await bus.publish(subjects.trajectory(t.group), t, id=f"{fresh_run}/trajectory/{t.group}/{t.member}")

    async with (
        asyncio.timeout(WAIT_S), await NatsBus.connect(nats_url, name="test") as bus,
        driftline(tmp_path, *service_arguments("grader", file, nats_url)) as grader,
        driftline(tmp_path, *service_arguments("learner", file, nats_url)) as learner,
    ):
        await bus.declare(run_topology(config))
        blobs = JetStreamBlobs(bus, fresh_run)
        await admit(bus, [hopeless])
        await send(bus, say(sampled([hopeless]), "raise", "hang", "nan", "ok"))
        (failed,) = await outcomes(bus, fresh_run, 1)
        await admit(bus, [halved])
        await send(bus, say(sampled([halved]), "raise", "nan", "ok", "wrong"))
        await head_at(bus, blobs, fresh_run, 1)

        (odd, *_) = sampled([whole])
        for name, (damage, _) in WRONG.items():
            await bus.publish_bytes(subjects.trajectory("odd"), damage(odd), id=f"odd/trajectory/{name}")
        await bus.publish_bytes(subjects.graded("odd"), no_frame(odd), id="odd/graded/bytes")
        foreign = Graded(run=fresh_run, trajectory=odd.model_copy(update={"index": 77}), reward=1.0)
        await admit(bus, [whole])
        await bus.publish(subjects.graded("odd"), foreign, id="odd/graded/foreign")
        while len(letters := await dead_letters(bus, fresh_run)) < len(WRONG) + 2:
            assert grader.alive, grader.log
            assert learner.alive, learner.log
            await asyncio.sleep(0.05)
        await send(bus, say(sampled([whole], version=1), "ok", "wrong", "ok", "wrong"))
        ends = await outcomes(bus, fresh_run, 3)
        codes = [(await process.ended()).code for process in (grader, learner)]
        manifests = [await PolicyReader(bus, blobs, fresh_run).manifest(version) for version in (1, 2)]
        numbers = await bus.last(subjects.stream("METRICS"), subjects.metrics("grader"))

    assert codes == [0, 0]
    assert (failed.outcome, failed.members) == (Outcome.FAILED, 4)
    assert "3 of 4 members failed" in failed.reason
    assert [cause for cause in ("raised", "deadline", "not_a_number", "on purpose") if cause not in failed.reason] == []
    assert [(e.group, e.outcome, e.version, e.members) for e in ends[1:]] == [
        (halved.group, Outcome.TRAINED, 1, 2), (whole.group, Outcome.TRAINED, 2, 4),
    ]
    assert [[c.split("/")[1:] for c in m.consumed] for m in manifests] == [
        [[halved.group, "2"], [halved.group, "3"]], [[whole.group, str(member)] for member in range(4)],
    ]
    by_kind = {kind: [letter for letter in letters if letter.kind == kind] for kind in ("trajectories", "graded")}
    reasons = [letter.reason for letter in by_kind["trajectories"]]
    assert len(reasons) == len(WRONG)
    assert all(reasons)
    for _, (_, said) in WRONG.items():
        assert any(said in reason for reason in reasons), reasons
    assert len(by_kind["graded"]) == 2
    assert any("contradicts" in letter.reason for letter in by_kind["graded"])
    assert numbers is not None
    assert isinstance(numbers.message, Metrics)
    assert numbers.message.values | {"failed_raised": 2, "failed_deadline": 1, "failed_not_a_number": 2, "failed": 5, "graded": 7} == (
        numbers.message.values
    )
