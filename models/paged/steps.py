"""Prefill and decode of a model over a pool. A step of decoding looks at nothing on the host and has shapes of its arguments alone, so a CUDA graph can hold it.

Which tokens are beside a token in a step, in which pieces its prompt came, and where in the pool its rows lie do not change what it computes; in deterministic mode
not by a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from driftline.models.causal_lm import CausalLM
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.model import K3ForCausalLM
from driftline.models.packed import Packed
from driftline.models.paged.places import Places
from driftline.models.paged.pool import Pool

__all__ = ["PagedOutput", "decode", "prefill"]


class PagedOutput(NamedTuple):
    """hidden [N, D] of a prefill or [B, T, D], after the final norm; routes [.., moe layers, k] int64 (no layers without experts)."""

    hidden: torch.Tensor
    routes: torch.Tensor


@torch.no_grad()
def prefill(
    model: CausalLM, pool: Pool, tokens: torch.Tensor, packed: Packed, slots: torch.Tensor, tables: torch.Tensor, context: torch.Tensor,
    contexts: Sequence[int] | None = None,
) -> PagedOutput:
    """The next tokens of S sequences, int64 [N] behind one another as `packed` says, at least one of each: their rows are written, their states advanced.

    Sequence s has context[s] (int32 [S]) tokens in the pool, in pages tables[s] (int32 [S, P]) and, of a model with states, in slot slots[s] (int32 [S]), folded.
    contexts: the same numbers on the host; without them they are read from the device. Raises ValueError naming what does not go together.
    """
    contexts = context.tolist() if contexts is None else contexts
    count = packed.count
    _check(pool, slots, tables, context, count, "context")
    if tuple(tokens.shape) != (packed.tokens,) or min(packed.lengths) < 1 or len(contexts) != count:
        raise ValueError(f"tokens is {tuple(tokens.shape)} and contexts has {len(contexts)} numbers for {count} sequences of {packed.lengths} tokens; "
                         f"give [{packed.tokens}], a context for each, and no sequence without a token")
    places = Places.of_pack(tables, context, contexts, slots, packed, pool.pages, pool.slots)
    room = min(tables.shape[1] * pool.page, pool.positions)
    if max(places.totals) > room:
        raise ValueError(f"a sequence comes to {max(places.totals)} tokens and there is room for {room} (tables has {tables.shape[1]} pages a row); "
                         "give it more pages first, or fewer tokens")
    hidden, routes = _through(model, pool, tokens[None], places)
    return PagedOutput(hidden[0], routes[0])


@torch.no_grad()
def decode(
    model: CausalLM, pool: Pool, tokens: torch.Tensor, slots: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, accepted: torch.Tensor | None = None,
    *, longest: int | None = None,
) -> PagedOutput:
    """The next T tokens of B rows: tokens int64 [B, T], slots int32 [B] (-1: a padding row, whose table is of zeros), tables int32 [B, P], lengths int32 [B]: tokens
    of each row in the pool before these.

    accepted None: T is 1 and the states advance at once. Given, int32 [B]: closed-loop replay with T up to the pool's window. The first accepted[b] tokens of the
    row's last window are folded into its state, which `lengths` counts, and the new window is scored from there: its first token is the last one sampled, the
    others are drafts. accepted is 0 where the slot was just filled or folded. A pool with a window of 1 has nothing to fold: accepted changes nothing there.
    longest: the most tokens that any row comes to with these, where the caller knows; where there are no kernels less of the tables is read then.
    What a window has behind the table's end is computed and lost. Raises ValueError naming what does not go together.
    """
    if tokens.dim() != 2:
        raise ValueError(f"tokens is {tuple(tokens.shape)}; give [B, T]")
    batch, steps = tokens.shape
    _check(pool, slots, tables, lengths, batch, "lengths")
    most = 1 if accepted is None else pool.window
    if not 1 <= steps <= most:
        raise ValueError(f"tokens has {steps} a row; {'without accepted a step has one' if accepted is None else f'the pool scores 1 to {most} at once'}")
    if accepted is not None and (accepted.dtype != torch.int32 or tuple(accepted.shape) != (batch,)):
        raise ValueError(f"accepted is {accepted.dtype} {tuple(accepted.shape)}; give int32 [{batch}]")
    return PagedOutput(*_through(model, pool, tokens, Places.of_rows(tables, lengths, slots, steps, accepted, pool.pages, pool.slots, longest)))


def _through(model: CausalLM, pool: Pool, tokens: torch.Tensor, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
    held = pool.held(places)
    if isinstance(model, K3ForCausalLM):
        return model.over(tokens, held)
    assert isinstance(model, DenseForCausalLM)  # as Pool.make found
    hidden = model.over(tokens, held, places.positions.clamp(max=pool.positions - 1), pool.positions)
    return hidden, tokens.new_zeros(*tokens.shape, 0, 1)


def _check(pool: Pool, slots: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, rows: int, name: str) -> None:
    for what, tensor, shape in (("slots", slots, (rows,)), ("tables", tables, (rows, tables.shape[-1])), (name, lengths, (rows,))):
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape or tensor.device != pool.device:
            raise ValueError(f"{what} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; give int32 {shape} on {pool.device}")
