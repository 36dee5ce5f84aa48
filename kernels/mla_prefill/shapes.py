"""What the causal attention of multi-head latent attention is given, in prefill and training: packed sequences, their bounds; and what is refused."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["SCALE", "Sizes", "bounds", "checked"]

SCALE = 192**-0.5
"""K3: (128 + 64)^-0.5, the width of a query (config.json: qk_nope_head_dim + qk_rope_head_dim)."""


class Sizes(NamedTuple):
    queries: int
    keys: int
    heads: int
    nope: int
    shared: int
    value: int


def checked(q: torch.Tensor, kv: torch.Tensor, k_shared: torch.Tensor, cu_seqlens: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None) -> Sizes:
    """The sizes of one call. Raises ValueError naming the argument, what it is and what it must be."""
    if q.dim() != 3 or k_shared.dim() != 2 or not 0 < k_shared.shape[1] < q.shape[2]:
        raise ValueError(f"q is {list(q.shape)} and k_shared {list(k_shared.shape)}; they must be [T, H, nope + shared] and [S, shared]")
    nope = q.shape[2] - k_shared.shape[1]
    if kv.dim() != 3 or kv.shape[:2] != (k_shared.shape[0], q.shape[1]) or kv.shape[2] <= nope:
        raise ValueError(f"kv is {list(kv.shape)}; it must be [{k_shared.shape[0]}, {q.shape[1]}, {nope} + value], a key and a value of every head")
    if not q.dtype == kv.dtype == k_shared.dtype:
        raise ValueError(f"q, kv and k_shared are {q.dtype}, {kv.dtype} and {k_shared.dtype}; they must be of one dtype")
    if cu_seqlens_k is not None and (cu_seqlens is None or cu_seqlens_k.shape != cu_seqlens.shape):
        raise ValueError("cu_seqlens_k goes with cu_seqlens and has its shape: the same sequences, by their keys")
    for name, given in (("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k)):
        if given is not None and (given.dim() != 1 or given.numel() < 2 or given.dtype != torch.int32):
            raise ValueError(f"{name} is {given.dtype} {list(given.shape)}; it must be int32 [sequences + 1], from 0 to the rows packed")
    if cu_seqlens_k is None and cu_seqlens is not None and q.shape[0] != kv.shape[0]:
        raise ValueError(f"kv has {kv.shape[0]} rows for {q.shape[0]} of q: give cu_seqlens_k, which says whose they are")
    if any(t.device != q.device for t in (kv, k_shared, cu_seqlens, cu_seqlens_k) if t is not None):
        raise ValueError(f"kv, k_shared, cu_seqlens and cu_seqlens_k must be on the device of q, {q.device}")
    return Sizes(q.shape[0], kv.shape[0], q.shape[1], nope, k_shared.shape[1], kv.shape[2] - nope)


def bounds(sizes: Sizes, cu_seqlens: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [sequences + 1] of the queries and of the keys; one sequence where none are given."""
    if cu_seqlens is None:
        ends = torch.arange(2, dtype=torch.int32, device=device)
        return ends * sizes.queries, ends * sizes.keys
    return cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
