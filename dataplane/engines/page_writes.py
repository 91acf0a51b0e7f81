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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataplane.control_plane import ControlPlaneAway, ControlRefused
from dataplane.engines.link import EngineLink, Joined
from dataplane.engines.page_reads import BoolArray, SlotPages, union_batch
from dataplane.messages import control
from dataplane.object_store import StoreCode
from dataplane.page_statements import PoolFacts, statements
from dataplane.stage_batch import PoolPages, StageBatch
from dataplane.stage_put import put_confirmed
from metadata.codec import PageHashes
from metadata.errors import CaketinError
from metadata.page_runs import page_runs
from metadata.pools import ANCHOR

log = logging.getLogger(__name__)

MAX_WAITING_PAGES: Final = 262_144
SETTLE_SECONDS: Final = 1.0
"""How long a sidecar waits for its anchor before it is claimed by itself."""
_CLAIM_PAGES: Final = 4096
_RETRY_SECONDS: Final = 1.0
_NEGATIVE_ENTRY: Final = "negative_entry"
"""A page that could not be read a moment ago is not claimed for some seconds, even when written anew."""


@dataclass
class _Waiting:
    """What is confirmed of one page and not claimed.

    Attributes:
        held: pool name -> which owned shards, bool (shards,).
        since: when the first of it was confirmed.
        tried: whether it was offered by itself already.
    """

    since: float
    held: dict[str, BoolArray] = field(default_factory=dict)
    tried: bool = False


class PageWrites:
    """Writes of one rank; its calls come one after the other, the chore from another thread."""

    def __init__(self, link: EngineLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: OrderedDict[bytes, _Waiting] = OrderedDict()
        self._unclaimed: OrderedDict[bytes, dict[str, BoolArray]] = OrderedDict()
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
                self._claim(joined, given[name].page_hashes, {name: shards})
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
        taken = self._claim(joined, page_hashes, {**waiting, **held}, only=complete)
        with self._lock:
            for page in np.flatnonzero(complete & taken).tolist():
                self._anchored[page_hashes[page]] = None
            while len(self._anchored) > MAX_WAITING_PAGES:
                self._anchored.popitem(last=False)
        return complete

    def settle(self, joined: Joined) -> None:
        """Claim what could not be claimed before, and sidecars whose anchor does not come. A chore."""
        now = self._clock()
        with self._lock:
            unclaimed: OrderedDict[bytes, dict[str, BoolArray]] = OrderedDict()
            if now >= self._retry_at:
                self._retry_at = now + _RETRY_SECONDS
                unclaimed, self._unclaimed = self._unclaimed, unclaimed
            late = [
                (h, w) for h, w in self._waiting.items() if not w.tried and now - w.since > SETTLE_SECONDS
            ]
        self._claim_pages(joined, list(unclaimed.items()))
        self._claim_waiting(joined, late)

    def _claim_anchored(self, joined: Joined, given: Mapping[str, SlotPages]) -> None:
        """Claim what waits although its anchor is claimed."""
        with self._lock:
            pages = {h for p in given.values() for h in p.page_hashes if h in self._anchored}
            ready = [(h, self._waiting[h]) for h in pages if h in self._waiting]
        self._claim_waiting(joined, ready)

    def _claim_waiting(self, joined: Joined, pages: list[tuple[bytes, _Waiting]]) -> None:
        for _, waiting in pages:
            waiting.tried = True
        taken = self._claim_pages(joined, [(h, w.held) for h, w in pages])
        with self._lock:
            for page_hash in taken:
                self._waiting.pop(page_hash, None)

    def forget(self) -> None:
        """Forget what was stored: the namespace is purged."""
        with self._lock:
            self._waiting.clear()
            self._unclaimed.clear()
            self._anchored.clear()

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
                if len(batch.page_hashes) != len(given[name].page_hashes):
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

    def _claim(
        self,
        joined: Joined,
        page_hashes: PageHashes,
        held: Mapping[str, BoolArray],
        only: BoolArray | None = None,
    ) -> BoolArray:
        """Claim what is confirmed; what the control plane cannot take now is claimed later.

        Returns:
            Which pages the index took completely, bool (pages,).
        """
        facts = {
            n: PoolFacts(
                joined.owned[n],
                table if only is None else table & only[:, None],
                np.zeros(len(page_hashes), np.int8),
            )
            for n, table in held.items()
        }
        taken = np.ones(len(page_hashes), np.bool_)
        try:
            for call in statements(facts):
                claims = {
                    n: control.StoredPool(pages=page_runs(said.pages), shards=said.shards)
                    for n, said in call.items()
                }
                result = self._link.commit(joined.namespace_id, page_hashes, claims)
                self._note_rejected(page_hashes, facts, result.rejected, taken)
        except (ControlPlaneAway, ControlRefused) as error:
            taken[:] = False
            log.warning("%d stored pages are claimed later: %s", len(page_hashes), error)
            if isinstance(error, ControlPlaneAway) or error.passing or self._link.forgotten(error):
                self._keep(page_hashes, {n: f.holds for n, f in facts.items()})
        return taken

    def _note_rejected(
        self,
        page_hashes: PageHashes,
        facts: Mapping[str, PoolFacts],
        rejected: Sequence[control.Rejection],
        taken: BoolArray,
    ) -> None:
        """Note what the index did not take; what it only takes later is claimed later."""
        for one in rejected:
            if one.page >= len(page_hashes) or one.pool not in facts:
                continue
            taken[one.page] = False
            if one.code == _NEGATIVE_ENTRY:
                page = page_hashes[one.page : one.page + 1]
                self._keep(page, {one.pool: facts[one.pool].holds[one.page : one.page + 1]})

    def _keep(self, page_hashes: PageHashes, held: Mapping[str, BoolArray]) -> None:
        with self._lock:
            for i, page_hash in enumerate(page_hashes):
                rows = {n: table[i] for n, table in held.items() if table[i].any()}
                if rows:
                    self._unclaimed.setdefault(page_hash, {}).update(rows)
            while len(self._unclaimed) > MAX_WAITING_PAGES:
                self._unclaimed.popitem(last=False)

    def _claim_pages(self, joined: Joined, pages: list[tuple[bytes, dict[str, BoolArray]]]) -> list[bytes]:
        """Claim pages one knows by hash; return those that the index took."""
        taken: list[bytes] = []
        for start in range(0, len(pages), _CLAIM_PAGES):
            some = pages[start : start + _CLAIM_PAGES]
            held: dict[str, BoolArray] = {}
            for i, (_, rows) in enumerate(some):
                for name, row in rows.items():
                    if len(joined.owned.get(name, ())) == len(row):
                        held.setdefault(name, np.zeros((len(some), len(row)), np.bool_))[i] = row
            hashes = PageHashes.of([h for h, _ in some])
            good = self._claim(joined, hashes, held)
            taken += [hashes[i] for i in np.flatnonzero(good).tolist()]
        return taken


def _only(members: Mapping[str, SlotPages], good: set[bytes]) -> dict[str, SlotPages]:
    chosen = {}
    for name, pages in members.items():
        keep = np.array([h in good for h in pages.page_hashes], dtype=np.bool_)
        at = np.flatnonzero(keep)
        chosen[name] = SlotPages(PageHashes.of([pages.page_hashes[i] for i in at.tolist()]), pages.slots[at])
    return chosen


def _hashes_where(page_hashes: PageHashes, mask: BoolArray) -> set[bytes]:
    return {page_hashes[i] for i in np.flatnonzero(mask).tolist()}
