"""Grouped queries' attention by the references: against torch's own, its gradients, bits in deterministic mode, and what is refused."""

from __future__ import annotations

import pytest
import torch
from gqa_cases import Case, Widths, packed, padded
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.gqa import Layout, attention
from driftline.kernels.mode import Numerics, using

torch.set_num_threads(1)
WIDTHS = Widths(6, 2, 8, 5)


def of(case: Case, **more: object) -> torch.Tensor:
    return attention(case.q, case.keys, case.values, layout=case.layout, **more)  # type: ignore[arg-type]


def torchs(case: Case, mask: torch.Tensor) -> torch.Tensor:
    """mask [B, T, N]."""
    q, keys, values = (t.transpose(1, 2) for t in case[:3])
    keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (keys, values))
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask[:, None]).transpose(1, 2)


@pytest.mark.parametrize("share", [None, 0.4])
def test_it_is_torchs_attention_of_the_columns_that_count(share: float | None) -> None:
    case = padded(3, 4, 11, WIDTHS, share=share, dtype=torch.float64)
    mask = torch.ones(4, 11, dtype=torch.bool).tril(7).expand(3, -1, -1)
    valid = case.layout.valid if share else None
    found = attention(case.q, case.keys, case.values, valid=valid)
    assert (found - torchs(case, mask if valid is None else mask & valid[:, None])).abs().max() < 1e-12


def test_packed_sequences_are_each_alone() -> None:
    case = packed([3, 0, 1, 5], [5, 2, 1, 9], WIDTHS, dtype=torch.float64)
    begins, ends = torch.tensor([0, 3, 3, 4, 9]), torch.tensor([0, 5, 7, 8, 17])
    whole = attention(case.q, case.keys, case.values, cu_seqlens_q=begins, cu_seqlens_k=ends)
    for i in (0, 2, 3):
        q, k = slice(begins[i], begins[i + 1]), slice(ends[i], ends[i + 1])
        assert torch.allclose(attention(case.q[:, q], case.keys[:, k], case.values[:, k]), whole[:, q], atol=1e-12)


def test_keys_may_lie_in_any_order_that_is_named() -> None:
    case = packed([3, 4], [9, 8], WIDTHS, shuffled=True, dtype=torch.float64)
    assert case.layout.rows is not None
    rows = case.layout.rows.long()
    straight = packed([3, 4], [9, 8], WIDTHS, dtype=torch.float64).layout
    assert torch.equal(of(case), of(case._replace(keys=case.keys[:, rows], values=case.values[:, rows], layout=straight)))


@pytest.mark.parametrize("mode", list(Numerics))
def test_its_gradients_are_those_of_finite_differences(mode: Numerics) -> None:
    case = padded(2, 2, 5, Widths(4, 2, 4, 3), share=0.3, dtype=torch.float64)
    with using(mode):
        assert torch.autograd.gradcheck(lambda *three: attention(*three, layout=case.layout), case.double())


@pytest.mark.parametrize("mode", list(Numerics))
def test_a_query_that_sees_nothing_gives_zeros_and_takes_no_gradient(mode: Numerics) -> None:
    case = padded(2, 3, 4, WIDTHS, dtype=torch.float64)
    valid = torch.tensor([[False, False, True, True], [True] * 4])
    leaves = case.double()
    with using(mode):
        out = attention(*leaves, valid=valid)
        out.sum().backward()
    assert not bool(out[0, 0].any())
    assert bool(out[0, 1:].all())
    assert all(t.grad is not None and bool(torch.isfinite(t.grad).all()) for t in leaves)
    assert leaves[0].grad is not None
    assert not bool(leaves[0].grad[0, 0].any())


def test_deterministic_mode_computes_the_same_function() -> None:
    for case in (padded(2, 30, 130, WIDTHS, share=0.4, dtype=torch.float32), packed([3, 0, 70], [5, 2, 200], WIDTHS, shuffled=True, dtype=torch.float32)):
        fast = of(case)
        with using(Numerics.DETERMINISTIC):
            ours = of(case)
        assert (ours - fast).abs().max() < 1e-6
        assert not torch.equal(ours, fast), "another order of sums is seen in the bits, so the tests of bits can fail"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), columns=st.integers(1, 200), steps=st.integers(1, 9), batch=st.integers(1, 5), window=st.integers(1, 9))
def test_deterministic_bits_of_a_query_are_those_it_has_alone(seed: int, columns: int, steps: int, batch: int, window: int) -> None:
    steps = min(steps, columns)
    case = padded(batch, steps, columns, Widths(3, 1, 12, 10), share=0.3, dtype=torch.float32, seed=seed)
    assert case.layout.valid is not None
    row, first = seed % batch, max(0, steps - window)
    keep = case.layout.valid[row].nonzero()[:, 0]
    keys, values = case.keys[row : row + 1, keep], case.values[row : row + 1, keep]
    with using(Numerics.DETERMINISTIC):
        whole = of(case)
        # Its last `window` tokens, the earlier ones as if they were cached, and without the columns that are skipped.
        assert torch.equal(attention(case.q[row : row + 1, first:], keys, values)[0], whole[row, first:])
        # Without the last of the new tokens.
        if steps > 1:
            assert torch.equal(attention(case.q[row : row + 1, :-1], keys[:, :-1], values[:, :-1])[0], whole[row, :-1])


def test_fast_bits_of_a_query_are_not_so_that_the_check_above_can_fail() -> None:
    case = padded(5, 9, 200, WIDTHS, share=0.3, dtype=torch.float32)
    assert case.layout.valid is not None
    differing = 0
    for row in range(5):
        keep = case.layout.valid[row].nonzero()[:, 0]
        alone = attention(case.q[row : row + 1, 8:], case.keys[row : row + 1, keep], case.values[row : row + 1, keep])
        differing += int((alone[0] != of(case)[row, 8:]).sum())
    assert differing


def test_deterministic_packed_bits_are_those_of_padding_and_queries_in_pieces() -> None:
    case = packed([40, 70], [40, 90], Widths(4, 2, 16, 16), dtype=torch.float32)
    with using(Numerics.DETERMINISTIC):
        whole = of(case)[0]
        keys, values = case.keys[:, 40:], case.values[:, 40:]
        for a, b in ((0, 1), (1, 3), (3, 64), (64, 70)):
            piece = attention(case.q[:, 40 + a : 40 + b], keys[:, : 20 + b], values[:, : 20 + b])
            assert torch.equal(piece[0], whole[40 + a : 40 + b])


def test_what_kernels_read_by_address_lies_in_order() -> None:
    """Of one new token, the numbers of keys are a column of what is counted; bounds may be every other element of a table."""
    ends = torch.tensor([[0, 0], [3, 1], [9, 2]])
    for layout in (padded(4, 1, 9, WIDTHS, share=0.4).layout, Layout.packed(ends[:, 0], ends[:, 1], 9, 2), Layout.padded(3, 1, 7)):
        numbers = [layout.starts_q, layout.starts_k, layout.counts, layout.seen]
        assert all(t.is_contiguous() and t.dtype == torch.int32 for t in numbers)


def test_one_layout_serves_calls_without_it() -> None:
    case = padded(2, 3, 9, WIDTHS, share=0.4, dtype=torch.float64)
    assert torch.equal(of(case), attention(case.q, case.keys, case.values, valid=case.layout.valid))
    assert of(case, out_dtype=torch.float32).dtype == torch.float32
    assert torch.equal(of(case, scale=8**-0.5), of(case))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 6, 8)}, r"q is \[3, 6, 8\]; it must be \[B, T, H, D\]"),
        ({"keys": torch.zeros(2, 9, 2, 7)}, r"keys is \[2, 9, 2, 7\]; it must be \[2, N, heads of keys, 8\]"),
        ({"keys": torch.zeros(2, 9, 4, 8)}, "keys has 4 heads for 6 of q"),
        ({"values": torch.zeros(2, 8, 2, 5)}, r"values is \[2, 8, 2, 5\]; it must be \[2, 9, 2, Dv\]"),
        ({"values": torch.zeros(2, 9, 2, 5, dtype=torch.float64)}, "they must be of one floating-point dtype"),
        ({"q": torch.zeros(2, 10, 6, 8)}, "keys has 9 columns for 10 of q"),
        ({"valid": torch.ones(2, 8, dtype=torch.bool)}, r"valid is torch.bool \[2, 8\]; it must be bool \[2, 9\]"),
        ({"valid": torch.ones(2, 9)}, r"valid is torch.float32 \[2, 9\]"),
        ({"cu_seqlens_q": torch.tensor([0, 3])}, "cu_seqlens_q goes with one row of packed sequences and without valid; q has 2 rows"),
        ({"layout": Layout.padded(2, 4, 9)}, "layout is of 8 queries and q has 6"),
        ({"layout": Layout.padded(2, 3, 9), "valid": torch.ones(2, 9, dtype=torch.bool)}, "give it alone or leave it out"),
        ({"out_dtype": torch.int32}, "out_dtype is torch.int32"),
        ({"q": torch.zeros(2, 3, 6, 8, device="meta")}, "must be on the device of q, meta"),
    ],
)
def test_what_cannot_be_is_refused_with_what_it_must_be(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"q": torch.zeros(2, 3, 6, 8), "keys": torch.zeros(2, 9, 2, 8), "values": torch.zeros(2, 9, 2, 5)}
    with pytest.raises(ValueError, match=message):
        attention(**(given | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": torch.zeros(2)}, "cu_seqlens_q is torch.float32"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q is not given"),
        ({"cu_seqlens_k": None}, "keys has 9 rows for 3 of q: give cu_seqlens_k"),
        ({"cu_seqlens_k": torch.tensor([0, 4, 9])}, "they must be of the same sequences"),
    ],
)
def test_packed_bounds_that_cannot_be_are_refused(change: dict[str, object], message: str) -> None:
    ends: dict[str, object] = {"cu_seqlens_q": torch.tensor([0, 3]), "cu_seqlens_k": torch.tensor([0, 9])}
    with pytest.raises(ValueError, match=message):
        attention(torch.zeros(1, 3, 6, 8), torch.zeros(1, 9, 2, 8), torch.zeros(1, 9, 2, 5), **(ends | change))  # type: ignore[arg-type]
