"""A bank of adapters: each row of a batch as if it were alone with its own adapter; to the bit in deterministic mode, closely in fast mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from dense_model_cases import ours
from k3_checkpoint_cases import packed_checkpoint
from lora_cases import drawn_adapter
from model_cases import random_model
from model_cases import random_tokens as any_tokens

from driftline.kernels.mode import Numerics, using
from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.causal_lm import CausalLM
from driftline.models.checkpoint import load_checkpoint
from driftline.models.linear import Linear
from driftline.models.lora import Adapter, AdapterBank, Scaling, Update, put_adapter
from driftline.models.model import K3ForCausalLM
from driftline.models.packed import Packed

Make = Callable[[], CausalLM]
INDEX = (2, 0, -1, 1, 2)
LENGTHS = torch.tensor([7, 3, 9, 5, 1])


@pytest.fixture(params=["unpacked", "packed", "dense"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """fp32: K3 with its routed experts in either form, and a dense model with biases."""
    if request.param == "dense":
        return lambda: ours("qwen2")
    if request.param == "unpacked":
        return lambda: random_model(dtype=torch.float32)
    directory = packed_checkpoint(tmp_path_factory.mktemp("packed"))
    return lambda: load_checkpoint(str(directory))


def random_tokens(rows: int, steps: int, seed: int = 0) -> torch.Tensor:
    """Of every model's vocabulary."""
    return any_tokens(rows, steps, seed=seed) % 97


def adapters(make: Make) -> list[Adapter]:
    """Of three ranks, two scalings and three sets of targets; the last leaves experts alone."""
    return [
        drawn_adapter(make(), 1, rank=4), drawn_adapter(make(), 2, rank=8, scaling=Scaling.ROOT), drawn_adapter(make(), 3, rank=4, targets=r".*_proj$"),
    ]


def banked(make: Make, held: list[Adapter]) -> tuple[CausalLM, AdapterBank]:
    model = make()
    bank = AdapterBank(model, slots=4, rank=10, targets="all-linear")
    for slot, adapter in enumerate(held):
        bank.put(slot, adapter)
    return model, bank


@pytest.fixture(params=list(Numerics))
def mode(request: pytest.FixtureRequest) -> Iterator[Numerics]:
    with using(request.param):
        yield request.param


def agree(found: torch.Tensor, alone: torch.Tensor, mode: Numerics) -> None:
    if mode is Numerics.DETERMINISTIC:
        assert torch.equal(found, alone)
    else:
        torch.testing.assert_close(found, alone, rtol=0, atol=2e-5)


@torch.no_grad()
def test_each_row_computes_as_if_alone_with_its_adapter_in_prefill_and_decode(make: Make, mode: Numerics) -> None:
    held = adapters(make)
    model, bank = banked(make, held)
    tokens, after = random_tokens(len(INDEX), 9), random_tokens(len(INDEX), 1, seed=1)
    with bank.rows(INDEX):
        out = model(tokens, lengths=LENGTHS)
        step = model(after, cache=out.cache)
        logits = model.logits(step.hidden[:, -1])
    others = []
    for row, slot in enumerate(INDEX):
        single = make()
        if slot >= 0:
            put_adapter(single, held[slot])
        length = int(LENGTHS[row])
        first = single(tokens[row : row + 1, :length])
        second = single(after[row : row + 1], cache=first.cache)
        agree(out.hidden[row, :length], first.hidden[0], mode)
        agree(step.hidden[row], second.hidden[0], mode)
        agree(logits[row], single.logits(second.hidden[0, -1]), mode)
        others.append(second.hidden[0])
    assert not torch.allclose(others[0], others[4], atol=1e-3)
    with bank.rows([1, 0, -1, 1, 2]):  # a check that the comparison can fail: another adapter in the first row
        assert not torch.allclose(model(tokens, lengths=LENGTHS).hidden[0, :7], out.hidden[0, :7], atol=1e-3)


@torch.no_grad()
def test_packed_sequences_have_adapters_too(make: Make, mode: Numerics) -> None:
    held = adapters(make)
    model, bank = banked(make, held)
    tokens = random_tokens(len(INDEX), 9)
    packed = Packed.of(LENGTHS.tolist(), "cpu")
    row = torch.cat([tokens[i, :length] for i, length in enumerate(LENGTHS.tolist())])[None]
    with bank.rows(INDEX, packed):
        out = model(row, packed=packed)
        model.logits(out.hidden[0, packed.bounds[1:] - 1])
    for i, slot in enumerate(INDEX):
        single = make()
        if slot >= 0:
            put_adapter(single, held[slot])
        first, last = int(packed.bounds[i]), int(packed.bounds[i + 1])
        agree(out.hidden[0, first:last], single(row[:, first:last]).hidden[0], mode)


@torch.no_grad()
def test_rows_without_adapters_are_the_base_s_to_the_bit_and_closing_gives_the_base_back(make: Make) -> None:
    held = adapters(make)
    plain = make()
    tokens = random_tokens(3, 6)
    want = plain(tokens).hidden
    model, bank = banked(make, held)
    with bank.rows([-1, -1, -1]):
        assert torch.equal(model(tokens).hidden, want)
    with using(Numerics.DETERMINISTIC):
        want = plain(tokens).hidden
        with bank.rows([-1, 0, -1]):
            found = model(tokens).hidden
        assert torch.equal(found[[0, 2]], want[[0, 2]])
        assert not torch.equal(found[1], want[1])
    assert [name for name, _ in model.named_parameters()] == [name.replace("experts.w", "experts.base.w") for name, _ in plain.named_parameters()]
    bank.close()
    assert torch.equal(model(tokens).hidden, plain(tokens).hidden)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


@torch.no_grad()
def test_a_slot_holds_what_was_put_there_last_and_its_key_says_so() -> None:
    def make() -> K3ForCausalLM:
        return random_model(dtype=torch.float32)

    held = adapters(make)
    model, bank = banked(make, held)
    tokens = random_tokens(1, 6)
    before = bank.key(0)
    with bank.rows([0]):
        first = model(tokens).hidden
    assert bank.put(0, held[2]) == bank.key(0) != before
    with bank.rows([0]):
        second = model(tokens).hidden
    with bank.rows([2]):
        assert torch.equal(model(tokens).hidden, second)
    assert not torch.allclose(first, second, atol=1e-3)
    next(iter(held[2].updates.values())).b.zero_()  # the trainer goes on; the bank holds a copy
    with bank.rows([0]):
        assert torch.equal(model(tokens).hidden, second)
    bank.clear(0)
    with pytest.raises(ValueError, match="holds no adapter"), bank.rows([0]):
        pass


def test_a_slot_in_use_is_not_changed_and_is_free_again_after_an_error() -> None:
    def make() -> K3ForCausalLM:
        return random_model(dtype=torch.float32)

    held = adapters(make)
    _, bank = banked(make, held)
    with bank.rows([1, 1]):
        with pytest.raises(ValueError, match="used by a forward"):
            bank.put(1, held[0])
        with pytest.raises(ValueError, match="used by a forward"):
            bank.clear(1)
        bank.put(0, held[1])
    with pytest.raises(RuntimeError), bank.rows([1]):
        raise RuntimeError
    bank.put(1, held[0])


@torch.no_grad()
def test_a_forward_without_rows_or_with_others_is_refused() -> None:
    def make() -> K3ForCausalLM:
        return random_model(dtype=torch.float32)

    model, bank = banked(make, adapters(make))
    with pytest.raises(ValueError, match="no rows were chosen"):
        model(random_tokens(1, 3))
    with bank.rows([0, 1, 2]), pytest.raises(ValueError, match="chosen for 3 rows"):
        model(random_tokens(2, 4))
    packed = Packed.of([2, 3], "cpu")
    with bank.rows([0, 1], packed), pytest.raises(ValueError, match="packed to 5 tokens"):
        model(random_tokens(1, 7), packed=Packed.of([3, 4], "cpu"))
    with pytest.raises(ValueError, match="2 sequences"), bank.rows([0], packed):
        pass
    with pytest.raises(ValueError, match="slot 9"), bank.rows([9]):
        pass
    with pytest.raises(ValueError, match="one adapter"), bank.rows([]):
        pass


@pytest.mark.parametrize(("update", "field"), [
    (Update(torch.zeros(2, 32), torch.zeros(17, 2), 1.0), "model.layers.0.self_attn.q_proj"),
    (Update(torch.zeros(11, 32), torch.zeros(16, 11), 1.0), "model.layers.0.self_attn.q_proj"),
    (Update(torch.zeros(2, 32), torch.zeros(16, 2), 1.0), "model.layers.9.self_attn.q_proj"),
])
def test_an_adapter_of_another_base_or_too_large_is_refused_and_changes_nothing(update: Update, field: str) -> None:
    def make() -> K3ForCausalLM:
        return random_model(dtype=torch.float32)

    _, bank = banked(make, adapters(make))
    before = bank.key(0)
    with pytest.raises(IntegrityError) as refused:
        bank.put(0, Adapter({field: update}))
    assert refused.value.field == field
    assert refused.value.remedy
    assert bank.key(0) == before


@pytest.mark.parametrize("settings", [{"slots": 0, "rank": 2}, {"slots": 2, "rank": 0}, {"slots": 2, "rank": 2, "targets": "nothing"}])
def test_a_bank_that_could_hold_nothing_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        AdapterBank(random_model(), **settings)  # type: ignore[arg-type]


@torch.no_grad()
def test_a_model_cast_with_its_bank_keeps_ranks_and_factors() -> None:
    """The factor of alpha 1 and rank 3 is no bfloat16."""
    model, plain = torch.nn.Module(), Linear(32, 16)
    model.q_proj = plain
    bank = AdapterBank(model, slots=2, rank=5, targets="all-linear")
    update = Update(torch.randn(3, 32), torch.randn(16, 3), 1.0)
    bank.put(1, Adapter({"q_proj": update}))
    model.to(torch.bfloat16)
    x = torch.randn(2, 32).bfloat16()
    with bank.rows([1, -1]):
        found = model.q_proj(x)
    term = torch.nn.functional.linear(torch.nn.functional.linear(x, update.a.bfloat16()), update.b.bfloat16())
    base = torch.nn.functional.linear(x, plain.weight)
    assert torch.equal(found[0], base[0] + term[0] * (1 / 3))
    assert torch.equal(found[1], base[1])
