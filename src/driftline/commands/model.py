"""`driftline model`: checkpoints under their family's public names. `make` writes a random K3 of any size, `inspect` says what a checkpoint of any family holds.

Exit codes: 0 done; 1 the checkpoint does not fit its config.json; 2 used wrongly, or not a checkpoint.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftline.commands.common import AsJson
from driftline.commands.model_adapters import register as adapters
from driftline.commands.policy_text import emit, size, size_of, table
from driftline.messages.errors import ConfigError

if TYPE_CHECKING:
    from driftline.models.inspection import Inspection, Part

__all__ = ["register"]


class Like(StrEnum):
    K3 = "k3"


class Packing(StrEnum):
    NONE = "none"
    MXFP4 = "mxfp4"


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    model = typer.Typer(no_args_is_help=True, help="Checkpoints under public names: make a random one, look into one.")
    for command in (make, inspect):
        model.command(command.__name__)(command)
    adapters(model)
    app.add_typer(model, name="model")


_Size = Annotated[int | None, typer.Option(help="Default: K3's, in proportion to --hidden.", show_default=False)]


def make(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="A new directory.")],
    like: Annotated[Like, typer.Option("--like", help="Whose architecture and proportions.")] = Like.K3,
    layers: Annotated[int, typer.Option("--layers", help="Decoder layers; every fourth and the last are MLA.")] = 4,
    hidden: Annotated[int, typer.Option("--hidden", help="Width of a token's row.")] = 512,
    heads: _Size = None, intermediate: _Size = None, q_lora_rank: _Size = None, kv_lora_rank: _Size = None, latent: _Size = None,
    moe_intermediate: _Size = None, experts: _Size = None,
    experts_per_token: Annotated[int | None, typer.Option(help="Default: K3's share of --experts, at least 2.", show_default=False)] = None,
    shared_experts: Annotated[int, typer.Option(help="As K3.")] = 2,
    dense_layers: Annotated[int, typer.Option(help="First layers without experts; as K3.")] = 1,
    kda_head_dim: Annotated[int, typer.Option(help="As K3.")] = 128,
    qk_nope_head_dim: Annotated[int, typer.Option(help="As K3.")] = 128,
    qk_rope_head_dim: Annotated[int, typer.Option(help="As K3.")] = 64,
    v_head_dim: Annotated[int, typer.Option(help="As K3.")] = 128,
    block: Annotated[int | None, typer.Option(help="Layers in a block of attention residuals. Default: eight blocks, as K3.", show_default=False)] = None,
    vocab: Annotated[int | None, typer.Option(help="Default: 264, the byte tokenizer's; K3's is 163840.", show_default=False)] = None,
    quantise: Annotated[Packing, typer.Option("--quantise", help="The form of the routed experts: bfloat16, or packed.")] = Packing.NONE,
    seed: Annotated[int, typer.Option("--seed", help="The same seed and sizes make the same bytes.")] = 0,
    shard_size: Annotated[str, typer.Option("--shard-size", help="Most bytes of tensors in a file, e.g. 512MiB.")] = "5GB",
    device: Annotated[str, typer.Option("--device", help="Where values are drawn and packed; another kind draws others.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Write a random checkpoint: bfloat16, sharded, every size an option. It is read back before its size is printed."""
    import torch

    from driftline.models.inspection import inspect_checkpoint
    from driftline.models.quantisation import Quantisation
    from driftline.models.random_weights import make_checkpoint
    from driftline.models.sizes import like_k3

    config = {Like.K3: like_k3}[like](
        layers, hidden, heads=heads, kda_head_dim=kda_head_dim, intermediate_size=intermediate, q_lora_rank=q_lora_rank, kv_lora_rank=kv_lora_rank,
        routed_expert_hidden_size=latent, moe_intermediate_size=moe_intermediate, num_experts=experts, num_experts_per_token=experts_per_token,
        num_shared_experts=shared_experts, first_k_dense_replace=dense_layers, qk_nope_head_dim=qk_nope_head_dim, qk_rope_head_dim=qk_rope_head_dim,
        v_head_dim=v_head_dim, attn_res_block_size=block, vocab_size=vocab,
    )
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError("not a device", field="--device", value=device, remedy="cpu or cuda") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no such device here", field="--device", value=device, remedy="cpu, or a machine with a GPU")
    make_checkpoint(config, out, seed=seed, experts=Quantisation(quantise.value), shard_bytes=size_of(shard_size, "--shard-size"), device=place)
    _show(inspect_checkpoint(out), as_json)


def inspect(
    place: Annotated[str, typer.Argument(metavar="DIR", help='With config.json and *.safetensors; or a .gguf file, "base" or "package:NAME".')],
    as_json: AsJson = False,
) -> None:
    """Print a checkpoint's layers, parameters, bytes and quantisation. Only headers are read, and each is held to config.json."""
    from driftline.models.inspection import inspect_checkpoint
    from driftline.models.locate import BASE, GGUF, PACKAGE, located

    named = place == BASE or place.startswith(PACKAGE)
    if not named and not Path(place).is_dir() and not (place.endswith(GGUF) and Path(place).is_file()):
        raise ConfigError("no such directory", field="DIR", value=place, remedy=f"give one with config.json and *.safetensors, or a {GGUF} file")
    _show(inspect_checkpoint(located(place)), as_json)


def _show(found: Inspection, as_json: bool) -> None:
    from driftline.models.dense.config import DenseConfig
    from driftline.models.locate import GGUF

    if as_json:
        emit(_document(found))
        return
    config = found.config
    experts = "" if isinstance(config, DenseConfig) else (
        f"{config.num_experts}, {config.num_experts_per_token} a token, {config.num_shared_experts} shared; latent {config.routed_expert_hidden_size}")
    forms = "routed experts in MXFP4, groups of 32" if found.experts.value == "mxfp4" else (
        "read as float32" if found.place.suffix == GGUF else "none")
    table(str(found.place), [("", "left"), ("", "left")], [
        ["model", str(config.model_type)],
        ["layers", f"{config.num_hidden_layers}, hidden {config.hidden_size}, vocabulary {config.vocab_size}"],
        *([["experts", experts]] if experts else []),
        ["quantisation", forms],
        ["names", f"{found.prefix}..." if found.prefix != "model." else "as released"],
        ["parameters", f"{found.parameters:,}, {found.active:,} active in a token"],
        ["tensors", f"{found.tensors:,}, {size(found.total_bytes)} ({_by_dtype(found.nbytes)})"],
    ])
    table("", [("layer", "right"), ("attention", "left"), ("feed-forward", "left"), ("parameters", "right"), ("active", "right"), ("bytes", "right"), ("stored", "left")],
          [_line(part) for part in found.parts])
    table("", [("file", "left"), ("tensors", "right"), ("bytes", "right")], [[file.name, str(file.tensors), size(file.nbytes)] for file in found.files])


def _line(part: Part) -> list[str]:
    attention = part.attention.value if part.attention else "embedding, head"
    return ["-" if part.layer is None else str(part.layer), attention, part.feed_forward.value if part.feed_forward else "", f"{part.parameters:,}",
            f"{part.active:,}", size(part.total_bytes), _by_dtype(part.nbytes)]


def _by_dtype(nbytes: Any) -> str:
    return ", ".join(f"{dtype} {size(amount)}" for dtype, amount in sorted(nbytes.items()))


def _document(found: Inspection) -> dict[str, Any]:
    return {
        "directory": str(found.place), "quantisation": found.experts.value, "prefix": found.prefix, "parameters": found.parameters, "active": found.active,
        "bytes": found.total_bytes, "bytes_by_dtype": dict(found.nbytes), "tensors": found.tensors, "config": found.config.model_dump(mode="json"),
        "files": [{"name": file.name, "bytes": file.nbytes, "tensors": file.tensors} for file in found.files],
        "around": next(_entry(part) for part in found.parts if part.layer is None),
        "layers": [{"layer": part.layer, **_entry(part)} for part in found.parts if part.layer is not None],
    }


def _entry(part: Part) -> dict[str, Any]:
    return {
        "attention": part.attention.value if part.attention else None, "feed_forward": part.feed_forward.value if part.feed_forward else None,
        "parameters": part.parameters, "active": part.active, "bytes": part.total_bytes, "bytes_by_dtype": dict(part.nbytes),
    }
