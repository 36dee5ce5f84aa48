"""KDA's backward in plain torch, by chunks of 16: the formulas that the kernels follow, in the inputs' fp32 or fp64.

For one chunk, with S the state before it, dS the gradient of the state after it, q^, k^ the unit queries and keys, scale = K^-1/2 and G the inclusive
sum of g:

    q' = scale q^ e^G      k' = k^ e^G      k- = k^ e^-G      k_end = k^ e^(G_C - G)
    T = (I + tril(beta k' k-^T, -1))^-1     P = tril(q' k-^T)     V' = T beta (v - k' S)
    dX = T^T (P^T do + k_end dS)            dv = beta dX          dbeta = <dX, V'> / beta, so its logit's is (1 - beta) <dX, V'>
    D = tril(do V'^T)                       E = -tril(dv V'^T, -1)
    dq' = do S^T + D k-     dk' = -dv S^T + E k-     dk- = D^T q' + E^T k'     dk_end = V' dS^T
    dG = q' dq' + k' dk' - k- dk- - k_end dk_end,     its last row more by e^(G_C) <dS, S> + sum k_end dk_end
    dS <- q'^T do + e^(G_C) dS - k'^T dv              dg = the sums of dG from each row on

and through g = bound sigmoid(exp(A_log) (z + dt_bias)) and x / |x|. That V' = T X makes the inverse's gradient -dX V'^T: no product with T is left.
"""

from __future__ import annotations

import itertools

import torch

from driftline.kernels.kda.chunk import CHUNK
from driftline.kernels.kda.reference import l2_normalise

__all__ = ["kda_backward_reference"]

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _length(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _through_norm(x: torch.Tensor, dunit: torch.Tensor) -> torch.Tensor:
    unit = l2_normalise(x)
    return _length(x) * (dunit - unit * (unit * dunit).sum(-1, keepdim=True))


def _sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, strength: torch.Tensor, state: torch.Tensor, do: torch.Tensor,
              dstate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sequence, heads first: q, k (unit), g [H, T, K], v, do [H, T, V], strength [H, T, 1], state, dstate [H, K, V]. Returns dq, dk, dv, dg, the
    gradient of strength's logit [H, T] and that of the initial state."""
    steps, width = q.shape[1:]
    scale = width**-0.5
    spans = [slice(at, min(at + CHUNK, steps)) for at in range(0, steps, CHUNK)]
    kept = []
    for span in spans:
        cum = g[:, span].cumsum(1)
        rise, back, end = cum.exp(), (-cum).exp(), (cum[:, -1:] - cum).exp()
        q_rise, k_rise, k_back, k_end = scale * q[:, span] * rise, k[:, span] * rise, k[:, span] * back, k[:, span] * end
        a = (strength[:, span] * (k_rise @ k_back.mT)).tril(-1)
        inverse = torch.linalg.inv(a + torch.eye(a.shape[-1], dtype=a.dtype, device=a.device))
        inner = inverse @ (strength[:, span] * (v[:, span] - k_rise @ state))
        shrink = cum[:, -1, :, None].exp()
        kept.append((rise, back, end, q_rise, k_rise, k_back, k_end, inverse, inner, state, shrink))
        state = shrink * state + k_end.mT @ inner
    dq, dk, dv, dg = (torch.empty_like(x) for x in (q, k, v, g))
    dlogit = torch.empty_like(strength[..., 0])
    for span, (rise, back, end, q_rise, k_rise, k_back, k_end, inverse, inner, before, shrink) in zip(reversed(spans), reversed(kept), strict=True):
        out = do[:, span]
        dx = inverse.mT @ ((q_rise @ k_back.mT).tril().mT @ out + k_end @ dstate)
        dv[:, span] = strength[:, span] * dx
        dlogit[:, span] = (1 - strength[:, span, 0]) * (dx * inner).sum(-1)
        d, e = (out @ inner.mT).tril(), -(dv[:, span] @ inner.mT).tril(-1)
        dq_rise = out @ before.mT + d @ k_back
        dk_rise = e @ k_back - dv[:, span] @ before.mT
        dk_back = d.mT @ q_rise + e.mT @ k_rise
        dk_end = inner @ dstate.mT
        dcum = q_rise * dq_rise + k_rise * dk_rise - k_back * dk_back - k_end * dk_end
        dcum[:, -1] += (shrink * dstate * before).sum(-1) + (k_end * dk_end).sum(1)
        dg[:, span] = dcum.flip(1).cumsum(1).flip(1)
        dq[:, span] = scale * rise * dq_rise
        dk[:, span] = rise * dk_rise + back * dk_back + end * dk_end
        dstate = q_rise.mT @ out + shrink * dstate - k_rise.mT @ dv[:, span]
    return dq, dk, dv, dg, dlogit, dstate


def kda_backward_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor,
                           dt_bias: torch.Tensor, lower_bound: float, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
                           do: torch.Tensor, dfinal_state: torch.Tensor | None) -> Grads:
    """As `kda_backward`, in fp64 if any input is fp64 and in fp32 otherwise. lower_bound >= -5: 16 tokens of it are what fp32 holds."""
    kind = torch.float64 if any(x.dtype is torch.float64 for x in (q, k, v, z, beta, do)) else torch.float32
    batch, steps, heads, width = q.shape
    speed = a_log.to(kind).exp()[:, None]
    raw = speed * (z.to(kind) + dt_bias.to(kind).view(heads, width))
    open_ = torch.sigmoid(raw)
    queries, keys, values, out = (x.to(kind) for x in (q, k, v, do))
    bounds = [n * steps for n in range(batch + 1)] if cu_seqlens is None else [int(x) for x in cu_seqlens]
    zero = torch.zeros(heads, width, v.shape[-1], dtype=kind, device=q.device)
    flat = [x.flatten(0, 1).transpose(0, 1) for x in (
        l2_normalise(queries), l2_normalise(keys), values, lower_bound * open_, torch.sigmoid(beta.to(kind))[..., None], out)]
    parts = []
    for n, (begin, end) in enumerate(itertools.pairwise(bounds)):
        queries_n, keys_n, values_n, g_n, strength_n, out_n = (x[:, begin:end] for x in flat)
        state = zero if initial_state is None else initial_state[n].to(kind)
        dstate = zero if dfinal_state is None else dfinal_state[n].to(kind)
        parts.append(_sequence(queries_n, keys_n, values_n, g_n, strength_n, state, out_n, dstate))
    dq, dk, dv, dg, dbeta = (torch.unflatten(torch.cat([p[i] for p in parts], 1).transpose(0, 1), 0, (batch, steps)) for i in range(5))
    draw = dg * lower_bound * open_ * (1 - open_)
    dz = draw * speed
    return (_through_norm(queries, dq).to(q.dtype), _through_norm(keys, dk).to(k.dtype), dv.to(v.dtype), dz.to(z.dtype), dbeta.to(beta.dtype),
            (draw * raw).sum((0, 1, 3)), dz.sum((0, 1)).flatten(), torch.stack([p[5] for p in parts]))
