"""A dense bfloat16 model of SmolLM2's widths on a CUDA device: near the same model in fp64, one function by every way through it, and to the bit in deterministic mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from driftline.kernels.mode import Numerics, using
from driftline.models.checkpoint import save_checkpoint
from driftline.models.dense.config import DenseConfig
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.families import open_model
from driftline.models.packed import Packed
from driftline.models.recompute import Recompute

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True, "rope_theta": 100000.0,
}
KINDS = [
    pytest.param(DenseConfig.of(SIZES, "llama"), id="llama"),
    pytest.param(DenseConfig.of({**SIZES, "model_type": "qwen3", "tie_word_embeddings": False, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
                                 "attention_bias": True}, "qwen3"), id="qwen3"),
]
EVERY = pytest.mark.parametrize("config", KINDS)


def pair(config: DenseConfig) -> tuple[DenseForCausalLM, DenseForCausalLM]:
    """The same bfloat16 weights in fp64 on the CPU and as they are on the device."""
    torch.manual_seed(0)
    made = DenseForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter) if parameter.dim() == 1 else 0.02 * torch.randn_like(parameter))
    half = made.to(torch.bfloat16)
    exact = DenseForCausalLM(config).double()
    exact.load_state_dict({name: tensor.double() for name, tensor in half.state_dict().items()})
    return exact, half.cuda()


def tokens_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1000, shape, generator=torch.Generator().manual_seed(seed))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double().cpu() - wanted).norm() / wanted.norm())


@EVERY
@torch.no_grad()
def test_prompts_decoding_and_packs_are_near_fp64(config: DenseConfig) -> None:
    exact, ours = pair(config)
    tokens, lengths = tokens_of(3, 300), torch.tensor([300, 141, 17])
    wanted, found = exact(tokens, lengths=lengths), ours(tokens.cuda(), lengths=lengths.cuda())
    for row, length in enumerate(lengths.tolist()):
        assert relative(found.hidden[row, :length], wanted.hidden[row, :length]) < 0.03
    held, cache = wanted.cache, found.cache
    for step in range(5):
        token = tokens_of(3, 1, seed=1 + step)
        wanted, found = exact(token, cache=held), ours(token.cuda(), cache=cache)
        held, cache = wanted.cache, found.cache
        assert relative(found.hidden, wanted.hidden) < 0.03
    ends = [40, 0, 1]
    row = tokens_of(1, 41, seed=9)
    a, b = exact(row, cache=held, packed=Packed.of(ends, "cpu")), ours(row.cuda(), cache=cache, packed=Packed.of(ends, "cuda"))
    assert relative(b.hidden, a.hidden) < 0.03
    assert relative(ours(row.cuda().flip(1), cache=cache, packed=Packed.of(ends, "cuda")).hidden, a.hidden) > 0.1, "other tokens are told apart"


@EVERY
def test_gradients_of_shared_prompts_in_packs_are_near_fp64_and_run_again_are_the_same(config: DenseConfig) -> None:
    exact, ours = pair(config)
    prompt, ends, row = [70, 9], [30, 1, 12, 50], tokens_of(1, 93, seed=2)

    def gradients(model: DenseForCausalLM, how: Recompute = Recompute.NONE) -> dict[str, torch.Tensor]:
        model.recompute, device = how, model.lm_head.weight.device
        model.zero_grad()
        held = model(tokens_of(1, 79).to(device), packed=Packed.of(prompt, device)).cache.repeat(2)
        hidden = model(row.to(device), cache=held, packed=Packed.of(ends, device), keep=False).hidden[0]
        logp, _ = model.logprobs(hidden, row[0].roll(-1).to(device), 0.8)
        torch.autograd.backward(-logp.mean())
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    wanted, found, again = gradients(exact), gradients(ours), gradients(ours, Recompute.LAYERS)
    assert wanted.keys() == found.keys() == dict(exact.named_parameters()).keys()
    worst = {name: relative(found[name], wanted[name]) for name in wanted}
    # A bias of the keys moves every score of a query alike, which no softmax feels: its gradient is rounding alone.
    assert max(value for name, value in worst.items() if not name.endswith("k_proj.bias")) < 0.1, sorted(worst.items(), key=lambda item: -item[1])[:5]
    # torch adds the rows of an embedding's gradient in no promised order.
    assert all(torch.equal(found[name], again[name]) for name in found if "embed_tokens" not in name)


@EVERY
@torch.no_grad()
def test_in_deterministic_mode_a_token_has_one_set_of_bits(config: DenseConfig) -> None:
    """Alone, beside others, in pieces, decoded, padded, packed and forked."""
    _, model = pair(config)
    tokens, lengths = tokens_of(5, 150).cuda(), [150, 61, 1, 33, 128]
    with using(Numerics.DETERMINISTIC):
        whole = model(tokens).hidden
        for row in range(5):
            assert torch.equal(model(tokens[row : row + 1]).hidden[0], whole[row])
        cache = None
        for start, end in ((0, 64), (64, 65), (65, 66), (66, 140), (140, 150)):
            out = model(tokens[:, start:end], cache=cache)
            cache = out.cache
            assert torch.equal(out.hidden, whole[:, start:end])
        padded = model(tokens, lengths=torch.tensor(lengths, device="cuda"))
        packed = model(torch.cat([tokens[row, :n] for row, n in enumerate(lengths)])[None], packed=Packed.of(lengths, "cuda"))
        rest = [150 - n for n in lengths]
        later = model(torch.cat([tokens[row, n:] for row, n in enumerate(lengths)])[None], cache=packed.cache, packed=Packed.of(rest, "cuda"))
        after = model(torch.stack([tokens[row, n % 150 : n % 150 + 1] for row, n in enumerate(lengths)]), cache=padded.cache)
        for row, (n, got, more) in enumerate(zip(lengths, packed.hidden[0].split(lengths), later.hidden[0].split(rest), strict=True)):
            assert torch.equal(padded.hidden[row, :n], whole[row, :n])
            assert torch.equal(got, whole[row, :n])
            assert torch.equal(more, whole[row, n:])
            if n < 150:
                assert torch.equal(after.hidden[row, 0], whole[row, n])
        logp, _ = model.logprobs(whole[0], tokens[0], 0.7)
        assert torch.equal(logp, torch.cat([model.logprobs(whole[0, i : i + 1], tokens[0, i : i + 1], 0.7)[0] for i in range(150)]))
    with torch.enable_grad(), using(Numerics.DETERMINISTIC):
        assert torch.equal(model(tokens).hidden, whole), "the learner's forward"
    model.model.layers[1].mlp.up_proj.weight.view(torch.int16)[0, 0] ^= 1
    with using(Numerics.DETERMINISTIC):
        assert not torch.equal(model(tokens).hidden, whole), "one flipped bit is seen"


def test_a_model_opened_on_the_device_holds_the_files_bits(tmp_path: Path) -> None:
    exact, ours = pair(DenseConfig.of(SIZES, "llama"))
    save_checkpoint(exact, tmp_path, shard_bytes=2_000_000)
    opened = open_model(str(tmp_path), dtype=torch.bfloat16, device="cuda")
    assert {name: p.device.type for name, p in opened.named_parameters()} == dict.fromkeys(dict(ours.named_parameters()), "cuda")
    assert all(torch.equal(p, q) for p, q in zip(opened.parameters(), ours.parameters(), strict=True))
    assert opened.lm_head.weight is opened.get_submodule("model.embed_tokens").weight
