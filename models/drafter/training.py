"""Training a drafter as it will be used: unrolled over its own outputs, against the target's own distributions at the sampling temperature.

At step k of the unrolling a position reads the drafter's output of step k - 1 at the position before, and attends to the target's features up to where the chain began
and to the chain behind that: what a chain of drafts sees (EAGLE-3's training-time test, arXiv:2503.01840). Tokens are those that were sampled, so a later step is
judged where the earlier ones were right, which is where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from driftline.messages.errors import ConfigError
from driftline.models.causal_lm import CausalLM
from driftline.models.drafter.model import Drafter, Keys
from driftline.models.drafter.taps import Taps
from driftline.models.drafter.text import Observed, Text, embedding, observed

__all__ = ["Schedule", "Trained", "losses", "train", "unrolled"]


@dataclass(frozen=True)
class Schedule:
    """steps of batches of `texts` texts; unrolled: drafts in a chain; decay: weight of each next draft's loss. remember: the target computes each batch once, and
    what it computed is held: (taps + 1) * D numbers a token. Raises ConfigError."""

    steps: int = 400
    texts: int = 16
    lr: float = 1e-3
    unrolled: int = 3
    decay: float = 0.8
    warmup: int = 20
    seed: int = 0
    remember: bool = True

    def __post_init__(self) -> None:
        for field in ("steps", "texts", "unrolled"):
            if getattr(self, field) < 1:
                raise ConfigError("at least one", field=field, value=getattr(self, field), remedy="a positive number")
        if not self.lr > 0:
            raise ConfigError("no step would change anything", field="lr", value=self.lr, remedy="e.g. 1e-3")

    def rate(self, step: int) -> float:
        """The learning rate's factor: linear up, a cosine down to a tenth."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - self.warmup) / max(1, self.steps - self.warmup)))


@dataclass(frozen=True)
class Trained:
    """The last step's losses in nats, one for each place of the chain."""

    steps: int
    losses: tuple[float, ...]


def unrolled(drafter: Drafter, features: torch.Tensor, embedded: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """Of each step k < steps: outputs [S, T, D], of which position p guesses token p + 2 in a chain that began at p - k (p < k: meaningless).

    features [S, T, F] of positions, embedded [S, T, D] of the tokens behind them.
    """
    places = torch.arange(features.shape[1], device=features.device)
    back = places[:, None] - places
    states = drafter.projected(features)
    chain: list[Keys] = []
    held: Keys | None = None
    for k in range(steps):
        x = drafter.inputs(states, embedded)
        q, own = drafter.queries(x, places), drafter.keys(x, places)
        if held is None:
            held = own
        else:
            chain = [Keys(*(_later(part) for part in keys)) for keys in chain]
            chain.append(own)
        seen = (back >= k) & (back < drafter.config.window)
        states = drafter.out(states, _attended(drafter, q, held, seen, chain))
        yield states
        states = _later(states)


def _later(x: torch.Tensor) -> torch.Tensor:
    """x [S, T, ...] of the position before."""
    return torch.cat([x.new_zeros(x.shape[0], 1, *x.shape[2:]), x[:, :-1]], 1)


def _attended(drafter: Drafter, q: torch.Tensor, held: Keys, seen: torch.Tensor, chain: Sequence[Keys]) -> torch.Tensor:
    """Of every position over the features' keys where seen [T, T], and one key of each step of its chain."""
    group = drafter.config.num_attention_heads // drafter.config.num_key_value_heads
    wide = [Keys(*(part.repeat_interleave(group, 2) for part in keys)) for keys in (held, *chain)]
    scores = torch.einsum("bthd,bnhd->bhtn", q, wide[0].k).float().masked_fill(~seen, -torch.inf)
    own = [torch.einsum("bthd,bthd->bht", q, keys.k).float()[..., None] for keys in wide[1:]]
    weights = torch.cat([scores, *own], -1).softmax(-1).to(q.dtype)
    out = torch.einsum("bhtn,bnhd->bthd", weights[..., : seen.shape[1]], wide[0].v)
    for i, keys in enumerate(wide[1:]):
        out = out + weights[..., seen.shape[1] + i].transpose(1, 2)[..., None] * keys.v
    return out


def losses(drafter: Drafter, model: CausalLM, seen: Observed, steps: int) -> list[torch.Tensor]:
    """Of each place of the chain, the mean cross-entropy to the target's distribution over the judged positions; tokens that cannot be drafted weigh nothing."""
    rows, places = seen.judged.nonzero(as_tuple=True)
    with torch.no_grad():
        embedded = embedding(model)(seen.tokens[:, 1:])
        temperatures = seen.temperatures[rows, None]
        wanted = (model.logits(seen.hidden[rows, places + 1]) / temperatures).softmax(-1)[:, drafter.drafted]
    out = []
    for k, after in enumerate(unrolled(drafter, seen.features, embedded, steps)):
        begun = (places >= k).nonzero().squeeze(1)  # a chain of k + 1 drafts ends there
        if not begun.numel():
            out.append(after.sum() * 0.0)
            continue
        guess = torch.log_softmax(drafter.logits(after[rows[begun], places[begun]]) / temperatures[begun], -1)
        out.append(-(wanted[begun] * guess).sum(-1).mean())
    return out


def train(
    drafter: Drafter, model: CausalLM, taps: Taps, texts: Sequence[Text], schedule: Schedule, *, say: Callable[[int, Sequence[float]], None] | None = None,
) -> Trained:
    """Train in place on texts of the target, in an order that `schedule.seed` settles. `say` hears of every tenth of the steps. Raises ConfigError where no text
    has 3 tokens, of which one was sampled."""
    usable = [text for text in texts if len(text.tokens) >= 3 and text.sampled > 0]
    if not usable:
        raise ConfigError("no text with 3 tokens and a sampled one", field="texts", value=len(texts), remedy="sample some")
    rng = np.random.default_rng(schedule.seed)
    batches = _batches(usable, schedule.texts, rng)
    held: dict[int, Observed] = {}
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=schedule.lr, betas=(0.9, 0.95), weight_decay=0.0)
    drafter.train()
    last: tuple[float, ...] = ()
    order = np.arange(len(batches))
    for step in range(schedule.steps):
        if step % len(batches) == 0:
            order = rng.permutation(len(batches))
        which = int(order[step % len(batches)])
        seen = held.get(which)
        if seen is None:
            seen = observed(model, taps, batches[which])
            if schedule.remember:
                held[which] = seen
        parts = losses(drafter, model, seen, schedule.unrolled)
        total = sum((part * schedule.decay**k for k, part in enumerate(parts)), torch.zeros((), device=parts[0].device))
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr * schedule.rate(step)
        optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % max(1, schedule.steps // 10) == 0 or step + 1 == schedule.steps:
            last = tuple(float(part.detach()) for part in parts)
            if say is not None:
                say(step + 1, last)
    drafter.eval()
    return Trained(schedule.steps, last)


def _batches(texts: Sequence[Text], size: int, rng: np.random.Generator) -> list[list[Text]]:
    """Batches of texts of similar lengths, so that little of them is padding; which of equal ones go together is drawn."""
    order = sorted(rng.permutation(len(texts)).tolist(), key=lambda i: len(texts[i].tokens))
    return [[texts[i] for i in order[start : start + size]] for start in range(0, len(order), size)]
