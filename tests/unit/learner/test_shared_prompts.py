"""The shared-prompt forward under router replay, and at prompts of any length."""

from __future__ import annotations

import numpy as np
import torch
from learning_samples import batch_of, small_model

from driftline.messages.types import Graded, Trajectory
from driftline.models.logprob import token_logprobs
from driftline.models.model import K3ForCausalLM
from driftline.services.learner.assembler import BatchGroup
from driftline.services.learner.shared_prompts import forward_groups

torch.set_num_threads(1)


def with_routes(groups: tuple[BatchGroup, ...], shift: int, where: slice | None) -> tuple[BatchGroup, ...]:
    """The groups with the recorded experts moved on by `shift` at `where` (None: at all that is recorded); the last stays -1."""

    def moved(graded: Graded) -> Graded:
        t = graded.trajectory
        assert t.routes is not None
        routes = t.routes.copy()
        span = slice(0, len(routes) - 1) if where is None else where
        routes[span] = (routes[span] + shift) % 4
        return graded.model_copy(update={"trajectory": t.model_copy(update={"routes": routes})})

    return tuple(BatchGroup(g.group, tuple(moved(m) for m in g.members), ()) for g in groups)


def whole(model: K3ForCausalLM, t: Trajectory) -> torch.Tensor:
    """Log-probabilities of the completion from one replayed forward over the whole sequence."""
    tokens = torch.from_numpy(t.tokens.astype(np.int64))[None]
    replay = None if t.routes is None else torch.from_numpy(t.routes[:-1].astype(np.int64))[None]
    hidden = model(tokens[:, :-1], replay=replay).hidden[0, t.prompt_tokens - 1 :]
    return token_logprobs(model.logits(hidden), tokens[0, t.prompt_tokens :])[0]


def test_replay_covers_prompt_and_completion_as_one_replayed_forward_does() -> None:
    model = small_model().double()
    groups = with_routes(batch_of(model, record_routes=True).groups, 1, None)
    flat = forward_groups(model, groups, 0, replay=True)
    want = torch.cat([whole(model, m.trajectory) for g in groups for m in g.members])
    assert (flat.logp - want).abs().max() < 1e-10


def test_recorded_experts_of_the_prompt_alone_change_the_completion() -> None:
    model = small_model().double()
    groups = batch_of(model, record_routes=True).groups
    edited = with_routes(groups, 1, slice(0, 3))
    kept, moved = (forward_groups(model, g, 0, replay=True).logp for g in (groups, edited))
    assert (kept - moved).abs().max() > 1e-9
    assert torch.equal(forward_groups(model, groups, 0).logp, forward_groups(model, edited, 0).logp)  # not read without replay


def test_a_member_without_routes_chooses_for_itself_and_the_others_are_replayed() -> None:
    model = small_model().double()
    groups = with_routes(batch_of(model, record_routes=True).groups, 1, None)
    first = groups[0]
    bare = first.members[0].model_copy(update={"trajectory": first.members[0].trajectory.model_copy(update={"routes": None})})
    mixed = (BatchGroup(first.group, (bare, *first.members[1:]), ()), *groups[1:])
    want = torch.cat([whole(model, m.trajectory) for g in mixed for m in g.members])
    assert (forward_groups(model, mixed, 0, replay=True).logp - want).abs().max() < 1e-10
    assert (forward_groups(model, mixed, 0).logp - want).abs().max() > 1e-9


def cut(graded: Graded, start: int) -> Graded:
    """The trajectory with its first `start` prompt tokens gone."""
    t = graded.trajectory
    parts = {name: getattr(t, name)[start:] for name in ("tokens", "action_mask", "logprobs", "versions")}
    return graded.model_copy(update={"trajectory": t.model_copy(update={**parts, "prompt_tokens": t.prompt_tokens - start})})


def test_a_prompt_of_one_token_has_nothing_to_share() -> None:
    model = small_model().double()
    groups = batch_of(model).groups
    first = BatchGroup(groups[0].group, tuple(cut(m, m.trajectory.prompt_tokens - 1) for m in groups[0].members), ())
    for chosen in ((first,), (first, groups[1])):  # alone, and beside a longer prompt
        flat = forward_groups(model, chosen, 0)
        want = torch.cat([whole(model, m.trajectory) for g in chosen for m in g.members])
        assert (flat.logp - want).abs().max() < 1e-10
