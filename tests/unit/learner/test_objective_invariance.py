"""Rewritings of a batch that must not change its loss, its gradient or its metrics, to 1e-12 in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from driftline.services.learner.objective import (
    Aggregation,
    Denominators,
    Objective,
    ObjectiveConfig,
    Tally,
    loss,
)

torch.set_num_threads(1)

ALMOST = {"rel": 1e-12, "abs": 1e-12}


@dataclass(frozen=True)
class Case:
    """A padded batch: everything `loss` takes, and padding at the right."""

    config: ObjectiveConfig
    new: torch.Tensor
    prox: torch.Tensor
    mask: torch.Tensor
    keep: torch.Tensor
    weight: torch.Tensor
    advantages: torch.Tensor

    @property
    def denominators(self) -> Denominators:
        return Denominators.of(self.mask)

    def rows(self, index: torch.Tensor) -> Case:
        return replace(self, **{k: getattr(self, k)[index] for k in ("new", "prox", "mask", "keep", "weight", "advantages")})

    def evaluate(self, denominators: Denominators | None = None) -> tuple[float, torch.Tensor, Tally]:
        new = self.new.clone().requires_grad_()
        out = loss(self.config, logp_new=new, logp_prox=self.prox, mask=self.mask, advantages=self.advantages,
                   token_keep=self.keep, token_weight=self.weight, denominators=denominators or self.denominators)
        out.loss.backward()
        assert new.grad is not None
        return out.loss.item(), new.grad, out.tally


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Ragged rows with tool tokens inside, some fully masked, ratios on both sides of every bound."""
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([1e-4, 1e-2, 0.5, 3.0]))
    prox = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 5
    new = prox + spread * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < draw(st.sampled_from([0.0, 0.4, 0.9]))
    keep = torch.rand(rows, width, generator=generator) < 0.8
    weight = torch.rand(rows, width, generator=generator, dtype=torch.float64) * 2
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    config = ObjectiveConfig(
        name=draw(st.sampled_from(Objective)), aggregation=draw(st.sampled_from(Aggregation)),
        **draw(st.sampled_from([{"eps_low": 0.2, "eps_high": 0.28}, {}])),
        dual_clip=draw(st.sampled_from([None, 3.0])),
    )
    return Case(config, new, prox, mask, keep, weight, advantages)


def same_metrics(a: Tally, b: Tally) -> None:
    assert a.metrics() == pytest.approx(b.metrics(), rel=1e-9, abs=1e-9)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@given(cases(), st.data())
@settings(max_examples=60, deadline=None)
def test_micro_batches_sum_to_the_batch(case: Case, data: st.DataObject) -> None:
    rows = len(case.advantages)
    part_of = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
    whole, gradient, tally = case.evaluate()
    parts = [torch.nonzero(part_of == p).flatten() for p in range(3)]
    results = [(index, case.rows(index).evaluate(case.denominators)) for index in parts if len(index)]
    assert sum(value for _, (value, _, _) in results) == pytest.approx(whole, **ALMOST)
    rebuilt = torch.zeros_like(gradient)
    for index, (_, part, _) in results:
        rebuilt[index] = part
    same(rebuilt, gradient)
    total = results[0][1][2]
    for _, (_, _, more) in results[1:]:
        total = total + more
    same_metrics(total, tally)


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_of_sequences_changes_nothing(case: Case, random: Any) -> None:
    order = list(range(len(case.advantages)))
    random.shuffle(order)
    index = torch.tensor(order)
    whole, gradient, tally = case.evaluate()
    value, permuted, shuffled = case.rows(index).evaluate()
    assert value == pytest.approx(whole, **ALMOST)
    same(permuted, gradient[index])
    same_metrics(shuffled, tally)


@given(cases(), st.integers(0, 5), st.integers(0, 5), st.sampled_from([0.0, 1e4, float("inf"), float("-inf"), float("nan")]))
@settings(max_examples=40, deadline=None)
def test_padding_on_either_side_changes_nothing(case: Case, left: int, right: int, filler: float) -> None:
    def pad(tensor: torch.Tensor, value: float) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (left, right), value=value)

    wide = replace(case, new=pad(case.new, filler), prox=pad(case.prox, filler), weight=pad(case.weight, filler),
                   mask=pad(case.mask.int(), 0).bool(), keep=pad(case.keep.int(), 1).bool())
    whole, gradient, tally = case.evaluate()
    value, padded, other = wide.evaluate()
    assert value == pytest.approx(whole, **ALMOST)
    same(padded[:, left : left + gradient.shape[1]], gradient)
    assert padded.abs().sum().item() == pytest.approx(gradient.abs().sum().item(), **ALMOST)
    same_metrics(other, tally)


@given(cases(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_packing_without_padding_changes_nothing(case: Case, drop_masked: bool) -> None:
    rows, width = case.mask.shape
    taken = case.mask.flatten() if drop_masked else torch.ones(rows * width, dtype=torch.bool)
    ids = torch.arange(rows).repeat_interleave(width)[taken]

    def flat(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten()[taken]

    new = flat(case.new).requires_grad_()
    out = loss(case.config, logp_new=new, logp_prox=flat(case.prox), mask=flat(case.mask), seq_id=ids,
               advantages=case.advantages, token_keep=flat(case.keep), token_weight=flat(case.weight),
               denominators=case.denominators)
    out.loss.backward()
    assert new.grad is not None
    whole, gradient, tally = case.evaluate()
    assert out.loss.item() == pytest.approx(whole, **ALMOST)
    same(new.grad, flat(gradient))
    same_metrics(out.tally, tally)


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_tokens_of_packed_sequences_may_be_interleaved(case: Case, random: Any) -> None:
    rows, width = case.mask.shape
    order = list(range(rows * width))
    random.shuffle(order)
    index = torch.tensor(order)

    def flat(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten()[index]

    out = loss(case.config, logp_new=flat(case.new), logp_prox=flat(case.prox), mask=flat(case.mask),
               seq_id=torch.arange(rows).repeat_interleave(width)[index], advantages=case.advantages,
               token_keep=flat(case.keep), token_weight=flat(case.weight), denominators=case.denominators)
    assert out.loss.item() == pytest.approx(case.evaluate()[0], **ALMOST)


@given(cases(), st.sampled_from([float("inf"), float("-inf"), float("nan"), 1e4, -1e4]))
@settings(max_examples=60, deadline=None)
def test_what_masked_positions_hold_changes_nothing(case: Case, junk: float) -> None:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(case.mask, tensor, torch.full_like(tensor, junk))

    whole, gradient, tally = case.evaluate()
    value, spoiled, other = replace(case, new=spoil(case.new), prox=spoil(case.prox), weight=spoil(case.weight)).evaluate()
    assert value == whole
    assert torch.equal(spoiled, gradient)
    assert (spoiled[~case.mask] == 0).all()
    assert torch.equal(other.sums, tally.sums)


@given(cases(), st.sampled_from([float("inf"), float("nan")]))
@settings(max_examples=30, deadline=None)
def test_the_weight_of_a_dropped_token_is_not_read(case: Case, junk: float) -> None:
    whole, gradient, _ = case.evaluate()
    weight = torch.where(case.keep, case.weight, torch.full_like(case.weight, junk))
    value, other, _ = replace(case, weight=weight).evaluate()
    assert value == whole
    assert torch.equal(other, gradient)


@given(cases())
@settings(max_examples=40, deadline=None)
def test_a_batch_without_action_tokens_contributes_zero(case: Case) -> None:
    nothing = replace(case, mask=torch.zeros_like(case.mask))
    for denominators in (Denominators(0, 0), Denominators(7, 100)):
        value, gradient, tally = nothing.evaluate(denominators)
        assert value == 0.0
        assert (gradient == 0).all()
        assert tally.metrics()["ess"] == tally.metrics()["masked"] == 0.0


@given(cases())
@settings(max_examples=40, deadline=None)
def test_dropping_every_token_contributes_zero_and_is_reported(case: Case) -> None:
    value, gradient, tally = replace(case, keep=torch.zeros_like(case.keep)).evaluate()
    assert value == 0.0
    assert (gradient == 0).all()
    assert tally.metrics()["masked"] == float(case.mask.any())


@given(cases())
@settings(max_examples=60, deadline=None)
def test_before_the_first_update_the_gradient_is_reinforce(case: Case) -> None:
    name = case.config.name
    value, gradient, tally = replace(case, prox=case.new).evaluate()
    reinforce = replace(case, config=replace(case.config, name=Objective.CROSS_ENTROPY)).evaluate()
    if name is not Objective.CROSS_ENTROPY:
        metrics = tally.metrics()
        assert metrics["clip"] == metrics["dual_clip"] == 0.0
        if case.mask.any():
            assert metrics["ratio_mean"] == metrics["ess"] == 1.0
    same(gradient, reinforce[1])
    assert math.isfinite(value)


@given(cases())
@settings(max_examples=40, deadline=None)
def test_mirrored_advantages_mirror_the_clip(case: Case) -> None:
    """With log-symmetric bounds, negating A and inverting the ratio swaps the two sides."""
    bounds = {"clip_low_threshold": 1 / 1.25, "clip_high_threshold": 1.25, "dual_clip": None}
    config = replace(case.config, name=Objective.GSPO, **bounds)
    here = replace(case, config=config)
    there = replace(here, new=case.prox - (case.new - case.prox), advantages=-case.advantages)
    ours, mirrored = here.evaluate()[2].metrics(), there.evaluate()[2].metrics()
    assert (ours["clip_high"], ours["clip_low"]) == (mirrored["clip_low"], mirrored["clip_high"])


@given(cases())
@settings(max_examples=40, deadline=None)
def test_gspo_has_one_ratio_per_sequence(case: Case) -> None:
    """Moving log-probability between the action tokens of a sequence leaves its loss where it was."""
    case = replace(case, config=replace(case.config, name=Objective.GSPO), keep=torch.ones_like(case.keep),
                   weight=torch.ones_like(case.weight))
    counts = case.mask.sum(1, keepdim=True).clamp_min(1)
    mean = torch.where(case.mask, case.new - case.prox, 0.0).sum(1, keepdim=True) / counts
    level = torch.where(case.mask, case.prox + mean, case.new)
    assert replace(case, new=level).evaluate()[0] == pytest.approx(case.evaluate()[0], rel=1e-9, abs=1e-9)
