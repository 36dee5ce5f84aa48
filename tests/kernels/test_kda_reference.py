"""KDA: the chunk form is the recurrence, for the keys and gates that broke other implementations, in value and in gradient."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from driftline.kernels.kda import bounded_gate, kda_chunk, kda_recurrent, kda_step, l2_normalise

torch.set_num_threads(1)

HEADS, WIDTH, VALUE = 2, 8, 6


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(x.to(dtype) for x in self))


def inputs(kind: str, steps: int, *, batch: int = 2, width: int = WIDTH, seed: int = 0) -> Inputs:
    """fp64 inputs whose keys and gates are of the named kind; the initial state is random."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    q, k, v = normal(batch, steps, HEADS, width), normal(batch, steps, HEADS, width), normal(batch, steps, HEADS, VALUE)
    g = -5 * torch.sigmoid(normal(batch, steps, HEADS, width))
    beta = torch.sigmoid(normal(batch, steps, HEADS))
    match kind:
        case "random":
            pass
        case "identical":
            k, g, beta = k[:, :1].expand_as(k), torch.full_like(g, -0.01), torch.full_like(beta, 0.9)
        case "near_identical":
            k, g, beta = k[:, :1] + 0.02 * k, torch.full_like(g, -0.01), torch.full_like(beta, 0.9)
        case "undecayed":
            k, g, beta = k[:, :1].expand_as(k), torch.zeros_like(g), torch.ones_like(beta)
        case "fastest":
            g = torch.full_like(g, -5.0)
    return Inputs(l2_normalise(q), l2_normalise(k), v, g, beta, normal(batch, HEADS, width, VALUE))


KINDS = ("random", "identical", "near_identical", "undecayed", "fastest")


@pytest.mark.parametrize("steps", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_equal_the_recurrence(kind: str, steps: int) -> None:
    x = inputs(kind, steps)
    out, state = kda_chunk(*x)
    want, want_state = kda_recurrent(*x)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, want_state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision_chunks_stay_close_to_the_double_recurrence(kind: str) -> None:
    x = inputs(kind, 256, width=32)
    want, want_state = kda_recurrent(*x)
    out, state = kda_chunk(*x.to(torch.float32))
    assert torch.isfinite(out).all()
    for got, exact in ((out, want), (state, want_state)):
        assert (got.double() - exact).abs().max() < 1e-5 * max(1.0, float(exact.abs().max()))


def test_single_precision_survives_a_long_run_of_one_key_at_the_slowest_and_fastest_gates() -> None:
    for gate in (-1e-4, -5.0):
        x = inputs("identical", 2048, batch=1)
        x = x._replace(g=torch.full_like(x.g, gate), beta=torch.full_like(x.beta, 1.0))
        out, state = kda_chunk(*x.to(torch.float32))
        want, want_state = kda_recurrent(*x)
        assert (out.double() - want).abs().max() < 1e-4
        assert (state.double() - want_state).abs().max() < 1e-4


def test_a_step_is_one_token_of_the_recurrence() -> None:
    x = inputs("random", 1)
    out, state = kda_step(*(t[:, 0] for t in x[:5]), x.state)
    want, want_state = kda_recurrent(*x)
    assert torch.equal(out, want[:, 0])
    assert torch.equal(state, want_state)


def test_the_recurrence_is_the_written_matrix_form() -> None:
    """S_t = (I - beta k k^T) diag(e^g) S + beta k v^T, and o = S^T q / sqrt(K)."""
    x = inputs("random", 5, batch=1)
    out, _ = kda_recurrent(*x)
    for h in range(HEADS):
        state = x.state[0, h]
        for t in range(5):
            k, v, beta = x.k[0, t, h], x.v[0, t, h], x.beta[0, t, h]
            state = (torch.eye(WIDTH) - beta * torch.outer(k, k)) @ (x.g[0, t, h].exp()[:, None] * state)
            state = state + beta * torch.outer(k, v)
            torch.testing.assert_close(out[0, t, h], state.T @ x.q[0, t, h] * WIDTH**-0.5, rtol=0, atol=1e-13)


def test_pieces_with_a_carried_state_equal_the_whole() -> None:
    x = inputs("random", 41)
    want, want_state = kda_chunk(*x)
    outs, state = [], x.state
    for start, stop in ((0, 1), (1, 19), (19, 35), (35, 41)):
        out, state = kda_chunk(*(t[:, start:stop] for t in x[:5]), state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, want_state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("real", [0, 1, 16, 20])
def test_masked_positions_leave_the_state(real: int) -> None:
    x = inputs("random", 24)
    mask = torch.arange(24) < real
    masked = x._replace(g=x.g * mask[:, None, None], beta=x.beta * mask[:, None])
    _, state = kda_chunk(*masked)
    want = kda_recurrent(*(t[:, :real] for t in x[:5]), x.state)[1] if real else x.state
    torch.testing.assert_close(state, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_editing_the_last_gate_leaves_every_earlier_output_and_gradient_bitwise_equal(dtype: torch.dtype) -> None:
    """An anchor inside a chunk would let a prefix's log-probabilities depend on its continuation (flash-linear-attention#1240)."""
    x = inputs("random", 30, width=16).to(dtype)
    edited = x.g.clone()
    edited[:, -1] = -5.0
    results = []
    for g in (x.g, edited):
        leaves = [t.clone().requires_grad_() for t in x._replace(g=g)]
        out, _ = kda_chunk(*leaves)
        out[:, :-1].square().sum().backward()
        results.append((out.detach(), [leaf.grad for leaf in leaves]))
    (before, grads_before), (after, grads_after) = results
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])
    for one, other in zip(grads_before[:5], grads_after[:5], strict=True):
        assert torch.equal(one[:, :-1], other[:, :-1])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_chunk_form_are_those_of_the_recurrence(kind: str) -> None:
    x = inputs(kind, 21)
    grads = []
    for form in (kda_chunk, kda_recurrent):
        leaves = [t.detach().clone().requires_grad_() for t in x]
        out, state = form(*leaves)
        (out.sin().sum() + state.cos().sum()).backward()
        grads.append([leaf.grad for leaf in leaves])
    for name, one, other in zip(Inputs._fields, *grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def test_gradients_match_finite_differences() -> None:
    x = inputs("random", 18, batch=1, width=3)
    leaves = tuple(t.clone().requires_grad_() for t in (*(t[:, :, :1] for t in x[:5]), x.state[:, :1]))
    assert torch.autograd.gradcheck(kda_chunk, leaves, atol=1e-6)


def test_single_precision_gradients_are_finite_at_the_fastest_gate() -> None:
    leaves = [t.requires_grad_() for t in inputs("fastest", 64, width=32).to(torch.float32)]
    out, state = kda_chunk(*leaves)
    (out.square().sum() + state.square().sum()).backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)


def test_the_gate_lies_strictly_inside_its_bound_and_follows_the_formula() -> None:
    z = torch.linspace(-6, 6, 13, dtype=torch.float64).reshape(1, 1, 13).expand(2, 3, 13)
    a_log = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    g = bounded_gate(z, a_log)
    assert (g < 0).all()
    assert (g > -5).all()
    torch.testing.assert_close(g[0, 2, 7], -5 / (1 + torch.exp(-torch.e * z[0, 2, 7])))
    assert g[0, 1, 6] == -2.5


def test_normalisation_keeps_epsilon_inside_the_root() -> None:
    tiny = torch.full((4,), 1e-4, dtype=torch.float64)
    torch.testing.assert_close(l2_normalise(tiny), tiny / (4e-8 + 1e-6) ** 0.5)
    assert torch.equal(l2_normalise(torch.zeros(4)), torch.zeros(4))
