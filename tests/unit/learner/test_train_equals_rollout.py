"""In deterministic mode a learner computes, bit for bit, the log-probabilities that the engine recorded over a whole sampled batch."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from deterministic_runs import asked, bits, learned, recorded, sampled

from driftline.messages.types import Trajectory
from driftline.models.causal_lm import CausalLM
from driftline.models.state import export_state
from driftline.services.learner.assembler import BatchGroup
from driftline.services.rollout.engine import Engine
from driftline.services.rollout.sampler import choose

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from deterministic_cases import flip_a_bit, process_in
from test_deterministic_models import KINDS, dense, k3

from driftline.kernels.mode import Numerics

torch.set_num_threads(1)


def made(kind: str) -> CausalLM:
    """Sharpened, so that completions are told apart and some end early."""
    model = {"k3": k3, "dense": dense}[kind]()
    with torch.no_grad():
        model.lm_head.weight[257].mul_(2)
    return model


@cache
def batch(kind: str, mode: Numerics) -> tuple[BatchGroup, ...]:
    with process_in(mode):
        return sampled(made(kind), asked(5), record_routes=kind == "k3")


def tokens(groups: tuple[BatchGroup, ...]) -> list[list[int]]:
    return [m.trajectory.tokens.tolist() for g in groups for m in g.members]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("at_once", "packed"), [(1000, False), (1000, True), (1, False), (2, True)])
def test_the_learner_s_log_probabilities_are_the_engine_s(kind: str, at_once: int, packed: bool) -> None:
    groups = batch(kind, Numerics.DETERMINISTIC)
    with process_in(Numerics.DETERMINISTIC):
        found = learned(made(kind), groups, at_once=at_once, packed=packed)
    assert len(found) > 200
    assert np.array_equal(bits(found), bits(recorded(groups)))


def test_replayed_routes_change_nothing_where_they_are_the_model_s_own() -> None:
    groups = batch("k3", Numerics.DETERMINISTIC)
    with process_in(Numerics.DETERMINISTIC):
        found = learned(made("k3"), groups, replay=True)
    assert np.array_equal(bits(found), bits(recorded(groups)))


@pytest.mark.parametrize("kind", KINDS)
def test_fast_mode_differs_by_rounding(kind: str) -> None:
    groups = batch(kind, Numerics.FAST)
    found = learned(made(kind), groups)
    assert not np.array_equal(bits(found), bits(recorded(groups)))
    np.testing.assert_allclose(found, recorded(groups), atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_bit_of_one_weight_is_seen(kind: str) -> None:
    model = made(kind)
    flip_a_bit(model.get_parameter("model.layers.0.self_attn.v_proj.weight"))
    with process_in(Numerics.DETERMINISTIC):
        assert not np.array_equal(bits(learned(model, batch(kind, Numerics.DETERMINISTIC))), bits(recorded(batch(kind, Numerics.DETERMINISTIC))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("max_batch", "every"), [(4, 1), (64, 5), (9, 2)])
def test_order_of_arrival_and_neighbours_change_no_sampled_token_and_no_bit(kind: str, max_batch: int, every: int) -> None:
    """A restarted engine, with the groups in another order."""
    want = batch(kind, Numerics.DETERMINISTIC)
    with process_in(Numerics.DETERMINISTIC):
        found = sampled(made(kind), list(reversed(asked(5))), max_batch=max_batch, every=every)
    assert tokens(found) == tokens(want)
    assert np.array_equal(bits(recorded(found)), bits(recorded(want)))


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_version_is_loaded_the_bits_are_those_of_a_model_made_with_it(kind: str) -> None:
    """A version that comes while rows are running, whose caches are made again; and a tensor that only moved by a rounding step."""
    new = made(kind)
    with torch.no_grad():
        for parameter in new.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(1.01)
    groups = asked(3)
    with process_in(Numerics.DETERMINISTIC):
        engine = Engine(made(kind), version=0)
        for one in groups:
            engine.submit(one)
        done: list[Trajectory] = []
        for _ in range(4):
            done += engine.step()
        engine.load(1, export_state(new, torch.float32), recompute=True)
        while not engine.idle:
            done += engine.step()
        late = [t for t in done if (t.versions == 1).any()]
        assert late
        model = made(kind)
        model.load_state_dict(new.state_dict())
        for t in late:
            ids = torch.from_numpy(t.tokens.astype(np.int64))
            at = np.flatnonzero(t.versions == 1)
            hidden = model(ids[None, :-1]).hidden[0, torch.from_numpy(at - 1)]
            logp = model.logprobs(hidden, ids[at], torch.full((len(at),), t.temperature))[0].detach().float().numpy()
            assert np.array_equal(bits(logp), bits(t.logprobs[at].astype("<f4")))


def test_a_draw_picks_the_token_that_its_share_of_the_line_holds() -> None:
    """The exact running sum samples the distribution that the recorded log-probabilities are of."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 50, generator=rng) * 4
    temperature = torch.tensor([1.0, 0.5, 2.0])
    points = (np.arange(4000) + 0.5) / 4000
    with process_in(Numerics.DETERMINISTIC):
        for row in range(3):
            chosen = choose(logits[row : row + 1].expand(4000, -1), temperature[row : row + 1].expand(4000), points)
            share = torch.bincount(chosen, minlength=50).double() / 4000
            p = torch.softmax(logits[row].double() / temperature[row].double(), -1)
            assert (share - p).abs().max() <= 1 / 4000 + 1e-9
            assert bool((chosen.diff() >= 0).all())
