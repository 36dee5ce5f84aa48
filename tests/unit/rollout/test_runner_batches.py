"""A batch that does not fit together is refused by the name of the field, before the pool is touched; sizes are rounded up to those that graphs are made for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from driftline.services.rollout.runner import DecodeBatch, PrefillBatch
from driftline.services.rollout.runner.buckets import FEWEST_PAGES, page_bucket, row_bucket, row_buckets
from driftline.services.rollout.runner.eager import shape_of
from driftline.services.rollout.runner.staging import Shape, Staged

CPU = torch.device("cpu")


def decoding(rows: int = 3, window: int = 1, pages: int = 2, **changes: Any) -> DecodeBatch:
    whole = {
        "tokens": np.arange(rows * window, dtype=np.int64).reshape(rows, window), "slots": np.arange(rows, dtype=np.int32),
        "tables": np.arange(1, rows * pages + 1, dtype=np.int32).reshape(rows, pages), "lengths": np.full(rows, 7, dtype=np.int32),
        "keys": np.array([2**64 - 1 - i for i in range(rows)], dtype=np.uint64), "positions": np.arange(rows, dtype=np.int64),
        "temperatures": np.ones(rows, dtype=np.float32), "accepted": np.zeros(rows, dtype=np.int32) if window > 1 else None,
    }
    return DecodeBatch(**(whole | changes))


def prefilling(**changes: Any) -> PrefillBatch:
    one = decoding(2)
    whole = {"tokens": np.arange(5, dtype=np.int64), "counts": (2, 3), "slots": one.slots, "tables": one.tables, "context": np.zeros(2, dtype=np.int32),
             "keys": one.keys, "positions": one.positions, "temperatures": one.temperatures}
    return PrefillBatch(**(whole | changes))


@pytest.mark.parametrize(("field", "value", "said"), [
    ("tokens", np.zeros((0, 1), dtype=np.int64), "tokens"),
    ("tokens", np.zeros((3, 1), dtype=np.int32), "tokens is int32"),
    ("slots", np.zeros(2, dtype=np.int32), r"slots is int32 \(2,\)"),
    ("slots", np.zeros(3, dtype=np.int64), "slots is int64"),
    ("tables", np.zeros((2, 2), dtype=np.int32), "tables"),
    ("lengths", np.zeros(3, dtype=np.int64), "lengths is int64"),
    ("keys", np.zeros(3, dtype=np.int64), "keys is int64"),
    ("positions", np.zeros(3, dtype=np.int32), "positions is int32"),
    ("temperatures", np.zeros(3), "temperatures is float64"),
    ("accepted", np.zeros(3, dtype=np.int64), "accepted is int64"),
    ("adapters", (0, 1), "adapters names 2 rows"),
])
def test_a_decode_batch_that_does_not_fit_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decoding(**{field: value})


def test_a_window_without_the_count_of_what_stands_is_refused() -> None:
    with pytest.raises(ValueError, match="accepted is None"):
        decoding(window=3, accepted=None)


def test_distributions_of_another_number_of_drafts_are_refused() -> None:
    with pytest.raises(ValueError, match="probs"):
        decoding(window=3, probs=torch.zeros(3, 3, 5))


@pytest.mark.parametrize(("field", "value"), [
    ("counts", (2, 2)), ("counts", (5, 0)), ("counts", ()), ("tokens", np.zeros(5, dtype=np.int32)), ("context", np.zeros(2, dtype=np.int64)),
    ("keys", np.zeros(3, dtype=np.uint64)), ("behind", np.array([0, 2])), ("behind", np.array([0, -1])), ("behind", np.array([0, 1], dtype=np.int32)),
])
def test_a_prefill_that_does_not_fit_is_refused(field: str, value: Any) -> None:
    assert prefilling().rows == 2
    with pytest.raises(ValueError, match=field):
        prefilling(**{field: value})


def test_buckets_of_rows_are_dense_enough_and_end_at_the_most() -> None:
    for most in (1, 2, 5, 32, 64, 100, 256):
        sizes = row_buckets(most)
        assert sizes[-1] == most
        assert list(sizes) == sorted(set(sizes))
        for rows in range(1, most + 1):
            size = row_bucket(rows, most)
            assert size >= rows
            assert rows <= 8 or (size - rows) / size <= 0.5
            assert all(smaller < rows for smaller in sizes if smaller < size)


@pytest.mark.parametrize("rows", [0, 65])
def test_a_step_of_more_rows_than_the_runner_was_made_for_is_refused(rows: int) -> None:
    with pytest.raises(ValueError, match="max_batch"):
        row_bucket(rows, 64)


def test_tables_are_rounded_to_powers_of_two() -> None:
    assert [page_bucket(n) for n in (1, FEWEST_PAGES, FEWEST_PAGES + 1, 100, 1024)] == [FEWEST_PAGES, FEWEST_PAGES, 2 * FEWEST_PAGES, 128, 1024]


def test_staged_rows_hold_the_batch_and_the_rest_is_padding() -> None:
    staged = Staged(Shape(8, 3, 4, True), CPU)
    batch = decoding(3, 3, 2, accepted=np.array([1, 2, 3], dtype=np.int32), counts=np.array([2, 0, 1], dtype=np.int32))
    staged.load(batch)
    held = staged.inputs
    assert held.accepted is not None
    for name in ("tokens", "slots", "lengths", "positions", "temperatures", "accepted", "counts"):
        assert np.array_equal(getattr(held, name)[:3].numpy(), getattr(batch, name)), name
    assert np.array_equal(held.keys[:3].numpy().view(np.uint64), batch.keys)
    assert np.array_equal(held.tables[:3, :2].numpy(), batch.tables)
    assert not held.tables[:, 2:].any()
    assert not held.tables[3:].any()
    assert (held.slots[3:] == -1).all()
    assert not held.lengths[3:].any()
    assert not held.accepted[3:].any()
    assert (held.temperatures[3:] == 1).all()


def test_a_smaller_batch_leaves_nothing_of_the_one_before() -> None:
    """A row that was real and is padding now must not be computed in its old slot and pages."""
    staged = Staged(Shape(8, 1, 4, False), CPU)
    where = staged.inputs.slots.data_ptr()
    staged.load(decoding(8, pages=4))
    staged.load(decoding(2))
    assert (staged.inputs.slots[2:] == -1).all()
    assert not staged.inputs.tables[2:].any()
    assert not staged.inputs.lengths[2:].any()
    assert staged.inputs.slots.data_ptr() == where


def test_drafts_are_counted_as_real_where_nothing_else_is_said() -> None:
    staged = Staged(Shape(4, 3, 2, True), CPU)
    staged.load(decoding(2, 3))
    assert staged.inputs.counts.tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distributions_lie_where_the_graph_reads_them_and_are_not_rounded(dtype: torch.dtype) -> None:
    batch = replace(decoding(2, 3), probs=torch.softmax(torch.randn(2, 2, 5, dtype=dtype), -1))
    shape = shape_of(batch)._replace(rows=4)
    staged = Staged(shape, CPU)
    staged.load(batch)
    assert staged.inputs.probs is not None
    assert batch.probs is not None
    assert torch.equal(staged.inputs.probs[:2], batch.probs)
    assert not staged.inputs.probs[2:].any()


def test_more_tokens_may_be_drawn_than_there_are_sequences() -> None:
    five = {"keys": np.zeros(5, dtype=np.uint64), "positions": np.zeros(5, dtype=np.int64), "temperatures": np.ones(5, dtype=np.float32)}
    assert prefilling(behind=np.array([0, 0, 0, 1, 1]), **five).rows == 2
    with pytest.raises(ValueError, match="keys"):
        prefilling(behind=np.array([0, 0, 1]), **five)
