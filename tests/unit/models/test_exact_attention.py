"""Deterministic latent attention: the form that is computed and those that its gradient is taken of are one function, adapters included."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.mode import Numerics, using
from driftline.models import exact_attention
from driftline.models.exact_attention import attend_exactly
from driftline.models.latent_attention import Columns, Heads, absorbed
from driftline.models.lora.latent import LatentUpdate

torch.set_num_threads(1)

HEADS, NOPE, SHARED, VALUE, RANK = 3, 8, 4, 6, 12


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def heads(update: bool) -> Heads:
    up = drawn(HEADS, NOPE + VALUE, RANK)
    term = LatentUpdate(drawn(5, RANK), drawn(HEADS, NOPE + VALUE, 5, seed=1), 0.3, NOPE) if update else None

    def expand(latents: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the layer itself is not applied")

    return Heads(up, expand, NOPE, 0.2, term)


def columns(batch: int, held: int, steps: int) -> Columns:
    """Gaps among the cached columns, and padding behind the new ones of the first row."""
    valid = torch.ones(batch, held, dtype=torch.bool)
    valid[0, held // 2 :] = False
    valid[-1, : held // 3] = False
    new = torch.ones(batch, steps, dtype=torch.bool)
    new[0, steps // 2 + 1 :] = False
    return Columns(valid, new)


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize(("held", "steps"), [(0, 9), (7, 1), (70, 5)])
def test_all_forms_are_one_function(held: int, steps: int, update: bool) -> None:
    q, rows, seen = drawn(2, steps, HEADS, NOPE + SHARED), drawn(2, held + steps, RANK + SHARED), columns(2, held, steps)
    of = heads(update)
    terms = () if of.update is None else (of.update.a, of.update.b)  # type: ignore[attr-defined]
    with using(Numerics.DETERMINISTIC):
        found = attend_exactly(q, rows, of, seen)
    for want in (absorbed(q, rows, of, seen), exact_attention._expanded(q, rows, of.up, *terms, heads=of, columns=seen)):
        assert (found - want)[seen.new].abs().max() < 1e-10


@pytest.mark.parametrize("update", [False, True])
def test_gradients_reach_queries_rows_the_up_projection_and_its_adapter(update: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's way and by that of the kernels, which writes keys and values out."""
    held, steps = 7, 5
    seen = columns(2, held, steps)
    found = []
    for by_kernels in (False, True, None):
        q, rows = drawn(2, steps, HEADS, NOPE + SHARED).requires_grad_(), drawn(2, held + steps, RANK + SHARED).requires_grad_()
        of = heads(update)
        leaves = [q, rows, of.up.requires_grad_()]
        if of.update is not None:
            leaves += [of.update.a.requires_grad_(), of.update.b.requires_grad_()]  # type: ignore[attr-defined]
        with using(Numerics.DETERMINISTIC), monkeypatch.context() as patch:
            if by_kernels:
                patch.setattr(exact_attention, "runs_triton", lambda *_: torch.is_grad_enabled())
                patch.setattr(exact_attention, "KERNELS_TAKE", torch.float64)
            out = absorbed(q, rows, of, seen) if by_kernels is None else attend_exactly(q, rows, of, seen)
            found.append(torch.autograd.grad((out * drawn(*out.shape, seed=3))[seen.new].sum(), leaves))
    for grads in found[:2]:
        for ours, want in zip(grads, found[2], strict=True):
            assert (ours - want).abs().max() < 1e-9
            assert want.abs().max() > 1e-3
