"""A model that holds its routed experts packed on a CUDA device: loaded there, it computes what the unpacked one does, forward and backward, and makes the bytes a CPU would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from driftline.kernels.mxfp4 import Mxfp4Weight
from driftline.models.checkpoint import load_checkpoint, save_checkpoint
from driftline.models.model import K3ForCausalLM
from driftline.models.quantisation import Quantisation
from driftline.models.random_weights import make_checkpoint
from driftline.models.sizes import like_k3
from driftline.models.state import export_state

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = like_k3(4, 1024, num_experts=32, num_experts_per_token=4, vocab_size=1024)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("packed")
    make_checkpoint(CONFIG, made / "checkpoint", experts=Quantisation.MXFP4, device="cuda", shard_bytes=64_000_000)
    return made / "checkpoint"


def loaded(directory: Path, experts: Quantisation | None) -> K3ForCausalLM:
    return load_checkpoint(str(directory), dtype=torch.bfloat16, experts=experts, device="cuda")


def gradients(model: K3ForCausalLM, tokens: torch.Tensor, routes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Along one random direction: the sum of squares of what a norm left is a constant."""
    out = model(tokens, replay=routes).hidden
    along = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    torch.autograd.backward((out.float() * along).sum())
    grad = model.model.embed_tokens.weight.grad
    assert grad is not None
    return out.detach(), grad


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_packed_and_unpacked_experts_agree_forward_and_backward(directory: Path) -> None:
    packed, plain = loaded(directory, None), loaded(directory, Quantisation.NONE)
    assert isinstance(packed.model.layers[1].block_sparse_moe.experts.w1, Mxfp4Weight)
    tokens = torch.randint(0, 1024, (4, 64), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    with torch.no_grad():
        routes = plain(tokens).routes
    out, grad = gradients(packed, tokens, routes)
    want, want_grad = gradients(plain, tokens, routes)
    assert relative(out, want) < 2e-2
    assert relative(grad, want_grad) < 4e-2
    with torch.no_grad():
        packed.model.layers[2].block_sparse_moe.experts.w1.packed.bitwise_xor_(0x88)
        assert relative(packed(tokens, replay=routes).hidden, want) > 5e-2, "other signs are seen"


def test_packing_and_unpacking_there_makes_the_bytes_that_a_cpu_makes(directory: Path, tmp_path: Path) -> None:
    there, here = loaded(directory, Quantisation.NONE), load_checkpoint(str(directory), dtype=torch.bfloat16, experts=Quantisation.NONE)
    a, b = export_state(there), export_state(here)
    assert all(torch.equal(a[name], b[name]) for name in b)
    for name, model in (("there", there), ("here", here)):
        save_checkpoint(model, tmp_path / name, experts=Quantisation.MXFP4)
    assert (tmp_path / "there" / "model.safetensors").read_bytes() == (tmp_path / "here" / "model.safetensors").read_bytes()
