"""Adapters: ours under PEFT's names and back, and folded in as the model folds them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from model_cases import random_model

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.lora import add_lora, merge_lora
from driftline.models.state import export_state
from driftline.policy_store.adapters import (
    AdapterConfig,
    from_peft,
    is_adapter,
    merged,
    modules,
    targets,
    to_peft,
)
from driftline.policy_store.tensor import HostTensor, Layout, State
from driftline.services.tensors import to_host

PLAIN = {"peft_type": "LORA", "lora_alpha": 8, "r": 4}


def adapted(dtype: torch.dtype = torch.float32, alpha: float = 6.0) -> tuple[torch.nn.Module, State]:
    """A K3 model with adapters on everything that takes them, stacked experts too."""
    model = random_model().float()
    add_lora(model, 3, alpha)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.2)
    return model, to_host(export_state(model, dtype))


def layouts_of(state: Mapping[str, HostTensor]) -> dict[str, Layout]:
    return {name: tensor.layout for name, tensor in state.items()}


def test_every_adapter_of_the_model_has_a_name_of_peft_s_and_comes_back_bit_for_bit() -> None:
    _, state = adapted()
    theirs = to_peft(layouts_of(state))
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in theirs
    assert theirs["base_model.model.model.layers.1.block_sparse_moe.experts.5.w2.lora_B.weight"][0].shape == (16, 3)
    peft = {name: source.of(state[source.name]) for name, (_, source) in theirs.items()}
    assert all(peft[name].layout == layout for name, (layout, _) in theirs.items())
    back = from_peft(layouts_of(peft))
    ours = {name: tensor for name, tensor in state.items() if is_adapter(name)}
    assert {name: layout for name, (layout, _) in back.items()} == layouts_of(ours)
    for name, (_, parts) in back.items():
        assert np.array_equal(np.concatenate([peft[part].data for part in parts]), ours[name].data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_gives_what_the_model_merges_to(dtype: torch.dtype) -> None:
    model, state = adapted(dtype)
    model.to(dtype).float()  # as the learner computes: with the rounded values, in fp32
    merge_lora(model)
    want = to_host(export_state(model, dtype))
    updates = modules(layouts_of(state))
    assert {f"{module}.weight" for module in updates} <= set(want)
    for module, pair in updates.items():
        name = f"{module}.weight"
        found = merged(state[name], pair.a.of(state[pair.a.name]), pair.b.of(state[pair.b.name]), 6.0)
        assert found.layout == want[name].layout
        ours, theirs = (torch.from_numpy(tensor.data.copy()).view(dtype).float() for tensor in (found, want[name]))
        # The order of three additions is the library's: at most the last bit differs.
        torch.testing.assert_close(ours, theirs, rtol=2**-7 if dtype is torch.bfloat16 else 1e-5, atol=1e-6)
    plain = {name for name in state if not is_adapter(name)}
    assert plain == set(want)


def test_experts_that_are_not_all_there_stay_apart() -> None:
    one = Layout("float32", (2, 4))

    def name(expert: int, which: str = "w1") -> str:
        return f"base_model.model.layers.0.experts.{expert}.{which}.lora_A.weight"

    assert set(from_peft({name(0): one, name(1): one})) == {"layers.0.experts.delta.w1.lora_A"}
    assert set(from_peft({name(0): one, name(2): one})) == {"layers.0.experts.0.w1.lora_A", "layers.0.experts.2.w1.lora_A"}
    assert set(from_peft({name(0): one, name(1): Layout("float32", (3, 4))})) == {"layers.0.experts.0.w1.lora_A", "layers.0.experts.1.w1.lora_A"}
    for layouts in ({name(0): one, name(2): one}, {name(0): one, name(1): one}):  # either way it is undone exactly
        assert set(to_peft({ours: layout for ours, (layout, _) in from_peft(layouts).items()})) == set(layouts)


def test_targets_are_last_parts_of_names_only_where_that_means_the_same_modules() -> None:
    weights = ["l.0.q.weight", "l.1.q.weight", "l.0.k.weight", "norm.weight"]
    assert targets(["l.0.q", "l.1.q"], weights) == ["q"]
    assert targets(["l.0.q"], weights) == ["l.0.q"]  # q alone would be the other layer's too
    assert targets(["l.0.q", "l.1.q"], []) == ["l.0.q", "l.1.q"]


def test_ranks_that_differ_are_named() -> None:
    layouts = {
        **{f"l.{n}.q.lora_A": Layout("float32", (4, 8)) for n in range(2)}, **{f"l.{n}.q.lora_B": Layout("float32", (8, 4)) for n in range(2)},
        "l.0.k.lora_A": Layout("float32", (2, 8)), "l.0.k.lora_B": Layout("float32", (8, 2)),
    }
    document = json.loads(AdapterConfig.of(layouts, 3.5, "some/base").document([]))
    assert (document["r"], document["rank_pattern"], document["lora_alpha"]) == (4, {"l.0.k": 2}, 3.5)
    assert document["base_model_name_or_path"] == "some/base"
    assert AdapterConfig.parse(json.dumps(document).encode()).alpha == 3.5


@pytest.mark.parametrize(("document", "field"), [
    ([], "peft_type"), ({"peft_type": "IA3"}, "peft_type"), ({**PLAIN, "use_dora": True}, "use_dora"), ({**PLAIN, "use_rslora": True}, "use_rslora"),
    ({**PLAIN, "alpha_pattern": {"q": 2}}, "alpha_pattern"), ({**PLAIN, "modules_to_save": ["lm_head"]}, "modules_to_save"), ({**PLAIN, "bias": "all"}, "bias"),
    ({**PLAIN, "target_parameters": ["experts.w1"]}, "target_parameters"), ({**PLAIN, "lora_alpha": None}, "lora_alpha"),
    ({**PLAIN, "lora_alpha": True}, "lora_alpha"), ({**PLAIN, "lora_alpha": -1}, "lora_alpha"), ({**PLAIN, "lora_alpha": "8"}, "lora_alpha"),
])
def test_what_is_not_plain_lora_is_refused_by_its_setting(document: object, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        AdapterConfig.parse(json.dumps(document).encode())
    assert field in refused.value.field


@pytest.mark.parametrize("name", ["model.embed.weight", "base_model.model.q.lora_A", "base_model.model.q.lora_B.bias", "base_model.model.q.lora_magnitude_vector",
                                  "base_model.model.e.lora_embedding_A"])
def test_a_tensor_that_is_no_low_rank_update_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_peft({name: Layout("float32", (2, 2))})
    assert refused.value.value == name


@pytest.mark.parametrize("layouts", [
    {"q.lora_A": Layout("float32", (2, 4))}, {"q.lora_A": Layout("float32", (2, 4)), "q.lora_B": Layout("float32", (4, 3))},
    {"q.lora_A": Layout("float32", (2,)), "q.lora_B": Layout("float32", (4, 2))},
])
def test_halves_that_do_not_fit_are_refused(layouts: dict[str, Layout]) -> None:
    with pytest.raises(IntegrityError) as refused:
        modules(layouts)
    assert refused.value.value == "q"


def test_merging_into_another_base_is_refused() -> None:
    a, b = (HostTensor.from_numpy(np.zeros(shape, np.float32)) for shape in ((2, 4), (6, 2)))
    with pytest.raises(IntegrityError, match="another base"):
        merged(HostTensor.from_numpy(np.zeros((6, 5), np.float32)), a, b, 1.0)
    with pytest.raises(ConfigError, match="cannot be computed with"):
        merged(HostTensor("float8_e4m3fn", (6, 4), np.zeros(24, np.uint8)), a, b, 1.0)


def test_without_alpha_there_is_no_scale() -> None:
    with pytest.raises(ConfigError) as refused:
        AdapterConfig.of({}, None)
    assert refused.value.field == "lora_alpha"
