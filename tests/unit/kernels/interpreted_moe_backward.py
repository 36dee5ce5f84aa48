"""The expert MLP's backward kernels, as Triton's interpreter runs them, against float64. Run by test_kernels_interpreted.py in a process of its own.

The interpreter cuts to bfloat16 where a device rounds, so its errors are twice a device's; tiles are small, so that a few rows make many.
"""

from __future__ import annotations

import pytest
import torch
from expert_cases import MAGNITUDES, choices, error, exact, matrices
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.moe import triton_backward as kernels
from driftline.kernels.moe.autograd import expert_mlp_with_grad
from driftline.kernels.moe.backward import Gradients, Wanted, backward
from driftline.kernels.moe.plan import plan
from driftline.kernels.moe.reference import expert_mlp
from driftline.kernels.moe.triton_tiles import TO_BFLOAT16, Form
from driftline.kernels.moe.triton_wgrad import Side, WeightBlocks, weight_gradient
from driftline.kernels.mxfp4.weights import ExpertWeight

torch.set_num_threads(1)

BETAS = (4.0, 25.0)
SMALL = kernels.Blocks(16, 32, 32, 1, 1)
EVERYTHING = Wanted(True, True, True, True, True)
FROZEN = Wanted(True, True, False, False, False)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in kernels.PINNED:
        monkeypatch.setitem(kernels.PINNED, key, SMALL)
    monkeypatch.setattr(kernels, "INNER", {})
    monkeypatch.setattr("driftline.kernels.moe.triton_wgrad.weight_gradient.__kwdefaults__", {"blocks": WeightBlocks(32, 32, 16, 1, 1)})


def case(form: Form, tokens: int, outer: int, hidden: int, experts: int = 5, top_k: int = 3) -> tuple[list[ExpertWeight], tuple[torch.Tensor, ...]]:
    """The three stacks in this form; z, ids, gates, their exact values in float64, dy."""
    pairs = [matrices(form, shape, i) for i, shape in enumerate([(experts, hidden, outer), (experts, hidden, outer), (experts, outer, hidden)])]
    random = torch.Generator().manual_seed(9)
    z, dy = (torch.randn(tokens, outer, generator=random).bfloat16() for _ in range(2))
    return [w for w, _ in pairs], (2 * z, *choices(tokens, experts, top_k), dy, *(v for _, v in pairs))


def run(weights: list[ExpertWeight], given: tuple[torch.Tensor, ...], wanted: Wanted, microbatch: int | None = None) -> tuple[Gradients, tuple[torch.Tensor, ...]]:
    z, ids, gates, dy, *values = given
    return (backward(z, ids, gates, *weights, BETAS, dy, wanted, microbatch), exact(z, ids, gates, tuple(values), dy, BETAS))


@pytest.mark.parametrize(("outer", "hidden"), [(64, 64), (48, 80)], ids=["whole", "ragged"])
@pytest.mark.parametrize("microbatch", [None, 7])
def test_gradients_of_everything_with_bfloat16_weights(outer: int, hidden: int, microbatch: int | None) -> None:
    found, wanted = run(*case(Form.BFLOAT16, 13, outer, hidden), EVERYTHING, microbatch)
    assert found.gates is not None
    assert found.gates.dtype == torch.float32
    for name, mine, right in zip(Gradients._fields, found, wanted, strict=True):
        assert error(mine, right) < 0.015, name


@pytest.mark.parametrize(("form", "outer", "hidden"), [(Form.MXFP4, 64, 64), (Form.MXFP4, 96, 32), (Form.FP8, 128, 128)])
def test_packed_weights_are_read_as_their_values_and_stay_frozen(form: Form, outer: int, hidden: int) -> None:
    found, wanted = run(*case(form, 8, outer, hidden), FROZEN, 5)
    assert error(found.z, wanted[0]) < 0.015
    assert error(found.gates, wanted[1]) < 0.015
    assert found[2:] == (None, None, None)


def test_swapped_nibbles_a_shifted_scale_and_another_slot_order_would_be_seen() -> None:
    weights, given = case(Form.MXFP4, 6, 64, 64)
    right = run(weights, given, FROZEN)[1][0]
    for i in range(3):
        packed, scale = weights[i]
        for wrong in (type(weights[i])(packed >> 4 | packed << 4, scale), type(weights[i])(packed, scale.roll(1, -1))):
            assert error(run([*weights[:i], wrong, *weights[i + 1 :]], given, FROZEN)[0].z, right) > 0.1
    z, ids, gates, *rest = given
    assert error(run(weights, (z, ids, gates.flip(1), *rest), FROZEN)[0].z, right) > 0.1


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.data())
def test_any_choice_of_experts_even_none_and_one_for_all(tokens: int, experts: int, data: st.DataObject) -> None:
    """Experts without rows get zeros, whatever was in memory; an id that is no expert gives and gets nothing."""
    top_k = data.draw(st.integers(1, experts))
    rows = [data.draw(st.permutations(range(experts)))[:top_k] for _ in range(tokens)]
    weights, (z, _, _, dy, *values) = case(Form.BFLOAT16, tokens, 32, 32, experts, top_k)
    ids = torch.tensor(rows)
    gates = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(1)) + 0.1
    absent = data.draw(st.integers(0, tokens - 1))
    wanted = exact(z, ids, gates * (torch.arange(tokens) != absent)[:, None], tuple(values), dy, BETAS)
    ids[absent] = -1
    found = backward(z, ids, gates, *weights, BETAS, dy, EVERYTHING)
    assert found.z is not None
    assert found.gates is not None
    assert torch.equal(found.z[absent], torch.zeros(32, dtype=torch.bfloat16))
    assert torch.equal(found.gates[absent], torch.zeros(top_k))
    present = torch.arange(tokens) != absent
    if tokens > 1:
        assert error(found.z[present], wanted[0][present]) < 0.02
        assert error(found.gates[present], wanted[1][present]) < 0.02
    for mine, right in zip(found[2:], wanted[2:], strict=True):
        assert mine is not None
        assert (mine.double() - right).norm() <= 0.02 * right.norm()


def test_a_gate_and_its_gradient_belong_to_their_own_pair() -> None:
    """With numbers whose sums are exact, the bits of a pair's gradient are the same in any batch and at any height of the tiles."""
    weights, (z, ids, gates, dy, *_) = case(Form.BFLOAT16, 12, 32, 64)
    whole_numbers = [(w * 8 * 4).round() / 8 for w in weights]  # type: ignore[operator]
    z, dy, gates = (z * 2).round(), (dy * 2).round(), (gates * 8).round() / 8
    whole = backward(z, ids, gates, *whole_numbers, BETAS, dy, FROZEN).gates
    assert whole is not None
    for some in ([0], [11], [5, 4], list(range(11, -1, -1))):
        part = backward(z[some], ids[some], gates[some], *whole_numbers, BETAS, dy[some], FROZEN).gates
        assert torch.equal(part, whole[some])
    split = backward(z, ids, gates, *whole_numbers, BETAS, dy, FROZEN, 5).gates
    assert torch.equal(split, whole)


def test_no_tokens_give_zero_gradients_of_weights() -> None:
    weights, (z, ids, gates, dy, *_) = case(Form.BFLOAT16, 2, 32, 32)
    found = backward(z[:0], ids[:0], gates[:0], *weights, BETAS, dy[:0], EVERYTHING)
    assert found.z is not None
    assert found.z.shape == (0, 32)
    for mine in found[2:]:
        assert mine is not None
        assert not mine.any()


def test_rows_are_summed_into_a_gradient_that_is_kept_or_replaced() -> None:
    ids, _ = choices(9, 4, 2)
    table = plan(ids, 4, 16)
    left, right = (torch.randn(18, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))
    out = torch.full((4, 32, 32), float("nan"))
    weight_gradient(Side(left, False), Side(right, False), table, 2, out, add=False, blocks=WeightBlocks(16, 32, 16, 1, 1))
    once = out.clone()
    for e in range(4):
        rows = slice(int(table.starts[e]), int(table.starts[e + 1]))
        torch.testing.assert_close(once[e], left[rows].float().t() @ right[rows].float(), rtol=1e-5, atol=1e-5)
    weight_gradient(Side(left, False), Side(right, False), table, 2, out, add=True, blocks=WeightBlocks(16, 32, 16, 1, 1))
    torch.testing.assert_close(out, 2 * once, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", [Form.BFLOAT16, Form.MXFP4])
def test_the_op_on_a_device_carries_these_gradients(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward is the reference's here: what is looked at is which gradient goes where."""
    weights, (z, ids, gates, dy, *values) = case(form, 6, 32, 32)
    seen: list[int | None] = []

    def forward(z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, w1: ExpertWeight, w3: ExpertWeight, w2: ExpertWeight, beta: float, linear_beta: float,
                *, activations: object, microbatch: int | None) -> torch.Tensor:
        seen.append(microbatch)
        assert not any(t.requires_grad for t in (z, gates, w1) if isinstance(t, torch.Tensor))
        return expert_mlp(z, ids, gates, *(v.bfloat16() for v in values), beta, linear_beta)

    monkeypatch.setattr("driftline.kernels.moe.expert_mlp", forward)
    wanted = exact(z, ids, gates, tuple(values), dy, BETAS)
    leaves = [z.requires_grad_(), gates.requires_grad_(), *(w.requires_grad_() for w in weights if isinstance(w, torch.Tensor))]
    out = expert_mlp_with_grad(z, ids, gates, *weights, *BETAS, activations=None, microbatch=4)
    for mine, right in zip(torch.autograd.grad(out, leaves, dy), wanted, strict=False):
        assert error(mine, right) < 0.02
    assert seen == [4]
    with pytest.raises(ValueError, match="z"):
        expert_mlp_with_grad(z.float(), ids, gates, *weights, *BETAS, activations=None, microbatch=None)
    with pytest.raises(ValueError, match="w3"):
        expert_mlp_with_grad(z, ids, gates, weights[0], (1, 2), weights[2], *BETAS, activations=None, microbatch=None)  # type: ignore[arg-type]


def assembled(words: dict[str, int]) -> dict[str, int]:
    """What the text of the assembly leaves in its registers, by the instructions' definitions."""
    held = dict(words)

    def value(name: str) -> int:
        return held[name] if name in held else int(name, 0)

    def product(left: int, right: int) -> int:
        pair = torch.tensor([[left & 0xFFFF, left >> 16], [right & 0xFFFF, right >> 16]], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
        low, high = ((pair[0] * pair[1]).bfloat16().view(torch.int16).to(torch.int32) & 0xFFFF).tolist()
        return int(low | high << 16)

    for line in TO_BFLOAT16.value.replace("{", "").replace("}", "").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        to, *given = (part.strip() for part in rest.split(","))
        args = [value(part) for part in given]
        match name:
            case "mov.b32":
                held[to] = args[0]
            case "shl.b32":
                held[to] = args[0] << args[1] & 0xFFFFFFFF
            case "and.b32":
                held[to] = args[0] & args[1]
            case "lop3.b32":
                table = args[3]
                held[to] = sum(((table >> ((args[0] >> i & 1) << 2 | (args[1] >> i & 1) << 1 | (args[2] >> i & 1))) & 1) << i for i in range(32))
            case "prmt.b32":
                octets = args[0].to_bytes(4, "little") + args[1].to_bytes(4, "little")
                held[to] = int.from_bytes(bytes(octets[args[2] >> 4 * i & 7] for i in range(4)), "little")
            case "mul.rn.bf16x2":
                held[to] = product(args[0], args[1])
            case _:
                raise AssertionError(name)
    return held


@pytest.mark.parametrize("scale", [0, 1, 100, 127, 128])
def test_the_assembly_that_the_interpreter_cannot_run_gives_every_code_its_value(scale: int) -> None:
    """Bytes hold all sixteen codes in both places; the factor is 2^(scale - 1)."""
    table = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES)) * torch.exp2(torch.tensor(scale - 127.0))
    factor = (scale + 126) << 7 | (scale + 126) << 23
    for first in range(0, 256, 4):
        octets = [first, (first * 7 + 3) % 256, (first * 5 + 90) % 256, 255 - first]
        held = assembled({"$4": int.from_bytes(bytes(octets), "little"), "$5": factor, "$6": factor})
        for registers, shift in ((("$0", "$1"), 0), (("$2", "$3"), 4)):
            found = torch.tensor([held[r] >> 16 * half & 0xFFFF for r in registers for half in range(2)], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
            assert found.float().tolist() == [table[octet >> shift & 15].item() for octet in octets]
