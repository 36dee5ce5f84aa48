"""The attention kernels, as Triton's interpreter runs them on the CPU, against the reference in fp64. In float16: the interpreter multiplies matrices of
bfloat16 as the integers that hold them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.mla_prefill import autograd, reference, triton_backward, triton_forward
from driftline.kernels.mla_prefill.shapes import Sizes

torch.set_num_threads(1)
HEADS, NOPE, SHARED, VALUE, SCALE = 2, 32, 16, 16, 0.15
FORWARD = triton_forward.Configuration(32, 32, 4, 2)
BACKWARD = triton_backward.Configuration(32, 32, 4, 2)


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


def inputs(queries: list[int], keys: list[int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((sum(queries), HEADS, NOPE + SHARED), (sum(keys), HEADS, NOPE + VALUE), (sum(keys), SHARED))
    return *(torch.randn(*shape, generator=random).half() for shape in shapes), starts(queries), starts(keys)


def sizes_of(q: torch.Tensor, kv: torch.Tensor) -> Sizes:
    return Sizes(q.shape[0], kv.shape[0], HEADS, NOPE, SHARED, VALUE)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=0.1))


@pytest.mark.parametrize(("queries", "keys"), [([1], [1]), ([70], [70]), ([33, 1, 0, 64], [33, 1, 0, 64]), ([5, 40], [50, 97])])
def test_outputs_and_gradients_are_near_fp64(queries: list[int], keys: list[int]) -> None:
    q, kv, shared, begins, begins_k = inputs(queries, keys)
    exact = [t.double().requires_grad_() for t in (q, kv, shared)]
    wanted = reference.mla_prefill(*exact, cu_seqlens=begins, cu_seqlens_k=begins_k, scale=SCALE, out_dtype=torch.float64)
    sizes = sizes_of(q, kv)
    out, lse = triton_forward.forward(q, kv, shared, begins, begins_k, sizes, SCALE, torch.float32, FORWARD)
    assert error(out, wanted.detach()) < 6e-4
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).half().float()
    wanted.backward(grad.double())
    found = triton_backward.backward(q, kv, shared, begins, begins_k, out, lse, grad, sizes, SCALE, BACKWARD, BACKWARD)
    for one, other in zip(found, exact, strict=True):
        assert other.grad is not None
        assert one.dtype == torch.float16
        assert error(one, other.grad) < 1.5e-3


def test_the_operator_is_differentiable_by_the_kernels() -> None:
    q, kv, shared, begins, begins_k = inputs([17], [17])
    ours = [t.clone().requires_grad_() for t in (q, kv, shared)]
    autograd.attention(*ours, begins, begins_k, sizes_of(q, kv), SCALE, torch.float32).square().sum().backward()
    exact = [t.double().requires_grad_() for t in (q, kv, shared)]
    reference.mla_prefill(*exact, scale=SCALE, out_dtype=torch.float64).square().sum().backward()
    for one, other in zip(ours, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert error(one.grad, other.grad) < 2e-3


def test_a_sequence_in_a_pack_and_a_prefix_of_it_have_the_bits_of_the_sequence_alone() -> None:
    q, kv, shared, begins, begins_k = inputs([40, 70], [40, 70])
    whole, _ = triton_forward.forward(q, kv, shared, begins, begins_k, sizes_of(q, kv), SCALE, torch.float32, FORWARD)

    def alone(a: int, b: int) -> torch.Tensor:
        one = starts([b - a])
        return triton_forward.forward(q[a:b], kv[a:b], shared[a:b], one, one, sizes_of(q[a:b], kv[a:b]), SCALE, torch.float32, FORWARD)[0]

    assert torch.equal(alone(40, 110), whole[40:])
    assert torch.equal(alone(40, 90), whole[40:90])
    assert not torch.equal(alone(39, 110)[1:], whole[40:]), "another first key is seen"


def test_prefill_in_pieces_has_the_bits_of_one_shot_where_pieces_are_tiles() -> None:
    """Pieces of whole tiles keep a row's place in its tile, as numpy's product needs; any piece is checked on the device."""
    q, kv, shared, begins, begins_k = inputs([96], [96])
    whole, _ = triton_forward.forward(q, kv, shared, begins, begins_k, sizes_of(q, kv), SCALE, torch.float32, FORWARD)
    for a, b in ((0, 64), (64, 96)):
        piece, _ = triton_forward.forward(q[a:b], kv[:b], shared[:b], starts([b - a]), starts([b]), sizes_of(q[a:b], kv[:b]), SCALE, torch.float32, FORWARD)
        assert torch.equal(piece, whole[a:b])


def test_keys_of_no_sequence_reach_neither_an_output_nor_a_gradient() -> None:
    """Rows behind the last sequence's keys, as a padded cache leaves them: whatever they hold, and whatever the memory of the gradients held."""
    q, kv, shared, begins, begins_k = inputs([5, 40], [50, 97])
    behind = 70
    unread = (torch.full((behind, *t.shape[1:]), float("nan"), dtype=t.dtype) for t in (kv, shared))
    longer = [torch.cat(pair) for pair in zip((kv, shared), unread, strict=True)]
    grad = torch.randn(45, HEADS, VALUE, generator=torch.Generator().manual_seed(9))
    found = []
    for pair, key in ((kv, shared), longer):
        sizes = sizes_of(q, pair)
        out, lse = triton_forward.forward(q, pair, key, begins, begins_k, sizes, SCALE, torch.float32, FORWARD)
        found.append((out, *triton_backward.backward(q, pair, key, begins, begins_k, out, lse, grad, sizes, SCALE, BACKWARD, BACKWARD)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(other[: len(one)], one)
        assert not other[len(one) :].any()
    assert len(found[1][2]) == len(kv) + behind


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=8), tile=st.sampled_from([32, 64, 128]))
def test_every_row_of_every_sequence_is_in_one_tile(lengths: list[int], tile: int) -> None:
    found = triton_forward.tiles_of(starts(lengths), sum(lengths), tile).tolist()
    wanted = [[i, first] for i, n in enumerate(lengths) for first in range(0, n, tile)]
    assert [pair for pair in found if pair[0] >= 0] == wanted
    assert len(found) == sum(lengths) // tile + len(lengths)
