"""Published tokenizers: the ids of transformers for texts and conversations, every end of an answer, and files that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_cases import TEMPLATE, metadata, small_llama, vocabulary, weights, write
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.gguf.llama import GgufModel
from driftline.models.tokenizer import ByteTokenizer, Role, Turn
from driftline.models.tokenizers.hf import HfTokenizer
from driftline.models.tokenizers.loading import load_tokenizer

TEXTS = ["hello world", "  two  spaces\n\nand lines\t", "12345 bits, don't it's 3.14", "é漢🙂\u200d mixed Ünïcode", "", "<|start|>user\n<|stop|>", "\x00\x7f", "ＡＢ ﬁ e\u0301"]
CHATS = [
    [("user", "hello")],
    [("system", "Be terse."), ("user", "12 + 3?")],
    [("user", "How many bits in 5?"), ("assistant", "2"), ("user", "in 12345?  \n")],
]


def turns(chat: list[tuple[str, str]]) -> list[Turn]:
    return [Turn(Role(role), content) for role, content in chat]


def folder(tmp_path: Path, **changes: Any) -> Path:
    """A model directory as transformers writes one, from the small vocabulary."""
    for name, content in GgufModel.open(small_llama(tmp_path, **changes)).files().items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def theirs(place: Path, chat: list[tuple[str, str]]) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(place)
    ids = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in chat], add_generation_prompt=True)
    return list(ids["input_ids"] if hasattr(ids, "keys") else ids)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_ids_are_those_of_transformers_for_texts_and_conversations(tmp_path: Path, pre: str) -> None:
    place = folder(tmp_path, tokenizer__ggml__pre=pre)
    ours, reference = load_tokenizer(place), AutoTokenizer.from_pretrained(place)
    assert isinstance(ours, HfTokenizer)
    for text in TEXTS:
        assert ours.encode(text) == reference.encode(text, add_special_tokens=False), text
    for chat in CHATS:
        assert ours.encode_chat(turns(chat)) == theirs(place, chat)
    assert ours.encode_prompt("hello") == ours.encode_chat(turns(CHATS[0]))
    assert load_tokenizer(tmp_path / "small.gguf").encode_chat(turns(CHATS[2])) == ours.encode_chat(turns(CHATS[2])), "the file itself says the same"


def test_the_ways_of_splitting_text_differ_where_they_should(tmp_path: Path) -> None:
    """llama.cpp's names: smollm takes digits one by one, llama-bpe up to three, gpt-2 all together."""
    found = {}
    for pre in ("smollm", "gpt-2", "llama-bpe", "qwen2"):
        (tmp_path / pre).mkdir()
        tokenizer = load_tokenizer(folder(tmp_path / pre, tokenizer__ggml__pre=pre))
        found[pre] = [tokenizer.decode([i]) for i in tokenizer.encode("1234")]
        if pre == "qwen2":
            assert tokenizer.encode("e\u0301") == tokenizer.encode("é"), "composed first"
    assert found == {"smollm": ["1", "2", "3", "4"], "gpt-2": ["123", "4"], "llama-bpe": ["123", "4"], "qwen2": ["1", "2", "3", "4"]}


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_a_text_comes_back_from_its_ids(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = small_tokenizer(tmp_path_factory)
    if "<|" in text:
        return
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


_SMALL: list[HfTokenizer] = []


def small_tokenizer(factory: pytest.TempPathFactory) -> HfTokenizer:
    if not _SMALL:
        made = load_tokenizer(small_llama(factory.mktemp("small")))
        assert isinstance(made, HfTokenizer)
        _SMALL.append(made)
    return _SMALL[0]


@given(ids=st.lists(st.integers(-5, 2**33), max_size=12))
def test_any_ids_a_policy_could_sample_are_a_text(ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    text = small_tokenizer(tmp_path_factory).decode(ids)
    assert "<|stop|>" not in text
    text.encode()


def test_a_lone_surrogate_is_no_crash(tmp_path: Path) -> None:
    assert load_tokenizer(small_llama(tmp_path)).encode("a\ud800b")


def test_every_end_that_any_file_names_ends_an_answer(tmp_path: Path) -> None:
    place = folder(tmp_path)
    assert load_tokenizer(place).eos_ids == (2,)
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    assert load_tokenizer(place).eos_ids == (2, 3), "the tokenizer's own first: it is what an answer is taught to end with"
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    assert set(load_tokenizer(place).eos_ids) == {2, 3, 0}
    ends = write(tmp_path / "ends.gguf", metadata(tokenizer__ggml__eot_token_id=3), weights())
    assert load_tokenizer(ends).eos_ids == (2, 3)


def test_without_a_template_turns_are_lines_behind_what_the_tokenizer_puts_first(tmp_path: Path) -> None:
    path = small_llama(tmp_path, tokenizer__chat_template=None, tokenizer__ggml__add_bos_token=True)
    tokenizer = load_tokenizer(path)
    assert isinstance(tokenizer, HfTokenizer)
    assert tokenizer.template is None
    assert tokenizer.encode_chat(turns(CHATS[2])) == [1, *tokenizer.encode("How many bits in 5?\n2\nin 12345?  \n\n")]


def test_a_template_may_lie_in_any_of_three_files_and_the_jinja_file_counts_first(tmp_path: Path) -> None:
    place = folder(tmp_path, tokenizer__chat_template=None)
    config = json.loads((place / "tokenizer_config.json").read_text())
    listed = [{"name": "tool_use", "template": "never"}, {"name": "default", "template": "listed {{ messages[0].content }}"}]
    for document, want in ((config | {"chat_template": "told {{ messages[0].content }}"}, "told x"), (config | {"chat_template": listed}, "listed x")):
        (place / "tokenizer_config.json").write_text(json.dumps(document))
        tokenizer = load_tokenizer(place)
        assert tokenizer.decode(tokenizer.encode_chat([Turn(Role.USER, "x")])) == want
        assert tokenizer.encode_chat([Turn(Role.USER, "x")]) == theirs(place, [("user", "x")])
    (place / "chat_template.json").write_text(json.dumps({"chat_template": "json {{ messages[0].content }}"}))
    tokenizer = load_tokenizer(place)
    assert tokenizer.decode(tokenizer.encode_chat([Turn(Role.USER, "x")])) == "json x"
    (place / "chat_template.jinja").write_text(TEMPLATE)
    assert load_tokenizer(place).encode_chat(turns(CHATS[0])) == theirs(place, CHATS[0])


def test_a_models_own_tokenizer_or_none(tmp_path: Path) -> None:
    """Ids of another vocabulary would be sampled and trained on without a word."""
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258, "vocab_size": 264}))
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258, "vocab_size": 264}}))
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    for other in ({"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 32000}, {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258, "vocab_size": 200}):
        (tmp_path / "config.json").write_text(json.dumps(other))
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            load_tokenizer(tmp_path)
    assert isinstance(load_tokenizer(Path(__file__).parents[3] / "models" / "base"), ByteTokenizer)


@pytest.mark.parametrize(("name", "content", "match"), [
    ("tokenizer.json", "{}", "not a tokenizer"), ("tokenizer.json", "no json", "not a tokenizer"), ("tokenizer_config.json", "[1]", "not an object"),
    ("generation_config.json", "{", "not JSON"), ("generation_config.json", '{"eos_token_id": "2"}', "not the number of a token"),
    ("config.json", '{"eos_token_id": [true]}', "not the number of a token"),
])
def test_files_that_are_broken_are_named(tmp_path: Path, name: str, content: str, match: str) -> None:
    place = folder(tmp_path)
    (place / name).write_text(content)
    with pytest.raises(ConfigError, match=match) as caught:
        load_tokenizer(place)
    assert name in str(caught.value)


def test_a_model_that_never_ends_is_refused(tmp_path: Path) -> None:
    place = folder(tmp_path, tokenizer__ggml__eos_token_id=None)
    with pytest.raises(ConfigError, match="no token ends an answer"):
        load_tokenizer(place)


@pytest.mark.parametrize(("change", "error", "match"), [
    ({"tokenizer__ggml__model": "llama"}, ConfigError, "kind of vocabulary"),
    ({"tokenizer__ggml__pre": "tekken"}, ConfigError, "way of splitting"),
    ({"tokenizer__ggml__eos_token_id": 400}, IntegrityError, "not the number of a token"),
    ({"tokenizer__ggml__merges": ["hello"]}, IntegrityError, "two pieces"),
    ({"tokenizer__ggml__merges": None}, IntegrityError, "not a list of texts"),
    ({"tokenizer__ggml__token_type": None}, IntegrityError, "one kind for each token"),
    ({"tokenizer__ggml__tokens": ["a", "a"], "tokenizer__ggml__bos_token_id": None, "tokenizer__ggml__eos_token_id": 1, "tokenizer__ggml__unknown_token_id": None,
      "tokenizer__ggml__padding_token_id": None}, IntegrityError, "there twice"),
])
def test_a_vocabulary_that_cannot_be_said_exactly_is_refused(tmp_path: Path, change: dict[str, Any], error: type[Exception], match: str) -> None:
    path = small_llama(tmp_path, **change)
    with pytest.raises(error, match=match):
        load_tokenizer(path)


def test_a_prompt_of_the_byte_tokenizer_is_what_it_was() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode_chat([Turn(Role.USER, "hé")]) == tokenizer.encode_prompt("hé") == [256, 104, 195, 169, 10]
    assert tokenizer.encode_chat(turns([("user", "a"), ("assistant", "b"), ("user", "c")])) == [256, *b"a\nb\nc\n"]
    assert tokenizer.eos_ids == (257,)


def test_the_small_vocabulary_has_merges_that_act(tmp_path: Path) -> None:
    """Else the comparisons above would compare bytes with bytes."""
    tokenizer = load_tokenizer(small_llama(tmp_path))
    assert len(tokenizer.encode("hello world")) == 2
    assert len(vocabulary()["tokenizer.ggml.tokens"]) == tokenizer.vocab_size
