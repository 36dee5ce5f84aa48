"""A model over a pool on a CUDA device in bfloat16, by the kernels: deterministic mode's bits are those of a packed forward, and a graph replays what a step computes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "models"))
from deterministic_cases import all_same, process_in, same  # noqa: E402
from paged_cases import Pooled, Rows, decoded, drafted, prompts, whole  # noqa: E402

from driftline.kernels.mode import Numerics  # noqa: E402
from driftline.models.causal_lm import CausalLM  # noqa: E402
from driftline.models.config import K3Config  # noqa: E402
from driftline.models.dense.config import Architecture, DenseConfig  # noqa: E402
from driftline.models.paged import decode  # noqa: E402
from driftline.models.paged.states import KdaStates  # noqa: E402
from driftline.models.random_weights import random_model  # noqa: E402

K3 = K3Config.model_validate({
    "vocab_size": 1024, "hidden_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 8, "intermediate_size": 1024, "q_lora_rank": 256, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 32, "num_experts_per_token": 4, "num_shared_experts": 1,
    "moe_intermediate_size": 256, "routed_expert_hidden_size": 512, "attn_res_block_size": 2,
    "linear_attn_config": {"num_heads": 4, "head_dim": 128, "full_attn_layers": (4, 5), "kda_layers": (1, 2, 3)},
})
DENSE = DenseConfig(model_type=Architecture.QWEN3, vocab_size=1024, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
                    num_key_value_heads=2, head_dim=64, qk_norm=True, qkv_bias=True)
KINDS = ("k3", "dense")
FAR = 0.05
"""Distance of a token's hidden state, relative to it, that other orders of bfloat16 sums make of most tokens: where two experts are nearly equal one is taken for the
other, so it is asked of the middle one of a row."""


@cache
def model(kind: str) -> CausalLM:
    made = random_model(DENSE if kind == "dense" else K3, dtype=torch.bfloat16, device="cuda", seed=0)
    return made.requires_grad_(False)


def rows_of(*lengths: int, seed: int = 0) -> Rows:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 1024, (n,), generator=rng).cuda() for n in lengths]


@pytest.fixture
def deterministic() -> Iterator[None]:
    with process_in(Numerics.DETERMINISTIC):
        yield


def near(found: Rows, wanted: Rows) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.isfinite().all()
        assert float(((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)).median()) < FAR


@pytest.mark.parametrize("kind", KINDS)
def test_fast_mode_is_near_a_forward(kind: str) -> None:
    rows = rows_of(300, 15, 1100, 74)
    hidden = whole(model(kind), rows)[0]
    near(decoded(model(kind), rows).found(), hidden)
    near(drafted(model(kind), rows, folds=True).found(), hidden)


def test_fast_mode_is_near_a_forward_where_no_expert_is_chosen() -> None:
    """Every token then, prompts in pieces too: nothing makes a small difference large."""
    config = K3.model_copy(update={"first_k_dense_replace": K3.num_hidden_layers})
    dense_k3 = random_model(config, dtype=torch.bfloat16, device="cuda", seed=0).requires_grad_(False)
    rows = rows_of(300, 15, 1100, 74)
    hidden = whole(dense_k3, rows)[0]
    for run in (decoded(dense_k3, rows), drafted(dense_k3, rows, folds=True)):
        for a, b in zip(run.found(), hidden, strict=True):
            assert float(((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)).max()) < FAR


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("deterministic")
def test_deterministic_mode_is_a_forward_to_the_bit(kind: str) -> None:
    rows = rows_of(300, 15, 1100, 74)
    hidden = whole(model(kind), rows)[0]
    assert all_same(decoded(model(kind), rows).found(), hidden)
    assert all_same(drafted(model(kind), rows).found(), hidden)
    assert all_same(drafted(model(kind), rows, folds=True).found(), hidden)
    other = [row.clone() for row in rows]
    other[1][0] = (other[1][0] + 1) % 1024
    assert not all_same(hidden[1:2], whole(model(kind), other)[0][1:2])


@pytest.mark.parametrize("mode", list(Numerics))
def test_a_model_that_the_kernels_do_not_take(mode: Numerics) -> None:
    """In fp32, with heads of 12: what a CPU computes with."""
    config = DenseConfig(model_type=Architecture.LLAMA, vocab_size=1024, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=12)
    for small in (random_model(config, dtype=torch.float32, device="cuda"), random_model(K3, dtype=torch.float32, device="cuda")):
        with process_in(mode):
            rows = rows_of(90, 15)
            hidden = whole(small, rows)[0]
            for run in (decoded(small, rows), drafted(small, rows)):
                for found, wanted in zip(run.found(), hidden, strict=True):
                    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("mode", list(Numerics))
def test_a_graph_replays_a_step_to_the_bit(kind: str, window: int, mode: Numerics) -> None:
    """Captured once, replayed for later steps with other tokens, lengths and counts."""
    steps = 4
    with process_in(mode):
        rows = rows_of(130, 70, 200)
        eager, replayed = (Pooled(model(kind), rows, window=window) for _ in range(2))
        for run in (eager, replayed):
            run.fill(prompts(rows, steps * window))
        static = _Static(replayed)
        graph = torch.cuda.CUDAGraph()
        static.load()
        saved = [tensor.clone() for tensor in _memory(replayed)]
        static.run()
        for tensor, before in zip(_memory(replayed), saved, strict=True):
            tensor.copy_(before)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = static.run()
        for turn in range(steps):
            static.load()
            graph.replay()
            if window == 1:
                wanted = eager.step(padding=0).hidden
                kept = [1] * len(rows)
            else:
                kept = [1 + (turn + i) % window for i in range(len(rows))]
                tokens = torch.stack([row[done : done + window] for row, done in zip(rows, eager.done, strict=True)])
                wanted = eager.decode(range(len(rows)), tokens, accepted=eager.accepted).hidden
                for i, count in enumerate(kept):
                    eager.done[i] += count
                eager.accepted = kept
            assert same(out.hidden, wanted)
            assert wanted.isfinite().all()
            replayed.done = [done + count for done, count in zip(replayed.done, kept, strict=True)]
            replayed.accepted = kept


def _memory(run: Pooled) -> list[torch.Tensor]:
    return [tensor for layer in run.pool.layers for tensor in (layer.everything() if isinstance(layer, KdaStates) else layer.tensors())]


class _Static:
    """A step whose inputs lie at fixed addresses."""

    def __init__(self, run: Pooled) -> None:
        self.pooled = run
        count = len(run.rows)
        self.tokens = torch.zeros(count, run.window, dtype=torch.int64, device="cuda")
        self.lengths, self.accepted = (torch.zeros(count, dtype=torch.int32, device="cuda") for _ in range(2))

    def load(self) -> None:
        run = self.pooled
        self.tokens.copy_(torch.stack([row[done : done + run.window] for row, done in zip(run.rows, run.done, strict=True)]))
        self.lengths.copy_(torch.tensor(run.done, dtype=torch.int32))
        self.accepted.copy_(torch.tensor(run.accepted, dtype=torch.int32))

    def run(self):  # type: ignore[no-untyped-def]
        run = self.pooled
        return decode(run.model, run.pool, self.tokens, run.slots, run.tables, self.lengths, None if run.window == 1 else self.accepted)
