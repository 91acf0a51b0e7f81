"""How slots are given out for pages of which some are resident already.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataplane.host_ages import SlotArray
from dataplane.host_answers import Evicted, NoSlots, Shortage
from dataplane.host_ledger import NO_SLOT, HoldKind, SpaceReservation
from dataplane.host_pages import ResidentPages
from dataplane.host_tree import NodeArray
from metadata.hit_policy import PageMask


@dataclass(frozen=True, slots=True)
class _Need:
    """What a call asks of one space.

    Attributes:
        asked: bits of the pools wanted, a page each.
        shared: slots of the pages that have them, `NO_SLOT` where a slot is needed or nothing is asked.
        missing: pages that need a slot.
    """

    asked: NDArray[np.uint64]
    shared: SlotArray
    missing: PageMask


def reserve(
    pages: ResidentPages, nodes: NodeArray, asked: Mapping[int, NDArray[np.uint64]], *, fresh: bool
) -> tuple[dict[int, SpaceReservation], list[Evicted]]:
    """Take the slots that a call needs, and lock the resident ones that it shares.

    Args:
        pages: what is resident.
        nodes: of the call's pages.
        asked: space -> bits of the pools wanted, uint64 (pages,).
        fresh: share nothing.

    Raises:
        NoSlots: some space has too few. Nothing was done.
    """
    needs = {space: _need(pages, space, nodes, bits, fresh=fresh) for space, bits in asked.items()}
    short = {
        pages.layout.names[space]: shortage
        for space, need in needs.items()
        if (shortage := _shortage(pages, space, need)) is not None
    }
    if short:
        listed = ", ".join(repr(name) for name in short)
        raise NoSlots(f"too few slots in {listed}: release locks or ask for fewer pages", pools=short)
    # All locks before the first eviction: what the caller is told is resident must not go.
    spaces = {space: _shared(pages, space, need) for space, need in needs.items()}
    evicted = [_fill(pages, space, needs[space], part) for space, part in spaces.items()]
    return spaces, [e for e in evicted if e.page_hashes]


def _need(
    pages: ResidentPages, space: int, nodes: NodeArray, asked: NDArray[np.uint64], *, fresh: bool
) -> _Need:
    shared = np.full(nodes.size, NO_SLOT, np.int64) if fresh else pages.complete(space, nodes, asked)
    return _Need(asked, shared, (asked != 0) & (shared == NO_SLOT))


def _shortage(pages: ResidentPages, space: int, need: _Need) -> Shortage | None:
    of = pages.spaces[space]
    count = int(np.count_nonzero(need.missing))
    kept = int(np.count_nonzero(of.idle(need.shared[need.shared != NO_SLOT])))
    room = of.free + of.ages.members - kept
    return Shortage(count, room, of.locked + kept) if count > room else None


def _shared(pages: ResidentPages, space: int, need: _Need) -> SpaceReservation:
    there = need.shared != NO_SLOT
    taken = pages.take(HoldKind.HOST_LOCK, space, need.shared[there])
    generations = np.zeros_like(need.shared)
    generations[there] = taken.generations
    return SpaceReservation(need.asked, np.full_like(need.shared, NO_SLOT), need.shared, generations)


def _fill(pages: ResidentPages, space: int, need: _Need, part: SpaceReservation) -> Evicted:
    of = pages.spaces[space]
    count = int(np.count_nonzero(need.missing))
    evicted = pages.evict(space, max(0, count - of.free))
    part.own[need.missing] = of.reserve(count)
    return evicted
