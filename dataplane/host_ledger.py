"""Who holds what in host memory: sessions, and under each token exactly what it took.

A release replays what is written here. It never asks the tree what a lock would take *now*: pages may have
been evicted, revived or inserted since.

Pure: values in, values out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataplane.host_ages import SlotArray
from dataplane.host_answers import UnknownSession, UnknownToken
from metadata.errors import FieldError, InvalidInput

NO_SLOT: Final = -1


class HoldKind(Enum):
    """Two counts that never mix."""

    HOST_LOCK = "l"
    DEVICE_PIN = "p"


@dataclass(frozen=True, slots=True)
class Taken:
    """The slots of one space that a token counts on.

    Attributes:
        space: index of the space.
        slots: int64, first page of the sequence first.
        generations: of each slot when it was taken.
    """

    space: int
    slots: SlotArray
    generations: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Hold:
    """A lock or pin.

    Attributes:
        kind: which count it is on.
        session: None for a hold that is nobody's, such as a transfer's.
        taken: what it took, a space each.
    """

    kind: HoldKind
    session: str | None
    taken: tuple[Taken, ...]


@dataclass(slots=True)
class SpaceReservation:
    """What a reservation has in one space; all arrays (pages of the call,).

    Attributes:
        asked: uint64, the pools that the page was asked for in.
        own: slots to fill, `NO_SLOT` where there is none.
        shared: slots of pages that were resident and are locked, `NO_SLOT` where there is none.
        generations: of the shared slots when they were locked.
    """

    asked: NDArray[np.uint64]
    own: SlotArray
    shared: SlotArray
    generations: NDArray[np.int64]

    @property
    def own_slots(self) -> SlotArray:
        """Return the slots to fill, without gaps."""
        return self.own[self.own >= 0]

    def locks(self, space: int) -> Taken:
        """Return the locks on the shared slots, as `space`'s."""
        there = self.shared != NO_SLOT
        return Taken(space, self.shared[there], self.generations[there])

    def split(self, kept: NDArray[np.uint64] | None) -> SpaceReservation:
        """Part with the slots of the pages without a bit in `kept`; return them, without locks."""
        parted = self.own != NO_SLOT
        if kept is not None:
            parted &= kept == 0
        other = SpaceReservation(
            np.where(parted, self.asked, np.uint64(0)),
            np.where(parted, self.own, NO_SLOT),
            np.full_like(self.shared, NO_SLOT),
            np.zeros_like(self.generations),
        )
        self.own[parted] = NO_SLOT
        return other

    def drop_shared(self) -> None:
        """Forget the locks, after they were released."""
        self.shared[:] = NO_SLOT


@dataclass(slots=True)
class Reservation:
    """Slots that are being filled.

    Attributes:
        session: whose; None once it is quarantined.
        page_hashes: pages of the call.
        parent: hash of the page before the first.
        pools: names asked for.
        spaces: space index -> what it has there.
        store_calls: calls of the store that have the addresses now.
        quarantined: given up; ends when the last of these calls is back.
    """

    session: str | None
    page_hashes: list[bytes]
    parent: bytes | None
    pools: tuple[str, ...]
    spaces: dict[int, SpaceReservation]
    store_calls: int = 0
    quarantined: bool = False


@dataclass(slots=True)
class Ledger:
    """Sessions and tokens.

    Attributes:
        sessions: session -> its tokens, in the order in which they were made.
        holds: token -> lock or pin.
        reservations: token -> reservation, the quarantined ones too.
    """

    sessions: dict[str, dict[str, None]] = field(default_factory=dict)
    holds: dict[str, Hold] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    _made: int = 0

    def open(self, session: str) -> None:
        """Begin a session.

        Raises:
            InvalidInput: there is one of that name.
        """
        if session in self.sessions:
            detail = f"{session!r} is open already"
            raise InvalidInput("the session cannot be opened", [FieldError("session", "duplicate", detail)])
        self.sessions[session] = {}

    def check(self, session: str) -> None:
        """Refuse a session that is not open.

        Raises:
            UnknownSession: it is not.
        """
        if session not in self.sessions:
            raise UnknownSession(f"there is no session {session!r}; open one")

    def add_hold(self, hold: Hold) -> str:
        """Write a hold down and return its token."""
        token = self._token(hold.kind.value, hold.session)
        self.holds[token] = hold
        return token

    def add_reservation(self, reservation: Reservation) -> str:
        """Write a reservation down and return its token."""
        token = self._token("a", reservation.session)
        self.reservations[token] = reservation
        return token

    def end_hold(self, token: str) -> Hold:
        """Strike a hold out and return it.

        Raises:
            UnknownToken: no lock or pin has it.
        """
        hold = self.holds.pop(token, None)
        if hold is None:
            raise _unknown(token)
        self._detach(token, hold.session)
        return hold

    def reservation(self, token: str) -> Reservation:
        """Return a reservation that can still be published or cancelled.

        Raises:
            UnknownToken: there is none, or it was given up.
        """
        found = self.reservations.get(token)
        if found is None or found.quarantined:
            raise _unknown(token)
        return found

    def in_store(self, token: str) -> Reservation:
        """Return a reservation that a call of the store has the addresses of.

        Raises:
            UnknownToken: there is none.
        """
        found = self.reservations.get(token)
        if found is None or not found.store_calls:
            raise _unknown(token)
        return found

    def end_reservation(self, token: str) -> None:
        """Strike a reservation out."""
        self._detach(token, self.reservations.pop(token).session)

    def detach(self, token: str) -> None:
        """Make a reservation nobody's."""
        found = self.reservations[token]
        self._detach(token, found.session)
        found.session = None

    def _token(self, letter: str, session: str | None) -> str:
        self._made += 1
        token = f"{letter}-{self._made}"
        if session is not None:
            self.sessions[session][token] = None
        return token

    def _detach(self, token: str, session: str | None) -> None:
        if session is not None:
            del self.sessions[session][token]


def _unknown(token: str) -> UnknownToken:
    return UnknownToken(f"there is no token {token!r}; it was used, released, or ended with its session")
