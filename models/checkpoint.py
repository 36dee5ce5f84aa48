"""Checkpoints on disk, under their family's public names: what loads was checked whole, by name, dtype and shape, before the first byte was copied.

A directory: `config.json`, and `model.safetensors` or numbered shards with an index; or, of a dense model and for loading only, one .gguf file. K3's routed experts
are stored as bfloat16 or as MXFP4, and a model holds them in either form, whichever the files have. Loading and saving go tensor by tensor: beside the model they
need the memory of one tensor.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from driftline.kernels.mxfp4 import LARGEST_SCALE
from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.architectures import AnyConfig, config_of, configuration, save_configuration
from driftline.models.assembly import assembled
from driftline.models.causal_lm import CausalLM
from driftline.models.locate import BASE, located
from driftline.models.quantisation import Quantisation
from driftline.models.recoding import Recoded, recoded_shapes
from driftline.models.shard_files import SHARD_BYTES, Shape, write_shards
from driftline.models.shards import Shards
from driftline.models.state import policy_dtype, policy_tensors, public_tensors
from driftline.models.stored import Stored, held_form, public_shapes

__all__ = ["BASE", "checkpoint_dir", "load_checkpoint", "read_tensors", "save_checkpoint", "write_checkpoint"]


def checkpoint_dir(init: str) -> Path:
    """`located(init)`, which is a directory. Raises ConfigError when there is none, or a file."""
    path = located(init)
    if not path.is_dir():
        raise ConfigError("a file, not a checkpoint directory", field="policy.init", value=init, remedy="give a directory with config.json and *.safetensors")
    return path


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint in the directory, by stored name. Raises ConfigError and IntegrityError."""
    shards = Shards.of(directory)
    return {name: shards.read(name) for name in shards.files}


def load_checkpoint(
    init: str, *, dtype: torch.dtype = torch.float32, experts: Quantisation | None = None, device: torch.device | str = "cpu",
) -> CausalLM:
    """Build the model of a checkpoint (`located`'s words) on `device` and load its weights.

    Parameters are held in `dtype`; what the release keeps in fp32 is never held in less. `experts`: the form in which the model holds its routed experts, None
    for that of the files. NONE unpacks them exactly, to be trained; MXFP4 packs them, which rounds. Raises ConfigError and IntegrityError: of names, dtypes and
    shapes before anything is allocated, of values (a NaN scale, a padded A_log that is none) at the tensor that has them.
    """
    stored = Stored.open(located(init))
    stored.check_head()
    held = stored.experts if experts is None else experts
    source = Recoded(lambda name: stored.read(name).to(device), stored.experts, held, torch.promote_types(dtype, torch.bfloat16))

    def read(name: str) -> torch.Tensor:
        value = source.read(name)
        if name.endswith(".weight_scale"):
            _in_reach(stored.at(source.source(name)), value)
        return value

    def place(name: str) -> tuple[str, ...]:
        return stored.file_of(source.source(name)), source.source(name)

    model = assembled(stored.config, held, read, dtype=dtype, device=device, order=place)
    stored.source.close()
    return model


def _in_reach(at: str, scale: torch.Tensor) -> None:
    """The kernels read a larger scale as NaN, the reference does not: refused, so that packed experts are one thing on every device."""
    if bool((scale > LARGEST_SCALE).any()):
        raise IntegrityError(f"a scale above {LARGEST_SCALE} is of weights above 12, which packed experts cannot hold here", field=at, value=int(scale.max()),
                             remedy="load with the experts unpacked")


def save_checkpoint(
    model: CausalLM, directory: str | Path, *, dtype: torch.dtype = torch.bfloat16, experts: Quantisation | None = None, shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write the model in policy dtype `dtype`; returns the files of tensors. `experts`: the form of the routed ones, None for that in which the model holds them.

    Packing rounds; unpacking is exact where `dtype` is bfloat16 or wider. Files appear whole or not at all and the index last, see `write_shards`.
    """
    held = held_form(model)
    wanted = held if experts is None else experts
    tensors = {public: view for name, tensor in policy_tensors(model) for public, view in public_tensors(name, tensor)}
    shapes = recoded_shapes(public_shapes(model, dtype), held, wanted, dtype)
    source = Recoded(lambda name: tensors[name].to(policy_dtype(name, dtype)), held, wanted, dtype)
    return write_checkpoint(Path(directory), config_of(model), wanted, shapes, source, shard_bytes)


def write_checkpoint(directory: Path, config: AnyConfig, experts: Quantisation, shapes: dict[str, Shape], source: Recoded, shard_bytes: int) -> list[Path]:
    """config.json and the tensors `shapes` from `source`, layer by layer whatever their order is. Returns the files of tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    ordered = {name: shapes[name] for name in sorted(shapes, key=_place)}
    try:
        same_model = configuration(directory) == (config, experts)
    except ConfigError:
        same_model = False
    return write_shards(directory, ordered, source.read, shard_bytes, describe=lambda: save_configuration(config, directory, experts), same_model=same_model)


def _place(name: str) -> list[int | str]:
    """Layers and experts by their numbers, so that the tensors a process needs lie together."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
