"""What the host tier answers, and the errors of the agent's contract that it raises.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from metadata.errors import CaketinError
from metadata.hit_policy import Restorable

PageSlots: TypeAlias = dict[str, NDArray[np.int64]]
"""Pool name -> slot of each page of the call, int64 (pages,), -1 where it has none: as a mover takes it."""

PageMasks: TypeAlias = dict[str, NDArray[np.bool_]]
"""Pool name -> bool (pages of the call,)."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """How far a pool is from what was asked.

    Attributes:
        asked: slots the call needs.
        free: slots that are free, or would be after evicting all that may be evicted.
        locked: resident slots that locks or pins keep.
    """

    asked: int
    free: int
    locked: int


@dataclass
class NoSlots(CaketinError):
    """A pool has not as many slots as asked, not even after evicting all that may go (507).

    Attributes:
        pools: pool -> numbers, for the pools that fall short.
    """

    code = "no_slots"
    pools: dict[str, Shortage] = field(default_factory=dict)


class UnknownSession(CaketinError):
    """The session was never opened, or has ended (404)."""

    code = "unknown_session"


class UnknownToken(CaketinError):
    """The token was used, released, or ended with its session (404)."""

    code = "unknown_token"


@dataclass(frozen=True, slots=True)
class Match:
    """What is resident of a call's pages.

    Attributes:
        restorable: the lengths that can be restored from host memory alone, by the function that decides for
            the lookup too.
        slots: of every pool that was asked for; a slot only where the page's bytes of that pool are there.
    """

    restorable: Restorable
    slots: PageSlots

    @property
    def pages(self) -> int:
        """The longest restorable length, or 0."""
        return self.restorable.hit_pages


@dataclass(frozen=True, slots=True)
class Locked:
    """A host lock over a prefix.

    Attributes:
        token: ends the lock; None where there was nothing to lock.
        pages: length of the prefix that was locked, in pages of the call.
        restorable: as in `Match`.
        slots: as in `Match`, but only what the lock holds: all pages of the prefix for a pool that needs all,
            its last window for a pool with a window.
    """

    token: str | None
    pages: int
    restorable: Restorable
    slots: PageSlots


@dataclass(frozen=True, slots=True)
class Pinned:
    """Device pins on exactly the pages of a call.

    Attributes:
        token: ends the pins; None where nothing was resident.
        slots: of every pool that was asked for; hand them to `PageMover.back_up` without the logical pool.
    """

    token: str | None
    slots: PageSlots


@dataclass(frozen=True, slots=True)
class Evicted:
    """Pages whose data in one slot space went.

    Attributes:
        pool: the pool that owns the slots.
        pools: it and what derives from it: their data went.
        page_hashes: oldest first.
    """

    pool: str
    pools: tuple[str, ...]
    page_hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Reserved:
    """Slots to fill, and locks on the pages that need no filling.

    Attributes:
        token: for `publish`, `cancel` and what a transfer does in between.
        slots: of every pool that was asked for: where the page's bytes are (`resident`), or are to be
            written (not `resident`); -1 where the call asked for none.
        resident: True where the bytes are there already: read them, never write there.
        evicted: what had to go.
    """

    token: str
    slots: PageSlots
    resident: PageMasks
    evicted: tuple[Evicted, ...]


@dataclass(frozen=True, slots=True)
class Published:
    """What became of a reservation.

    Attributes:
        published: pages whose slot became resident by this call.
        given_back: pages whose slot was given back because another session's copy was there first; that copy
            counts and is in `slots`.
        slots: where each page is resident now, for the pools of the reservation; -1 where it is not.
    """

    published: PageMasks
    given_back: PageMasks
    slots: PageSlots

    @property
    def pages(self) -> int:
        """How many pages of the call are resident in some pool of the reservation."""
        rows = [slots >= 0 for slots in self.slots.values()]
        return int(np.count_nonzero(np.logical_or.reduce(rows)))


@dataclass(frozen=True, slots=True)
class Ended:
    """What a session left behind.

    Attributes:
        locks: tokens of locks and pins that were released.
        freed: slots that were reserved and are free again, by pool.
        quarantined: tokens of reservations whose slots a store call still writes, until `store_returned`.
    """

    locks: tuple[str, ...]
    freed: dict[str, int]
    quarantined: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """The slots of one pool and all that derives from it.

    `slots` is the sum of `free`, `reserved`, `resident` and `quarantined`; `locked` is part of `resident`.
    """

    slots: int
    free: int
    reserved: int
    resident: int
    locked: int
    quarantined: int
