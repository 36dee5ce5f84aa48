"""A model over a pool computes what a forward of the whole sequences computes, in deterministic mode to the bit: however its prompt came, by decode, by windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from deterministic_cases import all_same, process_in
from model_cases import random_model, small
from paged_cases import Pooled, Rows, decoded, drafted, prompts, soil, whole

from driftline.kernels.mode import Numerics
from driftline.models.causal_lm import CausalLM
from driftline.models.dense.config import Architecture, DenseConfig
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.packed import Packed
from driftline.models.paged import grouped, latent
from driftline.models.paged.places import Places
from driftline.models.paged.states import KdaStates

torch.set_num_threads(1)

KINDS = ("k3", "dense")
LENGTHS = (100, 12, 141, 74)
Way = Callable[[CausalLM, Rows], Pooled]


def _in_one(model: CausalLM, rows: Rows) -> Pooled:
    run = Pooled(model, rows)
    run.fill(prompts(rows, 0))
    return run


def _by_turns(model: CausalLM, rows: Rows) -> Pooled:
    """Some rows are decoded while others are still prefilled."""
    run = Pooled(model, rows, seed=5)
    ends = prompts(rows, 6)
    run.fill([ends[0], ends[1], 64, 0])
    for step in range(6):
        run.step([0, 1], padding=step % 2)
        run.fill([run.done[0], run.done[1], min(64 * (2 + step), ends[2]), min(12 * (1 + step), ends[3])])
    for _ in range(6):
        run.step([3, 2])
    return run


def _folded(model: CausalLM, rows: Rows) -> Pooled:
    return drafted(model, rows, folds=True)


WAYS: dict[str, Way] = {"in one": _in_one, "decoded": decoded, "drafted": drafted, "drafted and folded": _folded, "by turns": _by_turns}


@cache
def model(kind: str, dtype: torch.dtype) -> CausalLM:
    if kind == "k3":
        return random_model(small(), dtype=dtype)
    torch.manual_seed(0)
    return DenseForCausalLM(DenseConfig(
        model_type=Architecture.QWEN3, vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        head_dim=12, qk_norm=True, qkv_bias=True, max_position_embeddings=256,
    )).to(dtype)


def rows_of(lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0) -> Rows:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (n,), generator=rng) for n in lengths]


@pytest.fixture
def deterministic() -> Iterator[None]:
    with process_in(Numerics.DETERMINISTIC):
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_fast_mode_is_a_forward(kind: str, way: str) -> None:
    run = WAYS[way](model(kind, torch.float64), rows := rows_of())
    hidden, routes = whole(run.model, rows)
    for found, wanted in zip(run.found(), hidden, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    assert all_same([torch.cat(parts) for parts in run.routes], routes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("deterministic")
def test_deterministic_mode_is_the_learners_forward_to_the_bit(kind: str, way: str) -> None:
    run = WAYS[way](model(kind, torch.float32), rows := rows_of())
    assert all_same(run.found(), whole(run.model, rows)[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("deterministic")
def test_another_token_of_the_prompt_shows(kind: str) -> None:
    """So that equal bits say something."""
    rows = rows_of()
    run = decoded(model(kind, torch.float32), rows)
    others = [row.clone() for row in rows]
    others[1][0] = (others[1][0] + 1) % 97
    hidden = whole(run.model, others)[0]
    assert not all_same(run.found()[1:2], hidden[1:2])
    assert all_same(run.found()[2:], hidden[2:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("deterministic")
def test_a_count_of_accepted_tokens_that_is_off_shows_in_states(kind: str) -> None:
    """A dense model has nothing to fold: its rows are written over."""
    rows = rows_of((70, 30))
    run = Pooled(model(kind, torch.float32), rows, window=3)
    run.fill(prompts(rows, 6))
    run.score([2, 2])
    run.accepted = [1, 2]
    run.score([2, 2])
    hidden = whole(run.model, rows)[0]
    found = [torch.cat(parts) for parts in run.hidden]
    wanted = [h[: len(f)] for h, f in zip(hidden, found, strict=True)]
    assert all_same(found[:1], wanted[:1]) is (kind == "dense")
    assert all_same(found[1:], wanted[1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("deterministic")
def test_a_slot_and_pages_that_another_sequence_left(kind: str) -> None:
    """What the window of the one before holds, and its rows, leave no trace."""
    run = drafted(model(kind, torch.float32), rows_of((50, 40), seed=1))
    run.rows, run.done, run.accepted = rows_of((61, 33)), [0, 0], [0, 0]
    run.hidden, run.routes = [[], []], [[], []]
    run.pool.clear_states(run.slots.tolist())
    run.fill(prompts(run.rows, 8))
    for _ in range(4):
        run.score([2, 2])
    assert all_same(run.found(), whole(run.model, run.rows)[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("deterministic")
def test_a_fork_goes_on_as_the_sequence_it_was_taken_of(kind: str) -> None:
    """Full pages are shared, the one that is begun and the state are copied; the branches go different ways."""
    trunk, ends = rows_of((90,))[0], rows_of((10, 10), seed=2)
    rows = [torch.cat([trunk, end]) for end in ends]
    run = Pooled(model(kind, torch.float32), rows)
    run.fill([90, 0])
    run.tables[1, 0] = run.tables[0, 0]
    run.pool.copy_pages([int(run.tables[0, 1])], [int(run.tables[1, 1])])
    run.pool.copy_states([int(run.slots[0])], [int(run.slots[1])])
    run.done[1] = 90
    for _ in range(10):
        run.step()
    hidden = whole(run.model, rows)[0]
    assert all_same(run.found(), [hidden[0], hidden[1][90:]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.usefixtures("deterministic")
def test_what_was_taken_out_of_a_pool_goes_on_in_another(kind: str, window: int) -> None:
    rows = rows_of((90, 12))
    first = Pooled(model(kind, torch.float32), rows, window=window)
    first.fill([80, 5])
    if window > 1:
        first.score([3, 1])
        first.fold()
    second = Pooled(first.model, rows, window=window, seed=9)
    second.done, second.hidden, second.routes = list(first.done), first.hidden, first.routes
    second.pool.import_pages(second.tables.flatten().tolist(), first.pool.export_pages(first.tables.flatten().tolist()))
    second.pool.import_states(second.slots.tolist(), [tensor.clone() for tensor in first.pool.export_states(first.slots.tolist())])
    soil(first.pool)
    for _ in range(4):
        second.step()
    hidden = whole(first.model, rows)[0]
    assert all_same(second.found(), [h[: len(f)] for h, f in zip(hidden, second.found(), strict=True)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_behind_the_tables_end_harms_nobody(kind: str) -> None:
    """Two rows fill their last page: what their drafts write past it is lost, and no other row's pages are touched."""
    rows = rows_of((64, 64, 40))
    run = Pooled(model(kind, torch.float64), rows, window=4, spare=0)
    run.fill([61, 63, 36])
    run.score([3, 1, 4])
    for found, wanted in zip(run.found(), whole(run.model, rows)[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def test_clearing_leaves_nothing_that_is_not_a_number() -> None:
    run = Pooled(model("k3", torch.float32), rows_of((5,)), window=2)
    run.pool.clear()
    for layer in run.pool.layers:
        for tensor in layer.everything() if isinstance(layer, KdaStates) else layer.tensors():
            assert not tensor.any()


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators that have kernels are called as they are where those run, by their references: over pages, slots and windows as they lie."""
    monkeypatch.setattr(KdaStates, "kernels", lambda self, like: True)
    monkeypatch.setattr(latent, "_run_kernels", lambda q, pages: True)
    monkeypatch.setattr(latent, "_fits", lambda rank, width: True)
    monkeypatch.setattr(grouped, "_run_kernels", lambda q, keys: True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("longest", [8, 1000])
@pytest.mark.usefixtures("as_on_a_device")
def test_the_calls_of_a_device_compute_it_too(kind: str, way: str, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of more tokens than `longest` write keys and values out. Nothing that lies behind a row's last token is let in by a longer row beside it."""
    monkeypatch.setattr(latent, "LONGEST_WINDOW", longest)
    run = WAYS[way](model(kind, torch.float64), rows := rows_of((70, 12, 131, 44)))
    for found, wanted in zip(run.found(), whole(run.model, rows)[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


@pytest.mark.usefixtures("as_on_a_device")
def test_a_prefill_of_many_queries_is_scored_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "LONGEST_WINDOW", 1000)
    monkeypatch.setattr(latent, "PAIRS", 2 * 4 * 5)
    run = _in_one(model("k3", torch.float64), rows := rows_of((70, 12, 131, 44)))
    for found, wanted in zip(run.found(), whole(run.model, rows)[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def test_one_long_prompt_pads_no_short_ones() -> None:
    lengths = (1000, 1, 3, 2, 700, 1, 64)
    packed = Packed.of(lengths, "cpu")
    zeros = torch.zeros(len(lengths), dtype=torch.int32)
    places = Places.of_pack(torch.zeros(len(lengths), 16, dtype=torch.int32), zeros, [0] * len(lengths), zeros, packed, 1, 1)
    assert sum(len(part.at) for part in places.parts) < 2 * sum(lengths)
    tokens = torch.cat([part.at[part.real] for part in places.parts])
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    for view, at, real in places.parts:
        newest = at.view(-1, view.steps)[:, -1]
        assert torch.equal(packed.offset[newest] + 1, view.last)
        assert torch.equal(view.seen.flatten()[real], packed.offset[at[real]] + 1)
