"""The compiled attention kernels on a CUDA device at K3's widths: near fp64 both ways, and the same bits whatever surrounds a sequence."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.mla_prefill import mla_prefill, reference, triton_forward
from driftline.kernels.mla_prefill.shapes import SCALE, Sizes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NOPE, SHARED, VALUE = 128, 64, 128
OUT_BOUND, GRAD_BOUND = 4e-3, 8e-3  # probabilities and score gradients are rounded to bfloat16 before a product
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(queries: int, keys: int, heads: int = 96, seed: int = 0) -> Inputs:
    random = torch.Generator("cuda").manual_seed(seed)
    shapes = ((queries, heads, NOPE + SHARED), (keys, heads, NOPE + VALUE), (keys, SHARED))
    q, kv, shared = (torch.randn(*shape, generator=random, device="cuda").bfloat16() for shape in shapes)
    return q, kv, shared


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()


def both_ways(given: Inputs, grad: torch.Tensor, cu_seqlens: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
              out_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """(out, dq, dkv, dk_shared), from memory that was full of NaNs."""
    poison = torch.full((256 * 2**20,), torch.nan, device="cuda")
    del poison
    leaves = [t.detach().clone().requires_grad_() for t in given]
    out = mla_prefill(*leaves, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, out_dtype=out_dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out_dtype))


def exact(given: Inputs, grad: torch.Tensor, cu_seqlens: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    leaves = [t.double().requires_grad_() for t in given]
    out = reference.mla_prefill(*leaves, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, out_dtype=torch.float64)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def errors(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> list[float]:
    return [error(one, other) for one, other in zip(found, wanted, strict=True)]


@pytest.mark.parametrize(("queries", "keys"), [([700], [700]), ([1, 127, 128, 129, 0, 300], [1, 127, 128, 129, 0, 300]), ([64, 1, 130], [500, 257, 400])])
def test_outputs_and_gradients_are_near_fp64(queries: list[int], keys: list[int]) -> None:
    given, bounds = inputs(sum(queries), sum(keys), heads=8), (starts(queries), starts(keys))
    grad = torch.randn(sum(queries), 8, VALUE, device="cuda")
    found = both_ways(given, grad, *bounds)
    out, *gradients = errors(found, exact(given, grad, *bounds))
    assert out < OUT_BOUND
    assert max(gradients) < GRAD_BOUND, gradients
    assert [t.dtype for t in found] == [torch.float32, *[torch.bfloat16] * 3]


@pytest.mark.parametrize("behind", [1, 15, 130])
def test_keys_of_no_sequence_reach_neither_an_output_nor_a_gradient(behind: int) -> None:
    """Rows behind the last sequence's keys, as a padded cache leaves them, whatever they hold."""
    bounds = starts([64, 1, 130]), starts([500, 257, 400])
    given = inputs(195, 1157, heads=8)
    longer = (given[0], *(torch.cat([t, torch.full((behind, *t.shape[1:]), torch.nan, dtype=t.dtype, device="cuda")]) for t in given[1:]))
    grad = torch.randn(195, 8, VALUE, device="cuda")
    for one, other in zip(both_ways(given, grad, *bounds), both_ways(longer, grad, *bounds), strict=True):
        assert torch.equal(one, other[: len(one)])
        assert not other[len(one) :].any()


def test_all_heads_of_k3_and_no_worse_than_torch_in_bfloat16() -> None:
    given = inputs(600, 600)
    grad = torch.randn(600, 96, VALUE, device="cuda")
    wanted = exact(given, grad)
    q, kv, shared = (t.detach().clone().requires_grad_() for t in given)
    key = torch.cat([kv[..., :NOPE], shared[:, None].expand(-1, 96, -1)], dim=-1)
    score = torch.einsum("thd,shd->hts", q, key).float() * SCALE
    p = torch.softmax(score.masked_fill(~torch.ones(600, 600, dtype=torch.bool, device="cuda").tril(), -torch.inf), dim=-1).bfloat16()
    eager = torch.einsum("hts,shv->thv", p, kv[..., NOPE:])
    theirs = errors((eager.detach(), *torch.autograd.grad(eager, (q, kv, shared), grad.bfloat16())), wanted)
    ours = errors(both_ways(given, grad), wanted)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine < 1.1 * other, (ours, theirs)


def test_bfloat16_output_is_the_fp32_output_rounded_once() -> None:
    given = inputs(300, 300)
    assert torch.equal(mla_prefill(*given, out_dtype=torch.bfloat16), mla_prefill(*given).bfloat16())


def test_the_bounds_are_tight_enough_to_see_one_key_too_many() -> None:
    given = inputs(300, 301, heads=8)
    grad = torch.randn(300, 8, VALUE, device="cuda")
    wanted = exact((given[0], given[1][:300], given[2][:300]), grad)
    shifted = both_ways(given, grad, starts([300]), starts([301]))
    assert error(shifted[0], wanted[0]) > OUT_BOUND
    assert error(shifted[1], wanted[1]) > GRAD_BOUND
    assert error(shifted[2][:300], wanted[2]) > GRAD_BOUND


def test_large_scores_do_not_overflow() -> None:
    q, kv, shared = inputs(300, 300, heads=8)
    grad = torch.randn(300, 8, VALUE, device="cuda")
    given = (q * 20, kv, shared)
    found, wanted = both_ways(given, grad), exact(given, grad)
    assert all(bool(t.isfinite().all()) for t in found)
    assert error(found[0], wanted[0]) < OUT_BOUND


@pytest.mark.parametrize("batch", [1, 2, 7, 64, 512])
def test_a_sequence_has_the_same_bits_in_a_pack_of_any_size(batch: int) -> None:
    random = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 60, (511,), generator=random).tolist()
    lengths.insert(0, 333)
    given, grad = inputs(sum(lengths), sum(lengths), heads=8), torch.randn(sum(lengths), 8, VALUE, device="cuda", generator=torch.Generator("cuda").manual_seed(6))
    here = lengths[:batch]
    rows = sum(here)
    packed = both_ways((given[0][:rows], given[1][:rows], given[2][:rows]), grad[:rows], starts(here))
    for i in {0, batch // 2, batch - 1}:
        a, b = sum(here[:i]), sum(here[: i + 1])
        alone = both_ways((given[0][a:b], given[1][a:b], given[2][a:b]), grad[a:b])
        assert all(torch.equal(whole[a:b], one) for whole, one in zip(packed, alone, strict=True)), i


def test_prefill_in_pieces_of_any_size_has_the_bits_of_one_shot() -> None:
    q, kv, shared = inputs(1500, 1500, heads=8)
    whole = mla_prefill(q, kv, shared)
    for piece in (64, 128, 192, 1024, 333):
        parts = []
        for a in range(0, 1500, piece):
            b = min(a + piece, 1500)
            parts.append(mla_prefill(q[a:b], kv[:b], shared[:b], cu_seqlens=starts([b - a]), cu_seqlens_k=starts([b])))
        assert torch.equal(torch.cat(parts), whole), piece


def test_later_tokens_change_no_bits_before_them() -> None:
    q, kv, shared = inputs(900, 900, heads=8)
    before = mla_prefill(q, kv, shared)
    later = [t.clone() for t in (q, kv, shared)]
    for t in later:
        t[650:] = torch.randn_like(t[650:]) * 5
    after = mla_prefill(*later)
    assert torch.equal(before[:650], after[:650])
    assert not torch.equal(before[650:], after[650:])


def test_a_thousand_runs_give_one_result_both_ways_and_other_tiles_give_another() -> None:
    given = inputs(500, 500, heads=8)
    grad = torch.randn(500, 8, VALUE, device="cuda")
    leaves = [t.detach().clone().requires_grad_() for t in given]

    def run() -> tuple[torch.Tensor, ...]:
        out = mla_prefill(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    first = run()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for one, other in zip(run(), first, strict=True):
            differing += (one != other).sum()
    assert differing.item() == 0
    sizes, whole = Sizes(500, 500, 8, NOPE, SHARED, VALUE), starts([500])
    wide, _ = triton_forward.forward(*given, whole, whole, sizes, SCALE, torch.float32, triton_forward.Configuration(128, 128, 8, 2))
    assert not torch.equal(wide, first[0]), "another order of sums is seen in the bits"


def test_offsets_pass_two_to_the_31() -> None:
    """90,000 rows of 96 heads of 256: 2.2e9 elements of kv. The last sequence, alone, has the bits it has at the end of the pack."""
    rows, last = 90_000, 200
    kv = torch.zeros(rows, 96, NOPE + VALUE, dtype=torch.bfloat16, device="cuda")
    q, tail, shared = inputs(last, last)
    kv[-last:] = tail
    whole_q = torch.zeros(rows, 96, NOPE + SHARED, dtype=torch.bfloat16, device="cuda")
    whole_q[-last:] = q
    whole_shared = torch.zeros(rows, SHARED, dtype=torch.bfloat16, device="cuda")
    whole_shared[-last:] = shared
    lengths = [100] * ((rows - last) // 100) + [last]
    out = mla_prefill(whole_q, kv, whole_shared, cu_seqlens=starts(lengths))
    assert torch.equal(out[-last:], mla_prefill(q, tail, shared))
