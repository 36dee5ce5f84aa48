"""The hand-over: everything an engine needs to go on behind tokens that another engine computed.

Guarantees: what is placed are the exporter's bits (rows of attention layers, KDA states and convolution inputs, all of the same position), so in deterministic
mode the tokens that follow are those of an engine that did both; a hand-over of another model, layout, dtype or version is refused, with what differs, before a page is taken;
what was placed may still be evicted, and is then computed again: memory decides how fast, never what.

It needs nothing of an engine but its cache and its pool: a finished request leaves its rows as a leaf, from there they are exported, and to
such a leaf they are imported.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import xxhash

from driftline.messages.errors import IntegrityError
from driftline.models.causal_lm import CausalLM
from driftline.models.paged import PAGE, Pool
from driftline.services.rollout.engine import Request
from driftline.services.rollout.prefix import CacheKey, PrefixCache

__all__ = ["Handover", "HandoverRefused", "Layout", "Part", "Places", "export", "layout_of", "place"]


class HandoverRefused(IntegrityError):
    """It is of another model, layout, dtype, adapter or version than the engine's."""


class Part(NamedTuple):
    """A tensor of a layer: shape of one row or one state, and dtype by torch's name."""

    shape: tuple[int, ...]
    dtype: str


class Layout(NamedTuple):
    """base: the model's kind and a name of its whole configuration. rows: of a token, states: of a sequence, layer after layer."""

    base: str
    rows: tuple[Part, ...]
    states: tuple[Part, ...]


@dataclass(frozen=True)
class Handover:
    """`request` and the first token that was sampled for it: first_token behind the prompt, with first_logprob in nats. `version`: of the weights that computed
    every row and this token. rows: of the prompt's P tokens, [P, ...] each; states [...] each, exactly behind them; both on the host. routes int16 [P, layers, k]
    where they are recorded. cached_tokens: of the prompt's, that the exporter did not compute for it."""

    request: Request
    layout: Layout
    version: int
    first_token: int
    first_logprob: float
    cached_tokens: int
    rows: tuple[torch.Tensor, ...]
    states: tuple[torch.Tensor, ...]
    routes: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.rows, *self.states)) + (0 if self.routes is None else self.routes.nbytes)

    @property
    def prompt(self) -> array[int]:
        return _prompt(self.request)


class Places(Protocol):
    """What an engine has, as far as a hand-over needs it."""

    model: CausalLM
    version: int
    pool: Pool
    cache: PrefixCache

    def cache_key(self, adapter: str = "") -> CacheKey: ...


def layout_of(places: Places) -> Layout:
    """Of what the engine's pool holds."""
    name = xxhash.xxh3_128_hexdigest(repr(places.model.config).encode())
    pages, states = places.pool.export_pages([0]), places.pool.export_states([0]) if places.pool.state_bytes else []
    return Layout(
        f"{type(places.model).__name__}/{name}", tuple(Part(tuple(t.shape[2:]), str(t.dtype)) for t in pages), tuple(Part(tuple(t.shape[1:]), str(t.dtype)) for t in states)
    )


@torch.inference_mode()
def export(places: Places, request: Request, first_token: int, first_logprob: float, cached_tokens: int) -> Handover | None:
    """The rows and states of a prompt that this engine just computed. None: they were evicted already, and the prompt must be computed again."""
    prompt = _prompt(request)
    lease = places.cache.begin([places.cache_key(request.adapter)], prompt + array("i", [first_token]))
    if lease is None:
        return None
    try:
        if lease.hit != len(prompt):
            return None
        pool, count = places.pool, -(-len(prompt) // PAGE)
        rows = tuple(t.flatten(0, 1)[: len(prompt)].cpu() for t in pool.export_pages(lease.pages[:count]))
        states = tuple(t[0].cpu() for t in pool.export_states([lease.slot])) if pool.state_bytes else ()
        return Handover(request, layout_of(places), places.version, first_token, first_logprob, cached_tokens, rows, states, lease.routes)
    finally:
        places.cache.end(lease)


@torch.inference_mode()
def place(places: Places, handover: Handover) -> bool:
    """Put it where the engine's next request that begins with the prompt finds it. False: no memory now. Raises HandoverRefused, before anything is taken, and
    ValueError for rows or states that are not the prompt's."""
    _accepted(places, handover)
    prompt, key = handover.prompt, places.cache_key(handover.request.adapter)
    lease = places.cache.begin([key], prompt[:1])  # of one token nothing is ever hit
    if lease is None:
        return False
    if not places.cache.grow(lease, len(prompt)):
        places.cache.end(lease)
        return False
    try:
        pool = places.pool
        pool.import_pages(lease.pages, [_paged(t, len(lease.pages)) for t in handover.rows])
        if pool.state_bytes:
            pool.import_states([lease.slot], [t[None] for t in handover.states])
    except BaseException:
        places.cache.end(lease)
        raise
    places.cache.end(lease, key, prompt, len(prompt), routes=handover.routes)
    return True


def _prompt(request: Request) -> array[int]:
    return array("i", (int(t) for t in request.tokens))


def _accepted(places: Places, handover: Handover) -> None:
    ours, theirs = layout_of(places), handover.layout
    for field, found, wanted in (
        ("base", theirs.base, ours.base), ("rows", theirs.rows, ours.rows), ("states", theirs.states, ours.states), ("version", handover.version, places.version),
    ):
        if found != wanted:
            raise HandoverRefused(f"this engine has {_first_difference(found, wanted)}", field=f"hand-over {handover.request.id}: {field}", value=found,
                                  remedy="compute the prompt again where it is decoded, or give both halves the same model and version")
    if places.cache.routed and handover.routes is None:
        raise HandoverRefused("this engine records routes", field=f"hand-over {handover.request.id}: routes", value=None,
                              remedy="let the engine that computes prompts record them too")
    count = len(handover.request.tokens)
    shapes = [tuple(t.shape) for t in (*handover.rows, *handover.states)]
    wanted_shapes = [*((count, *part.shape) for part in theirs.rows), *(part.shape for part in theirs.states)]
    if shapes != wanted_shapes:
        raise ValueError(f"hand-over {handover.request.id} holds {shapes[:2]}...; a prompt of {count} tokens in its layout is {wanted_shapes[:2]}...")


def _first_difference(found: object, wanted: object) -> object:
    if isinstance(found, tuple) and isinstance(wanted, tuple) and len(found) == len(wanted):
        return next((f"{w} at layer tensor {i}" for i, (f, w) in enumerate(zip(found, wanted, strict=True)) if f != w), wanted)
    return wanted


def _paged(rows: torch.Tensor, pages: int) -> torch.Tensor:
    """rows [N, ...] as [pages, PAGE, ...], zeros behind the last."""
    padded = rows.new_zeros(pages * PAGE, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded.view(pages, PAGE, *rows.shape[1:])
