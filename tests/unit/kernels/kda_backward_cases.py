"""Inputs of KDA that its backward is tested on, and the gradients of the recurrence itself by autograd in fp64."""

from __future__ import annotations

import itertools
from enum import Enum
from typing import NamedTuple

import torch

from driftline.kernels.kda.forward import CHUNK, WIDTH, Inputs, Layout, Workspace
from driftline.kernels.kda.reference import bounded_gate, kda_recurrent, l2_normalise

BOUND = -5.0
NAMES = ("dq", "dk", "dv", "dz", "dbeta", "da_log", "ddt_bias", "dinitial_state")


class Kind(Enum):
    """Of gates and keys. SLOW: about -0.03 nats a token, as at initialisation; FAST: near the bound; SAME, NEAR: one key in every token, with 2 % noise."""

    RANDOM = "random"
    SLOW = "slow"
    FAST = "fast"
    SAME = "same"
    NEAR = "near"


class Case(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    z: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    initial: torch.Tensor
    do: torch.Tensor
    dfinal: torch.Tensor
    bounds: torch.Tensor | None


def case(batch: int, steps: int, heads: int, kind: Kind = Kind.RANDOM, *, bounds: tuple[int, ...] | None = None, seed: int = 0, device: str = "cpu",
         dtype: torch.dtype = torch.bfloat16, width: int = 128) -> Case:
    random = torch.Generator(device).manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device)

    q, k, v, z, do = (noise(batch, steps, heads, width) for _ in range(5))
    beta = noise(batch, steps, heads)
    if kind in (Kind.SAME, Kind.NEAR):
        k = k[:, :1].expand_as(k) + (0.02 if kind is Kind.NEAR else 0.0) * noise(batch, steps, heads, width)
        beta, z = beta * 0 + 2.2, z * 0 - 4.0
    z = z + {Kind.SLOW: -5.0, Kind.FAST: 6.0}.get(kind, 0.0)
    sequences = batch if bounds is None else len(bounds) - 1
    initial, dfinal = (0.3 * noise(sequences, heads, width, width) for _ in range(2))
    q, k, v, z, beta, do = (x.to(dtype).contiguous() for x in (q, k, v, z, beta, do))
    cut = None if bounds is None else torch.tensor(bounds, dtype=torch.int64, device=device)
    return Case(q, k, v, z, beta, 0.3 * noise(heads), 0.5 * noise(heads * width), initial, do, dfinal, cut)


def gradients(one: Case) -> tuple[torch.Tensor, ...]:
    """Of every input, through the recurrence in fp64."""
    kept = (one.q, one.k, one.v, one.z, one.beta, one.a_log, one.dt_bias, one.initial)
    leaves = [x.double().detach().requires_grad_() for x in kept]
    q, k, v, z, beta, a_log, dt_bias, initial = leaves
    batch, steps, heads, width = q.shape
    g = bounded_gate(z + dt_bias.view(heads, width), a_log, BOUND)
    ends = [n * steps for n in range(batch + 1)] if one.bounds is None else one.bounds.tolist()
    flat = [x.flatten(0, 1)[None] for x in (l2_normalise(q), l2_normalise(k), v, g, torch.sigmoid(beta))]
    do = one.do.double().flatten(0, 1)[None]
    loss = torch.zeros((), dtype=torch.float64, device=q.device)
    for n, (begin, end) in enumerate(itertools.pairwise(ends)):
        state = initial[n : n + 1]
        if end > begin:
            out, state = kda_recurrent(*(x[:, begin:end] for x in flat), state)
            loss = loss + (out * do[:, begin:end]).sum()
        loss = loss + (state[0] * one.dfinal[n].double()).sum()
    return torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)


def rounding_floor(one: Case) -> float:
    """The error of the query's gradient that any form by chunks of 64 has whose matrix operands are bfloat16, everything else exact: rounded are the state a chunk
    starts from, what is written in it, its products with the output's gradient, and the keys. With one key in every token the terms of a chunk take one another
    back, and so this is several times the rounding of a number. Rows of one length; [B, T, H, 128]."""
    assert one.bounds is None
    q, k, v, z, do = (x.double() for x in (one.q, one.k, one.v, one.z, one.do))
    steps, heads, width = q.shape[1:]
    g = bounded_gate(z + one.dt_bias.double().view(heads, width), one.a_log.double(), BOUND)
    size = torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6)
    unit, keys, strength = q * size, l2_normalise(k), torch.sigmoid(one.beta.double())[..., None]
    state, found, wanted = one.initial.double(), torch.zeros_like(q), torch.zeros_like(q)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16).double()

    for begin in range(0, steps, 64):
        span = slice(begin, min(begin + 64, steps))
        opening, written = state, []
        for t in range(span.start, span.stop):
            state = state * g[:, t, :, :, None].exp()
            written.append(strength[:, t] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", keys[:, t], state)))
            state = state + keys[:, t, :, :, None] * written[-1][..., None, :]
        kept, rise = torch.stack(written, 1), g[:, span].cumsum(1)
        for out, cut in ((found, rounded), (wanted, lambda x: x)):
            scores = cut(torch.einsum("bthv,bshv->bhts", do[:, span], cut(kept)).tril())
            dq = torch.einsum("bthv,bhkv->bthk", do[:, span], cut(opening)) + torch.einsum("bhts,bshk->bthk", scores, cut(keys[:, span] * (-rise).exp()))
            dq = dq * rise.exp()
            out[:, span] = size[:, span] * (dq - unit[:, span] * (unit[:, span] * dq).sum(-1, keepdim=True))
    return ratio(found, wanted)


def ratio(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root of the mean square error over that of what is wanted; infinite for anything that is not finite."""
    error = ((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)).item()
    return error if error == error else float("inf")


def errors(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> dict[str, float]:
    return {name: ratio(a, b) for name, a, b in zip(NAMES, found, wanted, strict=True)}


def prepared(x: Inputs, layout: Layout, space: Workspace, first: int, last: int) -> None:
    """What the forward's preparation leaves in a workspace, in torch: for where its kernel cannot be interpreted."""
    for piece in range(first, last):
        row, begin = (piece % layout.sequences, piece // layout.sequences * CHUNK) if layout.table is None else (0, int(layout.table[piece, 1]))
        count = min(CHUNK, x.q.shape[1] - begin) if layout.table is None else int(layout.table[piece, 2])
        if layout.table is not None and int(layout.table[piece, 0]) < 0:
            continue
        q, k, z = (t[row, begin : begin + count].float() for t in (x.q, x.k, x.z))
        decay = bounded_gate(z + x.dt_bias.view(z.shape[1:]), x.a_log, x.lower_bound).cumsum(0)
        beta = torch.sigmoid(x.beta[row, begin : begin + count].float())
        queries, keys, grow = l2_normalise(q) * WIDTH**-0.5, l2_normalise(k), torch.exp(decay)
        apart = torch.exp((decay[:, None] - decay[None]).clamp(max=0.0))
        scores, pairs = (torch.einsum("ihc,jhc,ijhc->hij", left, keys, apart) for left in (queries, keys))
        at = piece - first
        for tile, rows in ((space.k_grow, keys * grow), (space.q_grow, queries * grow), (space.k_tail, keys * torch.exp(decay[-1] - decay))):
            tile[at].zero_()
            tile[at, :, :count] = rows.transpose(0, 1).bfloat16()
        space.a_qk[at].zero_()
        space.a_qk[at, :, :count, :count] = scores.tril().bfloat16()
        space.inverse[at] = torch.eye(CHUNK)
        lower = torch.eye(count) + (pairs * beta.T[..., None]).tril(-1)
        space.inverse[at, :, :count, :count] = torch.linalg.inv(lower).bfloat16()
        space.decay[at].view(-1, WIDTH).copy_(torch.exp(decay[-1]))
        space.betas[at].view(-1, CHUNK).zero_()[:, :count] = beta.T
