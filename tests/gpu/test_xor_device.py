"""The compiled XOR kernels on a CUDA device, against the reference bit for bit."""

from __future__ import annotations

import hashlib

import pytest
import torch

from driftline.kernels import policy_delta
from driftline.kernels.policy_delta import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def noise(elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8, device="cuda", generator=random).view(dtype)


def nudged(base: torch.Tensor, share: float, seed: int = 1) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[base.element_size()]
    chosen = torch.rand(base.numel(), device="cuda", generator=random) < share
    return torch.where(chosen, noise(base.numel(), base.dtype, 1000 + seed).view(kind), base.view(kind)).view(base.dtype)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [256, 4096, 65_536])
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_compiled_kernels_leave_and_count_what_the_reference_does(dtype: torch.dtype, block: int, share: float) -> None:
    for elements in (1, 8191, 4_000_000, 3_000_001):
        base = noise(elements, dtype, elements)
        new = nudged(base, share)
        ours, theirs = new.clone(), new.clone()
        counts = policy_delta.xor_blocks(base, ours, block=block)
        assert torch.equal(counts, reference.xor_blocks([base], [theirs], block=block))
        assert equal(ours, theirs)
        policy_delta.xor_blocks(base, ours, block=block)
        assert equal(ours, new)


@pytest.mark.parametrize("shift", [0, 1])
def test_many_spans_in_one_launch_on_and_off_16_bytes(shift: int) -> None:
    sizes = [1, 255, 256, 33_000, 1 << 20, 2_000_003]
    base = [noise(size + 1, torch.bfloat16, i)[shift:][:size] for i, size in enumerate(sizes)]
    new = [noise(size + 1, torch.bfloat16, 100 + i)[shift:][:size] for i, size in enumerate(sizes)]
    theirs = [span.clone() for span in new]
    counts = policy_delta.Xor(base, new, block=1024).run()
    assert torch.equal(counts, reference.xor_blocks(base, theirs, block=1024))
    assert all(equal(a, b) for a, b in zip(new, theirs, strict=True))


def test_a_thousand_runs_give_one_hash_and_a_byte_that_differs_gives_another() -> None:
    base, new = noise(300_001, torch.bfloat16), noise(300_001, torch.bfloat16, 7)
    pair = policy_delta.Xor([base], [new], block=4096)

    def digest() -> str:
        counts = pair.run()
        return hashlib.sha256(new.view(torch.uint8).cpu().numpy().tobytes() + counts.cpu().numpy().tobytes()).hexdigest()

    even, odd = digest(), digest()
    assert even != odd
    states = [(pair.run().clone(), new.clone()) for _ in range(2)]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        counts, held = states[i % 2]
        differing += (pair.run() != counts).sum() + (new.view(torch.int16) != held.view(torch.int16)).sum()
    assert differing.item() == 0
    assert digest() in (even, odd)
    new.view(torch.uint8)[5] ^= 1
    assert digest() not in (even, odd)


@pytest.mark.parametrize("many", [False, True])
def test_a_span_of_more_than_two_to_the_31_elements_is_one_launch_as_any_other(many: bool) -> None:
    """2.2 billion elements of a byte: positions, and offsets in bytes, pass 2^31, which an int32 would wrap."""
    elements = 2**31 + 70_003
    base = torch.zeros(elements, dtype=torch.uint8, device="cuda")
    new = torch.zeros(elements, dtype=torch.uint8, device="cuda")
    places = (0, elements // 2, 2**31 - 1, 2**31, elements - 1)
    for at in places:
        new[at], base[at] = 0x3F, 0x40
    if many:
        short = torch.ones(300, dtype=torch.uint8, device="cuda"), torch.zeros(300, dtype=torch.uint8, device="cuda")
        *counts, last = policy_delta.Xor([base, short[0]], [new, short[1]], block=65_536).run().split(-(-elements // 65_536))
        assert last.tolist() == [300]
        counts = counts[0]
    else:
        counts = policy_delta.xor_blocks(base, new, block=65_536)
    assert counts.nonzero().flatten().tolist() == sorted({at // 65_536 for at in places})
    assert counts.sum().item() == len(places)
    assert [new[at].item() for at in places] == [0x3F ^ 0x40] * len(places)
    assert new.count_nonzero().item() == len(places)
