"""Route tables of a micro-batch: what each forwarded token's router is to repeat, from what the rollout recorded of it.

Guarantees: a token is replayed with its own trajectory's record and with nothing else. Members of a group share a prompt's computation only where they agree on its
tokens and on its routes; one that was sampled from another prefill (a retry under a later policy) gets its own. What has no record (a member without routes, padding,
a row of -1) is -1, and chooses for itself. A table that cannot be of this model is refused by name, before a device sees it.

A trajectory's row i holds what token i was given to when it was fed, under the policy that made the logits of token i + 1 (of the prompt: of the first sampled one). So
a trajectory that several versions sampled replays each token by the version that fed it, whatever a cache was computed again with later. The last token was
never fed; a forward over `tokens[:-1]` does not reach its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from driftline.messages.errors import IntegrityError
from driftline.messages.types import Trajectory
from driftline.models.routes import RouteShape
from driftline.services.learner.assembler import BatchGroup

__all__ = ["SharedPrompts", "check_routes", "route_table", "share_prompts"]

NONE = -1


@dataclass(frozen=True)
class SharedPrompts:
    """What a micro-batch computes once and whose it is. Prompts are without their last token, which starts every completion."""

    prompts: tuple[np.ndarray, ...]
    """Token ids int32 [P] of each distinct prompt, in order of the first member that has it."""
    prompt_routes: tuple[np.ndarray | None, ...]
    """int16 [P, layers, k] of each prompt, or None."""
    owner: tuple[int, ...]
    """Of each member, in order of (group, member): which of the prompts is its own."""
    completion_routes: tuple[np.ndarray | None, ...]
    """int16 [R, layers, k] of each member's fed tokens, from the last of the prompt to the last but one."""


def share_prompts(groups: Sequence[BatchGroup], replay: RouteShape | None) -> SharedPrompts:
    """Split the members' tokens and routes into shared prompts and completions. `replay` is None where nothing is replayed: routes are then not looked at.

    Raises IntegrityError for routes that are not this model's.
    """
    prompts: list[np.ndarray] = []
    tables: list[np.ndarray | None] = []
    owner: list[int] = []
    completions: list[np.ndarray | None] = []
    for group in groups:
        first = len(prompts)
        for graded in group.members:
            t = graded.trajectory
            routes = _routes(t, replay)
            start = t.prompt_tokens - 1
            prompt, table = t.tokens[:start], None if routes is None else routes[:start]
            at = next((i for i in range(first, len(prompts)) if np.array_equal(prompts[i], prompt) and _same(tables[i], table)), None)
            if at is None:
                at = len(prompts)
                prompts.append(prompt)
                tables.append(table)
            owner.append(at)
            completions.append(None if routes is None else routes[start:-1])
    return SharedPrompts(tuple(prompts), tuple(tables), tuple(owner), tuple(completions))


def route_table(
    tables: Sequence[np.ndarray | None], lengths: Sequence[int], shape: RouteShape | None, *, device: torch.device | str, width: int | None = None
) -> torch.Tensor | None:
    """What a model takes as `replay`: int16 [rows, width, layers, k] right-padded, or packed [1, sum of lengths, layers, k] without a width; -1 wherever there
    is no record. None when nothing is replayed or no table has a row, so that the router is not bothered."""
    if shape is None or not any(table is not None and len(table) for table in tables):
        return None
    rows = len(lengths) if width is not None else 1
    out = np.full((rows, sum(lengths) if width is None else width, shape.layers, shape.top_k), NONE, dtype=np.int16)
    at = 0
    for i, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        if table is not None:
            if len(table) != length:
                raise ValueError(f"table {i} has {len(table)} rows for {length} tokens; give one row for each")
            out[(i, slice(length)) if width is not None else (0, slice(at, at + length))] = table
        at += length
    return torch.from_numpy(out).to(device)


def check_routes(trajectory: Trajectory, shape: RouteShape) -> None:
    """Raises IntegrityError where the record cannot be one of a model of this shape: other layers or experts, a list that names an expert twice, a row that is
    neither a whole choice nor -1 throughout, or a record of the last token, which no model was ever given."""
    routes = trajectory.routes
    if routes is None:
        return
    name = f"routes of {trajectory.id}"
    if routes.shape[1:] != (shape.layers, shape.top_k):
        raise IntegrityError(f"routes are of {routes.shape[1]} layers with {routes.shape[2]} experts each", field=name, value=routes.shape,
                             remedy=f"this model has {shape.layers} MoE layers (dense ones are not counted) and {shape.top_k} experts a token")
    low, high = (int(routes.min()), int(routes.max())) if routes.size else (NONE, NONE)
    if low < NONE or high >= shape.experts:
        raise IntegrityError(f"an expert that is not one of 0..{shape.experts - 1}", field=name, value=low if low < NONE else high,
                             remedy="record the model's own ids, not those of copies that an engine places elsewhere")
    if routes.size and (routes[-1] != NONE).any():
        raise IntegrityError("the last token has a route, and was never fed", field=name, value=routes[-1].reshape(-1)[: shape.top_k].tolist(),
                             remedy="row i is of the pass that token i was the input of: record -1 for the last")
    absent = (routes == NONE).any(-1)
    if (absent & (routes != NONE).any(-1)).any():
        at = np.argwhere(absent & (routes != NONE).any(-1))[0]
        raise IntegrityError("a list of experts is complete in part", field=name, value=routes[tuple(at)].tolist(), remedy="record the whole list, or -1 throughout")
    ordered = np.sort(routes, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & ~absent
    if twice.any():
        at = np.argwhere(twice)[0]
        raise IntegrityError(f"a list names an expert twice (token {at[0]}, MoE layer {at[1]})", field=name, value=routes[tuple(at)].tolist(),
                             remedy="a buffer that was never written reads so: record -1 where a layer wrote nothing")


def _routes(trajectory: Trajectory, replay: RouteShape | None) -> np.ndarray | None:
    if replay is None or trajectory.routes is None:
        return None
    check_routes(trajectory, replay)
    return trajectory.routes


def _same(left: np.ndarray | None, right: np.ndarray | None) -> bool:
    return (left is None) == (right is None) and (left is None or right is None or np.array_equal(left, right))
