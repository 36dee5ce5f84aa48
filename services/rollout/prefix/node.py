"""The tree of what is cached: a node is up to PAGE tokens behind its parent's, and one page.

A full node may have children; a node of fewer tokens is a leaf. A node has its page on the device or on the host, never neither and never both, and the
pages of a device node's ancestors are on the device. Who owns what is counted by `stock.py`; here is only the shape.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from driftline.services.rollout.prefix.extents import Extent
from driftline.services.rollout.prefix.keys import PAGE, CacheKey

__all__ = ["NOTHING", "Hit", "Node", "Routes", "Tokens", "chunk", "digest_of", "longest_rows", "longest_state"]

Tokens: TypeAlias = "array[int] | npt.NDArray[np.int32]"
Routes = npt.NDArray[np.int16]
WIDTH = 4  # bytes of a token
NOTHING = b"\0" * 16


def digest_of(before: bytes, tokens: bytes) -> bytes:
    """Of a page's tokens and, by their digest, all before them."""
    return blake2b(tokens, key=before, digest_size=16).digest()


def chunk(tokens: Tokens, begin: int, end: int) -> bytes:
    return tokens[begin:end].tobytes()


class Node:
    """`tokens`: this node's, as int32 bytes; `end`: tokens up to and with it. `page` 0 and `slot` -1: not on the device. `pins`: leases that stand
    here; `hits`: times something continued from here; `resident`: children with a page on the device. `left`: a sequence ended here; `superseded`: and went
    on, alone."""

    __slots__ = (
        "children", "digest", "end", "entry", "hits", "host_page", "host_state", "key", "left", "lengths", "order", "page", "parent", "pins", "priority", "resident",
        "routes", "slot", "superseded", "tokens", "versions",
    )

    def __init__(
        self, key: CacheKey, parent: Node | None, tokens: bytes, *, page: int = 0, routes: Routes | None = None, versions: tuple[int, ...] = ()
    ) -> None:
        self.key, self.parent, self.tokens = key, parent, tokens
        self.end: int = (parent.end if parent else 0) + len(tokens) // WIDTH
        self.digest: bytes = digest_of(parent.digest, tokens) if parent is not None and self.full else NOTHING
        self.page, self.slot = page, -1
        self.host_page: Extent | None = None
        self.host_state: Extent | None = None
        self.routes, self.versions = routes, versions
        self.children: dict[bytes, Node] = {}
        self.order: list[bytes] = []
        self.lengths: dict[int, int] = {}
        self.pins = self.hits = self.resident = 0
        self.left = self.superseded = False
        self.priority, self.entry = 0.0, 0

    @property
    def count(self) -> int:
        return len(self.tokens) // WIDTH

    @property
    def full(self) -> bool:
        return len(self.tokens) == PAGE * WIDTH

    @property
    def has_state(self) -> bool:
        return self.slot >= 0 or self.host_state is not None

    def add(self, child: Node) -> None:
        self.children[child.tokens] = child
        insort(self.order, child.tokens)
        if not child.full:
            self.lengths[child.count] = self.lengths.get(child.count, 0) + 1
        self.resident += child.page > 0

    def remove(self, child: Node) -> None:
        del self.children[child.tokens]
        del self.order[bisect_left(self.order, child.tokens)]
        if not child.full:
            self.lengths[child.count] -= 1
            if not self.lengths[child.count]:
                del self.lengths[child.count]
        self.resident -= child.page > 0

    def nearest(self, text: bytes) -> list[bytes]:
        """The children's tokens that have most in common with `text`: they stand beside it in order."""
        at = bisect_left(self.order, text)
        return self.order[max(at - 1, 0) : at + 1]

    def path(self) -> list[Node]:
        """From the first node to this one, without the root."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def below(self) -> Iterator[Node]:
        """This node and all under it, children after their parent."""
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()


class Hit(NamedTuple):
    """The first `length` tokens are cached: those before `node`, and as many of its own as are left."""

    node: Node
    length: int

    @property
    def stand(self) -> Node:
        """The last node all of whose page is."""
        node, parent = self.node, self.node.parent
        return node if parent is None or (node.full and self.length == node.end) else parent


def _walk(root: Node, tokens: Tokens, limit: int) -> list[Node]:
    path = [root]
    while path[-1].end + PAGE <= limit:
        child = path[-1].children.get(chunk(tokens, path[-1].end, path[-1].end + PAGE))
        if child is None:
            break
        path.append(child)
    return path


def longest_state(root: Node, tokens: Tokens, limit: int) -> Hit | None:
    """The deepest node within the first `limit` tokens that has a state: pages and state of one position, or nothing."""
    for node in reversed(_walk(root, tokens, limit)):
        for count in sorted(node.lengths, reverse=True):
            if node.end + count <= limit:
                leaf = node.children.get(chunk(tokens, node.end, node.end + count))
                if leaf is not None and leaf.has_state:
                    return Hit(leaf, leaf.end)
        if node.parent is not None and node.has_state:
            return Hit(node, node.end)
    return None


def longest_rows(root: Node, tokens: Tokens, limit: int) -> Hit | None:
    """As `longest_state` of a model whose rows are all there is: any number of a page's rows will do."""
    node = _walk(root, tokens, limit)[-1]
    rest = chunk(tokens, node.end, min(limit, node.end + PAGE))
    best, common = node, 0
    for near in node.nearest(rest):
        same = _common(near, rest)
        if same > common:
            best, common = node.children[near], same
    if not common and node.parent is None:
        return None
    return Hit(best, node.end + common)


def _common(a: bytes, b: bytes) -> int:
    """Tokens that two beginnings share."""
    low, high = 0, min(len(a), len(b)) // WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * WIDTH] == b[: middle * WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low
