"""Claims that the control plane was not there to take: kept, within bounds, until it is there again.

Without them every page that is stored during an outage would be stored again by whoever asks for it next.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Final

from dataplane.control_plane import ControlPlane, ControlPlaneAway, ControlRefused
from dataplane.messages import control
from metadata.codec import MAX_PAGES, PageHashes
from metadata.errors import CaketinError

log = logging.getLogger(__name__)

QUEUED_PAGES: Final = MAX_PAGES


@dataclass(frozen=True, slots=True)
class UnclaimedPages:
    """One call of `commit` that has to be made again."""

    namespace_id: str
    page_hashes: PageHashes
    stored: Mapping[str, control.StoredPool]


class CommitQueue:
    """Commits that wait; safe to use from several threads.

    Attributes:
        sent: pages whose commit was made after all.
        dropped: pages whose commit never will be: the queue was full, or the control plane refuses it.
    """

    def __init__(self, pages: int = QUEUED_PAGES) -> None:
        """Make a queue of at most so many pages; the oldest commits are dropped beyond that."""
        self._bound = pages
        self._lock = Lock()
        self._sending = Lock()
        self._waiting: deque[UnclaimedPages] = deque()
        self.sent = 0
        self.dropped = 0

    @property
    def pages(self) -> int:
        """Pages that wait."""
        with self._lock:
            return self._pages()

    def add(self, commit: UnclaimedPages) -> None:
        """Queue a commit."""
        with self._lock:
            self._waiting.append(commit)
            before = self.dropped
            while self._pages() > self._bound:
                self.dropped += len(self._waiting.popleft().page_hashes)
            if self.dropped > before:
                log.warning("%d pages stay unclaimed: too many wait already", self.dropped - before)

    def flush(self, control_plane: ControlPlane) -> None:
        """Make the commits that wait, oldest first, until one finds the control plane away again.

        Commits are idempotent, and the read decides what a late one was worth. Where another thread is at it
        already, nothing is done.
        """
        if not self._waiting or not self._sending.acquire(blocking=False):
            return
        try:
            while (commit := self._first()) is not None:
                if not self._sent(control_plane, commit):
                    return
        finally:
            self._sending.release()

    def _sent(self, control_plane: ControlPlane, commit: UnclaimedPages) -> bool:
        pages = len(commit.page_hashes)
        try:
            control_plane.commit(commit.namespace_id, commit.page_hashes, commit.stored)
        except CaketinError as error:
            if passing(error):
                return False
            log.warning("%d pages stay unclaimed: %s", pages, error)
            self._remove(commit, dropped=pages)
        else:
            self._remove(commit, sent=pages)
        return True

    def _first(self) -> UnclaimedPages | None:
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def _remove(self, commit: UnclaimedPages, *, sent: int = 0, dropped: int = 0) -> None:
        with self._lock:
            # It may have been dropped meanwhile, and is counted once.
            if self._waiting and self._waiting[0] is commit:
                self._waiting.popleft()
                self.sent += sent
                self.dropped += dropped

    def _pages(self) -> int:
        return sum(len(c.page_hashes) for c in self._waiting)


def passing(error: CaketinError | None) -> bool:
    """Return whether the same commit may be taken later."""
    match error:
        case None | ControlPlaneAway():
            return True
        case ControlRefused():
            return error.passing
        case _:
            return False
