"""The backward's products for Hopper on one, at K3's widths: every code exactly, the same bits in every width, and the gradients of the other products."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "kernels"))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper device")]

if torch.cuda.is_available():
    from expert_cases import MAGNITUDES, choices, error, matrices

    from driftline.kernels.moe import gluon_backward as products
    from driftline.kernels.moe import triton_backward as kernels
    from driftline.kernels.moe.backward import Gradients, Products, Wanted, backward
    from driftline.kernels.moe.plan import plan
    from driftline.kernels.moe.triton_tiles import Form
    from driftline.kernels.mxfp4.weights import ExpertWeight, Mxfp4Weight

OUTER, HIDDEN = 3584, 3072
BETAS = (4.0, 25.0)


def stacks(form: str, experts: int) -> list[ExpertWeight]:
    return [matrices(Form[form], shape, i, "cuda")[0] for i, shape in enumerate([(experts, HIDDEN, OUTER), (experts, HIDDEN, OUTER), (experts, OUTER, HIDDEN)])]


def rows(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, OUTER, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()


def test_every_packed_code_and_scale_is_read_exactly_by_hoppers_products() -> None:
    """A row of dy that is one 1 and zeros gives a row of W2; a row of dg, of W1; a row of du, of W3.

    In every width of a tile: 512 rows are tiles of 160 and one of 32, the first 48 rows a tile of 64.
    """
    size = 512
    codes = torch.arange(size * size, device="cuda").mul(2654435761).bitwise_right_shift(7).remainder(16).to(torch.uint8).view(1, size, size)
    scale = (torch.arange(size * size // 32, device="cuda") * 37 % 117 + 12).to(torch.uint8).view(1, size, size // 32)
    weight = Mxfp4Weight(codes[..., 0::2] | codes[..., 1::2] << 4, scale)
    table = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), device="cuda")
    values = (table[codes.long()] * torch.exp2(scale.float() - 127).repeat_interleave(32, -1))[0].bfloat16()
    unit = torch.eye(size, device="cuda").bfloat16()
    for count in (size, 128, 48, 7):
        ids = torch.zeros(count, 1, dtype=torch.int64, device="cuda")
        tables = plan(ids, 1, products.BLOCK)
        some, none = unit[:count].contiguous(), torch.zeros(count, size, device="cuda").bfloat16()
        for run in (lambda out: products.d_hidden(some, weight, tables, out),  # noqa: B023
                    lambda out: products.d_input(some, none, weight, weight, tables, out),  # noqa: B023
                    lambda out: products.d_input(none, some, weight, weight, tables, out)):  # noqa: B023
            out = torch.full((count, size), float("nan"), device="cuda").bfloat16()
            run(out)
            assert torch.equal(out, values[:count])


@pytest.mark.parametrize("form", ["BFLOAT16", "MXFP4"])
def test_a_rows_bits_are_the_same_in_every_width_of_a_tile(form: str) -> None:
    w1, w3, w2 = stacks(form, 2)
    ids, gates = choices(300, 2, 1, device="cuda")
    z, dy = rows(300, 5), rows(300, 6)
    space = torch.empty_like(z)
    found = []
    for block in (160, 128, 64, 32):
        table = plan(ids, 2, block)
        dh, du = (torch.full((300, HIDDEN), float("nan"), device="cuda").bfloat16() for _ in range(2))
        out = torch.full((300, OUTER), float("nan"), device="cuda").bfloat16()
        kernels.sort_rows(dy, table, 1, space)
        products.d_hidden(space, w2, table, dh)
        kept = dh.clone()
        kernels.sort_rows(z, table, 1, space, renamed=form == "MXFP4")
        parts = products.inner(space, w1, w3, gates, dh, du, None, table, BETAS)
        products.d_input(dh, du, w1, w3, table, out)
        found.append((kept, dh, du, parts, out))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
    assert not torch.equal(found[0][0][:-1], found[0][0][1:])


@pytest.mark.parametrize("form", ["BFLOAT16", "MXFP4"])
def test_the_gradients_are_those_of_the_other_products(form: str) -> None:
    """200 tokens in microbatches of 150; one expert has no rows, and some ids are no expert."""
    weights, (ids, gates) = stacks(form, 3), choices(200, 2, 2, device="cuda")
    ids[7, 1] = -1
    z, dy = rows(200, 1), rows(200, 2)
    wanted = Wanted(True, True, *([form == "BFLOAT16"] * 3))
    held = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 28, 1 << 26, 1 << 24, 1 << 20, 1 << 16)]
    del held
    found, right = (backward(z, ids, gates, *weights, BETAS, dy, wanted, 150, way) for way in (Products.SORTED, Products.GATHERED))
    for name, mine, theirs in zip(Gradients._fields, found, right, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert error(mine, theirs) < 1e-3, name
    other = backward(z, ids, gates.roll(1, 0), *weights, BETAS, dy, wanted, 150, Products.SORTED)
    assert other.z is not None
    assert right.z is not None
    assert error(other.z, right.z) > 1e-3
