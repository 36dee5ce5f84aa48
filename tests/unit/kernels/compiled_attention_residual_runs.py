"""The staged kernels of the attention residual as the compiler leaves them for Hopper, their PTX run on the CPU: layouts, copies into shared memory, exchanged
sums and barriers. Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import importlib
import re
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import ptx_machine
import pytest
import torch
from ptx_machine import Launched, launches_of, run_on_cpu

from driftline.kernels.attention_residual import reference

staged = importlib.import_module("driftline.kernels.attention_residual.staged")
unstaged = importlib.import_module("driftline.kernels.attention_residual.staged_backward")
torch.set_num_threads(1)

WIDTH, EPS, PROGRAMS = 2048, 1e-5, 2
"""Two stretches; of five tokens a program has three, the other two."""


class Machine(ptx_machine.Machine):
    """Knows besides what these kernels use: how many programs there are, and products of pairs of bfloat16."""

    def _value(self, operand: str, kind: Any = np.uint32) -> Any:
        return np.full(self.threads, PROGRAMS, np.uint32) if operand.startswith("%nctaid") else super()._value(operand, kind)

    def _arithmetic(self, name: str, parts: list[str], a: list[str]) -> Any:
        if parts[-1] != "bf16x2":
            return super()._arithmetic(name, parts, a)
        words = [self._value(x).astype(np.uint32) for x in a]
        halves = [[(w << np.uint32(16)).view(np.float32) for w in words], [(w & np.uint32(0xFFFF0000)).view(np.float32) for w in words]]
        low, high = (ptx_machine._to_bfloat16((x * y if name == "mul" else x + y).astype(np.float32)) for x, y in halves)
        return (high << np.uint32(16)) | low


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_machine, "Machine", Machine)


def plain(x: Any) -> list[Any]:
    """Arguments one by one, as their code takes them."""
    if isinstance(x, tuple | list):
        return [z for y in x for z in plain(y)]
    return [] if x is None else [struct.unpack("I", struct.pack("f", x))[0]] if isinstance(x, float) else [x]


def hints_removed(ptx: str) -> str:
    """Without what asks for nothing but a cache's favour."""
    ptx = re.sub(r"\{\s*\.reg \.pred first;.*?mov\.u32 %r\d+, 0;\s*\}", "", ptx, flags=re.S)
    ptx = re.sub(r"\n[^\n]*createpolicy[^\n]*", "", ptx)
    ptx = re.sub(r"\.L1::evict_\w+", "", ptx)
    return re.sub(r"(\n[^\n]*)\.L2::cache_hint([^\n]*), %rd\d+;", r"\1\2;", ptx)


def simplified(launch: Launched) -> Launched:
    return Launched(replace(launch.kernel, ptx=hints_removed(launch.kernel.ptx)), tuple(plain(launch.arguments)))


def error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    assert not bool(out.isnan().any())
    return float((out.double() - wanted.double()).norm() / wanted.double().norm())


class Case:
    def __init__(self, tokens: int, rows: int, separate: bool) -> None:
        random = torch.Generator().manual_seed(rows)

        def noise(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=random) * scale).bfloat16()

        self.bank = noise(tokens, rows, WIDTH, scale=2.0)
        self.sources: Any = [self.bank[:, i].contiguous() for i in range(rows)] if separate else self.bank
        self.prefix, self.delta, self.do = (noise(tokens, WIDTH) for _ in range(3))
        self.query, self.key, self.weight = noise(WIDTH, scale=4 * WIDTH**-0.5), noise(WIDTH), noise(WIDTH)
        self.given = [*(self.sources if separate else [self.sources]), self.prefix, self.delta, self.do, self.query, self.key, self.weight]


@pytest.mark.parametrize(("rows", "separate", "norm"), [(4, True, False), (8, False, True), (3, False, False), (4, False, True)])
def test_the_mixture_as_compiled_is_that_of_fp64(rows: int, separate: bool, norm: bool) -> None:
    case, results = Case(5, rows, separate), []
    launch = replace(staged.launch_of(staged.FORWARD, rows, norm)[1], programs=PROGRAMS)
    launches = launches_of(lambda: results.append(staged.forward(case.sources, case.prefix, case.delta if norm else None, case.query, case.key, EPS,
                                                                 case.weight if norm else None, EPS, launch)))
    assert run_on_cpu([simplified(x) for x in launches], case.given) == set()
    moved = case.prefix + case.delta if norm else case.prefix
    wanted, _ = reference.aggregate([r.double() for r in case.bank.unbind(1)], moved.double(), None, case.query.double(), case.key.double(), EPS, None, 0.0)
    if norm:
        wanted = wanted * torch.rsqrt(wanted.square().mean(-1, keepdim=True) + EPS) * case.weight.double()
    (mixed, moved_out), = results
    assert torch.equal(moved_out, moved)
    assert error(mixed, wanted) < (6e-3 if norm else 3e-3)


@pytest.mark.parametrize(("rows", "separate", "norm", "kept"), [(4, True, False, 0), (8, False, True, 8), (3, False, True, 2), (6, False, False, 5)])
def test_gradients_as_compiled_are_those_of_fp64(rows: int, separate: bool, norm: bool, kept: int) -> None:
    case, results = Case(5, rows, separate), []
    before = case.bank.flip(2).contiguous()
    into: Any = [torch.full((5, WIDTH), float("nan")).bfloat16() for _ in range(rows)] if separate else before.clone()
    launch = replace(staged.launch_of(staged.BACKWARD, rows, norm)[1], programs=PROGRAMS)
    weight, dmoved = (case.weight, case.delta) if norm else (None, None)
    launches = launches_of(lambda: results.append(unstaged.backward(case.sources, into, kept, case.prefix, case.do, dmoved, case.query, case.key, EPS, weight, EPS,
                                                                    launch)))
    assert run_on_cpu([simplified(x) for x in launches], [*case.given, *(into if separate else [into])]) == set()
    wanted = reference.aggregate_backward([r.double() for r in case.bank.unbind(1)], case.prefix.double(), case.do.double(),
                                          None if dmoved is None else dmoved.double(), case.query.double(), case.key.double(), EPS,
                                          None if weight is None else weight.double(), EPS)
    (sums,) = results
    for i in range(rows):
        assert error(into[i] if separate else into[:, i], wanted.sources[:, i] + (before[:, i].double() if i < kept else 0)) < 4e-3
    assert error(sums.dprefix, wanted.sources[:, rows]) < 4e-3
    assert error(sums.dquery, wanted.query) < 4e-3
    assert error(sums.dnorm, wanted.norm) < 4e-3
    if wanted.output is not None:
        assert error(sums.dweight, wanted.output) < 6e-3


def test_a_barrier_that_is_missing_would_be_seen() -> None:
    case, results = Case(5, 4, True), []
    launch = replace(staged.launch_of(staged.FORWARD, 4, False)[1], programs=PROGRAMS)
    launches = launches_of(lambda: results.append(staged.forward(case.sources, case.prefix, None, case.query, case.key, EPS, None, EPS, launch)))
    whole = simplified(launches[0])
    bare = replace(whole.kernel, ptx=re.sub(r"\tbar\.sync[^\n]*\n", "", whole.kernel.ptx), grid=(1,))
    assert any("without a barrier" in hazard for hazard in run_on_cpu([Launched(bare, whole.arguments)], case.given))
