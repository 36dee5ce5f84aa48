"""Route tables of a micro-batch: every member with its own record, prompts shared only where members agree, nothing taken on trust."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from learning_samples import batch_of, grade, group, sample, small_model

from driftline.kernels.mode import Numerics, using
from driftline.messages.errors import IntegrityError
from driftline.messages.types import Graded, Trajectory
from driftline.models.causal_lm import ModelOutput
from driftline.models.dense.config import DenseConfig
from driftline.models.logprob import token_logprobs
from driftline.models.mlp import route_shape
from driftline.models.model import K3ForCausalLM
from driftline.models.random_weights import random_model
from driftline.models.recompute import Recompute
from driftline.models.routes import RouteShape
from driftline.services.config import LearnerConfig
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.learner.probe import NumericsProbe
from driftline.services.learner.route_replay import check_routes, route_table, share_prompts
from driftline.services.learner.shared_prompts import forward_groups
from driftline.services.learner.trainer import Trainer

torch.set_num_threads(1)
SHAPE = RouteShape(2, 2, 4)
"""Of `small_model`: three layers, the first dense."""
DENSE = DenseConfig.of({
    "model_type": "llama", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1000.0, "max_position_embeddings": 512, "tie_word_embeddings": True,
}, "here")


def model64() -> K3ForCausalLM:
    return small_model().double()


def changed(graded: Graded, edit: Callable[[np.ndarray], np.ndarray | None]) -> Graded:
    """The member with other routes."""
    t = graded.trajectory
    assert t.routes is not None
    return graded.model_copy(update={"trajectory": t.model_copy(update={"routes": edit(t.routes.copy())})})


def moved(part: slice, by: int = 1) -> Callable[[np.ndarray], np.ndarray]:
    """Other experts at `part`; the last token keeps its -1."""

    def edit(routes: np.ndarray) -> np.ndarray:
        routes[part] = np.where(routes[part] < 0, -1, (routes[part] + by) % SHAPE.experts)
        return routes

    return edit


def absent(part: slice) -> Callable[[np.ndarray], np.ndarray]:
    def edit(routes: np.ndarray) -> np.ndarray:
        routes[part] = -1
        return routes

    return edit


def with_member(item: BatchGroup, at: int, member: Graded) -> BatchGroup:
    return BatchGroup(item.group, (*item.members[:at], member, *item.members[at + 1 :]), ())


def whole(model: K3ForCausalLM, t: Trajectory) -> torch.Tensor:
    """Log-probabilities of the completion from one pass over the whole sequence, replayed as far as it is recorded."""
    tokens = torch.from_numpy(t.tokens.astype(np.int64))[None]
    replay = None if t.routes is None else torch.from_numpy(t.routes[:-1])[None]
    hidden = model(tokens[:, :-1], replay=replay).hidden[0, t.prompt_tokens - 1 :]
    return token_logprobs(model.logits(hidden), tokens[0, t.prompt_tokens :])[0]


def test_members_that_agree_share_their_prompt() -> None:
    groups = batch_of(small_model(), record_routes=True).groups
    shared = share_prompts(groups, SHAPE)
    assert len(shared.prompts) == len(groups)
    assert shared.owner == tuple(i for i, g in enumerate(groups) for _ in g.members)
    first = groups[0].members[0].trajectory
    assert np.array_equal(shared.prompts[0], first.tokens[: first.prompt_tokens - 1])
    assert shared.prompt_routes[0] is not None
    assert first.routes is not None
    assert np.array_equal(shared.prompt_routes[0], first.routes[: first.prompt_tokens - 1])
    for table, graded in zip(shared.completion_routes, (m for g in groups for m in g.members), strict=True):
        t = graded.trajectory
        assert table is not None
        assert len(table) == len(t.tokens) - t.prompt_tokens, "from the last prompt token to the last but one"


@pytest.mark.parametrize(
    "edit", [moved(slice(0, 1)), absent(slice(1, 2)), lambda routes: None], ids=["sampled from another prefill", "recorded in part", "not recorded"]
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_member_that_disagrees_has_its_prompt_computed_apart(edit: Callable[[np.ndarray], np.ndarray | None], packed: bool) -> None:
    """A retry under a later policy is another prefill: its routes are its own, and its group's are not spoilt by it."""
    model = model64()
    groups = batch_of(model, record_routes=True).groups
    odd = (with_member(groups[0], 1, changed(groups[0].members[1], edit)), *groups[1:])
    shared = share_prompts(odd, SHAPE)
    assert len(shared.prompts) == len(groups) + 1
    assert shared.owner[:4] == (0, 1, 0, 0)
    flat = forward_groups(model, odd, replay=True, packed=packed)
    want = torch.cat([whole(model, m.trajectory) for g in odd for m in g.members])
    assert (flat.logp - want).abs().max() < 1e-10


def test_without_replay_routes_are_not_looked_at() -> None:
    groups = batch_of(small_model(), record_routes=True).groups
    broken = with_member(groups[0], 1, changed(groups[0].members[1], lambda routes: routes + 1000))
    shared = share_prompts((broken, *groups[1:]), None)
    assert len(shared.prompts) == len(groups)
    assert set(map(type, (*shared.prompt_routes, *shared.completion_routes))) == {type(None)}
    with pytest.raises(IntegrityError):
        share_prompts((broken,), SHAPE)


@pytest.mark.parametrize("packed", [False, True])
def test_every_token_is_replayed_as_its_own_trajectory_says(packed: bool) -> None:
    """Over a whole batch of other lengths, with experts that nobody would have chosen, and holes."""
    model = model64()
    groups = tuple(
        BatchGroup(g.group, tuple(changed(changed(m, moved(slice(None), n + 1)), absent(slice(n % 5 + 1, n % 5 + 3))) for n, m in enumerate(g.members)), ())
        for g in batch_of(model, record_routes=True).groups
    )
    flat = forward_groups(model, groups, replay=True, packed=packed)
    want = torch.cat([whole(model, m.trajectory) for g in groups for m in g.members])
    assert (flat.logp - want).abs().max() < 1e-10
    assert (flat.logp - forward_groups(model, groups, packed=packed).logp).abs().max() > 1e-6


def test_what_the_model_uses_is_what_was_recorded() -> None:
    model = small_model()
    used: list[torch.Tensor] = []

    def see(_module: object, _inputs: object, out: ModelOutput) -> None:
        used.append(out.routes)

    groups = batch_of(model, record_routes=True).groups
    edited = tuple(BatchGroup(g.group, tuple(changed(m, moved(slice(None))) for m in g.members), ()) for g in groups)
    model.register_forward_hook(see)
    forward_groups(model, edited, replay=True)
    prompts, completions = used
    for i, g in enumerate(edited):
        t = g.members[0].trajectory
        assert t.routes is not None
        assert np.array_equal(prompts[i, : t.prompt_tokens - 1].numpy(), t.routes[: t.prompt_tokens - 1])
    for i, graded in enumerate(m for g in edited for m in g.members):
        t = graded.trajectory
        assert t.routes is not None
        assert np.array_equal(completions[i, : len(t.tokens) - t.prompt_tokens].numpy(), t.routes[t.prompt_tokens - 1 : -1])


def test_tables_are_padded_or_packed_with_no_record_where_there_is_none() -> None:
    one = np.arange(12, dtype="<i2").reshape(3, 2, 2)
    padded = route_table([one, None, one[:1]], [3, 2, 1], SHAPE, device="cpu", width=4)
    assert padded is not None
    assert padded.dtype is torch.int16, "two bytes an id on the device too"
    assert padded.shape == (3, 4, 2, 2)
    assert np.array_equal(padded[0, :3].numpy(), one)
    assert (padded[0, 3:] == -1).all()
    assert (padded[1] == -1).all()
    assert (padded[2, 1:] == -1).all()
    packed = route_table([one, None, one[:1]], [3, 2, 1], SHAPE, device="cpu")
    assert packed is not None
    assert packed.shape == (1, 6, 2, 2)
    assert np.array_equal(packed[0, :3].numpy(), one)
    assert (packed[0, 3:5] == -1).all()
    assert np.array_equal(packed[0, 5:].numpy(), one[:1])


def test_there_is_no_table_where_nothing_is_recorded() -> None:
    assert route_table([None, None], [3, 2], SHAPE, device="cpu", width=3) is None
    assert route_table([np.zeros((0, 2, 2), dtype="<i2")], [0], SHAPE, device="cpu") is None
    assert route_table([np.zeros((1, 2, 2), dtype="<i2")], [1], None, device="cpu") is None
    with pytest.raises(ValueError, match="table 0 has 1 rows for 2 tokens"):
        route_table([np.zeros((1, 2, 2), dtype="<i2")], [2], SHAPE, device="cpu")


def one_of(edit: Callable[[np.ndarray], np.ndarray | None]) -> Trajectory:
    return changed(batch_of(small_model(), 1, record_routes=True).groups[0].members[0], edit).trajectory


def last_kept(routes: np.ndarray) -> np.ndarray:
    routes[-1] = routes[0]
    return routes


def put(value: int, *at: int) -> Callable[[np.ndarray], np.ndarray]:
    def edit(routes: np.ndarray) -> np.ndarray:
        routes[at] = value
        return routes

    return edit


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda r: np.concatenate([r[:, :1], r], axis=1), "3 layers with 2 experts each"),  # the dense layer was counted
        (lambda r: r[:, :, :1].copy(), "2 layers with 1 experts each"),
        (put(4, 0, 0, 0), r"not one of 0\.\.3"),  # where an engine put a copy of it
        (put(-2, 0, 0, 0), r"not one of 0\.\.3"),
        (put(-1, 2, 1, 0), "complete in part"),
        (lambda r: np.where(np.arange(len(r))[:, None, None] < 2, 0, r).astype("<i2"), "names an expert twice"),  # a buffer of zeros
        (last_kept, "the last token has a route"),  # shifted by one
    ],
    ids=["layers", "top_k", "physical", "below", "torn", "zeros", "shifted"],
)
def test_a_record_that_cannot_be_this_models_is_refused_by_name(edit: Callable[[np.ndarray], np.ndarray], problem: str) -> None:
    t = one_of(edit)
    with pytest.raises(IntegrityError, match=problem) as error:
        check_routes(t, SHAPE)
    assert t.id in str(error.value)


def test_a_good_record_and_none_pass() -> None:
    assert route_shape(small_model()) == SHAPE
    check_routes(one_of(lambda r: r), SHAPE)
    check_routes(one_of(absent(slice(1, 3))), SHAPE)
    check_routes(one_of(lambda r: None), SHAPE)


def test_the_learner_counts_how_often_it_would_have_chosen_otherwise() -> None:
    """At the weights that sampled, in the arithmetic that sampled: never. With recorded experts moved on at two tokens of one member: there."""
    config = LearnerConfig(lr=1e-3, eps_low=0.2, eps_high=0.2, router_replay=True)
    trainer = Trainer(small_model(), config, count_flips=True)
    batch = batch_of(trainer.model, record_routes=True)
    first = trainer.step(batch).drift.flips
    assert first is not None
    assert first.sets == 0
    fed = sum(len(t.tokens) - t.prompt_tokens for t in batch.trajectories) + sum(g.members[0].trajectory.prompt_tokens - 1 for g in batch.groups)
    assert first.rows == fed * SHAPE.layers, "each token that is computed, in each MoE layer; a shared prompt once"
    odd = batch.groups[0].members[1]
    start = odd.trajectory.prompt_tokens
    edited = with_member(batch.groups[0], 1, changed(odd, moved(slice(start, start + 2), 2)))
    report = Trainer(small_model(), config, count_flips=True).step(Batch(0, (edited, *batch.groups[1:])))
    flips = report.drift.flips
    assert flips is not None
    assert 0 < flips.sets <= flips.orders
    assert Trainer(small_model(), config).step(batch).drift.flips is None


def test_in_deterministic_mode_nothing_flips_and_replay_changes_no_bit() -> None:
    """The engine's choice, token by token, is the learner's over whole sequences: replayed or free, the recorded bits. In fast mode they are not."""
    found = {}
    for mode in Numerics:
        for replay in (True, False):
            config = LearnerConfig(lr=1e-3, eps_low=0.2, eps_high=0.2, router_replay=replay)
            with using(mode):
                trainer = Trainer(small_model(), config, count_flips=True)
                found[mode, replay] = trainer.step(batch_of(trainer.model, record_routes=True)).drift
    for replay in (True, False):
        exact = found[Numerics.DETERMINISTIC, replay].drift.all
        assert (exact.k3, exact.bitwise_equal) == (0.0, 1.0)
        assert found[Numerics.FAST, replay].drift.all.bitwise_equal < 1.0
    flips = found[Numerics.DETERMINISTIC, True].flips
    assert flips is not None
    assert flips.rows > 0
    assert (flips.sets, flips.orders) == (0, 0)


def test_a_model_without_experts_is_trained_as_without_replay() -> None:
    model = random_model(DENSE, dtype=torch.float64)
    assert route_shape(model) is None
    groups = batch_of(model).groups
    assert torch.equal(forward_groups(model, groups, replay=True).logp, forward_groups(model, groups).logp)


@pytest.mark.parametrize("recompute", list(Recompute))
def test_replayed_gradients_do_not_depend_on_recomputation(recompute: Recompute) -> None:
    groups = batch_of(small_model(), record_routes=True).groups
    edited = tuple(BatchGroup(g.group, tuple(changed(m, absent(slice(2, 4))) for m in g.members), ()) for g in groups)
    grads = []
    for how in (Recompute.NONE, recompute):
        model = small_model()
        model.recompute = how
        forward_groups(model, edited, replay=True).logp.sum().backward()  # type: ignore[no-untyped-call]
        grads.append([p.grad for p in model.parameters()])
    for plain, other in zip(*grads, strict=True):
        assert (plain is None) == (other is None)
        assert plain is None or torch.equal(plain, other)


def test_every_policy_a_step_looks_at_replays_the_same_ids() -> None:
    """The probe's passes over old weights replay too: else its numerics would be those of another model."""
    trainer = Trainer(small_model(), LearnerConfig(lr=1e-3, eps_low=0.2, eps_high=0.2, router_replay=True))
    asked = group(0)
    moved_on = tuple(grade(t) for t in sample(trainer.model, [asked], record_routes=True)[asked.group])
    moved_on = tuple(changed(m, moved(slice(None), 1)) for m in moved_on)
    batch = Batch(0, (BatchGroup(asked, moved_on, ()),))
    found = []
    for replay in (True, False):
        probe = NumericsProbe(trainer.model, members=8, keep=1, replay=replay, count_flips=True)
        probe.remember_model(0, trainer.model)
        found.append(probe.measure(batch))
    replayed, free = found
    assert replayed is not None
    assert free is not None
    assert free.drift.all.k3 < 1e-10, "the engine chose freely"
    assert replayed.drift.all.k3 > 1e-6
    assert replayed.flips is not None
    assert replayed.flips.sets > 0
    assert free.flips is None
    assert replayed.drift.all.k3 == pytest.approx(trainer.step(batch).drift.drift.all.k3, rel=1e-6)
