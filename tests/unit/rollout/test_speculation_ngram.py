"""Drafts from text that was there: found where they are, newest first, from the family where the row has none, and gone when the row is."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.messages.errors import ConfigError
from driftline.services.rollout.speculation import NgramDrafter, Row


def _row(tokens: list[int], name: str = "a", family: str | None = None, room: int = 99) -> Row:
    return Row(name, array("i", tokens), room, family)


def _one(drafter: NgramDrafter, row: Row, limit: int = 3) -> list[int]:
    drafts = drafter.propose([row], [limit])
    return [int(t) for t in drafts.tokens[0, : drafts.counts[0]]]


def test_what_followed_the_same_tokens_before_is_drafted() -> None:
    assert _one(NgramDrafter(), _row([1, 2, 3, 4, 5, 9, 1, 2])) == [3, 4, 5]


def test_the_newest_of_two_occurrences_is_taken_and_the_longest_match_before_it() -> None:
    assert _one(NgramDrafter(shortest=2, longest=2), _row([1, 2, 7, 7, 1, 2, 8, 8, 1, 2])) == [8, 8, 1]
    assert _one(NgramDrafter(shortest=1, longest=3), _row([5, 1, 2, 7, 6, 0, 1, 2, 8, 9, 5, 1, 2])) == [7, 6, 0]


def test_nothing_is_drafted_where_nothing_was_seen() -> None:
    drafts = NgramDrafter().propose([_row([1, 2, 3])], [3])
    assert drafts.counts.tolist() == [0]
    assert drafts.tokens.tolist() == [[3, 3, 3]], "what stands behind the counts is a token of the row: the model has it"


def test_a_loop_shorter_than_the_draft_goes_round() -> None:
    assert _one(NgramDrafter(), _row([1, 2, 1, 2, 1, 2]), limit=5) == [1, 2, 1, 2, 1]


def test_the_limit_is_a_rows_own() -> None:
    drafts = NgramDrafter().propose([_row([1, 2, 3, 4, 1, 2], "a"), _row([1, 2, 3, 4, 1, 2], "b")], [1, 0])
    assert drafts.counts.tolist() == [1, 0]


def test_members_draft_from_each_other_and_strangers_do_not() -> None:
    drafter = NgramDrafter()
    _one(drafter, _row([9, 8, 1, 2, 3, 4, 5, 6], "a", "family"))
    assert _one(drafter, _row([9, 8, 0, 1, 2], "b", "family")) == [3, 4, 5]
    assert _one(drafter, _row([9, 8, 0, 1, 2], "c", "other")) == []
    assert _one(NgramDrafter(families=False), _row([9, 8, 0, 1, 2], "b", "family")) == []


def test_a_finished_members_text_stays_for_the_others_and_goes_with_the_last() -> None:
    drafter = NgramDrafter()
    _one(drafter, _row([9, 8, 1, 2, 3, 4, 5, 6], "a", "family"))
    _one(drafter, _row([9, 8, 0], "b", "family"))
    drafter.retire("a")
    assert _one(drafter, _row([9, 8, 0, 1, 2], "b", "family")) == [3, 4, 5]
    drafter.retire("b")
    assert _one(drafter, _row([9, 8, 0, 1, 2], "c", "family")) == []


def test_unknown_rows_retire_quietly() -> None:
    NgramDrafter().retire("nobody")


def test_a_row_that_begins_again_shorter_is_a_new_row() -> None:
    drafter = NgramDrafter()
    _one(drafter, _row([1, 2, 3, 4, 5, 6, 7, 8]))
    assert _one(drafter, _row([5, 6, 1, 5, 6])) == [1, 5, 6]


def test_a_history_that_grows_in_place_is_indexed_as_it_grows() -> None:
    drafter, tokens = NgramDrafter(shortest=2, longest=3), array("i", [4, 5, 6, 7])
    row = Row("a", tokens, 99)
    assert _one(drafter, row) == []
    tokens.extend([1, 4, 5])
    assert _one(drafter, row) == [6, 7, 1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 2), st.integers(1, 6))
def test_the_index_finds_what_a_search_from_the_end_finds(tokens: list[int], shortest: int, more: int, limit: int) -> None:
    longest = shortest + more
    drafter = NgramDrafter(shortest=shortest, longest=longest)
    for end in range(1, len(tokens)):  # as it grows, step by step
        _one(drafter, _row(tokens[:end]), limit)
    assert _one(drafter, _row(tokens), limit) == _searched(tokens, shortest, longest, limit)


def _searched(tokens: list[int], shortest: int, longest: int, limit: int) -> list[int]:
    for order in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, order - 1, -1):
            if len(tokens) > order and tokens[end - order : end] == tokens[-order:]:
                out = list(tokens)
                for i in range(limit):
                    out.append(out[end + i])
                return out[len(tokens) :]
    return []


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (4, 3), (2, 17)])
def test_orders_that_cannot_be_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ConfigError, match="n-grams"):
        NgramDrafter(shortest=shortest, longest=longest)


def test_proposals_are_a_function_of_the_histories() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 4, size=40).tolist() for _ in range(6)]
    said = []
    for _ in range(2):
        drafter = NgramDrafter()
        said.append([drafter.propose([_row(t[:n], str(i), "f") for i, t in enumerate(texts)], [3] * 6).tokens.tolist() for n in range(5, 40)])
    assert said[0] == said[1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=80, max_size=160), st.integers(1, 3), st.booleans())
def test_a_prompt_indexed_at_once_finds_what_one_indexed_token_by_token_finds(tokens: list[int], shortest: int, family: bool) -> None:
    name = "f" if family else None
    grown, once = (NgramDrafter(shortest=shortest, longest=shortest + 2) for _ in range(2))
    for end in range(1, len(tokens)):
        _one(grown, _row(tokens[:end]), 1)
    _one(once, _row(tokens[:70], family=name), 1)
    assert _one(once, _row(tokens, family=name), 1) == _one(grown, _row(tokens), 1) == _searched(tokens, shortest, shortest + 2, 1)


def test_tokens_beyond_what_a_family_takes_are_indexed_by_their_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftline.services.rollout.speculation.ngram._FAMILY_TOKENS", 20)
    drafter = NgramDrafter()
    _one(drafter, _row([1, 2, 3, 4] * 4, "a", "family"))
    assert _one(drafter, _row([7, 8, 9, 10, 11, 12, 13, 7, 8], "b", "family")) == [9, 10, 11]
    assert _one(drafter, _row([9, 9, 7, 8], "c", "family")) == [], "nobody entered it for the others"
