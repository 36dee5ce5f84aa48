"""The books against the goods: every reference counted again from leases and tree, every extent against its neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from driftline.messages.errors import IntegrityError
from driftline.services.rollout.prefix.counted import Counted
from driftline.services.rollout.prefix.extents import Extent
from driftline.services.rollout.prefix.lease import Lease
from driftline.services.rollout.prefix.node import Node
from driftline.services.rollout.prefix.stock import Stock

__all__ = ["audit"]


def audit(stock: Stock, leases: Iterable[Lease]) -> None:
    """IntegrityError at the first thing that is not so. Reads all of the cache: for tests."""
    pages: Counter[int] = Counter()
    slots: Counter[int] = Counter()
    stands: Counter[int] = Counter()
    extents: list[Extent] = []
    for lease in leases:
        pages.update(lease.pages)
        if stock.stateful:
            slots[lease.slot] += 1
        if lease.at is not None:
            stands[id(lease.at)] += 1
        _so(len(set(lease.pages)) == len(lease.pages), "a lease has a page twice", lease.pages)
    for key, root in stock.roots.items():
        _so(bool(root.children) or root.pins > 0, "an empty tree was kept", key)
        for node in root.below():
            _so(node.key == key, "a node stands in another key's tree", node.key)
            _so(node.pins == stands[id(node)], "pins are not the leases that stand there", node.pins)
            _node(stock, node)
            if node.parent is None:
                continue
            if node.page:
                pages[node.page] += 1
            if node.slot >= 0:
                slots[node.slot] += 1
            extents += [e for e in (node.host_page, node.host_state) if e is not None]
    _counted("pages", stock.pages, pages, 1)
    _counted("slots", stock.slots, slots, 0)
    _so(not [s for s, n in slots.items() if n > 1], "a slot has two owners", slots)
    _host(stock, extents)


def _node(stock: Stock, node: Node) -> None:
    resident = sum(child.page > 0 for child in node.children.values())
    _so(node.resident == resident, "resident children are miscounted", node.resident)
    _so(sorted(node.children) == node.order, "children are out of order", node.end)
    short = Counter(c.count for c in node.children.values() if not c.full)
    _so(short == Counter(node.lengths), "lengths of leaves are miscounted", node.lengths)
    for tokens, child in node.children.items():
        _so(child.parent is node and child.tokens == tokens and child.end == node.end + child.count, "a child is not its parent's", child.end)
    if node.parent is None:
        return
    _so((node.page > 0) != (node.host_page is not None), "a node has its page in one place", (node.page, node.host_page))
    _so(node.slot < 0 or node.host_state is None, "a node has its state in one place", node.slot)
    _so(node.full or not node.children, "a page that is not full was continued", node.count)
    if node.page:
        _so(node.parent.parent is None or node.parent.page > 0, "a device page behind one that is not", node.end)
    if node.slot >= 0:
        _so(node.page > 0, "a state without its page", node.end)
    if stock.stateful:
        _so(node.has_state or bool(node.children) or node.pins > 0, "a node that nothing can be continued from", node.end)


def _counted(what: str, counted: Counted, owners: Counter[int], first: int) -> None:
    for number in range(first, first + counted.total):
        _so(counted.references(number) == owners[number], f"{what}: references of {number}", (counted.references(number), owners[number]))
    _so(counted.free == counted.total - len(+owners), f"{what} are lost", counted.free)


def _host(stock: Stock, extents: list[Extent]) -> None:
    if stock.host is None:
        _so(not extents, "host rows without a host tier", extents)
        return
    _so(sum(e.size for e in extents) == stock.host.used, "host bytes are miscounted", stock.host.used)
    end = 0
    for extent in sorted([*extents, *stock.host.gaps()]):
        _so(extent.start == end, "host ranges overlap or are lost", extent)
        end += extent.size
    _so(end == stock.host.budget, "host ranges do not fill the tier", end)


def _so(holds: bool, problem: str, value: object) -> None:
    if not holds:
        raise IntegrityError(problem, field="prefix cache", value=value, remedy="a fault in services/rollout/prefix")
