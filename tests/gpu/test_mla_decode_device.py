"""The compiled decode kernels on a CUDA device at K3's widths: near fp64, and the same bits whatever surrounds a query."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from driftline.kernels.mla_decode import mla_decode, reference
from driftline.kernels.mla_decode.shapes import SCALE, checked

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HEADS, LATENT, WIDTH = 96, 512, 576
BOUND = 4e-3  # probabilities are rounded to bfloat16 before the second product


class Paged(NamedTuple):
    q: torch.Tensor
    pages: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def paged(lengths: list[int], window: int = 1, page: int = 64, seed: int = 0, order_seed: int = 0) -> Paged:
    """Rows of N(0, 1) that depend on `seed` and on their sequence alone, in pages whose order depends on `order_seed`; the rest is NaN."""
    needed = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator("cuda").manual_seed(order_seed), device="cuda")
    pages = torch.full((order.numel(), page, WIDTH), torch.nan, dtype=torch.bfloat16, device="cuda")
    table = torch.full((len(lengths), max([*needed, 1]) + 2), -1, dtype=torch.int32, device="cuda")
    queries, begin = [], 0
    for i, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        random = torch.Generator("cuda").manual_seed(seed + 1000 * i)
        queries.append(torch.randn(window, HEADS, WIDTH, generator=random, device="cuda").bfloat16())
        rows = torch.full((count * page, WIDTH), torch.nan, dtype=torch.bfloat16, device="cuda")
        rows[:length] = torch.randn(length, WIDTH, generator=random, device="cuda").bfloat16()
        mine = order[begin : begin + count]
        pages[mine] = rows.view(count, page, WIDTH)
        table[i, :count] = mine.to(torch.int32)
        begin += count
    return Paged(torch.stack(queries), pages, table, torch.tensor(lengths, dtype=torch.int32, device="cuda"))


def run(case: Paged, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    poison = torch.full((64 * 2**20,), torch.nan, device="cuda")
    del poison
    return mla_decode(*case, out_dtype=out_dtype)


def exact(case: Paged) -> torch.Tensor:
    return reference.mla_decode(case.q.double(), case.pages.double(), case.table, case.lengths, out_dtype=torch.float64)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("page", [16, 64])
def test_it_is_near_fp64_for_lengths_around_the_ends_of_tiles_pages_and_parts(window: int, page: int) -> None:
    case = paged([window, 63, 64, 65, 1023, 1024, 1025, 3000], window, page)
    wanted = exact(case)
    found = run(case)
    assert found.shape == (8, window, HEADS, LATENT)
    for i in range(8):
        assert error(found[i], wanted[i]) < BOUND, i
    assert torch.equal(run(case, torch.bfloat16), found.bfloat16())


def test_it_is_no_worse_than_torch_in_bfloat16_and_a_missing_row_is_noticed() -> None:
    case = paged([4096])
    wanted = exact(case)
    rows = case.pages[case.table[0, :64].long()].view(-1, WIDTH)
    p = torch.softmax((case.q[0, 0] @ rows.T).float() * SCALE, dim=-1)
    eager = p.bfloat16() @ rows[:, :LATENT]
    assert error(run(case), wanted) < 1.05 * error(eager, wanted[0, 0])
    short = run(case._replace(lengths=case.lengths - 64))
    assert error(short, wanted) > BOUND, "the bound is tight enough to miss a tile"


def test_peaked_scores_and_empty_sequences() -> None:
    case = paged([0, 2000, 1])
    case = case._replace(q=case.q * 30)
    found = run(case)
    assert not bool(found[0].any())
    assert bool(found.isfinite().all())
    assert error(found, exact(case)) < BOUND


def test_a_row_has_the_same_bits_in_a_batch_of_any_size() -> None:
    random = torch.Generator().manual_seed(3)
    lengths = [1300, *torch.randint(1, 700, (511,), generator=random).tolist()]
    whole = paged(lengths)
    alone = {i: run(Paged(whole.q[i : i + 1], whole.pages, whole.table[i : i + 1], whole.lengths[i : i + 1])) for i in (0, 1, 6, 63, 511)}
    for batch in (1, 2, 7, 64, 512):
        found = run(Paged(whole.q[:batch], whole.pages, whole.table[:batch], whole.lengths[:batch]))
        for i, one in alone.items():
            if i < batch:
                assert torch.equal(found[i], one[0]), (batch, i)
    assert not torch.equal(alone[0], alone[1])


def test_a_query_has_the_same_bits_in_a_window_and_whatever_comes_later() -> None:
    """In the window a query lies in another place of another tile, and rows that it must not see follow."""
    case = paged([1, 5, 1026, 2500], window=1)
    for window in (2, 5):
        longer = paged([n + window - 1 for n in case.lengths.tolist()], window)
        for t in range(window):
            shorter = longer.lengths - window + 1 + t
            alone = run(Paged(longer.q[:, t : t + 1].contiguous(), longer.pages, longer.table, shorter))
            assert torch.equal(alone[:, 0], run(longer)[:, t]), (window, t)
    later = longer.pages.clone()
    later[longer.table[3, 2503 // 64], 2503 % 64] = 100.0
    changed, before = run(longer._replace(pages=later)), run(longer)
    assert torch.equal(changed[3, :-1], before[3, :-1])
    assert not torch.equal(changed[3, -1], before[3, -1]), "the last query does see it"


def test_the_place_and_the_size_of_pages_do_not_show() -> None:
    one = run(paged([1500, 64], page=64))
    assert torch.equal(one, run(paged([1500, 64], page=64, order_seed=9)))
    for page in (16, 256):
        assert torch.equal(one, run(paged([1500, 64], page=page)))


def test_a_thousand_runs_give_one_result_and_another_part_gives_another() -> None:
    from driftline.kernels.mla_decode import triton

    case = paged([3000, 17, 1024, 900])
    first = mla_decode(*case)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differing += (mla_decode(*case) != first).sum()
    assert differing.item() == 0
    other = triton.decode(*case, checked(*case, LATENT, None), SCALE, torch.float32, 512)
    assert not torch.equal(other, first), "another order of sums is seen in the bits"
    assert error(other, exact(case)) < BOUND


def test_the_bound_on_lengths_changes_no_bits() -> None:
    case = paged([1500, 20])
    assert torch.equal(mla_decode(*case, max_length=1500), mla_decode(*case))
