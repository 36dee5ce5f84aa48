"""The expert MLP's one public function without a GPU: packed weights, roundings and their gradients, padding, and arguments that are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_cases import BETAS, COMBINATIONS, case

from driftline.kernels.moe import Activations, expert_mlp
from driftline.kernels.moe.activations import quantise, round_to_mxfp8, rounded
from driftline.kernels.moe.grouped import ROWS, TABLE, Form, pinned
from driftline.kernels.mxfp4 import dequantised

torch.set_num_threads(1)


@pytest.mark.parametrize(("form", "activations"), COMBINATIONS)
def test_packed_weights_are_their_values(form: Form, activations: Activations) -> None:
    z, ids, gates, *weights = case(form, 6, 2, 4, 128, 128)
    w1, w3, w2 = (dequantised(w, torch.float64).double() for w in weights)
    found = expert_mlp(z.double(), ids, gates.double(), *(w if form is not Form.BFLOAT16 else w.double() for w in weights), *BETAS, activations=activations)
    for n in range(6):
        row = rounded(z[n : n + 1].double(), activations).double()
        total = torch.zeros(1, 128, dtype=torch.float64)
        for e, gate in zip(ids[n].tolist(), gates[n].double(), strict=True):
            g, u = row @ w1[e].t(), row @ w3[e].t()
            h = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
            total += gate * (rounded(h, activations).double() @ w2[e].t())
        torch.testing.assert_close(found[n : n + 1], total, rtol=1e-9, atol=1e-12)


def test_a_rounding_passes_gradients_straight_through() -> None:
    given = case(Form.MXFP4, 5, 2, 3, 128, 128)
    grads = []
    for activations in (Activations.SAME, Activations.FP8_32):
        z, gates = given.z.double().requires_grad_(), given.gates.double().requires_grad_()
        expert_mlp(z, given.ids, gates, given.w1, given.w3, given.w2, *BETAS, activations=activations).sum().backward()
        assert z.grad is not None
        assert gates.grad is not None
        grads.append(z.grad)
    assert not torch.equal(*grads)
    assert (grads[0] - grads[1]).norm() < 0.1 * grads[0].norm()


@pytest.mark.parametrize("tokens", [3, 40])
def test_an_id_that_is_no_expert_adds_nothing(tokens: int) -> None:
    z, ids, gates, w1, w3, w2 = case(Form.BFLOAT16, tokens, 2, 3, 128, 128)
    out = torch.where(torch.arange(tokens)[:, None] % 2 == 0, ids, torch.tensor([-1, 3]))
    found = expert_mlp(z, out, gates, w1, w3, w2, *BETAS)
    assert not found[1::2].any()
    torch.testing.assert_close(found[::2], expert_mlp(z, ids, gates, w1, w3, w2, *BETAS)[::2])


def test_eight_bits_with_a_scale_keep_the_largest_value_and_zeros() -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-12, 12, 4)[:, None]
    x[0] = 0
    values, scale = quantise(x)
    largest = x.view(4, 2, 128).abs().amax(-1)
    torch.testing.assert_close((values.float().view(4, 2, 128) * scale[..., None]).abs().amax(-1), largest, rtol=1e-6, atol=0)
    assert not values.float()[0].any()


@pytest.mark.parametrize(("largest", "power"), [(448.0, 1.0), (448.1, 2.0), (224.0, 0.5), (1.0, 2.0**-8), (1.75, 2.0**-8), (1.7500001, 2.0**-7)])
def test_mxfp8_takes_the_least_power_that_holds_the_largest(largest: float, power: float) -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = largest, 1.06 * power
    out = round_to_mxfp8(x)
    assert out[0, 1] == 1.0 * power, "a step of an eighth of the power above one"
    assert out[0, 0] <= 448 * power
    assert torch.equal(out, out.bfloat16().float())


def changed(**fields: Any) -> dict[str, Any]:
    given = case(Form.MXFP4, 3, 2, 3, 128, 256)._asdict()
    return given | {"beta": 4.0, "linear_beta": 25.0} | fields


BAD = {
    "z": {"z": torch.zeros(3, 1, 128)},
    "ids": {"ids": torch.zeros(4, 2, dtype=torch.int64)},
    "gates": {"gates": torch.zeros(3, 3)},
    "w1": {"z": torch.zeros(3, 64)},
    "w3": {"w3": case(Form.MXFP4, 1, 1, 3, 256, 128).w1},
    "w1 is a list": {"w1": [1.0]},
    "one form": {"w2": torch.zeros(3, 128, 256)},
    "activations": {k: torch.zeros(3, *s) for k, s in {"w1": (256, 128), "w3": (256, 128), "w2": (128, 256)}.items()} | {"activations": Activations.FP8_128},
    "microbatch": {"microbatch": 0},
}


@pytest.mark.parametrize("named", BAD)
def test_what_does_not_fit_is_named(named: str) -> None:
    with pytest.raises(ValueError, match=named):
        expert_mlp(**changed(**BAD[named]))


def test_configurations_are_looked_up_by_shapes() -> None:
    table = TABLE[Form.MXFP4, False]
    for tokens, row in ((1, 0), (672, 0), (673, 1), (1024, 1), (1400, 2), (4096, 3), (8192, 4), (10**6, 4)):
        assert pinned(Form.MXFP4, Activations.SAME, tokens * 16, 896, 3584) == table[row]
    assert pinned(Form.MXFP4, Activations.SAME, 8192 * 16, 896, 384).down.features == 128
    assert list(ROWS) == sorted(ROWS)


@pytest.mark.parametrize("tokens", [1, 8, 56, 8192])
def test_the_benchmarks_routing_is_balanced_and_its_floor_counts_what_is_reached(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks" / "kernels"))
    monkeypatch.delitem(sys.modules, "moe", raising=False)
    import moe

    ids = moe.routed(tokens, skewed=False, device="cpu")
    counts = torch.bincount(ids.reshape(-1), minlength=896)
    assert counts.max() - counts.min() <= 1
    assert all(row.unique().numel() == 16 for row in ids[:100])
    moved, flops = moe.least(ids, 17 / 32)
    assert moved == min(16 * tokens, 896) * 3 * 3584 * 3072 * 17 / 32 + 4 * tokens * 3584
    assert flops == tokens * 16 * 3 * 2 * 3584 * 3072
    skewed = moe.routed(512, skewed=True, device="cpu")
    assert all(row.unique().numel() == 16 for row in skewed)
    assert torch.bincount(skewed.reshape(-1)).max() > 100
