"""Log-probabilities of a micro-batch: each group's prompt once, its cache forked to the members, completions after it.

The same forward serves the trainer, which differentiates it, and the numerics probe. Shapes: G groups, M members of them, P the longest prompt, R the longest
completion, N action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from driftline.messages.types import Trajectory
from driftline.models.model import K3ForCausalLM
from driftline.models.tokenizer import ByteTokenizer
from driftline.services.learner.assembler import BatchGroup

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


def forward_groups(model: K3ForCausalLM, groups: Sequence[BatchGroup], first: int, *, replay: bool = False) -> FlatTokens:
    """Run the groups' members; sequences are numbered from `first`. `replay` uses the recorded experts where every member has them; a shared prompt takes
    those of its group's first member."""
    device = next(model.parameters()).device
    members: list[Trajectory] = []
    prompts: list[np.ndarray] = []
    owner: list[int] = []
    for i, group in enumerate(groups):
        shared = group.members[0].trajectory
        prompts.append(shared.tokens[: shared.prompt_tokens - 1])
        for graded in group.members:
            members.append(graded.trajectory)
            owner.append(i)
    # The last prompt token starts every completion, so one pass over it yields the first sampled token's logits.
    inputs = [t.tokens[t.prompt_tokens - 1 : -1] for t in members]
    prompt_tokens, prompt_lengths = _pad(prompts, device)
    tokens, lengths = _pad(inputs, device)
    replay = replay and all(t.routes is not None for t in members)
    cache = None
    if prompt_tokens.shape[1]:
        spans = [(g.members[0].trajectory, 0, len(p)) for g, p in zip(groups, prompts, strict=True)]
        ids = _recorded_routes(spans, prompt_tokens.shape[1], device) if replay else None
        cache = model(prompt_tokens, lengths=prompt_lengths, replay=ids).cache.take(torch.tensor(owner, device=device))
    ids = _recorded_routes([(t, t.prompt_tokens - 1, len(t.tokens) - 1) for t in members], tokens.shape[1], device) if replay else None
    out = model(tokens, lengths=lengths, cache=cache, replay=ids)
    mask = np.zeros(tuple(tokens.shape), dtype=bool)
    for i, t in enumerate(members):
        mask[i, : len(inputs[i])] = t.action_mask[t.prompt_tokens :]
    at = torch.from_numpy(mask).to(device)
    targets, _ = _pad([t.tokens[t.prompt_tokens :] for t in members], device)
    temperature = torch.tensor([t.temperature for t in members], device=device)
    row = torch.arange(len(members), device=device)[:, None].expand_as(at)[at]
    logp, entropy = model.logprobs(out.hidden[at], targets[at], temperature[row])
    behave = np.concatenate([t.logprobs[t.action_mask] for t in members])
    versions = np.concatenate([t.versions[t.action_mask] for t in members])
    return FlatTokens(logp, entropy, torch.from_numpy(behave).to(device), row + first, versions)


def _pad(rows: Sequence[np.ndarray], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded int64 [len(rows), longest], and the lengths."""
    width = max(len(r) for r in rows)
    out = np.full((len(rows), width), ByteTokenizer.pad, dtype=np.int64)
    for i, r in enumerate(rows):
        out[i, : len(r)] = r
    return torch.from_numpy(out).to(device), torch.tensor([len(r) for r in rows], device=device)


def _recorded_routes(spans: Sequence[tuple[Trajectory, int, int]], width: int, device: torch.device) -> torch.Tensor:
    """Recorded expert ids [len(spans), width, layers, k] of the tokens start..end of each trajectory, which has them."""
    tables = [t.routes[start:end] for t, start, end in spans if t.routes is not None]
    out = np.zeros((len(tables), width, *tables[0].shape[1:]), dtype=np.int64)
    # Padding replays k distinct experts: its output is never read, but gates must stay finite.
    out[:] = np.arange(out.shape[-1])
    for i, table in enumerate(tables):
        out[i, : len(table)] = table
    return torch.from_numpy(out).to(device)
