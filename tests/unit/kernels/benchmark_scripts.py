"""The benchmark scripts as modules, for what of them needs no device."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "kernels"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/kernels/<name>.py, by a name of its own: an operator's module may be called the same."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_of_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module
