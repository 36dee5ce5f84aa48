"""The backward's products for Hopper, their Gluon source run on a CPU, against float64: `gluon_matrix_on_cpu` says what that shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_cases import choices, error, matrices
from gluon_matrix_on_cpu import launcher

from driftline.kernels.moe import gluon_backward as kernels
from driftline.kernels.moe import gluon_operands, gluon_wgrad, triton_backward
from driftline.kernels.moe.plan import Plan, plan
from driftline.kernels.moe.triton_tiles import Form
from driftline.kernels.mxfp4.weights import ExpertWeight, Mxfp4Weight
from driftline.kernels.situ_glu.reference import situ_glu

torch.set_num_threads(1)

BETAS = (4.0, 25.0)
EXPERTS, TOP, SIZE = 3, 2, 512
FORMS = (Form.MXFP4, Form.BFLOAT16)


def factors(scales: torch.Tensor) -> torch.Tensor:
    return ((scales.as_subclass(torch.Tensor).int().clamp(max=129) + 126) << 7).to(torch.int16).view(torch.bfloat16)


def in_words(words: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What WORDS does."""
    both = [pairs((words.as_subclass(torch.Tensor) >> 16 * h).to(torch.int16), (factor.as_subclass(torch.Tensor) & 0xFFFF).to(torch.int16).view(torch.bfloat16))
            for h in range(2)]
    return tuple(both[h][i] for i in range(4) for h in range(2))


def pairs(words: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What PAIRS does to each half of a word."""
    code = words.as_subclass(torch.Tensor).int() & 0xFFFF
    found = []
    for i in range(4):
        value = ((code >> 4 * i) & 8) << 12 | ((code >> 4 * i) & 7) << 6
        wide = torch.where(value > 0x7FFF, value - 0x10000, value).to(torch.int16).view(torch.bfloat16).float()
        found.append((wide * factor.as_subclass(torch.Tensor).float()).bfloat16())
    return tuple(found)


def partials(g: torch.Tensor, u: torch.Tensor, beta: float, linear_beta: float, *_: float) -> tuple[torch.Tensor, ...]:
    leaves = [t.as_subclass(torch.Tensor).clone().requires_grad_() for t in (g, u)]
    value = situ_glu(leaves[0], leaves[1], beta, linear_beta)
    return (value.detach(), *torch.autograd.grad(value.sum(), leaves))


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assembly: dict[str, Callable[..., Any]] = {gluon_operands.FACTORS.value: factors, gluon_operands.PAIRS.value: pairs, gluon_operands.WORDS.value: in_words}
    for module, name in ((kernels, "_across"), (kernels, "_inner"), (gluon_wgrad, "_weight_gradient")):
        monkeypatch.setattr(module, name, launcher(getattr(module, name), [gluon_operands, module], assembly, {"situ_partials": partials}))


class Case:
    """190 tokens: one expert gets 171 rows, in tiles of 160 and of few; some ids are no expert."""

    def __init__(self, form: Form) -> None:
        made = [matrices(form, (EXPERTS, SIZE, SIZE), i) for i in range(3)]
        self.weights: list[ExpertWeight] = [w for w, _ in made]
        self.values = [v for _, v in made]
        ids, self.gates = choices(190, EXPERTS, TOP)
        ids[:170] = torch.tensor([0, 1])
        ids[170:, 1] = -1
        ids[171:, 0] = 2
        self.ids = ids
        self.table: Plan = plan(ids, EXPERTS, kernels.BLOCK)
        random = torch.Generator().manual_seed(4)
        self.z, self.dy = (torch.randn(190, SIZE, generator=random).bfloat16() for _ in range(2))
        self.token = self.table.pairs.long() // TOP
        self.known = int(self.table.starts[-1])
        self.expert = torch.searchsorted(self.table.starts[1:].contiguous(), torch.arange(self.known, dtype=torch.int32), right=True)
        self.gate = self.gates.view(-1)[self.table.pairs.long()][: self.known, None].double()

    def by_row(self, rows: torch.Tensor, matrix: torch.Tensor, *, across: bool) -> torch.Tensor:
        return torch.stack([rows[r].double() @ (matrix[self.expert[r]] if across else matrix[self.expert[r]].T) for r in range(self.known)])

    def space(self) -> torch.Tensor:
        return torch.full((self.token.numel(), SIZE), torch.nan, dtype=torch.bfloat16)


def sorted_rows(x: torch.Tensor, case: Case, *, renamed: bool) -> torch.Tensor:
    some = x[case.token]
    return some.view(-1, SIZE // 32, 4, 2, 4).permute(0, 1, 4, 2, 3).reshape(-1, SIZE) if renamed else some


@pytest.mark.parametrize("form", FORMS)
def test_the_products_are_float64s(form: Form) -> None:
    case = Case(form)
    packed = form is Form.MXFP4
    (w1, w3, w2), (v1, v3, v2) = case.weights, [v.double() for v in case.values]
    # w2 is [E, Z, I], w1 and w3 are [E, I, Z]; all widths are one
    dh = case.space()
    kernels.d_hidden(sorted_rows(case.dy, case, renamed=False), w2, case.table, dh)
    assert error(dh[: case.known], case.by_row(case.dy[case.token], v2, across=True)) < 0.003
    assert dh[case.known :].isnan().all(), "a row without an expert is not written"

    g, u = (case.by_row(case.z[case.token], v, across=False) for v in (v1, v3))
    h, by_g, by_u = partials(g, u, *BETAS)
    some = dh[: case.known].double()
    wanted = (by_g * some * case.gate, by_u * some * case.gate, h * case.gate)
    du, gated = case.space(), case.space()
    parts = kernels.inner(sorted_rows(case.z, case, renamed=packed), w1, w3, case.gates, dh, du, gated, case.table, BETAS)
    for found, right in zip((dh, du, gated), wanted, strict=True):
        assert error(found[: case.known], right) < 0.004
    assert error(parts.sum(0)[: case.known], (h.bfloat16().double() * some).sum(1)) < 1e-4

    out = case.space()
    kernels.d_input(dh, du, w1, w3, case.table, out)
    right = case.by_row(dh, v1, across=True) + case.by_row(du, v3, across=True)
    assert error(out[: case.known], right) < 0.003
    if packed:
        swapped = Mxfp4Weight(w1.packed >> 4 | w1.packed << 4, w1.scale)  # type: ignore[union-attr]
        kernels.d_input(dh, du, swapped, w3, case.table, out)
        assert error(out[: case.known], right) > 0.1


def test_rows_are_sorted_and_renamed_as_the_products_read_them() -> None:
    case = Case(Form.BFLOAT16)
    for renamed in (False, True):
        out = case.space()
        triton_backward.sort_rows(case.z, case.table, TOP, out, renamed=renamed)
        assert torch.equal(out, sorted_rows(case.z, case, renamed=renamed))


@pytest.mark.parametrize("add", [False, True])
def test_weights_gradients_are_float64s_and_zero_without_rows(add: bool) -> None:
    case = Case(Form.BFLOAT16)
    left = torch.randn(case.token.numel(), SIZE, generator=torch.Generator().manual_seed(5)).bfloat16()
    left[case.known :] = torch.nan
    right = sorted_rows(case.z, case, renamed=False)
    out = torch.full((EXPERTS + 1, SIZE, SIZE), 0.5 if add else torch.nan).bfloat16()
    gluon_wgrad.weight_gradient(left, right, plan(case.ids, EXPERTS + 1, 64), out, add=add)
    for e in range(EXPERTS):
        rows = slice(int(case.table.starts[e]), int(case.table.starts[e + 1]))
        assert error(out[e], left[rows].double().T @ right[rows].double() + 0.5 * add) < 0.004
    assert (out[EXPERTS] == 0.5 * add).all(), "an expert without rows"
