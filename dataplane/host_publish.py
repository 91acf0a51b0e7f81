"""How filled slots become resident pages, where another session may have been faster.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataplane.host_ages import SlotArray
from dataplane.host_answers import Published
from dataplane.host_ledger import NO_SLOT, Reservation, SpaceReservation
from dataplane.host_pages import ResidentPages
from dataplane.host_tree import NodeArray
from metadata.hit_policy import PageMask


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of the filled slots of one space; arrays (pages of the call,)."""

    filled: NDArray[np.uint64]
    won: PageMask
    lost: PageMask


def publish(
    pages: ResidentPages, reservation: Reservation, filled: Mapping[int, NDArray[np.uint64]]
) -> Published:
    """Make what is filled resident, give the other slots back, release the reservation's locks.

    Args:
        pages: what is resident.
        reservation: whose slots no store call has any more, and whose chain contradicts nothing.
        filled: space -> bits of the pools whose bytes are in their slots, uint64 (pages,).
    """
    hashes = reservation.page_hashes
    fills = {
        space: np.where(part.own != NO_SLOT, filled.get(space, np.zeros_like(part.asked)) & part.asked, 0)
        for space, part in reservation.spaces.items()
    }
    used = np.flatnonzero(np.bitwise_or.reduce(list(fills.values())))
    if used.size:
        # The last of these has bytes, whoever wins: no bare leaf is left.
        pages.tree.add(hashes[: int(used[-1]) + 1], reservation.parent)
    nodes = pages.tree.find(hashes)
    outcomes = {
        space: _publish_space(pages, space, part, nodes, fills[space])
        for space, part in reservation.spaces.items()
    }
    return _published(pages, reservation, nodes, outcomes)


def _publish_space(
    pages: ResidentPages, space: int, part: SpaceReservation, nodes: NodeArray, filled: NDArray[np.uint64]
) -> _Outcome:
    of = pages.spaces[space]
    current = pages.tree.slots_of(space, nodes)
    there = current != NO_SLOT
    idle = there & of.idle(current)
    held = np.where(there, of.held[current], 0)
    # More pools than the copy that is there, which nothing holds: the poorer one goes.
    richer = idle & ((held & ~filled) == 0) & (held != filled)
    won = (filled != 0) & (~there | richer)
    lost = (filled != 0) & ~won
    replaced = current[won & richer]
    of.ages.leave(replaced)
    pages.vacate(space, replaced)
    pages.settle(space, nodes[won], part.own[won], filled[won])
    of.give_back(part.own[(part.own != NO_SLOT) & ~won])

    # One order of age over the call: what came in, what the reservation lets go, and the copies of others.
    again = np.where(lost & idle, current, NO_SLOT)
    of.ages.leave(again[again != NO_SLOT])
    entering = np.where(won, part.own, again)
    held_here = part.shared != NO_SLOT
    released = of.unlock(part.shared[held_here], part.generations[held_here])
    entering = np.where(held_here & np.isin(part.shared, released), part.shared, entering)
    of.ages.enter(entering[entering != NO_SLOT])
    return _Outcome(filled, won, lost)


def _published(
    pages: ResidentPages, reservation: Reservation, nodes: NodeArray, outcomes: Mapping[int, _Outcome]
) -> Published:
    published, given_back = {}, {}
    slots: dict[str, SlotArray] = pages.slots(reservation.pools, nodes)
    for name in reservation.pools:
        info = pages.layout.pools[name]
        outcome = outcomes[info.space]
        whole = (outcome.filled & info.bits) == info.bits
        published[name] = outcome.won & whole
        given_back[name] = outcome.lost & whole
        asked = (reservation.spaces[info.space].asked & info.bits) == info.bits
        slots[name][~asked] = NO_SLOT
    return Published(published, given_back, slots)
