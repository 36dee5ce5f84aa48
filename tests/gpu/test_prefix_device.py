"""The host tier of the prefix cache on a CUDA device: rows and states leave and return bit for bit, whatever is written meanwhile."""

from __future__ import annotations

from array import array

import pytest
import torch

from driftline.models.families import open_model
from driftline.models.paged import PAGE, Pool
from driftline.services.rollout.prefix import CacheKey, HostTier, PrefixCache
from driftline.services.rollout.prefix.host import Kind, entry_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KEY = CacheKey("base", "", 1)


def pool(pages: int = 12, slots: int = 2) -> Pool:
    return Pool.make(open_model("base", device="cuda"), pages=pages, slots=slots)


def fill(held: Pool, pages: list[int], slot: int, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Noise in a sequence's place; what was written."""
    random = torch.Generator("cuda").manual_seed(seed)
    noise = [[torch.randn(t.shape, device="cuda", generator=random).to(t.dtype) for t in held.export_pages(pages)],
             [torch.randn(t.shape, device="cuda", generator=random).to(t.dtype) for t in held.export_states([slot])]]
    held.import_pages(pages, noise[0])
    held.import_states([slot], noise[1])
    return noise[0], noise[1]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_sequences_that_left_the_device_return_as_they_were() -> None:
    held = pool()
    cache = PrefixCache(held, host=HostTier(64 * 2**20, "cuda"))
    length = 3 * PAGE + 9
    texts = [array("i", range(1000 * i, 1000 * i + length)) for i in range(6)]
    written = []
    for seed, text in enumerate(texts):
        lease = cache.begin([KEY], text)
        assert lease is not None
        assert cache.grow(lease, length)
        written.append(fill(held, lease.pages, lease.slot, seed))  # over what has just been sent away
        cache.end(lease, KEY, text, length)
    assert cache.stats.moves.demoted_states >= 4
    for text, (pages, states) in zip(texts, written, strict=True):
        lease = cache.begin([KEY], text + array("i", [7]))
        assert lease is not None
        assert lease.hit == length
        assert same(held.export_pages(lease.pages), pages)
        assert same(held.export_states([lease.slot]), states)
        cache.end(lease)
        cache.check()
    assert cache.stats.moves.restored_states >= 4


def test_a_page_may_be_written_while_it_is_on_its_way() -> None:
    held, host = pool(), HostTier(64 * 2**20, "cuda")
    pages, _ = fill(held, [1, 2, 3], 0, 1)
    exported = held.export_pages([1, 2, 3])
    extents = [host.take(entry_bytes(exported)) for _ in range(3)]
    assert None not in extents
    torch.cuda._sleep(50_000_000)  # the copies are behind it, and the host goes on
    host.put(Kind.PAGE, [e for e in extents if e is not None], exported)
    del exported
    fill(held, [1, 2, 3], 0, 2)
    found: list[torch.Tensor] = []
    host.get(Kind.PAGE, [e for e in extents if e is not None], found.extend)
    assert same(found, pages)
    assert not same(held.export_pages([1, 2, 3]), pages)
