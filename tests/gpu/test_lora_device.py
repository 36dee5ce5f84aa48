"""Adapters on a CUDA device, bfloat16: their grouped products against fp64, beside packed experts, and a bank whose rows compute as if alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from driftline.kernels.grouped_linear import grouped_linear, groups_of
from driftline.kernels.mode import Numerics, using
from driftline.kernels.mxfp4 import Mxfp4Weight, unpack
from driftline.models.causal_lm import CausalLM
from driftline.models.checkpoint import load_checkpoint
from driftline.models.lora import (
    Adapter,
    AdapterBank,
    LoraConfig,
    Scaling,
    adapt,
    adapter_of,
    merge_lora,
    put_adapter,
)
from driftline.models.quantisation import Quantisation
from driftline.models.random_weights import make_checkpoint
from driftline.models.sizes import like_k3

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LATENT, INNER, EXPERTS, TOP, TOKENS = 3584, 3072, 24, 4, 200
CONFIG = like_k3(4, 1024, num_experts=32, num_experts_per_token=4, vocab_size=1024)
INDEX = (2, 0, -1, 1, 2, 2, 1)
LENGTHS = torch.tensor([40, 33, 70, 5, 1, 64, 17])


def noise(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) * scale).bfloat16()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def ids_of(tokens: int) -> torch.Tensor:
    """Expert 3 has none, some pairs are of no expert."""
    ids = torch.rand(tokens, EXPERTS, device="cuda", generator=torch.Generator("cuda").manual_seed(7)).argsort(-1)[:, :TOP]
    ids[ids == 3] = -1
    return ids


def packed(size_out: int, size_in: int) -> Mxfp4Weight:
    random = torch.Generator("cuda").manual_seed(3)
    return Mxfp4Weight(torch.randint(0, 256, (EXPERTS, size_out, size_in // 2), dtype=torch.uint8, device="cuda", generator=random),
                       torch.randint(117, 121, (EXPERTS, size_out, size_in // 32), dtype=torch.uint8, device="cuda", generator=random))


@pytest.mark.parametrize(("size_out", "size_in"), [(64, LATENT), (INNER, 64), (16, LATENT), (INNER, 16), (INNER, 6), (INNER, LATENT)], ids=str)
def test_products_and_their_gradients_are_near_fp64(size_out: int, size_in: int) -> None:
    rows = groups_of(ids_of(TOKENS), EXPERTS)
    groups = ids_of(TOKENS).reshape(-1)[rows.pairs.long()]
    x, weight = noise(TOKENS * TOP, size_in).requires_grad_(), noise(EXPERTS, size_out, size_in, scale=size_in**-0.5, seed=1).requires_grad_()
    out = grouped_linear(x, rows, weight)
    along = noise(*out.shape, seed=2)
    torch.autograd.backward(out, along)
    assert x.grad is not None
    assert weight.grad is not None
    dx, dw, wanted = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(weight, dtype=torch.float64), torch.zeros_like(out, dtype=torch.float64)
    for group in range(EXPERTS):
        some = groups == group
        w = weight[group].detach().double()
        wanted[some] = x[some].detach().double() @ w.T
        dx[some] = along[some].double() @ w
        dw[group] = along[some].double().T @ x[some].detach().double()
    assert relative(out, wanted) < 4e-3
    assert relative(x.grad, dx) < 4e-3
    assert relative(weight.grad, dw) < 4e-3
    assert not out[groups < 0].any()
    assert relative(out, wanted.roll(1, 0)) > 0.5, "the comparison can fail"


def test_packed_matrices_give_the_product_of_what_they_unpack_to() -> None:
    rows, weight = groups_of(ids_of(TOKENS), EXPERTS), packed(INNER, LATENT)
    x = noise(TOKENS * TOP, LATENT).requires_grad_()
    other = x.detach().clone().requires_grad_()
    out, plain = grouped_linear(x, rows, weight), grouped_linear(other, rows, unpack(*weight))
    assert relative(out, plain) < 4e-3
    for leaf, found in ((x, out), (other, plain)):
        torch.autograd.backward(found, noise(*found.shape, seed=2))
        assert leaf.grad is not None
    assert x.grad is not None
    assert other.grad is not None
    assert relative(x.grad, other.grad) < 4e-3


def test_a_row_s_bits_are_its_own() -> None:
    """Of an adapter's two products, beside others, in another place, alone, and padded to a larger rank."""
    a, b = noise(EXPERTS, 24, LATENT, scale=LATENT**-0.5), noise(EXPERTS, INNER, 24, seed=1)
    wide_a, wide_b = a.new_zeros(EXPERTS, 64, LATENT), b.new_zeros(EXPERTS, INNER, 64)
    wide_a[:, :24], wide_b[:, :, :24] = a, b
    x, ids = noise(TOKENS, LATENT, seed=4), ids_of(TOKENS)[:, :1].clamp(min=0)

    def product(which: slice, a: torch.Tensor = a, b: torch.Tensor = b) -> torch.Tensor:
        rows = groups_of(ids[which], EXPERTS)
        there, back = rows.pairs.long(), rows.rows.long()
        return grouped_linear(grouped_linear(x[which][there], rows, a), rows, b)[back]

    whole = product(slice(None))
    assert torch.equal(product(slice(None), wide_a, wide_b), whole)
    for which in (slice(0, 1), slice(5, 6), slice(3, 70), slice(100, 200)):
        assert torch.equal(product(which), whole[which])
    b[int(ids[5]), 0, 0] += 1
    assert not torch.equal(product(slice(5, 6)), whole[5:6]), "the comparison can fail"


def test_a_row_s_bits_are_its_own_beside_packed_matrices() -> None:
    """Alone, with a few others, and among all."""
    weight, ids = packed(INNER, LATENT), ids_of(TOKENS * 4)
    x = noise(TOKENS * 4, LATENT, seed=4)

    def product(which: slice) -> torch.Tensor:
        rows = groups_of(ids[which], EXPERTS)
        each = x[which, None].expand(-1, TOP, -1).reshape(-1, LATENT)
        return grouped_linear(each[rows.pairs.long()], rows, weight)[rows.rows.long()].view(-1, TOP, INNER)

    whole = product(slice(None))
    for which in (slice(0, 1), slice(3, 20), slice(100, 700)):
        assert torch.equal(product(which), whole[which])
    assert relative(whole, whole.roll(1, 0)) > 0.5, "the comparison can fail"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("packed") / "checkpoint"
    make_checkpoint(CONFIG, made, experts=Quantisation.MXFP4, device="cuda", shard_bytes=64_000_000)
    return made


def loaded(directory: Path, experts: Quantisation | None = None) -> CausalLM:
    return load_checkpoint(str(directory), dtype=torch.bfloat16, experts=experts, device="cuda")


def disturbed(model: CausalLM, seed: int, std: float = 0.05) -> CausalLM:
    random = torch.Generator("cuda").manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=std, generator=random)
    return model


def tokens_of(rows: int, steps: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1024, (rows, steps), generator=torch.Generator().manual_seed(seed)).cuda()


def test_adapted_packed_experts_compute_and_learn_as_unpacked_ones(directory: Path) -> None:
    models = [loaded(directory), loaded(directory, Quantisation.NONE)]
    tokens = tokens_of(2, 50)
    with torch.no_grad():
        plain = models[0](tokens)
    for model in models:
        torch.manual_seed(0)
        adapt(model, LoraConfig(64, 64, "all-linear"))
        with torch.no_grad():
            assert relative(model(tokens, replay=plain.routes).hidden, plain.hidden) < 0.02, "B starts at zero"
        disturbed(model, 1)
    outs = [model(tokens, replay=plain.routes).hidden for model in models]
    assert relative(outs[0], outs[1]) < 0.02
    assert relative(outs[0], plain.hidden) > 0.05
    for out in outs:
        torch.autograd.backward(out, noise(*out.shape, seed=5))
    others = dict(models[1].named_parameters())
    for name, parameter in models[0].named_parameters():
        if parameter.requires_grad:
            grad = others[name].grad
            assert parameter.grad is not None
            assert grad is not None
            assert relative(parameter.grad, grad) < 0.15, name


@torch.no_grad()
def test_merging_gives_the_adapted_model_within_what_bfloat16_loses(directory: Path) -> None:
    model, tokens = loaded(directory, Quantisation.NONE), tokens_of(2, 50)
    plain = model(tokens)
    adapt(model, LoraConfig(16, 16, "all-linear"))
    disturbed(model, 1)
    want = model(tokens, replay=plain.routes).hidden
    merged = merge_lora(model)
    found = model(tokens, replay=plain.routes).hidden
    assert relative(found, want) < 0.25 * relative(want, plain.hidden)
    merged.undo()
    assert torch.equal(model(tokens, replay=plain.routes).hidden, want)


@pytest.fixture(scope="module")
def adapters(directory: Path) -> list[Adapter]:
    made = []
    for seed, (rank, scaling, targets) in enumerate([(16, Scaling.RANK, "all-linear"), (64, Scaling.ROOT, "all-linear"), (24, Scaling.RANK, r".*_proj$")]):
        torch.manual_seed(seed)
        model = loaded(directory)
        adapt(model, LoraConfig(rank, 0.5 * rank, targets, scaling))
        made.append(adapter_of(disturbed(model, seed)))
    return made


@pytest.mark.parametrize("mode", list(Numerics))
@torch.no_grad()
def test_each_row_of_a_bank_computes_as_if_alone(mode: Numerics, directory: Path, adapters: list[Adapter]) -> None:
    """To the bit in deterministic mode. In fast mode routers may choose otherwise by a rounding, so the recorded experts are replayed."""
    with using(mode):
        model = loaded(directory)
        bank = AdapterBank(model, slots=3, rank=64, targets="all-linear")
        for slot, adapter in enumerate(adapters):
            bank.put(slot, adapter)
        tokens, after = tokens_of(len(INDEX), 70), tokens_of(len(INDEX), 1, seed=1)
        with bank.rows(INDEX):
            out = model(tokens, lengths=LENGTHS.cuda())
            step = model(after, cache=out.cache)
        for row, slot in enumerate(INDEX):
            single = loaded(directory)
            if slot >= 0:
                put_adapter(single, adapters[slot])
            length = int(LENGTHS[row])
            replay = None if mode is Numerics.DETERMINISTIC else (out.routes[row : row + 1, :length], step.routes[row : row + 1])
            first = single(tokens[row : row + 1, :length], replay=replay[0] if replay else None)
            second = single(after[row : row + 1], cache=first.cache, replay=replay[1] if replay else None)
            for found, alone in ((out.hidden[row, :length], first.hidden[0]), (step.hidden[row], second.hidden[0])):
                if mode is Numerics.DETERMINISTIC:
                    assert torch.equal(found, alone), (row, slot)
                else:
                    assert relative(found, alone) < 0.03, (row, slot)
        with bank.rows([1, *INDEX[1:]]):
            assert relative(model(tokens, lengths=LENGTHS.cuda()).hidden[0, :40], out.hidden[0, :40]) > 0.05, "the comparison can fail"
