"""The expert MLP on a CUDA device at K3's widths: right to its roundings, the same bits in every batch, and checks that can fail."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from driftline.kernels.moe import expert_mlp, forward, grouped, reference
from driftline.kernels.moe.activations import Activations
from driftline.kernels.moe.grouped import ROWS, TABLE, Form, Pinned
from driftline.kernels.moe.plan import plan
from driftline.kernels.mxfp4 import Mxfp4Weight, to_fp8, unpack
from driftline.kernels.mxfp4 import reference as forms

if torch.cuda.is_available():
    from driftline.kernels.moe import triton_forward, triton_rows

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "kernels"))

from moe_cases import BETAS, COMBINATIONS, Case, case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

EXPERTS, TOP_K, LATENT, INNER = 24, 8, 3584, 3072
ROUNDING = {Activations.SAME: 5e-3, Activations.FP8_32: 1e-2, Activations.FP8_128: 1.2e-2}
"""Relative error of a whole result against fp64 with the same roundings of z and h: three roundings to bfloat16, values of h on the other side of a tie,
and the matrix unit's own sums (about 14 bits in FP8 within 128 of K)."""


def run(given: Case, activations: Activations = Activations.SAME, microbatch: int | None = None) -> torch.Tensor:
    z, ids, gates, w1, w3, w2 = given
    return expert_mlp(z, ids, gates, w1, w3, w2, *BETAS, activations=activations, microbatch=microbatch)


def error(found: torch.Tensor, given: Case, activations: Activations) -> float:
    """Relative to fp64, over a few tokens so that the reference's own products stay small."""
    z, ids, gates, *weights = given
    some = slice(0, 24)
    wide = [w.double() if isinstance(w, torch.Tensor) else w for w in weights]
    expected = reference.expert_mlp(z[some].double(), ids[some], gates[some].double(), wide[0], wide[1], wide[2], *BETAS, activations=activations)
    return float((found[some].double() - expected).norm() / expected.norm())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.fixture(scope="module")
def packed() -> Case:
    return case(Form.MXFP4, 512, TOP_K, EXPERTS, LATENT, INNER, device="cuda")


@pytest.fixture
def table() -> Iterator[None]:
    """The table of configurations as it was, afterwards."""
    held = dict(TABLE)
    yield
    TABLE.update(held)


@pytest.mark.parametrize(("form", "activations"), COMBINATIONS)
def test_results_are_the_references_to_their_roundings(form: Form, activations: Activations) -> None:
    """(Other forms' wide tiles have the bits of their narrow ones, as another test says; compiling them all is what takes the time here.)"""
    for tokens in (24, 600) if form is Form.MXFP4 and activations is not Activations.FP8_128 else (24,):
        given = case(form, tokens, TOP_K, EXPERTS, LATENT, INNER, device="cuda")
        torch.full((2**27,), torch.nan, device="cuda")  # what the allocator hands out next holds no numbers
        found = run(given, activations)
        assert found.isfinite().all(), "every element was written"
        assert error(found, given, activations) < ROUNDING[activations]
        assert error(found, given._replace(w1=given.w3, w3=given.w1), activations) > 0.1, "and would not pass for another's"


@pytest.mark.parametrize(
    ("form", "activations", "rows"),
    [(Form.MXFP4, Activations.SAME, range(len(ROWS) + 1)), (Form.MXFP4, Activations.FP8_32, (0, 4)), (Form.MXFP4, Activations.FP8_128, (0, 2)),
     (Form.FP8, Activations.FP8_128, (0, 3)), (Form.BFLOAT16, Activations.SAME, (0, 4))],
)
def test_no_configuration_changes_a_bit(form: Form, activations: Activations, rows: Sequence[int], table: None) -> None:
    """What is pinned for few rows and what is pinned for many: a token of a decode step and the same token in a learner's batch."""
    given = case(form, 200, TOP_K, EXPERTS, LATENT, INNER, device="cuda")
    key = (form, activations is Activations.FP8_128)
    found = []
    for configuration in [TABLE[key][row] for row in rows]:
        TABLE[key] = (configuration,) * (len(ROWS) + 1)
        found.append(run(given, activations))
    assert all(same_bits(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("activations", [Activations.SAME, Activations.FP8_128])
def test_a_tokens_bits_do_not_depend_on_its_batch(activations: Activations, packed: Case) -> None:
    whole = run(packed, activations)
    for size in (1, 2, 7, 64, 512):
        rows = slice(0, size)
        part = packed._replace(z=packed.z[rows], ids=packed.ids[rows], gates=packed.gates[rows])
        assert same_bits(run(part, activations), whole[rows])
    last = packed._replace(z=packed.z[511:], ids=packed.ids[511:], gates=packed.gates[511:])
    assert same_bits(run(last, activations), whole[511:]), "nor on its place in it"
    assert same_bits(run(packed, activations, 100), whole), "nor on the microbatch"


def test_a_sum_in_another_order_has_other_bits(packed: Case) -> None:
    """So the comparisons of bits above can fail: the same pairs, their slots reversed."""
    turned = packed._replace(ids=packed.ids.flip(1), gates=packed.gates.flip(1))
    assert not same_bits(run(turned), run(packed))
    assert error(run(turned), packed, Activations.SAME) < ROUNDING[Activations.SAME]


def test_later_tokens_change_nothing_before_them(packed: Case) -> None:
    before = run(packed)
    z = packed.z.clone()
    z[300:] = torch.randn_like(z[300:])
    ids = packed.ids.clone()
    ids[300:] = 5
    after = run(packed._replace(z=z, ids=ids))
    assert same_bits(after[:300], before[:300])
    assert not same_bits(after[300:], before[300:])


def test_a_thousand_runs_have_one_hash(packed: Case) -> None:
    part = packed._replace(z=packed.z[:40], ids=packed.ids[:40], gates=packed.gates[:40])
    hashes = {hashlib.sha256(run(part).view(torch.int16).cpu().numpy().tobytes()).hexdigest() for _ in range(1000)}
    assert len(hashes) == 1
    other = run(part._replace(gates=part.gates * 1.01))
    assert hashlib.sha256(other.view(torch.int16).cpu().numpy().tobytes()).hexdigest() not in hashes


def test_experts_with_every_token_and_experts_with_none(packed: Case) -> None:
    ids = torch.arange(TOP_K, device="cuda").expand(512, -1).contiguous()
    ids[7] = -1
    given = packed._replace(ids=ids)
    found = run(given)
    assert not found[7].any()
    assert error(found, given, Activations.SAME) < ROUNDING[Activations.SAME]


def test_the_assembly_decodes_every_byte_exactly() -> None:
    """The second product of the identity's rows is the weight's columns, exactly."""
    random = torch.Generator("cuda").manual_seed(3)
    codes = torch.randint(0, 256, (1, 128, 64), dtype=torch.uint8, generator=random, device="cuda")
    identity = torch.eye(128, dtype=torch.bfloat16, device="cuda")
    configuration = TABLE[Form.MXFP4, False][0]
    table = plan(torch.zeros(128, 1, dtype=torch.int64, device="cuda"), 1, configuration.grouping.block)
    ordered, _ = triton_rows.prepare(identity, Form.MXFP4, Activations.SAME)
    for scale in (60, 100, 120, 126, forms.LARGEST_SCALE):
        w2 = Mxfp4Weight(codes, torch.full((1, 128, 4), scale, dtype=torch.uint8, device="cuda"))
        rows = torch.zeros(128, 128, dtype=torch.bfloat16, device="cuda")
        triton_forward.down(ordered, ordered, w2, table, rows, grouping=configuration.grouping, product=configuration.down, form=Form.MXFP4,
                            rounding=Activations.SAME)
        assert torch.equal(rows, unpack(*w2)[0].t())


@pytest.mark.parametrize("tokens", [1, 20, 64, 700])
def test_a_plan_on_the_device_is_the_plan(tokens: int) -> None:
    random = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, 897, (tokens, 16), generator=random)
    for found, expected in zip(plan(ids.cuda(), 896, 32)[:5], plan(ids, 896, 32)[:5], strict=True):
        assert torch.equal(found.cpu(), expected)


def test_forms_on_the_device_are_those_of_the_reference() -> None:
    random = torch.Generator().manual_seed(0)
    weight = Mxfp4Weight(torch.randint(0, 256, (3, 8, 256), dtype=torch.uint8, generator=random),
                         100 + torch.randint(0, 21, (3, 8, 16), dtype=torch.uint8, generator=random))
    there = Mxfp4Weight(weight.packed.cuda(), weight.scale.cuda())
    assert torch.equal(unpack(*there).cpu(), forms.unpack(*weight))
    found, expected = to_fp8(there), forms.to_fp8(weight)
    assert torch.equal(found.weight.values.cpu().float(), expected.weight.values.float())
    assert torch.equal(found.weight.scale.cpu(), expected.weight.scale)
    assert found.flushed.item() == expected.flushed.item() > 0


def test_the_workspace_is_bounded_by_the_microbatch(packed: Case) -> None:
    peaks = []
    for copies in (1, 8):
        z, ids, gates = (t.repeat(copies, 1) for t in (packed.z, packed.ids, packed.gates))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = run(packed._replace(z=z, ids=ids, gates=gates), microbatch=256)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before - out.nbytes)
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 1.2 * forward.workspace_bytes(256, TOP_K, LATENT, INNER, Activations.SAME)


def test_the_op_captures_into_a_graph_and_replays(packed: Case) -> None:
    """Nothing in it waits for the device: a wait would make the capture fail."""
    part = packed._replace(z=packed.z[:16].clone(), ids=packed.ids[:16].clone(), gates=packed.gates[:16].clone())
    run(part)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(part)
    part.z.copy_(packed.z[16:32])
    part.ids.copy_(packed.ids[16:32])
    part.gates.copy_(packed.gates[16:32])
    graph.replay()
    assert same_bits(out, run(packed)[16:32])


def test_a_configuration_for_other_widths_is_found() -> None:
    """384 features: no tile of 256 divides them."""
    given = case(Form.MXFP4, 300, 2, 2, 384, 256, device="cuda")
    found: Pinned = grouped.pinned(Form.MXFP4, Activations.SAME, 600, 2, 384)
    assert found.down.features == 128
    assert error(run(given), given, Activations.SAME) < ROUNDING[Activations.SAME]
