"""Hit statistics in time buckets (Redis), exact over replicas and off the answer's path.

Each process adds up what it answered and hands it to Redis once a second, as increments: replicas add up,
a graceful stop flushes, and a killed process loses at most one interval (C2). A lookup with a `request_id`
counts once in ten minutes, whichever replica it is repeated at (C1).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from metadata import redis_keys
from metadata.errors import FieldError, InvalidInput, RedisUnavailable
from metadata.redis_server import RedisServer

RESOLUTIONS: Final = ((10, 7_200), (60, 172_800), (3_600, 7_776_000))
"""(step, how long it is kept), both in seconds."""

REQUEST_SECONDS: Final = 600
MAX_PENDING: Final = 100_000
MAX_BUCKETS: Final = 2_000
LABELS: Final = ("tenant", "namespace", "model", "engine", "pool")
METRICS: Final = ("queried_pages", "hit_pages", "read_pages", "lost_pages")
WHOLE_PREFIX: Final = ""
"""Pool label of the row that counts the prefix as a whole."""


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
    """Counts lookups; `run` flushes once a second until cancelled, then once more."""

    redis: RedisServer
    flush_seconds: float = 1.0
    dropped: int = 0
    _pending: deque[CountedLookup | CountedPages] = field(default_factory=deque)
    _claimed: set[tuple[str, str]] = field(default_factory=set)
    _flushing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def count(self, event: CountedLookup | CountedPages) -> None:
        """Remember an event; beyond the bound the oldest goes and is counted as dropped."""
        if len(self._pending) >= MAX_PENDING:
            self._pending.popleft()
            self.dropped += 1
        self._pending.append(event)

    async def run(self) -> None:
        """Flush every `flush_seconds`; keep what Redis does not take for the next time."""
        try:
            while True:
                await asyncio.sleep(self.flush_seconds)
                await self._try_flush()
        finally:
            await self._try_flush()

    async def flush(self) -> None:
        """Hand everything pending to Redis.

        Raises:
            RedisUnavailable: nothing was taken; it stays pending.
        """
        async with self._flushing:
            events = list(self._pending)
            if not events:
                return
            fresh = await self._not_counted_before(events)
            sums: dict[tuple[int, int], Counter[str]] = {}
            for event in fresh:
                for step, _ in RESOLUTIONS:
                    bucket = sums.setdefault((step, int(event.at) // step * step), Counter())
                    for pool, metric, pages in event.increments():
                        bucket[_field(event.source, pool, metric)] += pages
            await self.redis.pipeline(lambda pipe: _queue_increments(pipe, sums))
            self._claimed.clear()
            for _ in events:
                self._pending.popleft()

    async def series(
        self, window: int, step: int, by: Sequence[str], tenant: str | None, now: float | None = None
    ) -> dict[str, Any]:
        """Return hit rates as the contract's `/hit-rates` gives them.

        Args:
            window: seconds to look back.
            step: seconds of one bucket, a multiple of 10.
            by: labels to keep apart, out of `LABELS`.
            tenant: whose counts, or None for all.
            now: Unix time, for tests.

        Raises:
            InvalidInput: the window, the step or a label cannot be served.
        """
        base = _resolution(window, step, by)
        await self._try_flush()
        end = int(now if now is not None else time.time()) // step * step + step
        start = end - max(1, window // step) * step
        starts = range(start, end, base)
        answers = await self.redis.pipeline(lambda p: [p.hgetall(redis_keys.hits(base, s)) for s in starts])
        rows: dict[tuple[str, ...], dict[str, list[int]]] = {}
        buckets = (end - start) // step
        for at, answer in zip(starts, answers, strict=True):
            for raw, pages in answer.items():
                labels, metric = _parse_field(raw)
                if not _wanted(labels, by, tenant):
                    continue
                row = rows.setdefault(tuple(labels[name] for name in by), {})
                values = row.setdefault(metric, [0] * buckets)
                values[(at - start) // step] += int(pages)
        return {
            "start": start,
            "step": step,
            "partial_last": True,
            "series": [_row(by, key, rows[key], buckets) for key in sorted(rows)],
        }

    async def _try_flush(self) -> None:
        try:
            await self.flush()
        except RedisUnavailable:
            return

    async def _not_counted_before(
        self, events: Sequence[CountedLookup | CountedPages]
    ) -> list[CountedLookup | CountedPages]:
        """Leave out lookups whose request id was counted; ids stay claimed here until their counts are in."""
        fresh: list[CountedLookup | CountedPages] = []
        asked: dict[tuple[str, str], CountedLookup] = {}
        for event in events:
            if not isinstance(event, CountedLookup) or event.request_id is None:
                fresh.append(event)
            else:
                asked.setdefault((event.source.tenant, event.request_id), event)
        unclaimed = [name for name in asked if name not in self._claimed]

        def claim(pipe: Any) -> None:
            for name in unclaimed:
                pipe.set(redis_keys.counted_request(*name), b"1", nx=True, ex=REQUEST_SECONDS)

        answers = await self.redis.pipeline(claim) if unclaimed else []
        self._claimed.update(name for name, first in zip(unclaimed, answers, strict=True) if first)
        return fresh + [event for name, event in asked.items() if name in self._claimed]


def _queue_increments(pipe: Any, sums: Mapping[tuple[int, int], Mapping[str, int]]) -> None:
    kept = dict(RESOLUTIONS)
    for (step, start), fields in sums.items():
        key = redis_keys.hits(step, start)
        for name, pages in fields.items():
            pipe.hincrby(key, name, pages)
        pipe.expire(key, kept[step] + step)


def _field(source: Source, pool: str, metric: str) -> str:
    return json.dumps([source.tenant, source.namespace, source.model, source.engine, pool, metric])


def _parse_field(raw: bytes) -> tuple[dict[str, str], str]:
    *labels, metric = json.loads(raw)
    return dict(zip(LABELS, labels, strict=True)), metric


def _wanted(labels: Mapping[str, str], by: Sequence[str], tenant: str | None) -> bool:
    if tenant is not None and labels["tenant"] != tenant:
        return False
    return (labels["pool"] != WHOLE_PREFIX) == ("pool" in by)


def _resolution(window: int, step: int, by: Sequence[str]) -> int:
    errors = [
        FieldError("by", "unknown", f"has {name!r}, use {', '.join(LABELS)}")
        for name in by
        if name not in LABELS
    ]
    fitting = [base for base, kept in RESOLUTIONS if step > 0 and step % base == 0 and window <= kept]
    if not fitting:
        listed = ", ".join(f"multiples of {b} s for windows up to {kept} s" for b, kept in RESOLUTIONS)
        errors.append(
            FieldError("step", "not_kept", f"is {step} s over a window of {window} s; kept are {listed}")
        )
    elif window // step > MAX_BUCKETS:
        errors.append(FieldError("window", "too_long", f"has {window // step} steps, at most {MAX_BUCKETS}"))
    if errors:
        raise InvalidInput("these hit rates are not kept", errors)
    return fitting[0]


def _row(
    by: Sequence[str], key: tuple[str, ...], metrics: Mapping[str, list[int]], buckets: int
) -> dict[str, Any]:
    zeros = [0] * buckets
    row: dict[str, Any] = {"labels": dict(zip(by, key, strict=True))}
    row.update({name: metrics.get(name, zeros) for name in METRICS})
    row["misses"] = {n.removeprefix("miss:"): v for n, v in metrics.items() if n.startswith("miss:")}
    return row
