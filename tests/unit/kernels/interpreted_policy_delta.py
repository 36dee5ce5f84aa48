"""The policy-delta kernels, as Triton's interpreter runs them on the CPU, against the reference. Run by test_kernels_interpreted.py in a
process of its own: Triton is interpreted from its first import on or never."""

from __future__ import annotations

import pytest
import torch
from delta_cases import WIDTHS, noise, nudged, same
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.policy_delta import Rounding, reference
from driftline.kernels.policy_delta import triton as kernels

torch.set_num_threads(1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_the_kernels_find_what_the_reference_finds_in_spans_of_any_length(width: int, share: float) -> None:
    sizes = [1, 31, 4096, 8193, 700]
    old = [noise(size, WIDTHS[width], size) for size in sizes]
    new = [nudged(span, share, i) for i, span in enumerate(old)]
    expected = reference.compare(old, new)
    assert same(kernels.Comparison(old, new).run(), expected)
    longer = kernels.Comparison(old, new).run(wait=False)
    assert same(longer._replace(at=longer.at[: expected.at.numel()], xor=longer.xor[: expected.xor.numel()]), expected)
    kernels.apply_xor(kernels.Table(old), longer)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("rounding", [Rounding.BFLOAT16, Rounding.BFLOAT16_IN_FLOAT32])
def test_the_kernels_round_as_torch_does_with_one_nan_for_all(rounding: Rounding) -> None:
    """Ties, denormals, both infinities and every NaN; a NaN becomes 0x7FFF, as on the device, where torch's CPU has several."""
    held = torch.bfloat16 if rounding is Rounding.BFLOAT16 else torch.float32
    edges = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x00000001, 0x00008000, 0x00018000],
                         dtype=torch.int32)
    masters = [torch.cat([edges, edges | -0x80000000]).view(torch.float32), noise(9000, torch.float32)]
    params = [noise(m.numel(), torch.bfloat16, 5).to(held) for m in masters]
    before = [p.clone() for p in params]
    wanted = [torch.where(m.isnan(), torch.full((), 0x7FFF, dtype=torch.int16), m.to(torch.bfloat16).view(torch.int16)) for m in masters]
    changes = kernels.Comparison(params, masters, rounding).run(write=True)

    def bits(span: torch.Tensor) -> torch.Tensor:
        return span.view(torch.int16) if held is torch.bfloat16 else (span.view(torch.int32) >> 16).to(torch.int16)

    assert all(torch.equal(bits(p), w) for p, w in zip(params, wanted, strict=True))
    if held is torch.float32:
        assert all(bool((p.view(torch.int32) & 0xFFFF == 0).all()) for p in params)
    moved = [bits(b).clone() for b in before]
    reference.apply_xor(moved, changes)
    assert all(torch.equal(m, w) for m, w in zip(moved, wanted, strict=True))


def test_a_span_with_too_many_changes_is_written_and_not_listed() -> None:
    old = [noise(5000, torch.bfloat16, 10 + i) for i in range(3)]
    new = [nudged(span, share) for span, share in zip(old, (0.01, 0.9, 0.02), strict=True)]
    copies = [span.clone() for span in old]
    found = kernels.Comparison(old, new, dense_share=0.4).run(write=True)
    assert same(found, reference.compare(copies, new, write=True, dense_share=0.4))
    assert found.starts[1] == found.starts[2]
    assert found.counts[1] > 0.4 * 5000
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(old, new, strict=True))


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=9), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_values_are_put_where_they_belong_whatever_the_spans(sizes: list[int], share: float, seed: int) -> None:
    old = [noise(size, torch.bfloat16, 100 + seed + i) for i, size in enumerate(sizes)]
    new = [nudged(span, share, seed) for span in old]
    found = reference.compare(old, new)
    bounds = found.starts.tolist()
    values = torch.cat([n.view(torch.int16)[found.at[a:b].long()] for n, a, b in zip(new, bounds, bounds[1:], strict=False)])
    copies = [span.clone() for span in old]
    kernels.put(kernels.Table(old), found.at, values, found.starts)
    reference.put(copies, found.at, values, found.starts)
    for ours, theirs, wanted in zip(old, copies, new, strict=True):
        assert torch.equal(ours.view(torch.int16), wanted.view(torch.int16))
        assert torch.equal(theirs.view(torch.int16), wanted.view(torch.int16))


def test_the_kernels_fingerprint_spans_that_end_or_begin_off_a_word() -> None:
    whole = noise(70_001, torch.float8_e4m3fn)
    for spans in ([whole[:n].clone() for n in (1, 3, 4, 16_384, 16_385, 65_536)], [whole[1:50_000], whole[2:7], whole[4:8]]):
        assert torch.equal(kernels.fingerprint(spans), reference.fingerprint(spans))
