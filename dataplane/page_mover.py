"""Moves the pages of one rank between host memory and the store, and keeps the index honest.

The work is in `back_up` and `prefetch`; what they share, and what slots are, in `transfer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dataplane.back_up import BackedUp, BackUp
from dataplane.bound_pool import BoundPool
from dataplane.commit_queue import CommitQueue
from dataplane.control_plane import ControlPlane
from dataplane.messages import control
from dataplane.object_store import ObjectStore
from dataplane.prefetch import Prefetch, Prefetched
from dataplane.read_log import ReadLog
from dataplane.transfer import CHUNK_PAGES, NO_SLOT, Progress, RankPools, Slots
from dataplane.transfer_limits import CancelFlag, TransferCancelled, TransferLimits, TransferTimedOut
from metadata.codec import PageHashes

__all__ = [
    "CHUNK_PAGES",
    "NO_SLOT",
    "BackedUp",
    "PageMover",
    "Prefetched",
    "Progress",
    "Slots",
    "TransferCancelled",
    "TransferTimedOut",
]


class PageMover:
    """Moves pages. Several threads may use it, on slots of their own.

    A call blocks until the store no longer uses the memory (M1); the caller keeps the slots until it returns.

    Attributes:
        unclaimed: what was stored while the control plane was away; the next back up that finds it claims it.
    """

    def __init__(
        self, store: ObjectStore, control_plane: ControlPlane, namespace_id: str, pools: Sequence[BoundPool]
    ) -> None:
        """Take the parts.

        Raises:
            InvalidInput: the pools do not fit together.
        """
        self._store = store
        self._control = control_plane
        self._pools = RankPools(namespace_id, pools)
        self.unclaimed = CommitQueue()

    def back_up(
        self,
        page_hashes: Sequence[bytes],
        slots: Slots,
        progress: Progress | None = None,
        *,
        cancel: CancelFlag | None = None,
        deadline_seconds: float | None = None,
    ) -> BackedUp:
        """Store pages, confirm them, and tell the index.

        A store or control plane that fails is no exception but `BackedUp.error`, next to what was done.

        Args:
            page_hashes: pages of the call, in order.
            slots: where their bytes are; a pool or page without a slot is left alone.
            progress: called after every chunk and pool.
            cancel: ends the transfer once it is set, as `TransferCancelled`; the index is told of what is
                confirmed by then.
            deadline_seconds: ends it when so long has passed, as `TransferTimedOut`. Both are looked at
                between calls of the store: one that runs is waited for (M1).

        Raises:
            InvalidInput: slots or deadline do not fit the call; nothing was moved.
        """
        limits = TransferLimits(cancel, deadline_seconds)
        hashes = PageHashes.of(page_hashes)
        return BackUp(
            self._store,
            self._control,
            self._pools,
            page_hashes=hashes,
            slots=slots,
            progress=progress,
            limits=limits,
            unclaimed=self.unclaimed,
        ).run()

    def prefetch(
        self,
        page_hashes: Sequence[bytes],
        promise: control.LookupResult,
        slots: Slots,
        progress: Progress | None = None,
        *,
        windows: Mapping[str, int] | None = None,
        cancel: CancelFlag | None = None,
        deadline_seconds: float | None = None,
        calls: ReadLog | None = None,
    ) -> Prefetched:
        """Read the longest prefix that the lookup promised and the store still has.

        A store that fails is no exception but `Prefetched.error`, next to what was read before.

        Args:
            page_hashes: pages of the call, in order.
            promise: the lookup's answer for exactly these pages.
            slots: where to put them. Every pool that gated the lookup needs slots: for all promised pages, or
                for its window at the promised length. A shorter length can be restored instead only where
                its windows have slots too. Slots whose pages are not in the answer hold anything afterwards.
            progress: called after every chunk and pool.
            windows: pages of a pool's window where the lookup asked for another than the registered one.
            cancel: ends the transfer once it is set, as `TransferCancelled`; what was read by then is
                restored as far as it allows.
            deadline_seconds: ends it when so long has passed, as `TransferTimedOut`. The last fifth of it is
                kept for the windows at the length that was reached (O5).
            calls: told what each call of the store did with the slots, for a caller that gives the transfer
                up while one is blocked.

        Raises:
            InvalidInput: slots, windows, promise or deadline do not fit the call; nothing was moved.
        """
        limits = TransferLimits(cancel, deadline_seconds)
        hashes = PageHashes.of(page_hashes)
        return Prefetch(
            self._store,
            self._control,
            self._pools,
            page_hashes=hashes,
            promise=promise,
            slots=slots,
            progress=progress,
            windows=windows,
            limits=limits,
            calls=calls,
        ).run()
