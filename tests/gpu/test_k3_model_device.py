"""A bfloat16 model of K3's widths on a CUDA device: every layer runs the kernels through the calls that run the references on a CPU, and they agree."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
import torch

from driftline.models.config import K3Config
from driftline.models.model import K3ForCausalLM
from driftline.models.state import policy_dtype

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = K3Config.model_validate({
    "vocab_size": 1024, "hidden_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 8, "intermediate_size": 1024, "q_lora_rank": 256, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 32, "num_experts_per_token": 4, "num_shared_experts": 1,
    "moe_intermediate_size": 256, "routed_expert_hidden_size": 512, "attn_res_block_size": 2,
    "linear_attn_config": {"num_heads": 4, "head_dim": 128, "full_attn_layers": (4, 5), "kda_layers": (1, 2, 3)},
})

KERNELS = {
    "attention_residual.triton": ("forward",), "attention_residual.triton_backward": ("backward",), "gated_norm.triton": ("forward", "backward"),
    "kda.forward": ("forward",), "kda.triton_backward": ("backward",), "kda_decode.sequence": ("kda_sequence",), "linear.triton": ("matmul",),
    "logprob.triton": ("forward", "gradients"), "mla_decode.triton": ("decode",), "mla_prefill.triton_forward": ("forward",),
    "mla_prefill.triton_backward": ("backward",), "moe.triton_router": ("scores",), "short_conv.triton": ("forward", "backward"),
}
"""Of these, each must be called by a prompt, a step of decoding and a step of training. Norms, experts and SiTU-GLU are seen by their results alone."""


def model(device: str, dtype: torch.dtype) -> K3ForCausalLM:
    torch.manual_seed(0)
    made = K3ForCausalLM(CONFIG)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("res.proj.weight"):
                parameter.normal_(std=0.02)
            stored = policy_dtype(name, torch.bfloat16)
            parameter.data = parameter.data.to(stored).to(dtype if stored == torch.bfloat16 or dtype == torch.float64 else stored).to(device)
    return made


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted.double().cpu()
    return float((found.double().cpu() - wanted).norm() / wanted.norm())


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()
    for name, functions in KERNELS.items():
        module = importlib.import_module(f"driftline.kernels.{name}")
        for function in functions:
            real = getattr(module, function)

            def spy(*args: Any, real: Any = real, key: str = f"{name}.{function}", **kwargs: Any) -> Any:
                calls[key] += 1
                return real(*args, **kwargs)

            monkeypatch.setattr(module, function, spy)
    return calls


def test_prompt_decoding_and_training_run_the_kernels_and_are_near_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes are replayed, so that a tie that rounding breaks otherwise does not change the function."""
    exact, ours = model("cpu", torch.float64), model("cuda", torch.bfloat16)
    calls = counted(monkeypatch)
    tokens, lengths, more = torch.randint(0, 1024, (3, 70)), torch.tensor([70, 41, 17]), torch.randint(0, 1024, (3, 4))
    with torch.no_grad():
        wanted = exact(tokens, lengths=lengths)
        found = ours(tokens.cuda(), lengths=lengths.cuda(), replay=wanted.routes.cuda())
        for row, length in enumerate(lengths.tolist()):
            assert relative(found.hidden[row, :length], wanted.hidden[row, :length]) < 0.06
        cache, held = found.cache, wanted.cache
        for step in range(4):
            wanted = exact(more[:, step : step + 1], cache=held)
            found = ours(more[:, step : step + 1].cuda(), cache=cache, replay=wanted.routes.cuda())
            cache, held = found.cache, wanted.cache
            assert relative(found.hidden, wanted.hidden) < 0.06
        wrong = ours(more[:, :1].cuda(), cache=cache).hidden
        assert relative(wrong, wanted.hidden) > 0.1, "another token is told apart"

    def loss(of: K3ForCausalLM, routes: torch.Tensor) -> torch.Tensor:
        device = of.lm_head.weight.device
        out = of(tokens.to(device), replay=routes.to(device))
        logp, _ = of.logprobs(out.hidden[:, :-1].reshape(-1, 1024), tokens[:, 1:].reshape(-1).to(device))
        return -logp.mean()

    with torch.no_grad():
        routes = exact(tokens).routes
    losses = [loss(exact, routes), loss(ours, routes)]
    assert abs(losses[0].item() - losses[1].item()) < 0.02
    for each in losses:
        torch.autograd.backward(each)
    worst = {name: relative(p.grad, q.grad) for (name, p), (_, q) in zip(ours.named_parameters(), exact.named_parameters(), strict=True)
             if q.grad is not None and p.grad is not None and float(q.grad.norm()) > 0}
    assert len(worst) > 50
    assert max(worst.values()) < 0.2, sorted(worst.items(), key=lambda item: -item[1])[:5]
    missing = {f"{name}.{function}" for name, functions in KERNELS.items() for function in functions} - calls.keys()
    assert not missing
