"""`linear` on a CPU is torch's own product, and says no to what is not one."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.linear import linear
from driftline.kernels.linear.tiles import FLOAT32, HALF, tile_for

torch.set_num_threads(1)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_it_has_the_bits_of_torchs_linear_on_a_cpu() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x, weight = drawn(2, 5, 24, dtype=dtype), drawn(7, 24, dtype=dtype)
        assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))


def test_a_wide_output_is_not_rounded_to_the_operands_first() -> None:
    x, weight = drawn(5, 64, dtype=torch.bfloat16), drawn(7, 64, dtype=torch.bfloat16)
    wide = linear(x, weight, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, (x.double() @ weight.double().t()).float(), rtol=1e-5, atol=1e-5)
    assert not torch.equal(wide, linear(x, weight).float())


def test_it_is_differentiable_on_a_cpu() -> None:
    x, weight = drawn(4, 6, dtype=torch.float64).requires_grad_(), drawn(3, 6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(linear, (x, weight))


@pytest.mark.parametrize(
    ("x", "weight", "out_dtype", "what"),
    [
        (drawn(4, 6), drawn(3, 5), None, "5 columns of weight"),
        (drawn(4, 6), drawn(3, 2, 6), None, r"weight has shape \(3, 2, 6\)"),
        (drawn(4, 0), drawn(3, 0), None, "not 0"),
        (drawn(4, 6), drawn(3, 6, dtype=torch.bfloat16), None, "x is torch.float32 and weight torch.bfloat16"),
        (drawn(4, 6).int(), drawn(3, 6).int(), None, "x is torch.int32"),
        (drawn(4, 6), drawn(3, 6), torch.bfloat16, "out_dtype is torch.bfloat16"),
    ],
)
def test_what_cannot_be_multiplied_is_refused(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        linear(x, weight, out_dtype=out_dtype)


def test_the_tile_is_chosen_by_shape_and_small_outputs_get_small_tiles() -> None:
    assert tile_for(8192, 7168, torch.bfloat16) == HALF[0]
    assert tile_for(1, 576, torch.bfloat16) == HALF[-1]
    assert all(tile_for(m, n, torch.float32) == FLOAT32[0] for m in (1, 500) for n in (1, 500))
    counts = [tile_for(m, 7168, torch.bfloat16).count(m, 7168) for m in (1, 64, 128, 512)]
    assert min(counts) >= 100


def test_every_tile_of_one_width_steps_through_k_alike() -> None:
    """What makes their bits equal: steps of the matrix instruction's 16, in order. A tile that took K in other pieces would have to be kept apart."""
    assert {tile.depth % 16 for tile in HALF} == {0}
    assert len(FLOAT32) == 1
