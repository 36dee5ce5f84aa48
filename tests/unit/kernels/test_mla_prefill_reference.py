"""The attention of packed sequences by the reference: against torch's own, its gradients, and what is refused."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.mla_prefill import mla_prefill

torch.set_num_threads(1)
NOPE, SHARED, VALUE, HEADS = 8, 4, 6, 3


def inputs(queries: int, keys: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = ((queries, HEADS, NOPE + SHARED), (keys, HEADS, NOPE + VALUE), (keys, SHARED))
    return [torch.randn(*shape, generator=random, dtype=torch.float64, requires_grad=True) for shape in shapes]


def starts(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def test_it_is_torchs_attention_of_every_sequence_with_the_shared_key_beside_each_heads_own() -> None:
    q, kv, shared = inputs(12, 17)
    out = mla_prefill(q, kv, shared, cu_seqlens=starts(5, 0, 7), cu_seqlens_k=starts(5, 2, 10), scale=0.3, out_dtype=torch.float64)
    for (a, b), (c, d) in (((0, 5), (0, 5)), ((5, 12), (7, 17))):
        key = torch.cat([kv[c:d, :, :NOPE], shared[c:d, None].expand(-1, HEADS, -1)], dim=-1).transpose(0, 1)
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        wanted = torch.nn.functional.scaled_dot_product_attention(q[a:b].transpose(0, 1), key, kv[c:d, :, NOPE:].transpose(0, 1), attn_mask=seen, scale=0.3)
        assert (out[a:b].transpose(0, 1) - wanted).abs().max() < 1e-12


def test_its_gradients_are_those_of_finite_differences() -> None:
    assert torch.autograd.gradcheck(lambda *given: mla_prefill(*given, scale=0.3, out_dtype=torch.float64), inputs(3, 3))


def test_later_tokens_change_nothing_before_them() -> None:
    q, kv, shared = (t.detach() for t in inputs(9, 9))
    before = mla_prefill(q, kv, shared, out_dtype=torch.float64)
    kv[6:], shared[6:], q[6:] = 9.0, 9.0, 9.0
    after = mla_prefill(q, kv, shared, out_dtype=torch.float64)
    assert torch.equal(before[:6], after[:6])
    assert not torch.equal(before[6:], after[6:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 4)}, r"q is \[4, 4\] and k_shared \[4, 4\]; they must be"),
        ({"kv": torch.zeros(4, 3, 8)}, r"kv is \[4, 3, 8\]; it must be \[4, 3, 8 \+ value\]"),
        ({"kv": torch.zeros(5, 3, 14)}, r"kv is \[5, 3, 14\]; it must be \[4, 3"),
        ({"kv": torch.zeros(4, 3, 14, dtype=torch.float64)}, "they must be of one dtype"),
        ({"cu_seqlens": torch.zeros(2)}, "cu_seqlens is torch.float32"),
        ({"cu_seqlens": torch.zeros(1, dtype=torch.int32)}, r"cu_seqlens is torch.int32 \[1\]"),
        ({"cu_seqlens_k": torch.zeros(2, dtype=torch.int32)}, "cu_seqlens_k goes with cu_seqlens"),
        ({"q": torch.zeros(2, 3, 12), "cu_seqlens": torch.zeros(2, dtype=torch.int32)}, "kv has 4 rows for 2 of q: give cu_seqlens_k"),
        ({"out_dtype": torch.int32}, "out_dtype is torch.int32"),
    ],
)
def test_what_cannot_be_is_refused_with_what_it_must_be(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"q": torch.zeros(4, 3, 12), "kv": torch.zeros(4, 3, 14), "k_shared": torch.zeros(4, 4)}
    with pytest.raises(ValueError, match=message):
        mla_prefill(**(given | change))  # type: ignore[arg-type]
