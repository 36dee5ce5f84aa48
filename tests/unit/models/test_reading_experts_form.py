"""`policy.experts`: the form in which every service of a run holds the routed experts, whichever the checkpoint stores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from k3_checkpoint_cases import packed_checkpoint, rounded_model
from model_cases import random_tokens

from driftline.messages.errors import ConfigError
from driftline.models.causal_lm import CausalLM
from driftline.models.checkpoint import save_checkpoint
from driftline.models.dense.config import DenseConfig
from driftline.models.quantisation import Quantisation
from driftline.models.random_weights import random_model
from driftline.models.state import export_state
from driftline.models.stored import held_form
from driftline.services.config import load
from driftline.services.policy_model import build_model

EXAMPLE = Path(__file__).parents[3] / "examples" / "demo.toml"


def built(directory: Path, experts: str | None) -> CausalLM:
    return build_model(load(EXAMPLE, [f'policy.init="{directory}"', *([] if experts is None else [f'policy.experts="{experts}"'])]), device="cpu", threads=1)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    save_checkpoint(rounded_model(seed=3), tmp_path / "plain", experts=Quantisation.NONE)
    return tmp_path / "plain"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return packed_checkpoint(tmp_path / "packed", seed=3)


@torch.no_grad()
def test_packed_files_are_kept_packed_unless_told_to_unpack_which_changes_no_bit(packed: Path) -> None:
    tokens = random_tokens(2, 12)
    kept, unpacked = built(packed, None), built(packed, "unpack")
    assert held_form(kept) is held_form(built(packed, "pack")) is Quantisation.MXFP4
    assert held_form(unpacked) is Quantisation.NONE
    assert torch.equal(kept(tokens).hidden, unpacked(tokens).hidden)
    trained = {name for name, p in unpacked.named_parameters() if p.requires_grad} - {name for name, p in kept.named_parameters() if p.requires_grad}
    assert {name.rsplit(".", 1)[1] for name in trained} == {"w1", "w2", "w3"}, "and then they train"


@torch.no_grad()
def test_plain_files_are_packed_when_told_to_which_rounds_them_once(plain: Path, packed: Path) -> None:
    tokens = random_tokens(2, 12)
    kept, narrow = built(plain, "keep"), built(plain, "pack")
    assert held_form(kept) is held_form(built(plain, "unpack")) is Quantisation.NONE
    assert held_form(narrow) is Quantisation.MXFP4
    routes = kept(tokens).routes
    assert not torch.equal(narrow(tokens, replay=routes).hidden, kept(tokens, replay=routes).hidden)
    stored = export_state(built(packed, None))
    now = export_state(narrow)
    assert stored.keys() == now.keys()
    assert all(torch.equal(now[name], stored[name]) for name in now if name.endswith(("_packed", "_scale"))), "by the rule of the files that are stored packed"


def test_a_model_without_experts_has_none_to_pack(tmp_path: Path) -> None:
    config = DenseConfig.of({
        "model_type": "llama", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    }, "here")
    save_checkpoint(random_model(config, dtype=torch.float32), tmp_path)
    with pytest.raises(ConfigError, match="no routed experts to pack"):
        built(tmp_path, "pack")
    assert held_form(built(tmp_path, "keep")) is Quantisation.NONE
