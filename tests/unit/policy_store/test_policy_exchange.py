"""Files and folders other tools read and write: every bit both ways, and nothing believed that a header says."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from exchange_cases import HOSTILE, entry, every_dtype, file_of, write
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.policy_store.checkpoint import whole_folder
from driftline.policy_store.exchange import INDEX, ModelFolder, OutFiles, split, write_model
from driftline.policy_store.tensor import DTYPES, HostTensor, Layout, State
from driftline.policy_store.tensor_file import TensorFile, plan_file, write_tensors


def layouts_of(state: State) -> dict[str, Layout]:
    return {name: tensor.layout for name, tensor in state.items()}


def same_bits(state: State, folder: ModelFolder) -> bool:
    return layouts_of(state) == dict(folder.layouts) and all(
        np.array_equal(tensor.data, folder.tensor(name).data) for name, tensor in state.items()
    )


def written(folder: Path, state: State, file_bytes: int = 2**40) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    return write_model(folder, layouts_of(state), state.__getitem__, file_bytes=file_bytes)


@pytest.mark.parametrize("file_bytes", [2**40, 300, 1])
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, file_bytes: int) -> None:
    state = every_dtype()
    files = written(tmp_path, state, file_bytes)
    assert (INDEX in files) == (file_bytes < 2**40)
    assert same_bits(state, ModelFolder.open(tmp_path))


def test_the_library_reads_what_is_written_and_its_files_are_read(tmp_path: Path) -> None:
    state = every_dtype()
    written(tmp_path, state)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert set(file.keys()) == set(state)
        assert file.metadata() == {"format": "pt"}
        for name, tensor in state.items():
            assert file.get_slice(name).get_shape() == list(tensor.shape)
            assert file.get_slice(name).get_dtype() == DTYPES[tensor.dtype].safetensors
            if not tensor.dtype.startswith(("bfloat", "float8")):
                assert file.get_tensor(name).tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_with_its_name(tmp_path: Path, case: str) -> None:
    path = write(tmp_path / "model.safetensors", HOSTILE[case])
    with pytest.raises(IntegrityError) as refused:
        TensorFile.open(path)
    assert str(path) in str(refused.value)
    assert refused.value.field
    assert refused.value.remedy


@pytest.mark.parametrize("case", [case for case in HOSTILE if case not in (
    "size a truth", "one key more", "key twice", "name too long", "name of nothing", "too many dimensions", "unknown dtype",
)])
def test_what_is_refused_is_what_the_library_refuses(tmp_path: Path, case: str) -> None:
    """Beside what this store cannot hold, or is stricter about."""
    path = write(tmp_path / "model.safetensors", HOSTILE[case])
    with pytest.raises((SafetensorError, OSError, ValueError)):
        read_by_the_library(path)


def read_by_the_library(path: Path) -> None:
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118
            file.get_tensor(name)


def test_a_header_that_claims_gigabytes_costs_none(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", file_of({}, length=90_000_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(IntegrityError):
        TensorFile.open(tmp_path / "model.safetensors")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_a_misaligned_file_is_read_all_the_same(tmp_path: Path) -> None:
    header = json.dumps({"b": entry("U8", [1], [0, 1]), "w": entry("F32", [2], [1, 9])}).encode()
    values = np.asarray([1.5, -2.5], np.float32)
    file = TensorFile.open(write(tmp_path / "m.safetensors", file_of(header, b"\x07" + values.tobytes())))
    assert np.array_equal(file.tensor("w").numpy(), values)
    assert file.tensor("b").data.tolist() == [7]


def test_a_file_that_is_written_to_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    written(tmp_path, every_dtype())
    folder = ModelFolder.open(tmp_path)
    folder.check_unchanged()
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x00")
    os.utime(path, ns=(1, 1))  # whatever the clock's grain
    with pytest.raises(IntegrityError, match="changed while it was read"):
        folder.check_unchanged()


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=12),
       st.integers(1, 400))
def test_files_are_cut_in_order_and_hold_everything_once(shapes: dict[str, tuple[str, list[int]]], limit: int) -> None:
    layouts = {name: Layout(dtype, tuple(shape)) for name, (dtype, shape) in shapes.items()}
    files = split(layouts, limit)
    assert [name for names in files.values() for name in names] == sorted(layouts)
    assert list(files) == sorted(files)
    for names in files.values():
        assert len(names) == 1 or sum(layouts[name].nbytes for name in names) <= limit
        plan = plan_file({name: layouts[name] for name in names}, {"format": "pt"})
        assert all(plan.starts[name] % layouts[name].width == 0 for name in names)


def test_an_index_is_what_transformers_writes(tmp_path: Path) -> None:
    state = {f"w{n}": HostTensor.from_numpy(np.full(10, n, np.float32)) for n in range(5)}
    written(tmp_path, state, 80)
    index = json.loads((tmp_path / INDEX).read_bytes())
    assert index == {"metadata": {"total_size": 200}, "weight_map": {
        "w0": "model-00001-of-00003.safetensors", "w1": "model-00001-of-00003.safetensors", "w2": "model-00002-of-00003.safetensors",
        "w3": "model-00002-of-00003.safetensors", "w4": "model-00003-of-00003.safetensors"}}


@pytest.mark.parametrize(("index", "named"), [
    (b"[]", "weight_map"), (b"{", "JSON"), (b'{"weight_map": {}}', "weight_map"), (b'{"weight_map": {"a": "../model.safetensors"}}', "../model"),
    (b'{"weight_map": {"a": "/etc/passwd"}}', "passwd"), (b'{"weight_map": {"a": 3}}', "weight_map of a"),
    (b'{"weight_map": {"a": "absent.safetensors"}}', "absent"), (b'{"weight_map": {"other": "model.safetensors"}}', "disagree"),
])
def test_an_index_that_lies_is_refused(tmp_path: Path, index: bytes, named: str) -> None:
    folder = tmp_path / "model"
    written(folder, {"a": HostTensor.from_numpy(np.zeros(3))})
    (folder / INDEX).write_bytes(index)
    with pytest.raises(ConfigError) as refused:
        ModelFolder.open(folder)
    assert named in str(refused.value)


def test_two_models_in_one_folder_are_refused_and_an_index_chooses(tmp_path: Path) -> None:
    a, b = ({"a": HostTensor.from_numpy(np.full(3, value))} for value in (1.0, 2.0))
    for name, state in (("one.safetensors", a), ("two.safetensors", b)):
        write_tensors(tmp_path / name, layouts_of(state), state.__getitem__, {})
    with pytest.raises(ConfigError, match=r"one\.safetensors has it too"):
        ModelFolder.open(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "two.safetensors"}}))
    assert same_bits(b, ModelFolder.open(tmp_path))


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match="are code and are not read"):
        ModelFolder.open(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "adapter_config.json"])
def test_a_file_beside_the_weights_that_is_no_json_is_named(tmp_path: Path, name: str) -> None:
    written(tmp_path, {"a": HostTensor.from_numpy(np.zeros(3))})
    (tmp_path / name).write_text("{")
    with pytest.raises(ConfigError) as refused:
        ModelFolder.open(tmp_path)
    assert name in str(refused.value)


@pytest.mark.parametrize("file_bytes", [2**40, 200])
def test_weights_decoded_into_the_files_are_the_files(tmp_path: Path, file_bytes: int) -> None:
    state = every_dtype(1)
    out = OutFiles(tmp_path, layouts_of(state), file_bytes=file_bytes)
    room = out.allocate(layouts_of(state))
    for name, tensor in state.items():
        np.copyto(room[name].data, tensor.data)
    files = out.settle(room)
    assert same_bits(state, ModelFolder.open(tmp_path))
    assert (INDEX in files) == (file_bytes == 200)


def test_a_tensor_that_had_another_shape_in_between_ends_in_its_file(tmp_path: Path) -> None:
    """A delta that reshapes a tensor leaves it in a buffer of its own."""
    wanted = {"a": Layout("float32", (4,)), "b": Layout("int8", (3,))}
    out = OutFiles(tmp_path, wanted, file_bytes=2**40)
    room = out.allocate({"a": Layout("float32", (2,)), "gone": Layout("int8", (1,))})
    assert room["a"].data.size == 8
    state = {"a": HostTensor.from_numpy(np.arange(4, dtype=np.float32)), "b": HostTensor.from_numpy(np.arange(3, dtype=np.int8))}
    out.settle(state)
    assert same_bits(state, ModelFolder.open(tmp_path))
    with pytest.raises(IntegrityError, match="was announced as"):
        out.settle(room)


def fail_halfway(final: Path) -> None:
    with whole_folder(final, replace=False) as partial:
        (partial / "half").write_text("x")
        raise ZeroDivisionError


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "out"
    with pytest.raises(ZeroDivisionError):
        fail_halfway(final)
    assert list(tmp_path.iterdir()) == []
    with whole_folder(final, replace=False) as partial:
        (partial / "first").write_text("x")
        assert not final.exists()
    with pytest.raises(ConfigError, match="is there already"), whole_folder(final, replace=False):
        pass
    with whole_folder(final, replace=True) as partial:
        (partial / "second").write_text("x")
        assert [path.name for path in final.iterdir()] == ["first"]
    assert [path.name for path in final.iterdir()] == ["second"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is not a folder"), whole_folder(tmp_path / "file", replace=True):
        pass


def test_a_folder_may_be_named_by_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match="is there already"), whole_folder(Path("."), replace=False):
        pass
    with whole_folder(Path("../other/../there"), replace=False) as partial:
        (partial / "file").write_text("x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]
    with pytest.raises(ConfigError, match="has no name"), whole_folder(Path("/"), replace=True):
        pass


def test_a_killed_writer_leaves_the_old_folder_and_the_next_one_clears_up(tmp_path: Path) -> None:
    code = ("import os, pathlib, sys\nfrom driftline.policy_store.checkpoint import whole_folder\n"
            "with whole_folder(pathlib.Path(sys.argv[1]), replace=True) as p:\n (p / 'half').write_text('x'); os._exit(9)")
    final = tmp_path / "out"
    with whole_folder(final, replace=False) as partial:
        (partial / "old").write_text("x")
    assert subprocess.run([sys.executable, "-c", code, str(final)], timeout=60, check=False).returncode == 9
    assert [path.name for path in final.iterdir()] == ["old"]
    with whole_folder(final, replace=True) as partial:
        assert list(partial.iterdir()) == []
