"""The bank: gradients that are summed in one buffer are those of a list of tensors, whatever reads and writes the rows."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from benchmark_scripts import script

from driftline.kernels.attention_residual import Bank, OutputNorm, aggregate, attention_residual, reference
from driftline.kernels.attention_residual.bank import Storage

torch.set_num_threads(1)

EPS, WIDTH, LAYERS = 1e-5, 16, 7


class Net:
    """Seven layers of two rows' bank, in fp64: layer i mixes, every third writes, and every other is normed."""

    def __init__(self, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)

        def leaf(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_()

        self.first = leaf(2, 3, WIDTH)
        self.deltas = [leaf(2, 3, WIDTH) for _ in range(LAYERS)]
        self.queries = [leaf(WIDTH) for _ in range(LAYERS)]
        self.norm, self.output = leaf(WIDTH), leaf(WIDTH)
        self.leaves = [self.first, *self.deltas, *self.queries[1:], self.norm, self.output]

    def loss(self, *, banked: bool, gradient_dtype: torch.dtype | None = None) -> torch.Tensor:
        rows: list[torch.Tensor] = []
        bank = Bank.empty(6, 3, WIDTH, dtype=torch.float64, device="cpu", gradient_dtype=gradient_dtype)
        prefix, total = self.first, torch.zeros((), dtype=torch.float64)
        for i, (delta, query) in enumerate(zip(self.deltas, self.queries, strict=True)):
            output = OutputNorm(self.output, 1e-6) if i % 2 else None
            if banked:
                mixed, prefix = aggregate(bank, prefix, query, self.norm, EPS, delta=delta, output_norm=output)
            else:
                prefix = prefix + delta
                mixed = attention_residual([*rows, prefix], query, self.norm, EPS, output_norm=output)
            total = total + (mixed.square() * torch.arange(WIDTH)).sum()
            if i % 3 == 0:
                rows, bank = [*rows, prefix], bank.write(prefix) if banked else bank
                prefix = mixed
        return total


def test_a_bank_gives_the_gradients_of_a_list_of_tensors() -> None:
    net = Net()
    plain, banked = net.loss(banked=False), net.loss(banked=True)
    torch.testing.assert_close(banked, plain, rtol=1e-12, atol=0)
    for ours, wanted in zip(torch.autograd.grad(banked, net.leaves), torch.autograd.grad(plain, net.leaves), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


def test_a_second_backward_pass_starts_from_nothing() -> None:
    net = Net(1)
    loss = net.loss(banked=True)
    first = torch.autograd.grad(loss, net.leaves, retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(loss, net.leaves), strict=True):
        assert torch.equal(one, two)


def test_a_frozen_embedding_needs_no_gradient_and_the_others_keep_theirs() -> None:
    net = Net(2)
    net.first.requires_grad_(False)
    leaves = net.leaves[1:]
    for ours, wanted in zip(torch.autograd.grad(net.loss(banked=True), leaves), torch.autograd.grad(net.loss(banked=False), leaves), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


def test_the_order_that_the_token_keeps_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a row's gradient handed out before every reader had added to it, the comparison above would see it."""
    net = Net(3)
    wanted = torch.autograd.grad(net.loss(banked=False), net.leaves)
    taken = Storage.taken
    monkeypatch.setattr(Storage, "taken", lambda self, row: None if (given := taken(self, row)) is None else given / 2)
    ours = torch.autograd.grad(net.loss(banked=True), net.leaves)
    assert not torch.allclose(ours[0], wanted[0])


def test_what_reads_no_row_gives_none_a_gradient() -> None:
    bank = Bank.empty(4, 2, WIDTH, dtype=torch.float32, device="cpu")
    used, unused = (torch.randn(4, WIDTH).requires_grad_() for _ in range(2))
    bank = bank.write(used)
    mixed, _ = aggregate(bank, torch.randn(4, WIDTH), torch.randn(WIDTH), torch.ones(WIDTH), EPS)
    bank.write(unused)
    mixed.sum().backward()  # type: ignore[no-untyped-call]
    assert used.grad is not None
    assert unused.grad is None


def test_the_gradient_of_an_adopted_bank_is_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a copy of it: at 128K tokens of K3 a copy is 14 GiB."""
    values = torch.randn(4, 3, WIDTH).requires_grad_()
    bank, buffer = Bank.of(values), Storage.buffer
    places: list[int] = []

    def watched(storage: Storage) -> torch.Tensor:
        places.append(buffer(storage).data_ptr())
        return buffer(storage)

    monkeypatch.setattr(Storage, "buffer", watched)
    aggregate(bank, torch.randn(4, WIDTH), torch.randn(WIDTH), torch.ones(WIDTH), EPS).mixed.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert values.grad.data_ptr() == places[0]
    assert bank.storage.gradients is None


def test_nothing_is_saved_but_the_prefix_and_the_vectors() -> None:
    """In particular nothing of the size of all sources, and no mixture."""
    saved: list[torch.Tensor] = []
    bank = Bank.of(torch.randn(4, 3, WIDTH).requires_grad_())
    prefix = torch.randn(4, WIDTH).requires_grad_()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        aggregate(bank, prefix, torch.randn(WIDTH), torch.ones(WIDTH), EPS, output_norm=OutputNorm(torch.ones(WIDTH), EPS))
    assert [t.shape for t in saved if t.dim() > 1] == [prefix.shape]
    assert saved[0].data_ptr() == prefix.data_ptr()


def test_the_closed_form_is_autograds_gradient() -> None:
    random = torch.Generator().manual_seed(5)
    leaves = [torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_() for shape in [(4, WIDTH)] * 3 + [(WIDTH,)] * 3]
    *rows, prefix, query, norm, output = leaves
    do, dmoved = (torch.randn(4, WIDTH, generator=random, dtype=torch.float64) for _ in range(2))
    mixed, moved = reference.aggregate(rows, prefix, None, query, norm, EPS, output, 1e-6)
    wanted = torch.autograd.grad((mixed * do).sum() + (moved * dmoved).sum(), leaves)
    with torch.no_grad():
        ours = reference.aggregate_backward(rows, prefix, do, dmoved, query, norm, EPS, output, 1e-6)
    for one, other in zip([*ours.sources.unbind(1), ours.query, ours.norm, ours.output], wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_bank_is_written_once_and_within_its_room() -> None:
    bank = Bank.empty(4, 1, WIDTH, dtype=torch.float32, device="cpu")
    after = bank.write(torch.zeros(4, WIDTH))
    with pytest.raises(ValueError, match="full"):
        after.write(torch.zeros(4, WIDTH))
    roomy = Bank.empty(4, 2, WIDTH, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="does not fit"):
        roomy.write(torch.zeros(5, WIDTH))
    roomy.write(torch.zeros(4, WIDTH))
    with pytest.raises(ValueError, match="written already"):
        roomy.write(torch.ones(4, WIDTH))
    with pytest.raises(ValueError, match="neither"):
        Bank.empty(4, 1, WIDTH, dtype=torch.bfloat16, device="cpu", gradient_dtype=torch.float16)
    with pytest.raises(ValueError, match="contiguous"):
        Bank.of(torch.zeros(4, WIDTH, 3).transpose(1, 2))


def test_arguments_that_do_not_fit_are_refused_by_name() -> None:
    bank = Bank.of(torch.zeros(4, 2, WIDTH))
    query, norm, prefix = torch.zeros(WIDTH), torch.ones(WIDTH), torch.zeros(4, WIDTH)
    with pytest.raises(ValueError, match="query has shape"):
        aggregate(bank, prefix, query[:3], norm, EPS)
    with pytest.raises(ValueError, match="prefix"):
        aggregate(bank, prefix[:3], query, norm, EPS)
    with pytest.raises(ValueError, match="delta"):
        aggregate(bank, prefix, query, norm, EPS, delta=prefix.bfloat16())
    with pytest.raises(ValueError, match="eps"):
        aggregate(bank, prefix, query, norm, 0.0)
    with pytest.raises(ValueError, match="empty"):
        attention_residual([], query, norm, EPS)
    with pytest.raises(ValueError, match="sources differ"):
        attention_residual([prefix, prefix.bfloat16()], query, norm, EPS)
    with pytest.raises(ValueError, match="output_norm"):
        attention_residual([prefix, prefix], query, norm, EPS, output_norm=OutputNorm(norm[:2], EPS))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, the gpu extra")
def test_the_benchmarks_floor_counts_each_source_and_gradient_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In units of one [T, D]: ten forward and nineteen backward for nine sources; eight more where sums are read before they are written."""
    benchmark = script("attention_residual", monkeypatch)
    unit = 131_072 * 7168 * 2
    assert benchmark.floor_bytes(131_072, 9, backward=False) == 10 * unit
    assert benchmark.floor_bytes(131_072, 9, backward=True) == 19 * unit
    assert benchmark.floor_bytes(131_072, 9, backward=True, added=8, delta=True) == 28 * unit
    assert benchmark.floor_bytes(131_072, 5, backward=False, delta=True) == 8 * unit
    pinned = benchmark.kernels.BACKWARD[4, False]
    tried = benchmark.candidates(pinned, True)
    assert tried[0] == pinned
    assert len(set(tried)) == len(tried)


def test_more_rows_than_the_kernels_hold_are_mixed_by_the_reference_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows and the prefix go to the kernels; with nine, whoever says where the kernels run is not asked."""
    autograd = importlib.import_module("driftline.kernels.attention_residual.autograd")
    asked: list[bool] = []
    monkeypatch.setattr(autograd, "kernels_take", lambda *_: asked.append(True))
    for rows in (8, 9):
        asked.clear()
        values = torch.randn(4, rows, WIDTH).requires_grad_()
        mixed = aggregate(Bank.of(values), torch.randn(4, WIDTH), torch.randn(WIDTH), torch.ones(WIDTH), EPS).mixed
        torch.autograd.backward(mixed.sum())
        assert asked == [True, True] * (rows == 8)
