"""Supervised pairs for the warm start: questions and right answers, drawn from the same split the run trains on.

Guarantees: no held-out question is in it, because it is drawn from `TaskSource.task`; a corpus is a function of its mixture and seed; it can be written
to one file and trained on where the task library is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from driftline.environments.source import MixturePart, load_source
from driftline.messages.errors import ConfigError
from driftline.models.tokenizer import ByteTokenizer, Tokenizer

__all__ = ["Corpus", "build_corpus"]


@dataclass(frozen=True)
class Corpus:
    """tokens [N, T], right-padded, int16 where the vocabulary fits, else int32: what the tokenizer makes of the question, the answer, the id that ends it; prompt,
    total int16 [N]: where the answer begins and ends."""

    tokens: np.ndarray
    prompt: np.ndarray
    total: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def save(self, path: Path) -> None:
        np.savez_compressed(path, tokens=self.tokens, prompt=self.prompt, total=self.total)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        try:
            with np.load(path, allow_pickle=False) as file:
                return cls(file["tokens"], file["prompt"], file["total"])
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(f"not a corpus file: {error}", field="--corpus", value=str(path),
                              remedy="make one with driftline pretrain FILE --corpus-only PATH") from error


def build_corpus(mixture: tuple[MixturePart, ...], count: int, seed: int, max_tokens: int, tokenizer: Tokenizer | None = None) -> Corpus:
    """`count` pairs of at most `max_tokens` tokens of `tokenizer` (None: bytes), each part in its share. Longer ones are skipped and replaced by the next draw."""
    tokenizer = tokenizer or ByteTokenizer()
    weight = sum(part.weight for part in mixture)
    rows: list[tuple[list[int], int]] = []
    for number, part in enumerate(mixture):
        source = load_source(part.source or "reasoning_gym", part.family, part.params)
        wanted, index = round(count * part.weight / weight), 0
        found = 0
        while found < wanted:
            task = source.task(index, seed + number)
            index += 1
            if task.answer is None:
                raise ConfigError("has no stored answer to learn from", field="mixture.family", value=part.family,
                                  remedy="use a family with one right answer")
            prompt = tokenizer.encode_prompt(task.prompt)
            row = [*prompt, *tokenizer.encode(task.answer), tokenizer.eos_ids[0]]
            if len(row) <= max_tokens:
                rows.append((row, len(prompt)))
                found += 1
            elif index > 100 * (found + 100):
                raise ConfigError(f"questions are longer than max_tokens = {max_tokens}", field="mixture.family", value=part.family,
                                  remedy="raise train.max_tokens or choose easier parameters")
    order = np.random.default_rng(seed).permutation(len(rows))
    width = np.int16 if tokenizer.vocab_size <= np.iinfo(np.int16).max else np.int32
    tokens = np.full((len(rows), max(len(row) for row, _ in rows)), tokenizer.pad, dtype=width)
    for at, i in enumerate(order):
        row = rows[i][0]
        tokens[at, : len(row)] = row
    prompt_lengths = np.array([rows[i][1] for i in order], dtype=np.int16)
    return Corpus(tokens, prompt_lengths, np.array([len(rows[i][0]) for i in order], dtype=np.int16))
