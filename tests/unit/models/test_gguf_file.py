"""GGUF headers: what is read, and that a damaged or foreign file is refused by name and never believed."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from gguf_cases import metadata, small_llama, weights, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.gguf.blocks import Kind
from driftline.models.gguf.file import GgufFile
from driftline.models.gguf.llama import GgufModel


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64])
def test_metadata_and_tensors_are_those_that_were_written(tmp_path: Path, version: int, alignment: int) -> None:
    body, tensors = metadata(general__alignment=alignment), weights(Kind.Q4_1)
    file = GgufFile.open(write(tmp_path / "a.gguf", body, tensors, version=version, alignment=alignment))
    assert file.version == version
    assert file.metadata.keys() == body.keys()
    for key, value in body.items():
        found = file.metadata[key]
        assert found == (value.tolist() if isinstance(value, np.ndarray) else np.float32(value) if isinstance(value, float) else value), key
    assert list(file.tensors) == list(tensors)
    for name, (kind, shape, raw) in tensors.items():
        assert (file.tensors[name].kind, file.tensors[name].shape) == (kind, shape)
        assert file.bytes_of(name).tobytes() == raw


def test_every_scalar_type_is_read(tmp_path: Path) -> None:
    values = {0: ("<B", 200), 1: ("<b", -3), 2: ("<H", 60000), 3: ("<h", -4), 4: ("<I", 2**31), 5: ("<i", -5), 6: ("<f", 0.5), 7: ("<?", True), 10: ("<Q", 2**40),
              11: ("<q", -(2**40)), 12: ("<d", 0.1)}
    body = b"".join(struct.pack("<Q", 1) + bytes([97 + i]) + struct.pack("<I", i) + struct.pack(form, value) for i, (form, value) in values.items())
    (tmp_path / "s.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + body)
    file = GgufFile.open(tmp_path / "s.gguf")
    assert list(file.metadata.values()) == [value for _, value in values.values()]


def refused(content: bytes, folder: Path, error: type[Exception], match: str) -> None:
    path = folder / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(error, match=match):
        GgufFile.open(path)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"GGU", b"PK\3\4 and more", b"GGUF"):
        refused(content, tmp_path, ConfigError, "not a GGUF file")
    with pytest.raises(ConfigError, match="cannot be read"):
        GgufFile.open(tmp_path / "missing.gguf")
    refused(b"GGUF" + struct.pack("<IQQ", 1, 0, 0), tmp_path, ConfigError, "this version")
    refused(b"GGUF" + struct.pack(">IQQ", 3, 0, 0), tmp_path, ConfigError, "big-endian")


def test_counts_and_lengths_are_not_believed(tmp_path: Path) -> None:
    """A count of 2^60 entries must not become a list of that many."""
    refused(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), tmp_path, IntegrityError, "announced")
    refused(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), tmp_path, IntegrityError, "announced")
    array = struct.pack("<QcIIQ", 1, b"a", 9, 8, 2**40)
    refused(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array, tmp_path, IntegrityError, "announced")


def test_a_damaged_header_says_what_is_wrong(tmp_path: Path) -> None:
    good = small_llama(tmp_path).read_bytes()
    key = good.index(b"general.alignment")
    refused(good.replace(b"general.alignment", b"\xffeneral.alignment"), tmp_path, IntegrityError, "UTF-8")
    refused(good[: key + 17] + struct.pack("<I", 99) + good[key + 21 :], tmp_path, IntegrityError, "type that is not of the format")
    refused(good[: key + 21] + struct.pack("<I", 33) + good[key + 25 :], tmp_path, IntegrityError, "power of two")
    at = good.index(b"blk.0.attn_q.weight") + 19
    refused(good[:at] + struct.pack("<I", 5) + good[at + 4 :], tmp_path, IntegrityError, "axes")
    refused(good[: at + 20] + struct.pack("<I", 24) + good[at + 24 :], tmp_path, ConfigError, "form of weights that is not read")
    refused(good[: at + 4] + struct.pack("<Q", 63) + good[at + 12 :], tmp_path, IntegrityError, "whole number of Q8_0 blocks")
    refused(good[: at + 24] + struct.pack("<Q", 1) + good[at + 32 :], tmp_path, IntegrityError, "odd place")
    refused(good[: at + 24] + struct.pack("<Q", 0) + good[at + 32 :], tmp_path, IntegrityError, "over the tensor before it")
    refused(good[:-1], tmp_path, IntegrityError, "after the file")


def _written(folder: Path, content: bytes) -> Path:
    path = folder / "other.gguf"
    path.write_bytes(content)
    return path


def test_keys_and_tensors_are_there_once(tmp_path: Path) -> None:
    body = metadata()
    good = write(tmp_path / "a.gguf", body | {"x.one": 1, "x.two": 2}, weights()).read_bytes()
    refused(good.replace(b"x.two", b"x.one"), tmp_path, IntegrityError, "the key is there twice")
    refused(good.replace(b"blk.1.attn_k.weight", b"blk.0.attn_k.weight"), tmp_path, IntegrityError, "the tensor is there twice")


def test_a_file_that_became_shorter_is_noticed(tmp_path: Path) -> None:
    path = small_llama(tmp_path)
    file = GgufFile.open(path)
    last = list(file.tensors)[-1]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(IntegrityError, match="shorter"):
        file.bytes_of(last)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(1, 255), keep=st.floats(0, 1))
def test_a_flipped_byte_or_a_cut_file_opens_or_is_refused_by_our_own_errors(tmp_path: Path, at: float, byte: int, keep: float) -> None:
    good = small_llama(tmp_path).read_bytes()
    head = good.index(b"blk.1.ffn_norm.weight") + 60
    damaged = bytearray(good)
    damaged[int(at * head)] ^= byte
    for content in (bytes(damaged), good[: int(keep * len(good))]):
        with suppress(ConfigError, IntegrityError):
            GgufModel.open(_written(tmp_path, content)).files()
