"""The recording format: what was written comes back, and a byte that was not written never does."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_cases import read_all, small_header, small_state, small_step, write_small

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.policy_store.tensor import state_digest
from driftline.services.replay.format import (
    FORMAT,
    LIMITS,
    PREAMBLE,
    SECTION_HEAD,
    Kind,
    check_preamble,
    preamble,
)
from driftline.services.replay.reader import Recording
from driftline.services.replay.shipped import shipped_state
from driftline.services.replay.writer import RecordingWriter

NAMED = r"section|file head|offset"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_small(tmp_path_factory.mktemp("recording") / "run.dlr").read_bytes()


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "run.dlr"


def placed(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_what_was_written_comes_back(whole: bytes, scratch: Path) -> None:
    recording, state, steps = read_all(placed(scratch, whole))
    assert recording.header == small_header(small_state())
    assert {n: (t.layout, t.data.tobytes()) for n, t in state.items()} == {n: (t.layout, t.data.tobytes()) for n, t in small_state().items()}
    assert steps == [small_step(version) for version in (1, 2, 3)]
    assert list(recording.versions) == [1, 2, 3]


def test_the_same_recording_has_the_same_bytes(whole: bytes, tmp_path: Path) -> None:
    assert write_small(tmp_path / "again.dlr").read_bytes() == whole


def test_a_recording_of_no_step_holds_its_start(tmp_path: Path) -> None:
    recording, state, steps = read_all(write_small(tmp_path / "run.dlr", versions=0))
    assert (state_digest(state), steps, list(recording.versions)) == (recording.header.start_digest, [], [])


@given(place=st.integers(0, 1 << 30), flip=st.integers(1, 255))
@settings(max_examples=400, deadline=None)
def test_a_flipped_byte_is_an_error_that_names_its_section(whole: bytes, scratch: Path, place: int, flip: int) -> None:
    data = bytearray(whole)
    data[place % len(data)] ^= flip
    with pytest.raises(IntegrityError, match=NAMED):
        read_all(placed(scratch, bytes(data)))


def test_a_flipped_byte_of_any_head_is_an_error_that_names_it(whole: bytes, scratch: Path) -> None:
    sections = Recording.open(placed(scratch, whole)).sections
    for section in sections:
        for place in range(section.offset, section.payload):
            data = bytearray(whole)
            data[place] ^= 0x10
            with pytest.raises(IntegrityError, match=f"section {section.number}.*{section.offset}"):
                Recording.open(placed(scratch, bytes(data)))


@given(length=st.integers(0, 1 << 30))
@settings(max_examples=300, deadline=None)
def test_a_file_cut_anywhere_is_refused_when_it_is_opened(whole: bytes, scratch: Path, length: int) -> None:
    with pytest.raises(IntegrityError, match=NAMED):
        Recording.open(placed(scratch, whole[: length % len(whole)]))


def test_a_cut_between_sections_says_that_the_closing_one_is_missing(whole: bytes, scratch: Path) -> None:
    end = Recording.open(placed(scratch, whole)).sections[-1].end
    with pytest.raises(IntegrityError, match=rf"ends at offset {end}, after section 7 \(STEP\) at offset \d+, without its closing"):
        Recording.open(placed(scratch, whole[:end]))


@given(garbage=st.binary(max_size=200))
@settings(deadline=None)
def test_garbage_is_not_a_recording(scratch: Path, garbage: bytes) -> None:
    with pytest.raises(IntegrityError, match="file head"):
        Recording.open(placed(scratch, garbage))


def test_garbage_behind_a_true_file_head_is_not_a_recording(scratch: Path) -> None:
    with pytest.raises(IntegrityError, match=r"section 0 at offset 16.*damaged"):
        Recording.open(placed(scratch, preamble() + bytes(200)))


def test_another_format_number_is_named() -> None:
    magic, _, zero = PREAMBLE.unpack(preamble())
    with pytest.raises(IntegrityError, match=rf"= {FORMAT + 1}: this build reads format {FORMAT}"):
        check_preamble(PREAMBLE.pack(magic, FORMAT + 1, zero))


@pytest.mark.parametrize("kind", list(Kind))
def test_a_length_beyond_the_limit_is_refused_on_its_word(scratch: Path, kind: Kind) -> None:
    covered = struct.pack("<4sIQ16s", kind.value, 0, LIMITS[kind] + 1, bytes(16))
    forged = preamble() + covered + struct.pack("<Q", xxhash.xxh3_64_intdigest(covered))
    with pytest.raises(IntegrityError, match=f"section 0.*{kind.name}.*= {LIMITS[kind] + 1}: longer than the limit"):
        Recording.open(placed(scratch, forged))


def test_a_length_beyond_the_file_is_refused_before_it_is_read(scratch: Path) -> None:
    covered = struct.pack("<4sIQ16s", Kind.HEAD.value, 0, LIMITS[Kind.HEAD], bytes(16))
    forged = preamble() + covered + struct.pack("<Q", xxhash.xxh3_64_intdigest(covered)) + b"{}"
    with pytest.raises(IntegrityError, match="the file ends after 2 of its bytes"):
        Recording.open(placed(scratch, forged))


def test_steps_that_changed_places_are_refused(whole: bytes, scratch: Path) -> None:
    *_, one, two, three = Recording.open(placed(scratch, whole)).sections
    swapped = whole[: one.offset] + whole[two.offset : two.end] + whole[one.offset : one.end] + whole[three.offset :]
    with pytest.raises(IntegrityError, match=f"at offset {one.offset}.*out of order"):
        Recording.open(placed(scratch, swapped))


def test_a_step_of_another_recording_is_refused(whole: bytes, scratch: Path, tmp_path: Path) -> None:
    last = Recording.open(placed(scratch, whole)).sections[-1]
    state, other = small_state(), tmp_path / "other.dlr"
    writer = RecordingWriter.create(other, small_header(state), state)
    for version in (1, 2):
        writer.add(small_step(version))
    third = small_step(3)
    writer.add(type(third)(third.facts.model_copy(update={"digest": "f" * 32}), third.batch))
    writer.close()
    foreign = Recording.open(other).sections[-1]
    assert foreign.length == last.length
    spliced = whole[: last.offset] + other.read_bytes()[foreign.offset : foreign.end] + whole[last.end :]
    with pytest.raises(IntegrityError, match="are not those it closes"):
        Recording.open(placed(scratch, spliced))


def test_bytes_behind_the_closing_section_are_refused(whole: bytes, scratch: Path) -> None:
    with pytest.raises(IntegrityError, match=f"offset {len(whole)}.*follow the closing"):
        Recording.open(placed(scratch, whole + b"\0"))


def test_steps_are_read_one_at_a_time(whole: bytes, scratch: Path) -> None:
    last = Recording.open(placed(scratch, whole)).sections[-1]
    data = bytearray(whole)
    data[last.payload + 9] ^= 1
    steps = Recording.open(placed(scratch, bytes(data))).steps()
    assert [next(steps).version, next(steps).version] == [1, 2]
    with pytest.raises(IntegrityError, match=f"section {last.number}"):
        next(steps)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.dlr"):
        Recording.open(tmp_path / "absent.dlr")


def test_tensors_of_the_shipped_checkpoint_are_named_and_not_embedded(tmp_path: Path) -> None:
    state = {name: tensor.copy() for name, tensor in shipped_state().items()}
    changed = sorted(state)[3]
    state[changed].data[0] ^= 1
    state["adapter"] = small_state()["a.weight"]
    writer = RecordingWriter.create(tmp_path / "run.dlr", small_header(state), state)
    writer.close()
    recording, found, _ = read_all(tmp_path / "run.dlr")
    assert [tensor.name for tensor in recording.tensors.embedded] == sorted(["adapter", changed])
    assert state_digest(found) == state_digest(state)
    assert (tmp_path / "run.dlr").stat().st_size < 200_000  # the checkpoint has three million


def test_a_shipped_checkpoint_that_changed_is_not_taken_for_the_recorded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = shipped_state()
    RecordingWriter.create(tmp_path / "run.dlr", small_header(state), state).close()
    changed = {name: tensor.copy() for name, tensor in state.items()}
    first = sorted(changed)[0]
    changed[first].data[0] ^= 1
    monkeypatch.setattr("driftline.services.replay.reader.shipped_state", lambda: changed)
    with pytest.raises(IntegrityError, match=f"shipped checkpoint: {first}.*version of driftline"):
        Recording.open(tmp_path / "run.dlr").start()


@given(cut=st.integers(0, 1 << 30), damage=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_recording_cut_off_anywhere_is_continued_to_the_same_bytes(whole: bytes, scratch: Path, cut: int, damage: bool) -> None:
    cut = cut % len(whole)
    data = bytearray(whole[:cut])
    if damage and data:
        data[-1] ^= 0x80  # the last block came back as something else
    path = placed(scratch, bytes(data))
    writer = RecordingWriter.resume(path)
    if writer is None:
        state = small_state()
        writer = RecordingWriter.create(path, small_header(state), state)
    for version in range(writer.next_version, 4):
        writer.add(small_step(version))
    writer.close()
    assert path.read_bytes() == whole


def test_a_version_out_of_turn_is_not_written(tmp_path: Path) -> None:
    state = small_state()
    writer = RecordingWriter.create(tmp_path / "run.dlr", small_header(state), state)
    with pytest.raises(IntegrityError, match="the next version is 1"):
        writer.add(small_step(2))
    writer.leave()


def test_a_start_that_is_another_policy_is_not_written(tmp_path: Path) -> None:
    state = small_state()
    header = small_header(state)
    state["c"].data[0] ^= 1
    with pytest.raises(IntegrityError, match="start digest"):
        RecordingWriter.create(tmp_path / "run.dlr", header, state)


def test_a_head_is_as_long_as_it_says() -> None:
    assert (PREAMBLE.size, SECTION_HEAD.size) == (16, 40)
    assert np.frombuffer(preamble()[:8], np.uint8)[0] == 0x89
