"""`driftline model merge` and `driftline model adapter`: PEFT's adapter directories beside checkpoints of any family.

Exit codes: 0 done; 1 the adapter does not fit the base, or a file is damaged; 2 used wrongly, or not a plain LoRA adapter.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftline.commands.common import AsJson
from driftline.commands.policy_text import emit, size, size_of, table
from driftline.messages.errors import ConfigError

if TYPE_CHECKING:
    from driftline.models.lora import Adapter

__all__ = ["register"]

_Adapter = Annotated[Path, typer.Argument(metavar="ADAPTER", help="A directory with adapter_config.json and adapter_model.safetensors.")]


def register(model: typer.Typer) -> None:
    """Add the commands to `driftline model`."""
    for command in (merge, adapter):
        model.command(command.__name__)(command)


def merge(
    base: Annotated[str, typer.Argument(metavar="DIR", help='A checkpoint directory, a .gguf file, "base" or "package:NAME".')],
    adapter: _Adapter,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory.")],
    shard_size: Annotated[str, typer.Option("--shard-size", help="Most bytes of tensors in a file, e.g. 512MiB.")] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace the checkpoint that is in OUT.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the checkpoint with the adapter in its weights, tensor by tensor, in the stored dtypes; packed experts are packed again."""
    from driftline.models.lora.merging import merge_checkpoint
    from driftline.models.lora.peft import read_peft

    if not force and out.is_dir() and any(out.iterdir()):
        raise ConfigError("is not empty", field="OUT", value=str(out), remedy="name a new directory, or --force")
    found = read_peft(adapter)
    files = merge_checkpoint(base, found, out, shard_bytes=size_of(shard_size, "--shard-size"))
    beside = _beside(base)
    for name, content in beside.items():
        (out / name).write_bytes(content)
    if as_json:
        emit({"out": str(out), "files": [path.name for path in files], "beside": sorted(beside), **_document(found)})
    else:
        typer.echo(f"{out}: {len(found.updates)} updates of rank {_ranks(found)} merged; {', '.join(path.name for path in files)}")


def adapter(
    directory: _Adapter,
    base: Annotated[str, typer.Option("--base", metavar="DIR", help="Also hold every update to the weights of this checkpoint; headers only.")] = "",
    as_json: AsJson = False,
) -> None:
    """Print what an adapter changes: modules, ranks, factors, parameters and bytes."""
    from driftline.models.lora.merging import check_fits
    from driftline.models.lora.peft import read_peft

    found = read_peft(directory)
    if base:
        check_fits(base, found)
    if as_json:
        emit({"directory": str(directory), "fits": base or None, **_document(found)})
        return
    by_leaf = Counter(_leaf(name, update.experts) for name, update in found.updates.items())
    table(str(directory), [("", "left"), ("", "left")], [
        ["of", found.base or "(not said)"], ["rank", _ranks(found)], ["factor", ", ".join(f"{scale:g}" for scale in _scales(found))],
        ["parameters", f"{found.parameters:,}, {size(found.nbytes)}"],
        *([["fits", base]] if base else []),
    ])
    table("", [("module", "left"), ("updates", "right"), ("parameters", "right")], [
        [leaf, str(count), f"{sum(u.a.numel() + u.b.numel() for name, u in found.updates.items() if _leaf(name, u.experts) == leaf):,}"]
        for leaf, count in sorted(by_leaf.items())
    ])


def _leaf(name: str, experts: int | None) -> str:
    return name.rpartition(".")[2] if experts is None else ".".join(name.split(".")[-2:])


def _ranks(found: Adapter) -> str:
    return ", ".join(map(str, found.ranks))


def _scales(found: Adapter) -> list[float]:
    return sorted({update.scale for update in found.updates.values()})


def _document(found: Adapter) -> dict[str, Any]:
    return {"base": found.base, "ranks": list(found.ranks), "scales": _scales(found), "parameters": found.parameters, "bytes": found.nbytes,
            "modules": {name: {"rank": update.rank, "scale": update.scale, "shape": list(update.shape)} for name, update in sorted(found.updates.items())}}


def _beside(base: str) -> dict[str, bytes]:
    """The base's tokenizer and generation settings; config.json is the merged model's own."""
    from driftline.models.gguf.llama import GgufModel
    from driftline.models.locate import located
    from driftline.policy_store.model_files import CONFIG, files_in

    place = located(base)
    found = files_in(place) if place.is_dir() else GgufModel.open(place).files()
    return {name: content for name, content in found.items() if name != CONFIG}
