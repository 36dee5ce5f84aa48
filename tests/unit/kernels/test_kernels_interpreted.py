"""Runs the kernels without a GPU: in Triton's interpreter against the references, and through the compiler for Hopper.

Each file is run in a process of its own: Triton is interpreted from its first import on or never, and what compiles for a device that is not there
must not be what another test launches.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INTERPRETED = sorted(p.name for p in HERE.glob("interpreted*.py"))
COMPILED = sorted(p.name for p in HERE.glob("compiled_*.py"))
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, the gpu extra")


def run(name: str, **environment: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)], env=os.environ | environment,
                          capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-6000:]


@needs_triton
@pytest.mark.parametrize("name", INTERPRETED)
def test_the_kernels_do_what_the_reference_does(name: str) -> None:
    run(name, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("name", COMPILED)
def test_the_kernels_compile_for_hopper_within_its_limits(name: str) -> None:
    run(name)
