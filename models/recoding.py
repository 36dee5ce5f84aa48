"""Stored tensors in another form of routed experts: unpacking is exact, packing what was unpacked gives the same values, and all else passes as it is.

Packing follows the rule of the released checkpoints (kernels.mxfp4.pack). Its bytes need not be those that were unpacked: a group without a large value may be
given a smaller scale, under which the same values have other codes.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from driftline.kernels.mxfp4 import pack, unpack
from driftline.kernels.mxfp4.weights import GROUP
from driftline.messages.errors import ConfigError
from driftline.models.quantisation import Quantisation
from driftline.models.shard_files import Shape

__all__ = ["EXPERT", "Recoded", "packed_names", "recoded_shapes"]

EXPERT = re.compile(r"^(?P<matrix>.+\.experts\.\d+\.w[123])\.weight(?P<part>_packed|_scale)?$")
"""The public names of an expert's matrix."""


def packed_names(matrix: str) -> tuple[str, str]:
    """Of `...experts.E.w1`: the names of its packed values and of its scales."""
    return f"{matrix}.weight_packed", f"{matrix}.weight_scale"


class Recoded:
    """`read(name)` for the names of a checkpoint in form `wanted`, from one in form `held`. At most one expert matrix is kept: the one packed last."""

    def __init__(self, read: Callable[[str], torch.Tensor], held: Quantisation, wanted: Quantisation, dtype: torch.dtype) -> None:
        """`dtype`: floating, of what is unpacked."""
        self._read, self._held, self._wanted, self._dtype = read, held, wanted, dtype
        self._matrix, self._pair = "", (torch.empty(0), torch.empty(0))

    def source(self, name: str) -> str:
        """The first tensor that `read(name)` reads, by which reads can be put in the order of the files."""
        expert = EXPERT.match(name)
        if expert is None or self._held is self._wanted:
            return name
        return f"{expert['matrix']}.weight" if self._held is Quantisation.NONE else packed_names(expert["matrix"])[0]

    def read(self, name: str) -> torch.Tensor:
        expert = EXPERT.match(name)
        if expert is None or self._held is self._wanted:
            return self._read(name)
        matrix = expert["matrix"]
        if self._wanted is Quantisation.NONE:
            packed, scale = packed_names(matrix)
            return unpack(self._read(packed), self._read(scale), self._dtype)
        if matrix != self._matrix:
            self._matrix, self._pair = matrix, pack(self._read(f"{matrix}.weight"))
        return self._pair[packed_names(matrix).index(name)]


def recoded_shapes(shapes: dict[str, Shape], held: Quantisation, wanted: Quantisation, dtype: torch.dtype) -> dict[str, Shape]:
    """The names and shapes of form `wanted`, from those of form `held`. Raises ConfigError when an expert's rows are no whole groups of 32."""
    if held is wanted:
        return shapes
    made: dict[str, Shape] = {}
    for name, shape in shapes.items():
        expert = EXPERT.match(name)
        if expert is None:
            made[name] = shape
        elif wanted is Quantisation.NONE:
            if expert["part"] == "_packed":
                made[f"{expert['matrix']}.weight"] = Shape(dtype, (shape.shape[0], shape.shape[1] * 2))
        elif shape.shape[1] % GROUP:
            raise ConfigError(f"MXFP4 shares a scale over {GROUP} columns, which must divide a row of an expert", field=name, value=shape.shape,
                              remedy="keep the experts unpacked, or choose multiples for moe_intermediate_size and routed_expert_hidden_size")
        else:
            packed, scale = packed_names(expert["matrix"])
            made[packed] = Shape(torch.uint8, (shape.shape[0], shape.shape[1] // 2))
            made[scale] = Shape(torch.uint8, (shape.shape[0], shape.shape[1] // GROUP))
    return made
