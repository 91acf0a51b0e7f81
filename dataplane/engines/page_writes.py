"""Writes of an engine that hands sidecars over before the anchor: stored at once, published with the anchor.

The order "KV first" is kept by what the index learns. What is stored and confirmed of a page waits here until
the anchor of the page is confirmed too, and goes into the commit that claims the anchor. An engine may also
write a window of its own, whose anchor was stored earlier: where this rank has seen that, the window is
claimed at once, else by itself a moment later, when no anchor has come. The control plane takes it only where
the anchor's claim is there (O2).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataplane.engines.claims import Claims, HeldRows
from dataplane.engines.link import EngineLink, Joined
from dataplane.engines.page_reads import BoolArray, SlotPages, union_batch
from dataplane.object_store import StoreCode
from dataplane.stage_batch import PoolPages, StageBatch
from dataplane.stage_put import put_confirmed
from metadata.codec import PageHashes
from metadata.errors import CaketinError
from metadata.pools import ANCHOR

log = logging.getLogger(__name__)

MAX_WAITING_PAGES: Final = 262_144
SETTLE_SECONDS: Final = 1.0
"""How long a sidecar waits for its anchor before it is claimed by itself."""
GIVE_UP_SECONDS: Final = 600.0
"""How long a sidecar waits that was offered by itself and refused: its anchor could not be stored."""
_RETRY_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 5.0


@dataclass
class _Waiting:
    """What is confirmed of one page and not claimed.

    Attributes:
        held: pool name -> which owned shards, bool (shards,).
        since: when the first of it was confirmed.
        tried: whether it was offered by itself already.
    """

    since: float
    held: HeldRows = field(default_factory=dict)
    tried: bool = False


class PageWrites:
    """Writes of one rank; its calls come one after the other, the chore from another thread.

    What is confirmed is claimed behind the caller's back (`claims`), in the order of the calls.
    """

    def __init__(self, link: EngineLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: OrderedDict[bytes, _Waiting] = OrderedDict()
        self._claims = Claims(link, self._taken)
        self._anchored: OrderedDict[bytes, None] = OrderedDict()
        self._retry_at = 0.0

    def store_sidecars(self, given: Mapping[str, SlotPages]) -> dict[str, BoolArray]:
        """Store pages of pools that are not the anchor's own bytes; nothing is published yet.

        A rank that writes no part of the anchor publishes at once: its claims stay invisible without it.

        Args:
            given: by pool name; of a logical anchor the pools that derive from it too.

        Returns:
            For each pool which pages are stored and confirmed on all shards that the rank owns.
        """
        stored = {name: np.zeros(len(p.page_hashes), np.bool_) for name, p in given.items()}
        joined = self._link.joined
        if joined is None:
            return stored
        held: dict[str, BoolArray] = {}
        try:
            self._store_in_order(joined, given, held)
        except CaketinError as error:
            log.warning("sidecars were not stored completely: %s", error)
        for name, shards in held.items():
            stored[name][:] = shards.all(axis=1)
        if joined.writes_anchor:
            self._wait(given, held)
            self._claim_anchored(joined, given)
        else:
            for name, shards in held.items():
                self._claims.claim(joined, given[name].page_hashes, {name: shards})
        return stored

    def store_anchor(self, page_hashes: PageHashes, slots: NDArray[np.int64] | None) -> BoolArray:
        """Store the anchor's pages and publish them with all that waits for them.

        Args:
            page_hashes: pages.
            slots: their page slots; None for a logical anchor, whose bytes are the pools that derive from it.

        Returns:
            Which pages are stored and confirmed, bool (pages,).
        """
        nothing = np.zeros(len(page_hashes), np.bool_)
        joined = self._link.joined
        if joined is None or not page_hashes:
            return nothing
        held: dict[str, BoolArray] = {}
        try:
            if ANCHOR in joined.pools.bound:
                if slots is None:
                    return nothing
                self._store_in_order(joined, {ANCHOR: SlotPages(page_hashes, slots)}, held)
            waiting = self._take(joined, page_hashes, held)
            complete = self._complete(joined, page_hashes, {**waiting, **held})
        except CaketinError as error:
            log.warning("the anchor was not stored completely: %s", error)
            return nothing
        tables = {n: table & complete[:, None] for n, table in {**waiting, **held}.items()}
        self._claims.claim(joined, page_hashes, tables)
        with self._lock:
            # Claims are made in order: what is stored for these pages from now on is claimed after them.
            for page in np.flatnonzero(complete).tolist():
                self._anchored[page_hashes[page]] = None
            while len(self._anchored) > MAX_WAITING_PAGES:
                self._anchored.popitem(last=False)
        return complete

    def settle(self, joined: Joined) -> None:
        """Claim what could not be claimed before, and sidecars whose anchor does not come. A chore."""
        now = self._clock()
        if now >= self._retry_at:
            self._retry_at = now + _RETRY_SECONDS
            self._claims.retry(joined)
        with self._lock:
            while self._waiting:
                oldest = next(iter(self._waiting.values()))
                if not oldest.tried or now - oldest.since < GIVE_UP_SECONDS:
                    break
                self._waiting.popitem(last=False)
            late = [
                (h, w) for h, w in self._waiting.items() if not w.tried and now - w.since > SETTLE_SECONDS
            ]
        self._claim_waiting(joined, late)

    def flush(self, seconds: float) -> bool:
        """Wait until what is stored is claimed; return False when time is up before."""
        return self._claims.flush(seconds)

    def close(self) -> None:
        """Make the claims that wait."""
        self._claims.close(_CLOSE_SECONDS)

    def _claim_anchored(self, joined: Joined, given: Mapping[str, SlotPages]) -> None:
        """Claim what waits although its anchor is claimed."""
        with self._lock:
            pages = {h for p in given.values() for h in p.page_hashes if h in self._anchored}
            ready = [(h, self._waiting[h]) for h in pages if h in self._waiting]
        self._claim_waiting(joined, ready)

    def _claim_waiting(self, joined: Joined, pages: list[tuple[bytes, _Waiting]]) -> None:
        for _, waiting in pages:
            waiting.tried = True
        self._claims.claim_rows(joined, [(h, dict(w.held)) for h, w in pages])

    def _taken(self, page_hashes: PageHashes, held: Mapping[str, BoolArray]) -> None:
        """Forget of pages that the index has taken what waits; what was stored meanwhile goes on waiting.

        What was refused before is offered again: what it was refused for may be what is taken now.
        """
        with self._lock:
            for i, page_hash in enumerate(page_hashes) if self._waiting else ():
                waiting = self._waiting.get(page_hash)
                if waiting is None:
                    continue
                for name, table in held.items():
                    row = waiting.held.get(name)
                    if row is not None and not (row & ~table[i]).any():
                        del waiting.held[name]
                waiting.tried = False
                if not waiting.held:
                    del self._waiting[page_hash]

    def forget(self) -> None:
        """Forget what was stored: the namespace is purged."""
        with self._lock:
            self._waiting.clear()
            self._anchored.clear()
        self._claims.forget(_CLOSE_SECONDS)

    def _store_in_order(
        self, joined: Joined, given: Mapping[str, SlotPages], held: dict[str, BoolArray]
    ) -> None:
        """Store the pools stage by stage; `held` is filled also where a later stage fails.

        Behind a logical anchor a sidecar's page is stored only where the anchor's pools in the call have it.
        """
        good: set[bytes] | None = None
        for stage in joined.pools.stages:
            members = {n: given[n] for n in stage if n in given and joined.owned.get(n)}
            if not members:
                continue
            batch = union_batch(joined, members if good is None else _only(members, good))
            for member in batch.members:
                shape = (len(given[member.pool.name].page_hashes), len(member.pool.shards))
                held[member.pool.name] = np.zeros(shape, np.bool_)
            self._store_batch(joined, batch, given, held)
            anchors = [n for n in members if n in joined.anchors]
            if anchors:
                lists = [_hashes_where(given[n].page_hashes, np.all(held[n], axis=1)) for n in anchors]
                good = set.intersection(*lists)

    def _store_batch(
        self, joined: Joined, batch: StageBatch, given: Mapping[str, SlotPages], held: dict[str, BoolArray]
    ) -> None:
        def note(codes: NDArray[np.int8]) -> None:
            for member, outcome in batch.by_shard(codes):
                name = member.pool.name
                rows = member.pages
                # Other pages, or the same in another order: as many of them would not mean the same rows.
                if batch.page_hashes != given[name].page_hashes:
                    place = {h: i for i, h in enumerate(given[name].page_hashes)}
                    rows = np.array([place[batch.page_hashes[p]] for p in rows.tolist()], dtype=np.int64)
                held[name][rows] = (outcome == StoreCode.OK).all(axis=2)

        if batch.objects:
            put_confirmed(joined.store, batch, note)

    def _wait(self, given: Mapping[str, SlotPages], held: Mapping[str, BoolArray]) -> None:
        now = self._clock()
        with self._lock:
            for name, shards in held.items():
                for page_hash, row in zip(given[name].page_hashes, shards, strict=True):
                    if row.any():
                        waiting = self._waiting.setdefault(page_hash, _Waiting(now))
                        waiting.held[name] = row
                        waiting.tried = False
            while len(self._waiting) > MAX_WAITING_PAGES:
                self._waiting.popitem(last=False)

    def _take(
        self, joined: Joined, page_hashes: PageHashes, anchor: Mapping[str, BoolArray]
    ) -> dict[str, BoolArray]:
        """Return what waits for these pages, as tables, except where the anchor is not confirmed."""
        alive = np.ones(len(page_hashes), np.bool_)
        for shards in anchor.values():
            alive &= shards.all(axis=1)
        found: dict[str, BoolArray] = {}
        with self._lock:
            for i in np.flatnonzero(alive).tolist():
                waiting = self._waiting.pop(page_hashes[i], None)
                for name, row in waiting.held.items() if waiting is not None else ():
                    if name not in found:
                        found[name] = np.zeros((len(page_hashes), len(row)), np.bool_)
                    found[name][i] = row
        return found

    def _complete(self, joined: Joined, page_hashes: PageHashes, held: Mapping[str, BoolArray]) -> BoolArray:
        """Return where the rank's part of the anchor is stored, just now or before."""
        complete = np.ones(len(page_hashes), np.bool_)
        for name in joined.anchors:
            if not joined.owned.get(name):
                continue
            table = held.get(name)
            there: BoolArray = np.zeros(len(page_hashes), np.bool_)
            if table is not None:
                there = np.all(table, axis=1)
            unseen = np.flatnonzero(~there)
            if unseen.size and name != ANCHOR:
                pages = PoolPages(joined.pools.bound[name], unseen)
                batch = StageBatch(joined.namespace_id, page_hashes, (pages,))
                codes = joined.store.confirm(batch.keys, batch.sizes)
                for _, outcome in batch.by_shard(codes):
                    there[unseen] = (outcome == StoreCode.OK).all(axis=(1, 2))
            complete &= there
        return complete


def _only(members: Mapping[str, SlotPages], good: set[bytes]) -> dict[str, SlotPages]:
    chosen = {}
    for name, pages in members.items():
        keep = np.array([h in good for h in pages.page_hashes], dtype=np.bool_)
        at = np.flatnonzero(keep)
        chosen[name] = SlotPages(pages.page_hashes.take(at), pages.slots[at])
    return chosen


def _hashes_where(page_hashes: PageHashes, mask: BoolArray) -> set[bytes]:
    return {page_hashes[i] for i in np.flatnonzero(mask).tolist()}
