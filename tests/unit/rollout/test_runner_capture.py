"""The whole step of decoding, host side, as a GPU would take it: every operator by its kernels, on tensors without memory, under the watch that finds what cannot be captured.

Kernels are not launched, they are counted: what is shown is that between the first and the last of them nothing looks at a value.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from driftline.kernels.mode import Numerics, using
from driftline.models.architectures import skeleton
from driftline.models.causal_lm import CausalLM
from driftline.models.dense.config import DenseConfig
from driftline.models.lora import add_lora
from driftline.models.paged import Pool, decode
from driftline.models.quantisation import Quantisation
from driftline.models.sizes import like_k3
from driftline.models.state import policy_dtype
from driftline.services.rollout.runner.staging import Inputs
from driftline.services.rollout.runner.step import Greedy, Outputs, Rule, step
from driftline.services.rollout.runner.watch import HostRead, Watch
from driftline.services.rollout.speculation.judging import judge

torch.set_num_threads(1)
META = "meta"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Kernels in the order of nothing, by name and how often each would have been launched."""
    jit = pytest.importorskip("triton.runtime.jit")
    import driftline.kernels.first_calls  # noqa: F401  (every operator's module is there to be patched)

    counted: Counter[str] = Counter()
    hopper = SimpleNamespace(multi_processor_count=132, major=9, minor=0, total_memory=1 << 37, shared_memory_per_block_optin=232448)
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *args, **options: counted.update([f"{self.fn.__module__.split('.', 1)[-1]}.{self.fn.__name__}"]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: hopper)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: 4096)
    for name, module in list(sys.modules.items()):
        if name.startswith("driftline.") and hasattr(module, "runs_triton"):
            monkeypatch.setattr(module, "runs_triton", lambda *_: True)
    return counted


def k3() -> CausalLM:
    return shaped(skeleton(like_k3(4, 1024, num_experts=64), Quantisation.MXFP4))


def dense() -> CausalLM:
    return shaped(skeleton(DenseConfig.of({
        "model_type": "llama", "vocab_size": 1024, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 9, "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 4096, "tie_word_embeddings": True, "hidden_act": "silu",
    }, "smollm2"), Quantisation.NONE))


def shaped(model: CausalLM) -> CausalLM:
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(policy_dtype(name, torch.bfloat16))
    return model.to(META)


def inputs(rows: int, window: int, pages: int, *, replays: bool) -> Inputs:
    whole = {name: torch.zeros(rows, dtype=torch.int32, device=META) for name in ("slots", "lengths", "accepted", "counts")}
    if not replays:
        whole["accepted"] = None  # type: ignore[assignment]
    long = {name: torch.zeros(rows, dtype=torch.int64, device=META) for name in ("keys", "positions")}
    return Inputs(tokens=torch.zeros(rows, window, dtype=torch.int64, device=META), tables=torch.zeros(rows, pages, dtype=torch.int32, device=META),
                  temperatures=torch.zeros(rows, device=META), probs=None, **whole, **long)


def advanced(model: CausalLM, window: int, given: Inputs, *, mixed: bool = False, rule: Rule | None = None) -> Outputs:
    """A step under the watch, over a pool of its own."""
    pool = pool_of(model, window)
    with torch.inference_mode(), Watch():
        return step(model, lambda at: decode(model, pool, at.tokens, at.slots, at.tables, at.lengths, at.accepted), given, Greedy(mixed, every=False), rule)


def pool_of(model: CausalLM, window: int) -> Pool:
    with torch.device(META):
        return Pool.make(model, pages=80, slots=8, window=window)


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize(("rows", "window"), [(1, 1), (64, 1), (256, 1), (8, 4)])
@pytest.mark.parametrize("make", [k3, dense])
def test_a_step_by_kernels_reads_no_value(make, rows, window, numerics, launched) -> None:  # type: ignore[no-untyped-def]
    """64 rows plan their experts in one launch, 256 by sorting; wide tables split the keys."""
    model = make()
    for pages in (16, 64):
        for replays in {window > 1, True}:
            with using(numerics):
                out = advanced(model, window, inputs(rows, window, pages, replays=replays), mixed=True)
            assert tuple(out.tokens.shape) == tuple(out.logprobs.shape) == (rows, window)
    wanted = {"kernels.linear.triton._matmul", "kernels.rmsnorm.triton._forward"}
    wanted |= {"kernels.kda_decode.triton._replay", "kernels.short_conv.triton._decode", "kernels.mla_decode.triton._part"} if make is k3 else {"kernels.rope.triton._rotate"}
    assert wanted <= set(launched)


@pytest.mark.parametrize("make", [k3, dense])
def test_a_policy_of_low_rank_updates_reads_no_value(make, launched: Counter[str]) -> None:  # type: ignore[no-untyped-def]
    model = make()
    add_lora(model, 8, targets="all-linear")
    out = advanced(model, 1, inputs(16, 1, 16, replays=False))
    assert tuple(out.tokens.shape) == (16, 1)


def test_rejection_reads_no_value(launched: Counter[str]) -> None:
    out = advanced(dense(), 4, inputs(8, 4, 16, replays=True), rule=judge)
    assert out.accepted is not None
    assert tuple(out.accepted.shape) == (8,)


def test_one_look_at_a_value_within_a_layer_is_found(launched: Counter[str]) -> None:
    model = k3()
    model.get_submodule("model.layers.2.self_attn").register_forward_hook(lambda module, args, out: bool(out[0].any()))
    with pytest.raises(HostRead):
        advanced(model, 1, inputs(2, 1, 16, replays=False))
