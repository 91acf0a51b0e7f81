"""Walks all of the host tier's books and says what is broken (M4).

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dataplane.host_ages import OUT
from dataplane.host_ledger import NO_SLOT, HoldKind, Ledger
from dataplane.host_pages import ResidentPages
from dataplane.host_slots import FREE, QUARANTINED, RESERVED, RESIDENT, SlotSpace
from dataplane.host_tree import ROOT, UNKNOWN, PageTree


def broken_rules(pages: ResidentPages, ledger: Ledger) -> list[str]:
    """Return a sentence for each rule that does not hold."""
    broken = list(_tree(pages.tree))
    broken += _sessions(ledger)
    for index, space in enumerate(pages.spaces):
        name = pages.layout.names[index]
        found = [
            *_states(space),
            *_places(pages.tree, index, space),
            *_ages(space),
            *_holds(index, space, ledger),
            *_reservations(index, space, ledger),
            *_translation(pages, index),
        ]
        broken += [f"{name}: {sentence}" for sentence in found]
    return broken


def _tree(tree: PageTree) -> Iterator[str]:
    used = np.array([h is not None for h in tree.hashes], np.bool_)
    size = used.size
    nodes = np.flatnonzero(used)
    if len(tree.nodes) != nodes.size or any(tree.hashes[n] != h for h, n in tree.nodes.items()):
        yield "hashes and nodes do not name each other"
    parents, spaces = tree.parents[:size], tree.spaces[:size]
    above = parents[nodes]
    if ((above < UNKNOWN) | (above >= size)).any() or not used[above[above >= 0]].all():
        yield "a page's parent is no page"
        return
    children = np.bincount(above[above >= 0], minlength=size)
    if (tree.children[:size][nodes] != children[nodes]).any():
        yield "a page's count of children is wrong"
    if (spaces[nodes] != (tree.slots[:, nodes] >= 0).sum(axis=0)).any():
        yield "a page's count of slots is wrong"
    if ((spaces[nodes] == 0) & (children[nodes] == 0)).any():
        yield "a page without bytes and children is still there"
    if (spaces[~used] != NO_SLOT).any():
        yield "a node that is not in use counts slots"
    if _has_cycle(parents, nodes):
        yield "a page is its own ancestor"


def _has_cycle(parents: NDArray[np.int32], nodes: NDArray[np.int64]) -> bool:
    """Double the step up until everything is past its root, or has gone further than there are pages."""
    up = np.append(parents, ROOT).astype(np.int64)
    up[up < 0] = parents.size
    up[parents.size] = parents.size
    for _ in range(int(nodes.size).bit_length()):
        up = up[up]
    return bool((up[nodes] != parents.size).any())


def _states(space: SlotSpace) -> Iterator[str]:
    counts = np.bincount(space.state, minlength=QUARANTINED + 1)
    if counts.size > QUARANTINED + 1:
        yield "a slot has no known state"
    free = space.free_slots()
    if free.size != counts[FREE] or np.unique(free).size != free.size or (space.state[free] != FREE).any():
        yield "the free slots are not those in the list"
    if space.resident != counts[RESIDENT]:
        yield "the count of resident slots is wrong"


def _places(tree: PageTree, index: int, space: SlotSpace) -> Iterator[str]:
    resident = space.state == RESIDENT
    if (resident != (space.page != NO_SLOT)).any() or (resident != (space.held != 0)).any():
        yield "a slot has a page or pools without being resident, or is resident without"
        return
    slots = np.flatnonzero(resident)
    pages = space.page[slots]
    if (pages >= len(tree.hashes)).any() or (tree.slots[index][pages] != slots).any():
        yield "a resident slot's page has another slot"
    placed = tree.slots[index][: len(tree.hashes)]
    if np.count_nonzero(placed != NO_SLOT) != slots.size:
        yield "pages have slots that are not resident"


def _ages(space: SlotSpace) -> Iterator[str]:
    inside = space.ages.stamps != OUT
    idle = (space.state == RESIDENT) & (space.host_locks == 0) & (space.device_pins == 0)
    if (inside != idle).any():
        yield "the order of age has other slots than the resident ones that nothing holds"
    if space.ages.members != np.count_nonzero(inside):
        yield "the count of slots in the order of age is wrong"
    if np.unique(space.ages.stamps[inside]).size != np.count_nonzero(inside):
        yield "two slots have one age"


def _holds(index: int, space: SlotSpace, ledger: Ledger) -> Iterator[str]:
    locks, pins = np.zeros(space.capacity, np.int64), np.zeros(space.capacity, np.int64)
    for hold in ledger.holds.values():
        counts = locks if hold.kind is HoldKind.HOST_LOCK else pins
        for taken in hold.taken:
            if taken.space == index:
                _count(counts, space, taken.slots, taken.generations)
    for reservation in ledger.reservations.values():
        part = reservation.spaces.get(index)
        if part is not None:
            there = part.shared != NO_SLOT
            _count(locks, space, part.shared[there], part.generations[there])
    if (space.host_locks != locks).any():
        yield "the host locks are not those of the tokens"
    if (space.device_pins != pins).any():
        yield "the device pins are not those of the tokens"
    if ((space.host_locks < 0) | (space.device_pins < 0)).any():
        yield "a count of locks or pins is negative"


def _count(
    counts: NDArray[np.int64], space: SlotSpace, slots: NDArray[np.int64], generations: NDArray[np.int64]
) -> None:
    np.add.at(counts, slots[space.generation[slots] == generations], 1)


def _reservations(index: int, space: SlotSpace, ledger: Ledger) -> Iterator[str]:
    for state, quarantined in ((RESERVED, False), (QUARANTINED, True)):
        own = [
            r.spaces[index].own_slots
            for r in ledger.reservations.values()
            if r.quarantined == quarantined and index in r.spaces
        ]
        named = np.sort(np.concatenate([np.empty(0, np.int64), *own]))
        if not np.array_equal(named, np.flatnonzero(space.state == state)):
            word = "quarantined" if quarantined else "reserved"
            yield f"the {word} slots are not those of the reservations"


def _translation(pages: ResidentPages, index: int) -> Iterator[str]:
    first = pages.spaces[0]
    expected = np.full(first.capacity, NO_SLOT, np.int64)
    slots = np.flatnonzero(first.page != NO_SLOT)
    expected[slots] = pages.tree.slots_of(index, first.page[slots].astype(np.int64))
    if (pages.translation[index] != expected).any():
        yield "the translation from the first space is wrong"


def _sessions(ledger: Ledger) -> Iterator[str]:
    owners = {token: hold.session for token, hold in ledger.holds.items()}
    owners |= {token: r.session for token, r in ledger.reservations.items()}
    listed = {token: name for name, tokens in ledger.sessions.items() for token in tokens}
    if listed != {token: name for token, name in owners.items() if name is not None}:
        yield "sessions and tokens do not name each other"
    for token, r in ledger.reservations.items():
        if r.store_calls < 0 or (r.quarantined and not r.store_calls):
            yield f"{token} counts {r.store_calls} calls of the store"
