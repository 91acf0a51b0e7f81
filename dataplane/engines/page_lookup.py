"""A lookup as an engine's prefetch needs it: what the index says, checked and leased in the store (T3)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataplane.engines.link import EngineLink, Joined
from dataplane.engines.promises import Promises
from dataplane.lost_pages import LostPages
from dataplane.messages import control
from metadata import object_keys
from metadata.codec import PageHashes
from metadata.errors import CaketinError
from metadata.pools import AllPages

log = logging.getLogger(__name__)

_Leases: TypeAlias = tuple[list[str], "Future[NDArray[np.bool_]]"]
"""Keys of one object a page, and the answer which of them are there."""


@dataclass(frozen=True)
class FoundPages:
    """What is restorable of some pages.

    Attributes:
        pages: the longest length.
        runs: all lengths, as inclusive runs.
        pools: pool name -> the longest length that this pool alone allows.
    """

    pages: int
    runs: list[tuple[int, int]]
    pools: dict[str, int]


class PageLookup:
    """Lookups of one rank. Safe to use from several threads.

    The store is asked while the control plane answers, where the last answer was mostly a hit: for thousands
    of pages the two take equally long. A miss does not wait for it.
    """

    def __init__(self, link: EngineLink, promises: Promises) -> None:
        self._link = link
        self._promises = promises
        self._hit_lately = True
        self._ahead = ThreadPoolExecutor(1, "caketin-leases")

    def close(self) -> None:
        """End the thread that asks the store; a query under way ends by itself."""
        self._ahead.shutdown(wait=False, cancel_futures=True)

    def find(
        self, page_hashes: PageHashes, pools: Mapping[str, control.PoolQuery], first_page: int = 0
    ) -> FoundPages | None:
        """Ask which lengths are restorable, and lease them.

        Args:
            page_hashes: pages of the call.
            pools: the sidecars that gate.
            first_page: pages of the sequence before them, whose windows the engine vouches for.

        Returns:
            None where nobody can say: not attached, no answer in time, a pool that is not registered (yet).
        """
        joined = self._link.joined
        if joined is None or not page_hashes or any(name not in joined.pools.bound for name in pools):
            return None
        ahead = self._leases_ahead(joined, page_hashes) if self._hit_lately else None
        try:
            found = self._link.call(
                lambda client: client.lookup(
                    joined.namespace_id, page_hashes, first_page=first_page, pools=pools
                )
            )
            if found.degraded:
                log.info("a lookup of %d pages is a miss: the control plane has no Redis", len(page_hashes))
                return None
            self._hit_lately = 2 * found.hit_pages >= len(page_hashes)
            return self._confirmed(joined, page_hashes, found, ahead)
        except CaketinError as error:
            log.info("a lookup of %d pages is a miss: %s", len(page_hashes), error)
            return None

    def _leases_ahead(self, joined: Joined, page_hashes: PageHashes) -> _Leases | None:
        keys = _lease_keys(joined, page_hashes)
        if not keys:
            return None
        try:
            return keys, self._ahead.submit(joined.store.exists, keys)
        except RuntimeError:  # closed under a running lookup
            return None

    def _confirmed(
        self,
        joined: Joined,
        page_hashes: PageHashes,
        found: control.LookupResult,
        ahead: _Leases | None,
    ) -> FoundPages:
        """Look whether the store has one object of each promised page, which leases the page's group."""
        runs, limit = list(found.restorable), found.hit_pages
        keys: list[str] = []
        if limit:
            if ahead is None:
                keys = _lease_keys(joined, page_hashes[:limit])
                there = joined.store.exists(keys)
            else:
                keys, there = ahead[0][:limit], ahead[1].result()[:limit]
            absent = np.flatnonzero(~there)
            if absent.size:
                self._report(joined, page_hashes, found.generation, absent)
                limit = int(absent[0])
                runs = [(first, min(last, limit)) for first, last in runs if first <= limit]
        pages = runs[-1][1] if runs else 0
        self._promises.add(page_hashes, found.generation, keys[:pages])
        pools = {n: min(p, limit) if limit < found.hit_pages else p for n, p in found.pools.items()}
        return FoundPages(pages, runs, pools)

    def _report(
        self, joined: Joined, page_hashes: PageHashes, generation: bytes, absent: NDArray[np.int64]
    ) -> None:
        name = _leased_pool(joined)
        log.warning("the store lacks %d pages of %r that the index promised", absent.size, name)
        if name is not None and joined.owned.get(name):
            lost = LostPages(joined.pools, page_hashes)
            lost.gone(name, absent, 0)
            lost.report(self._link, generation or None)


def _leased_pool(joined: Joined) -> str | None:
    """Return the pool whose first object of a page stands for the page's lease group."""
    return next((n for n, p in joined.pools.policies.items() if isinstance(p, AllPages)), None)


def _lease_keys(joined: Joined, page_hashes: PageHashes) -> list[str]:
    name = _leased_pool(joined)
    if name is None:
        return []
    pool = joined.pools.bound[name]
    first = object_keys.suffixes(pool.pool.spec, pool.shards)[:1]
    return object_keys.flat_object_keys(joined.namespace_id, page_hashes, first)
