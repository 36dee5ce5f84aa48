"""KDA decode, one token or a draft window at a time, on a pool of states. See docs/kernels/kda_decode.md.

`kda_decode` advances each row's state by one token. `replay_decode` is its form for speculative decoding: it first folds what was accepted of the last
window into the state, then scores the new window from there and keeps the window's raw inputs, so a step reads and writes each state once however many
tokens it scores. `fold` alone brings a state up to date where it is to be copied. All three give the bits that decoding token by token gives.
"""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.kda_decode import reference
from driftline.kernels.kda_decode.window import LONGEST_WINDOW, Window

__all__ = ["LONGEST_WINDOW", "Window", "fold", "kda_decode", "replay_decode"]


def kda_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, pool: torch.Tensor,
    slots: torch.Tensor, *, lower_bound: float = -5.0,
) -> torch.Tensor:
    """One token a row: o [B, H, V] in v's dtype; `pool` [slots, H, K, V] fp32 is advanced in place.

    q, k [B, H, K] before their norm, v [B, H, V], z [B, H, K] the gate's input before `dt_bias`, beta [B, H] before its sigmoid; a_log [H] and dt_bias
    [H * K] fp32; slots int32 [B]: each row's state, no state twice, or -1 for a padding row, which touches nothing and gives zeros. For a token
    (arXiv:2510.26692's recurrence with the bounded gate): `g = lower_bound sigmoid(exp(a_log) (z + dt_bias)); S <- diag(e^g) S;
    u = sigmoid(beta) (v - S^T k); S <- S + k u^T; o = S^T q K^-0.5`. Raises ValueError.
    """
    _checked_state(a_log, dt_bias, pool, slots)
    _checked_rows(q, k, v, z, beta, pool, slots, ("B", "H"))
    tensors = (q, k, v, z, beta, a_log, dt_bias, pool, slots)
    if runs_triton(*tensors) and pool.dtype == torch.float32:
        from driftline.kernels.kda_decode import triton

        if triton.takes(q, v):
            return triton.kda_decode(*tensors, lower_bound)
    return reference.kda_decode(*tensors, lower_bound)


def replay_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, pool: torch.Tensor,
    slots: torch.Tensor, window: Window, accepted: torch.Tensor, *, lower_bound: float = -5.0,
) -> torch.Tensor:
    """A window of T tokens a row: o [B, T, H, V]. The arguments are `kda_decode`'s with T behind B.

    First the first `accepted[i]` tokens (int32 [B], 0..capacity, clamped; 0 for a slot whose window is not its own) of what `window` holds of row i's
    slot go into its state, which is written. Then the new tokens are scored from there: token 0 is the last one that was sampled, the others are
    drafts. `window` then holds the new tokens; the state does not contain them yet. `accepted` of the next call is 1 + the accepted drafts. Exactly one
    call for each sampled window: a second one would fold again. Raises ValueError.
    """
    _checked_state(a_log, dt_bias, pool, slots)
    _checked_rows(q, k, v, z, beta, pool, slots, ("B", "T", "H"))
    _checked_window(window, pool, slots, accepted)
    if not 1 <= q.shape[1] <= window.capacity:
        raise ValueError(f"q has {q.shape[1]} tokens a row; the window holds 1 to {window.capacity}: draft fewer or make a larger Window")
    for name, held, new in (("k", window.k, k), ("v", window.v, v), ("z", window.z, z), ("beta", window.beta, beta)):
        if held.dtype != new.dtype:
            raise ValueError(f"{name} is {new.dtype} and the window holds {held.dtype}: what is folded later must be what was scored; "
                             f"make the Window in {new.dtype}")
    tensors = (q, k, v, z, beta, a_log, dt_bias, pool, slots)
    if runs_triton(*tensors, window.k, accepted) and pool.dtype == torch.float32:
        from driftline.kernels.kda_decode import triton

        if triton.takes(q, v):
            return triton.replay_decode(*tensors, window, accepted, lower_bound)
    return reference.replay_decode(*tensors, window, accepted, lower_bound)


def fold(
    a_log: torch.Tensor, dt_bias: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, window: Window, accepted: torch.Tensor, *, lower_bound: float = -5.0
) -> None:
    """Bring states up to date in place: the first half of `replay_decode`, for a snapshot, a preemption, or the end of drafting. The next call for these
    rows has `accepted` 0. Raises ValueError."""
    _checked_state(a_log, dt_bias, pool, slots)
    _checked_window(window, pool, slots, accepted)
    if runs_triton(a_log, dt_bias, pool, slots, window.k, accepted) and pool.dtype == torch.float32:
        from driftline.kernels.kda_decode import triton

        if triton.takes(window.k, window.v):
            triton.fold(a_log, dt_bias, pool, slots, window, accepted, lower_bound)
            return
    reference.fold(a_log, dt_bias, pool, slots, window, accepted, lower_bound)


def _checked_state(a_log: torch.Tensor, dt_bias: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
    if pool.dim() != 4 or not pool.is_contiguous():
        raise ValueError(f"pool is {tuple(pool.shape)}, {'' if pool.is_contiguous() else 'not '}contiguous; give the states whole: [slots, H, K, V]")
    heads, dim = pool.shape[1], pool.shape[2]
    for name, tensor, shape in (("a_log", a_log, (heads,)), ("dt_bias", dt_bias, (heads * dim,))):
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tuple(tensor.shape)}; give it contiguous and {shape}, of the layer's own heads and without padding")
    if slots.dim() != 1 or slots.dtype != torch.int32:
        raise ValueError(f"slots is {slots.dtype} {tuple(slots.shape)}; give int32 [B]")


def _checked_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, axes: tuple[str, ...]
) -> None:
    lead = tuple(q.shape[:-1])
    if len(lead) != len(axes) or lead[0] != slots.shape[0] or lead[-1] != pool.shape[1]:
        raise ValueError(f"q is {tuple(q.shape)}; give [{', '.join(axes)}, K] with B = {slots.shape[0]} rows and H = {pool.shape[1]} heads")
    expected = (("q", q, pool.shape[2]), ("k", k, pool.shape[2]), ("v", v, pool.shape[3]), ("z", z, pool.shape[2]))
    for name, tensor, width in expected:
        if tuple(tensor.shape) != (*lead, width):
            raise ValueError(f"{name} is {tuple(tensor.shape)}; with q's rows and the pool's heads it is {(*lead, width)}")
    if tuple(beta.shape) != lead:
        raise ValueError(f"beta is {tuple(beta.shape)}; give one logit a head: {lead}")


def _checked_window(window: Window, pool: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor) -> None:
    held = (pool.shape[0], window.capacity, pool.shape[1])
    if tuple(window.k.shape) != (*held, pool.shape[2]) or tuple(window.v.shape) != (*held, pool.shape[3]) or not 1 <= window.capacity <= LONGEST_WINDOW:
        raise ValueError(f"window holds k {tuple(window.k.shape)} and v {tuple(window.v.shape)}; make it with Window.empty for the pool's "
                         f"{pool.shape[0]} slots and {pool.shape[1]} heads and at most {LONGEST_WINDOW} tokens")
    if accepted.dtype != torch.int32 or accepted.shape != slots.shape:
        raise ValueError(f"accepted is {accepted.dtype} {tuple(accepted.shape)}; give int32 {tuple(slots.shape)}, a count for each row")
