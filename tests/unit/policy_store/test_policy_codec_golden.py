"""The wire format does not drift: payloads kept in tests/data are read, and the ranked ones written, bit for bit."""

from __future__ import annotations

import pytest
from codec_cases import GOLDEN_CASES, GoldenCase, built, golden_payloads, using

from driftline.policy_store.codec import Codec, apply, encode_delta


@pytest.mark.parametrize("case", GOLDEN_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kernels", ["numpy", "native"])
def test_a_kept_payload_still_gives_the_same_weights(case: GoldenCase, kernels: str) -> None:
    """Also what a writer made that kept exponents apart where it does not pay (", finest")."""
    pair, kept = case.pair(), golden_payloads()
    for name in (case.name, f"{case.name}, finest"):
        if name in kept:
            out = pair.old.copy()
            with using(built() if kernels == "native" else None):
                apply(case.codec, kept[name], out, pair.width, exponent=pair.exponent)
            assert out.tobytes() == pair.new.tobytes()


@pytest.mark.parametrize("case", [case for case in GOLDEN_CASES if case.codec is Codec.RANKED], ids=lambda case: case.name)
@pytest.mark.parametrize("kernels", ["numpy", "native"])
def test_the_same_changes_still_give_the_kept_payload(case: GoldenCase, kernels: str) -> None:
    """The ranked form alone: zstd's bytes are its own affair, from one of its versions to the next."""
    pair = case.pair()
    with using(built() if kernels == "native" else None):
        encoded = encode_delta(pair.old, pair.new, pair.width, exponent=pair.exponent, form=case.form)
    assert encoded.codec is case.codec
    assert encoded.payload.hex() == golden_payloads()[case.name].hex()
