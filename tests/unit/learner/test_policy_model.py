"""The model of a run's services: one dtype on a device, whatever stays in float32, one form of experts, one numerics for the process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loop_cases import tiny

from driftline.kernels import mode
from driftline.models.mlp import PackedExperts
from driftline.models.model import K3ForCausalLM
from driftline.services.config import Compute, Config, ExpertsForm, Numerics
from driftline.services.policy_model import build_model, compute_dtype


@pytest.fixture(autouse=True)
def fast_again() -> Iterator[None]:
    yield
    mode.set_numerics(mode.Numerics.FAST)


def run(**sections: dict[str, Any]) -> Config:
    config: Config = tiny("model")
    changed = {name: getattr(config, name).model_copy(update=fields) for name, fields in sections.items()}
    return config.model_copy(update=changed)


@pytest.mark.parametrize(("compute", "dtype", "on_cpu", "on_cuda"), [
    (Compute.AUTO, "bfloat16", torch.float32, torch.bfloat16), (Compute.POLICY, "bfloat16", torch.bfloat16, torch.bfloat16),
    (Compute.FLOAT32, "bfloat16", torch.float32, torch.float32), (Compute.AUTO, "float32", torch.float32, torch.float32),
])
def test_parameters_are_held_in_what_the_run_computes_in(compute: Compute, dtype: str, on_cpu: torch.dtype, on_cuda: torch.dtype) -> None:
    config = run(policy={"compute": compute, "dtype": dtype})
    assert (compute_dtype(config, "cpu"), compute_dtype(config, "cuda:1")) == (on_cpu, on_cuda)
    held = dict(build_model(config, device="cpu", threads=1).named_parameters())
    assert held["lm_head.weight"].dtype is on_cpu
    assert held["model.layers.0.self_attn.A_log"].dtype is torch.float32, "the release keeps it so"


def test_adapters_draw_the_same_numbers_in_every_dtype() -> None:
    wide, narrow = (build_model(run(policy={"compute": compute}, learner={"lora_rank": 2}), device="cpu", threads=1) for compute in (Compute.FLOAT32, Compute.POLICY))
    adapters = {n: p for n, p in wide.named_parameters() if n.endswith("lora_A")}
    assert len(adapters) > 10
    for name, parameter in narrow.named_parameters():
        if name in adapters:
            assert parameter.dtype is torch.bfloat16
            assert torch.equal(parameter, adapters[name].to(torch.bfloat16))


def test_experts_are_packed_where_the_run_says_so() -> None:
    kept, packed = (build_model(run(policy={"experts": form}), device="cpu", threads=1) for form in (ExpertsForm.KEEP, ExpertsForm.PACK))
    assert isinstance(packed, K3ForCausalLM)
    assert any(isinstance(m, PackedExperts) for m in packed.modules())
    assert not any(isinstance(m, PackedExperts) for m in kept.modules())


def test_the_process_takes_the_runs_numerics() -> None:
    build_model(run(run={"numerics": Numerics.DETERMINISTIC}), device="cpu", threads=1)
    assert mode.deterministic()
    build_model(run(), device="cpu", threads=1)
    assert not mode.deterministic()
