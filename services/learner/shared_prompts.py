"""Log-probabilities of a micro-batch: each group's prompt once, its cache forked to the members, completions after it.

The same forward serves the trainer, which differentiates it, and the numerics probe. Right-padded, or packed without padding; either way a token's number is its
own, whoever is beside it. Log-probabilities are of action tokens alone, so logits are never made of the others. Shapes: G groups, M members of them, P the longest
prompt, R the longest completion, N action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from driftline.messages.types import Trajectory
from driftline.models.cache import Cache
from driftline.models.causal_lm import CausalLM
from driftline.models.mlp import route_shape
from driftline.models.packed import Packed, moved
from driftline.models.routes import RouteShape
from driftline.models.tokenizer import ByteTokenizer
from driftline.services.learner.assembler import BatchGroup
from driftline.services.learner.route_replay import route_table, share_prompts

__all__ = ["FlatTokens", "forward_groups"]


@dataclass(frozen=True)
class FlatTokens:
    """Action tokens, [N] each, in order of (member, position): learner log-probabilities with gradient, entropies, recorded log-probabilities, the number of
    each token's sequence, and the version that sampled it."""

    logp: torch.Tensor
    entropy: torch.Tensor
    behave: torch.Tensor
    sequence: torch.Tensor
    versions: np.ndarray


@dataclass(frozen=True)
class _Rows:
    """Token ids of several sequences on the device, right-padded [rows, longest] or packed [1, all], and what a forward is told beside them."""

    tokens: torch.Tensor
    lengths: torch.Tensor | None
    packed: Packed | None

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], model: CausalLM, device: torch.device, *, packed: bool) -> _Rows:
        lengths = [len(r) for r in rows]
        if packed:
            flat = np.concatenate(rows).astype(np.int64)
            return cls(torch.from_numpy(flat)[None].to(device), None, Packed.of(lengths, device))
        # Padding is never read; it is a token of the vocabulary.
        out = np.full((len(rows), max(lengths)), min(ByteTokenizer.pad, model.config.vocab_size - 1), dtype=np.int64)
        for i, r in enumerate(rows):
            out[i, : len(r)] = r
        return cls(torch.from_numpy(out).to(device), torch.tensor(lengths, device=device), None)

    def routes(self, tables: Sequence[np.ndarray | None], lengths: Sequence[int], shape: RouteShape | None) -> torch.Tensor | None:
        width = None if self.packed is not None else self.tokens.shape[1]
        return route_table(tables, lengths, shape, device=self.tokens.device, width=width)


def forward_groups(
    model: CausalLM, groups: Sequence[BatchGroup], first: int = 0, *, replay: bool = False, packed: bool = False, numbers: Sequence[int] | None = None,
) -> FlatTokens:
    """Run the groups' members; sequences are numbered from `first`, or by `numbers`. `replay`: every token that has recorded experts uses them.

    Raises IntegrityError for recorded experts that are not this model's.
    """
    device = next(model.parameters()).device
    shape = route_shape(model) if replay else None
    shared = share_prompts(groups, shape)
    members = [graded.trajectory for group in groups for graded in group.members]
    cache: Cache | None = None
    if any(len(p) for p in shared.prompts):
        prompts = _Rows.of(shared.prompts, model, device, packed=packed)
        ids = prompts.routes(shared.prompt_routes, [len(p) for p in shared.prompts], shape)
        cache = model(prompts.tokens, lengths=prompts.lengths, replay=ids, packed=prompts.packed).cache
        cache = cache.take(torch.tensor(shared.owner, device=device))
    # The last prompt token starts every completion, so one pass over it yields the first sampled token's logits.
    inputs = [t.tokens[t.prompt_tokens - 1 : -1] for t in members]
    rows = _Rows.of(inputs, model, device, packed=packed)
    ids = rows.routes(shared.completion_routes, [len(r) for r in inputs], shape)
    hidden = model(rows.tokens, lengths=rows.lengths, cache=cache, replay=ids, packed=rows.packed).hidden
    actions = _actions(members, rows.tokens.shape[1] if rows.packed is None else None)
    at = torch.from_numpy(actions.places).to(device)
    back = torch.full((rows.tokens.numel(),), -1, dtype=torch.int64, device=device)
    back[at] = torch.arange(len(at), device=device)
    row = torch.from_numpy(actions.members).to(device)
    temperature = torch.tensor([t.temperature for t in members], device=device)
    targets = torch.from_numpy(actions.targets).to(device)
    logp, entropy = model.logprobs(moved(hidden.flatten(0, 1), at, back), targets, temperature[row])
    names = np.asarray(numbers if numbers is not None else range(first, first + len(members)), dtype=np.int64)
    behave = np.concatenate([t.logprobs[t.action_mask] for t in members])
    versions = np.concatenate([t.versions[t.action_mask] for t in members])
    return FlatTokens(logp, entropy, torch.from_numpy(behave).to(device), torch.from_numpy(names[actions.members]).to(device), versions)


@dataclass(frozen=True)
class _Actions:
    """int64 [N] each: where an action token's logits come from among the forwarded tokens, flattened; whose it is; and which it is."""

    places: np.ndarray
    members: np.ndarray
    targets: np.ndarray


def _actions(members: Sequence[Trajectory], width: int | None) -> _Actions:
    """`width` of a right-padded row; None: packed."""
    places, owners, targets = [], [], []
    start = 0
    for i, t in enumerate(members):
        at = np.flatnonzero(t.action_mask[t.prompt_tokens :])
        places.append(start + at)
        owners.append(np.full(len(at), i))
        targets.append(t.tokens[t.prompt_tokens + at])
        start += len(t.tokens) - t.prompt_tokens if width is None else width
    return _Actions(*(np.concatenate(part).astype(np.int64) for part in (places, owners, targets)))
