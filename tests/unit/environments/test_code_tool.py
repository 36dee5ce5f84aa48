"""Programs of a model: what they do is a result, and reaches nothing else."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from driftline.environments.code_tool import MOST, Ending, ToolResult, run_python
from driftline.environments.sandbox.box import LEVELS, Level, fault
from driftline.environments.source import load_scorer, load_source
from driftline.messages.errors import ConfigError
from driftline.services.grader.pool import GraderPool

EXAMPLE = Path(__file__).parents[3] / "examples" / "code_task.py"


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Level:
    found: Level = request.param
    if found is not Level.RLIMIT and (why := fault(found)):
        pytest.skip(why)
    return found


def run(level: Level, code: str, *, stdin: str = "", deadline_s: float = 20.0, memory_mb: int = 256) -> ToolResult:
    return run_python(code, stdin=stdin, deadline_s=deadline_s, memory_mb=memory_mb, sandbox=level)


def test_a_program_reads_its_input_and_its_outputs_are_kept_apart(level: Level) -> None:
    result = run(level, "import sys\nprint(sum(map(int, input().split())))\nprint('é', file=sys.stderr)", stdin="3 4\n")
    assert (result.stdout, result.stderr, result.ending, result.cause) == ("7\n", "é\n", Ending.EXITED, "exit status 0")
    assert result.ok


def test_every_ending_has_its_cause(level: Level) -> None:
    cases = {
        "1/0": (Ending.FAILED, "ZeroDivisionError"),
        "def f(:": (Ending.FAILED, "SyntaxError"),
        "import sys; sys.exit(3)": (Ending.FAILED, "exit status 3"),
        "import os; os._exit(125)": (Ending.FAILED, "exit status 125"),
        "import ctypes; ctypes.string_at(0)": (Ending.KILLED, "SIGSEGV"),
        "x = bytearray(2**34)": (Ending.MEMORY, "MemoryError"),
        "while True: print('x' * 10000)": (Ending.OUTPUT, "printed more than 16 MiB"),
    }
    for code, (ending, cause) in cases.items():
        result = run(level, code)
        assert result.ending is ending, code
        assert cause in result.cause


@pytest.mark.parametrize("code", ["while True: pass", "import os, time\nos.close(1); os.close(2); time.sleep(600)", "import time, os\nif os.fork() == 0: os.setsid()\ntime.sleep(600)"])
def test_a_program_that_does_not_end_is_ended(level: Level, code: str) -> None:
    result = run(level, code, deadline_s=1.0)
    assert result.ending is Ending.DEADLINE
    assert not result.ok


def test_outputs_are_bounded_and_say_so(level: Level) -> None:
    result = run(level, f"import sys\nsys.stdout.write('a' * {3 * MOST})\nsys.stderr.write('b' * 10)")
    assert (len(result.stdout), result.stdout_truncated) == (MOST, True)
    assert (result.stderr, result.stderr_truncated) == ("b" * 10, False)
    assert result.ok


def test_a_program_and_an_input_of_any_length_arrive(level: Level) -> None:
    code = "x = '" + "y" * 300_000 + "'\nimport sys\nprint(len(x), len(sys.stdin.read()))"
    assert run(level, code, stdin="z" * 500_000).stdout == "300000 500000\n"
    assert run(level, "print(1)", stdin="z" * 500_000).stdout == "1\n"  # it never reads it


def test_no_network_no_secrets_and_nothing_written(level: Level, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BROKER_PASSWORD", "secret")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        reached = run(level, f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)")
    assert reached.ending is Ending.FAILED
    assert run(level, "import os\nprint('BROKER_PASSWORD' in os.environ)").stdout == "False\n"
    assert run(level, f"open('/proc/{os.getpid()}/mem', 'rb').read(1)").ending is Ending.FAILED
    if level is not Level.RLIMIT:
        assert run(level, f"open({str(tmp_path / 'x')!r}, 'w')").ending is Ending.FAILED
        assert run(level, "print(open('/etc/shadow').read())").stdout.strip() == ""


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory_mb at least 32"):
        run_python("print(1)", memory_mb=1)
    with pytest.raises(ConfigError, match="deadline_s above 0"):
        run_python("print(1)", deadline_s=0)


RIGHT = "```python\ndef solve(numbers):\n    return NAME\n```"


def test_the_example_rewards_programs_by_their_tests() -> None:
    spec = f"python:{EXAMPLE}"
    scorer = load_scorer([spec])
    task = load_source(spec).task(0, 0)
    assert scorer.score(task, f"Here:\n```python\n{task.answer}\n```").reward == 1.0
    for wrong in ("no code", "```python\ndef solve(numbers):\n    while True: pass\n```", "```python\nprint('ok ' * 100)\n```", "```python\nraise SystemExit(0)\n```"):
        assert scorer.score(task, wrong).reward == 0.0


async def test_a_reward_runs_programs_inside_the_workers_own_sandbox(level: Level) -> None:
    spec = f"python:{EXAMPLE}"
    task = load_source(spec).task(1, 0)
    async with GraderPool([spec], deadline_s=60.0, sandbox=level) as pool:
        assert (await pool.grade(task, f"```python\n{task.answer}\n```")).reward == 1.0
        for wrong in ("1/0", "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass", "import os; os.kill(os.getppid(), 9)"):
            assert (await pool.grade(task, f"```python\n{wrong}\n```")).reward == 0.0
        assert pool.replaced == 0
