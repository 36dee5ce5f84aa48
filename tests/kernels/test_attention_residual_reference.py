"""Attention residual: a softmax over depth whose limits are a mean and an identity, with the published gradient."""

from __future__ import annotations

import torch

from driftline.kernels.attention_residual import attention_residual

torch.set_num_threads(1)

EPS, WIDTH = 1e-5, 16


def sources(count: int, seed: int = 0) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, WIDTH, generator=rng, dtype=torch.float64) for _ in range(count)]


def test_zero_query_gives_the_mean() -> None:
    for count in (2, 3, 9):
        v = sources(count)
        out = attention_residual(v, torch.zeros(WIDTH).double(), torch.ones(WIDTH).double(), EPS)
        torch.testing.assert_close(out, torch.stack(v).mean(0), rtol=0, atol=1e-14)


def test_one_source_comes_back_unchanged() -> None:
    only = torch.randn(2, WIDTH).bfloat16()
    assert torch.equal(attention_residual([only], torch.randn(WIDTH), torch.randn(WIDTH), EPS), only)


def test_norm_acts_on_keys_and_values_stay_raw() -> None:
    """Scaling a source leaves its weight and scales its share."""
    v = sources(2)
    query, norm = torch.randn(WIDTH).double(), torch.rand(WIDTH).double()
    big = [v[0] * 1000, v[1]]
    direction = query * norm
    s = torch.stack([(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)) @ direction for x in big])
    p = s.softmax(0)
    torch.testing.assert_close(attention_residual(big, query, norm, EPS), p[0, ..., None] * big[0] + p[1, ..., None] * big[1])


def test_a_strong_query_picks_the_source_it_points_at() -> None:
    v = [torch.eye(WIDTH)[i].expand(2, WIDTH) for i in range(3)]
    out = attention_residual(v, 100 * torch.eye(WIDTH)[1], torch.ones(WIDTH), EPS)
    torch.testing.assert_close(out, v[1])


def test_half_precision_is_cast_once_at_the_end() -> None:
    v = [x.bfloat16() for x in sources(4)]
    query, norm = torch.randn(WIDTH).bfloat16(), torch.ones(WIDTH).bfloat16()
    want = attention_residual([x.float() for x in v], query.float(), norm.float(), EPS).bfloat16()
    assert torch.equal(attention_residual(v, query, norm, EPS), want)


def test_gradient_is_the_closed_form() -> None:
    v = [x.requires_grad_() for x in sources(5)]
    rng = torch.Generator().manual_seed(9)
    query, norm = (torch.randn(WIDTH, generator=rng, dtype=torch.float64).requires_grad_() for _ in range(2))
    do = torch.randn(3, 4, WIDTH, generator=rng, dtype=torch.float64)
    out = attention_residual(v, query, norm, EPS)
    out.backward(do)
    with torch.no_grad():
        stack, n = torch.stack(list(v)), norm * query
        r = torch.rsqrt(stack.square().mean(-1) + EPS)
        t = stack @ n
        p = (r * t).softmax(0)
        ds = p * ((stack * do).sum(-1) - (out * do).sum(-1))
        dv = p[..., None] * do + (ds * r)[..., None] * n - (ds * t * r**3 / WIDTH)[..., None] * stack
        dn = ((ds * r)[..., None] * stack).sum((0, 1, 2))
    torch.testing.assert_close(torch.stack([x.grad for x in v]), dv, rtol=0, atol=1e-12)
    torch.testing.assert_close(query.grad, dn * norm, rtol=0, atol=1e-12)
    torch.testing.assert_close(norm.grad, dn * query, rtol=0, atol=1e-12)
