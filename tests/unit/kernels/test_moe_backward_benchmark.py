"""What the backward's benchmark compares with is the same function, and what it counts is what is there; the workspace is that of one microbatch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from expert_cases import choices

pytest.importorskip("triton", reason="needs Triton, the gpu extra")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "kernels"))

import moe_backward as benchmark

from driftline.kernels.moe.backward import Products, Wanted, pinned, workspace_bytes
from driftline.kernels.moe.reference import expert_mlp
from driftline.kernels.mxfp4.weights import Mxfp4Weight

torch.set_num_threads(1)


def test_the_peer_is_the_same_function_of_the_same_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "TOP", 2)
    random = torch.Generator().manual_seed(0)
    w1, w3, w2 = (torch.randn(4, 32, 32, generator=random).bfloat16() / 6 for _ in range(3))
    z, (ids, gates) = torch.randn(9, 32, generator=random).bfloat16(), choices(9, 4, 2)
    found, wanted = benchmark.torchs(z, ids, gates, w1, w3, w2), expert_mlp(z, ids, gates, w1, w3, w2, *benchmark.BETAS)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.03, atol=0.01)
    assert not torch.allclose(benchmark.torchs(z, ids.flip(1), gates, w1, w3, w2).float(), wanted.float(), rtol=0.03, atol=0.01)


def test_packed_weights_count_their_scales() -> None:
    packed = Mxfp4Weight(torch.zeros(2, 8, 32, dtype=torch.uint8), torch.zeros(2, 8, 2, dtype=torch.uint8))
    assert benchmark.stack_bytes((packed, torch.zeros(3, dtype=torch.bfloat16))) == 2 * 8 * 34 + 6


def test_k3s_microbatch_of_8192_tokens_takes_what_the_page_says() -> None:
    assert round(workspace_bytes(8192, 16, 3584, 3072) / 1e9, 2) == 2.58
    assert round(workspace_bytes(8192, 16, 3584, 3072, to_w2=True) / 1e9, 2) == 3.38


def test_which_products_a_backward_takes_is_settled_by_form_and_by_what_is_wanted() -> None:
    dense, packed = torch.empty(1, 64, 64, dtype=torch.bfloat16), Mxfp4Weight(torch.empty(1, 64, 32, dtype=torch.uint8), torch.empty(1, 64, 2, dtype=torch.uint8))
    inputs = Wanted(True, True, False, False, False)
    assert [pinned(dense, inputs), pinned(dense, inputs._replace(w2=True)), pinned(packed, inputs)] == [Products.GATHERED, Products.SORTED, Products.SORTED]
