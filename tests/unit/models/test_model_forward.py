"""One forward for prefill, continuation, decode and training: however a sequence is cut, padded or forked, it is the same function."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from model_cases import random_model, random_tokens, small

from driftline.models.attention import MlaAttention, RMSNorm
from driftline.models.cache import Cache, KdaState, MlaRows
from driftline.models.latent_attention import Columns
from driftline.models.model import K3ForCausalLM

EXACT = {"rtol": 0.0, "atol": 1e-10}


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return random_model()


def assert_caches_equal(one: Cache, other: Cache) -> None:
    """Same lengths, same states, same MLA rows where a column is valid (in order)."""
    assert torch.equal(one.lengths, other.lengths)
    for a, b in zip(one.layers, other.layers, strict=True):
        if isinstance(a, KdaState):
            assert isinstance(b, KdaState)
            torch.testing.assert_close(a.tail, b.tail, **EXACT)
            torch.testing.assert_close(a.state, b.state, **EXACT)
        else:
            assert isinstance(b, MlaRows)
            for row in range(one.batch):
                torch.testing.assert_close(a.rows[row][one.valid[row]], b.rows[row][other.valid[row]], **EXACT)


@torch.no_grad()
def test_prefill_then_decode_equals_a_full_forward(model: K3ForCausalLM) -> None:
    tokens = random_tokens(2, 23)
    whole = model(tokens)
    out = model(tokens[:, :17])
    hidden = [out.hidden]
    for t in range(17, 23):
        out = model(tokens[:, t : t + 1], cache=out.cache)
        hidden.append(out.hidden)
    torch.testing.assert_close(torch.cat(hidden, 1), whole.hidden, **EXACT)
    assert_caches_equal(out.cache, whole.cache)
    assert out.cache.lengths.tolist() == [23, 23]


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(0, 1, 20), (0, 3, 19, 20), (0, 16, 17, 20), (0, 1, 2, 3, 20)])
def test_continuation_by_several_tokens_equals_a_full_forward(model: K3ForCausalLM, cuts: tuple[int, ...]) -> None:
    tokens = random_tokens(2, 20, seed=1)
    whole = model(tokens)
    cache, hidden, routes = None, [], []
    for start, stop in pairwise(cuts):
        out = model(tokens[:, start:stop], cache=cache)
        cache = out.cache
        hidden.append(out.hidden)
        routes.append(out.routes)
    torch.testing.assert_close(torch.cat(hidden, 1), whole.hidden, **EXACT)
    assert torch.equal(torch.cat(routes, 1), whole.routes)


@torch.no_grad()
def test_padded_rows_equal_each_row_alone(model: K3ForCausalLM) -> None:
    tokens = random_tokens(6, 19, seed=2)
    lengths = torch.tensor([19, 1, 2, 16, 3, 17])
    out = model(tokens, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = model(tokens[row : row + 1, :length])
        torch.testing.assert_close(out.hidden[row, :length], alone.hidden[0], **EXACT)
        assert_caches_equal(out.cache.take(torch.tensor([row])), alone.cache)
        assert torch.equal(out.routes[row, :length], alone.routes[0])


@torch.no_grad()
def test_what_padding_holds_does_not_matter(model: K3ForCausalLM) -> None:
    tokens = random_tokens(2, 12, seed=3)
    lengths = torch.tensor([12, 5])
    other = tokens.clone()
    other[1, 5:] = 7
    one, two = model(tokens, lengths=lengths), model(other, lengths=lengths)
    assert torch.equal(one.hidden[1, :5], two.hidden[1, :5])
    assert torch.equal(one.hidden[0], two.hidden[0])
    assert torch.isfinite(two.hidden).all(), "padding must not make NaN: its gradient is zero times it"


@torch.no_grad()
def test_ragged_continuations_equal_full_forwards(model: K3ForCausalLM) -> None:
    tokens = random_tokens(3, 24, seed=4)
    first, second = torch.tensor([2, 9, 5]), torch.tensor([7, 1, 4])
    cache = model(tokens[:, :9], lengths=first).cache
    rest = torch.stack([torch.roll(tokens[i], -int(first[i]))[:7] for i in range(3)])
    out = model(rest, lengths=second, cache=cache)
    last = model(random_tokens(3, 1, seed=5), cache=out.cache)
    for row in range(3):
        n, m = int(first[row]), int(second[row])
        sequence = torch.cat([tokens[row, : n + m], random_tokens(3, 1, seed=5)[row]])
        alone = model(sequence[None])
        torch.testing.assert_close(out.hidden[row, :m], alone.hidden[0, n : n + m], **EXACT)
        torch.testing.assert_close(last.hidden[row, 0], alone.hidden[0, -1], **EXACT)


@torch.no_grad()
def test_a_row_of_no_tokens_keeps_its_cache(model: K3ForCausalLM) -> None:
    tokens = random_tokens(2, 6, seed=6)
    before = model(tokens).cache
    after = model(random_tokens(2, 4, seed=7), lengths=torch.tensor([0, 4]), cache=before).cache
    row = torch.tensor([0])
    assert_caches_equal(after.take(row), before.take(row))


@torch.no_grad()
def test_a_forked_cache_equals_a_recomputed_one_and_branches_do_not_touch_each_other(model: K3ForCausalLM) -> None:
    prompt, branches = random_tokens(1, 11, seed=8), random_tokens(3, 4, seed=9)
    cache = model(prompt).cache
    kept = [t.clone() for layer in cache.layers for t in vars(layer).values()]
    fork = cache.repeat(3)
    for t in range(4):
        out = model(branches[:, t : t + 1], cache=fork)
        fork = out.cache
    whole = model(torch.cat([prompt.expand(3, -1), branches], 1))
    torch.testing.assert_close(out.hidden[:, 0], whole.hidden[:, -1], **EXACT)
    assert_caches_equal(fork, whole.cache)
    assert all(torch.equal(a, b) for a, b in zip(kept, [t for layer in cache.layers for t in vars(layer).values()], strict=True))


@torch.no_grad()
def test_editing_a_future_token_leaves_earlier_hidden_states_bitwise_equal(model: K3ForCausalLM) -> None:
    for dtype in (torch.float32, torch.float64):
        cast = random_model(dtype=dtype)
        tokens = random_tokens(1, 20, seed=10)
        edited = tokens.clone()
        edited[0, 13] = (edited[0, 13] + 1) % 256
        one, two = cast(tokens).hidden, cast(edited).hidden
        assert torch.equal(one[:, :13], two[:, :13])
        assert not torch.equal(one[:, 13], two[:, 13])
        assert not torch.equal(one[:, 19], two[:, 19]), "and later ones do see it"


def test_mla_sees_no_positions() -> None:
    """With nothing rotated, constant inputs score alike at any distance and the past is a set."""
    torch.manual_seed(0)
    layer = MlaAttention(small()).double()
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    visible = Columns(torch.ones(1, 0, dtype=torch.bool), torch.ones(1, 9, dtype=torch.bool))
    constant = x[:, :1].expand(-1, 9, -1)
    out, _ = layer(constant, layer.initial(1, x), visible)
    torch.testing.assert_close(out, out[:, :1].expand_as(out), rtol=0, atol=1e-14)
    shuffled = torch.cat([x[:, torch.randperm(8)], x[:, 8:]], 1)
    torch.testing.assert_close(layer(x, layer.initial(1, x), visible)[0][:, 8], layer(shuffled, layer.initial(1, x), visible)[0][:, 8])


def test_the_absorbed_form_equals_keys_and_values_written_out() -> None:
    config = small()
    torch.manual_seed(1)
    layer = MlaAttention(config).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    visible = torch.ones(2, 7, 7, dtype=torch.bool).tril()
    got, cache = layer(x, layer.initial(2, x), Columns(torch.ones(2, 0, dtype=torch.bool), torch.ones(2, 7, dtype=torch.bool)))
    nope, rope, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))).view(2, 7, 2, nope + rope).transpose(1, 2)
    kv = layer.kv_b_proj(cache.rows[..., :rank]).view(2, 7, 2, nope + config.v_head_dim).transpose(1, 2)
    shared = cache.rows[:, None, :, rank:].expand(-1, 2, -1, -1)
    score = q @ torch.cat([kv[..., :nope], shared], -1).mT * (nope + rope) ** -0.5
    p = score.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    o = (p @ kv[..., nope:]).transpose(1, 2).reshape(2, 7, -1) * torch.sigmoid(layer.g_proj(x))
    torch.testing.assert_close(got, layer.o_proj(o), rtol=0, atol=1e-13)


def test_the_inner_norms_of_mla_have_the_releases_own_epsilon(model: K3ForCausalLM) -> None:
    """1e-6, the class default of the release's code, where every other norm has rms_norm_eps."""
    assert model.config.rms_norm_eps == 1e-5
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            assert module.eps == (1e-6 if name.endswith(("q_a_layernorm", "kv_a_layernorm")) else 1e-5), name


@torch.no_grad()
def test_layers_mix_the_bank_and_write_it_where_the_release_does(model: K3ForCausalLM) -> None:
    """Each aggregation's sources, counted and matched: bank after mixing and before the attention output is added."""
    seen: list[tuple[str, list[torch.Tensor], torch.Tensor]] = []
    outs: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith("_res"):
            handles.append(module.register_forward_hook(
                lambda _m, args, out, name=name: seen.append((name, [row.view_as(out.prefix) for row in args[0].values.unbind(1)], out.prefix))))
        if name.endswith(("self_attn", "mlp", "block_sparse_moe")):
            handles.append(module.register_forward_hook(
                lambda _m, _a, out, name=name: outs.__setitem__(name, out[0] if isinstance(out, tuple) else out)))
    tokens = random_tokens(1, 6, seed=11)
    model(tokens)
    for handle in handles:
        handle.remove()

    def attention(i: int) -> torch.Tensor:
        return outs[f"model.layers.{i}.self_attn"]

    def mlp(i: int) -> torch.Tensor:
        return outs[f"model.layers.{i}.mlp" if i == 0 else f"model.layers.{i}.block_sparse_moe"]

    embedding = model.model.embed_tokens(tokens)
    first = attention(0) + mlp(0) + attention(1) + mlp(1)
    second = attention(2) + mlp(2) + attention(3) + mlp(3)
    want = [  # attn_res_block_size = 2: written at layers 0, 2 and 4
        ([], embedding), ([embedding], attention(0)),
        ([embedding], attention(0) + mlp(0)), ([embedding], attention(0) + mlp(0) + attention(1)),
        ([embedding], first), ([embedding, first], attention(2)),
        ([embedding, first], attention(2) + mlp(2)), ([embedding, first], attention(2) + mlp(2) + attention(3)),
        ([embedding, first], second), ([embedding, first, second], attention(4)),
        ([embedding, first, second], attention(4) + mlp(4)),
    ]
    assert len(seen) == 2 * 5 + 1
    assert [name for name, _, _ in seen[:3]] == ["model.layers.0.self_attention_res", "model.layers.0.mlp_res", "model.layers.1.self_attention_res"]
    assert seen[-1][0] == "model.output_attn_res"
    for (name, bank, prefix), (want_bank, want_prefix) in zip(seen, want, strict=True):
        assert len(bank) == len(want_bank), name
        for got, expected in zip([*bank, prefix], [*want_bank, want_prefix], strict=True):
            torch.testing.assert_close(got, expected, **EXACT)


@torch.no_grad()
def test_recorded_routes_replay_to_the_same_hidden_states_and_others_do_not(model: K3ForCausalLM) -> None:
    tokens = random_tokens(2, 9, seed=12)
    out = model(tokens)
    assert out.routes.shape == (2, 9, 4, 2), "five layers, the first dense"
    again = model(tokens, replay=out.routes)
    assert torch.equal(again.hidden, out.hidden)
    assert torch.equal(again.routes, out.routes)
    other = model(tokens, replay=(out.routes + 1) % 6)
    assert torch.equal(other.routes, (out.routes + 1) % 6)
    assert not torch.allclose(other.hidden, out.hidden)


def test_every_trained_parameter_gets_a_gradient_and_the_selection_bias_none(model: K3ForCausalLM) -> None:
    """Through a cache too: a prompt is differentiated through the fork."""
    fresh = random_model()
    cache = fresh(random_tokens(2, 30, seed=13)).cache.repeat(2)
    out = fresh(random_tokens(4, 30, seed=14), cache=cache)
    fresh.logits(out.hidden).logsumexp(-1).sum().backward()
    for name, parameter in fresh.named_parameters():
        if name.endswith("e_score_correction_bias"):
            assert parameter.grad is None
        elif name != "model.layers.0.self_attention_res.proj.weight" and name != "model.layers.0.self_attention_res.norm.weight":
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            assert (parameter.grad != 0).any(), name


@torch.no_grad()
def test_half_precision_keeps_the_state_wide_and_follows_the_exact_model(model: K3ForCausalLM) -> None:
    half = random_model().to(torch.bfloat16)
    tokens = random_tokens(2, 20, seed=15)
    exact = random_model().to(torch.bfloat16).double()(tokens)
    out = half(tokens, replay=exact.routes)  # a score that rounds to another choice of experts is not what is measured here
    assert out.hidden.dtype == torch.bfloat16
    assert half.logits(out.hidden).dtype == torch.float32
    states = [layer.state.dtype for layer in out.cache.layers if isinstance(layer, KdaState)]
    assert states == [torch.float32] * 3
    drift = (out.hidden.double() - exact.hidden).norm() / exact.hidden.norm()
    assert drift < 0.1


@torch.no_grad()
def test_a_low_rank_output_gate_and_a_model_without_experts_run() -> None:
    linear = {"num_heads": 2, "head_dim": 8, "full_attn_layers": (2,), "kda_layers": (1,), "use_full_rank_gate": False}
    model = random_model(small(num_hidden_layers=2, first_k_dense_replace=2, linear_attn_config=linear, mla_use_output_gate=False))
    tokens = random_tokens(2, 8)
    out = model(tokens)
    step = model(tokens[:, 7:], cache=model(tokens[:, :7]).cache)
    torch.testing.assert_close(step.hidden[:, 0], out.hidden[:, 7], **EXACT)
    assert out.routes.shape == (2, 8, 0, 1)


@torch.no_grad()
def test_tied_embeddings_are_one_tensor() -> None:
    model = random_model(small(tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    hidden = torch.randn(3, 32, dtype=torch.float64)
    torch.testing.assert_close(model.logits(hidden), hidden @ model.model.embed_tokens.weight.t())
