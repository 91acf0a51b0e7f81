"""Moves the pages of one rank between host memory and the store, and keeps the index honest.

The work is in `back_up` and `prefetch`; what they share, and what slots are, in `transfer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dataplane.back_up import BackedUp, BackUp
from dataplane.bound_pool import BoundPool
from dataplane.control_plane import ControlPlane
from dataplane.messages import control
from dataplane.object_store import ObjectStore
from dataplane.prefetch import Prefetch, Prefetched
from dataplane.transfer import CHUNK_PAGES, NO_SLOT, Progress, RankPools, Slots
from metadata.codec import PageHashes

__all__ = ["CHUNK_PAGES", "NO_SLOT", "BackedUp", "PageMover", "Prefetched", "Progress", "Slots"]


class PageMover:
    """Moves pages. Keeps nothing between calls, so several threads may use it, on slots of their own.

    A call blocks until the store no longer uses the memory (M1); the caller keeps the slots until it returns.
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

    def back_up(
        self, page_hashes: Sequence[bytes], slots: Slots, progress: Progress | None = None
    ) -> BackedUp:
        """Store pages, confirm them, and tell the index.

        A store or control plane that fails is no exception but `BackedUp.error`, next to what was done.

        Args:
            page_hashes: pages of the call, in order.
            slots: where their bytes are; a pool or page without a slot is left alone.
            progress: called after every chunk and pool.

        Raises:
            InvalidInput: slots that do not fit the call; nothing was moved.
        """
        hashes = PageHashes.of(page_hashes)
        return BackUp(
            self._store, self._control, self._pools, page_hashes=hashes, slots=slots, progress=progress
        ).run()

    def prefetch(
        self,
        page_hashes: Sequence[bytes],
        promise: control.LookupResult,
        slots: Slots,
        progress: Progress | None = None,
        *,
        windows: Mapping[str, int] | None = None,
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

        Raises:
            InvalidInput: slots, windows or promise do not fit the call; nothing was moved.
        """
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
        ).run()
