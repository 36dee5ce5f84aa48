"""The rotary embedding by the reference: the rotation itself, both ways of pairing, its gradient, and what is refused."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.rope import rotate

torch.set_num_threads(1)


def drawn(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    angle = torch.rand(2, 3, 4, generator=random) * 100
    return torch.randn(2, 3, 5, 10, generator=random, dtype=torch.float64).to(dtype), angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_pair_is_turned_by_its_angle_and_the_rest_is_left(interleaved: bool) -> None:
    x, cos, sin = drawn()
    found = rotate(x, cos, sin, interleaved=interleaved)
    turn = torch.complex(cos.double(), sin.double())[:, :, None]
    first, second = (x[..., :8:2], x[..., 1:8:2]) if interleaved else (x[..., :4], x[..., 4:8])
    wanted = torch.complex(first, second) * turn
    ours = (found[..., :8:2], found[..., 1:8:2]) if interleaved else (found[..., :4], found[..., 4:8])
    assert torch.allclose(torch.complex(*ours), wanted, atol=1e-14)
    assert torch.equal(found[..., 8:], x[..., 8:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_its_gradients_are_those_of_finite_differences(interleaved: bool) -> None:
    x, cos, sin = drawn()
    assert torch.autograd.gradcheck(lambda given: rotate(given, cos, sin, interleaved=interleaved), x.requires_grad_())


def test_half_precision_is_rounded_once_and_a_token_has_its_bits_in_any_batch() -> None:
    x, cos, sin = drawn(torch.bfloat16)
    whole = rotate(x, cos, sin)
    assert torch.equal(whole, rotate(x.float(), cos, sin).bfloat16())
    assert torch.equal(rotate(x[1:, 2:], cos[1:, 2:], sin[1:, 2:]), whole[1:, 2:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3, dtype=torch.int64)}, r"x is torch.int64 \[2, 3\]"),
        ({"cos": torch.zeros(2, 4)}, r"cos is \[2, 4\] and sin \[2, 3, 4\]; both must be \[2, 3\]"),
        ({"cos": torch.zeros(2, 3, 6), "sin": torch.zeros(2, 3, 6)}, "half of what is turned of 10"),
        ({"cos": torch.zeros(2, 3, 4, dtype=torch.bfloat16)}, "cos and sin are torch.bfloat16 and torch.float32; they must be torch.float32"),
        ({"sin": torch.zeros(2, 3, 4, device="meta")}, "cos and sin must be on the device of x, cpu"),
    ],
)
def test_what_cannot_be_is_refused_with_what_it_must_be(change: dict[str, torch.Tensor], message: str) -> None:
    given = {"x": torch.zeros(2, 3, 5, 10), "cos": torch.zeros(2, 3, 4), "sin": torch.zeros(2, 3, 4)}
    with pytest.raises(ValueError, match=message):
        rotate(**(given | change))
