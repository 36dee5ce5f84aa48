"""Nothing of ours turns bytes into code: no pickle, no eval, and no format that may hold either."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("messages", "policy_store", "services", "environments", "models", "kernels", "src/driftline")
SOURCES = sorted({path.resolve() for package in PACKAGES for path in (ROOT / package).rglob("*.py")})
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
CALLS = {"eval", "exec", "compile", "torch.load", "torch.save", "torch.jit.load", "torch.package.PackageImporter", "yaml.load"}


def dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            return f"{dotted(value)}.{name}"
        case _:
            return ""


def unsafe(source: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    aliases = {"np": "numpy"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                aliases |= {alias.asname or alias.name: alias.name for alias in names}
                yield from ((node.lineno, alias.name) for alias in names if alias.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=module, names=names) if module:
                aliases |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in names}
                if module.split(".")[0] in MODULES:
                    yield node.lineno, module
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            head, _, rest = dotted(node.func).partition(".")
            name = ".".join(part for part in (aliases.get(head, head), rest) if part)
            if name in CALLS or (name == "numpy.load" and not any(k.arg == "allow_pickle" and is_false(k.value) for k in node.keywords)):
                yield node.lineno, name
            if any(k.arg == "allow_pickle" and not is_false(k.value) for k in node.keywords):
                yield node.lineno, f"{name}(allow_pickle)"


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_no_source_of_ours_loads_code_from_bytes() -> None:
    assert len(SOURCES) > 100
    assert [(str(path.relative_to(ROOT)), *found) for path in SOURCES for found in unsafe(path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "import torch as t\nt.load('x')", "from torch import load\nload('x')",
        "eval('1')", "exec('1')", "import yaml", "import numpy as np\nnp.load('x')", "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy\nnumpy.load('x', allow_pickle=flag)",
    ],
)  # fmt: skip
def test_what_is_looked_for_is_found(source: str) -> None:
    assert list(unsafe(source))


def test_what_is_safe_is_not_reported() -> None:
    assert not list(unsafe("import numpy as np\nmodel.eval()\nnp.load('x', allow_pickle=False)\nimport re\nre.compile('x')"))
