"""Every reader of foreign bytes takes anything: the corpus of past findings and mutants of valid inputs, a few seconds each."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from fuzz_targets import TARGETS, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).with_name("corpus")
GOLDEN = Path(__file__).parents[1] / "unit" / "messages" / "golden_frames.json"
FRAMES = {name: base64.b64decode(text) for name, text in json.loads(GOLDEN.read_text()).items()}
KEPT = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", KEPT, ids=[f"{path.parent.name}-{path.name}" for path in KEPT])
def test_an_input_of_the_corpus_is_still_survived(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


def test_the_corpus_has_inputs_for_every_target() -> None:
    assert {path.parent.name for path in KEPT} == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_a_valid_input_passes_the_target_and_its_reader(target: str) -> None:
    for data in seeds(target, FRAMES).values():
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_mutants_of_valid_inputs_are_read_or_refused(target: str) -> None:
    valid = list(seeds(target, FRAMES).values())

    @given(st.data())
    @settings(max_examples=150, deadline=None)
    def mutate(data: st.DataObject) -> None:
        mutant = bytearray(data.draw(st.sampled_from(valid)))
        for _ in range(data.draw(st.integers(1, 5))):
            at = data.draw(st.integers(0, len(mutant)))
            match data.draw(st.sampled_from(["set", "insert", "cut", "splice"])):
                case "set":
                    mutant[at : at + 1] = bytes([data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xFF]))])
                case "insert":
                    mutant[at:at] = data.draw(st.binary(max_size=9))
                case "cut":
                    del mutant[at : at + data.draw(st.integers(1, 40))]
                case _:
                    other = data.draw(st.sampled_from(valid))
                    mutant[at:] = other[data.draw(st.integers(0, len(other))) :]
        TARGETS[target](bytes(mutant))

    mutate()


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.binary(max_size=400))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_read_or_refused(target: str, data: bytes) -> None:
    TARGETS[target](data)
