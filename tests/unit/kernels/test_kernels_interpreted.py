"""Runs the kernels without a GPU: in Triton's interpreter against the references, and through the compiler for Hopper.

Each file is run in a process of its own: Triton is interpreted from its first import on or never, and what compiles for a device that is not there
must not be what another test launches. As many run at once as there are cores; only this module waits for them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INTERPRETED = sorted(p.name for p in HERE.glob("interpreted_*.py"))
COMPILED = sorted(p.name for p in HERE.glob("compiled_*.py"))
Runs = dict[str, Future[subprocess.CompletedProcess[str]]]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, the gpu extra")


def run(name: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)], env=os.environ | environment,
                          capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Those files that were chosen, all begun."""
    wanted = [item.callspec.params["name"] for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    started = {name: pool.submit(run, name, {"TRITON_INTERPRET": "1"} if name in INTERPRETED else {}) for name in wanted}
    yield started
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", INTERPRETED)
def test_the_kernels_do_what_the_reference_does(name: str, runs: Runs) -> None:
    done = runs[name].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", COMPILED)
def test_the_kernels_compile_for_hopper_within_its_limits(name: str, runs: Runs) -> None:
    done = runs[name].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
