"""The page slots that one pool of host memory and all pools derived from it share.

A slot is `FREE`, `RESERVED` (somebody fills it; nobody else knows), `RESIDENT` (holds a page that may be
found) or `QUARANTINED` (given up, but a call that has its address has not come back). Only the moves below
exist:

    FREE -> RESERVED -> RESIDENT -> FREE
              |  `----> FREE
              `-------> QUARANTINED -> FREE

Host locks (somebody counts on the page staying in host memory) and device pins (a device or a store reads its
bytes now) are two counts: either keeps a page out of the eviction order.

Pure: values in, values out.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataplane.host_ages import AgeOrder, SlotArray

FREE: Final = 0
RESERVED: Final = 1
RESIDENT: Final = 2
QUARANTINED: Final = 3

NO_PAGE: Final = -1


class SlotSpace:
    """The slots of one space, as columns over slots.

    Attributes:
        capacity: slots are 0 to `capacity - 1`.
        state: uint8.
        page: int32, node of the page that is resident, or `NO_PAGE`.
        held: uint64, one bit for each pool whose bytes the slot has; 0 unless resident.
        generation: int64, counts the pages that became resident in the slot or left it.
        host_locks: int32.
        device_pins: int32.
        ages: the resident slots without lock or pin, in the order of eviction.
        resident: number of resident slots.
        free: number of free slots.
    """

    __slots__ = (
        "_free",
        "ages",
        "capacity",
        "device_pins",
        "free",
        "generation",
        "held",
        "host_locks",
        "page",
        "resident",
        "state",
    )

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.state = np.zeros(capacity, np.uint8)
        self.page = np.full(capacity, NO_PAGE, np.int32)
        self.held = np.zeros(capacity, np.uint64)
        self.generation = np.zeros(capacity, np.int64)
        self.host_locks = np.zeros(capacity, np.int32)
        self.device_pins = np.zeros(capacity, np.int32)
        self.ages = AgeOrder(capacity)
        # A stack with slot 0 on top; what comes back last is used first: its memory is warm.
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self.free = capacity
        self.resident = 0

    @property
    def locked(self) -> int:
        """Resident slots that a lock or a pin keeps."""
        return self.resident - self.ages.members

    def free_slots(self) -> NDArray[np.int32]:
        """Return the free slots, the next to be reserved last."""
        return self._free[: self.free]

    def reserve(self, count: int) -> SlotArray:
        """Take `count` free slots; the caller has seen that there are as many."""
        self.free -= count
        slots = self._free[self.free : self.free + count][::-1].astype(np.int64)
        self.state[slots] = RESERVED
        return slots

    def quarantine(self, slots: SlotArray) -> None:
        """Keep reserved slots from everybody."""
        self.state[slots] = QUARANTINED

    def give_back(self, slots: SlotArray) -> None:
        """Make slots free that are reserved or quarantined."""
        self.state[slots] = FREE
        self._free[self.free : self.free + slots.size] = slots[::-1]
        self.free += slots.size

    def settle(self, slots: SlotArray, pages: NDArray[np.int64], held: NDArray[np.uint64]) -> None:
        """Make reserved slots resident. They are in no order of age yet."""
        self.state[slots] = RESIDENT
        self.page[slots] = pages
        self.held[slots] = held
        self.generation[slots] += 1
        self.resident += slots.size

    def vacate(self, slots: SlotArray) -> None:
        """Make resident slots free that have left the order of age."""
        self.page[slots] = NO_PAGE
        self.held[slots] = 0
        self.generation[slots] += 1
        self.resident -= slots.size
        self.give_back(slots)

    def idle(self, slots: SlotArray) -> NDArray[np.bool_]:
        """Return which of the slots have neither lock nor pin."""
        free: NDArray[np.bool_] = (self.host_locks[slots] == 0) & (self.device_pins[slots] == 0)
        return free

    def lock(self, slots: SlotArray) -> None:
        """Count a host lock on each of the resident slots."""
        self.ages.leave(slots[self.idle(slots)])
        self.host_locks[slots] += 1

    def pin(self, slots: SlotArray) -> None:
        """Count a device pin on each of the resident slots."""
        self.ages.leave(slots[self.idle(slots)])
        self.device_pins[slots] += 1

    def unlock(self, slots: SlotArray, generations: NDArray[np.int64]) -> SlotArray:
        """Undo `lock` where the slot still has the page of then; return what is idle now, in the same order.

        The caller puts these back in the order of age.
        """
        same: SlotArray = slots[self.generation[slots] == generations]
        self.host_locks[same] -= 1
        idle: SlotArray = same[self.idle(same)]
        return idle

    def unpin(self, slots: SlotArray, generations: NDArray[np.int64]) -> SlotArray:
        """Undo `pin`, as `unlock`."""
        same: SlotArray = slots[self.generation[slots] == generations]
        self.device_pins[same] -= 1
        idle: SlotArray = same[self.idle(same)]
        return idle
