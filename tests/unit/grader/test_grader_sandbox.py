"""Rewards that attack: each costs its own member, with its cause, and the next item is graded. What a level does not prevent is said here too."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from driftline.environments.sandbox.box import LEVELS, Level, choose, fault
from driftline.environments.source import load_source
from driftline.messages.errors import ConfigError
from driftline.messages.types import Task
from driftline.services.grader.pool import GraderPool
from driftline.services.grader.wire import Failure, Verdict

# The completion is the attack: 1.0 when it succeeded, 0.0 when it was refused.
SCRIPT = """
def tasks(index, rng):
    return f"q{rng.random()}", "ok"

def reward(prompt, answer, completion):
    if completion == "ok":
        return 1.0
    space = {}
    exec(completion, space)
    return space.get("result", 0.0)
"""
TRY = """
result = 0.0
try:
    {body}
    result = 1.0
except OSError:
    pass
"""
ISOLATED = (Level.BUBBLEWRAP, Level.NAMESPACE)


def attempt(body: str) -> str:
    """An attack that is refused with an OSError, or succeeds."""
    return TRY.format(body=body.strip().replace("\n", "\n    "))


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Level:
    found: Level = request.param
    if found is not Level.RLIMIT and (why := fault(found)):
        pytest.skip(why)
    return found


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "attacks.py").write_text(SCRIPT)
    return f"python:{tmp_path / 'tasks' / 'attacks.py'}"


@pytest.fixture
def task(spec: str) -> Task:
    return load_source(spec).task(0, 0)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks" / "credentials"  # beside the tasks, where people put it
    folder.mkdir()
    (folder / "grader.creds").write_text("secret")
    return folder


@pytest.fixture
async def pool(spec: str, level: Level, private: Path) -> AsyncIterator[GraderPool]:
    async with GraderPool([spec], deadline_s=4.0, memory_mb=256, sandbox=level, hidden=[str(private)]) as started:
        yield started


async def attacked(pool: GraderPool, task: Task, code: str) -> Verdict:
    """The verdict on an attack; whatever it was, the next item is graded."""
    verdict = await pool.grade(task, code)
    assert (await pool.grade(task, "ok")).reward == 1.0
    return verdict


async def gone(there: Callable[[], bool]) -> bool:
    """Whether it goes away: processes that are not our children cannot be waited for."""
    for _ in range(1000):
        if not there():
            return True
        await asyncio.sleep(0.01)
    return False


def marked(marker: str) -> bool:
    """Whether a process with this word on its command line runs."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in words and words.startswith(sys.executable.encode()):
                return True
    return False


async def test_the_level_in_use_is_the_one_asked_for(pool: GraderPool, level: Level) -> None:
    assert pool.sandbox.level is level


async def test_no_socket_is_opened(pool: GraderPool, task: Task) -> None:
    for family in ("AF_INET, socket.SOCK_STREAM", "AF_INET, socket.SOCK_DGRAM", "AF_INET6, socket.SOCK_STREAM", "AF_UNIX, socket.SOCK_STREAM", "AF_NETLINK, socket.SOCK_RAW"):
        assert (await attacked(pool, task, attempt(f"import socket; socket.socket(socket.{family})"))).reward == 0.0, family
    assert pool.replaced == 0


async def test_a_server_on_this_machine_is_not_reached_and_the_cause_says_why(pool: GraderPool, task: Task, tmp_path: Path) -> None:
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        path = tmp_path / "tasks" / "server"
        unix.bind(str(path))
        unix.listen()
        verdict = await attacked(pool, task, f"import socket; socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 1)")
        assert verdict.failure is Failure.RAISED
        assert "grader.sandbox" in verdict.cause
        assert (await attacked(pool, task, attempt(f"import socket; socket.socket(socket.AF_UNIX).connect({str(path)!r})"))).reward == 0.0


async def test_secrets_are_not_read_where_files_are_isolated(
    spec: str, task: Task, level: Level, private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At `rlimit` the files are those of the user; the broker's credentials are then as safe as from any program of this user."""
    key = tmp_path / "home" / ".ssh" / "id_test"
    key.parent.mkdir(parents=True)
    key.write_text("secret")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    async with GraderPool([spec], sandbox=level, hidden=[str(private)]) as pool:
        for path in (str(key), "/etc/shadow", str(private / "grader.creds")):
            readable = os.access(path, os.R_OK)
            verdict = await attacked(pool, task, f"result = 0.0\ntry:\n    result = float(len(open({path!r}).read()) > 0)\nexcept OSError:\n    pass")
            assert verdict.reward == float(readable and level is Level.RLIMIT), path


async def test_nothing_outside_tmp_is_written_where_files_are_isolated(pool: GraderPool, task: Task, level: Level, tmp_path: Path) -> None:
    targets = [str(tmp_path / "tasks" / "new"), str(tmp_path / "tasks" / "attacks.py"), "/var/tmp/driftline_test", "/usr/driftline_test", "/dev/driftline_test"]
    verdict = await attacked(pool, task, attempt("import pathlib; pathlib.Path('/tmp/driftline_scratch').write_text('x')"))
    assert verdict.reward == 1.0
    assert ("driftline_scratch" in os.listdir("/tmp")) == (level not in ISOLATED)
    if level not in ISOLATED:
        os.unlink("/tmp/driftline_scratch")
    if level in ISOLATED:
        for target in targets:
            assert (await attacked(pool, task, attempt(f"open({target!r}, 'a').close()"))).reward == 0.0, target


async def test_no_file_grows_beyond_its_limit_and_the_disk_is_not_filled(pool: GraderPool, task: Task, level: Level) -> None:
    one = "import os, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + attempt("f = open('/tmp/driftline_big', 'wb'); f.write(b'x' * 2**20 * 65); f.close()")
    assert (await attacked(pool, task, one)).reward == 0.0
    if level not in ISOLATED:
        os.unlink("/tmp/driftline_big")
    if level in ISOLATED:  # many files: the private /tmp is full before the disk is
        many = attempt("for i in range(6): open(f'/tmp/big{i}', 'wb').write(b'x' * 2**20 * 50)")
        verdict = await attacked(pool, task, many)
        assert verdict.reward == 0.0 or verdict.failure is not None


async def test_a_fork_bomb_ends_with_its_sandbox(pool: GraderPool, task: Task) -> None:
    """A bounded one: as root Linux does not count processes, so what must hold everywhere is that all of them die."""
    code = "import os, subprocess, sys, time\ntry:\n    for i in range(60): subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)', 'BOMB'])\nexcept OSError:\n    pass\ntime.sleep(600)"
    marker = f"bomb{os.getpid()}"
    verdict = await attacked(pool, task, code.replace("BOMB", marker))
    assert verdict.failure is Failure.DEADLINE
    assert await gone(lambda: marked(marker))


@pytest.mark.skipif(os.geteuid() == 0, reason="Linux does not count the processes of root")
async def test_processes_are_counted(pool: GraderPool, task: Task) -> None:
    code = "import os, time\nresult = 1.0\ntry:\n    for i in range(400):\n        if os.fork() == 0: time.sleep(600)\nexcept OSError:\n    result = 0.0"
    assert (await attacked(pool, task, code)).reward == 0.0


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(256):
            try: os.close(fd)
            except OSError: pass
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)", "MARKER"])
    os._exit(0)
os.wait()
result = 1.0
THEN
"""


async def test_a_daemon_that_forked_twice_does_not_outlive_its_item(pool: GraderPool, task: Task) -> None:
    for number, then in enumerate(("", "time.sleep(600)", "os._exit(3)", "os.kill(os.getpid(), 9)"), 1):
        marker = f"daemon{os.getpid()}-{number}"
        verdict = await attacked(pool, task, DAEMON.replace("MARKER", marker).replace("THEN", then))
        assert verdict.reward == 1.0 if not then else verdict.failure in (Failure.DEADLINE, Failure.CRASHED)
        assert pool.replaced == number
        assert await gone(lambda marker=marker: marked(marker))  # type: ignore[misc]


TOO_MUCH = {
    "x = bytearray(8 * 2**30)": (Failure.MEMORY, "grader.memory_mb"),
    "while True: pass": (Failure.DEADLINE, "grader.deadline_s"),
    "import os\nwhile True: os.write(1, b'x' * 2**20)": (Failure.OUTPUT, "printed more than 16 MiB"),
    "import ctypes; ctypes.string_at(0)": (Failure.CRASHED, "SIGSEGV"),
    "import os; os.kill(os.getpid(), 11)": (Failure.CRASHED, "SIGSEGV"),
    "import os; os._exit(7)": (Failure.CRASHED, "exit status 7"),
    "import os; os.abort()": (Failure.CRASHED, "SIGABRT"),
    "import os; os.killpg(0, 9)": (Failure.CRASHED, "SIGKILL"),
    "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))": (Failure.RAISED, "ValueError"),
}


async def test_a_member_that_takes_too_much_or_crashes_says_so(pool: GraderPool, task: Task) -> None:
    for code, (failure, cause) in TOO_MUCH.items():
        verdict = await attacked(pool, task, code)
        assert verdict.failure is failure, code
        assert cause in verdict.cause


async def test_the_grader_is_neither_signalled_nor_read(pool: GraderPool, task: Task) -> None:
    me, keeper = os.getpid(), pool._slots[0].worker
    assert keeper is not None
    for target in (me, keeper.process.pid, -os.getpgrp(), -1):
        # In a pid namespace the number names nobody, or only itself and its own kind: it may succeed, without effect here.
        verdict = await pool.grade(task, f"import os\ntry: os.kill({target}, 0)\nexcept OSError: result = 0.0\nelse: result = 1.0")
        assert verdict.reward == 0.0 or (target == -1 and pool.sandbox.level in ISOLATED)
    for name in ("environ", "mem", "maps"):
        # Our own command line would be readable at `rlimit`; what holds secrets is not.
        assert (await attacked(pool, task, attempt(f"open('/proc/{me}/{name}', 'rb').read(16)"))).reward == 0.0, name
    assert (await attacked(pool, task, f"import ctypes\nresult = float(ctypes.CDLL(None).ptrace(16, {me}, 0, 0) == 0)")).reward == 0.0


async def test_the_environment_holds_no_secret(spec: str, task: Task, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER_PASSWORD", "secret")
    async with GraderPool([spec], sandbox=level) as pool:
        assert (await pool.grade(task, "import os; result = float('BROKER_PASSWORD' in os.environ)")).reward == 0.0


FORGED = """
import os, struct, msgpack
body = msgpack.packb({"reward": 99.0, "components": {}, "seconds": 0.0})
for fd in range(3, 64):
    try: os.write(fd, struct.pack("<I", len(body)) + body)
    except OSError: pass
"""


async def test_guessing_the_pipe_of_answers_costs_the_guesser_only(pool: GraderPool, task: Task) -> None:
    bare = pool.replaced
    for written in (FORGED, FORGED.replace("len(body)", "2**30"), FORGED.replace("len(body)", "7"), FORGED.replace('msgpack.packb({', 'b"\\xc1" * 40; ({')):
        assert (await attacked(pool, task, written)).failure is Failure.CRASHED
    assert pool.replaced > bare


async def test_a_fresh_worker_that_answers_unasked_is_not_tried_again(pool: GraderPool, task: Task) -> None:
    assert (await pool.grade(task, FORGED)).failure is Failure.CRASHED
    assert pool.replaced == 1


async def test_an_answer_written_after_the_answer_does_not_reach_the_next_item(pool: GraderPool, task: Task) -> None:
    late = "import threading, time\ndef later():\n    time.sleep(0.3)\n" + "".join(f"    {line}\n" for line in FORGED.strip().splitlines()) + "threading.Thread(target=later, daemon=True).start()\nresult = 0.5"
    assert (await pool.grade(task, late)).reward == 0.5
    verdict = await pool.grade(task, "import time; time.sleep(0.6); result = 0.25")
    assert verdict.reward == 0.25
    assert pool.replaced == 1


async def test_privileges_are_not_regained(pool: GraderPool, task: Task) -> None:
    code = "status = open('/proc/self/status').read()\nresult = float('NoNewPrivs:\\t1' not in status or 'CapEff:\\t0000000000000000' not in status or 'Seccomp:\\t2' not in status)"
    assert (await attacked(pool, task, code)).reward == 0.0


async def test_a_worker_whose_grader_was_killed_leaves_nothing(spec: str, level: Level, tmp_path: Path) -> None:
    marker = f"orphan{os.getpid()}"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)', {marker!r}]); time.sleep(600)"
    grader = (
        "import asyncio\nfrom driftline.environments.source import load_source\nfrom driftline.services.grader.pool import GraderPool\n"
        f"async def main():\n    async with GraderPool([{spec!r}], deadline_s=600.0, sandbox={level.value!r}) as pool:\n"
        f"        await pool.grade(load_source({spec!r}).task(0, 0), {code!r})\nasyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", grader)
    async with asyncio.timeout(60):
        while not marked(marker):  # noqa: ASYNC110 - not our child
            await asyncio.sleep(0.02)
    process.kill()
    await process.wait()
    assert await gone(lambda: marked(marker))


def test_a_level_that_does_not_work_is_refused_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    fault.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"grader.sandbox.*bwrap is not installed.*apt install bubblewrap"):
            choose("bubblewrap")
        assert choose().level is not Level.BUBBLEWRAP
    finally:
        fault.cache_clear()


def test_auto_takes_the_strongest_that_works_and_says_when_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from driftline.environments.sandbox import box

    works = {Level.NAMESPACE, Level.RLIMIT}
    monkeypatch.setattr(box, "fault", lambda level: "" if level in works else "not here")
    assert choose().level is Level.NAMESPACE
    works.clear()
    with pytest.raises(ConfigError, match="nothing confines"):
        choose()
    assert choose("off").level is Level.OFF
