"""Reads of an engine: bytes into the slots it names, one honest boolean for every page of every pool."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataplane.engines.link import EngineLink, Joined
from dataplane.engines.promises import Promises
from dataplane.lost_pages import LostPages
from dataplane.object_store import StoreCode, describe_failures
from dataplane.stage_batch import PoolPages, StageBatch
from metadata.codec import PageHashes
from metadata.errors import CaketinError

log = logging.getLogger(__name__)

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class SlotPages:
    """Pages of one pool and the slots that they are in.

    Attributes:
        page_hashes: pages.
        slots: their page slots, int64 (pages,).
    """

    page_hashes: PageHashes
    slots: NDArray[np.int64]


class PageReads:
    """Reads of one rank. Safe to use from several threads on slots of their own."""

    def __init__(self, link: EngineLink, promises: Promises) -> None:
        self._link = link
        self._promises = promises

    def read(self, wanted: Mapping[str, SlotPages]) -> dict[str, BoolArray]:
        """Read pages; blocks until the store no longer uses the slots (M1).

        Args:
            wanted: by pool name.

        Returns:
            For each pool which pages are in their slots; the slots of the others hold anything.
        """
        joined = self._link.joined
        read = {name: np.zeros(len(p.page_hashes), np.bool_) for name, p in wanted.items()}
        if joined is None:
            return read
        known = {n: p for n, p in wanted.items() if n in joined.pools.bound and p.page_hashes}
        try:
            batch = union_batch(joined, known)
            codes = self._get(joined, batch)
            for member, outcome in batch.by_shard(codes):
                read[member.pool.name][:] = (outcome == StoreCode.OK).all(axis=(1, 2))
            if codes.any():
                log.warning("not everything was read: %s", describe_failures(batch.keys, codes))
                self._lose(joined, batch, codes)
        except CaketinError as error:
            log.warning("a read failed: %s", error)
        for name, pages in known.items():
            self._promises.read(name, pages.page_hashes)
        return read

    def _get(self, joined: Joined, batch: StageBatch) -> NDArray[np.int8]:
        if not batch.objects:
            return np.zeros(0, np.int8)
        codes = joined.store.get(batch.keys, batch.buffers)
        again = np.flatnonzero(codes == StoreCode.LEASE_LOST)
        if again.size:
            codes[again] = joined.store.get([batch.keys[i] for i in again.tolist()], batch.buffers[again])
        return codes

    def _lose(self, joined: Joined, batch: StageBatch, codes: NDArray[np.int8]) -> None:
        """Report what could not be read; a rank speaks only for what it writes."""
        hashes = PageHashes.of(batch.page_hashes)
        generation = self._promises.generations(hashes)
        if generation is None:
            generation, codes = self._generation_now(joined, hashes, batch, codes)
        lost = LostPages(joined.pools, hashes)
        keys = batch.by_shard(np.array(batch.keys, dtype=object))
        for member, outcome in batch.by_shard(codes):
            names = next(keys)[1]
            if joined.owned.get(member.pool.name):
                lost.note(member, outcome, names)
        if generation is not None:
            lost.report(self._link, generation)
        lost.remove_damaged(joined.store)

    def _generation_now(
        self, joined: Joined, hashes: PageHashes, batch: StageBatch, codes: NDArray[np.int8]
    ) -> tuple[bytes | None, NDArray[np.int8]]:
        """Return a fence for a read that no lookup of this rank came before, and what is lost behind it.

        Asked for only now, it would not fence off a page that was stored again since the read: so the store
        is asked once more, and only what is still gone is lost.
        """
        try:
            found = self._link.call(
                lambda client: client.lookup(joined.namespace_id, hashes, pools={}, purpose="probe")
            )
        except CaketinError as error:
            log.info("lost pages are not reported: %s", error)
            return None, codes
        gone = np.flatnonzero(codes == StoreCode.MISSING)
        if gone.size:
            there = joined.store.exists([batch.keys[i] for i in gone.tolist()])
            codes = codes.copy()
            codes[gone[there]] = StoreCode.OK
        return found.generation or None, codes


def union_batch(joined: Joined, wanted: Mapping[str, SlotPages]) -> StageBatch:
    """Return one batch of the pages of several pools, which need not be the same."""
    lists = {p.page_hashes.raw for p in wanted.values()}
    if len(lists) <= 1:
        pages = next(iter(wanted.values())).page_hashes if wanted else PageHashes()
        members = tuple(
            PoolPages(joined.pools.bound[n], np.arange(len(p.page_hashes)), p.slots)
            for n, p in wanted.items()
        )
        return StageBatch(joined.namespace_id, pages, members)
    place: dict[bytes, int] = {}
    for p in wanted.values():
        for page_hash in p.page_hashes:
            place.setdefault(page_hash, len(place))
    members = tuple(
        PoolPages(joined.pools.bound[n], np.array([place[h] for h in p.page_hashes], dtype=np.int64), p.slots)
        for n, p in wanted.items()
    )
    return StageBatch(joined.namespace_id, PageHashes.of(list(place)), members)
