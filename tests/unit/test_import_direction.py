"""The direction of imports, read from the source: what may know what, what stays without torch, and what is never used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("messages", "policy_store", "kernels", "models", "environments", "services")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")) + sorted(
    path for path in (ROOT / "src" / "driftline").glob("*.py")
)
LONGEST = 520

MAY_IMPORT = {
    "messages": {"messages"},
    "policy_store": {"policy_store", "messages"},
    "kernels": {"kernels"},
    "models": {"models", "kernels", "messages"},
    "environments": {"environments", "messages"},
    "services": set(PACKAGES),
}
WITHOUT_TORCH = (
    "messages/", "policy_store/", "environments/", "services/dispatcher/", "services/grader/", "services/gateway/", "services/policy_store/",
    "services/supervisor/", "services/audit/", "services/security/", "services/config.py", "services/config_text.py", "services/runtime.py", "services/telemetry.py",
    "services/publishing.py", "services/starting.py", "models/locate.py",
    *(f"models/gguf/{name}.py" for name in ("blocks", "file", "installed", "llama", "vocabulary")), "services/wiring.py", "src/driftline/cli.py", "src/driftline/commands/",
    *(f"services/replay/{name}.py" for name in ("comparison", "format", "into", "reader", "record", "shipped", "writer")),
)
TORCH = {"torch", "triton", "safetensors.torch"}
TORCH_SERVICES = {"services.rollout", "services.learner", "services.evaluator", "services.tensors", "services.policy_model", "models", "kernels"}
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(tree: ast.Module, *, lazy: bool = True) -> Iterator[str]:
    """Every module imported, with `from a import b` as both a and a.b. Not `lazy`: only what importing the file imports."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                assert node.level == 0, "imports are written in full"
                yield str(node.module)
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not lazy:
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) if not lazy:
                todo += node.orelse
                continue
        todo += ast.iter_child_nodes(node)


def ours(module: str) -> str:
    """`services.learner.trainer` of `driftline.services.learner.trainer`, and nothing for what is not ours."""
    return module.removeprefix("driftline.") if module.startswith("driftline.") else ""


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def test_every_package_was_found() -> None:
    assert {name_of(path).split("/")[0] for path in SOURCES} == {*PACKAGES, "src"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_is_below_it(package: str) -> None:
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in SOURCES if name_of(path).startswith(f"{package}/")
        for module in imports(parsed(path))
        if (above := ours(module).split(".")[0]) and above in PACKAGES and above not in MAY_IMPORT[package]
    ]
    assert not wrong


def test_files_that_promise_it_import_no_torch() -> None:
    free = [path.removesuffix(".py").replace("/", ".") for path in WITHOUT_TORCH if path.startswith("models/")]

    def needs_torch(module: str) -> bool:
        own = ours(module)
        if any(own == s or own.startswith(f"{s}.") for s in free):
            return False
        return module.split(".")[0] in TORCH or module in TORCH or any(own == s or own.startswith(f"{s}.") for s in TORCH_SERVICES)

    wrong = [
        f"{name_of(path)} imports {module}"
        for path in SOURCES if name_of(path).startswith(WITHOUT_TORCH)
        for module in imports(parsed(path), lazy=False) if needs_torch(module)
    ]
    assert not wrong


@pytest.mark.parametrize("module", ["services.dispatcher.service", "services.grader.service", "services.policy_store.service", "services.wiring", "services.starting",
                                    "services.grader.worker", "services.gateway.app", "environments.source", "policy_store", "messages", "cli"])
def test_importing_it_loads_no_torch(module: str) -> None:
    code = f"import sys, driftline.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_nothing_is_pickled() -> None:
    wrong = [f"{name_of(path)} imports {m}" for path in SOURCES for m in imports(parsed(path)) if m.split(".")[0] in UNSAFE]
    wrong += [
        f"{name_of(path)} line {node.lineno} calls torch.{node.func.attr}"
        for path in SOURCES for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch" and node.func.attr in ("load", "save")
    ]
    assert not wrong


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    assert not {name_of(path): lines for path in SOURCES if (lines := len(path.read_text().splitlines())) > LONGEST}
