"""kda as one call: the composed reference against the recurrence, packed sequences, what is refused, and what autograd hands on."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from driftline.kernels.kda import PADDING, bounded_gate, kda, kda_recurrent, kda_step, l2_normalise
from driftline.kernels.kda import forward as fw
from driftline.kernels.kda.composed import kda_composed

torch.set_num_threads(1)

autograd = importlib.import_module("driftline.kernels.kda.autograd")
BATCH, STEPS, HEADS, WIDTH, VALUE = 2, 21, 2, 8, 6


def raw(dtype: torch.dtype = torch.float64, batch: int = BATCH, seed: int = 0) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

    return {"q": normal(batch, STEPS, HEADS, WIDTH), "k": normal(batch, STEPS, HEADS, WIDTH), "v": normal(batch, STEPS, HEADS, VALUE),
            "z": normal(batch, STEPS, HEADS, WIDTH), "beta": normal(batch, STEPS, HEADS), "a_log": normal(HEADS), "dt_bias": normal(HEADS * WIDTH)}


def test_the_call_is_the_recurrence_on_the_normalised_and_gated_inputs() -> None:
    x = raw()
    state = torch.randn(BATCH, HEADS, WIDTH, VALUE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    o, final = kda(**x, initial_state=state)
    g = bounded_gate(x["z"] + x["dt_bias"].view(HEADS, WIDTH), x["a_log"])
    want, want_final = kda_recurrent(l2_normalise(x["q"]), l2_normalise(x["k"]), x["v"], g, torch.sigmoid(x["beta"]), state)
    torch.testing.assert_close(o, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(final, want_final, rtol=0, atol=1e-12)


def test_outputs_are_in_the_dtype_of_v_and_the_state_in_single_precision() -> None:
    o, final = kda(**raw(torch.bfloat16))
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_get_what_each_gets_alone(dtype: torch.dtype) -> None:
    x = raw(batch=1)
    bounds = [0, 0, 1, 18, 18, 21]
    state = torch.randn(5, HEADS, WIDTH, VALUE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    o, final = kda(**x, initial_state=state, cu_seqlens=torch.tensor(bounds, dtype=dtype))
    assert o.shape == x["v"].shape
    for n in range(5):
        start, stop = bounds[n], bounds[n + 1]
        if start == stop:
            assert torch.equal(final[n], state[n])
            continue
        part = {name: t[:, start:stop] if t.dim() > 2 else t for name, t in x.items()}
        alone, alone_final = kda(**part, initial_state=state[n : n + 1])
        torch.testing.assert_close(o[:, start:stop], alone, rtol=0, atol=1e-13)
        torch.testing.assert_close(final[n : n + 1], alone_final, rtol=0, atol=1e-13)


def test_one_token_is_a_step_of_the_recurrence_bit_for_bit() -> None:
    x = {name: t[:, :1] if t.dim() > 2 else t for name, t in raw(torch.float32).items()}
    state = torch.randn(BATCH, HEADS, WIDTH, VALUE, generator=torch.Generator().manual_seed(1))
    g = bounded_gate((x["z"].flatten(2) + x["dt_bias"]).view(x["z"].shape), x["a_log"])
    want, want_state = kda_step(*(t[:, 0] for t in (l2_normalise(x["q"]), l2_normalise(x["k"]), x["v"], g, torch.sigmoid(x["beta"]))), state)
    o, final = kda(**x, initial_state=state)
    assert torch.equal(o[:, 0], want)
    assert torch.equal(final, want_state)


def test_no_tokens_at_all_leave_the_state() -> None:
    x = {name: t[:, :0] if t.dim() > 2 else t for name, t in raw().items()}
    state = torch.ones(BATCH, HEADS, WIDTH, VALUE, dtype=torch.float64)
    o, final = kda(**x, initial_state=state)
    assert o.shape == (BATCH, 0, HEADS, VALUE)
    assert torch.equal(final, state)


def test_a_position_with_very_negative_gate_and_beta_leaves_the_state_and_has_a_gradient_of_zero() -> None:
    x = raw()
    for name in ("z", "beta"):
        x[name][:, 9:] = PADDING
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    _, final = kda(**leaves)
    short = {name: t[:, :9] if t.dim() > 2 else t for name, t in x.items()}
    assert torch.equal(final, kda(**short)[1])
    torch.autograd.backward(final.square().sum())
    assert all(torch.isfinite(t.grad).all() for t in leaves.values() if t.grad is not None)
    assert x["k"].grad is not None
    assert not x["k"].grad[:, 9:].any()


@pytest.mark.parametrize(("change", "message"), [
    ({"q": torch.zeros(3, 4)}, "q has shape"),
    ({"k": torch.zeros(BATCH, STEPS, HEADS, 4)}, "k has shape"),
    ({"v": torch.zeros(BATCH, STEPS, HEADS)}, "v has shape"),
    ({"v": torch.zeros(BATCH, STEPS, 1, VALUE)}, "v has shape"),
    ({"z": torch.zeros(BATCH, STEPS, HEADS * WIDTH)}, "z has shape"),
    ({"beta": torch.zeros(BATCH, STEPS)}, "beta has shape"),
    ({"a_log": torch.zeros(1, HEADS)}, "a_log has shape"),
    ({"dt_bias": torch.zeros(HEADS, WIDTH)}, "dt_bias has shape"),
    ({"beta": torch.zeros(BATCH, STEPS, HEADS, dtype=torch.int32)}, "beta is torch.int32"),
    ({"lower_bound": -5.1}, "lower_bound is -5.1"),
    ({"lower_bound": 0.0}, "lower_bound is 0.0"),
    ({"initial_state": torch.zeros(BATCH, HEADS, VALUE, WIDTH)}, "initial_state has shape"),
    ({"initial_state": torch.zeros(BATCH, HEADS, WIDTH, VALUE, device="meta")}, "initial_state is on meta"),
    ({"k": torch.zeros(BATCH, STEPS, HEADS, WIDTH, device="meta")}, "k is on meta"),
    ({"cu_seqlens": torch.tensor([0, STEPS])}, "with 2 rows"),
    ({"cu_seqlens": torch.tensor([0.0, 21.0])}, "cu_seqlens is torch.float32"),
])
def test_an_argument_that_does_not_fit_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kda(**(raw(torch.float32) | change))


def test_kernels_are_asked_for_by_shape_and_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = importlib.import_module("driftline.kernels.kda.operator")
    asked: list[torch.Size] = []
    monkeypatch.setattr(operator, "runs_triton", lambda *tensors: True)
    monkeypatch.setattr(autograd, "kda_by_kernels", lambda q, *rest: asked.append(q.shape))

    def wide(width: int, dtype: torch.dtype) -> dict[str, Any]:
        x = torch.zeros(1, 3, 2, width, dtype=dtype)
        return {"q": x, "k": x, "v": x, "z": x, "beta": x[..., 0], "a_log": torch.zeros(2), "dt_bias": torch.zeros(2 * width)}

    kda(**wide(128, torch.bfloat16))
    kda(**wide(64, torch.bfloat16))
    kda(**wide(128, torch.float32))
    assert asked == [(1, 3, 2, 128)]


def test_autograd_hands_the_raw_inputs_to_the_backward_and_its_results_to_their_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the composed form on both sides, so that the wiring is all that can be wrong."""
    def composed(inputs: fw.Inputs, cu: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        arguments: list[Any] = [*inputs, cu]
        return kda_composed(*arguments)

    def backward(*args: Any) -> tuple[torch.Tensor, ...]:
        *tensors, lower_bound, state, cu, do, dfinal = args
        with torch.enable_grad():
            leaves: list[Any] = [t.detach().requires_grad_() for t in (*tensors, state)]
            arguments = [*leaves[:7], lower_bound, leaves[7], cu]
            o, final = kda_composed(*arguments)
        return torch.autograd.grad((o, final), leaves, (do, torch.zeros_like(final) if dfinal is None else dfinal))

    monkeypatch.setattr(autograd, "forward", composed)
    monkeypatch.setattr(importlib.import_module("driftline.kernels.kda.backward"), "kda_backward", backward)
    x = {name: t.requires_grad_() for name, t in raw(torch.float32, batch=1).items()}
    state = torch.ones(2, HEADS, WIDTH, VALUE, requires_grad=True)
    cu = torch.tensor([0, 5, STEPS])
    leaves = [*x.values(), state]
    for use_state in (True, False):
        losses = []
        for form in (autograd.kda_by_kernels, kda_composed):
            o, final = form(x["q"], x["k"], x["v"], x["z"], x["beta"], x["a_log"], x["dt_bias"], -4.0, state, cu)
            losses.append(o.sin().sum() + (final.cos().sum() if use_state else 0.0))
        got, want = (torch.autograd.grad(loss, leaves) for loss in losses)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert not autograd.kda_by_kernels(*x.values(), -4.0, state, cu)[0].requires_grad


def test_a_panel_holds_whole_chunks_of_every_row_and_its_bytes_are_stated() -> None:
    space = fw.Workspace.of(3, 2, torch.device("cpu"))
    held = sum(t.numel() * t.element_size() for t in vars(space).values())
    assert held == 3 * 2 * fw.CHUNK * fw.WORKSPACE_BYTES
    assert fw.layout_of(4, 130, None, 64).pieces == 12


def test_one_token_on_a_device_takes_the_recurrences_kernel_unless_gradients_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The given state is a value: the kernel writes another."""
    operator, sequence = (importlib.import_module(f"driftline.kernels.{name}") for name in ("kda.operator", "kda_decode.sequence"))
    monkeypatch.setattr(operator, "runs_triton", lambda *_: True)
    monkeypatch.setattr(operator, "WIDTH", WIDTH)
    monkeypatch.setattr(autograd, "kda_by_kernels", lambda *_: "chunks")
    monkeypatch.setattr(sequence, "kda_sequence", kda_composed)
    x = {name: value[:, :1] if value.dim() > 1 else value for name, value in raw(torch.float32).items()}
    x = {name: value.bfloat16() if name in ("q", "k", "z", "beta") else value for name, value in x.items()} | {"v": torch.randn(BATCH, 1, HEADS, WIDTH).bfloat16()}
    state = torch.randn(BATCH, HEADS, WIDTH, WIDTH)
    before = state.clone()
    with torch.no_grad():
        o, final = kda(**x, initial_state=state)
        two = {name: value.repeat(1, 2, *[1] * (value.dim() - 2)) if value.dim() > 1 else value for name, value in x.items()}
        assert kda(**two, initial_state=state) == "chunks"
    assert kda(**x, initial_state=state) == "chunks"
    want, want_final = kda_composed(**x, initial_state=state)
    torch.testing.assert_close(o.float(), want.float(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(final, want_final, rtol=0, atol=1e-4)
    assert torch.equal(state, before)
