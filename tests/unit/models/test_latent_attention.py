"""The three forms of latent attention are one function, whatever columns of the cache are valid, and its gradients are one too."""

from __future__ import annotations

import pytest
import torch

from driftline.models import latent_attention as la
from driftline.models.latent_attention import Columns, Heads, absorbed, attend, expanded, paged

HEADS, NOPE, SHARED, VALUE, RANK = 3, 16, 8, 12, 20


def case(batch: int, held: int, steps: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Heads, Columns]:
    """Cached columns valid by chance, with holes; the last row's new columns right-padded."""
    random = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    up = noise(HEADS, NOPE + VALUE, RANK) * RANK**-0.5
    valid = torch.rand(batch, held, generator=random) < 0.6
    new = torch.ones(batch, steps, dtype=torch.bool)
    new[-1, steps - steps // 3 :] = False
    heads = Heads(up, lambda latents: latents @ up.flatten(0, 1).mT, NOPE, (NOPE + SHARED) ** -0.5)
    return noise(batch, steps, HEADS, NOPE + SHARED), noise(batch, held + steps, RANK + SHARED), heads, Columns(valid, new)


@pytest.mark.parametrize(("batch", "held", "steps"), [(2, 0, 7), (3, 5, 1), (3, 70, 4), (1, 64, 1), (2, 130, 9)])
def test_the_forms_agree(batch: int, held: int, steps: int) -> None:
    q, rows, heads, columns = case(batch, held, steps)
    wanted = absorbed(q, rows, heads, columns)[columns.new]
    torch.testing.assert_close(expanded(q, rows, heads, columns)[columns.new], wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(paged(q, rows, heads, columns)[columns.new], wanted, rtol=0, atol=1e-12)


def test_a_column_that_is_not_valid_is_not_seen_and_one_that_is_would_show() -> None:
    q, rows, heads, columns = case(2, 30, 2)
    hidden, shown = int((~columns.held[0]).nonzero()[0, 0]), int(columns.held[0].nonzero()[0, 0])
    for form in (absorbed, expanded, paged):
        before = form(q, rows, heads, columns)
        changed = rows.clone()
        changed[0, hidden] += 100.0
        assert torch.equal(form(q, changed, heads, columns)[columns.new], before[columns.new]), form.__name__
        changed[0, shown] += 1.0
        assert not torch.allclose(form(q, changed, heads, columns)[0], before[0]), form.__name__


@pytest.mark.parametrize("held", [0, 6])
def test_gradients_agree(held: int) -> None:
    q, rows, heads, columns = case(2, held, 5, seed=1)
    weight = torch.randn(2, 5, HEADS, VALUE, dtype=torch.float64) * columns.new[..., None, None]
    found = []
    for form in (absorbed, expanded):
        leaves = [q.clone().requires_grad_(), rows.clone().requires_grad_()]
        found.append(torch.autograd.grad((form(leaves[0], leaves[1], heads, columns) * weight).sum(), leaves))
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)


def test_what_runs_is_chosen_by_device_dtype_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device: pages for a step of decoding, keys written out for a prompt, and for whatever is differentiated."""
    taken: list[str] = []
    for name in ("absorbed", "expanded", "paged"):
        monkeypatch.setattr(la, name, lambda *_, name=name: taken.append(name))
    q, rows, heads, columns = case(2, 8, 1)
    attend(q, rows, heads, columns)
    monkeypatch.setattr(la, "runs_triton", lambda *_: True)
    narrow = q.bfloat16()
    attend(narrow, rows.bfloat16(), heads, columns)
    with torch.no_grad():
        attend(narrow, rows.bfloat16(), heads, columns)
        attend(narrow, rows.bfloat16(), heads, Columns(columns.held[:, :0], columns.new))
        attend(narrow.expand(-1, 9, -1, -1), rows.bfloat16(), heads, columns)
        attend(q, rows, heads, columns)
    assert taken == ["absorbed", "expanded", "paged", "expanded", "expanded", "absorbed"]
