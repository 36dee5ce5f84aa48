"""Random models of any size: tensors are drawn, packed and written, or put into a model, one by one. The files of a seed and the model of that seed are equal.

A tensor's values follow from the seed and its name alone: they are the same in whatever order and shards it is written, and packed experts are those of the
unpacked checkpoint of that seed. Devices of another kind draw other values.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch

from driftline.messages.errors import ConfigError
from driftline.models.architectures import AnyConfig, skeleton
from driftline.models.assembly import assembled
from driftline.models.causal_lm import CausalLM
from driftline.models.checkpoint import write_checkpoint
from driftline.models.quantisation import Quantisation
from driftline.models.recoding import Recoded, recoded_shapes
from driftline.models.shard_files import SHARD_BYTES, Shape
from driftline.models.stored import public_shapes

__all__ = ["RandomTensors", "make_checkpoint", "random_model"]

_ZERO = ("_res_proj.weight", "A_log", "e_score_correction_bias", ".bias")


class RandomTensors:
    """Values of a fresh model, as a model's `reset_parameters` gives them, by public name."""

    def __init__(self, config: AnyConfig, shapes: dict[str, Shape], seed: int, device: torch.device | str = "cpu") -> None:
        self._config, self._shapes, self._seed, self._device = config, shapes, seed, torch.device(device)

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype, on the device."""
        dtype, shape = self._shapes[name]
        key = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(key, "little") >> 1)
        wide = torch.empty(shape, dtype=torch.float32, device=self._device)
        if name.endswith(_ZERO):
            wide.zero_()
        elif name.endswith("norm.weight"):
            wide.fill_(1.0)
        elif name.endswith("dt_bias"):  # softplus^-1 of a step that is log-uniform in [1e-3, 1e-1]
            step = torch.exp(wide.uniform_(math.log(0.001), math.log(0.1), generator=generator))
            wide = step + torch.log(-torch.expm1(-step))
        elif name.endswith("conv1d.weight"):
            wide.uniform_(-0.5, 0.5, generator=generator)
        else:
            narrow = min(self._config.hidden_size**-0.5, shape[-1] ** -0.5)
            wide.normal_(std=0.02 if name.endswith("embed_tokens.weight") else narrow, generator=generator)
        return wide.to(dtype)


def make_checkpoint(
    config: AnyConfig, directory: Path, *, seed: int = 0, experts: Quantisation = Quantisation.NONE, shard_bytes: int = SHARD_BYTES,
    device: torch.device | str = "cpu",
) -> list[Path]:
    """Write a random bfloat16 checkpoint of `config` into a directory that holds none, its routed experts in form `experts`. Returns the files of tensors.

    Raises ConfigError when the directory is not empty, or when the experts cannot be packed.
    """
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError("not empty", field="out", value=str(directory), remedy="name a new directory")
    plain = public_shapes(skeleton(config, Quantisation.NONE))
    source = Recoded(RandomTensors(config, plain, seed, device).read, Quantisation.NONE, experts, torch.bfloat16)
    return write_checkpoint(directory, config, experts, recoded_shapes(plain, Quantisation.NONE, experts, torch.bfloat16), source, shard_bytes)


def random_model(
    config: AnyConfig, *, seed: int = 0, experts: Quantisation = Quantisation.NONE, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu",
) -> CausalLM:
    """What `load_checkpoint(dtype=dtype, device=device)` gives of what `make_checkpoint` writes, without the files. Raises ConfigError when the experts cannot
    be packed."""
    plain = public_shapes(skeleton(config, Quantisation.NONE))
    source = Recoded(RandomTensors(config, plain, seed, device).read, Quantisation.NONE, experts, torch.bfloat16)
    return assembled(config, experts, source.read, dtype=dtype, device=device, order=lambda name: (source.source(name), name))
