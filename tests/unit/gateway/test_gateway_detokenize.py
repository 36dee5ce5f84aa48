"""Text out of tokens as they come."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.models.tokenizer import ByteTokenizer
from driftline.services.gateway.detokenize import WINDOW, Detokenizer, StopStrings

TOKENS = ByteTokenizer()


def said(tokens: list[int], cuts: int = 1) -> str:
    detokenizer = Detokenizer(TOKENS.decode)
    pieces = [detokenizer.add(tokens[i : i + cuts]) for i in range(0, len(tokens), cuts)]
    return "".join(pieces) + detokenizer.end()


@given(st.text(max_size=80), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_the_pieces_of_a_text_are_the_text(text: str, cuts: int) -> None:
    assert said(TOKENS.encode(text), cuts) == text


@given(st.lists(st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0x41, 0xFF, 0xC3, 257]), max_size=100))
@settings(max_examples=300, deadline=None)
def test_broken_bytes_become_what_the_tokenizer_makes_of_them(tokens: list[int]) -> None:
    assert said(tokens) == TOKENS.decode(tokens)


@given(st.lists(st.sampled_from([" a", "b", " ", "\n", " cd", "é"]), max_size=90), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_a_decoder_that_drops_the_space_in_front_of_a_text_drops_only_that_one(words: list[str], cuts: int) -> None:
    """As those made from SentencePiece do: the first of the tokens that are decoded together is not like the others."""
    def decode(ids: Sequence[int]) -> str:
        return "".join(words[i] for i in ids).removeprefix(" ")

    ids = list(range(len(words)))
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.add(ids[i : i + cuts]) for i in range(0, len(ids), cuts)]
    assert "".join(pieces) + detokenizer.end() == decode(ids)


def test_a_character_is_said_when_it_is_whole() -> None:
    detokenizer = Detokenizer(TOKENS.decode)
    pieces = [detokenizer.add([byte]) for byte in "a\U0001f600b".encode()]
    assert pieces == ["a", "", "", "", "\U0001f600", "b"]


def test_a_token_costs_the_same_however_long_the_text_is() -> None:
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return TOKENS.decode(ids)

    detokenizer = Detokenizer(decode)  # type: ignore[arg-type]
    detokenizer.add([0xFF] * 4000)
    assert max(lengths) <= WINDOW + 1
    assert len(lengths) < 3 * 4000


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), st.booleans(), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_a_text_is_cut_at_the_first_stop_string(text: str, stops: list[str], keep: bool, cuts: int) -> None:
    cutter = StopStrings(stops, keep=keep)
    out = ""
    for i in range(0, len(text), cuts):
        out += cutter.add(text[i : i + cuts])
        assert text.startswith(out)
    out += cutter.end()
    ends = {at for stop in stops if (at := text.find(stop)) >= 0}
    if not ends:
        assert (out, cutter.found) == (text, None)
    else:
        assert cutter.found in stops
        where = text.find(cutter.found)
        assert out == text[: where + (len(cutter.found) if keep else 0)]


def test_what_may_begin_a_stop_string_waits() -> None:
    cutter = StopStrings(["END"])
    assert cutter.add("an E") == "an "
    assert cutter.add("N") == ""
    assert cutter.add("T") == "ENT"
    assert cutter.add(" END more") == " "
    assert cutter.add("nothing") == ""
