"""When a transfer ends early: its caller does not want it any more, or its time is up.

Looked at between calls of the store. A call that runs is waited for: the store uses the memory until it
returns (M1).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from metadata.errors import CaketinError, FieldError, InvalidInput

Clock: TypeAlias = Callable[[], float]

WINDOW_SHARE: Final = 0.2
"""Share of a prefetch's time that is kept for trailing windows: without them, what was read before is of no
use (O5)."""


class CancelFlag(Protocol):
    """Says whether a transfer is to end; a `threading.Event` is one."""

    def is_set(self) -> bool:
        """Return whether it is."""


class TransferCancelled(CaketinError):
    """The caller has cancelled the transfer; what was moved before counts."""

    code = "transfer_cancelled"


class TransferTimedOut(CaketinError):
    """The transfer's time was up before all was moved; what was moved before counts."""

    code = "transfer_timed_out"


class TransferLimits:
    """The limits of one transfer, whose time runs from here on."""

    def __init__(
        self,
        cancel: CancelFlag | None = None,
        deadline_seconds: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Take the limits; None is none.

        Raises:
            InvalidInput: a deadline that is not positive.
        """
        if deadline_seconds is not None and not deadline_seconds > 0:
            fault = FieldError("deadline_seconds", "out_of_range", f"is {deadline_seconds}, must be positive")
            raise InvalidInput("the transfer has no time", [fault])
        self._cancel = cancel
        self._seconds = deadline_seconds
        self._clock = clock
        self._start = clock()

    def check(self, share: float = 1.0) -> None:
        """Let the next call of the store begin.

        Args:
            share: of the time that may be used up.

        Raises:
            TransferCancelled: the caller has cancelled.
            TransferTimedOut: the time is up.
        """
        if self._cancel is not None and self._cancel.is_set():
            raise TransferCancelled("the transfer was cancelled")
        if self._seconds is not None and self._clock() - self._start >= self._seconds * share:
            raise TransferTimedOut(f"the transfer did not end within {self._seconds:g} s")
