"""What looks along a sequence, packed: the convolution in one row, and attention by the operator of packed sequences, which a CPU would not choose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from driftline.kernels.mode import Numerics, using
from driftline.kernels.short_conv import short_conv
from driftline.models.latent_attention import Columns, Heads, absorbed
from driftline.models.packed import Packed
from driftline.models.packed_layers import PackedColumns, attend_by_bounds, convolve_packed

torch.set_num_threads(1)
LENGTHS = (5, 0, 1, 17, 3)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_packed_convolution_is_each_sequences_own() -> None:
    packed = Packed.of(LENGTHS, "cpu")
    x, weight, tail = random(1, packed.tokens, 6), random(6, 4, seed=1), random(5, 3, 6, seed=2)
    with using(Numerics.DETERMINISTIC):
        mixed, after = convolve_packed(x, weight, tail, packed)
        assert after.shape == tail.shape
        for row, (start, length) in enumerate(zip(packed.bounds.tolist(), LENGTHS, strict=False)):
            mine, carried = short_conv(x[:, start : start + length], weight, tail[row : row + 1])
            assert torch.equal(mixed[0, start : start + length], mine[0])
            assert torch.equal(after[row], carried[0])
    assert (convolve_packed(x, weight, tail, packed)[0] - mixed).abs().max() < 1e-14


def test_a_packed_convolution_is_differentiable_in_what_it_carries() -> None:
    packed = Packed.of((2, 0, 1, 4), "cpu")
    inputs = tuple(t.requires_grad_() for t in (random(1, 7, 2), random(2, 4, seed=1), random(4, 3, 2, seed=2)))
    assert torch.autograd.gradcheck(lambda x, w, t: convolve_packed(x, w, t, packed), inputs)


@pytest.mark.parametrize("held", [
    torch.zeros(5, 0, dtype=torch.bool),
    torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool),
], ids=["nothing", "with gaps"])
def test_attention_by_bounds_is_the_padded_form(held: torch.Tensor) -> None:
    heads_count, nope, shared, value, rank = 2, 4, 3, 5, 6
    packed = Packed.of(LENGTHS, "cpu")
    expand = nn.Linear(rank, heads_count * (nope + value), bias=False).double()
    heads = Heads(expand.weight.view(heads_count, -1, rank), expand, nope, 0.4)
    q, cached, new = random(packed.tokens, heads_count, nope + shared), random(5, held.shape[1], rank + shared, seed=1), random(packed.tokens, rank + shared, seed=2)
    leaves = [t.requires_grad_() for t in ((q, cached, new) if held.shape[1] else (q, new))]
    by_bounds = attend_by_bounds(q, cached, new, heads, PackedColumns(held, packed))
    padded = packed.unpadded(absorbed(packed.padded(q), torch.cat([cached, packed.padded(new)], 1), heads, Columns(held, packed.real)))
    assert (by_bounds - padded).abs().max() < 1e-12
    weight = random(*padded.shape, seed=3)
    for a, b in zip(*(torch.autograd.grad((o * weight).sum(), [*leaves, expand.weight], retain_graph=True) for o in (by_bounds, padded)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert torch.equal(PackedColumns(held, packed).key_bounds, torch.nn.functional.pad((held.sum(1) + packed.lengths_s).cumsum(0), (1, 0)).int())
