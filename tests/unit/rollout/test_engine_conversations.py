"""Prompts through a model's own tokenizer: what is asked, where a completion ends, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from engine_cases import completion, finish_all, group, policy, recomputed

from driftline.messages.errors import ConfigError, DriftlineError, IntegrityError
from driftline.messages.types import Finish, Group
from driftline.models.tokenizer import ByteTokenizer, Turn
from driftline.services.rollout.engine import Engine


class Chatty(ByteTokenizer):
    """Bytes with a template, and as many ends as it is given."""

    def __init__(self, eos_ids: tuple[int, ...] = (257,), vocab_size: int = 259) -> None:
        self.eos_ids, self.vocab_size = eos_ids, vocab_size  # type: ignore[misc]
        self.asked: list[tuple[Turn, ...]] = []

    def encode_chat(self, turns: Sequence[Turn]) -> list[int]:
        self.asked.append(tuple(turns))
        return [self.bos, *self.encode("".join(f"<{turn.role}>{turn.content}" for turn in turns))]

    def decode(self, ids: Iterable[int]) -> str:
        return "decoded " + super().decode(ids)


def shown(index: int, shots: object) -> Group:
    plain = group(index)
    return plain.model_copy(update={"task": plain.task.model_copy(update={"metadata": {"shots": shots}})})


def test_a_prompt_is_the_template_of_examples_and_question() -> None:
    tokenizer = Chatty()
    engine = Engine(policy(), version=0, tokenizer=tokenizer)
    engine.submit(shown(0, [["2 + 2?", "4"], ["1 + 1?", "2"]]))
    done = finish_all(engine)
    for trajectory in done.values():
        prompt = trajectory.tokens[: trajectory.prompt_tokens].tolist()
        assert prompt == [256, *b"<user>2 + 2?<assistant>4<user>1 + 1?<assistant>2<user>question 0"]
        assert trajectory.text == "decoded " + ByteTokenizer().decode(completion(trajectory))
        assert trajectory.task.prompt == "question 0"
    assert len(tokenizer.asked) == 1, "a group has one prompt"


def test_without_a_tokenizer_prompts_are_bytes_as_ever() -> None:
    engine = Engine(policy(), version=0)
    engine.submit(group(1))
    some = next(iter(finish_all(engine).values()))
    assert some.tokens[: some.prompt_tokens].tolist() == [256, *b"question 1 and more\n"]


def test_a_completion_ends_at_any_of_the_ends() -> None:
    """A model that ends its turn with an id its tokenizer does not call eos would be sampled up to the limit, every time. (L24)"""
    model = policy(stops=False)
    plain = Engine(model, version=0)
    for i in range(4):
        plain.submit(group(i, members=4))
    free = finish_all(plain)
    assert all(t.finish is Finish.LENGTH for t in free.values())
    second = completion(free["g00000000", 0])[2]
    engine = Engine(model, version=0, tokenizer=Chatty((257, second)))
    bytes_prompt = ByteTokenizer.encode_chat
    engine.tokenizer.encode_chat = lambda turns: bytes_prompt(ByteTokenizer(), turns)  # type: ignore[method-assign]
    for i in range(4):
        engine.submit(group(i, members=4))
    stopped = 0
    for key, trajectory in finish_all(engine).items():
        want = completion(free[key])
        cut = want[: want.index(second) + 1] if second in want else want
        assert completion(trajectory) == cut
        assert trajectory.finish is (Finish.STOP if second in want else Finish.LENGTH)
        stopped += second in want
    assert 0 < stopped < 16


def test_the_end_is_trained_on_where_padding_is_the_same_id() -> None:
    """SmolLM2 pads with its end: a mask by value would drop the one token that says where to stop. (L23)"""
    tokenizer = Chatty()
    tokenizer.pad = 257  # type: ignore[misc]
    engine = Engine(policy(), version=0, tokenizer=tokenizer)
    for i in range(3):
        engine.submit(group(i, members=4))
    done = finish_all(engine)
    stopped = [t for t in done.values() if t.finish is Finish.STOP]
    assert len(stopped) > 0
    for trajectory in done.values():
        assert trajectory.action_mask[trajectory.prompt_tokens :].all()
        np.testing.assert_allclose(recomputed(policy(), trajectory), trajectory.logprobs[trajectory.action_mask], atol=1e-4)
    assert all(t.tokens[-1] == 257 and t.logprobs[-1] < 0 for t in stopped)


def test_examples_count_against_the_models_room() -> None:
    model = policy()
    object.__setattr__(model, "config", model.config.model_copy(update={"max_position_embeddings": 60}))
    engine = Engine(model, version=0, tokenizer=Chatty())
    engine.submit(shown(0, [["short", "1"]]))
    with pytest.raises(DriftlineError, match="a prompt of"):
        engine.submit(shown(1, [["a long example of a question", "and a long answer to it"]]))
    assert engine.waiting == 3, "what does not fit never entered"


def test_a_task_with_broken_examples_is_refused_before_it_enters() -> None:
    engine = Engine(policy(), version=0)
    with pytest.raises(IntegrityError, match="pairs of question and answer"):
        engine.submit(shown(0, ["junk"]))
    assert engine.idle


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="the tokenizer has 300 ids"):
        Engine(policy(), version=0, tokenizer=Chatty(vocab_size=300))
    Engine(policy(), version=0, tokenizer=Chatty(vocab_size=264))


def test_greedy_rows_are_the_likeliest_tokens() -> None:
    model = policy()
    engine = Engine(model, version=0, greedy_decoding=True, tokenizer=Chatty())
    engine.submit(group(0, members=2))
    done = finish_all(engine)
    one, two = done.values()
    assert completion(one) == completion(two)
    tokens = torch.from_numpy(one.tokens.astype("int64"))[None]
    with torch.no_grad():
        likeliest = model.logits(model(tokens[:, :-1]).hidden[0]).argmax(-1).tolist()
    assert completion(one) == likeliest[one.prompt_tokens - 1 :]
