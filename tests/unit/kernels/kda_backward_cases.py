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
