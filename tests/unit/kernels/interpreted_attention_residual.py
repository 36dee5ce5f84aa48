"""The attention residual's kernels for any width in Triton's interpreter, against the reference in fp64 and against bits of their own."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels import dispatch
from driftline.kernels.attention_residual import Bank, OutputNorm, aggregate, attention_residual, reference

kernels = importlib.import_module("driftline.kernels.attention_residual.triton")
unkernels = importlib.import_module("driftline.kernels.attention_residual.triton_backward")
torch.set_num_threads(1)

EPS, OUTPUT_EPS = 1e-5, 1e-6


def small(table: Any, rows: int, norm: bool, *, programs: int = 3, warps: int = 1) -> Any:
    """The pinned launch with few threads, so that a width of hundreds has several stretches, and few programs, so that each takes several tokens."""
    return replace(kernels.launch_of(table, rows, norm)[1], warps=warps, programs=programs)


class Case:
    """Random inputs of one call: a strided bank with a row more than is used, prefix, delta, query, norms, and the gradients that come in."""

    def __init__(self, tokens: int, rows: int, width: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)

        def noise(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=random) * scale).to(dtype)

        self.rows, self.width = rows, width
        self.store = noise(tokens, rows + 1, width, scale=2.0)
        self.bank = self.store[:, :rows]
        self.prefix, self.delta, self.do, self.dmoved = (noise(tokens, width) for _ in range(4))
        self.query, self.norm, self.output = noise(width, scale=width**-0.5 * 4), noise(width), noise(width)

    def forward(self, *, add: bool = True, norm: bool = True, bank: Any = None, launch: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        mixed, moved = kernels.forward(self.bank if bank is None else bank, self.prefix, self.delta if add else None, self.query, self.norm, EPS,
                                       self.output if norm else None, OUTPUT_EPS, launch or small(kernels.FORWARD, self.rows, norm))
        return mixed, moved

    def expected(self, *, add: bool = True, norm: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """In fp64, but with the rounding of the residual add."""
        moved = self.prefix + self.delta if add else self.prefix
        rows = [self.bank[:, i].double() for i in range(self.rows)]
        mixed, _ = reference.aggregate(rows, moved.double(), None, self.query.double(), self.norm.double(), EPS, None, OUTPUT_EPS)
        if norm:
            mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + OUTPUT_EPS) * self.output.double()
        return mixed, moved


def error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    assert not bool(out.isnan().any())
    return float((out.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize(("rows", "width"), [(0, 256), (1, 256), (3, 896), (4, 200), (8, 384), (5, 250)])
@pytest.mark.parametrize("norm", [False, True])
def test_the_mixture_is_the_references(rows: int, width: int, norm: bool) -> None:
    case = Case(7, rows, width)
    out, moved = case.forward(norm=norm)
    wanted, moved_wanted = case.expected(norm=norm)
    assert torch.equal(moved, moved_wanted)
    assert error(out, wanted) < (6e-3 if norm else 3e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_mixed_too(dtype: torch.dtype) -> None:
    case = Case(3, 3, 200, dtype)
    out, _ = case.forward(norm=False)
    assert error(out, case.expected(norm=False)[0]) < (1e-6 if dtype is torch.float32 else 4e-4)


def test_sources_of_their_own_give_the_bits_that_a_bank_gives() -> None:
    case = Case(5, 3, 256)
    separate = [case.bank[:, 0].contiguous(), case.bank[:, 1], case.bank[:, 2].clone()]
    for norm in (False, True):
        assert torch.equal(case.forward(bank=separate, norm=norm)[0], case.forward(norm=norm)[0])


def test_one_source_comes_back_unchanged_and_a_zero_query_gives_the_mean() -> None:
    only = Case(4, 0, 256)
    assert torch.equal(only.forward(add=False, norm=False)[0], only.prefix)
    case = Case(4, 3, 256)
    case.query.zero_()
    mean = torch.cat([case.bank, case.prefix[:, None]], 1).float().mean(1).bfloat16()
    assert torch.equal(case.forward(add=False, norm=False)[0], mean), "of four sources, exactly"


@settings(max_examples=6, deadline=None)
@given(tokens=st.integers(1, 9), programs=st.integers(1, 12), at=st.integers(0, 8), norm=st.booleans())
def test_a_tokens_bits_are_its_own(tokens: int, programs: int, at: int, norm: bool) -> None:
    """Whatever the batch, the token's place in it, the programs and the rows of the bank that later layers write."""
    case = Case(9, 3, 256, seed=1)
    whole, _ = case.forward(norm=norm)
    at = min(at, tokens - 1)
    picked = torch.arange(9)[torch.randperm(9, generator=torch.Generator().manual_seed(tokens))][:tokens]
    part = Case(9, 3, 256, seed=1)
    part.store, part.prefix, part.delta = case.store[picked].clone(), case.prefix[picked], case.delta[picked]
    part.store[:, 3] = float("nan")
    part.bank = part.store[:, :3]
    out, _ = part.forward(norm=norm, launch=small(kernels.FORWARD, 3, norm, programs=programs))
    assert torch.equal(out[at], whole[picked[at]])
    part.prefix = part.prefix.clone()
    part.prefix[at] += 1
    moved, _ = part.forward(norm=norm)
    assert not torch.equal(moved[at], out[at]), "a check that sees no change of a token checks nothing"
    assert torch.equal(moved[torch.arange(tokens) != at], out[torch.arange(tokens) != at])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("rows", "width", "kept"), [(0, 256, 0), (1, 128, 1), (3, 256, 2), (4, 200, 0), (8, 384, 8)])
def test_gradients_are_the_closed_form_in_fp64(rows: int, width: int, kept: int, norm: bool) -> None:
    """Gradients are added where something was kept, and overwritten, poison and all, where nothing was."""
    case = Case(7, rows, width)
    held = torch.full((7, rows + 1, width), float("nan")).bfloat16()
    held[:, :kept] = case.store[:, :kept] / 4
    before = held.clone()
    moved = case.prefix + case.delta
    sums = unkernels.backward(case.bank, held[:, :rows], kept, moved, case.do, case.dmoved, case.query, case.norm, EPS, case.output if norm else None, OUTPUT_EPS,
                              small(kernels.BACKWARD, rows, norm))
    wanted = reference.aggregate_backward([case.bank[:, i].double() for i in range(rows)], moved.double(), case.do.double(), case.dmoved.double(),
                                          case.query.double(), case.norm.double(), EPS, case.output.double() if norm else None, OUTPUT_EPS)
    assert error(sums.dprefix, wanted.sources[:, rows]) < 4e-3
    for i in range(rows):
        assert error(held[:, i], wanted.sources[:, i] + (before[:, i].double() if i < kept else 0)) < 4e-3
    assert bool(held[:, rows:].isnan().all()), "a row that is not of this call was written"
    if rows:
        assert error(sums.dquery, wanted.query) < 4e-3
        assert error(sums.dnorm, wanted.norm) < 4e-3
    else:
        assert not bool(sums.dquery.any())
    if norm:
        assert sums.dweight is not None
        assert wanted.output is not None
        assert error(sums.dweight, wanted.output) < 6e-3


def test_the_gradients_of_separate_sources_go_to_tensors_of_their_own() -> None:
    case = Case(5, 3, 256)
    into = torch.full((5, 3, 256), float("nan")).bfloat16()
    launch = small(kernels.BACKWARD, 3, False)
    arguments = (case.prefix, case.do, None, case.query, case.norm, EPS, None, OUTPUT_EPS, launch)
    bank = unkernels.backward(case.bank, into, 0, *arguments)
    apart = [torch.full((5, 256), float("nan")).bfloat16() for _ in range(3)]
    separate = unkernels.backward([case.bank[:, i].contiguous() for i in range(3)], apart, 0, *arguments)
    assert torch.equal(torch.stack(apart, 1), into)
    assert torch.equal(bank.dprefix, separate.dprefix)
    assert torch.equal(bank.dquery, separate.dquery)


def test_a_gradient_buffer_in_fp32_keeps_what_bfloat16_loses() -> None:
    """Eight additions of one small gradient to a large one."""
    case = Case(2, 1, 64)
    moved, launch = case.prefix, small(kernels.BACKWARD, 1, False)
    one = reference.aggregate_backward([case.bank[:, 0].double()], moved.double(), case.do.double(), None, case.query.double(), case.norm.double(), EPS, None,
                                       OUTPUT_EPS).sources[:, :1]
    off = {}
    for dtype in (torch.float32, torch.bfloat16):
        held = torch.full((2, 1, 64), 512.0, dtype=dtype)
        for _ in range(8):
            unkernels.backward(case.bank, held, 1, moved, case.do, None, case.query, case.norm, EPS, None, OUTPUT_EPS, launch)
        off[dtype] = error(held.double() - 512, 8 * one)
    assert off[torch.float32] < 1e-3
    assert off[torch.bfloat16] > 0.1


def test_no_tokens_are_no_work() -> None:
    case = Case(0, 3, 128)
    out, moved = case.forward()
    assert out.shape == moved.shape == (0, 128)
    sums = unkernels.backward(case.bank, torch.empty(0, 3, 128).bfloat16(), 0, case.prefix, case.do, None, case.query, case.norm, EPS, None, OUTPUT_EPS)
    assert not bool(sums.dquery.any())


@pytest.mark.parametrize("separate", [False, True])
def test_autograd_through_the_kernels_is_autograd_through_the_reference(monkeypatch: pytest.MonkeyPatch, separate: bool) -> None:
    """A bank that is written twice and read three times, or sources of their own; the device is said to be one that has kernels."""
    case = Case(3, 2, 128)

    def gradients() -> list[torch.Tensor]:
        first, second, delta, query, norm, output = (t.clone().requires_grad_() for t in (case.prefix, case.do, case.delta, case.query, case.norm, case.output))
        leaves = [first, second, query, norm, output]
        if separate:
            out = attention_residual([first, second, case.dmoved], query, norm, EPS, output_norm=OutputNorm(output, OUTPUT_EPS))
            return list(torch.autograd.grad(out, leaves, case.do))
        bank = Bank.empty(3, 2, 128, dtype=torch.bfloat16, device="cpu", gradient_dtype=torch.float32).write(first)
        one, moved = aggregate(bank, second, query, norm, EPS, delta=delta)
        bank = bank.write(moved)
        two, moved = aggregate(bank, one, query, norm, EPS, delta=moved, output_norm=OutputNorm(output, OUTPUT_EPS))
        return list(torch.autograd.grad([aggregate(bank, moved, query, norm, EPS).mixed, two], [*leaves, delta], [case.do, case.dmoved]))

    wanted = gradients()
    calls: list[int] = []

    def counted(*tensors: torch.Tensor | None) -> bool:
        calls.append(len(tensors))
        return True

    monkeypatch.setattr(dispatch, "runs_triton", counted)
    for table in (kernels.FORWARD, kernels.BACKWARD):
        for key in table:
            monkeypatch.setitem(table, key, replace(table[key], warps=1, programs=2))
    for ours, other in zip(gradients(), wanted, strict=True):
        assert error(ours, other) < 1.5e-2
    assert calls
