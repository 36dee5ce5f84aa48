"""The expert products of a learner's batch as the compiler leaves them for Hopper, their PTX run on the CPU: tiles of each width, both roundings, and barriers
that are missing seen to be so. Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import re

import pytest
import torch
from moe_cases import BETAS, Case, case
from ptx_bulk import run_on_cpu
from ptx_machine import Launched, launches_of

from driftline.kernels.moe import gluon_packed, triton_rows
from driftline.kernels.moe.activations import Activations, rounded
from driftline.kernels.moe.grouped import Form, Grouping, Product
from driftline.kernels.moe.plan import Plan, plan
from driftline.kernels.mxfp4.reference import unpack
from driftline.kernels.mxfp4.weights import ExpertWeight, Mxfp4Weight
from driftline.kernels.situ_glu import situ_glu

torch.set_num_threads(1)

LATENT, INNER = 256, 128


def in_order(rows: torch.Tensor) -> torch.Tensor:
    """Columns of each 128 as the weights come out of their words."""
    count, width = rows.shape
    return rows.reshape(count, width // 128, 4, 4, 2, 4).permute(0, 1, 5, 3, 2, 4).reshape(count, width).contiguous()


def packed(weight: ExpertWeight) -> Mxfp4Weight:
    assert isinstance(weight, Mxfp4Weight)
    return weight


def tokens_for(counts: list[int]) -> tuple[Case, Plan, Grouping]:
    """As many tokens for each expert as counted, in no order."""
    given = case(Form.MXFP4, sum(counts), 1, len(counts), LATENT, INNER)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[torch.randperm(sum(counts), generator=torch.Generator().manual_seed(2))]
    grouping = Grouping(((32, 0), (64, 0), (64, 32)))
    return given._replace(ids=ids[:, None]), plan(ids[:, None], len(counts), grouping.block), grouping


def wanted(given: Case, table: Plan, activations: Activations) -> tuple[torch.Tensor, torch.Tensor]:
    """h and y in fp64, rows in the plan's order; y from h as the kernel rounds it."""
    w1, w3, w2 = (unpack(packed(w).packed, packed(w).scale, torch.float64) for w in (given.w1, given.w3, given.w2))
    expert, z = given.ids[table.pairs.long(), 0], rounded(given.z[table.pairs.long()], activations).double()
    h = situ_glu(torch.einsum("nz,niz->ni", z, w1[expert]), torch.einsum("nz,niz->ni", z, w3[expert]), *BETAS)
    return h, torch.einsum("ni,nzi->nz", rounded(h.float(), activations).bfloat16().double(), w2[expert])


@pytest.mark.parametrize("activations", [Activations.SAME, Activations.FP8_32])
def test_tiles_of_every_width(activations: Activations) -> None:
    """64 + 32 and the rest of 96 (32), 64, 32, none at all."""
    given, table, grouping = tokens_for([107, 0, 50, 9])
    expected_h, expected_y = wanted(given, table, activations)
    x = in_order(rounded(given.z, activations)[table.pairs.long()])
    h, y = torch.full((166, INNER), torch.nan).bfloat16(), torch.full((166, LATENT), torch.nan).bfloat16()
    first = launches_of(lambda: gluon_packed.up(x, packed(given.w1), packed(given.w3), table, h, beta=BETAS[0], linear_beta=BETAS[1], grouping=grouping,
                                                product=Product(128, 8, 3), rounding=activations))
    assert run_on_cpu(first, [x, h]) == set()
    ordered_h = in_order(rounded(expected_h.float(), activations))
    # in MXFP8 some values lie on the other side of a tie
    assert ((h.double() - ordered_h).norm() / ordered_h.norm()).item() < (3e-3 if activations is Activations.SAME else 6e-3)
    second = launches_of(lambda: gluon_packed.down(h, packed(given.w2), table, y, grouping=grouping, product=Product(256, 8, 3)))
    assert run_on_cpu(second, [h, y]) == set()
    assert ((y.double() - expected_y).norm() / expected_y.norm()).item() < (4e-3 if activations is Activations.SAME else 8e-3)
    assert ((y.double() - expected_y.flip(0)).norm() / expected_y.norm()).item() > 0.5, "and would not pass for other rows"


def test_a_tile_of_fewer_features_and_a_barrier_that_is_missing() -> None:
    given, table, grouping = tokens_for([20])
    h, y = in_order(given.z[table.pairs.long()][:, :INNER]), torch.full((20, LATENT), torch.nan).bfloat16()
    launches = launches_of(lambda: gluon_packed.down(h, packed(given.w2), table, y, grouping=grouping, product=Product(128, 4, 2)))
    assert run_on_cpu(launches, [h, y]) == set()
    w2 = unpack(packed(given.w2).packed, packed(given.w2).scale, torch.float64)[0]
    expected = given.z[table.pairs.long()][:, :INNER].double() @ w2.t()
    assert ((y.double() - expected).norm() / expected.norm()).item() < 4e-3
    long = case(Form.MXFP4, 20, 1, 1, INNER, 384)
    rows, out = in_order(torch.randn(20, 384).bfloat16()), torch.empty(20, INNER).bfloat16()
    launches = launches_of(lambda: gluon_packed.down(rows, packed(long.w2), table, out, grouping=grouping, product=Product(128, 4, 2)))
    kernel = launches[0].kernel
    stripped = type(kernel)(**{**vars(kernel), "ptx": re.sub(r"\tbar\.sync[^\n]*\n", "", kernel.ptx)})
    assert any("without a barrier" in line for line in run_on_cpu([Launched(stripped, launches[0].arguments)], [rows, out]))


def test_gathered_rows_are_the_tokens_rows() -> None:
    given, table, _ = tokens_for([7, 3])
    out = torch.full((10, LATENT), torch.nan).bfloat16()
    launches = launches_of(lambda: triton_rows.gather(given.z, table, out, top_k=1, form=Form.MXFP4, rounding=Activations.SAME))
    assert run_on_cpu(launches, [given.z, out]) == set()
    assert torch.equal(out, in_order(given.z[table.pairs.long()]))
