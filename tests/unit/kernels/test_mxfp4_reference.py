"""MXFP4: what is unpacked packs to the same values, codes and scales are those of the format, the transcode to FP8 loses nothing or says what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.mxfp4 import Mxfp4Weight, Transcoded, dequantised, pack, to_fp8, unpack

torch.set_num_threads(1)

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_the_low_nibble_is_the_even_column_and_bit_three_the_sign() -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0], packed[0, 1] = 0x21, 0xF8
    out = unpack(packed, torch.tensor([[127]], dtype=torch.uint8), torch.float32)[0]
    assert out[:4].tolist() == [0.5, 1.0, 0.0, -6.0]
    assert torch.signbit(out[2]), "code 8 is minus zero"
    swapped = packed >> 4 | packed << 4
    assert (out @ torch.arange(32.0)) != (unpack(swapped, torch.tensor([[127]], dtype=torch.uint8), torch.float32)[0] @ torch.arange(32.0))


@pytest.mark.parametrize("scale", [0, 1, 100, 127, 200, 251])
def test_every_code_under_every_kind_of_scale_survives_a_round_trip(scale: int) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | codes.flip(0) << 4)[None]
    scales = torch.tensor([[scale]], dtype=torch.uint8)
    values = unpack(packed, scales, torch.float64)
    assert values[0, :2].tolist() == [0.0, -6.0 * 2.0 ** (scale - 127)]
    again = pack(values.float())
    assert torch.equal(unpack(*again, torch.float64), values)
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scales)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.integers(0, 30))
def test_packing_what_was_unpacked_changes_no_value(seed: int, spread: int) -> None:
    random = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (3, 32), dtype=torch.uint8, generator=random)
    scale = 100 + torch.randint(0, spread + 1, (3, 2), dtype=torch.uint8, generator=random)
    values = unpack(packed, scale, torch.float32)
    assert torch.equal(unpack(*pack(values), torch.float32), values)


def test_values_go_to_the_nearest_and_ties_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    row = torch.zeros(1, 32)
    row[0, :7], row[0, 7] = ties, 6.0
    packed, scale = pack(row)
    assert scale.item() == 127
    assert unpack(packed, scale, torch.float32)[0, :7].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    above = torch.nextafter(row, torch.tensor(torch.inf))
    assert unpack(pack(above)[0], scale, torch.float32)[0, :7].tolist() == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_a_largest_value_that_reaches_seven_quarters_moves_the_scale_up() -> None:
    row = torch.zeros(2, 32)
    row[0, 0], row[1, 0] = 7.0, 6.99
    packed, scale = pack(row)
    assert scale[:, 0].tolist() == [128, 127]
    assert unpack(packed, scale, torch.float32)[:, 0].tolist() == [8.0, 6.0]


@pytest.mark.parametrize(("span", "exact"), [(0, True), (14, True), (15, False)])
def test_the_transcode_is_exact_up_to_a_span_of_fourteen_binades(span: int, exact: bool) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | codes.flip(0) << 4).repeat(4)[None, None]
    scale = torch.tensor([[[120, 120 - span, 119, 118]]], dtype=torch.uint8)
    found: Transcoded = to_fp8(Mxfp4Weight(packed, scale))
    assert torch.equal(dequantised(found.weight, torch.float64), unpack(packed, scale, torch.float64)) == exact
    assert found.flushed == (0 if exact else 1)
    empty = packed.clone()
    empty[..., 16:32] = 0
    assert to_fp8(Mxfp4Weight(empty, scale)).flushed == 0, "a group of zeros loses nothing"


def test_nan_scales_make_nans() -> None:
    packed, scale = torch.full((1, 1, 64), 0x22, dtype=torch.uint8), torch.tensor([[[255, 120, 120, 120]]], dtype=torch.uint8)
    assert unpack(packed, scale)[..., :32].isnan().all()
    assert dequantised(to_fp8(Mxfp4Weight(packed, scale)).weight, torch.float32).isnan().all()


@pytest.mark.parametrize(
    ("packed", "scale"),
    [(torch.zeros(2, 16), torch.zeros(2, 1)), (torch.zeros(2, 15, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)),
     (torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))],
)
def test_what_is_not_mxfp4_is_refused(packed: torch.Tensor, scale: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="packed"):
        unpack(packed, scale)


def test_rows_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        pack(torch.zeros(2, 33))
    with pytest.raises(ValueError, match="multiple of 128"):
        to_fp8(Mxfp4Weight(torch.zeros(1, 1, 32, dtype=torch.uint8), torch.zeros(1, 1, 2, dtype=torch.uint8)))
