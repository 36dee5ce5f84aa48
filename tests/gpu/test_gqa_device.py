"""The compiled kernels of grouped queries' attention on a CUDA device: near fp64 both ways, and the same bits whatever surrounds a query."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from driftline.kernels.gqa import Layout, attention, reference, triton_backward, triton_forward
from driftline.kernels.gqa.layout import Sizes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OUT_BOUND, GRAD_BOUND = 4e-3, 8e-3  # probabilities and score gradients are rounded to bfloat16 before a product


class Widths(NamedTuple):
    heads: int
    key_heads: int
    width: int


LLAMA, SMOL, ODD = Widths(32, 8, 128), Widths(9, 3, 64), Widths(4, 4, 96)
ALL = (LLAMA, SMOL, ODD)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(batch: int, steps: int, columns: int, widths: Widths = SMOL, seed: int = 0) -> Inputs:
    random = torch.Generator("cuda").manual_seed(seed)
    shapes = ((batch, steps, widths.heads), (batch, columns, widths.key_heads), (batch, columns, widths.key_heads))
    q, keys, values = (torch.randn(*shape, widths.width, generator=random, device="cuda").bfloat16() for shape in shapes)
    return q, keys, values


def ends(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()


def pack(queries: list[int], keys: list[int], widths: Widths, rows: torch.Tensor | None = None) -> tuple[Inputs, Layout]:
    return inputs(1, sum(queries), sum(keys), widths), Layout.packed(ends(queries), ends(keys), sum(queries), sum(keys), rows=rows)


def both_ways(given: Inputs, layout: Layout, grad: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """(out, dq, dkeys, dvalues), from memory that was full of NaNs."""
    poison = torch.full((64 * 2**20,), torch.nan, device="cuda")
    del poison
    leaves = [t.detach().clone().requires_grad_() for t in given]
    out = attention(*leaves, layout=layout, out_dtype=out_dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out_dtype))


def exact(given: Inputs, layout: Layout, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [t.double().requires_grad_() for t in given]
    out = reference.attention(*leaves, layout, given[0].shape[3] ** -0.5, torch.float64)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def errors(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> list[float]:
    return [error(one, other) for one, other in zip(found, wanted, strict=True)]


def gradient(out: torch.Tensor) -> torch.Tensor:
    return torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(6), device="cuda")


@pytest.mark.parametrize("widths", ALL)
@pytest.mark.parametrize(("queries", "keys"), [([700], [700]), ([1, 127, 128, 129, 0, 300], [1, 127, 128, 129, 0, 300]), ([64, 1, 130], [500, 257, 1400])])
def test_outputs_and_gradients_of_a_pack_are_near_fp64(widths: Widths, queries: list[int], keys: list[int]) -> None:
    given, layout = pack(queries, keys, widths)
    grad = gradient(given[0])
    found = both_ways(given, layout, grad)
    out, *gradients = errors(found, exact(given, layout, grad))
    assert out < OUT_BOUND
    assert max(gradients) < GRAD_BOUND, gradients
    assert [t.dtype for t in found] == [torch.float32, *[torch.bfloat16] * 3]


@pytest.mark.parametrize("widths", [LLAMA, SMOL])
def test_padded_rows_with_skipped_columns_and_keys_in_any_order_are_near_fp64(widths: Widths) -> None:
    given = inputs(3, 40, 1500, widths)
    valid = torch.rand(3, 1500, generator=torch.Generator("cuda").manual_seed(1), device="cuda") > 0.4
    valid[2] = False
    valid[2, 1480:] = True
    rows = torch.randperm(1157, generator=torch.Generator().manual_seed(2)).to(torch.int32).cuda()
    for three, layout in ((given, Layout.padded(3, 40, 1500, valid=valid)), pack([64, 1, 130], [500, 257, 400], widths, rows)):
        grad = gradient(three[0])
        wanted = exact(three, layout, grad)
        out, *gradients = errors(both_ways(three, layout, grad), wanted)
        assert out < OUT_BOUND
        assert max(gradients) < GRAD_BOUND, gradients
        with torch.no_grad():
            assert error(attention(*three, layout=layout), wanted[0]) < OUT_BOUND


def test_no_worse_than_torch_in_bfloat16() -> None:
    given, layout = pack([600], [600], LLAMA)
    grad = gradient(given[0])
    wanted = exact(given, layout, grad)
    q, keys, values = (t.detach().clone().requires_grad_() for t in given)
    wide_keys, wide_values = (t.repeat_interleave(4, 2) for t in (keys, values))
    score = torch.einsum("bthd,bshd->bhts", q, wide_keys).float() * 128**-0.5
    p = torch.softmax(score.masked_fill(~torch.ones(600, 600, dtype=torch.bool, device="cuda").tril(), -torch.inf), dim=-1).bfloat16()
    eager = torch.einsum("bhts,bshd->bthd", p, wide_values)
    theirs = errors((eager.detach(), *torch.autograd.grad(eager, (q, keys, values), grad.bfloat16())), wanted)
    ours = errors(both_ways(given, layout, grad), wanted)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine < 1.1 * other, (ours, theirs)


def test_the_bounds_are_tight_enough_to_see_one_key_too_many() -> None:
    given, layout = pack([300], [301], SMOL)
    grad = gradient(given[0])
    fewer = (given[0], given[1][:, :300].contiguous(), given[2][:, :300].contiguous())
    wanted = exact(fewer, Layout.padded(1, 300, 300, device="cuda"), grad)
    shifted = both_ways(given, layout, grad)
    assert error(shifted[0], wanted[0]) > OUT_BOUND
    assert error(shifted[1], wanted[1]) > GRAD_BOUND
    assert error(shifted[2][:, :300], wanted[2]) > GRAD_BOUND


def test_large_scores_do_not_overflow_and_a_rounded_output_is_the_output_rounded() -> None:
    q, keys, values = inputs(2, 300, 300)
    layout, given = Layout.padded(2, 300, 300, device="cuda"), (q * 20, keys, values)
    grad = gradient(q)
    found = both_ways(given, layout, grad)
    assert all(bool(t.isfinite().all()) for t in found)
    assert error(found[0], exact(given, layout, grad)[0]) < OUT_BOUND
    assert torch.equal(attention(*given, layout=layout), found[0].bfloat16())


def test_skipped_columns_are_never_read_and_a_query_that_sees_nothing_gives_zeros() -> None:
    q, keys, values = inputs(4, 3, 1300)
    valid = torch.rand(4, 1300, generator=torch.Generator("cuda").manual_seed(1), device="cuda") > 0.5
    valid[0, :1299], valid[0, 1299] = False, True
    before = attention(q, keys, values, valid=valid)
    poisoned = [t.masked_fill(~valid[:, :, None, None], torch.nan) for t in (keys, values)]
    assert torch.equal(attention(q, *poisoned, valid=valid), before)
    assert not bool(before[0, :2].any())
    assert bool(before[0, 2].all())


@pytest.mark.parametrize("widths", [LLAMA, SMOL])
@pytest.mark.parametrize("batch", [1, 2, 7, 64, 512])
def test_a_sequence_has_the_same_bits_in_a_pack_of_any_size_both_ways(widths: Widths, batch: int) -> None:
    random = torch.Generator().manual_seed(5)
    lengths = [333, *torch.randint(1, 60, (511,), generator=random).tolist()]
    given = inputs(1, sum(lengths), sum(lengths), widths)
    grad, here = gradient(given[0]), lengths[:batch]
    rows = sum(here)
    q, keys, values = (t[:, :rows].contiguous() for t in given)
    packed = both_ways((q, keys, values), Layout.packed(ends(here), ends(here), rows, rows), grad[:, :rows])
    for i in {0, batch // 2, batch - 1}:
        a, b = sum(here[:i]), sum(here[: i + 1])
        q, keys, values = (t[:, a:b].contiguous() for t in given)
        alone = both_ways((q, keys, values), Layout.padded(1, b - a, b - a, device="cuda"), grad[:, a:b])
        assert all(torch.equal(whole[:, a:b], one) for whole, one in zip(packed, alone, strict=True)), i


@pytest.mark.parametrize("widths", ALL)
def test_prefill_in_pieces_decode_and_training_have_the_bits_of_one_shot(widths: Widths) -> None:
    """Pieces of one token and of few take parts of the keys apart, the others take them in order; a training forward is one more."""
    q, keys, values = inputs(1, 2500, 2500, widths)
    whole = attention(q, keys, values)
    for piece in (1, 3, 64, 192, 1024, 333):
        begins = range(0, 2500, piece) if piece > 3 else (*range(0, 70, piece), *range(1020, 1030, piece), *range(2040, 2060, piece), 2500 - piece)
        for a in begins:
            b = min(a + piece, 2500)
            assert torch.equal(attention(q[:, a:b], keys[:, :b], values[:, :b]), whole[:, a:b]), (piece, a)
    leaf = q.clone().requires_grad_()
    assert torch.equal(attention(leaf, keys, values), whole)


def test_a_row_of_a_padded_batch_has_the_bits_of_its_columns_alone() -> None:
    random = torch.Generator().manual_seed(3)
    batch, columns = 64, 2100
    q, keys, values = inputs(batch, 2, columns)
    valid = torch.rand(batch, columns, generator=random) > torch.rand(batch, 1, generator=random)
    valid[:, -2:] = True
    found = attention(q, keys, values, valid=valid.cuda())
    for i in (0, 1, 31, 63):
        keep = valid[i].cuda()
        assert torch.equal(attention(q[i : i + 1], keys[i : i + 1, keep], values[i : i + 1, keep])[0], found[i]), i


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("columns", [70, 1500])
def test_rows_whose_new_tokens_are_partly_skipped_are_near_fp64_both_ways(steps: int, columns: int) -> None:
    """As of a batch in which some rows are over: gaps in the middle, and of the new columns some, or all, that do not count."""
    given = inputs(6, steps, columns)
    valid = torch.rand(6, columns, generator=torch.Generator().manual_seed(columns + steps)) > 0.4
    valid[0, -steps:], valid[1, -steps:], valid[2, : columns - 1] = True, False, False
    layout = Layout.padded(6, steps, columns, valid=valid.cuda())
    grad = gradient(given[0])
    wanted = exact(given, layout, grad)
    assert max(errors(both_ways(given, layout, grad), wanted)) < GRAD_BOUND
    with torch.no_grad():
        found = attention(*given, layout=layout, out_dtype=torch.float32)
    for i in range(6):
        assert float((found[i].double() - wanted[0][i]).norm()) < OUT_BOUND * max(float(wanted[0][i].norm()), 1.0), i


def test_every_configuration_gives_the_same_bits_and_other_parts_do_not() -> None:
    given, layout = pack([1300, 3, 64], [1300, 1500, 2100], SMOL)
    sizes = Sizes(1367, 4900, *SMOL[:2], 64, 64)
    first = triton_forward.forward(*given, layout, sizes, 0.1, torch.float32)[0]
    for configuration in triton_forward.CONFIGURATIONS:
        assert torch.equal(triton_forward.forward(*given, layout, sizes, 0.1, torch.float32, configuration)[0], first), configuration
        assert torch.equal(triton_forward.decode(*given, layout, sizes, 0.1, torch.float32, configuration), first), configuration
    assert not torch.equal(triton_forward.forward(*given, layout, sizes, 0.1, torch.float32, part=512)[0], first)


def test_later_tokens_change_no_bits_before_them() -> None:
    given = inputs(1, 900, 900)
    before = attention(*given)
    later = [t.clone() for t in given]
    for t in later:
        t[:, 650:] = torch.randn_like(t[:, 650:]) * 5
    after = attention(*later)
    assert torch.equal(before[:, :650], after[:, :650])
    assert not torch.equal(before[:, 650:], after[:, 650:])


def test_a_thousand_runs_give_one_result_both_ways_and_another_order_of_heads_gives_another() -> None:
    """The products of a sum go into one accumulator, 16 queries at a time: tiles of 32 or 64 queries are the same order, in which the same bits come out. Another
    order is the group's heads the other way round."""
    given, layout = pack([500, 40], [500, 1300], SMOL)
    grad = gradient(given[0])
    leaves = [t.detach().clone().requires_grad_() for t in given]

    def run() -> tuple[torch.Tensor, ...]:
        out = attention(*leaves, layout=layout)
        return out.detach(), *torch.autograd.grad(out, leaves, grad.bfloat16())

    first = run()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for one, other in zip(run(), first, strict=True):
            differing += (one != other).sum()
    assert differing.item() == 0
    sizes = Sizes(540, 1800, *SMOL[:2], 64, 64)
    out, lse = triton_forward.forward(*given, layout, sizes, 0.125, torch.bfloat16)
    tiles = triton_backward.backward(*given, layout, out, lse, grad, sizes, 0.125, of_keys=triton_backward.Configuration(32, 128, 8, 2))
    assert all(torch.equal(one, other) for one, other in zip(tiles[1:], first[2:], strict=True))

    def turned(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(2, (SMOL[1], -1)).flip(3).flatten(2, 3).contiguous()

    out, lse = triton_forward.forward(turned(given[0]), *given[1:], layout, sizes, 0.125, torch.bfloat16)
    dq, dk, dv = triton_backward.backward(turned(given[0]), *given[1:], layout, out, lse, turned(grad), sizes, 0.125)
    assert torch.equal(turned(dq), first[1])
    for one, other in zip((dk, dv), first[2:], strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=0.02, atol=0.02 * float(other.float().abs().max()))
        assert not torch.equal(one, other), "another order of sums is seen in the bits"


def test_offsets_pass_two_to_the_31() -> None:
    """600,000 rows of 32 heads of 128: 2.5e9 elements of q. The last sequence, alone, has the bits it has at the end of the pack."""
    rows, last = 600_000, 200
    tail = inputs(1, last, last, LLAMA)
    whole = [torch.zeros(1, rows, *t.shape[2:], dtype=torch.bfloat16, device="cuda") for t in tail]
    for long, short in zip(whole, tail, strict=True):
        long[:, -last:] = short
    lengths = [100] * ((rows - last) // 100) + [last]
    assert torch.equal(attention(*whole, cu_seqlens_q=ends(lengths))[:, -last:], attention(*tail))
