"""Products, sums, exponentials and attention in deterministic mode: an element's bits are its operands', over many shapes and places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels import fixed
from driftline.kernels.fixed import products
from driftline.kernels.fixed.attention import attention_batch
from driftline.kernels.linear import linear
from driftline.kernels.linear.heads import head_linear
from driftline.kernels.mode import Numerics, using

torch.set_num_threads(1)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 300), depth=st.integers(1, 90), columns=st.integers(1, 70), first=st.integers(0, 299), count=st.integers(1, 40),
       dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_rows_of_a_product_know_nothing_of_each_other(rows: int, depth: int, columns: int, first: int, count: int, dtype: torch.dtype) -> None:
    a, w = drawn(rows, depth, dtype=dtype), drawn(columns, depth, seed=1, dtype=dtype)
    whole = fixed.product(a, w)
    first = min(first, rows - 1)
    assert same(fixed.product(a[first : first + count].clone(), w), whole[first : first + count])
    others = drawn(rows, depth, seed=2, dtype=dtype)
    others[first] = a[first]
    assert same(fixed.product(others, w)[first], whole[first])
    bound = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 0.2}[dtype]
    torch.testing.assert_close(whole.double(), a.double() @ w.double().t(), rtol=bound, atol=bound)


@pytest.mark.parametrize("shape", [(3, 5), (576, 200), (128, 1536)])
def test_where_operands_lie_is_not_in_the_bits(shape: tuple[int, int]) -> None:
    depth, columns = shape
    a, w = drawn(20, depth), drawn(columns, depth, seed=1)
    whole = fixed.product(a, w)
    shifted = torch.empty(20 * depth + 1)[1:].view(20, depth).copy_(a)
    other = torch.empty(columns * depth + 3)[3:].view(columns, depth).copy_(w)
    assert shifted.data_ptr() % 64 != 0
    assert same(fixed.product(shifted, other), whole)
    assert same(fixed.product(a.t().contiguous().t(), w.t().contiguous().t()), whole)


def test_threads_are_not_in_the_bits() -> None:
    a, w = drawn(70, 128), drawn(384, 128, seed=1)
    one = fixed.product(a, w)
    torch.set_num_threads(2)
    try:
        assert same(fixed.product(a, w), one)
    finally:
        torch.set_num_threads(1)


def test_a_blas_that_does_not_keep_a_row_s_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.Tensor.__matmul__

    def by_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = real(a, b)
        out[1::2] += out[1::2] * 1e-7
        return out

    monkeypatch.setattr(torch.Tensor, "__matmul__", by_place)
    with pytest.raises(ValueError, match=r"run.numerics is deterministic.*a row's place.*choose fast"):
        products.verified.__wrapped__(48, 32, torch.float32, torch.device("cpu"), 1)


def test_larger_blocks_with_other_bits_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.Tensor.__matmul__

    def by_height(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return real(a, b) * (1.0 if a.shape[0] <= 64 else 1.0 + 1e-6)

    monkeypatch.setattr(torch.Tensor, "__matmul__", by_height)
    assert products.verified.__wrapped__(48, 32, torch.float32, torch.device("cpu"), 1) == (64, 16)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(["exp", "log", "sigmoid", "tanh", "silu"]), size=st.integers(1, 5000), start=st.integers(0, 60), count=st.integers(1, 200),
       dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_an_exponential_s_bits_are_its_operand_s(name: str, size: int, start: int, count: int, dtype: torch.dtype) -> None:
    x = drawn(size, dtype=dtype)
    x = x.abs() + 0.01 if name == "log" else x * 3
    function = getattr(fixed, name)
    with using(Numerics.DETERMINISTIC):
        whole, part = function(x), function(x[start : start + count])
    assert same(part, whole[start : start + count])
    fast = function(x)
    bound = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(whole, fast, rtol=bound, atol=bound)


def test_torch_s_own_sigmoid_is_told_apart() -> None:
    """Why these exist: an element in the tail of an array is rounded otherwise."""
    x = drawn(5000) * 3
    whole = torch.sigmoid(x)
    broken = [n for n in range(1, 60) if not same(torch.sigmoid(x[:n].clone()), whole[:n])]
    if "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("this CPU's vectors are not the ones in question")
    assert broken


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 300), rows=st.integers(1, 9))
def test_a_total_is_one_tree_along_any_axis(size: int, rows: int) -> None:
    x = drawn(rows, size)
    found = fixed.total(x)
    torch.testing.assert_close(found.double(), x.double().sum(-1), rtol=1e-5, atol=1e-5)
    assert same(fixed.total(x[-1:]), found[-1:])
    assert same(fixed.total(x.t().contiguous(), 0), found)


def test_gradients_pass_through_all_of_them() -> None:
    x = drawn(4, 6, dtype=torch.float64).requires_grad_()
    w, h = drawn(5, 6, seed=1, dtype=torch.float64).requires_grad_(), drawn(2, 3, 3, seed=2, dtype=torch.float64).requires_grad_()
    with using(Numerics.DETERMINISTIC):
        for name in ("exp", "sigmoid", "tanh", "silu", "softmax", "total"):
            assert torch.autograd.gradcheck(getattr(fixed, name), (x,)), name
        assert torch.autograd.gradcheck(linear, (x, w))
        assert torch.autograd.gradcheck(head_linear, (x.view(4, 2, 3), h))


@settings(max_examples=40, deadline=None)
@given(batch=st.integers(1, 3), rows=st.integers(1, 40), keys=st.integers(1, 150), depth=st.integers(1, 40), width=st.integers(1, 40), seed=st.integers(0, 99))
def test_a_query_s_bits_are_those_of_the_keys_it_sees(batch: int, rows: int, keys: int, depth: int, width: int, seed: int) -> None:
    q, k, v = drawn(batch, rows, depth, seed=seed), drawn(batch, keys, depth, seed=seed + 1), drawn(batch, keys, width, seed=seed + 2)
    seen = torch.randint(0, keys + 1, (batch, rows), generator=torch.Generator().manual_seed(seed))
    with using(Numerics.DETERMINISTIC):
        whole = attention_batch(q, k, v, seen, 0.3)
        b, r = batch - 1, rows // 2
        n = int(seen[b, r])
        alone = fixed.attention_rows(q[b, r : r + 1], k[b, :n], v[b, :n], seen[b, r : r + 1], 0.3)
    assert same(alone[0], whole[b, r])
    mask = torch.arange(keys) >= seen[..., None]
    score = (q.double() @ k.double().mT * 0.3).masked_fill(mask, -torch.inf)
    want = torch.nan_to_num(torch.softmax(score, -1)) @ v.double()
    torch.testing.assert_close(whole.double(), want, rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(batch=st.integers(1, 70), rows=st.sampled_from([16, 32, 48, 64]), depth=st.sampled_from([16, 48, 576]), columns=st.sampled_from([16, 64]))
def test_products_of_many_matrices_have_the_bits_of_each_alone(batch: int, rows: int, depth: int, columns: int) -> None:
    a, w = drawn(batch, rows, depth), drawn(batch, columns, depth, seed=1)
    out = torch.full((batch, rows, columns), float("nan"))
    products.write_batch(a, w, out)
    for b in {0, batch // 2, batch - 1}:
        assert same(products.by_blocks(a[b], w[b]), out[b])


def test_a_batched_product_with_other_bits_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: real(a, b) * (1 + 1e-6))
    assert not products.packed_alike.__wrapped__(48, 32, torch.float32, torch.device("cpu"), 1)
