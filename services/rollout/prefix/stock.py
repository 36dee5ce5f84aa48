"""Who has which page and slot, and what gives way when there are too few.

Guarantees: a page or slot is written by one owner at most, and is free exactly when nobody refers to it; what is evicted goes to the host tier when that
has room for it at its worth, and otherwise ends with everything that cannot be continued without it. A node of a model with states stays only while a
state at it or under it, or a lease, needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from driftline.services.rollout.prefix.counted import Counted
from driftline.services.rollout.prefix.extents import Extent
from driftline.services.rollout.prefix.host import HostTier, Kind, entry_bytes
from driftline.services.rollout.prefix.keys import CacheKey
from driftline.services.rollout.prefix.node import Node, Routes
from driftline.services.rollout.prefix.ranking import Ranking
from driftline.services.rollout.prefix.storage import Storage

__all__ = ["Moves", "Stock"]


@dataclass
class Moves:
    """Pages and states that were lost, went to the host, and came back, and leaves whose memory a continuation took over."""

    lost_pages: int = 0
    lost_states: int = 0
    demoted_pages: int = 0
    demoted_states: int = 0
    restored_pages: int = 0
    restored_states: int = 0
    taken_over: int = 0


class Stock:
    def __init__(self, storage: Storage, host: HostTier | None) -> None:
        self.storage, self.host = storage, host
        self.stateful = storage.state_bytes > 0
        self.pages = Counted(1, storage.pages - 1)
        self.slots = Counted(0, storage.slots if self.stateful else 0)
        self.roots: dict[CacheKey, Node] = {}
        self.moves = Moves()
        self._floor = 0.0
        self._on_device, self._on_host = Ranking(), Ranking()
        self._unsettled: list[Node] = []

    def root(self, key: CacheKey) -> Node:
        return self.roots.setdefault(key, Node(key, None, b""))

    def alive(self, node: Node) -> bool:
        return node.parent is not None or self.roots.get(node.key) is node

    def attach(self, parent: Node, tokens: bytes, page: int, routes: Routes | None, versions: tuple[int, ...]) -> Node:
        """A new node with its own reference to a page that somebody holds."""
        node = Node(parent.key, parent, tokens, page=self.pages.share(page), routes=routes, versions=versions)
        parent.add(node)
        if not self.stateful:
            self.touch(node)
            parent.entry = 0  # not a leaf any more
        return node

    def give_page(self, node: Node, page: int) -> None:
        """A node of the host gets a page that somebody holds and that has its rows."""
        assert node.parent is not None
        node.page = self.pages.share(page)
        node.parent.resident += 1
        self._free_host_page(node)
        self._rank(node)
        if not self.stateful:
            node.parent.entry = 0

    def replace_page(self, node: Node, page: int) -> None:
        """The same rows that somebody holds anyhow, in place of a copy that is the tree's alone."""
        if self.pages.references(node.page) == 1:
            self.pages.give(node.page)
            node.page = self.pages.share(page)

    def give_state(self, node: Node, slot: int) -> None:
        """A node of the device gets a slot that is its alone."""
        node.slot = slot
        self._free_host_state(node)
        self.touch(node)

    # Worth and order.

    def touch(self, node: Node) -> None:
        """It was used, or made, now."""
        node.priority = self._floor + self._worth(node)
        self._rank(node)

    def _worth(self, node: Node) -> float:
        if node.superseded:
            return 0.0
        if not self.stateful:
            return (1 + node.hits) * node.count / self.storage.page_bytes
        alone, before = 1, node.parent
        while before is not None and before.parent is not None and not before.has_state and len(before.children) == 1:
            alone, before = alone + 1, before.parent
        while before is not None and before.parent is not None and not before.has_state:
            before = before.parent
        lost = node.end - (before.end if before is not None else 0)
        return (1 + node.hits) * lost / (self.storage.state_bytes + alone * self.storage.page_bytes)

    def _rank(self, node: Node) -> None:
        """Enter it where it can be evicted from, if anywhere."""
        node.entry = 0
        if node.parent is None:
            return
        if self.stateful:
            if node.slot >= 0:
                self._on_device.put(node)
            elif node.host_state is not None:
                self._on_host.put(node)
        elif node.pins == 0:
            if node.page and not node.resident:
                self._on_device.put(node)
            elif node.host_page is not None and not node.children:
                self._on_host.put(node)

    def pin(self, node: Node) -> None:
        node.pins += 1
        if not self.stateful:
            node.entry = 0

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        if node.pins or not self.alive(node):
            return
        if self.stateful:
            self._settle(node)
            self._drain()
        else:
            self._rank(node)
            self._tidy(node)

    # Room.

    def reclaim(self, pages: int, slots: int, keep: Node | None = None) -> bool:
        """Evict until so many are free. False: there are not, and what could go is gone. `keep` stays."""
        if pages > self.pages.total or slots > self.slots.total:
            return False
        while self.pages.free < pages or self.slots.free < slots:
            slot_wanted = self.slots.free < slots
            page_wanted = self.pages.free < pages

            def may_go(node: Node, slot: bool = slot_wanted, page: bool = page_wanted) -> bool:
                return node is not keep and ((slot and node.slot >= 0) or (page and self._frees_page(node)))

            victim = self._on_device.least(may_go)
            if victim is None and page_wanted:  # a page of two trees is free once both let go
                victim = self._on_device.least(lambda n: n is not keep and not n.pins and not n.resident)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def spare_slot(self, below: float) -> int | None:
        """A free slot, or that of a node which is worth less."""
        if not self.slots.free:
            victim = self._on_device.least(lambda _: True, below)
            if victim is None:
                return None
            self._evict(victim)
        return self.slots.take()

    def worth_of_state(self, node: Node) -> float:
        return self._floor + self._worth(node)

    def _frees_page(self, node: Node) -> bool:
        return node.pins == 0 and node.resident == 0 and self.pages.references(node.page) == 1

    def _evict(self, node: Node) -> None:
        self._floor = max(self._floor, node.priority)
        if self.stateful:
            slot, node.slot = node.slot, -1
            extents = self._to_host(Kind.STATE, [slot], node.priority) if not node.superseded else None
            self.slots.give(slot)
            if extents is None:
                self.moves.lost_states += 1
            else:
                node.host_state = extents[0]
                self.moves.demoted_states += 1
                self._rank(node)
            self._settle(node)
            self._drain()
            return
        parent = node.parent
        assert parent is not None
        extents = self._to_host(Kind.PAGE, [node.page], node.priority)
        if extents is None:
            self._discard(node)
        else:
            self._leave_device(node, extents[0])
            self._rank(node)
        parent.hits += node.hits  # whoever used the leaf used what is before it
        parent.priority = max(parent.priority, node.priority)
        self._rank(parent)
        self._tidy(parent)

    def _settle(self, node: Node) -> None:
        """Nodes of the device, from here up, that no state of the device and no lease needs."""
        while node.parent is not None and not node.pins and not node.resident and node.slot < 0:
            if not node.page and (node.children or node.host_state is not None):
                return
            if not node.children and node.host_state is None:
                parent = node.parent
                self._discard(node)
                node = parent
                continue
            chain = [node]
            while (up := chain[-1].parent) is not None and up.parent is not None and not up.pins and up.resident == 1 and up.slot < 0:
                chain.append(up)
            chain.reverse()  # parents first, as they come back: ranges in that order are one copy
            worth = max(node.priority, *(c.priority for c in chain))
            extents = self._to_host(Kind.PAGE, [n.page for n in chain], worth)
            top = chain[0].parent
            assert top is not None
            if extents is None:
                self._discard(chain[0])
            else:
                for gone, extent in zip(chain, extents, strict=True):
                    self._leave_device(gone, extent)
                self._settle_host(node)
            node = top
        self._tidy(node)

    def _settle_host(self, node: Node) -> None:
        """Nodes of the host, from here up, under which there is no state any more."""
        while node.parent is not None and not node.page and not node.pins and not node.children and node.host_state is None:
            parent = node.parent
            self._discard(node)
            node = parent
        if node.page:
            self._unsettled.append(node)  # it may stand in the middle of a move
        self._tidy(node)

    def _drain(self) -> None:
        while self._unsettled:
            node = self._unsettled.pop()
            if self.alive(node):
                self._settle(node)

    def _tidy(self, node: Node) -> None:
        if node.parent is None and not node.children and not node.pins and self.roots.get(node.key) is node:
            del self.roots[node.key]

    # The host.

    def _to_host(self, kind: Kind, numbers: Sequence[int], worth: float) -> list[Extent] | None:
        """None: there is no host tier, or what it has is worth more."""
        if self.host is None:
            return None
        export: Callable[[Sequence[int]], list[torch.Tensor]] = self.storage.export_pages if kind is Kind.PAGE else self.storage.export_states
        tensors = export(numbers)
        size = entry_bytes(tensors)
        if size * len(numbers) > self.host.budget:
            return None
        extents: list[Extent] = []
        for _ in numbers:
            while (extent := self.host.take(size)) is None:
                victim = self._on_host.least(lambda n: n.pins == 0, worth)
                if victim is None:
                    for taken in extents:
                        self.host.give(taken)
                    return None
                self._lose(victim)
            extents.append(extent)
        self.host.put(kind, extents, tensors)
        return extents

    def _lose(self, node: Node) -> None:
        """The host forgets it."""
        if self.stateful:
            self._free_host_state(node)
            self.moves.lost_states += 1
            self._settle_host(node)
            return
        parent = node.parent
        assert parent is not None
        self._discard(node)
        self._rank(parent)
        self._tidy(parent)

    def _leave_device(self, node: Node, extent: Extent) -> None:
        assert node.parent is not None
        self.pages.give(node.page)
        node.page, node.host_page = 0, extent
        node.parent.resident -= 1
        self.moves.demoted_pages += 1

    def restore(self, nodes: Sequence[Node]) -> None:
        """Pages of nodes of the host, parents first, back to the device; there is room."""
        if not nodes:
            return
        pages = [self.pages.take() for _ in nodes]
        self.load_pages([n.host_page for n in nodes if n.host_page is not None], pages)
        for node, page in zip(nodes, pages, strict=True):
            self.give_page(node, page)
            self.pages.give(page)

    def load_pages(self, extents: Sequence[Extent], pages: Sequence[int]) -> None:
        assert self.host is not None
        self.host.get(Kind.PAGE, extents, lambda tensors: self.storage.import_pages(pages, tensors, non_blocking=True))
        self.moves.restored_pages += len(pages)

    def load_state(self, extent: Extent, slot: int) -> None:
        assert self.host is not None
        self.host.get(Kind.STATE, [extent], lambda tensors: self.storage.import_states([slot], tensors, non_blocking=True))
        self.moves.restored_states += 1

    def _free_host_page(self, node: Node) -> None:
        if node.host_page is not None and self.host is not None:
            self.host.give(node.host_page)
            node.host_page = None

    def _free_host_state(self, node: Node) -> None:
        if node.host_state is not None and self.host is not None:
            self.host.give(node.host_state)
            node.host_state = None

    # Ends.

    def _discard(self, node: Node) -> None:
        """It and all under it."""
        assert node.parent is not None
        node.parent.remove(node)
        for gone in list(node.below()):
            self.moves.lost_pages += 1
            self._release(gone)

    def forget(self, key: CacheKey) -> None:
        root = self.roots.pop(key)
        for node in list(root.below()):
            self._release(node)

    def take_over(self, node: Node) -> tuple[int, int]:
        """Page and slot of a partial leaf that one lease continues; the leaf ends."""
        page, slot = node.page, node.slot
        assert node.parent is not None
        node.parent.remove(node)
        node.page, node.slot = 0, -1
        self._release(node)
        self.moves.taken_over += 1
        return page, slot

    def take_state(self, node: Node) -> int:
        """The slot of a node that goes on without it."""
        slot, node.slot = node.slot, -1
        self._rank(node)  # where it stood it would be asked for the state that it has not
        self.moves.taken_over += 1
        return slot

    def drop_beginnings(self, leaf: Node) -> None:
        """Leaves beside `leaf` that it begins with: their rows are among its own."""
        parent = leaf.parent
        assert parent is not None
        for count in sorted(parent.lengths):
            other = parent.children.get(leaf.tokens[: 4 * count])
            if other is not None and other is not leaf and not other.pins:
                leaf.hits += other.hits
                self._discard(other)

    def _release(self, node: Node) -> None:
        node.entry = 0
        node.parent = None
        node.children = {}
        if node.page:
            self.pages.give(node.page)
            node.page = 0
        if node.slot >= 0:
            self.slots.give(node.slot)
            node.slot = -1
        self._free_host_page(node)
        self._free_host_state(node)
