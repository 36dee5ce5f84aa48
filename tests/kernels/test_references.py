"""The operator references: what each formula promises, on inputs that have broken other implementations."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.attention_residual import attention_residual
from driftline.kernels.kda import bounded_gate, kda_chunk, kda_recurrent, l2_normalise
from driftline.kernels.moe import expert_mlp, route
from driftline.kernels.rmsnorm import rmsnorm
from driftline.kernels.short_conv import short_conv
from driftline.kernels.situ_glu import situ_glu

torch.set_num_threads(1)
F64 = torch.float64


def kda_inputs(steps: int, keys: str = "random", gate: float | None = None) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(steps)
    shape = (2, steps, 3, 8)
    q, k, v = (torch.randn(shape, generator=rng, dtype=F64) for _ in range(3))
    if keys == "identical":
        k = k[:, :1].expand_as(k)
    if keys == "near":
        k = k[:, :1] + 0.02 * torch.randn(shape, generator=rng, dtype=F64)
    g = -5 * torch.sigmoid(torch.randn(shape, generator=rng, dtype=F64)) if gate is None else torch.full(shape, gate, dtype=F64)
    beta = torch.sigmoid(torch.randn(shape[:3], generator=rng, dtype=F64))
    state = torch.randn(2, 3, 8, 8, generator=rng, dtype=F64)
    return l2_normalise(q), l2_normalise(k), v, g, beta, state


@pytest.mark.parametrize("steps", [1, 2, 15, 16, 17, 33, 48])
@pytest.mark.parametrize(("keys", "gate"), [("random", None), ("identical", -0.01), ("near", -0.005), ("random", -5.0), ("identical", -1e-6)])
def test_kda_by_chunks_equals_the_recurrence(steps: int, keys: str, gate: float | None) -> None:
    inputs = kda_inputs(steps, keys, gate)
    out, state = kda_chunk(*inputs)
    want, want_state = kda_recurrent(*inputs)
    assert (out - want).abs().max() < 1e-10
    assert (state - want_state).abs().max() < 1e-10


def test_kda_in_fp32_survives_repeated_keys() -> None:
    """Neumann doubling in low precision is wrong by more than half on this input."""
    exact = kda_inputs(64, "near", -0.01)
    want, _ = kda_recurrent(*exact)
    got, _ = kda_chunk(*(x.float() for x in exact))
    assert (got.double() - want).norm() / want.norm() < 1e-5


def test_kda_gradients_by_chunks_equal_the_recurrence() -> None:
    inputs = [x.requires_grad_() for x in kda_inputs(20)]
    weight = torch.randn(2, 20, 3, 8, dtype=F64)
    ours = torch.autograd.grad((kda_chunk(*inputs)[0] * weight).sum(), inputs)
    theirs = torch.autograd.grad((kda_recurrent(*inputs)[0] * weight).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-9


def test_a_later_gate_never_changes_an_earlier_output() -> None:
    q, k, v, g, beta, state = kda_inputs(33)
    before, _ = kda_chunk(q, k, v, g, beta, state)
    edited = g.clone()
    edited[:, -1] = -3.0
    after, _ = kda_chunk(q, k, v, edited, beta, state)
    assert torch.equal(before[:, :-1], after[:, :-1])


def test_a_masked_position_leaves_the_state() -> None:
    q, k, v, g, beta, state = kda_inputs(20)
    g[:, 12:], beta[:, 12:] = 0, 0
    _, padded = kda_chunk(q, k, v, g, beta, state)
    _, short = kda_recurrent(q[:, :12], k[:, :12], v[:, :12], g[:, :12], beta[:, :12], state)
    assert (padded - short).abs().max() < 1e-12


def test_the_gate_stays_within_its_bound() -> None:
    g = bounded_gate(torch.tensor([[-1e4, 0.0, 1e4]]), torch.zeros(1))
    assert g.min() >= -5
    assert g.max() <= 0
    assert float(g[0, 1]) == -2.5


def test_short_conv_in_pieces_equals_the_whole_and_respects_lengths() -> None:
    x, weight, tail = torch.randn(2, 11, 6, dtype=F64), torch.randn(6, 4, dtype=F64), torch.zeros(2, 3, 6, dtype=F64)
    whole, end = short_conv(x, weight, tail)
    first, middle = short_conv(x[:, :4], weight, tail)
    second, last = short_conv(x[:, 4:], weight, middle)
    assert torch.allclose(torch.cat([first, second], 1), whole)
    assert torch.equal(last, end)
    _, ragged = short_conv(x, weight, tail, torch.tensor([2, 11]))
    assert torch.equal(ragged[0], torch.cat([tail[0, 2:], x[0, :2]]))
    assert torch.equal(ragged[1], x[1, -3:])


def test_rmsnorm_casts_before_it_multiplies() -> None:
    x, weight = torch.randn(64, 128).bfloat16(), (1 + 0.1 * torch.randn(128)).bfloat16()
    got = rmsnorm(x, weight, 1e-5)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(got, normed.bfloat16() * weight)
    assert not torch.equal(got, (normed * weight.float()).bfloat16())


def test_situ_glu_is_bounded_and_has_the_published_gradient() -> None:
    g = torch.randn(200, dtype=F64).mul(8).requires_grad_()
    u = torch.randn(200, dtype=F64).mul(60).requires_grad_()
    out = situ_glu(g, u)
    assert out.abs().max() <= 100
    dg, du = torch.autograd.grad(out.sum(), (g, u))
    tg, s, tu = torch.tanh(g / 4), torch.sigmoid(g), torch.tanh(u / 25)
    assert torch.allclose(dg, ((1 - tg**2) * s + 4 * tg * s * (1 - s)) * 25 * tu)
    assert torch.allclose(du, (1 - tu**2) * 4 * tg * s)


def test_attention_residual_with_a_zero_query_is_the_mean_and_one_source_is_itself() -> None:
    sources = [torch.randn(5, 16, dtype=F64) for _ in range(3)]
    mixed = attention_residual(sources, torch.zeros(16, dtype=F64), torch.ones(16, dtype=F64), 1e-5)
    assert torch.allclose(mixed, torch.stack(sources).mean(0))
    assert attention_residual(sources[:1], torch.ones(16), torch.ones(16), 1e-5) is sources[0]


def test_attention_residual_gradient_is_the_closed_form() -> None:
    torch.manual_seed(0)
    v = [torch.randn(4, 16, dtype=F64, requires_grad=True) for _ in range(3)]
    query, weight = torch.randn(16, dtype=F64), torch.randn(16, dtype=F64)
    do = torch.randn(4, 16, dtype=F64)
    grads = torch.autograd.grad((attention_residual(v, query, weight, 1e-5) * do).sum(), v)
    n = query * weight
    with torch.no_grad():
        stacked = torch.stack(list(v))
        r = torch.rsqrt(stacked.square().mean(-1) + 1e-5)
        t = stacked @ n
        p = torch.softmax(r * t, 0)
        dot = (stacked * do).sum(-1)
        ds = p * (dot - (p * dot).sum(0))
        want = p[..., None] * do + (ds * r)[..., None] * n - (ds * t * r**3 / 16)[..., None] * stacked
    for i, grad in enumerate(grads):
        assert torch.allclose(grad, want[i])


def test_the_router_bias_selects_and_never_weighs() -> None:
    x, weight = torch.randn(7, 12, dtype=F64), torch.randn(6, 12, dtype=F64)
    bias = torch.tensor([100.0, 0, 0, 0, 0, 0], dtype=F64)
    ids, gates = route(x, weight, bias, 2, 1.0)
    assert (ids == 0).any(-1).all()
    scores = torch.sigmoid(x @ weight.t()).gather(-1, ids)
    assert torch.allclose(gates, scores / scores.sum(-1, keepdim=True))


def test_replayed_routes_carry_the_gradient_of_fixed_ids() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(5, 6, dtype=F64), torch.randn(4, 6, dtype=F64, requires_grad=True)
    ids = torch.tensor([[3, 0], [1, 2], [0, 1], [2, 3], [3, 1]])
    pick = torch.randn(5, 2, dtype=F64)

    def value(w: torch.Tensor) -> torch.Tensor:
        return (route(x, w, torch.zeros(4, dtype=F64), 2, 1.0, ids)[1] * pick).sum()

    (grad,) = torch.autograd.grad(value(weight), weight)
    step = 1e-6
    for i, j in [(0, 0), (3, 5), (2, 1)]:
        bump = torch.zeros_like(weight)
        bump[i, j] = step
        finite = (value(weight.detach() + bump) - value(weight.detach() - bump)) / (2 * step)
        assert abs(float(finite - grad[i, j])) < 1e-7


@pytest.mark.parametrize("spread", ["random", "one expert takes all"])
def test_both_schedules_of_the_expert_mlp_agree(spread: str) -> None:
    torch.manual_seed(0)
    experts, tokens = 4, 50
    w1, w3, w2 = torch.randn(4, 8, 6, dtype=F64), torch.randn(4, 8, 6, dtype=F64), torch.randn(4, 6, 8, dtype=F64)
    z = torch.randn(tokens, 6, dtype=F64)
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)]) if spread == "random" else torch.tensor([[2, 0]]).expand(tokens, -1)
    gates = torch.rand(tokens, 2, dtype=F64)
    many = expert_mlp(z, ids, gates, w1, w3, w2, 4.0, 25.0)  # 50 > 8 * 4: sorted by expert
    few = torch.cat([expert_mlp(z[i : i + 10], ids[i : i + 10], gates[i : i + 10], w1, w3, w2, 4.0, 25.0) for i in range(0, tokens, 10)])
    assert torch.allclose(many, few, rtol=0, atol=1e-12)
