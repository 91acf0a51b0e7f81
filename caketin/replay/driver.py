"""One rank of an engine that has no model: looks up, prefetches what is restorable, backs up the rest."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from caketin.replay.page_bytes import PageWriter
from caketin.replay.pool_sets import rank_pools
from caketin.replay.report import Latencies, Report
from caketin.replay.trace import TRACE_PAGE_TOKENS, Load, tokens
from dataplane.attach import Attached, attached
from dataplane.bound_pool import BoundPool
from dataplane.control_client import (
    ControlClient,
    ControlPlaneAway,
    ControlSettings,
    ModelIdentity,
    RankIdentity,
)
from dataplane.host_memory import HostMemory
from dataplane.messages.control import LookupResult
from dataplane.page_mover import Slots
from metadata.codec import PageHashes
from metadata.page_hash import page_hashes


@dataclass(frozen=True)
class ReplaySettings:
    """How to replay.

    Attributes:
        url: of the control plane.
        pools: name of a pool set.
        page_bytes: bytes of a page over all pools.
        page_tokens: tokens of a page.
        verify: whether restored bytes are compared.
        engine_id: what to register as.
        model: name of the namespace's model.
        call_seconds: deadline of a control call.
        token: access token, or None.
    """

    url: str
    pools: str = "deepseek-v4"
    page_bytes: int = 4096
    page_tokens: int = TRACE_PAGE_TOKENS
    verify: bool = False
    engine_id: str = "replay-0"
    model: str = "replay"
    call_seconds: float = 2.0
    token: str | None = field(default=None, repr=False)


class Replay:
    """A replay of one load by one rank."""

    def __init__(
        self, settings: ReplaySettings, load: Load, me: Attached, memories: list[HostMemory]
    ) -> None:
        self._settings = settings
        self._load = load
        self._me = me
        self._writers = {m.pool.name: PageWriter(m) for m in memories if m.pool.parts}
        self._slots = np.arange(max(1, load.longest), dtype=np.int64)
        self.report = Report(load.name, settings.pools, me.store.kind)

    def run(self, client: ControlClient, advance: Callable[[int], None]) -> Report:
        """Replay every request in order.

        Args:
            client: the rank's.
            advance: told how many pages were dealt with, after each request.
        """
        start = time.perf_counter()
        for ids in self._load.requests:
            self._one(client, ids)
            advance(len(ids))
        self.report.seconds = time.perf_counter() - start
        return self.report

    def _one(self, client: ControlClient, ids: list[int]) -> None:
        size = self._settings.page_tokens
        hashes = PageHashes.of(page_hashes(tokens(ids, size), size))
        report = self.report
        report.requests += 1
        report.asked_pages += len(hashes)
        found = self._lookup(client, hashes)
        restored = self._prefetch(hashes, found) if found is not None and found.hit_pages else 0
        report.hit_pages += restored
        if restored < len(hashes):
            self._back_up(hashes, restored)

    def _lookup(self, client: ControlClient, hashes: PageHashes) -> LookupResult | None:
        report = self.report
        try:
            with self._timed("lookup"):
                found = client.lookup(self._me.namespace_id, hashes)
        except ControlPlaneAway:
            report.degraded += 1
            return None
        report.promised_pages += found.hit_pages
        report.degraded += found.degraded
        report.pool_hits.update(found.pools)
        if found.miss is not None:
            report.misses[found.miss.reason] += len(hashes) - found.hit_pages
        return found

    def _prefetch(self, hashes: PageHashes, found: LookupResult) -> int:
        slots = self._page_slots(len(hashes))
        if self._settings.verify:
            for name, writer in self._writers.items():
                writer.wipe(slots[name])
        with self._timed("prefetch"):
            done = self._me.mover.prefetch(hashes, found, slots)
        if done.error is not None:
            raise done.error
        self.report.bytes_read += done.bytes
        self.report.lost_pages += found.hit_pages - done.pages
        if self._settings.verify and done.pages:
            self._verify(hashes, done.pages, done.read)
        return done.pages

    def _verify(self, hashes: PageHashes, pages: int, read: dict[str, NDArray[np.bool_]]) -> None:
        right = np.ones(pages, np.bool_)
        for name, writer in self._writers.items():
            for page in np.flatnonzero(read[name][:pages]).tolist():
                right[page] &= writer.intact(int(self._slots[page]), hashes[page])
        self.report.verified_pages += pages
        self.report.wrong_pages += int((~right).sum())

    def _back_up(self, hashes: PageHashes, first: int) -> None:
        for page in range(first, len(hashes)):
            for writer in self._writers.values():
                writer.fill(int(self._slots[page]), hashes[page])
        rest = hashes[first:]
        slots = dict.fromkeys(self._writers, self._slots[first : len(hashes)])
        with self._timed("back up"):
            done = self._me.mover.back_up(rest, slots)
        if done.error is not None:
            raise done.error
        self.report.backed_up_pages += done.committed
        self.report.bytes_written += done.bytes

    def _page_slots(self, pages: int) -> Slots:
        return dict.fromkeys(self._writers, self._slots[:pages])

    @contextlib.contextmanager
    def _timed(self, call: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.report.latencies.setdefault(call, Latencies()).seconds.append(time.perf_counter() - start)


def replay(settings: ReplaySettings, load: Load, advance: Callable[[int], None]) -> Report:
    """Register an engine of one rank, replay the load, and leave.

    Raises:
        InvalidInput: no such pool set or page size.
        ControlPlaneAway, ControlRefused: the registration failed.
        StoreUnavailable: the store that the control plane names cannot be reached.
    """
    pools = rank_pools(settings.pools, settings.page_bytes)
    slots = max(1, load.longest)
    memories = [HostMemory(p.spec, slots) for p in pools]
    bound = [BoundPool(p, () if p.spec.logical else (m.pool,)) for p, m in zip(pools, memories, strict=True)]
    me = RankIdentity(settings.engine_id, "dp0-pp0-cp0-tp0", secrets.token_hex(16))
    control = ControlSettings(settings.url, call_seconds=settings.call_seconds, token=settings.token)
    client = ControlClient(control, me)
    model = ModelIdentity(settings.model, f"{settings.pools}-{settings.page_bytes}", settings.page_tokens)
    with contextlib.closing(client), attached(client, model, bound) as joined:
        return Replay(settings, load, joined, memories).run(client, advance)
