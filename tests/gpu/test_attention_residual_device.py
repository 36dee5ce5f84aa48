"""The attention residual on a CUDA device, at K3's width: against fp64, bit for bit with itself, and each check against something that must not pass."""

from __future__ import annotations

import hashlib
import importlib

import pytest
import torch

from driftline.kernels.attention_residual import Bank, OutputNorm, aggregate, attention_residual, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH, EPS, OUTPUT_EPS = 7168, 1e-5, 1e-5
FORWARD_BOUND, NORM_BOUND, GRADIENT_BOUND = 3e-3, 5e-3, 4e-3
"""Relative to the fp64 result: a rounding to bfloat16 is 1.7e-3 of the root mean square, an output norm rounds three times."""


def noise(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, device="cuda", generator=random) * scale).bfloat16()


class Case:
    def __init__(self, tokens: int, rows: int, width: int = WIDTH, seed: int = 0) -> None:
        self.rows = rows
        self.bank, self.prefix, self.delta = noise(tokens, rows, width, seed=seed, scale=2.0), noise(tokens, width, seed=seed + 1), noise(tokens, width, seed=seed + 2)
        self.do, self.dmoved = noise(tokens, width, seed=seed + 3), noise(tokens, width, seed=seed + 4)
        self.query, self.norm, self.output = noise(width, seed=seed + 5, scale=4 * width**-0.5), noise(width, seed=seed + 6), noise(width, seed=seed + 7)

    def run(self, *, add: bool = True, norm: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        out = aggregate(Bank.of(self.bank), self.prefix, self.query, self.norm, EPS, delta=self.delta if add else None,
                        output_norm=OutputNorm(self.output, OUTPUT_EPS) if norm else None)
        return out.mixed, out.prefix

    def wanted(self, *, add: bool = True, norm: bool = True) -> torch.Tensor:
        moved = self.prefix + self.delta if add else self.prefix
        mixed, _ = reference.aggregate([row.double() for row in self.bank.unbind(1)], moved.double(), None, self.query.double(), self.norm.double(), EPS, None, 0.0)
        return mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + OUTPUT_EPS) * self.output.double() if norm else mixed


def error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    assert not bool(out.isnan().any())
    return float((out.double() - wanted.double()).norm() / wanted.double().norm())


def poison() -> None:
    """What the allocator hands out next holds NaN, so that an element nobody wrote is seen."""
    held = [torch.full((size,), float("nan"), device="cuda", dtype=torch.bfloat16) for size in (2**28, 2**24, 2**22, 2**20)]
    del held


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in tensors)).hexdigest()


def leaves(case: Case, *, norm: bool, gradient_dtype: torch.dtype | None = None, separate: bool = False) -> list[torch.Tensor]:
    """Gradients of (bank or each source, prefix, delta, query, norm, output) by autograd, with a gradient that comes to the prefix besides."""
    bank, prefix, delta, query, weight, output = (t.clone().requires_grad_() for t in (case.bank, case.prefix, case.delta, case.query, case.norm, case.output))
    after = OutputNorm(output, OUTPUT_EPS) if norm else None
    vectors = [query, weight, *([output] if norm else [])]
    if separate:
        apart = [row.clone().requires_grad_() for row in case.bank.unbind(1)]
        mixed = attention_residual([*apart, prefix], query, weight, EPS, output_norm=after)
        poison()
        return list(torch.autograd.grad(mixed, [*apart, prefix, *vectors], case.do))
    out = aggregate(Bank.of(bank, gradient_dtype=gradient_dtype), prefix, query, weight, EPS, delta=delta, output_norm=after)
    poison()
    return list(torch.autograd.grad([out.mixed, out.prefix], [bank, prefix, delta, *vectors], [case.do, case.dmoved]))


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("norm", [False, True])
def test_the_mixture_is_that_of_fp64(rows: int, norm: bool) -> None:
    case = Case(300, rows)
    poison()
    out, moved = case.run(norm=norm)
    assert torch.equal(moved, case.prefix + case.delta)
    assert error(out, case.wanted(norm=norm)) < (NORM_BOUND if norm else FORWARD_BOUND)


@pytest.mark.parametrize(("width", "rows"), [(1000, 3), (2304, 6), (7186, 3), (64, 2)])
def test_other_widths_are_mixed_and_taken_back(width: int, rows: int) -> None:
    case = Case(130, rows, width)
    assert error(case.run()[0], case.wanted()) < NORM_BOUND
    separate = leaves(case, norm=False, separate=True)
    wanted = reference.aggregate_backward([r.double() for r in case.bank.unbind(1)], case.prefix.double(), case.do.double(), None, case.query.double(),
                                          case.norm.double(), EPS, None, 0.0)
    for i, gradient in enumerate(separate[: rows + 1]):
        assert error(gradient, wanted.sources[:, i]) < GRADIENT_BOUND


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("norm", [False, True])
def test_gradients_are_those_of_fp64(rows: int, norm: bool) -> None:
    case = Case(300, rows)
    got = leaves(case, norm=norm)
    wanted = reference.aggregate_backward([r.double() for r in case.bank.unbind(1)], (case.prefix + case.delta).double(), case.do.double(), case.dmoved.double(),
                                          case.query.double(), case.norm.double(), EPS, case.output.double() if norm else None, OUTPUT_EPS)
    assert error(got[0], wanted.sources[:, :rows]) < GRADIENT_BOUND
    assert error(got[1], wanted.sources[:, rows]) < GRADIENT_BOUND
    assert torch.equal(got[1], got[2]), "prefix and delta have one gradient"
    assert error(got[3], wanted.query) < NORM_BOUND
    assert error(got[4], wanted.norm) < NORM_BOUND
    if norm:
        assert wanted.output is not None
        assert error(got[5], wanted.output) < NORM_BOUND


def test_a_wrong_eps_a_missing_norm_and_a_lost_source_are_seen() -> None:
    """The bounds above are bounds: each of these is a mistake that ports have made."""
    case = Case(300, 4)
    case.bank *= 0.002
    case.prefix *= 0.002
    wanted = case.wanted(add=False, norm=False)
    off, _ = aggregate(Bank.of(case.bank), case.prefix, case.query, case.norm, 1e-6)
    assert error(off, wanted) > FORWARD_BOUND
    plain, _ = aggregate(Bank.of(case.bank), case.prefix, case.query, torch.ones_like(case.norm), EPS)
    assert error(plain, wanted) > FORWARD_BOUND
    short, _ = aggregate(Bank.of(case.bank[:, :3].contiguous()), case.prefix, case.query, case.norm, EPS)
    assert error(short, wanted) > FORWARD_BOUND


def test_gradients_of_many_aggregations_are_summed_in_the_bank_in_fp32_if_asked() -> None:
    """Twelve layers read two rows; the buffer in fp32 is as near to fp64 as one rounding, the one in bfloat16 is not."""
    tokens, layers = 64, 12
    case = Case(tokens, 2)
    queries = [noise(WIDTH, seed=50 + i, scale=4 * WIDTH**-0.5) for i in range(layers)]
    outs = [noise(tokens, WIDTH, seed=80 + i) for i in range(layers)]
    total = torch.zeros(tokens, 2, WIDTH, dtype=torch.float64, device="cuda")
    for query, do in zip(queries, outs, strict=True):
        total += reference.aggregate_backward([r.double() for r in case.bank.unbind(1)], case.prefix.double(), do.double(), None, query.double(), case.norm.double(),
                                              EPS, None, 0.0).sources[:, :2]
    off = {}
    for dtype in (torch.float32, torch.bfloat16):
        values = case.bank.clone().requires_grad_()
        bank = Bank.of(values, gradient_dtype=dtype)
        poison()
        loss = sum((aggregate(bank, case.prefix, q, case.norm, EPS).mixed.float() * do.float()).sum() for q, do in zip(queries, outs, strict=True))
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        assert values.grad is not None
        off[dtype] = error(values.grad, total)
    assert off[torch.float32] < 3e-3
    assert off[torch.float32] < off[torch.bfloat16] < 2e-2


def test_written_rows_get_the_gradient_of_all_who_read_them() -> None:
    """A bank that is written as a model writes it, beside a list of tensors through the reference in fp64."""
    tokens, layers = 40, 6
    deltas = [noise(tokens, WIDTH, seed=i) for i in range(layers)]
    queries = [noise(WIDTH, seed=30 + i, scale=4 * WIDTH**-0.5) for i in range(layers)]
    norm, first = noise(WIDTH, seed=40), noise(tokens, WIDTH, seed=41)

    def loss(banked: bool) -> torch.Tensor:
        dtype = torch.bfloat16 if banked else torch.float64
        prefix, scale = start, torch.linspace(-1, 1, WIDTH, device="cuda", dtype=torch.float64)
        bank = Bank.empty(tokens, 3, WIDTH, dtype=torch.bfloat16, device="cuda", gradient_dtype=torch.float32)
        rows: list[torch.Tensor] = []
        total = torch.zeros((), device="cuda")
        for i in range(layers):
            if banked:
                mixed, prefix = aggregate(bank, prefix, queries[i], norm, EPS, delta=moves[i])
            else:
                prefix = prefix + moves[i]
                prefix = prefix + (prefix.bfloat16().to(dtype) - prefix).detach()
                mixed = reference.attention_residual([*rows, prefix], queries[i].to(dtype), norm.to(dtype), EPS)
            total = total + (mixed.double() * scale).sum()
            if i % 2 == 0:
                rows, bank = [*rows, prefix], bank.write(prefix) if banked else bank
        return total

    start, moves = first.clone().requires_grad_(), [d.clone().requires_grad_() for d in deltas]
    ours = torch.autograd.grad(loss(True), [start, *moves])
    start, moves = first.double().requires_grad_(), [d.double().requires_grad_() for d in deltas]
    for got, wanted in zip(ours, torch.autograd.grad(loss(False), [start, *moves]), strict=True):
        assert error(got, wanted) < 8e-3, "the gradient of the prefix is rounded once a layer"


def test_sources_of_their_own_and_a_bank_give_the_same_bits() -> None:
    case = Case(100, 4)
    separate = attention_residual([*(r.contiguous() for r in case.bank.unbind(1)), case.prefix], case.query, case.norm, EPS)
    assert torch.equal(separate, case.run(add=False, norm=False)[0])
    strided = attention_residual([*case.bank.unbind(1), case.prefix], case.query, case.norm, EPS)
    assert torch.equal(separate, strided), "slices of a bank, as they lie"


def test_a_thousand_repeats_have_one_hash() -> None:
    case = Case(64, 8)
    first = torch.stack(case.run())
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differing += (torch.stack(case.run()).view(torch.int16) != first.view(torch.int16)).sum()
    assert int(differing) == 0
    grads = {digest(*leaves(case, norm=True)) for _ in range(20)}
    assert len(grads) == 1
    case.prefix[63, 7167] += 1
    assert digest(*leaves(case, norm=True)) not in grads, "a hash that does not see one element checks nothing"


@pytest.mark.parametrize("rows", [3, 8])
def test_a_tokens_bits_do_not_depend_on_the_batch(rows: int) -> None:
    case = Case(512, rows)
    whole, _ = case.run()
    into = leaves(case, norm=True)
    for batch in (1, 2, 7, 64, 512):
        for start in {0, 512 - batch, (512 - batch) // 2}:
            part = Case(1, rows)
            part.bank, part.prefix, part.delta, part.do, part.dmoved = (
                t[start : start + batch].clone() for t in (case.bank, case.prefix, case.delta, case.do, case.dmoved))
            part.query, part.norm, part.output = case.query, case.norm, case.output
            assert torch.equal(part.run()[0], whole[start : start + batch])
            if batch in (1, 64):
                got = leaves(part, norm=True)
                assert torch.equal(got[0], into[0][start : start + batch])
                assert torch.equal(got[1], into[1][start : start + batch])


def test_earlier_tokens_and_earlier_aggregations_do_not_see_what_comes_later() -> None:
    case = Case(300, 4)
    before, _ = case.run()
    case.bank[200:] = noise(100, 4, WIDTH, seed=99)
    case.prefix[200:] *= -3
    after, _ = case.run()
    assert torch.equal(after[:200], before[:200])
    assert not torch.equal(after[200:], before[200:])
    bank = Bank.empty(300, 2, WIDTH, dtype=torch.bfloat16, device="cuda").write(case.prefix)
    one, _ = aggregate(bank, case.delta, case.query, case.norm, EPS)
    bank.write(noise(300, WIDTH, seed=100))
    assert torch.equal(aggregate(bank, case.delta, case.query, case.norm, EPS).mixed, one)


def test_programs_and_registers_change_time_and_only_sums_over_tokens_change_bits() -> None:
    """How many programs there are and what they may take does not touch a token's row; another number of programs adds tokens up in another order."""
    from dataclasses import replace

    staged = importlib.import_module("driftline.kernels.attention_residual.staged")
    unstaged = importlib.import_module("driftline.kernels.attention_residual.staged_backward")
    case = Case(300, 4)
    pinned, back = staged.launch_of(staged.FORWARD, 4, False)[1], staged.launch_of(staged.BACKWARD, 4, False)[1]

    def mixed(launch: object) -> torch.Tensor:
        out: torch.Tensor = staged.forward(case.bank, case.prefix, None, case.query, case.norm, EPS, None, 0.0, launch)[0]
        return out

    def gradients(launch: object) -> list[torch.Tensor]:
        held = case.bank.clone()
        sums = unstaged.backward(case.bank, held, 4, case.prefix, case.do, case.dmoved, case.query, case.norm, EPS, None, 0.0, launch)
        return [held, sums.dprefix, sums.dquery, sums.dnorm]

    wanted, first = mixed(pinned), gradients(back)
    for programs in (17, 264):
        assert torch.equal(mixed(replace(pinned, programs=programs)), wanted)
        others = gradients(replace(back, programs=programs))
        assert torch.equal(others[0], first[0])
        assert torch.equal(others[1], first[1])
        assert error(others[2], first[2]) < NORM_BOUND
    assert error(mixed(replace(pinned, registers=255)), wanted) < 1e-3
    assert all(error(a, b) < 1e-3 for a, b in zip(gradients(replace(back, sums_shared=not back.sums_shared)), first, strict=True))


def test_what_does_not_begin_at_sixteen_bytes_has_the_same_bits() -> None:
    case = Case(60, 3)
    wanted = case.run()[0]
    askew = torch.empty(60 * WIDTH + 1, dtype=torch.bfloat16, device="cuda")[1:].view(60, WIDTH)
    case.prefix = askew.copy_(case.prefix)
    assert torch.equal(case.run()[0], wanted)


@pytest.mark.parametrize("rows", [3, 8])
def test_staged_kernels_agree_with_those_for_any_width(rows: int) -> None:
    staged, plain = (importlib.import_module(f"driftline.kernels.attention_residual.{name}") for name in ("staged", "triton"))
    case = Case(300, rows)
    arguments = (case.bank, case.prefix, case.delta, case.query, case.norm, EPS, case.output, OUTPUT_EPS)
    one, other = staged.forward(*arguments), plain.forward(*arguments)
    assert torch.equal(one[1], other[1])
    assert error(one[0], other[0]) < 1e-3


def test_no_tokens_and_a_bank_without_rows_are_mixed() -> None:
    nothing = Case(0, 3)
    assert nothing.run()[0].shape == (0, WIDTH)
    case = Case(5, 1)
    empty = Bank.empty(5, 1, WIDTH, dtype=torch.bfloat16, device="cuda")
    out = aggregate(empty, case.prefix, case.query, case.norm, EPS, delta=case.delta)
    assert torch.equal(out.mixed, case.prefix + case.delta)
    assert aggregate(empty, case.prefix, case.query, case.norm, EPS).mixed is case.prefix
