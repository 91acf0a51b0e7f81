"""Hit statistics in time buckets (Redis), exact over replicas and off the answer's path.

Each process adds up what it answered and hands it to Redis once a second, as numbered flushes: a flush whose
answer got lost is sent again as it was and counts once. Replicas add up and a graceful stop flushes. A killed
process loses at most one interval, and since it says no goodbye the others note a gap (C2). A lookup with a
`request_id` counts once in ten minutes, whichever replica it is repeated at (C1).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import msgspec

from metadata import redis_keys
from metadata.errors import RedisUnavailable
from metadata.hit_rates import RESOLUTIONS, SILENT_SECONDS, WHOLE_PREFIX, hit_rates
from metadata.redis_server import RedisServer, ScriptCall

REQUEST_SECONDS: Final = 600
MAX_PENDING: Final = 20_000
"""Most lookups with a request id that wait in a process, and most rows of sums."""

MAX_ROWS: Final = 10_000
"""Most rows of one time bucket: engine ids and pool names are made up by callers. More counts as `other`."""

ASKED_PER_FLUSH: Final = 2_000

_EVENTS: Final = 1_024
"""Events that wait to be summed."""

MAX_GAPS: Final = 1_000
GAP_SECONDS: Final = 7_776_000
OTHER: Final = "other"
Key = tuple[int, str, str]
"""Start of the finest bucket, row, and the row that counts in its place."""


@dataclass(frozen=True, slots=True)
class Source:
    """Who a count belongs to."""

    tenant: str
    namespace: str
    model: str
    engine: str


@dataclass(frozen=True, slots=True)
class CountedLookup:
    """One lookup that counts.

    Attributes:
        source: whose it is.
        queried_pages: pages asked for.
        hit_pages: the longest restorable length.
        pools: the longest length that each gating pool alone allows.
        miss: (pool, reason) where the prefix stopped, or None.
        request_id: counts once in ten minutes where given.
        at: Unix time of the answer.
    """

    source: Source
    queried_pages: int
    hit_pages: int
    pools: Mapping[str, int]
    miss: tuple[str, str] | None = None
    request_id: str | None = None
    at: float = field(default_factory=time.time)

    def increments(self) -> list[tuple[str, str, int]]:
        """Return (pool, metric, pages)."""
        rows = [
            (WHOLE_PREFIX, "queried_pages", self.queried_pages),
            (WHOLE_PREFIX, "hit_pages", self.hit_pages),
        ]
        for pool, pages in self.pools.items():
            rows += [(pool, "queried_pages", self.queried_pages), (pool, "hit_pages", pages)]
        if self.miss is not None:
            pool, reason = self.miss
            missed = self.queried_pages - self.hit_pages
            rows += [(WHOLE_PREFIX, f"miss:{reason}", missed), (pool, f"miss:{reason}", missed)]
        return [row for row in rows if row[2] > 0]


@dataclass(frozen=True, slots=True)
class CountedPages:
    """Pages that were read, or promised and lost."""

    source: Source
    metric: str
    pools: Mapping[str, int]
    at: float = field(default_factory=time.time)

    def increments(self) -> list[tuple[str, str, int]]:
        """Return (pool, metric, pages)."""
        return [(pool, self.metric, pages) for pool, pages in self.pools.items() if pages > 0]


@dataclass
class HitCounters:
    """Counts lookups; `run` flushes once a second until cancelled, then once more and says goodbye.

    Attributes:
        redis: where the sums go.
        flush_seconds: time between two flushes: what a killed process loses at most.
        dropped: events that were not counted because too many waited.
    """

    redis: RedisServer
    flush_seconds: float = 1.0
    dropped: int = 0
    process: str = field(default_factory=lambda: secrets.token_hex(8))
    _events: list[CountedLookup | CountedPages] = field(default_factory=list)
    _sums: Counter[Key] = field(default_factory=Counter)
    _asked: deque[CountedLookup] = field(default_factory=deque)
    _number: int = 0
    _sealed: ScriptCall | None = None
    _flushing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def backlog(self) -> int:
        """Lookups and sums that wait to be flushed."""
        self._sum()
        return len(self._asked) + len(self._sums)

    def count(self, event: CountedLookup | CountedPages) -> None:
        """Remember an event; where too many wait, it is counted as dropped."""
        if isinstance(event, CountedLookup) and event.request_id is not None:
            if len(self._asked) >= MAX_PENDING:
                self._asked.popleft()
                self.dropped += 1
            self._asked.append(event)
            return
        # Summed later: an answer waits for this, and a lookup of six pools is twenty rows.
        self._events.append(event)
        if len(self._events) >= _EVENTS:
            self._sum()

    def _sum(self) -> None:
        for event in self._events:
            if len(self._sums) >= MAX_PENDING:
                self.dropped += 1
                continue
            for key, pages in _sums_of(event):
                self._sums[key] += pages
        self._events.clear()

    async def run(self) -> None:
        """Flush every `flush_seconds`; what Redis does not take stays for the next time."""
        try:
            while True:
                # The first flush comes at once: it makes this process known, so that its death leaves a gap.
                await self.try_flush()
                await asyncio.sleep(self.flush_seconds)
        finally:
            await self.try_flush(goodbye=True)

    async def flush(self, *, goodbye: bool = False) -> None:
        """Hand everything that waits to Redis, and say that this process lives.

        Raises:
            RedisUnavailable: not all was taken, or nobody knows; the next flush sends the same again.
        """
        async with self._flushing:
            more = True
            while more:
                if self._sealed is not None:
                    await self.redis.run(self._sealed)
                last_word = goodbye and len(self._asked) <= ASKED_PER_FLUSH
                self._sealed = self._seal(goodbye=last_word)
                await self.redis.run(self._sealed)
                self._sealed = None
                more = bool(self._asked)

    async def series(
        self, window: int, step: int, by: Sequence[str], tenant: str | None, now: float | None = None
    ) -> dict[str, Any]:
        """Return hit rates as the contract's `/hit-rates` gives them; see `metadata.hit_rates`.

        Raises:
            InvalidInput: the window, the step or a label cannot be served.
        """
        await self.try_flush()
        return await hit_rates(self.redis, window, step, by, tenant, now=now)

    async def try_flush(self, *, goodbye: bool = False) -> None:
        """Flush; where Redis is away, what waits goes on waiting."""
        try:
            await self.flush(goodbye=goodbye)
        except RedisUnavailable:
            return

    def _seal(self, *, goodbye: bool) -> ScriptCall:
        """Take what waits out of the queues and into one flush, which from now on never changes."""
        asked = [self._asked.popleft() for _ in range(min(len(self._asked), ASKED_PER_FLUSH))]
        self._sum()
        sums, self._sums = self._sums, Counter()
        self._number += 1
        return _flush_call(self.process, self._number, self.flush_seconds, sums, asked, goodbye=goodbye)


def _flush_call(
    process: str,
    number: int,
    interval: float,
    sums: Mapping[Key, int],
    asked: Sequence[CountedLookup],
    *,
    goodbye: bool,
) -> ScriptCall:
    """Return the run of `flush_counts` that adds `sums`, and those of `asked` that nobody counted before."""
    buckets: dict[tuple[int, int], int] = {}
    rows: dict[str, tuple[int, str]] = {}

    def places(at: int) -> list[int]:
        spans = [(step, at // step * step) for step, _ in RESOLUTIONS]
        return [buckets.setdefault(span, len(buckets) + 1) for span in spans]

    def flat(items: Sequence[tuple[Key, int]]) -> list[int]:
        found: list[int] = []
        for (_, row, other), pages in items:
            found += (rows.setdefault(row, (len(rows) + 1, other))[0], pages)
        return found

    starts = itertools.groupby(sorted(sums.items()), key=lambda item: item[0][0])
    counts = [(places(at), flat(list(items))) for at, items in starts]
    claims = [(i, places(int(e.at)), flat(_sums_of(e))) for i, e in enumerate(asked, 1)]
    kept = dict(RESOLUTIONS)
    plan = {
        "process": process,
        "number": number,
        "interval_ms": int(interval * 1000),
        "goodbye": goodbye,
        "silent_ms": int(max(SILENT_SECONDS, 10 * interval) * 1000),
        "buckets": len(buckets),
        "ttl": [kept[step] + step for step, _ in buckets],
        "rows": list(rows),
        "others": [other for _, other in rows.values()],
        "counts": counts,
        "asked": claims,
        "request_s": REQUEST_SECONDS,
        "max_rows": MAX_ROWS,
        "max_gaps": MAX_GAPS,
        "gap_ms": GAP_SECONDS * 1000,
    }
    keys: list[str | bytes] = [redis_keys.COUNTING, redis_keys.COUNTING_GAPS]
    keys += [redis_keys.hits(step, start) for step, start in buckets]
    keys += [redis_keys.counted_request(e.source.tenant, e.request_id or "") for e in asked]
    return ScriptCall("flush_counts", keys, [msgspec.msgpack.encode(plan)])


def _sums_of(event: CountedLookup | CountedPages) -> list[tuple[Key, int]]:
    finest = RESOLUTIONS[0][0]
    at = int(event.at) // finest * finest
    return [
        ((at, _row(event.source, pool, metric), _other_row(event.source, pool, metric)), pages)
        for pool, metric, pages in event.increments()
    ]


@lru_cache(maxsize=4096)  # a lookup of six pools asks for twenty rows, the same ones every time
def _row(source: Source, pool: str, metric: str) -> str:
    return json.dumps([source.tenant, source.namespace, source.model, source.engine, pool, metric])


def _other_row(source: Source, pool: str, metric: str) -> str:
    """Return what counts in a row's place: of the same tenant, and still a pool or the whole prefix."""
    return _row(Source(source.tenant, OTHER, OTHER, OTHER), pool and OTHER, metric)
