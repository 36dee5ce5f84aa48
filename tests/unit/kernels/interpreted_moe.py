"""The expert MLP's kernels in Triton's interpreter against the reference in fp64: every form of weights, every rounding, tiles of one and of two products."""

from __future__ import annotations

import pytest
import torch
from moe_cases import BETAS, COMBINATIONS, Case, case

from driftline.kernels.moe import forward, reference, triton_rows
from driftline.kernels.moe.activations import Activations, quantise, round_to_mxfp8
from driftline.kernels.moe.grouped import Form, Grouping, Pinned, Product
from driftline.kernels.moe.plan import plan

torch.set_num_threads(1)

ROUNDING = {Activations.SAME: 4e-3, Activations.FP8_32: 8e-3, Activations.FP8_128: 1.2e-2}
"""Relative error of a whole result: three roundings to bfloat16, and, where h is E4M3, those of its values that fp32 puts on the other side of a tie."""


def error(found: torch.Tensor, given: Case, activations: Activations) -> float:
    z, ids, gates, *weights = given
    wide = [w.double() if isinstance(w, torch.Tensor) else w for w in weights]
    expected = reference.expert_mlp(z.double(), ids, gates, *wide, *BETAS, activations=activations)
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.fixture(params=[Pinned(Grouping(((16, 0),)), Product(64, 4, 2), Product(128, 4, 2)),
                        Pinned(Grouping(((16, 0), (16, 16))), Product(128, 8, 2), Product(128, 8, 2))], ids=["narrow", "two products"])
def configuration(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pinned:
    monkeypatch.setattr(forward, "pinned", lambda *shapes: request.param)
    return request.param


@pytest.mark.parametrize(("form", "activations"), COMBINATIONS)
def test_results_are_the_references_to_their_roundings(form: Form, activations: Activations, configuration: Pinned) -> None:
    if activations is Activations.FP8_128 and configuration.up.features < 128:
        pytest.skip("a group of 128 is made by one tile")
    given = case(form, 24, 1, 3, 128, 128)
    found = forward.forward(*given, *BETAS, activations, None)
    assert error(found, given, activations) < ROUNDING[activations]
    swapped = given._replace(w1=given.w3, w3=given.w1)
    assert error(found, swapped, activations) > 0.1, "and would not pass for another's"


def test_two_steps_of_k_at_a_time_are_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(Form.MXFP4, 2, 1, 2, 256, 128)
    found = []
    for steps in (1, 2):
        configuration = Pinned(Grouping(((16, 0),)), Product(64, 4, 2, steps), Product(128, 4, 2, steps))
        monkeypatch.setattr(forward, "pinned", lambda *shapes, c=configuration: c)
        found.append(forward.forward(*given, *BETAS, Activations.SAME, None))
    assert torch.equal(*found)
    assert error(found[1], given, Activations.SAME) < ROUNDING[Activations.SAME]


def test_a_microbatch_changes_the_workspace_and_not_the_result() -> None:
    given = case(Form.MXFP4, 3, 2, 2, 128, 128)
    whole = forward.forward(*given, *BETAS, Activations.SAME, None)
    parts = forward.forward(*given, *BETAS, Activations.SAME, 2)
    torch.testing.assert_close(parts, whole, rtol=1e-2, atol=1e-3)  # the interpreter's products are numpy's, whose bits depend on shapes
    assert forward.workspace_bytes(2, 2, 128, 128, Activations.SAME) * 2 == forward.workspace_bytes(4, 2, 128, 128, Activations.SAME)


def test_an_id_that_is_no_expert_adds_nothing() -> None:
    given = case(Form.MXFP4, 3, 2, 3, 128, 128)
    padded = given._replace(ids=torch.where(torch.tensor([[True, False], [False, False], [True, True]]), given.ids, -1))
    found = forward.forward(*padded, *BETAS, Activations.SAME, None)
    assert not found[1].any()
    assert error(found, padded, Activations.SAME) < ROUNDING[Activations.SAME]


@pytest.mark.parametrize("form", [Form.BFLOAT16, Form.MXFP4])
def test_rows_are_rounded_as_the_rule_says_and_then_put_in_order(form: Form) -> None:
    z = (torch.randn(5, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 5)[:, None]).bfloat16()
    z[1, :128] = 0
    z[2] = torch.arange(-128, 128).bfloat16()  # full of ties
    z[2, ::128] = 187
    plain, _ = triton_rows.prepare(z, form, Activations.SAME)
    rounded, _ = triton_rows.prepare(z, form, Activations.FP8_32)
    values, scale = triton_rows.prepare(z, form, Activations.FP8_128)
    order = places(form, fp8=False)
    assert torch.equal(plain, z[:, order])
    assert torch.equal(rounded.float(), round_to_mxfp8(z)[:, order])
    expected, factor = quantise(z)
    assert torch.equal(values.float(), expected.float()[:, places(form, fp8=True)])
    assert torch.equal(scale, factor.t())


def places(form: Form, *, fp8: bool) -> torch.Tensor:
    """k of each of 256 columns, as the weights of this form come out of their words."""
    if form is not Form.MXFP4:
        return torch.arange(256)
    where = torch.empty(128, dtype=torch.int64)
    for k in range(128):
        q, a, rest = k // 32, k // 8 % 4, k % 8
        where[64 * (rest // 4) + 4 * (4 * a + q) + rest % 4 if fp8 else 32 * (rest % 4) + 2 * (4 * a + q) + rest // 4] = k
    return torch.cat([where, where + 128])


def test_slots_are_summed_in_their_order() -> None:
    """Of 2^60, 1, -2^60 in fp32 the 1 is lost, of 2^60, -2^60, 1 it is not."""
    y = torch.tensor([2.0**60, 1.0, -(2.0**60)]).bfloat16()[:, None].expand(3, 128).contiguous()
    for ids, expected in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        rows = plan(torch.tensor([ids]), 3, 16)
        out = torch.full((1, 128), torch.nan, dtype=torch.bfloat16)
        triton_rows.combine(y, rows, torch.ones(1, 3), out)
        assert torch.equal(out, torch.full_like(out, expected))
