"""The prefix cache against a naive model, operation by operation: what a lease has is what its tokens ask for, and every reference is accounted for."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from driftline.messages.errors import IntegrityError
from driftline.services.rollout.prefix import PAGE, CacheKey, HostTier, Lease, Parked, PrefixCache
from driftline.services.rollout.prefix.node import Hit
from tests.unit.rollout.prefix_cases import ADAPTED, KEY, NEXT, RecordingPool

SEGMENTS = st.tuples(st.sampled_from((0, 1, 2)), st.sampled_from((1, 5, 30, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 150)))
KEYS = st.sampled_from((KEY, NEXT, ADAPTED))
LONGEST = 400


@dataclass
class Running:
    lease: Lease
    tokens: array[int]
    writers: list[CacheKey]
    filed: CacheKey


@dataclass
class Waiting:
    parked: Parked
    writers: list[CacheKey]
    filed: CacheKey


class Prefixes(RuleBasedStateMachine):
    """`known`: every beginning that was filed with what may be continued from it; without eviction a hit is at least the longest of them."""

    @initialize(stateful=st.booleans(), roomy=st.booleans(), host=st.sampled_from((0, 900, 6000)), slots=st.sampled_from((2, 4)))
    def make(self, stateful: bool, roomy: bool, host: int, slots: int) -> None:
        self.roomy = roomy
        self.pool = RecordingPool(4000 if roomy else 14, 600 if roomy else slots, state_bytes=24 if stateful else 0)
        self.cache = PrefixCache(self.pool, host=HostTier(host) if host else None)
        self.texts: list[array[int]] = [array("i", [9] * 10)]
        self.running: list[Running] = []
        self.waiting: list[Waiting] = []
        self.known: list[tuple[CacheKey, array[int]]] = []
        self.mixed = 0
        self.exact = roomy and not stateful

    def _segment(self, segment: tuple[int, int]) -> array[int]:
        letter, length = segment
        return array("i", [letter] * length)

    @rule(which=st.integers(0, 1000), cut=st.integers(0, 1000), segment=SEGMENTS, keys=st.lists(KEYS, min_size=1, max_size=2, unique=True))
    def begin(self, which: int, cut: int, segment: tuple[int, int], keys: list[CacheKey]) -> None:
        old = self.texts[which % len(self.texts)]
        tokens = (old[: cut % (len(old) + 1)] if cut % 3 else old) + self._segment(segment)
        if len(tokens) > LONGEST:
            return
        self.texts.append(tokens)
        self.texts = self.texts[-20:]
        expected = self._naive(keys, tokens)
        assert self.cache.length_of_hit(keys, tokens) >= expected
        lease = self.cache.begin(keys, tokens)
        if lease is None:
            assert not self.roomy
            return
        assert lease.hit < len(tokens)
        if lease.hit:
            assert lease.key in keys
        if self.roomy:
            assert lease.hit >= expected
            if self.exact:
                assert lease.hit == expected
        writers = [lease.key] * lease.hit if lease.key else []
        assert self.pool.holds(lease, writers, tokens), "a wrong hit"
        one = Running(lease, tokens, writers, keys[0] if lease.key in (None, keys[0]) else self._new_mixed())
        self.running.append(one)
        self._advance(one, len(tokens))

    def _naive(self, keys: list[CacheKey], tokens: array[int]) -> int:
        if not self.roomy:
            return 0
        best = 0
        for key, filed in self.known:
            if key not in keys:
                continue
            same = next((i for i, (a, b) in enumerate(zip(filed, tokens[:-1], strict=False)) if a != b), min(len(filed), len(tokens) - 1))
            if same == len(filed) or not self.cache.stock.stateful:
                best = max(best, same)
        return best

    def _new_mixed(self) -> CacheKey:
        self.mixed += 1
        return CacheKey.of_mixed("base", "", f"s{self.mixed}")

    def _key(self, one: Running) -> CacheKey:
        """Of what computes now."""
        return KEY if one.filed.mixed else one.filed

    def _advance(self, one: Running, length: int) -> bool:
        if not self.cache.grow(one.lease, length):
            assert not self.roomy
            return False
        self.pool.compute(one.lease, self._key(one), one.tokens, len(one.writers), length)
        one.writers += [self._key(one)] * (length - len(one.writers))
        return True

    def _versions(self, one: Running) -> list[int]:
        return [key.version for key in one.writers]

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1000), segment=SEGMENTS)
    def decode(self, which: int, segment: tuple[int, int]) -> None:
        one = self.running[which % len(self.running)]
        if len(one.tokens) > LONGEST:
            return
        if len(one.writers) == len(one.tokens):
            one.tokens = one.tokens + self._segment(segment)
        self._advance(one, len(one.tokens))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1000), count=st.integers(1, 2))
    def fork(self, which: int, count: int) -> None:
        one = self.running[which % len(self.running)]
        forks = self.cache.forks(one.lease, len(one.writers), count)
        if forks is None:
            assert not self.roomy
            return
        tokens = one.tokens[: len(one.writers)]
        self.running += [Running(fork, tokens, list(one.writers), one.filed if not one.filed.mixed else self._new_mixed()) for fork in forks]

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1000), keep=st.booleans())
    def commit(self, which: int, keep: bool) -> None:
        one = self.running[which % len(self.running)]
        length = len(one.writers)
        self.cache.commit(one.lease, one.filed, one.tokens, length, versions=self._versions(one), keep=keep)
        if not self.cache.stock.stateful:
            self.known.append((one.filed, one.tokens[: length // PAGE * PAGE]))
        elif keep and length % PAGE == 0 and length:
            self.known.append((one.filed, one.tokens[:length]))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1000), keep=st.booleans())
    def end(self, which: int, keep: bool) -> None:
        one = self.running.pop(which % len(self.running))
        if not keep:
            self.cache.end(one.lease)
            return
        self.cache.end(one.lease, one.filed, one.tokens, len(one.writers), versions=self._versions(one))
        self.known.append((one.filed, one.tokens[: len(one.writers)]))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1000))
    def preempt(self, which: int) -> None:
        one = self.running.pop(which % len(self.running))
        parked = self.cache.preempt(one.lease, one.filed, one.tokens, len(one.writers), versions=self._versions(one))
        self.known.append((one.filed, one.tokens[: len(one.writers)]))
        self.waiting.append(Waiting(parked, one.writers, one.filed))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 1000))
    def restore(self, which: int) -> None:
        one = self.waiting.pop(which % len(self.waiting))
        self.known = [(key, filed) for key, filed in self.known if (key, filed) != (one.filed, one.parked.tokens)]  # it may be taken over
        self.exact = False
        lease = self.cache.restore(one.parked)
        if lease is None:
            assert not self.roomy
            return
        writers = one.writers[: lease.hit] if one.filed.mixed else [lease.key or KEY] * lease.hit
        assert self.pool.holds(lease, writers, one.parked.tokens), "a wrong restoration"
        if one.filed.mixed and lease.hit:
            assert set(lease.versions) == {w.version for w in writers} or lease.hit < one.parked.length
        self.running.append(Running(lease, one.parked.tokens, writers, one.filed))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1000))
    def another_version_in_flight(self, which: int) -> None:
        one = self.running[which % len(self.running)]
        if not one.filed.mixed:
            one.filed = self._new_mixed()

    @rule(key=KEYS)
    def forget(self, key: CacheKey) -> None:
        self.cache.forget(lambda other: other == key)
        self.known = [(other, filed) for other, filed in self.known if other != key]

    @rule()
    def the_end_of_all(self) -> None:
        if len(self.running) > 6:
            self.cache.reset()
            self.running, self.known = [], []
            assert self.cache.stats.free_page_bytes == (self.pool.pages - 1) * self.pool.page_bytes

    @invariant()
    def counts_are_exact(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        stats = self.cache.stats
        assert stats.leased_page_bytes + stats.cached_page_bytes + stats.free_page_bytes == (self.pool.pages - 1) * self.pool.page_bytes
        assert self.cache.leases == {one.lease for one in self.running}

    @invariant()
    def no_lease_lost_a_row(self) -> None:
        for one in getattr(self, "running", ()):
            assert self.pool.holds(one.lease, one.writers, one.tokens)


CaseSettings = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestPrefixes = Prefixes.TestCase
TestPrefixes.settings = CaseSettings


@pytest.mark.parametrize("fault", ["stale key", "shared partial page", "state of another position"])
def test_the_machine_finds_a_wrong_cache(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is for: each of these is found."""
    from driftline.services.rollout.prefix import cache as module

    if fault == "stale key":
        monkeypatch.setattr(PrefixCache, "_find", _under_any_key)
    elif fault == "shared partial page":
        monkeypatch.setattr(PrefixCache, "_copied_page", lambda self, node: self.stock.pages.share(node.page) if node.page else self.stock.pages.take())
    else:
        monkeypatch.setattr(module, "longest_state", _rows_will_do)
    machine = type("Wrong", (Prefixes,), {}).TestCase
    machine.settings = settings(CaseSettings, max_examples=2000, derandomize=True, database=None, report_multiple_bugs=False, phases=(Phase.generate,))
    with pytest.raises((AssertionError, ValueError, IntegrityError)):  # whichever check sees it first
        machine().runTest()


def _under_any_key(self: PrefixCache, keys: list[CacheKey], tokens: array[int], limit: int) -> Hit | None:
    from driftline.services.rollout.prefix.node import longest_rows, longest_state

    search = longest_state if self.stock.stateful else longest_rows
    return max((hit for root in self.stock.roots.values() if (hit := search(root, tokens, limit))), key=lambda hit: hit.length, default=None)


def _rows_will_do(root: object, tokens: array[int], limit: int) -> Hit | None:
    from driftline.services.rollout.prefix.node import longest_rows

    hit = longest_rows(root, tokens, limit)  # type: ignore[arg-type]
    return hit if hit is not None and hit.node.has_state else None
