"""The pages that host memory knows, as a tree: page hash -> node, and each node's parent.

A page hash covers all pages before it, so a page has one parent, whoever names it. A node stays while a pool
has bytes of it or a child hangs on it; without bytes of its own it is a *tombstone*. A page may be published
after its parent has left: the parent comes back as a tombstone whose own parent is unknown until somebody
names it.

Nodes are small integers into columns (numpy), the hashes are looked up in one dict: about 200 bytes a page.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

NodeArray = NDArray[np.int64]

ABSENT: Final = -1
"""In place of a node: no such page; in place of a slot: the page has none."""
ROOT: Final = -1
"""In place of a parent: the page is the first of its sequence."""
UNKNOWN: Final = -2
"""In place of a parent: nobody has named it yet."""
_NOWHERE: Final = -3
_NO_NODE: Final = -1

_FIRST_SIZE: Final = 1024


class PageTree:
    """Nodes by page hash.

    Attributes:
        nodes: page hash -> node.
        hashes: node -> page hash, None for a node that is not in use.
        parents: int32 over nodes.
        children: int32 over nodes, how many name it as their parent.
        spaces: int32 over nodes, in how many spaces it has a slot; -1 for a node that is not in use.
        slots: int32, (spaces, nodes); `ABSENT` where the page has no slot.
    """

    __slots__ = ("_unused", "children", "hashes", "nodes", "parents", "slots", "spaces")

    def __init__(self, spaces: int) -> None:
        self.nodes: dict[bytes, int] = {}
        self.hashes: list[bytes | None] = []
        self._unused: list[int] = []
        self.parents = np.empty(0, np.int32)
        self.children = np.empty(0, np.int32)
        self.spaces = np.empty(0, np.int32)
        self.slots = np.empty((spaces, 0), np.int32)

    def __len__(self) -> int:
        return len(self.nodes)

    def find(self, hashes: Sequence[bytes]) -> NodeArray:
        """Return the node of each page, `ABSENT` where there is none; int64, (pages,)."""
        return np.fromiter(map(self.nodes.get, hashes, repeat(ABSENT)), np.int64, len(hashes))

    def slots_of(self, space: int, nodes: NodeArray) -> NDArray[np.int64]:
        """Return the slot of each node in a space, `ABSENT` for what has none; int64, (nodes,)."""
        if not self.hashes:
            return np.full(nodes.size, ABSENT, np.int64)
        slots: NodeArray = self.slots[space][nodes].astype(np.int64)
        slots[nodes < 0] = ABSENT
        return slots

    def ancestors(self, node: int, at_most: int | None = None) -> tuple[list[int], bool]:
        """Return `node` and the nodes above it, and whether the last of them begins its sequence.

        Args:
            node: where to start; `ABSENT` has no ancestors.
            at_most: how many to return.
        """
        parents = self.parents.data
        found: list[int] = []
        while node >= 0 and (at_most is None or len(found) < at_most):
            found.append(node)
            node = parents[node]
        return found, bool(found) and node == ROOT

    def contradiction(self, nodes: NodeArray, parent: bytes | None) -> int | None:
        """Return the first page of a chain that the tree knows under another parent, or None.

        Args:
            nodes: the chain's pages as `find` gives them.
            parent: hash of the page before the first; None where that begins the sequence.
        """
        if not self.hashes or not nodes.size:
            return None
        above = ROOT if parent is None else self.nodes.get(parent, _NOWHERE)
        expected = np.concatenate(([above], np.where(nodes[:-1] < 0, _NOWHERE, nodes[:-1])))
        known = np.where(nodes < 0, UNKNOWN, self.parents[nodes])
        wrong = (known != UNKNOWN) & (known != expected)
        if not wrong.any():
            # A page whose parent was unknown gets one: it must not be its own descendant.
            unnamed = (nodes >= 0) & (known == UNKNOWN)
            if above < 0 or not unnamed.any():
                return None
            wrong = unnamed & np.isin(nodes, self.ancestors(above)[0])
        at = np.flatnonzero(wrong)
        return int(at[0]) if at.size else None

    def add(self, hashes: Sequence[bytes], parent: bytes | None) -> NodeArray:
        """Return the nodes of a chain without contradiction, making those that are missing."""
        above = ROOT if parent is None else int(self.find([parent])[0])
        if parent is not None and above == ABSENT:
            above = int(self._new([parent])[0])
        nodes = self.find(hashes)
        missing = np.flatnonzero(nodes < 0)
        nodes[missing] = self._new([hashes[i] for i in missing.tolist()])
        unnamed = np.flatnonzero(self.parents[nodes] == UNKNOWN)
        parents = np.concatenate(([above], nodes[:-1]))[unnamed]
        self.parents[nodes[unnamed]] = parents
        self.children[parents[parents >= 0]] += 1  # the pages of a chain have distinct parents
        return nodes

    def put(self, space: int, nodes: NodeArray, slots: NDArray[np.int64]) -> None:
        """Give nodes that have no slot in a space one."""
        self.slots[space][nodes] = slots
        self.spaces[nodes] += 1

    def clear(self, space: int, nodes: NodeArray) -> None:
        """Take the slot of nodes in a space away. `prune` comes after it."""
        self.slots[space][nodes] = ABSENT
        self.spaces[nodes] -= 1

    def prune(self, nodes: NodeArray) -> None:
        """Remove those of the nodes that have neither bytes nor children, and what that leaves bare above."""
        parents, children, spaces = self.parents.data, self.children.data, self.spaces.data
        for start in nodes.tolist():
            node = start
            while node >= 0 and spaces[node] == 0 and children[node] == 0:
                above = parents[node]
                self._remove(node)
                spaces[node] = _NO_NODE
                if above >= 0:
                    children[above] -= 1
                node = above

    def _remove(self, node: int) -> None:
        page_hash = self.hashes[node]
        del self.nodes[page_hash]  # type: ignore[arg-type]  # a node in use has a hash
        self.hashes[node] = None
        self._unused.append(node)

    def _new(self, hashes: list[bytes]) -> NodeArray:
        reused = min(len(hashes), len(self._unused))
        fresh = range(len(self.hashes), len(self.hashes) + len(hashes) - reused)
        made = [*(self._unused.pop() for _ in range(reused)), *fresh]
        self.hashes.extend(repeat(None, len(fresh)))
        if len(self.hashes) > self.parents.size:
            self._grow(max(_FIRST_SIZE, len(self.hashes) + len(self.hashes) // 4))
        for node, page_hash in zip(made, hashes, strict=True):
            self.hashes[node] = page_hash
            self.nodes[page_hash] = node
        nodes = np.array(made, np.int64)
        self.parents[nodes] = UNKNOWN
        self.children[nodes] = 0
        self.spaces[nodes] = 0
        self.slots[:, nodes] = ABSENT
        return nodes

    def _grow(self, size: int) -> None:
        more = size - self.parents.size
        self.parents = np.concatenate((self.parents, np.full(more, UNKNOWN, np.int32)))
        self.children = np.concatenate((self.children, np.zeros(more, np.int32)))
        self.spaces = np.concatenate((self.spaces, np.full(more, _NO_NODE, np.int32)))
        rows = self.slots.shape[0]
        self.slots = np.concatenate((self.slots, np.full((rows, more), ABSENT, np.int32)), axis=1)
