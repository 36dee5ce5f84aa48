"""Log-probabilities of a micro-batch: what all prompts begin with once, each group's prompt once, its cache forked to the members, completions after it.

The same forward serves the trainer, which differentiates it, and the numerics probe. Right-padded, or packed without padding; either way a token's number is its
own, whoever is beside it. Log-probabilities are of action tokens alone, so logits are never made of the others. Shapes: G groups, M members of them, P the longest
prompt, R the longest completion, N action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from driftline.messages.types import Trajectory
from driftline.models.cache import Cache
from driftline.models.causal_lm import CausalLM
from driftline.models.mlp import route_shape
from driftline.models.packed import Packed, Way, moved
from driftline.models.routes import RouteShape
from driftline.models.tokenizer import ByteTokenizer
from driftline.services.learner.assembler import BatchGroup
from driftline.services.learner.route_replay import SharedPrompts, route_table, share_prompts

__all__ = ["FlatTokens", "forward_groups"]

LEAST_BEGINNING = 64
LEAST_SAVED = 0.25
"""A common beginning of fewer tokens, or that saves a smaller part of the prompts' tokens, is not worth a pass of its own."""


@dataclass(frozen=True)
class FlatTokens:
    """Action tokens, [N] each, in order of (member, position): learner log-probabilities with gradient, entropies, recorded log-probabilities, the number of
    each token's sequence, and the version that sampled it."""

    logp: torch.Tensor
    entropy: torch.Tensor
    behave: torch.Tensor
    sequence: torch.Tensor
    versions: np.ndarray


class _Fed(NamedTuple):
    """hidden [places, D] of a forward over several sequences; their caches, where something follows; and the place of each one's first token, all its tokens in a row."""

    hidden: torch.Tensor
    cache: Cache
    starts: list[int]


@dataclass(frozen=True)
class _Pass:
    """How the sequences of one micro-batch go through the model: packed, or right-padded; replaying routes of `shape`, or none."""

    model: CausalLM
    device: torch.device
    packed: bool
    shape: RouteShape | None

    def fed(self, rows: Sequence[np.ndarray], tables: Sequence[np.ndarray | None], cache: Cache | None, *, keep: bool = True) -> _Fed:
        """Feed token ids [n] of each sequence, with its recorded routes [n, layers, k], behind what its row of the cache has seen. `keep`: something follows."""
        lengths = [len(r) for r in rows]
        if self.packed:
            flat = torch.from_numpy(np.concatenate(rows).astype(np.int64))[None].to(self.device)
            replay = route_table(tables, lengths, self.shape, device=self.device)
            out = self.model(flat, cache=cache, replay=replay, packed=Packed.of(lengths, self.device), keep=keep)
            return _Fed(out.hidden.flatten(0, 1), out.cache, [0, *accumulate(lengths)][:-1])
        width = max(lengths)
        # Padding is never read; it is a token of the vocabulary.
        padded = np.full((len(rows), width), min(ByteTokenizer.pad, self.model.config.vocab_size - 1), dtype=np.int64)
        for i, r in enumerate(rows):
            padded[i, : len(r)] = r
        replay = route_table(tables, lengths, self.shape, device=self.device, width=width)
        tokens, counts = torch.from_numpy(padded).to(self.device), torch.tensor(lengths, device=self.device)
        out = self.model(tokens, lengths=counts, cache=cache, replay=replay, keep=keep)
        return _Fed(out.hidden.flatten(0, 1), out.cache, [i * width for i in range(len(rows))])

    def after_prompts(self, shared: SharedPrompts) -> Cache | None:
        """The caches of the distinct prompts; None when none of them has a token."""
        cache: Cache | None = None
        head = _beginning(shared)
        tables = shared.prompt_routes
        if head:
            cache = self.fed([shared.prompts[0][:head]], [_cut(tables[0], slice(head))], None).cache
            cache = cache.take(torch.zeros(len(shared.prompts), dtype=torch.int64, device=self.device))
        rests = [p[head:] for p in shared.prompts]
        if any(len(r) for r in rests):
            cache = self.fed(rests, [_cut(t, slice(head, None)) for t in tables], cache).cache
        return cache


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
    forward = _Pass(model, device, packed, shape)
    cache = forward.after_prompts(shared)
    if cache is not None:
        cache = cache.take(torch.tensor(shared.owner, device=device))
    # The last prompt token starts every completion, so one pass over it yields the first sampled token's logits.
    hidden, _, starts = forward.fed([t.tokens[t.prompt_tokens - 1 : -1] for t in members], shared.completion_routes, cache, keep=False)
    actions = _actions(members, starts)
    at = torch.from_numpy(actions.places).to(device)
    back = torch.full((len(hidden),), -1, dtype=torch.int64, device=device)
    back[at] = torch.arange(len(at), device=device)
    row = torch.from_numpy(actions.members).to(device)
    temperature = torch.tensor([t.temperature for t in members], device=device)
    targets = torch.from_numpy(actions.targets).to(device)
    logp, entropy = model.logprobs(moved(hidden, Way(at, None), back), targets, temperature[row])
    names = np.asarray(numbers if numbers is not None else range(first, first + len(members)), dtype=np.int64)
    behave = np.concatenate([t.logprobs[t.action_mask] for t in members])
    versions = np.concatenate([t.versions[t.action_mask] for t in members])
    return FlatTokens(logp, entropy, torch.from_numpy(behave).to(device), torch.from_numpy(names[actions.members]).to(device), versions)


def _beginning(shared: SharedPrompts) -> int:
    """How many first tokens all prompts share, with their routes, where computing them once saves enough; else 0."""
    count, total = len(shared.prompts), sum(len(p) for p in shared.prompts)
    shortest = min(len(p) for p in shared.prompts)
    heads = np.stack([p[:shortest] for p in shared.prompts])
    differ = (heads != heads[0]).any(0)
    length = int(differ.argmax()) if differ.any() else shortest
    if length < LEAST_BEGINNING or length * (count - 1) < LEAST_SAVED * total:
        return 0
    tables = [_cut(t, slice(length)) for t in shared.prompt_routes]
    return length if all(_equal(t, tables[0]) for t in tables) else 0


def _cut(table: np.ndarray | None, span: slice) -> np.ndarray | None:
    return None if table is None else table[span]


def _equal(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


@dataclass(frozen=True)
class _Actions:
    """int64 [N] each: where an action token's logits come from among the forwarded tokens, flattened; whose it is; and which it is."""

    places: np.ndarray
    members: np.ndarray
    targets: np.ndarray


def _actions(members: Sequence[Trajectory], starts: Sequence[int]) -> _Actions:
    """`starts`: where each member's last prompt token was fed."""
    places, owners, targets = [], [], []
    for i, (t, start) in enumerate(zip(members, starts, strict=True)):
        at = np.flatnonzero(t.action_mask[t.prompt_tokens :])
        places.append(start + at)
        owners.append(np.full(len(at), i))
        targets.append(t.tokens[t.prompt_tokens + at])
    return _Actions(*(np.concatenate(part).astype(np.int64) for part in (places, owners, targets)))
