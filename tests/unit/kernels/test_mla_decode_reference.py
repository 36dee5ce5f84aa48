"""The decode of multi-head latent attention by the reference: against the expanded form, and what is refused."""

from __future__ import annotations

import pytest
import torch
from mla_cases import paged

from driftline.kernels.mla_decode import mla_decode

torch.set_num_threads(1)


def test_it_is_the_expanded_attention_of_keys_and_values_made_from_the_latents() -> None:
    """q_nope W_UK against the latents, then W_UV, is q against expanded keys and values: in fp64 to 1e-12."""
    case = paged([5, 40], heads=3, latent=32, shared=16, page=16, dtype=torch.float64)
    random = torch.Generator().manual_seed(1)
    w_uk, w_uv = (torch.randn(3, 8, 32, generator=random, dtype=torch.float64) for _ in range(2))
    nope = torch.randn(2, 3, 8, generator=random, dtype=torch.float64)
    q = torch.cat([torch.einsum("bhn,hnr->bhr", nope, w_uk), case.q[:, 0, :, 32:]], dim=-1)
    latents = mla_decode(q, case.pages, case.table, case.lengths, latent=32, scale=0.2, out_dtype=torch.float64)
    for i, length in enumerate(case.lengths.tolist()):
        rows = case.pages[case.table[i, : -(-length // 16)].long()].view(-1, 48)[:length]
        keys = torch.cat([torch.einsum("nr,hdr->hnd", rows[:, :32], w_uk), rows[:, 32:].expand(3, -1, -1)], dim=-1)
        whole = torch.cat([nope[i], case.q[i, 0, :, 32:]], dim=-1)
        wanted = torch.nn.functional.scaled_dot_product_attention(whole[:, None], keys, torch.einsum("nr,hdr->hnd", rows[:, :32], w_uv), scale=0.2)
        assert (torch.einsum("hr,hdr->hd", latents[i], w_uv) - wanted[:, 0]).abs().max() < 1e-12


def test_each_query_of_a_window_sees_the_rows_before_it_and_its_own() -> None:
    case = paged([4, 37], heads=2, window=4, latent=16, shared=16, page=16)
    whole = mla_decode(*case, latent=16)
    for t in range(4):
        alone = mla_decode(case.q[:, t], case.pages, case.table, case.lengths - 3 + t, latent=16)
        assert torch.allclose(whole[:, t], alone, atol=1e-6)
    assert mla_decode(case.q, case.pages, case.table, case.lengths, latent=16, max_length=37).equal(whole)


def test_no_rows_give_zeros_and_what_lies_beyond_a_sequence_is_not_read() -> None:
    case = paged([0, 3], heads=2, latent=16, shared=16, page=16)
    found = mla_decode(*case, latent=16, out_dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert not bool(found[0].any())
    assert bool(found.isfinite().all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 80)}, r"q is \[2, 80\]; it must be \[B, H"),
        ({"pages": torch.zeros(4, 16, 79)}, r"pages is \[4, 16, 79\]; it must be \[pages, rows, 80\]"),
        ({"table": torch.zeros(3, 4, dtype=torch.int32)}, r"table is torch.int32 \[3, 4\]; it must be int32 \[2"),
        ({"table": torch.zeros(2, 4)}, "table is torch.float32"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, "lengths is torch.int64"),
        ({"pages": torch.zeros(4, 16, 80, dtype=torch.float64)}, "both must be of one dtype"),
        ({"latent": 80}, "latent is 80; it must be between 0 and the width 80"),
        ({"max_length": 65}, "max_length is 65; the table has room for 64 rows"),
        ({"out_dtype": torch.int32}, "out_dtype is torch.int32"),
    ],
)
def test_what_cannot_be_is_refused_with_what_it_must_be(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"q": torch.zeros(2, 3, 80), "pages": torch.zeros(4, 16, 80), "table": torch.zeros(2, 4, dtype=torch.int32),
                                "lengths": torch.zeros(2, dtype=torch.int32), "latent": 64}
    with pytest.raises(ValueError, match=message):
        mla_decode(**(given | change))  # type: ignore[arg-type]
