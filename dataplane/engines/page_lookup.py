"""A lookup as an engine's prefetch needs it: what the index says, checked and leased in the store (T3)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataplane.engines.link import EngineLink, Joined
from dataplane.engines.promises import Promises
from dataplane.lost_pages import LostPages
from dataplane.messages import control
from metadata import object_keys
from metadata.codec import PageHashes
from metadata.errors import CaketinError
from metadata.pools import AllPages, TrailingPages

log = logging.getLogger(__name__)

_Leases: TypeAlias = tuple[list[str], "Future[NDArray[np.bool_]]"]
"""Keys of one object a page; the answer which of them, and of the windows at the full length, are there."""

_LOOKS: Final = 4
"""At how many lengths the windows are looked at; the read decides at the others."""


@dataclass(frozen=True)
class _Window:
    """The pages that a pool needs at one length.

    Attributes:
        name: of the pool.
        pages: which, of the call's.
        keys: all objects of theirs that this rank holds.
        shape: pages, shards and parts.
    """

    name: str
    pages: range
    keys: list[str]
    shape: tuple[int, int, int]


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


@dataclass(frozen=True)
class _Asked:
    """A lookup: the pages, and which sidecars gate."""

    joined: Joined
    page_hashes: PageHashes
    pools: Mapping[str, control.PoolQuery]

    def windows(self, length: int) -> list[_Window]:
        """Return what the pools need at a length; of pages before the call nothing."""
        found = []
        for name, query in self.pools.items():
            policy, bound = self.joined.pools.policies.get(name), self.joined.pools.bound[name]
            if not isinstance(policy, TrailingPages) or not length or not bound.objects_per_page:
                continue
            pages = range(max(0, length - (query.window_pages or policy.window_pages)), length)
            keys = bound.keys(self.joined.namespace_id, self.page_hashes[pages.start : pages.stop])
            found.append(_Window(name, pages, keys, (len(pages), len(bound.shards), bound.parts)))
        return found


class PageLookup:
    """Lookups of one rank. Safe to use from several threads.

    The store is asked while the control plane answers, where the last answer was mostly a hit: for thousands
    of pages the two take equally long. A miss does not wait for it; where nobody answers it is left alone.
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
        asked = _Asked(joined, page_hashes, pools)
        ahead = self._leases_ahead(asked) if self._hit_lately else None
        try:
            found = self._link.call(
                lambda client: client.lookup(
                    joined.namespace_id, page_hashes, first_page=first_page, pools=pools
                )
            )
            if found.degraded:
                self._hit_lately = False
                log.info("a lookup of %d pages is a miss: the control plane has no Redis", len(page_hashes))
                return None
            self._hit_lately = 2 * found.hit_pages >= len(page_hashes)
            return self._confirmed(asked, found, ahead)
        except CaketinError as error:
            self._hit_lately = False
            log.info("a lookup of %d pages is a miss: %s", len(page_hashes), error)
            return None

    def _leases_ahead(self, asked: _Asked) -> _Leases | None:
        keys = _lease_keys(asked.joined, asked.page_hashes)
        if not keys:
            return None
        windows = [k for w in asked.windows(len(asked.page_hashes)) for k in w.keys]
        try:
            return keys, self._ahead.submit(asked.joined.store.exists, keys + windows)
        except RuntimeError:  # closed under a running lookup
            return None

    def _confirmed(self, asked: _Asked, found: control.LookupResult, ahead: _Leases | None) -> FoundPages:
        """Look whether the store has what the promise stands on, which leases it.

        That is one object of each promised page, which leases the page's group, and every object of the
        windows at the promised length: a group is a hint, and windows were seen to go by themselves.
        """
        runs, limit = list(found.restorable), found.hit_pages
        keys: list[str] = []
        if limit:
            if ahead is None:
                keys = _lease_keys(asked.joined, asked.page_hashes[:limit])
                there = asked.joined.store.exists(keys)
            else:
                keys, there = ahead[0][:limit], ahead[1].result()[:limit]
            absent = np.flatnonzero(~there)
            if absent.size:
                self._report(asked, found.generation, _leased_pool(asked.joined), absent)
                runs = _up_to(runs, int(absent[0]))
        runs, windows = self._with_windows(asked, found.generation, runs, ahead)
        pages = runs[-1][1] if runs else 0
        if asked.joined.store.lease_seconds is None:
            keys, windows = [], {}
        self._promises.add(asked.page_hashes, found.generation, keys[:pages], windows)
        pools = {n: min(p, pages) if pages < found.hit_pages else p for n, p in found.pools.items()}
        return FoundPages(pages, runs, pools)

    def _with_windows(
        self, asked: _Asked, generation: bytes, runs: list[tuple[int, int]], ahead: _Leases | None
    ) -> tuple[list[tuple[int, int]], dict[str, list[str]]]:
        """Return the lengths up to the longest whose windows are in the store, and the windows' keys."""
        for _ in range(_LOOKS):
            length = runs[-1][1] if runs else 0
            windows = asked.windows(length)
            keys = [k for w in windows for k in w.keys]
            if not keys:
                break
            if ahead is not None and length == len(asked.page_hashes):
                there = ahead[1].result()[len(ahead[0]) :]
            else:
                there = asked.joined.store.exists(keys)
            if there.all():
                return runs, {w.name: w.keys for w in windows}
            start = 0
            for w in windows:
                objects = there[start : start + len(w.keys)].reshape(w.shape)
                start += len(w.keys)
                for shard in range(w.shape[1]):
                    absent = np.flatnonzero(~np.all(objects[:, shard], axis=1)) + w.pages.start
                    self._report(asked, generation, w.name, absent, shard)
            runs = _up_to(runs, length - 1)
        return runs, {}

    def _report(
        self, asked: _Asked, generation: bytes, name: str | None, absent: NDArray[np.int64], shard: int = 0
    ) -> None:
        """Report pages that lack an object of the rank's `shard`-th shard, if it is the rank's to say."""
        if name is None or not absent.size:
            return
        log.warning("the store lacks %d pages of %r that the index promised", absent.size, name)
        if asked.joined.owned.get(name):
            lost = LostPages(asked.joined.pools, asked.page_hashes)
            lost.gone(name, absent, shard)
            lost.report(self._link, generation or None)


def _up_to(runs: list[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    return [(first, min(last, limit)) for first, last in runs if first <= limit]


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
