"""A service process ends for one of few reasons, and its exit code and log say which."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("scripted_service.py")


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def word(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ending(process: subprocess.Popen[str]) -> tuple[int, str, list[dict[str, object]]]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, [json.loads(line) for line in err.splitlines()]


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("raise", 1, "RuntimeError: the cause of it all"),
        ("alone", 2, "broker.url"),
        ("unreachable", 3, "broker.url"),
        ("real", 3, "nats://127.0.0.1:1"),
        ("deaf", 3, "is the server running"),
        ("damaged", 4, "digest differs"),
        ("conflict", 5, "another learner"),
    ],
)
def test_a_failure_ends_the_process_with_its_code_and_cause(what: str, code: int, words: str) -> None:
    """H16, H20 (docs/field_failures.md)."""
    with started(what) as process:
        returned, _, log = ending(process)
    assert returned == code
    failed = [line for line in log if line["event"] == "service failed"]
    assert len(failed) == 1
    assert words in str(failed[0]["cause"])
    assert failed[0]["service"] == "scripted"


def test_a_finished_run_ends_with_zero() -> None:
    """H8 (docs/field_failures.md)."""
    with started("finish") as process:
        code, out, _ = ending(process)
    assert (code, out.strip()) == (0, "steps")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_drains(number: signal.Signals) -> None:
    """H33 (docs/field_failures.md)."""
    with started("drain") as process:
        assert word(process) == "ready"
        process.send_signal(number)
        code, out, _ = ending(process)
    assert (code, out.strip()) == (0, "drained")


def test_a_service_without_a_drain_of_its_own_is_cancelled_and_cleans_up() -> None:
    with started("wait") as process:
        assert word(process) == "ready"
        process.send_signal(signal.SIGTERM)
        code, out, _ = ending(process)
    assert (code, out.strip()) == (0, "cleaned up")


def test_a_second_signal_leaves_at_once() -> None:
    """H33 (docs/field_failures.md)."""
    with started("stubborn") as process:
        assert word(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert word(process) == "refused"
        process.send_signal(signal.SIGTERM)
        code, _, _ = ending(process)
    assert code == 128 + signal.SIGTERM


def test_draining_has_a_deadline() -> None:
    """H33 (docs/field_failures.md)."""
    with started("stubborn", "1") as process:
        assert word(process) == "ready"
        process.send_signal(signal.SIGTERM)
        code, _, log = ending(process)
    assert code == 6
    assert "draining took too long" in [line["event"] for line in log]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_and_metrics_are_served() -> None:
    base = free_port()
    with started("wait", str(base)) as process:
        assert word(process) == "ready"
        status, body = get(f"http://127.0.0.1:{base + 9}/healthz")
        assert (status, json.loads(body)["progress"]) == (200, {"done": 3.0})
        assert "driftline_scripted_done" in get(f"http://127.0.0.1:{base + 9}/metrics")[1]
        assert get(f"http://127.0.0.1:{base + 9}/")[0] == 404


def test_a_blocked_event_loop_is_measured() -> None:
    """H11 (docs/field_failures.md)."""
    base = free_port()
    with started("blocked", str(base)) as process:
        assert word(process) == "measured"
        health = json.loads(get(f"http://127.0.0.1:{base + 9}/healthz")[1])
    assert health["loop_lag_max_s"] > 0.1


def test_a_port_in_use_is_a_configuration_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with started("wait", str(taken.getsockname()[1] - 9)) as process:
            code, _, log = ending(process)
    assert code == 2
    assert "telemetry.http_port" in str(log[-1]["cause"])
