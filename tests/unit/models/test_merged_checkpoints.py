"""An adapter folded into a checkpoint's files: what loads computes as the adapted model did, and what no update touches is the same bytes. And the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model_cases import saved
from k3_checkpoint_cases import packed_checkpoint, stored
from lora_cases import drawn_adapter
from model_cases import random_model, random_tokens
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from driftline.cli import app
from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.checkpoint import load_checkpoint, read_tensors, save_checkpoint
from driftline.models.lora import Adapter, LoraConfig, Update, adapt, put_adapter
from driftline.models.lora.merging import merge_checkpoint
from driftline.models.lora.peft import write_peft
from driftline.models.stored import public_shapes


def base_of(kind: str, tmp_path: Path) -> Path:
    match kind:
        case "k3 packed":
            return packed_checkpoint(tmp_path / "base", shard_bytes=80_000)
        case "k3":
            save_checkpoint(random_model(dtype=torch.float32), tmp_path / "base", shard_bytes=80_000)
            return tmp_path / "base"
        case _:
            return saved(kind)


@pytest.mark.parametrize(("kind", "atol"), [("llama", 1e-4), ("qwen2", 1e-4), ("qwen3", 1e-4), ("k3", 5e-3)])
@torch.no_grad()
def test_a_merged_checkpoint_computes_as_the_adapted_model(kind: str, atol: float, tmp_path: Path) -> None:
    """K3's is stored in bfloat16: the sums are rounded to it. The dense ones are stored in fp32."""
    base = base_of(kind, tmp_path)
    adapter = drawn_adapter(load_checkpoint(str(base)), 3, targets=r".*(proj|experts)$")
    merge_checkpoint(str(base), adapter, tmp_path / "out", shard_bytes=100_000)
    tokens = random_tokens(2, 7) % 97
    model = load_checkpoint(str(base))
    plain = model(tokens).hidden
    put_adapter(model, adapter)
    want, found = model(tokens).hidden, load_checkpoint(str(tmp_path / "out"))(tokens).hidden
    assert (found - want).norm() < 0.02 * (want - plain).norm()
    if kind != "k3":
        torch.testing.assert_close(found, want, rtol=0, atol=atol)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).model(tokens).last_hidden_state
        torch.testing.assert_close(found, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", ["llama", "k3", "k3 packed"])
@torch.no_grad()
def test_what_no_update_touches_is_copied_as_it_is_stored(kind: str, tmp_path: Path) -> None:
    base = base_of(kind, tmp_path)
    adapter = drawn_adapter(load_checkpoint(str(base)), 3)
    some = {name: update for name, update in adapter.updates.items() if name.endswith(("layers.1.self_attn.q_proj", "layers.2.block_sparse_moe.experts.w2"))}
    merge_checkpoint(str(base), Adapter(some), tmp_path / "out")
    before, after = read_tensors(base), read_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("layers.1.self_attn.q_proj" in name or ("layers.2." in name and ".w2." in name) for name in changed)
    assert {name: (t.dtype, t.shape) for name, t in before.items()} == {name: (t.dtype, t.shape) for name, t in after.items()}


@torch.no_grad()
def test_packed_experts_merge_to_what_the_model_in_memory_merges_to(tmp_path: Path) -> None:
    from driftline.models.lora import merge_lora
    from driftline.models.state import export_state

    base = packed_checkpoint(tmp_path / "base")
    model = load_checkpoint(str(base), dtype=torch.float32)
    adapter = drawn_adapter(model, 5, targets=r".*experts$")
    merge_lora(model)
    merge_checkpoint(str(base), adapter, tmp_path / "out")
    wanted, found = export_state(model, torch.bfloat16), stored(tmp_path / "out")
    assert all(torch.equal(wanted[name], found[name]) for name in found if ".experts." in name)


def test_a_head_tied_to_the_embedding_is_no_target_and_cannot_be_merged_into(tmp_path: Path) -> None:
    base = saved("llama tied")
    model = load_checkpoint(str(base))
    with pytest.raises(ConfigError, match="tied"):
        adapt(model, LoraConfig(2, targets=("lm_head",)))
    adapter = Adapter({"lm_head": Update(torch.ones(1, 48), torch.ones(97, 1), 1.0)})
    with pytest.raises(IntegrityError):
        put_adapter(model, adapter)
    with pytest.raises(IntegrityError, match="no such weight"):
        merge_checkpoint(str(base), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("update", [
    {"model.layers.0.self_attn.q_proj": Update(torch.ones(1, 47), torch.ones(48, 1), 1.0)}, {"model.norm": Update(torch.ones(1, 48), torch.ones(48, 1), 1.0)},
    {"model.layers.8.self_attn.q_proj": Update(torch.ones(1, 48), torch.ones(48, 1), 1.0)},
])
def test_an_adapter_of_another_base_is_refused_before_anything_is_written(update: dict[str, Update], tmp_path: Path) -> None:
    with pytest.raises(IntegrityError) as refused:
        merge_checkpoint(str(saved("llama")), Adapter(update), tmp_path / "out")
    assert refused.value.field == next(iter(update))
    assert not (tmp_path / "out").exists()


def test_the_base_is_not_replaced_by_what_is_made_of_it(tmp_path: Path) -> None:
    base = base_of("k3", tmp_path)
    with pytest.raises(ConfigError, match="would replace"):
        merge_checkpoint(str(base), drawn_adapter(load_checkpoint(str(base)), 1), base)


def run(*argv: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["model", *argv, "--json"])
    if code:
        assert result.exception is not None
        return result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_commands_say_what_an_adapter_is_and_merge_it(tmp_path: Path) -> None:
    base = base_of("k3", tmp_path)
    (base / "generation_config.json").write_text("{}")
    adapter = drawn_adapter(load_checkpoint(str(base)), 1, targets=r".*(q_proj|experts)$")
    write_peft(adapter, tmp_path / "adapter")
    said = run("adapter", str(tmp_path / "adapter"), "--base", str(base))
    assert (said["ranks"], said["scales"], said["parameters"], said["fits"]) == ([3], [2.0], adapter.parameters, str(base))
    assert set(said["modules"]) == set(adapter.updates)
    shown = CliRunner().invoke(app, ["model", "adapter", str(tmp_path / "adapter")]).output
    assert "experts.w1" in shown
    assert "q_proj" in shown
    merged = run("merge", str(base), str(tmp_path / "adapter"), str(tmp_path / "out"), "--shard-size", "100KB")
    assert merged["beside"] == ["generation_config.json"]
    assert len(merged["files"]) > 1
    model = load_checkpoint(str(tmp_path / "out"))
    assert public_shapes(model) == public_shapes(load_checkpoint(str(base)))
    assert isinstance(run("merge", str(base), str(tmp_path / "adapter"), str(tmp_path / "out"), code=2), ConfigError)
    run("merge", str(base), str(tmp_path / "adapter"), str(tmp_path / "out"), "--force")
    write_peft(Adapter({"model.other": Update(torch.ones(1, 2), torch.ones(2, 1), 1.0)}), tmp_path / "other")
    assert isinstance(run("adapter", str(tmp_path / "other"), "--base", str(base), code=1), IntegrityError)
