"""Log-probabilities of given tokens from the last hidden states, in plain torch: it holds the logits of every token, which the kernels never do."""

from __future__ import annotations

import torch

from driftline.kernels.linear.reference import linear

__all__ = ["checked", "checked_ids", "selected_logprobs"]


def selected_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | float = 1.0, *, round_logits: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the operator. ids outside of [0, V) raise ValueError here."""
    checked_ids(ids, weight.shape[0])
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = (linear(hidden, weight) if round_logits else linear(hidden, weight, wide)).to(wide)
    if isinstance(temperature, torch.Tensor):
        logits = logits / temperature.to(wide)[:, None]
    elif temperature != 1.0:
        logits = logits / temperature
    logp = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = torch.special.entr(logp.exp()).sum(-1)
    return logp.gather(-1, ids.long()[:, None]).squeeze(-1), entropy


def checked_ids(ids: torch.Tensor, vocabulary: int) -> None:
    """Raise ValueError for an id outside of [0, V)."""
    if ids.numel() and not (0 <= int(ids.min()) <= int(ids.max()) < vocabulary):
        raise ValueError(f"ids go from {int(ids.min())} to {int(ids.max())}; a token of this vocabulary is from 0 to {vocabulary - 1}")


def checked(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | float) -> None:
    """Raise ValueError unless these go together. What ids and a tensor of temperatures hold is not looked at: the device would have to be waited for."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or 0 in weight.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not go together; give [N, D] and [V, D], D and V not 0")
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}; give both in one floating-point dtype")
    if ids.shape != hidden.shape[:1] or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids are {ids.dtype} of shape {tuple(ids.shape)}; give one int32 or int64 for each of the {hidden.shape[0]} rows of hidden")
    if isinstance(temperature, torch.Tensor):
        if temperature.shape != hidden.shape[:1] or not temperature.is_floating_point():
            raise ValueError(f"temperature is {temperature.dtype} of shape {tuple(temperature.shape)}; give a number, or one for each of the {hidden.shape[0]} rows")
    elif not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it divides the logits and must be positive and finite (to take the likeliest token, do not sample)")
    given = [hidden, weight, ids, *([temperature] if isinstance(temperature, torch.Tensor) else [])]
    if len({t.device for t in given}) != 1:
        raise ValueError(f"hidden, weight, ids and temperature are on {', '.join(str(t.device) for t in given)}; put them on one device")
