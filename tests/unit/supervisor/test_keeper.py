"""The keeper of processes: what dies comes back, what cannot be kept fails the run with its log, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftline.services.supervisor.children import ServiceSpec, log_tail
from driftline.services.supervisor.keeper import Keeper, ServiceFailed
from driftline.services.supervisor.restarts import GiveUp, Restart, RestartPolicy

QUICK = RestartPolicy(budget=3, window_s=60.0, first_s=0.01, longest_s=0.02)
WAIT_S = 30.0


def shell(name: str, script: str) -> ServiceSpec:
    return ServiceSpec(name, ("/bin/sh", "-c", script))


def lines_of(path: Path, count: int = 1) -> list[str]:
    deadline = time.monotonic() + WAIT_S
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, f"{path} never had {count} lines"
        time.sleep(0.01)
    return path.read_text().splitlines()


async def line_in(path: Path, count: int = 1) -> list[str]:
    return await asyncio.to_thread(lines_of, path, count)


def gone(pid: int) -> bool:
    """No such process, or only its unreaped remains."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while not gone(pid):
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.01)


async def until_gone(pid: int) -> None:
    await asyncio.to_thread(wait_gone, pid)


def test_restarts_come_later_each_time_and_end() -> None:
    policy = RestartPolicy(budget=5, window_s=60, first_s=0.5, longest_s=8)
    deaths = [float(second) for second in range(6)]
    decisions = [policy.after(deaths[: count + 1]) for count in range(6)]
    assert decisions == [Restart(0.5), Restart(1.0), Restart(2.0), Restart(4.0), Restart(8.0), GiveUp(6, 60)]


def test_deaths_long_ago_are_forgiven() -> None:
    assert RestartPolicy(budget=1, window_s=10).after([0.0, 100.0, 200.0]) == Restart(0.5)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=40).map(sorted))
def test_it_gives_up_exactly_when_the_window_holds_more_than_the_budget(deaths: list[float]) -> None:
    policy = RestartPolicy(budget=3, window_s=50)
    recent = [at for at in deaths if at > deaths[-1] - 50]
    assert isinstance(policy.after(deaths), GiveUp) == (len(recent) > 3)


async def test_a_service_that_dies_is_started_again(tmp_path: Path) -> None:
    """H14 (docs/field_failures.md)."""
    seen: list[Counter[str]] = []

    async def on_restart(restarts: Counter[str]) -> None:
        seen.append(Counter(restarts))

    lives = tmp_path / "lives"
    spec = shell("once", f"echo x >> {lives}; [ $(wc -l < {lives}) -ge 3 ] || exit 7; sleep 600")
    keeper = Keeper([spec], tmp_path, QUICK, on_restart=on_restart)
    task = asyncio.create_task(keeper.run())
    await line_in(lives, 3)
    keeper.terminate()
    await asyncio.wait_for(task, WAIT_S)
    assert keeper.restarts == Counter(once=2)
    assert seen == [Counter(once=1), Counter(once=2)]


async def test_a_service_that_always_dies_fails_with_the_tail_of_its_log(tmp_path: Path) -> None:
    """H3, H16 (docs/field_failures.md)."""
    spec = shell("hopeless", 'echo "{\\"event\\": \\"service failed\\", \\"level\\": \\"error\\", \\"cause\\": \\"no disk\\"}"; exit 1')
    other = tmp_path / "other"
    keeper = Keeper([spec, shell("healthy", f"echo $$ > {other}; sleep 600")], tmp_path, QUICK)
    with pytest.raises(ServiceFailed) as caught:
        await asyncio.wait_for(keeper.run(), WAIT_S)
    assert "hopeless" in str(caught.value)
    assert "died 4 times" in str(caught.value)
    assert "error   service failed cause=no disk" in str(caught.value)
    await until_gone(int((await line_in(other))[0]))


async def test_a_wrong_configuration_is_not_tried_again(tmp_path: Path) -> None:
    keeper = Keeper([shell("learner", "echo learner.lr is wrong; exit 2")], tmp_path, QUICK)
    with pytest.raises(ServiceFailed, match="configuration is wrong") as caught:
        await asyncio.wait_for(keeper.run(), WAIT_S)
    assert "learner.lr is wrong" in str(caught.value)
    assert not keeper.restarts


async def test_a_killed_service_is_started_again_and_its_signal_named(tmp_path: Path) -> None:
    keeper = Keeper([shell("victim", "kill -SEGV $$")], tmp_path, QUICK)
    with pytest.raises(ServiceFailed, match="SIGSEGV"):
        await asyncio.wait_for(keeper.run(), WAIT_S)


async def test_what_a_dead_service_left_behind_is_reaped(tmp_path: Path) -> None:
    """H28 (docs/field_failures.md)."""
    orphan, lives = tmp_path / "orphan", tmp_path / "lives"
    script = f"sleep 600 & echo $! >> {orphan}; echo x >> {lives}; [ $(wc -l < {lives}) -ge 2 ] || kill -KILL $$; wait"
    keeper = Keeper([shell("parent", script)], tmp_path, QUICK)
    task = asyncio.create_task(keeper.run())
    first, second = [int(pid) for pid in await line_in(orphan, 2)]
    await until_gone(first)
    keeper.terminate()
    await asyncio.wait_for(task, WAIT_S)
    await until_gone(second)


async def test_a_service_that_refuses_to_drain_is_killed(tmp_path: Path) -> None:
    """H33 (docs/field_failures.md)."""
    pid = tmp_path / "pid"
    keeper = Keeper([shell("stubborn", f"trap '' TERM; echo $$ > {pid}; while :; do sleep 600; done")], tmp_path, QUICK)
    task = asyncio.create_task(keeper.run())
    number = int((await line_in(pid))[0])
    keeper.terminate()
    await asyncio.wait({task}, timeout=0.2)
    assert not task.done()
    keeper.kill()
    await asyncio.wait_for(task, WAIT_S)
    await until_gone(number)


async def test_a_cancelled_keeper_leaves_no_process(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    task = asyncio.create_task(Keeper([shell("service", f"echo $$ > {pid}; sleep 600")], tmp_path, QUICK).run())
    number = int((await line_in(pid))[0])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert gone(number)


async def test_an_end_with_zero_before_the_run_is_over_counts_as_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftline.services.supervisor.keeper.END_NOTICE_S", 0.01)
    with pytest.raises(ServiceFailed, match="exit code 0"):
        await asyncio.wait_for(Keeper([shell("eager", "exit 0")], tmp_path, QUICK).run(), WAIT_S)


async def test_an_end_with_zero_just_before_the_keeper_hears_of_the_end_is_an_end(tmp_path: Path) -> None:
    done = tmp_path / "done"
    keeper = Keeper([shell("quick", f"echo x > {done}")], tmp_path, QUICK)
    task = asyncio.create_task(keeper.run())
    await line_in(done)
    keeper.ending()
    await asyncio.wait_for(task, WAIT_S)
    assert not keeper.restarts


async def test_a_service_killed_after_the_end_of_the_run_is_started_again_to_say_its_last_words(tmp_path: Path) -> None:
    """L4, H8: a learner that dies between the end of the run and its last outcomes must come back and write them."""
    lives, done = tmp_path / "lives", tmp_path / "done"
    script = f"echo x >> {lives}; if [ $(wc -l < {lives}) -ge 2 ]; then echo y > {done}; exit 0; fi; sleep 600"
    keeper = Keeper([shell("learner", script)], tmp_path, QUICK)
    task = asyncio.create_task(keeper.run())
    await line_in(lives)
    keeper.ending()
    os.kill(keeper.alive["learner"], signal.SIGKILL)
    await asyncio.wait_for(task, WAIT_S)
    assert done.exists()
    assert keeper.restarts == Counter(learner=1)


PARENT = """
import asyncio, sys
from pathlib import Path
from driftline.services.supervisor.children import ServiceSpec, guard
from driftline.services.supervisor.keeper import Keeper

async def main(folder):
    apart = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    await guard(apart.pid)
    (folder / "apart").write_text(f"{apart.pid}\\n")
    await Keeper([ServiceSpec("child", ("/bin/sh", "-c", f"echo $$ > {folder}/child; exec sleep 600"))], folder).run()

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_nothing_survives_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    try:
        child, apart = int(lines_of(tmp_path / "child")[0]), int(lines_of(tmp_path / "apart")[0])
        assert not gone(child)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_gone(child)
    wait_gone(apart)


def test_a_log_tail_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text('plain words\n{"event": "failed", "level": "error", "cause": "why", "exception": "Traceback"}\n{"other": 1}\n')
    assert log_tail(path) == 'plain words\nerror   failed cause=why\nTraceback\n{"other": 1}'
    assert "no log" in log_tail(tmp_path / "absent")
