"""The reference's packed experts: the bits of unpacked ones both ways, and never a stack of them unpacked at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from driftline.kernels.moe import reference
from driftline.kernels.moe.reference import expert_mlp
from driftline.kernels.mxfp4 import Mxfp4Weight, dequantised, pack, to_fp8
from driftline.kernels.mxfp4 import reference as mxfp4
from driftline.kernels.mxfp4.weights import ExpertWeight

torch.set_num_threads(1)

EXPERTS, WIDTH, INNER = 12, 128, 256


def packed_stack(*shape: int, seed: int) -> Mxfp4Weight:
    return Mxfp4Weight(*pack(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1))


def weights(fp8: bool) -> tuple[ExpertWeight, ExpertWeight, ExpertWeight]:
    found = [packed_stack(EXPERTS, INNER, WIDTH, seed=1), packed_stack(EXPERTS, INNER, WIDTH, seed=2), packed_stack(EXPERTS, WIDTH, INNER, seed=3)]
    w1, w3, w2 = (to_fp8(w).weight if fp8 else w for w in found)
    return w1, w3, w2


def routed(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(tokens)
    z = torch.randn(tokens, WIDTH, generator=rng).to(dtype)
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:3] for _ in range(tokens)])
    return z, ids, torch.rand(tokens, 3, generator=rng)


def both_ways(tokens: int, dtype: torch.dtype, w: tuple[ExpertWeight, ...]) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    z, ids, gates = routed(tokens, dtype)
    z.requires_grad_()
    gates.requires_grad_()
    out = expert_mlp(z, ids, gates, w[0], w[1], w[2], 4.0, 25.0)
    (out * torch.linspace(-1, 1, WIDTH).to(dtype)).sum().backward()
    return out.detach(), z.grad, gates.grad


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tokens", [1, 7, 60, 8 * EXPERTS + 3])
def test_packed_weights_compute_the_bits_of_unpacked_ones_and_so_do_their_gradients(tokens: int, dtype: torch.dtype, fp8: bool) -> None:
    """Up to eight tokens an expert by one schedule, more by the other; some experts have no token."""
    w = weights(fp8)
    got, want = both_ways(tokens, dtype, w), both_ways(tokens, dtype, tuple(dequantised(each, dtype) for each in w))
    for a, b in zip(got, want, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
        assert a.any()


class Largest(TorchDispatchMode):
    """Of every tensor that an operation made, the most elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor) and each.untyped_storage().nbytes() >= each.numel() * each.element_size():
                self.elements = max(self.elements, each.numel())
        return out


@pytest.mark.parametrize("tokens", [4, 8 * EXPERTS + 3])
def test_no_stack_is_ever_unpacked_whole(tokens: int) -> None:
    """An expert's matrix is the most, whose codes are stacked in pairs, or the rows that come out of all experts."""
    w, stack = weights(False), EXPERTS * INNER * WIDTH
    with Largest() as packed:
        both_ways(tokens, torch.float32, w)
    assert packed.elements < stack / 4
    with Largest() as whole:
        both_ways(tokens, torch.float32, tuple(dequantised(each, torch.float32) for each in w))
    assert whole.elements >= stack, "and one that is would be seen"


def test_experts_that_no_token_has_are_left_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward and in the backward, under both schedules."""
    z, ids, gates = routed(4, torch.float32)
    unpacked: list[int] = []
    real = reference._of
    monkeypatch.setattr(reference, "_of", lambda weight, expert: unpacked.append(expert) or real(weight, expert))
    w = weights(False)
    z.requires_grad_()
    out = expert_mlp(z, ids % 3, gates, w[0], w[1], w[2], 4.0, 25.0)
    assert sorted(set(unpacked)) == sorted(set((ids % 3).flatten().tolist()))
    forward = len(unpacked)
    out.sum().backward()
    assert len(unpacked) == 2 * forward
    assert max(unpacked) < 3


@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_pieces_change_no_bit_of_what_is_unpacked(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = packed_stack(3, 5, 64, seed=9)
    w.scale[0, 0, 0], w.scale[1, 2, 1], w.scale[2, 4, 0] = 0, 254, 255
    want = {dtype: mxfp4.unpack(w.packed, w.scale, dtype) for dtype in (torch.bfloat16, torch.float64)}
    monkeypatch.setattr(mxfp4, "_PIECE", piece)
    for dtype, values in want.items():
        got = mxfp4.unpack(w.packed, w.scale, dtype)
        assert torch.equal(got.view(torch.int16 if dtype is torch.bfloat16 else torch.int64), values.view(torch.int16 if dtype is torch.bfloat16 else torch.int64))
    assert want[torch.float64][2, 4, :32].isnan().all()
    assert mxfp4.unpack(w.packed[:0], w.scale[:0]).shape == (0, 5, 64)
