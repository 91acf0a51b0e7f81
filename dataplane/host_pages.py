"""The pages in host memory: tree, slots and the translation between spaces, kept in step.

Every change of what is resident goes through `settle` and `vacate` here, so that no caller can move one of
the three without the others.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataplane.host_ages import SlotArray
from dataplane.host_answers import Evicted, PageSlots
from dataplane.host_ledger import NO_SLOT, HoldKind, Taken
from dataplane.host_slots import SlotSpace
from dataplane.host_spaces import Spaces
from dataplane.host_tree import NodeArray, PageTree
from metadata.hit_policy import PageMask

_FULL = 0
"""The anchor's space, or the first where there is no anchor."""


class ResidentPages:
    """What is resident where.

    Attributes:
        layout: the slot spaces.
        tree: the pages.
        spaces: their slots, in the order of the layout.
        translation: int32, (spaces, slots of the first space): for each slot of the first space the slot that
            its page has in the other ones, `NO_SLOT` where it has none.
    """

    def __init__(self, layout: Spaces) -> None:
        self.layout = layout
        self.tree = PageTree(len(layout.names))
        self.spaces = [SlotSpace(capacity) for capacity in layout.capacities]
        self.translation = np.full((len(self.spaces), layout.capacities[_FULL]), NO_SLOT, np.int32)

    def presence(self, pool: str, nodes: NodeArray) -> PageMask:
        """Return at which nodes a pool's bytes are there."""
        info = self.layout.pools[pool]
        return self._has(info.space, self.tree.slots_of(info.space, nodes), info.bits)

    def slots(self, pools: Sequence[str], nodes: NodeArray) -> PageSlots:
        """Return for each pool the slot of each node that has its bytes."""
        found: PageSlots = {}
        for name in pools:
            info = self.layout.pools[name]
            slots = self.tree.slots_of(info.space, nodes)
            found[name] = np.where(self._has(info.space, slots, info.bits), slots, NO_SLOT)
        return found

    def complete(self, space: int, nodes: NodeArray, bits: NDArray[np.uint64]) -> SlotArray:
        """Return each node's slot where it has all of the bits, else `NO_SLOT`; no bits are never asked."""
        slots = self.tree.slots_of(space, nodes)
        return np.where((bits != 0) & self._has(space, slots, bits), slots, NO_SLOT)

    def above(self, parent: bytes | None) -> NodeArray:
        """Return the nodes from the start of the sequence to `parent`, as far as the tree can name them."""
        return self._upwards(parent, None)[0]

    def before(self, parent: bytes | None, pages: int) -> NodeArray:
        """Return the nodes of the last `pages` pages that end with `parent`; all of them if there are fewer.

        Pages that the tree cannot name are `ABSENT`: nobody knows that they do not exist.
        """
        found, whole = self._upwards(parent, pages)
        unknown = 0 if whole else pages - found.size
        return np.concatenate((np.full(unknown, NO_SLOT, np.int64), found))

    def covered(self, space: int, nodes: NodeArray) -> SlotArray:
        """Return the slots that a lock on a prefix holds in a space, first page first.

        All of the prefix, or the window that ends at its last page. A tombstone in the window is skipped, the
        window does not reach further back for it: a prefix needs these pages and no others.

        Args:
            space: which.
            nodes: of all pages of the prefix, `ABSENT` for pages that are not there.
        """
        window = self.layout.windows[space]
        slots = self.tree.slots_of(space, nodes if window is None else nodes[-window:])
        return slots[slots >= 0]

    def take(self, kind: HoldKind, space: int, slots: SlotArray) -> Taken:
        """Lock or pin resident slots and return what a release has to replay."""
        of = self.spaces[space]
        if kind is HoldKind.HOST_LOCK:
            of.lock(slots)
        else:
            of.pin(slots)
        return Taken(space, slots, of.generation[slots])

    def give(self, kind: HoldKind, taken: Taken) -> None:
        """Undo exactly one `take`; what nothing holds any more returns to the young end."""
        of = self.spaces[taken.space]
        if kind is HoldKind.HOST_LOCK:
            idle = of.unlock(taken.slots, taken.generations)
        else:
            idle = of.unpin(taken.slots, taken.generations)
        of.ages.enter(idle)

    def settle(self, space: int, nodes: NodeArray, slots: SlotArray, held: NDArray[np.uint64]) -> None:
        """Make reserved slots the nodes' own. The nodes have none there; ages are the caller's."""
        self.tree.put(space, nodes, slots)
        self.spaces[space].settle(slots, nodes, held)
        full = self.tree.slots_of(_FULL, nodes)
        there = full >= 0
        for other in range(len(self.spaces)) if space == _FULL else (space,):
            self.translation[other][full[there]] = self.tree.slots_of(other, nodes[there])

    def vacate(self, space: int, slots: SlotArray) -> NodeArray:
        """Make resident slots that have left the order of age free, and return their nodes to be pruned."""
        nodes = self.spaces[space].page[slots].astype(np.int64)
        full = self.tree.slots_of(_FULL, nodes)
        for other in range(len(self.spaces)) if space == _FULL else (space,):
            self.translation[other][full[full >= 0]] = NO_SLOT
        self.tree.clear(space, nodes)
        self.spaces[space].vacate(slots)
        return nodes

    def evict(self, space: int, count: int) -> Evicted:
        """Evict up to `count` pages that nothing holds from a space, oldest first."""
        nodes = self.vacate(space, self.spaces[space].ages.take_oldest(count))
        hashes = [self.tree.hashes[node] for node in nodes.tolist()]
        self.tree.prune(nodes)
        names = self.layout.members[space]
        return Evicted(names[0], names, [h for h in hashes if h is not None])

    def _upwards(self, parent: bytes | None, at_most: int | None) -> tuple[NodeArray, bool]:
        if parent is None:
            return np.empty(0, np.int64), True
        found, whole = self.tree.ancestors(self.tree.nodes.get(parent, NO_SLOT), at_most)
        return np.array(found[::-1], np.int64), whole

    def _has(self, space: int, slots: SlotArray, bits: NDArray[np.uint64] | np.uint64) -> PageMask:
        found: PageMask = (slots >= 0) & ((self.spaces[space].held[slots] & bits) == bits)
        return found
