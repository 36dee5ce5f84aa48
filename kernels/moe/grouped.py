"""The pinned shapes of the expert products' tiles: one table, looked up by shapes alone, so that what was routed decides nothing but how much work there is.

None of these numbers reaches a result's bits (see triton_forward), so they may differ between a rollout of one token and a learner of 8,192.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from driftline.kernels.moe.activations import Activations
from driftline.kernels.mxfp4.weights import ExpertWeight, Fp8Weight, Mxfp4Weight

__all__ = ["Form", "Grouping", "Pinned", "Product", "form_of", "pinned"]


class Form(Enum):
    """How weights lie in memory, as the kernels know it."""

    BFLOAT16 = 0
    MXFP4 = 1
    FP8 = 2


class Grouping(NamedTuple):
    """widths: ascending (first, second) columns of tokens a tile may have, second 0 or a further product with the same weights; a tile takes the
    least that holds its rows."""

    widths: tuple[tuple[int, int], ...]

    @property
    def block(self) -> int:
        """Rows of a whole tile."""
        return sum(self.widths[-1])


class Product(NamedTuple):
    """features: rows of a tile (of each matrix); warps; steps: stretches of 128 of K that are asked for together, and taken one after another; stages: such steps
    in flight, and one. Two steps read 128 neighbouring bytes of a packed row at a time instead of 64."""

    features: int
    warps: int
    stages: int
    steps: int = 1


class Pinned(NamedTuple):
    """gathered: the products are those of `gluon_packed`, for many rows an expert and MXFP4 weights; else those of `triton_forward`."""

    grouping: Grouping
    up: Product
    down: Product
    gathered: bool = False


_16 = Grouping(((16, 0),))
_32 = Grouping(((32, 0),))
_64 = Grouping(((32, 0), (64, 0)))
_96 = Grouping(((32, 0), (64, 0), (64, 32)))
_128 = Grouping(((32, 0), (64, 0), (128, 0)))
_160 = Grouping(((32, 0), (64, 0), (128, 0), (128, 32)))

ROWS = (12, 24, 56, 88)
"""Rows an expert may expect at most (pairs / experts) for each row of a table but the last."""

TABLE: dict[tuple[Form, bool], tuple[Pinned, ...]] = {
    (Form.MXFP4, False): (
        Pinned(_16, Product(64, 4, 2, 2), Product(128, 4, 2, 2)),
        Pinned(_32, Product(64, 4, 3), Product(128, 4, 3)),
        Pinned(_64, Product(64, 4, 3), Product(128, 4, 3)),
        Pinned(_96, Product(128, 8, 4), Product(256, 8, 4), gathered=True),
        Pinned(_160, Product(128, 8, 4), Product(256, 8, 4), gathered=True),
    ),
    (Form.MXFP4, True): (
        Pinned(_16, Product(128, 4, 4), Product(128, 4, 4)),
        Pinned(_32, Product(128, 4, 4), Product(128, 4, 4)),
        Pinned(_64, Product(128, 8, 3), Product(128, 4, 3)),
        Pinned(_64, Product(128, 8, 3), Product(128, 4, 3)),
        Pinned(_64, Product(128, 8, 3), Product(128, 4, 3)),
    ),
    (Form.FP8, True): (
        Pinned(_16, Product(128, 4, 3), Product(128, 4, 4)),
        Pinned(_32, Product(128, 4, 3), Product(128, 4, 4)),
        Pinned(_64, Product(128, 8, 3), Product(128, 4, 3)),
        Pinned(_96, Product(128, 8, 3), Product(128, 8, 3)),
        Pinned(_96, Product(128, 8, 3), Product(128, 8, 3)),
    ),
    (Form.BFLOAT16, False): (
        Pinned(_16, Product(64, 4, 3), Product(128, 4, 3)),
        Pinned(_32, Product(64, 4, 3), Product(128, 4, 3)),
        Pinned(_64, Product(64, 4, 3), Product(128, 4, 3)),
        Pinned(_128, Product(128, 8, 2), Product(256, 8, 2)),
        Pinned(_160, Product(128, 8, 2), Product(256, 8, 2)),
    ),
}
"""By (form of the weights, whether activations are FP8 with a scale per 128): from few rows an expert to many."""


def form_of(weight: ExpertWeight) -> Form:
    if isinstance(weight, Mxfp4Weight):
        return Form.MXFP4
    return Form.FP8 if isinstance(weight, Fp8Weight) else Form.BFLOAT16


def pinned(form: Form, activations: Activations, pairs: int, experts: int, latent: int) -> Pinned:
    """The configuration for `pairs` routed rows among `experts` whose second product has `latent` features, a multiple of 128."""
    table = TABLE[form, activations is Activations.FP8_128]
    expected = pairs / experts
    found = table[sum(expected > rows for rows in ROWS)]
    if latent % found.down.features == 0:
        return found
    return found._replace(down=found.down._replace(features=128, warps=4 if found.gathered else found.down.warps))
