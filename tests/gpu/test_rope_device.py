"""The rotation's compiled kernel on a CUDA device: the reference's bits, both ways, for any heads, width and part of it that is turned."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.rope import reference, rotate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def drawn(shape: tuple[int, ...], half: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator("cuda").manual_seed(0)
    angle = torch.rand(*shape[:-2], half, generator=random, device="cuda") * 1000
    return torch.randn(*shape, generator=random, device="cuda").to(dtype), angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("shape", "half"), [((3, 700, 9, 64), 32), ((1, 513, 32, 128), 64), ((2, 5, 2, 96), 48), ((77, 4, 128), 16), ((0, 4, 128), 64)])
def test_it_gives_the_bits_of_the_reference_both_ways(shape: tuple[int, ...], half: int, interleaved: bool, dtype: torch.dtype) -> None:
    x, cos, sin = drawn(shape, half, dtype)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    found, wanted = rotate(ours, cos, sin, interleaved=interleaved), reference.rotate(theirs, cos, sin, interleaved)
    assert torch.equal(found, wanted)
    grad = torch.randn_like(x)
    assert torch.equal(*(torch.autograd.grad(out, leaf, grad)[0] for out, leaf in ((found, ours), (wanted, theirs))))
    if x.numel():
        assert not torch.equal(rotate(x, cos, -sin, interleaved=interleaved), wanted)


def test_a_tokens_bits_are_those_it_has_alone() -> None:
    x, cos, sin = drawn((512, 9, 64), 32, torch.bfloat16)
    whole = rotate(x, cos, sin)
    for i in (0, 1, 63, 511):
        assert torch.equal(rotate(x[i : i + 1], cos[i : i + 1], sin[i : i + 1]), whole[i : i + 1])
