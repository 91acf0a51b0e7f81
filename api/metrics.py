"""What Prometheus sees: every metric's name and labels, in one place.

Labels are bounded: routes are templates, never paths; methods and codes come from short lists; names of pools
and tenants beyond the first 64 of a process are `other`.

With one process the numbers live in it. With several workers (`caketin serve --workers`) prometheus_client's
files in `PROMETHEUS_MULTIPROC_DIR` hold them, and whichever worker is asked answers for all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from metadata.hit_counters import HitCounters
from metadata.page_claims import Committed
from metadata.prefix_lookup import LookupAnswer

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
MULTIPROCESS_FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"
MAX_POOL_LABELS: Final = 64
MAX_TENANT_LABELS: Final = 64
OTHER: Final = "other"
_METHODS: Final = frozenset({"GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS", "PATCH"})
_SECONDS: Final = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 5, 10)
_PAGES: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._pools: set[str] = set()
        self._tenants: set[str] = set()
        self._dropped_seen = 0
        self._http_metrics()
        self._lookup_metrics()
        self._write_metrics()
        self._state_metrics()

    def _http_metrics(self) -> None:
        self.request_seconds = Histogram(
            "caketin_http_request_duration_seconds",
            "Time from the request's headers to the end of the answer.",
            ("method", "route", "code"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_progress = Gauge(
            "caketin_http_requests_in_progress",
            "Requests that are being answered.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )

    def _lookup_metrics(self) -> None:
        self.lookups = Counter(
            "caketin_lookups",
            "Lookups by purpose and outcome (hit, partial, miss, degraded).",
            ("purpose", "outcome"),
            registry=self.registry,
        )
        self.lookup_queried = Counter(
            "caketin_lookup_queried_pages",
            "Pages that lookups asked for; degraded ones apart.",
            ("purpose",),
            registry=self.registry,
        )
        self.lookup_hits = Counter(
            "caketin_lookup_hit_pages",
            "Pages of the longest restorable prefixes.",
            ("purpose",),
            registry=self.registry,
        )
        self.lookup_misses = Counter(
            "caketin_lookup_misses",
            "Lookups whose prefix ended early, by the pool that ended it and the reason.",
            ("purpose", "pool", "reason"),
            registry=self.registry,
        )
        self.tenant_pages = Counter(
            "caketin_tenant_lookup_pages",
            "Pages of counted lookups (prefetch) by tenant: queried, hit.",
            ("tenant", "result"),
            registry=self.registry,
        )
        self.pool_pages = Counter(
            "caketin_pool_lookup_pages",
            "Pages of counted lookups (prefetch) by pool: queried, hit (what this pool alone would allow).",
            ("pool", "result"),
            registry=self.registry,
        )
        self.lookup_size = Histogram(
            "caketin_lookup_pages", "Pages of a lookup.", buckets=_PAGES, registry=self.registry
        )

    def _write_metrics(self) -> None:
        self.commits = Counter("caketin_commits", "Commits that were taken.", registry=self.registry)
        self.committed = Counter(
            "caketin_commit_pages",
            "Pages of commits: committed (a pool was claimed), complete (all shards), rejected (no anchor).",
            ("result",),
            registry=self.registry,
        )
        self.missing = Counter(
            "caketin_missing_claims",
            "Claims that reports of missing pages cleared, or left alone as newer ones hold (stale).",
            ("result",),
            registry=self.registry,
        )
        self.registrations = Counter(
            "caketin_registrations", "Registrations of ranks.", ("result",), registry=self.registry
        )

    def _state_metrics(self) -> None:
        self.redis_up = Gauge(
            "caketin_redis_up",
            "1 while Redis serves calls, 0 while its circuit is open.",
            registry=self.registry,
            multiprocess_mode="livemin",
        )
        self.backlog = Gauge(
            "caketin_hit_counter_backlog_events",
            "Counted events that Redis does not have yet.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.dropped = Counter(
            "caketin_hit_counter_dropped_events",
            "Counted events that were given up because the backlog was full.",
            registry=self.registry,
        )
        self.build = Gauge(
            "caketin_build_info",
            "Always 1; the version is the label.",
            ("version",),
            registry=self.registry,
            multiprocess_mode="max",
        )
        self.build.labels(version("caketin")).set(1)
        self.redis_up.set(1)
        if not os.environ.get(MULTIPROCESS_FOLDER):
            ProcessCollector(registry=self.registry)

    def request(self, method: str, route: str, code: int, seconds: float) -> None:
        """Count one answered request; `route` is a template."""
        known = method if method in _METHODS else OTHER
        self.request_seconds.labels(known, route, str(code)).observe(seconds)

    def lookup(self, purpose: str, tenant: str, found: LookupAnswer) -> None:
        """Count one lookup."""
        if found.degraded:
            _child(self.lookups, purpose, "degraded").inc()
            return
        hit, queried = found.hit_pages, found.queried_pages
        outcome = "hit" if hit == queried else "partial" if hit else "miss"
        _child(self.lookups, purpose, outcome).inc()
        _child(self.lookup_queried, purpose).inc(queried)
        _child(self.lookup_hits, purpose).inc(hit)
        self.lookup_size.observe(queried)
        if found.miss is not None:
            pool = self.pool_label(found.miss.pool or "")
            _child(self.lookup_misses, purpose, pool, found.miss.reason).inc()
        if purpose == "prefetch":
            self._counted_lookup(_bounded(tenant, self._tenants, MAX_TENANT_LABELS), found)

    def _counted_lookup(self, tenant: str, found: LookupAnswer) -> None:
        _child(self.tenant_pages, tenant, "queried").inc(found.queried_pages)
        _child(self.tenant_pages, tenant, "hit").inc(found.hit_pages)
        for name, pages in found.pools.items():
            pool = self.pool_label(name)
            _child(self.pool_pages, pool, "queried").inc(found.queried_pages)
            _child(self.pool_pages, pool, "hit").inc(pages)

    def commit(self, done: Committed) -> None:
        """Count one commit."""
        self.commits.inc()
        self.committed.labels("committed").inc(done.committed)
        self.committed.labels("complete").inc(done.complete)
        self.committed.labels("rejected").inc(len({item[0] for item in done.rejected}))

    def cleared(self, cleared: int, stale: int) -> None:
        """Count one report of missing pages."""
        self.missing.labels("cleared").inc(cleared)
        self.missing.labels("stale").inc(stale)

    def pool_label(self, pool: str) -> str:
        """Return the pool's name, or `other` once there are many: anyone may register names."""
        return _bounded(pool, self._pools, MAX_POOL_LABELS)

    def sample(self, counters: HitCounters, *, redis_up: bool) -> None:
        """Take over the state of the parts that count for themselves."""
        self.redis_up.set(int(redis_up))
        self.backlog.set(counters.backlog)
        dropped = counters.dropped
        self.dropped.inc(max(0, dropped - self._dropped_seen))
        self._dropped_seen = max(dropped, self._dropped_seen)

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a request as being answered."""
        self.in_progress.inc()
        try:
            yield
        finally:
            self.in_progress.dec()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, over all workers where there are several."""
        folder = os.environ.get(MULTIPROCESS_FOLDER)
        if not folder:
            return generate_latest(self.registry)
        _bury_the_dead(Path(folder))
        registry = CollectorRegistry()
        MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


@lru_cache(maxsize=4096)
def _child(metric: Counter, *labels: str) -> Counter:
    """Return a counter with its labels bound; there are few such sets, and a lookup needs fourteen."""
    return metric.labels(*labels)


def _bounded(name: str, seen: set[str], most: int) -> str:
    if name not in seen:
        if len(seen) >= most:
            return OTHER
        seen.add(name)
    return name


def _bury_the_dead(folder: Path) -> None:
    """Forget the gauges of workers that were killed; their counters stay, as counters never decrease."""
    for file in folder.glob("gauge_live*.db"):
        pid = int(file.stem.rsplit("_", 1)[1])
        if not Path("/proc", str(pid)).exists():
            mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]
