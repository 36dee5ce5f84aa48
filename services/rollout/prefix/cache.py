"""The prefix cache: which tokens need not be computed, and who may write where.

Guarantees: a hit gives rows and state of one and the same position, of exactly these tokens, computed under a key that the caller named, or it is a
miss; rows that more than one version wrote are never filed where a new prompt looks; a leased page is freed only by its leases, and written by one of
them alone; a state that is copied is one that was folded. Not thread-safe: the engine's thread is its only caller.

A sequence: `begin` -> (`grow`, compute, `commit`)* -> `end`. What it leaves in the tree is evicted by worth (ranking.py), so the cache fills the pool and
never refuses a lease for what is merely cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from driftline.messages.errors import IntegrityError
from driftline.services.rollout.prefix.audit import audit
from driftline.services.rollout.prefix.branches import Branches
from driftline.services.rollout.prefix.host import HostTier
from driftline.services.rollout.prefix.keys import PAGE, CacheKey
from driftline.services.rollout.prefix.lease import Lease, Parked
from driftline.services.rollout.prefix.node import (
    Hit,
    Node,
    Routes,
    Tokens,
    chunk,
    longest_rows,
    longest_state,
)
from driftline.services.rollout.prefix.stats import Stats
from driftline.services.rollout.prefix.stock import Stock
from driftline.services.rollout.prefix.storage import Storage

__all__ = ["PrefixCache"]


class PrefixCache:
    """Of `pool`'s pages and slots, all of which it hands out. `enabled` False: nothing is kept, and leases and forks work as ever. `routed`: what is filed
    has routes, so that a hit has them. `host`: where evicted rows go."""

    def __init__(self, pool: Storage, *, enabled: bool = True, host: HostTier | None = None, routed: bool = False) -> None:
        self.enabled, self.routed = enabled, routed
        self.stock = Stock(pool, host if enabled else None)
        self.leases: set[Lease] = set()
        self._pool = pool
        self._held: Counter[int] = Counter()  # leases that have a page
        self._branches = Branches()
        self._hits = self._misses = self._hit_tokens = self._missed_tokens = 0

    def begin(self, keys: Sequence[CacheKey], tokens: Tokens) -> Lease | None:
        """A lease on the longest cached beginning of `tokens` (int32, at least one) under one of `keys`, the first where they are equal, and of at most
        all tokens but the last: something must be computed to go on from. None: no memory, even after eviction. ValueError for no tokens, no keys."""
        _checked(tokens)
        if not len(tokens) or not keys:
            raise ValueError(f"{len(tokens)} tokens under {len(keys)} keys: a sequence has a token and a key at least")
        lease = self._begin(keys, tokens, len(tokens) - 1, take_over=False)
        if lease is not None:
            self._hits += lease.hit > 0
            self._misses += lease.hit == 0
            self._hit_tokens += lease.hit
            self._missed_tokens += len(tokens) - lease.hit
            if self.enabled and self.stock.stateful:
                stand = lease.at
                self._branches.see(keys[0], tokens, *((stand.end, stand.digest) if stand is not None else ()))
        return lease

    def length_of_hit(self, keys: Sequence[CacheKey], tokens: Tokens) -> int:
        """What `begin` would find now, without taking it."""
        _checked(tokens)
        hit = self._find(keys, tokens, len(tokens) - 1)
        return hit.length if hit else 0

    def snapshot_at(self, keys: Sequence[CacheKey], tokens: Tokens) -> int | None:
        """Where the prefill of a prompt had better stop and `commit`, beyond what it hits: a multiple of PAGE at which it and prompts before it part, or
        before which the same prompt ended. None for a model without states: all its rows can be continued."""
        _checked(tokens)
        if not self.enabled or not self.stock.stateful or not keys:
            return None
        hit = self._find(keys, tokens, len(tokens) - 1)
        return self._branches.parting(tokens, hit.stand.end, hit.stand.digest) if hit else self._branches.parting(tokens)

    def grow(self, lease: Lease, length: int) -> bool:
        """Pages for `length` tokens. False: no memory, even after eviction; the lease is as it was."""
        self._open(lease)
        more = _pages(length) - len(lease.pages)
        if more <= 0:
            return True
        if not self.stock.reclaim(more, 0):
            return False
        fresh = [self.stock.pages.take() for _ in range(more)]
        lease.pages += fresh
        self._held.update(fresh)
        return True

    def fork(self, lease: Lease, length: int) -> Lease | None:
        forks = self.forks(lease, length, 1)
        return forks[0] if forks else None

    def forks(self, lease: Lease, length: int, count: int) -> list[Lease] | None:
        """`count` more sequences that go on behind the same `length` tokens, which are all computed, with the state exactly there. Full pages are shared, a
        page begun and the state are copied. None: no memory for all of them."""
        self._open(lease)
        self._covered(lease, length)
        stock, shared, partial = self.stock, lease.pages[: length // PAGE], length % PAGE > 0
        if not stock.reclaim(count * partial, count * stock.stateful):
            return None
        made: list[Lease] = []
        for _ in range(count):
            pages = [stock.pages.share(page) for page in shared] + [stock.pages.take() for _ in range(partial)]
            slot = stock.slots.take() if stock.stateful else 0
            made.append(Lease(slot, pages, lease.hit, lease.routes, lease.versions, lease.key, writers=set(lease.writers)))
            if lease.at is not None and self.stock.alive(lease.at):
                self._stand(made[-1], lease.at)
            made[-1].source = lease.source
        if partial:
            self._pool.copy_pages([lease.pages[length // PAGE]] * count, [fork.pages[-1] for fork in made])
        if stock.stateful:
            self._pool.copy_states([lease.slot] * count, [fork.slot for fork in made])
        for fork in made:
            self._lent(fork)
        return made

    def commit(
        self, lease: Lease, key: CacheKey, tokens: Tokens, length: int, *, routes: Routes | None = None, versions: Sequence[int] | None = None,
        keep: bool = False,
    ) -> None:
        """tokens[:length] are in the lease's pages, and its state is exactly there, folded. Full pages are filed under `key`, which is what computed every
        row so far (a key `of_mixed` for more than one); where `length` is a multiple of PAGE and it is worth its bytes, or `keep` says that others wait for it, the state too, as a copy.

        routes int16 [>= length, layers, k] of the tokens; `versions` [>= length] under a mixed key. Raises ValueError for rows of another key or tokens
        that are not the lease's.
        """
        self._open(lease)
        if self.enabled:
            node = self._file(lease, key, tokens, length, routes, versions)
            if self.stock.stateful and length == node.end and node.parent is not None and node.slot < 0 and (keep or self._worth_a_state(node, tokens)):
                slot = self.stock.spare_slot(float("inf") if keep else self.stock.worth_of_state(node))
                if slot is not None:
                    self._pool.copy_states([lease.slot], [slot])
                    self.stock.give_state(node, slot)

    def end(
        self, lease: Lease, key: CacheKey | None = None, tokens: Tokens | None = None, length: int = 0, *, routes: Routes | None = None,
        versions: Sequence[int] | None = None,
    ) -> None:
        """Give everything back. With `key`, as for `commit`, tokens[:length] stay as a leaf of any length: page and state are handed over, not copied."""
        self._open(lease)
        if key is not None and tokens is not None and self.enabled and length:
            self._keep(lease, key, tokens, length, routes, versions)
        self._release(lease)

    def preempt(
        self, lease: Lease, key: CacheKey, tokens: Tokens, length: int, *, routes: Routes | None = None, versions: Sequence[int] | None = None
    ) -> Parked:
        """`end` with a note of how to go on. What it leaves gives way like any other leaf: to the host tier, or for good where there is none."""
        self.end(lease, key, tokens, length, routes=routes, versions=versions)
        return Parked(key, tokens[:length], length)

    def restore(self, parked: Parked) -> Lease | None:
        """Go on: a lease whose `hit` tokens are there, up to all `length` of them; the others must be computed again. None: no memory."""
        return self._begin([parked.key], parked.tokens, parked.length, take_over=True)

    def forget(self, predicate: Callable[[CacheKey], bool]) -> int:
        """Drop what was computed under such keys; leases keep their pages. Returns the number of keys."""
        keys = [key for key in self.stock.roots if predicate(key)]
        for key in keys:
            self.stock.forget(key)
        return len(keys)

    def reset(self) -> None:
        """Give back every lease and drop everything: after a step that raised, no row is to be trusted."""
        for lease in tuple(self.leases):
            self._release(lease)
        self.forget(lambda _: True)

    @property
    def available(self) -> int:
        """Pages that no lease holds: free, or to be had by eviction, but for the few of a path that a lease has rows of its own of. An estimate for whoever
        admits; `grow` has the last word."""
        return self.stock.pages.total - len(self._held)

    def check(self) -> None:
        """Count everything again. IntegrityError where a reference, a byte or an order is not as it must be."""
        audit(self.stock, self.leases)
        if self._held != Counter(page for lease in self.leases for page in lease.pages):
            raise IntegrityError("held pages are miscounted", field="prefix cache", value=len(self._held), remedy="a fault in services/rollout/prefix")

    @property
    def stats(self) -> Stats:
        return Stats.of(self.stock, len(self._held), len(self.leases), self._hits, self._misses, self._hit_tokens, self._missed_tokens)

    # How it is done.

    def _find(self, keys: Sequence[CacheKey], tokens: Tokens, limit: int) -> Hit | None:
        best: Hit | None = None
        search = longest_state if self.stock.stateful else longest_rows
        for key in keys:
            root = self.stock.roots.get(key)
            hit = search(root, tokens, limit) if root is not None else None
            if hit is not None and (best is None or hit.length > best.length):
                best = hit
        return best

    def _begin(self, keys: Sequence[CacheKey], tokens: Tokens, limit: int, *, take_over: bool) -> Lease | None:
        hit = self._find(keys, tokens, limit) if self.enabled and limit > 0 else None
        lease = self._lease(hit, take_over) if hit is not None else None
        if lease is None:  # nothing there, or no room for its copy beside it
            if not self.stock.reclaim(0, int(self.stock.stateful)):
                return None
            lease = Lease(self.stock.slots.take() if self.stock.stateful else 0, [])
            if self.stock.stateful:
                self._pool.clear_states([lease.slot])
        self._lent(lease)
        return lease

    def _lease(self, hit: Hit, take_over: bool) -> Lease | None:
        node, stock = hit.node, self.stock
        path = node.path()
        key, versions, routes = node.key, _versions(path), _routes(path, hit.length)
        shared, partial, stand = path[: hit.length // PAGE], hit.length % PAGE > 0, hit.stand
        anchor = next((n for n in reversed(path) if n.page), stock.root(key))
        missing = [n for n in shared if not n.page]
        pinned = (node, anchor, stand)
        for held in pinned:
            stock.pin(held)
        # A leaf that only this sequence continues: where there is no room for a copy beside it, or none is wanted, it goes over as it is.
        whole = not node.full and node.page > 0 and hit.length == node.end and stock.pages.references(node.page) == 1 and not node.children
        room = not (whole and take_over) and stock.reclaim(len(missing) + partial, int(stock.stateful), node)
        lease: Lease | None = None
        if room:
            stock.restore(missing)
            pages = [stock.pages.share(n.page) for n in shared]
            if partial:
                pages.append(self._copied_page(node))
            lease = Lease(self._copied_state(node) if stock.stateful else 0, pages)
            node.hits, node.superseded = node.hits + 1, False
            stock.touch(node)
        elif whole and (node.slot >= 0 or not stock.stateful):
            page, slot = stock.take_over(node)
            lease = Lease(max(slot, 0), [*(stock.pages.share(n.page) for n in shared), page])
        elif stock.stateful and node.full and node.slot >= 0 and not missing:
            lease = Lease(stock.take_state(node), [stock.pages.share(n.page) for n in shared])
        if lease is not None:
            lease.hit, lease.key, lease.versions, lease.routes, lease.writers = hit.length, key, versions, routes, {key}
            lease.source = node if node.left or not node.full else None
            self._stand(lease, stand)
        for held in pinned:
            stock.unpin(held)
        return lease

    def _copied_page(self, node: Node) -> int:
        page = self.stock.pages.take()
        if node.page:
            self._pool.copy_pages([node.page], [page])
        elif node.host_page is not None:
            self.stock.load_pages([node.host_page], [page])
        return page

    def _copied_state(self, node: Node) -> int:
        slot = self.stock.slots.take()
        if node.slot >= 0:
            self._pool.copy_states([node.slot], [slot])
        elif node.host_state is not None:
            self.stock.load_state(node.host_state, slot)
        return slot

    def _file(
        self, lease: Lease, key: CacheKey, tokens: Tokens, length: int, routes: Routes | None, versions: Sequence[int] | None
    ) -> Node:
        """The full pages of tokens[:length] in the tree; the lease stands at the last."""
        _checked(tokens)
        self._covered(lease, length)
        if length > len(tokens):
            raise ValueError(f"{length} of {len(tokens)} tokens are computed: give all that are")
        if self.routed and (routes is None or len(routes) < length):
            raise ValueError(f"routes of {0 if routes is None else len(routes)} of {length} tokens: a cache made with routed=True files every token's")
        others = lease.writers - {key}
        if others and not key.mixed:
            raise ValueError(f"rows of {sorted(others)} cannot be filed under {key}: give CacheKey.of_mixed")
        lease.writers.add(key)
        at = lease.at
        if at is None or at.key != key or not self.stock.alive(at):
            at = self.stock.root(key)
        if at.end > length or (at.end and chunk(tokens, at.end - at.count, at.end) != at.tokens):
            raise ValueError(f"tokens[:{length}] are not those that this lease filed up to {at.end}")
        node = at
        self.stock.pin(at)
        while node.end + PAGE <= length:
            page, text = lease.pages[node.end // PAGE], chunk(tokens, node.end, node.end + PAGE)
            child = node.children.get(text)
            if child is None:
                child = self.stock.attach(node, text, page, *_of(node.end, node.end + PAGE, key, routes, versions))
            elif not child.page:
                self.stock.give_page(child, page)
            elif child.page != page:
                self.stock.replace_page(child, page)
            node = child
        self._stand(lease, node)
        self.stock.unpin(at)
        return node

    def _keep(self, lease: Lease, key: CacheKey, tokens: Tokens, length: int, routes: Routes | None, versions: Sequence[int] | None) -> None:
        stock = self.stock
        node = self._file(lease, key, tokens, length, routes, versions)
        if length > node.end:
            text = chunk(tokens, node.end, length)
            leaf = node.children.get(text)
            if stock.stateful or not any(other.startswith(text) for other in node.nearest(text)):
                if leaf is None:
                    leaf = stock.attach(node, text, lease.pages[node.end // PAGE], *_of(node.end, length, key, routes, versions))
                    if not stock.stateful:
                        stock.drop_beginnings(leaf)
                elif not leaf.page:
                    stock.give_page(leaf, lease.pages[node.end // PAGE])
            node = leaf if leaf is not None else node
        if stock.stateful and node.parent is not None and node.slot < 0:
            node.left = True
            stock.give_state(node, lease.slot)
            lease.slot = -1
        source = lease.source
        if source is not None and source.parent is not None and source is not node and source.hits <= 1 and source.end < length:
            source.superseded = True  # its sequence went on, and nobody else came by
            stock.touch(source)

    def _worth_a_state(self, node: Node, tokens: Tokens) -> bool:
        """Others part here, or so many pages lie behind the last state that one more costs no more than they do."""
        if self._branches.parts_at(node.digest, chunk(tokens, node.end, node.end + PAGE)):
            return True
        before, pages = node.parent, 1
        while before is not None and before.parent is not None and not before.has_state:
            before, pages = before.parent, pages + 1
        return pages * self._pool.page_bytes >= self._pool.state_bytes

    def _stand(self, lease: Lease, node: Node) -> None:
        self.stock.pin(node)
        if lease.at is not None:
            self.stock.unpin(lease.at)
        lease.at = node

    def _lent(self, lease: Lease) -> None:
        self.leases.add(lease)
        self._held.update(lease.pages)

    def _release(self, lease: Lease) -> None:
        for page in lease.pages:
            self.stock.pages.give(page)
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]
        if self.stock.stateful and lease.slot >= 0:
            self.stock.slots.give(lease.slot)
        if lease.at is not None:
            self.stock.unpin(lease.at)
        lease.pages, lease.slot, lease.at, lease.source, lease.ended = [], -1, None, None, True
        self.leases.discard(lease)

    def _open(self, lease: Lease) -> None:
        if lease.ended or lease not in self.leases:
            raise ValueError("this lease has ended: its pages and its slot may be another's by now")

    def _covered(self, lease: Lease, length: int) -> None:
        if not 0 <= length <= len(lease.pages) * PAGE:
            raise ValueError(f"{length} tokens and {len(lease.pages)} pages of {PAGE}: grow the lease before it is filled")


def _pages(length: int) -> int:
    return -(-length // PAGE)


def _checked(tokens: Tokens) -> None:
    if tokens.itemsize != 4:
        raise ValueError(f"tokens of {tokens.itemsize} bytes: give array('i') or int32")


def _of(begin: int, end: int, key: CacheKey, routes: Routes | None, versions: Sequence[int] | None) -> tuple[Routes | None, tuple[int, ...]]:
    """Routes and writers of some tokens, as copies."""
    if key.mixed and versions is None:
        raise ValueError(f"{key} without versions: rows of several versions say whose each one is")
    wrote = (key.version,) if versions is None else tuple(sorted(set(versions[begin:end])))
    return (None if routes is None else np.array(routes[begin:end], dtype=np.int16)), wrote


def _versions(path: Sequence[Node]) -> tuple[int, ...]:
    return tuple(sorted({version for node in path for version in node.versions}))


def _routes(path: Sequence[Node], length: int) -> Routes | None:
    parts = [node.routes for node in path if node.routes is not None]
    return np.concatenate(parts)[:length] if parts and len(parts) == len(path) else None
