"""Drafts from a trained drafter. What it keeps of a row is bounded and its own: keys of the last `window` positions that the target computed here, and one output.

It may be missing some (a prefix that was found in a cache, a row that came from elsewhere): it drafts from what it has seen, and not at all for a row whose newest
position it has not. Under MATCH a draft is the drafter's likeliest token, or the one at the target's own draw: the latter agrees more often once the two distributions
are close, and less before. Under REJECTION it is drawn, with a draw of its own stream, and the distribution is handed over.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import StrEnum

import numpy as np
import torch
from torch import nn

from driftline.models.causal_lm import CausalLM
from driftline.models.drafter.model import Drafter as Network
from driftline.models.drafter.model import Keys
from driftline.models.drafter.text import embedding
from driftline.services.rollout.randomness import device_uniforms
from driftline.services.rollout.speculation.drafts import Drafts, Row, Seen
from driftline.services.rollout.speculation.rules import Purpose, stream

__all__ = ["Choice", "TrainedDrafter"]

_NOWHERE = -(1 << 40)


class Choice(StrEnum):
    """How a draft is picked where nobody asks for its distribution: the likeliest token, or the one at the target's own draw."""

    LIKELIEST = "likeliest"
    COUPLED = "coupled"


class TrainedDrafter:
    """`network` drafts for `model`, on the model's device. ConfigError where it was made for another."""

    sampled = True

    def __init__(self, network: Network, model: CausalLM, *, choice: Choice = Choice.LIKELIEST) -> None:
        network.config.check(model.config)
        self.network, self.choice = network.eval(), choice
        self._embed: nn.Module = embedding(model)
        self._device = model.lm_head.weight.device
        self._held = _Held(network, self._device, 16)
        self._slots: dict[Hashable, int] = {}
        self._newest: dict[Hashable, int] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        return self.network.config.taps

    @torch.inference_mode()
    def saw(self, rows: Sequence[Row], seen: Seen) -> None:
        """Tap rows of the rows' last positions, the newest of them right before the row's newest token. ValueError where counts and rows disagree."""
        if len(rows) != len(seen.counts) or sum(seen.counts) != len(seen.features):
            raise ValueError(f"{len(seen.features)} tap rows for counts {list(seen.counts)} of {len(rows)} rows: give each row's, one behind another")
        starts = np.concatenate([[0], np.cumsum(seen.counts)])
        some = [i for i, count in enumerate(seen.counts) if count]
        if not some:
            return
        window = self.network.config.window
        kept = [min(seen.counts[i], window) for i in some]
        width = max(kept)
        source = np.zeros((len(some), width), dtype=np.int64)
        tokens, places = np.zeros_like(source), np.full_like(source, _NOWHERE)
        for line, (i, count) in enumerate(zip(some, kept, strict=True)):
            history = rows[i].history
            source[line, :count] = np.arange(starts[i + 1] - count, starts[i + 1])
            tokens[line, :count] = history[len(history) - count :]
            places[line, :count] = np.arange(len(history) - 1 - count, len(history) - 1)
            self._newest[rows[i].id] = len(history) - 2
        sent = torch.from_numpy(np.stack([source, tokens, places])).to(self._device)
        states = self.network.projected(seen.features[sent[0].flatten()]).view(len(some), width, -1)
        x = self.network.inputs(states, self._embed(sent[1]))
        slots = torch.tensor([self._slot(rows[i].id) for i in some], device=self._device)
        at = sent[2].clamp_min(0)
        self._held.write(slots, sent[2], self.network.keys(x, at))
        last = torch.tensor([count - 1 for count in kept], device=self._device)[:, None, None]
        newest = x.gather(1, last.expand(-1, 1, x.shape[2])), states.gather(1, last.expand(-1, 1, states.shape[2])), at.gather(1, last[..., 0])
        self._held.after[slots] = self._output(slots, *newest, [])[:, 0]

    @torch.inference_mode()
    def propose(self, rows: Sequence[Row], limits: Sequence[int], *, probs: bool = False) -> Drafts:
        width = max(limits, default=0)
        tokens = np.repeat(np.array([[row.history[-1]] for row in rows], dtype=np.int64), width, axis=1)
        counts = np.zeros(len(rows), dtype=np.int32)
        able = [i for i, row in enumerate(rows) if limits[i] > 0 and self._newest.get(row.id) == len(row.history) - 2]
        if not able:
            return Drafts(tokens, counts)
        drawn, proposed = self._chain([rows[i] for i in able], width, probs)
        tokens[able] = drawn
        counts[able] = [limits[i] for i in able]
        if proposed is None:
            return Drafts(tokens, counts)
        whole = proposed.new_zeros(len(rows), width, proposed.shape[2])
        whole[torch.tensor(able, device=self._device)] = proposed
        return Drafts(tokens, counts, whole)

    @torch.inference_mode()
    def retire(self, row: Hashable) -> None:
        self._newest.pop(row, None)
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._held.free(slot)

    def _chain(self, rows: Sequence[Row], width: int, probs: bool) -> tuple[np.ndarray, torch.Tensor | None]:
        """tokens int64 [B, width] and, asked for, the distributions they were drawn from, fp32 [B, width, V]."""
        device, vocabulary = self._device, self.network.config.vocab_size
        slots = torch.tensor([self._slots[row.id] for row in rows], device=device)
        places = torch.tensor([len(row.history) - 2 for row in rows], device=device)
        keys = torch.from_numpy(np.array([row.key for row in rows], dtype=np.uint64).view(np.int64)).to(device)
        positions = torch.tensor([row.position for row in rows], device=device)
        temperature = torch.tensor([row.temperature for row in rows], device=device, dtype=torch.float32)[:, None]
        likeliest = not probs and self.choice is Choice.LIKELIEST
        after, chain = self._held.after[slots], []
        said: list[torch.Tensor] = []
        proposed: list[torch.Tensor] = []
        for step in range(width):
            logits = self.network.logits(after)
            if likeliest:
                chosen = logits.argmax(-1)
            else:
                q = torch.softmax(logits / temperature, -1)
                draws = device_uniforms(stream(keys, Purpose.DRAFT if probs else Purpose.TOKEN), positions + step)
                running = q.double().cumsum(-1)
                chosen = torch.searchsorted(running, draws[:, None] * running[:, -1:], right=True).squeeze(1).clamp_max(q.shape[1] - 1)
                if probs:
                    proposed.append(q.new_zeros(len(rows), vocabulary).index_copy(1, self.network.drafted, q))
            said.append(self.network.drafted[chosen])
            if step + 1 < width:
                at = (places + step + 1)[:, None]
                states = after[:, None]
                x = self.network.inputs(states, self._embed(said[-1])[:, None])
                chain.append(self.network.keys(x, at))
                after = self._output(slots, x, states, at, chain)[:, 0]
        return torch.stack(said, 1).cpu().numpy(), torch.stack(proposed, 1) if probs else None

    def _output(self, slots: torch.Tensor, x: torch.Tensor, states: torch.Tensor, at: torch.Tensor, chain: Sequence[Keys]) -> torch.Tensor:
        """Of one position `at` [B, 1] a row, whose own key is held, or the last of the chain's."""
        held, places = self._held.read(slots)
        first = at - len(chain)  # the newest position that the target computed
        seen = (places <= first) & (places > at - self.network.config.window)
        if chain:
            held = Keys(*(torch.cat([old, *(keys[part] for keys in chain)], 1) for part, old in enumerate(held)))
            seen = torch.cat([seen, seen.new_ones(len(seen), len(chain))], 1)
        q = self.network.queries(x, at)
        return self.network.out(states, self.network.attend(q, held, seen[:, None]))

    def _slot(self, row: Hashable) -> int:
        if row not in self._slots:
            self._slots[row] = self._held.take()
        return self._slots[row]


class _Held:
    """Rings of keys [slots, window, Hkv, D], the position in each place (none: _NOWHERE), and each row's newest output; grown by doubling."""

    def __init__(self, network: Network, device: torch.device, slots: int) -> None:
        config, dtype = network.config, network.fc.weight.dtype
        shape = (slots, config.window, config.num_key_value_heads, config.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.at = torch.full(shape[:2], _NOWHERE, dtype=torch.int64, device=device)
        self.after = torch.zeros(slots, config.hidden_size, dtype=dtype, device=device)
        self._free = list(range(slots))

    def take(self) -> int:
        if not self._free:
            have = len(self.k)
            self.k, self.v, self.after = (torch.cat([x, torch.zeros_like(x)]) for x in (self.k, self.v, self.after))
            self.at = torch.cat([self.at, torch.full_like(self.at, _NOWHERE)])
            self._free = list(range(have, 2 * have))
        return self._free.pop()

    def free(self, slot: int) -> None:
        self.at[slot] = _NOWHERE
        self._free.append(slot)

    def write(self, slots: torch.Tensor, places: torch.Tensor, keys: Keys) -> None:
        """keys [B, T, Hkv, D] at positions [B, T], at most `window` of a row; those that are nowhere are not written."""
        line, column = (places >= 0).nonzero(as_tuple=True)
        at = places[line, column]
        where = slots[line], at % self.k.shape[1]
        self.k[where], self.v[where], self.at[where] = keys.k[line, column], keys.v[line, column], at

    def read(self, slots: torch.Tensor) -> tuple[Keys, torch.Tensor]:
        return Keys(self.k[slots], self.v[slots]), self.at[slots]
