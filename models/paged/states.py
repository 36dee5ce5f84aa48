"""What a pool holds of one layer, and a step's tokens against it: the recurrent states of KDA, latent rows, keys and values.

The pool's kernels run where they take the shapes. Elsewhere the states of a step's rows are taken out, go through the operators that a forward uses, and are put
back, so that a CPU's bits are a forward's. Neither form reads anything on the host while decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.kda import PADDING, kda
from driftline.kernels.kda_decode import Window, fold, kda_decode, replay_decode
from driftline.kernels.short_conv import short_conv, short_conv_decode, short_conv_replay
from driftline.models.held import Decay
from driftline.models.latent_attention import Heads
from driftline.models.packed_layers import convolve_packed
from driftline.models.paged.grouped import attend_grouped
from driftline.models.paged.latent import attend_latents
from driftline.models.paged.places import Places

__all__ = ["KdaStates", "KeyValuePages", "LatentPages", "PagedKda", "PagedKeyValues", "PagedLatents"]

_KERNEL_WIDTH = 128


@dataclass(frozen=True)
class KdaStates:
    """state [slots + 1, H, K, K]; history [slots + 1, W - 1 + drafts, 3 H K]: the convolution's inputs before a slot's window, and the window; window: what is
    to be folded of it, None where a step never has more than one token. The last slot is nobody's."""

    state: torch.Tensor
    history: torch.Tensor
    window: Window | None
    carried: int

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What a folded slot holds: its state, and the convolution's last inputs [slots + 1, W - 1, 3 H K]."""
        return self.state, self.history[:, : self.carried]

    def everything(self) -> list[torch.Tensor]:
        """With what belongs to windows."""
        return [self.state, self.history, *(() if self.window is None else (self.window.k, self.window.v, self.window.z, self.window.beta))]

    @property
    def nbytes(self) -> int:
        """Of one slot."""
        return sum(part[0].nbytes for part in self.everything())

    def kernels(self, like: torch.Tensor) -> bool:
        """Whether the pool's kernels take inputs as `like`."""
        return like.dtype == torch.bfloat16 and self.state.dtype == torch.float32 and self.state.shape[-1] == _KERNEL_WIDTH and runs_triton(like, self.state)

    def fold(self, slots: torch.Tensor, accepted: torch.Tensor, decay: Decay) -> None:
        """Bring the states of `slots` up to date with what was accepted of their windows."""
        if self.window is None:
            return
        slot, count = slots.long().masked_fill(slots < 0, len(self.state) - 1), accepted.clamp(0, self.window.capacity).long()
        if self.kernels(self.window.k):
            fold(*decay.of(self.state.dtype), self.state, slots, self.window, accepted, lower_bound=decay.lower_bound)
        else:
            self.state.index_copy_(0, slot, self.folded(slot, count, decay))
        self.history[slot, : self.carried] = self.tail(slot, count)

    def tail(self, slot: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """[B, W - 1, 3 H K]: the inputs before the first token that was not accepted, behind `count` of the window."""
        return self.history[slot[:, None], count[:, None] + torch.arange(self.carried, device=slot.device)]

    def folded(self, slot: torch.Tensor, count: torch.Tensor, decay: Decay) -> torch.Tensor:
        """[B, H, K, K]: the states after the first `count` tokens of their windows."""
        assert self.window is not None
        out = torch.arange(self.window.capacity, device=slot.device) >= count[:, None]
        k, v, z, beta = (held.index_select(0, slot) for held in (self.window.k, self.window.v, self.window.z, self.window.beta))
        k, v, z = (held.masked_fill_(out[..., None, None], fill) for held, fill in ((k, 0), (v, 0), (z, PADDING)))
        beta = beta.masked_fill_(out[..., None], PADDING)
        _, state = kda(k, k, v, z, beta, decay.a_log, decay.dt_bias, lower_bound=decay.lower_bound, initial_state=self.state.index_select(0, slot))
        return state


@dataclass(frozen=True)
class PagedKda:
    """`HeldKda` of a step."""

    pool: KdaStates
    places: Places

    def advanced(self, raw: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, decay: Decay) -> torch.Tensor:
        if self.places.packed is not None:
            return self._prefilled(raw, weight, z, beta, decay)
        verify = self.pool.window is not None and self.places.accepted is not None
        form = self._by_kernels if self.pool.kernels(raw) else self._by_operators
        return form(raw, weight, z, beta, decay, verify)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return mixed.view(*mixed.shape[:2], 3, *self.pool.state.shape[1:3]).unbind(2)

    def _prefilled(self, raw: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, decay: Decay) -> torch.Tensor:
        pool, slot, packed = self.pool, self.places.slot, self.places.packed
        assert packed is not None
        mixed, tail = convolve_packed(raw, weight, pool.history[:, : pool.carried].index_select(0, slot), packed)
        q, k, v = self._heads(mixed)
        o, state = kda(q, k, v, z, beta, decay.a_log, decay.dt_bias, lower_bound=decay.lower_bound, initial_state=pool.state.index_select(0, slot), cu_seqlens=packed.bounds32)
        pool.history[:, : pool.carried].index_copy_(0, slot, tail)
        pool.state.index_copy_(0, slot, state)
        return o

    def _by_kernels(self, raw: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, decay: Decay, verify: bool) -> torch.Tensor:
        pool, slots, accepted = self.pool, self.places.slots, self.places.accepted
        parameters = *decay.of(pool.state.dtype), pool.state, slots
        if verify:
            assert pool.window is not None
            assert accepted is not None
            q, k, v = self._heads(short_conv_replay(raw, weight, pool.history, slots, accepted))
            return replay_decode(q, k, v, z, beta, *parameters, pool.window, accepted, lower_bound=decay.lower_bound)
        if pool.window is None:
            mixed = short_conv_decode(raw[:, 0], weight, pool.history, slots)[:, None]
        else:
            mixed = short_conv_replay(raw, weight, pool.history, slots, torch.zeros_like(slots))
            slot = self.places.slot
            pool.history[slot, : pool.carried] = pool.history[slot, 1 : 1 + pool.carried]
        q, k, v = (x[:, 0] for x in self._heads(mixed))
        return kda_decode(q, k, v, z[:, 0], beta[:, 0], *parameters, lower_bound=decay.lower_bound)[:, None]

    def _by_operators(self, raw: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, decay: Decay, verify: bool) -> torch.Tensor:
        pool, slot = self.pool, self.places.slot
        if not verify:
            mixed, tail = short_conv(raw, weight, pool.history[:, : pool.carried].index_select(0, slot))
            q, k, v = self._heads(mixed)
            o, state = kda(q, k, v, z, beta, decay.a_log, decay.dt_bias, lower_bound=decay.lower_bound, initial_state=pool.state.index_select(0, slot))
            pool.history[:, : pool.carried].index_copy_(0, slot, tail)
            pool.state.index_copy_(0, slot, state)
            return o
        window, accepted, steps = pool.window, self.places.accepted, raw.shape[1]
        assert window is not None
        assert accepted is not None
        count = accepted.clamp(0, window.capacity).long()
        tail, state = pool.tail(slot, count), pool.folded(slot, count, decay)
        q, k, v = self._heads(short_conv(raw, weight, tail)[0])
        o, _ = kda(q, k, v, z, beta, decay.a_log, decay.dt_bias, lower_bound=decay.lower_bound, initial_state=state)
        pool.state.index_copy_(0, slot, state)
        pool.history[slot, : pool.carried + steps] = torch.cat([tail, raw], dim=1)
        for held, new in ((window.k, k), (window.v, v), (window.z, z), (window.beta, beta)):
            held[slot, :steps] = new
        return o


@dataclass(frozen=True)
class LatentPages:
    """rows [pages, PAGE, rank + shared]: normalised latents and shared keys."""

    rows: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.rows,)


@dataclass(frozen=True)
class PagedLatents:
    """`HeldLatents` of a step."""

    pool: LatentPages
    places: Places

    def attended(self, q: torch.Tensor, new: torch.Tensor, heads: Heads) -> torch.Tensor:
        self.pool.rows.flatten(0, 1).index_copy_(0, self.places.new, new.flatten(0, 1))
        return attend_latents(q, self.pool.rows, heads, self.places)


@dataclass(frozen=True)
class KeyValuePages:
    """keys [pages, PAGE, Hkv, D], rotated to their positions, and values."""

    keys: torch.Tensor
    values: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.values


@dataclass(frozen=True)
class PagedKeyValues:
    """`HeldKeyValues` of a step."""

    pool: KeyValuePages
    places: Places

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        for pages, new in ((self.pool.keys, k), (self.pool.values, v)):
            pages.flatten(0, 1).index_copy_(0, self.places.new, new.flatten(0, 1))
        return attend_grouped(q, self.pool.keys, self.pool.values, scale, self.places)
