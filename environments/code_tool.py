"""Run a program that a model wrote: `run_python(code, stdin="3\\n", deadline_s=5.0).stdout`.

Guarantees: the program runs in a process of its own in the strongest sandbox that works here (also inside a grading worker, which is in
one already), with no network and, where files are isolated, no file but Python's; it ends by its deadline with everything it
started; it takes at most `memory_mb` a process; at most `MOST` bytes of each output are kept, and nothing is buffered beyond that. What the
program does is data in a `ToolResult`; only a sandbox that does not start raises.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache

from driftline.environments.sandbox.box import AUTO, Limits, Sandbox, choose, ended_by
from driftline.messages.errors import ConfigError, DriftlineError

__all__ = ["MOST", "Ending", "ToolResult", "run_python"]

MOST = 64 * 1024
_ENDLESS = 256 * MOST
_STOP_S = 5.0
_PIECE = 64 * 1024
# The program arrives on a descriptor of its own, of any length; the other one tells that the sandbox was entered.
_BOOTSTRAP = (
    "import os\n"
    "_code = os.fdopen({code}, 'rb').read()\n"
    "os.write({started}, b'1')\n"
    "os.close({started})\n"
    "del os\n"
    "exec(compile(_code, 'program.py', 'exec'), {{'__name__': '__main__'}})\n"
)


class Ending(StrEnum):
    """Why a program ended."""

    EXITED = "exited"
    FAILED = "failed"
    KILLED = "killed"
    DEADLINE = "deadline"
    MEMORY = "memory"
    OUTPUT = "output"


@dataclass(frozen=True)
class ToolResult:
    """`ending` is EXITED for status 0 only; `cause` says the rest in words. Outputs are cut after `MOST` bytes: then the flag is set."""

    stdout: str
    stderr: str
    ending: Ending
    cause: str
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.ending is Ending.EXITED


class ToolError(DriftlineError):
    """The sandbox did not start: nothing is known about the program."""


def run_python(
    code: str, *, stdin: str = "", deadline_s: float = 5.0, memory_mb: int = 256, sandbox: str = AUTO
) -> ToolResult:
    """Run `code` as a program with `stdin` as its input. Blocks until it has ended, `deadline_s` at most."""
    if memory_mb < 32 or deadline_s <= 0:
        raise ConfigError("a program needs some memory and some time", field="run_python", value=(memory_mb, deadline_s),
                          remedy="memory_mb at least 32, deadline_s above 0")
    cell = _cell(sandbox, memory_mb, int(deadline_s) + 2)
    with ExitStack() as files:
        program = files.enter_context(os.fdopen(os.memfd_create("program"), "w+b"))
        program.write(code.encode("utf-8", "surrogatepass"))
        program.seek(0)
        heard, started = os.pipe()
        listener = files.enter_context(os.fdopen(heard, "rb"))
        with os.fdopen(started, "wb") as telling:
            given = (program.fileno(), telling.fileno())
            bootstrap = _BOOTSTRAP.format(code=given[0], started=given[1])
            process = subprocess.Popen(
                cell.command([sys.executable, "-I", "-X", "utf8", "-c", bootstrap]), env=cell.environment(), pass_fds=given,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )
        conversation = _Conversation(process, cell, stdin.encode("utf-8", "replace"), deadline_s)
        try:
            conversation.run()
        finally:
            conversation.stop()
        entered = listener.read(1) == b"1"
    result = conversation.result()
    if not entered and result.ending is not Ending.DEADLINE:
        raise ToolError(f"the sandbox did not start: {result.cause}", field="sandbox", value=cell.level.value,
                        remedy=result.stderr.strip()[-300:] or "look at this machine's limits")
    return result


@cache
def _cell(wanted: str, memory_mb: int, cpu_s: int) -> Sandbox:
    return choose(wanted, limits=Limits(memory_mb=memory_mb, cpu_s=cpu_s, processes=32, open_files=64, file_mb=16, scratch_mb=64))


@dataclass
class _Output:
    """What is kept of one stream."""

    kept: bytearray = field(default_factory=bytearray)
    seen: int = 0

    def add(self, text: bytes) -> None:
        self.seen += len(text)
        self.kept += text[: max(0, MOST - len(self.kept))]

    @property
    def text(self) -> str:
        return self.kept.decode("utf-8", "replace")


class _Conversation:
    """Gives the program its input and takes its output, until it ends or must."""

    def __init__(self, process: subprocess.Popen[bytes], cell: Sandbox, stdin: bytes, deadline_s: float) -> None:
        self._process, self._cell, self._stdin, self._deadline_s = process, cell, memoryview(stdin), deadline_s
        self._began = time.monotonic()
        self._stopped: Ending | None = None
        self._out, self._err = _Output(), _Output()

    def run(self) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with selectors.DefaultSelector() as ready:
            os.set_blocking(process.stdin.fileno(), False)
            ready.register(process.stdin, selectors.EVENT_WRITE)
            ready.register(process.stdout, selectors.EVENT_READ, self._out)
            ready.register(process.stderr, selectors.EVENT_READ, self._err)
            while ready.get_map():
                left = self._began + self._deadline_s - time.monotonic()
                if left <= 0:
                    self._stopped = Ending.DEADLINE
                    return
                for key, _ in ready.select(left):
                    if not self._moved(key):
                        ready.unregister(key.fileobj)
                if self._out.seen + self._err.seen > _ENDLESS:
                    self._stopped = Ending.OUTPUT
                    return
        try:
            process.wait(max(0.0, self._began + self._deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:  # it closed its outputs and goes on
            self._stopped = Ending.DEADLINE

    def _moved(self, key: selectors.SelectorKey) -> bool:
        """Move some bytes; False when this pipe is done."""
        if isinstance(key.data, _Output):
            text = os.read(key.fd, _PIECE)
            key.data.add(text)
            return bool(text)
        try:
            self._stdin = self._stdin[os.write(key.fd, self._stdin[:_PIECE]) :] if self._stdin else self._stdin
        except BrokenPipeError:  # it does not read its input
            self._stdin = self._stdin[:0]
        if self._stdin:
            return True
        assert self._process.stdin is not None
        self._process.stdin.close()
        return False

    def stop(self) -> None:
        """Also when it ended by itself: its sandbox ends with it."""
        process = self._process
        if process.poll() is None:
            self._cell.kill(process.pid)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._cell.kill_hard(process.pid)
                process.wait(_STOP_S)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    def result(self) -> ToolResult:
        ending, cause = self._ended()
        return ToolResult(self._out.text, self._err.text, ending, cause, self._out.seen > MOST, self._err.seen > MOST,
                          time.monotonic() - self._began)

    def _ended(self) -> tuple[Ending, str]:
        match self._stopped:
            case Ending.DEADLINE:
                return Ending.DEADLINE, f"not done within {self._deadline_s:g} s"
            case Ending.OUTPUT:
                return Ending.OUTPUT, f"printed more than {_ENDLESS // 2**20} MiB"
        status = self._process.returncode
        how = ended_by(status, self._cell.level)
        if how.startswith("killed"):
            return Ending.KILLED, how
        if status == 0:
            return Ending.EXITED, how
        last = self._err.text.strip().rpartition("\n")[2]
        return (Ending.MEMORY if last.startswith("MemoryError") else Ending.FAILED), f"{how}: {last[:200]}" if last else how
