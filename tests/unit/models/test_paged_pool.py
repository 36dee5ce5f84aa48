"""What a pool is made for and refuses, how its bytes are counted, that a step of decoding can be captured, and adapters of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense_model_cases import ours
from lora_cases import drawn_adapter
from model_cases import random_model, small
from paged_cases import Pooled, Rows, prompts, whole
from torch import nn

from driftline.kernels.mode import Numerics, using
from driftline.messages.errors import ConfigError
from driftline.models.causal_lm import CausalLM
from driftline.models.lora import AdapterBank, put_adapter
from driftline.models.model import K3ForCausalLM
from driftline.models.packed import Packed
from driftline.models.paged import PAGE, Pool, decode, prefill
from driftline.models.paged.states import KdaStates
from driftline.services.rollout.runner.watch import HostRead, Watch

torch.set_num_threads(1)

Make = Callable[[], CausalLM]
MAKES: dict[str, Make] = {"k3": lambda: random_model(dtype=torch.float32), "dense": lambda: ours("qwen2")}


@pytest.fixture(params=MAKES)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKES[request.param]


def rows_of(*lengths: int, seed: int = 0) -> Rows:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (n,), generator=rng) for n in lengths]


@pytest.mark.parametrize("window", [1, 3])
def test_bytes_are_those_of_the_tensors(make: Make, window: int) -> None:
    model = make()
    pool = Pool.make(model, pages=5, slots=4, window=window)
    assert (pool.page_bytes, pool.state_bytes) == Pool.sizes(model, window)
    paged = sum(t.nbytes for layer in pool.layers if not isinstance(layer, KdaStates) for t in layer.tensors())
    held = sum(t.nbytes for layer in pool.layers if isinstance(layer, KdaStates) for t in layer.everything())
    # A page more than were asked for is kept of zeros, and a slot more takes what padding rows write.
    assert (paged, held) == (6 * pool.page_bytes, 5 * pool.state_bytes)
    assert bool(pool.state_bytes) is any(isinstance(layer, KdaStates) for layer in pool.layers)
    assert sum(t.nbytes for t in pool.export_pages([1])) == pool.page_bytes


def test_k3s_published_sizes() -> None:
    """A token of an MLA layer of the release is 1,152 bytes in bfloat16; the state of a KDA layer 6.29 MB in fp32, and 221 KB of the convolution's inputs."""
    linear = {"num_heads": 96, "head_dim": 128, "full_attn_layers": (4,), "kda_layers": (1, 2, 3)}
    config = small(linear_attn_config=linear, num_hidden_layers=4, kv_lora_rank=512, qk_rope_head_dim=64)
    with torch.device("meta"):
        model = K3ForCausalLM(config).to(torch.bfloat16)
    page, state = Pool.sizes(model)
    assert page == PAGE * 576 * 2
    assert state == 3 * (96 * 128 * 128 * 4 + 3 * 36864 * 2)
    assert Pool.sizes(model, 4).state_bytes == state + 3 * 4 * (36864 * 2 + 3 * 96 * 128 * 2 + 96 * 2)


@pytest.mark.parametrize(("field", "sizes"), [
    ("pages", {"pages": 1, "slots": 1}), ("window", {"pages": 3, "slots": 1, "window": 0}), ("window", {"pages": 3, "slots": 1, "window": 17}),
    ("slots", {"pages": 3, "slots": 0}),
])
def test_sizes_that_hold_nothing_are_refused(field: str, sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=field):
        Pool.make(random_model(), **sizes)


def test_a_model_of_another_kind_is_refused() -> None:
    other: Any = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="Linear"):
        Pool.make(other, pages=3, slots=1)


def test_a_dense_model_needs_no_slots() -> None:
    run = Pooled(ours("llama"), rows_of(20))
    run.pool = Pool.make(run.model, pages=run.pool.pages, slots=0)
    run.fill([15])
    for _ in range(5):
        run.step()
    torch.testing.assert_close(run.found()[0], whole(run.model, run.rows)[0][0], rtol=0, atol=2e-5)


def test_arguments_that_do_not_go_together_are_refused(make: Make) -> None:
    run = Pooled(make(), rows_of(70, 20), window=2)
    run.fill([64, 10])
    pool, model, one = run.pool, run.model, torch.tensor([[1], [2]])
    lengths = torch.tensor([64, 10], dtype=torch.int32)
    with pytest.raises(ValueError, match="tokens has 2 a row; without accepted"):
        decode(model, pool, one.expand(-1, 2), run.slots, run.tables, lengths)
    with pytest.raises(ValueError, match="1 to 2 at once"):
        decode(model, pool, one.expand(-1, 3), run.slots, run.tables, lengths, torch.zeros_like(lengths))
    with pytest.raises(ValueError, match=r"accepted is torch\.int64"):
        decode(model, pool, one, run.slots, run.tables, lengths, torch.zeros_like(lengths).long())
    with pytest.raises(ValueError, match=r"slots is torch\.int64"):
        decode(model, pool, one, run.slots.long(), run.tables, lengths)
    with pytest.raises(ValueError, match="lengths is"):
        decode(model, pool, one, run.slots, run.tables, lengths[:1])
    with pytest.raises(ValueError, match="room for 128"):
        prefill(model, pool, torch.ones(65, dtype=torch.int64), Packed.of([65], "cpu"), run.slots[:1], run.tables[:1], lengths[:1], [64])
    with pytest.raises(ValueError, match="no sequence without a token"):
        prefill(model, pool, torch.ones(3, dtype=torch.int64), Packed.of([3, 0], "cpu"), run.slots, run.tables, lengths, [64, 10])


def test_no_more_tokens_than_a_dense_model_has_positions() -> None:
    """Of a pool that has pages for more: its rotations are made as far as the model goes."""
    model = ours("llama")  # 256 positions
    pool = Pool.make(model, pages=8, slots=0)
    tables = torch.arange(1, 8, dtype=torch.int32)[None]
    start = torch.zeros(1, dtype=torch.int32)
    prefill(model, pool, torch.ones(256, dtype=torch.int64), Packed.of([256], "cpu"), start, tables, start, [0])
    with pytest.raises(ValueError, match="there is room for 257"):
        prefill(model, pool, torch.ones(258, dtype=torch.int64), Packed.of([258], "cpu"), start, tables, start, [0])


def test_what_another_pool_exported_is_refused() -> None:
    dense, other = (Pool.make(ours(name), pages=4, slots=0) for name in ("llama", "llama as many keys"))
    with pytest.raises(ValueError, match="another model or another pool"):
        dense.import_pages([1, 2], other.export_pages([1, 2]))
    with pytest.raises(ValueError, match="another model or another pool"):
        dense.import_pages([1, 2], [tensor.double() for tensor in dense.export_pages([1, 2])])
    with pytest.raises(ValueError, match="another model or another pool"):
        dense.import_pages([1, 2], dense.export_pages([1]))
    with pytest.raises(ValueError, match="one place for each"):
        dense.copy_pages([1, 2], [3])


@pytest.mark.parametrize("window", [1, 3])
def test_a_step_of_decoding_looks_at_nothing_on_the_host(make: Make, window: int) -> None:
    run = Pooled(make(), rows_of(20, 9), window=window)
    run.fill([12, 3])
    tokens = torch.ones(2, window, dtype=torch.int64)
    lengths, accepted = torch.tensor([12, 3], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with Watch():
        decode(run.model, run.pool, tokens, run.slots, run.tables, lengths, accepted if window > 1 else None)
        run.pool.fold(run.slots, accepted + window)
    with pytest.raises(HostRead), Watch():
        int(lengths.max())


def test_the_tensors_stay_where_they_are(make: Make) -> None:
    run = Pooled(make(), rows_of(30, 20), window=2)
    before = [t.data_ptr() for layer in run.pool.layers for t in layer.tensors()]
    run.fill(prompts(run.rows, 6))
    run.score([2, 1])
    run.fold()
    run.pool.copy_pages([int(run.tables[0, 0])], [int(run.tables[1, 0])])
    run.pool.import_states([0], run.pool.export_states([1]))
    run.pool.clear()
    assert [t.data_ptr() for layer in run.pool.layers for t in layer.tensors()] == before


@pytest.mark.parametrize("mode", list(Numerics))
@pytest.mark.parametrize("window", [1, 3])
def test_rows_with_adapters_of_their_own(make: Make, mode: Numerics, window: int) -> None:
    """Each as the model with that adapter alone."""
    held = [drawn_adapter(make(), 1, rank=4), drawn_adapter(make(), 2, rank=3)]
    rows, index = rows_of(40, 13, 22), (1, -1, 0)
    with using(mode):
        model = make()
        bank = AdapterBank(model, slots=2, rank=4, targets="all-linear")
        for slot, adapter in enumerate(held):
            bank.put(slot, adapter)
        run = Pooled(model, rows, window=window)
        with torch.no_grad():
            for ends in ([20, 5, 7], prompts(rows, 4)):
                sequences = Packed.of([end - done for end, done in zip(ends, run.done, strict=True)], "cpu")
                with bank.rows(index, sequences):
                    run.fill(ends)
            with bank.rows(index):
                if window == 1:
                    for _ in range(4):
                        run.step(padding=0)
                else:
                    run.score([1, 3, 2], padding=0)
                    run.score([3, 1, 2], padding=0)
        for slot, row, found in zip(index, rows, run.found(), strict=True):
            alone = make()
            if slot >= 0:
                put_adapter(alone, held[slot])
            with torch.no_grad():
                wanted = alone(row[None]).hidden[0]
            if mode is Numerics.DETERMINISTIC:
                assert torch.equal(found, wanted)
            else:
                torch.testing.assert_close(found, wanted, rtol=0, atol=5e-5)


def test_a_pool_made_in_inference_mode_is_written_outside_of_it() -> None:
    model, rows = random_model(dtype=torch.float32), rows_of(9)
    with torch.inference_mode():
        run = Pooled(model, rows)
        run.fill([5])
    run.step(padding=0)
    assert run.found()[0].isfinite().all()
