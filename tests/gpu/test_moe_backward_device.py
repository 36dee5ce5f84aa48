"""The expert MLP's backward on a CUDA device at K3's widths: against float64, bit for bit in any batch, and each check shown to be able to fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "kernels"))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from expert_cases import MAGNITUDES, choices, error, exact, matrices

    from driftline.kernels.moe import triton_backward as kernels
    from driftline.kernels.moe.activations import Activations
    from driftline.kernels.moe.autograd import expert_mlp_with_grad
    from driftline.kernels.moe.backward import Gradients, Wanted, backward, workspace_bytes
    from driftline.kernels.moe.plan import plan
    from driftline.kernels.moe.reference import expert_mlp
    from driftline.kernels.moe.triton_tiles import Form
    from driftline.kernels.mxfp4.weights import ExpertWeight, Mxfp4Weight

OUTER, HIDDEN = 3584, 3072
BETAS = (4.0, 25.0)
FORMS = ("BFLOAT16", "MXFP4", "FP8")
BOUND = 0.008
"""Relative error of a whole gradient: four roundings to bfloat16 on the way, 0.0017 each, leave about 0.004."""


def poison() -> None:
    """Leave not-a-numbers where the next tensors will be."""
    held = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 28, 1 << 26, 1 << 24, 1 << 20, 1 << 16)]
    del held


def stacks(form: str, experts: int) -> tuple[list[ExpertWeight], tuple[torch.Tensor, ...]]:
    made = [matrices(Form[form], shape, i, "cuda") for i, shape in enumerate([(experts, HIDDEN, OUTER), (experts, HIDDEN, OUTER), (experts, OUTER, HIDDEN)])]
    return [w for w, _ in made], tuple(v for _, v in made)


def rows(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, OUTER, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("experts", "tokens", "top_k"), [(6, 40, 3), (2, 600, 2)], ids=["few-rows", "many-rows"])
def test_gradients_are_float64s_and_closer_to_it_than_torchs(form: str, experts: int, tokens: int, top_k: int) -> None:
    weights, values = stacks(form, experts)
    z, dy, (ids, gates) = rows(tokens, 7), rows(tokens, 8), choices(tokens, experts, top_k, device="cuda")
    wanted = exact(z, ids, gates, values, dy, BETAS)
    leaves = [t.clone().requires_grad_() for t in (z, gates, *(v.bfloat16() for v in values))]
    plain = torch.autograd.grad(expert_mlp(leaves[0], ids, leaves[1], *leaves[2:], *BETAS), leaves, dy)
    poison()
    found = backward(z, ids, gates, *weights, BETAS, dy, Wanted(True, True, *([form == "BFLOAT16"] * 3)), 17 if tokens < 100 else None)
    for name, mine, theirs, right in zip(Gradients._fields, found, plain, wanted, strict=True):
        if mine is not None:
            assert error(mine, right) < BOUND, name
            assert tokens < 100 or error(mine, right) < 1.05 * error(theirs, right), name
    shifted = backward(z, ids, gates.roll(1, 0), *weights, BETAS, dy, Wanted(True, True, False, False, False))
    assert error(shifted.z, wanted[0]) > BOUND, "another token's gates would be seen"


def test_every_packed_code_and_scale_is_read_exactly_by_both_products() -> None:
    """A row of dy that is one 1 and zeros gives a row of W2; a row of dg that is one 1, a row of W1."""
    height, width = 128, 512
    codes = torch.arange(height * width, device="cuda").mul(2654435761).bitwise_right_shift(7).remainder(16).to(torch.uint8).view(1, height, width)
    scale = (torch.arange(height * width // 32, device="cuda") * 37 % 117 + 12).to(torch.uint8).view(1, height, width // 32)
    weight = Mxfp4Weight(codes[..., 0::2] | codes[..., 1::2] << 4, scale)
    table = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), device="cuda")
    values = (table[codes.long()] * torch.exp2(scale.float() - 127).repeat_interleave(32, -1))[0].bfloat16()
    ids = torch.zeros(height, 1, dtype=torch.int64, device="cuda")
    unit, none = torch.eye(height, device="cuda").bfloat16(), torch.zeros(height, height, device="cuda").bfloat16()
    for few in (True, False):
        blocks = kernels.PINNED[Form.MXFP4, few]
        tables = plan(ids, 1, blocks.rows)
        for run in (lambda out: kernels.d_hidden(unit, weight, tables, 1, out, blocks),  # noqa: B023
                    lambda out: kernels.d_input(unit, none, weight, weight, tables, out, blocks)):  # noqa: B023
            out = torch.full((height, width), float("nan"), device="cuda").bfloat16()
            run(out)
            assert torch.equal(out, values)


def test_weights_gradients_are_zero_for_an_expert_without_rows_and_written_everywhere() -> None:
    weights, _ = stacks("BFLOAT16", 4)
    z, dy, (ids, gates) = rows(64, 1), rows(64, 2), choices(64, 3, 2, device="cuda")
    poison()
    found = backward(z, ids, gates, *weights, BETAS, dy, Wanted(True, True, True, True, True))
    for d in found[2:]:
        assert d is not None
        assert not d[3].any()
        assert torch.isfinite(d).all()
        assert (d[:3].float().norm(dim=(1, 2)) > 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_rows_gradients_have_their_bits_in_any_batch(form: str) -> None:
    """1,024 rows take the higher tiles and 512 the lower ones: the bits are the same."""
    experts, top_k = 4, 2
    weights, _ = stacks(form, experts)
    z, dy, (ids, gates) = rows(1024, 3), rows(1024, 4), choices(1024, experts, top_k, device="cuda")
    assert kernels.blocks_for(Form[form], 1024 * top_k, experts) != kernels.blocks_for(Form[form], 512 * top_k, experts)

    def run(some: torch.Tensor, chosen: torch.Tensor = ids, weighed: torch.Tensor = gates, microbatch: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        found = backward(z[some], chosen[some], weighed[some], *weights, BETAS, dy[some], Wanted(True, True, False, False, False), microbatch)
        assert found.z is not None
        assert found.gates is not None
        return found.z, found.gates

    everything = torch.arange(1024, device="cuda")
    whole = run(everything)
    for count in (1, 2, 7, 64, 512):
        for some in (everything[:count], everything[-count:], everything.flip(0)[:count]):
            assert all(torch.equal(a, b[some]) for a, b in zip(run(some), whole, strict=True)), count
    assert all(torch.equal(a, b) for a, b in zip(run(everything, microbatch=100), whole, strict=True))

    later = z.clone()
    later[700:] = rows(324, 99)
    before = backward(later, ids, gates, *weights, BETAS, dy, Wanted(True, True, False, False, False))
    assert before.z is not None
    assert torch.equal(before.z[:700], whole[0][:700])
    assert not torch.equal(before.z[700:], whole[0][700:])


def test_slots_are_added_in_their_order_and_another_order_would_be_seen() -> None:
    """In fp32 and over 24 binades, where most sums show their order; rounded to bfloat16 few would."""
    ids, _ = choices(64, 6, 5, device="cuda")
    ids[7, 2] = -1
    table = plan(ids, 6, 64)
    random = torch.Generator("cuda").manual_seed(1)
    scale = torch.exp2(torch.randint(-12, 12, (320, OUTER), device="cuda", generator=random).float())
    parts = (torch.randn(320, OUTER, device="cuda", generator=random) * scale).bfloat16()
    found = torch.full((64, OUTER), float("nan"), device="cuda")
    kernels.sum_slots(parts, table, 5, found)
    slots = parts.float()[table.rows.long()].view(64, 5, OUTER)
    slots[7, 2] = 0
    forwards, backwards = torch.zeros_like(found), torch.zeros_like(found)
    for i in range(5):
        forwards += slots[:, i]
        backwards += slots[:, 4 - i]
    assert torch.equal(found, forwards)
    assert not torch.equal(found, backwards)


def test_the_workspace_is_that_of_one_microbatch_however_many_tokens() -> None:
    weights, _ = stacks("MXFP4", 4)
    for tokens in (512, 4096):
        z, dy, (ids, gates) = rows(tokens, 5), rows(tokens, 6), choices(tokens, 4, 2, device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = backward(z, ids, gates, *weights, BETAS, dy, Wanted(True, True, False, False, False), 512)
        peak = torch.cuda.max_memory_allocated() - before
        results = sum(t.nbytes for t in found if t is not None)
        assert peak <= results + 1.05 * workspace_bytes(512, 2, OUTER, HIDDEN) + (1 << 20)
        assert peak > results + 0.9 * workspace_bytes(512, 2, OUTER, HIDDEN), "it is what is held that is counted"


def test_a_thousand_repeats_give_one_result() -> None:
    weights, _ = stacks("BFLOAT16", 4)
    z, dy, (ids, gates) = rows(48, 5), rows(48, 6), choices(48, 4, 2, device="cuda")
    # Weights' gradients take other products than those of z and the gates alone, and each of the two ways repeats itself.
    ways = {every: Wanted(True, True, every, every, every) for every in (True, False)}
    kept = {every: [None if t is None else t.clone() for t in backward(z, ids, gates, *weights, BETAS, dy, wanted)] for every, wanted in ways.items()}
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for i in range(1000):
        every = i % 20 == 0
        for one, other in zip(backward(z, ids, gates, *weights, BETAS, dy, ways[every]), kept[every], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                differs |= (one != other).any()
    assert not differs.item()
    nudged = backward(z, ids, gates * 1.001, *weights, BETAS, dy, Wanted(True, False, False, False, False))
    assert nudged.z is not None
    assert not torch.equal(nudged.z, kept[False][0]), "a thousandth of a gate would be seen"


@pytest.mark.parametrize("form", FORMS)
def test_the_op_carries_these_gradients_and_keeps_nothing_but_its_inputs(form: str) -> None:
    weights, values = stacks(form, 4)
    z, dy, (ids, gates) = rows(64, 11), rows(64, 12), choices(64, 4, 2, device="cuda")
    wanted = exact(z, ids, gates, values, dy, BETAS)
    z.requires_grad_()
    gates.requires_grad_()
    leaves = [w.requires_grad_() for w in weights if isinstance(w, torch.Tensor)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    rounding = Activations.FP8_128 if form == "FP8" else Activations.SAME
    out = expert_mlp_with_grad(z, ids, gates, *weights, *BETAS, activations=rounding, microbatch=None)
    assert torch.cuda.memory_allocated() - before <= out.nbytes + 4096
    right = expert_mlp(z.detach().double(), ids, gates.detach().double(), *(v.double() for v in values), *BETAS)
    assert error(out.detach(), right) < (0.06 if rounding is Activations.FP8_128 else BOUND)
    out.backward(dy)
    for leaf, gradient in zip((z, gates, *leaves), wanted, strict=False):
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        assert error(leaf.grad, gradient) < BOUND
