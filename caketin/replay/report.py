"""What a replay found: numbers first, then the tables a person reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from caketin.replay.rank import Restored, Stored
from caketin.replay.report_parts import Latencies, write_json
from dataplane.messages.control import LookupResult

_NOT_PLAIN: Final = frozenset(
    {"pool_hits", "misses", "lost", "rejected", "errors", "events", "latencies", "seconds"}
)


@dataclass
class Report:
    """Totals of a replay.

    Attributes:
        load: name of the load.
        pools: name of the pool set.
        store: kind of the store.
        tp: ranks.
        sidecars: which pages of windowed pools were backed up.
        concurrency: requests in flight.
        requests: replayed.
        asked_pages: pages that the requests have together.
        degraded: lookups without an answer: the control plane or its Redis was away.
        degraded_pages: pages of those lookups; they are no misses, and no hits either.
        promised_pages: pages that the lookups said are restorable: the index claims them.
        leased_pages: those that the store had too, and leased to every rank, before the first read. An engine
            is promised only these.
        hit_pages: pages that were restored, that is read by every rank.
        backed_up_pages: pages that the index took something of.
        unstored_pages: pages that were to be backed up and lack something on some rank.
        rejected: code -> claims that the index refused.
        lost_pages: promised by the lookups and not restored.
        broken_pages: leased and not restored.
        reported_pages: pages that were reported missing, by each rank for itself.
        wrong_pages: restored pages whose bytes were not what was written; anything but 0 is a fault.
        verified_pages: restored pages whose bytes were compared.
        pool_hits: pool -> pages that the pool alone would have allowed, as the lookups say.
        misses: reason -> pages that were not restorable.
        lost: reason -> pages that were promised and lost, by the reason of the first of each request.
        errors: call and code -> how often a call failed as a whole.
        hanging: transfers of the leader that had not returned at the end.
        events: what else the leader met: registered again, failed heartbeats.
        ended_early: why requests are left; empty where none are.
        bytes_read: from the store, by all ranks.
        bytes_written: to the store, by all ranks.
        read_seconds: in prefetches, of the slowest rank.
        write_seconds: in back ups, of the slowest rank.
        seconds: wall clock of the replay.
        latencies: call -> durations.
    """

    load: str
    pools: str
    store: str
    tp: int = 1
    sidecars: str = "all"
    concurrency: int = 1
    requests: int = 0
    asked_pages: int = 0
    degraded: int = 0
    degraded_pages: int = 0
    promised_pages: int = 0
    leased_pages: int = 0
    hit_pages: int = 0
    backed_up_pages: int = 0
    unstored_pages: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    lost_pages: int = 0
    broken_pages: int = 0
    reported_pages: int = 0
    wrong_pages: int = 0
    verified_pages: int = 0
    pool_hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    hanging: int = 0
    ended_early: str = ""
    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    seconds: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)

    @property
    def queried_pages(self) -> int:
        """Pages that the control plane gave an answer for."""
        return self.asked_pages - self.degraded_pages

    @property
    def hit_rate(self) -> float:
        """Restored pages of those that the control plane gave an answer for, 0 to 1."""
        return self.hit_pages / self.queried_pages if self.queried_pages else 0.0

    def looked_up(self, pages: int, found: LookupResult | None, seconds: float, error: str | None) -> None:
        """Count a request's lookup; `found` is None where no answer came, for the reason `error`."""
        self.requests += 1
        self.asked_pages += pages
        self.latencies.note("lookup", seconds)
        if error is not None:
            self.errors[f"lookup: {error}"] += 1
        if found is None or found.degraded:
            self.degraded += 1
            self.degraded_pages += pages
            return
        self.promised_pages += found.hit_pages
        self.pool_hits.update(found.pools)
        if found.miss is not None:
            self.misses[found.miss.reason] += pages - found.hit_pages

    def prefetched(self, promised: int, done: Restored, *, verified: bool) -> None:
        """Count a prefetch of `promised` pages."""
        self.latencies.note("prefetch", done.seconds)
        self.read_seconds += done.seconds
        self.bytes_read += done.bytes
        self.hit_pages += done.pages
        self.leased_pages += done.leased_pages
        self.broken_pages += max(0, done.leased_pages - done.pages)
        if done.pages < promised:
            self.lost_pages += promised - done.pages
            self.lost[done.lost_because or done.error or "unknown"] += promised - done.pages
        if done.error is not None:
            self.errors[f"prefetch: {done.error}"] += 1
        if verified:
            self.verified_pages += done.pages
            self.wrong_pages += len(done.wrong)

    def backed_up(self, done: Stored) -> None:
        """Count a back up."""
        self.latencies.note("back up", done.seconds)
        self.write_seconds += done.seconds
        self.bytes_written += done.bytes
        self.backed_up_pages += done.claimed
        self.unstored_pages += done.unstored
        self.rejected += done.rejected
        if done.error is not None:
            self.errors[f"back up: {done.error}"] += 1

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as plain JSON values."""
        plain = {name: value for name, value in self.__dict__.items() if name not in _NOT_PLAIN}
        counters = ("pool_hits", "misses", "lost", "rejected", "errors", "events")
        return {
            **plain,
            **{name: dict(sorted(getattr(self, name).items())) for name in counters},
            "queried_pages": self.queried_pages,
            "hit_rate": round(self.hit_rate, 6),
            "read_seconds": round(self.read_seconds, 3),
            "write_seconds": round(self.write_seconds, 3),
            "seconds": round(self.seconds, 3),
            "latencies": self.latencies.summary(),
        }

    def print(self, console: Console) -> None:
        """Print the tables, each under a line that says what it is."""
        refused = Counter({f"claim refused: {code}": n for code, n in self.rejected.items()})
        trouble = self.errors + self.events + refused
        tables = [
            (self._title(), self._totals()),
            ("By pool, the longest prefix that each allows:", self._by_pool()),
            (self._moved(), self.latencies.table()),
            *([("What else happened:", _counts(trouble))] if trouble else []),
        ]
        for line, table in tables:
            console.print(line, style="bold", highlight=False, markup=False, soft_wrap=True)
            console.print(table)

    def write_json(self, path: str) -> None:
        """Write all numbers to a file, or to standard output for `-`."""
        write_json(self.to_json(), path)

    def _title(self) -> str:
        ranks = f", TP {self.tp}" if self.tp > 1 else ""
        flight = f", {self.concurrency} in flight" if self.concurrency > 1 else ""
        how = f"{self.pools}{ranks}, store: {self.store}, sidecars: {self.sidecars}{flight}"
        ended = f" (ended early: {self.ended_early})" if self.ended_early else ""
        return f"{self.load}: {self.requests:,} requests, {how}{ended}"

    def _moved(self) -> str:
        read = f"{_size(self.bytes_read)} read{_speed(self.bytes_read, self.read_seconds)}"
        written = f"{_size(self.bytes_written)} written{_speed(self.bytes_written, self.write_seconds)}"
        return f"{read}, {written}; {self.seconds:.1f} s in all:"

    def _totals(self) -> Table:
        table = Table()
        table.add_column("")
        table.add_column("pages", justify="right")
        table.add_column("of queried", justify="right")
        rows = [
            ("asked for", self.asked_pages, ""),
            *([("no answer (degraded)", self.degraded_pages, "")] if self.degraded else []),
            ("queried", self.queried_pages, self._share(self.queried_pages)),
            ("claimed by the index", self.promised_pages, self._share(self.promised_pages)),
            ("promised: in the store too", self.leased_pages, self._share(self.leased_pages)),
            ("restored from L3", self.hit_pages, self._share(self.hit_pages)),
            ("backed up", self.backed_up_pages, self._share(self.backed_up_pages)),
            *([("not stored", self.unstored_pages, "")] if self.unstored_pages else []),
            *((f"miss: {reason}", pages, self._share(pages)) for reason, pages in self.misses.most_common()),
            ("promised but lost", self.broken_pages, self._share(self.broken_pages)),
            ("claimed but lost", self.lost_pages, self._share(self.lost_pages)),
            *((f"lost: {reason}", pages, self._share(pages)) for reason, pages in self.lost.most_common()),
        ]
        for name, pages, share in rows:
            table.add_row(name, f"{pages:,}", share)
        wrong = f"{self.wrong_pages:,} of {self.verified_pages:,}"
        table.add_row("wrong bytes", wrong if self.verified_pages else "not compared", "")
        return table

    def _by_pool(self) -> Table:
        table = Table()
        table.add_column("pool")
        table.add_column("pages", justify="right")
        table.add_column("hit rate", justify="right")
        for name, pages in sorted(self.pool_hits.items()):
            table.add_row(name, f"{pages:,}", self._share(pages))
        return table

    def _share(self, pages: int) -> str:
        return f"{100 * pages / self.queried_pages:.3f} %" if self.queried_pages else ""


def _counts(counts: Counter[str]) -> Table:
    table = Table()
    table.add_column("")
    table.add_column("times", justify="right")
    for name, count in sorted(counts.items()):
        table.add_row(name, f"{count:,}")
    return table


def _speed(count: int, seconds: float) -> str:
    return f" ({_size(count / seconds)}/s)" if count and seconds > 0 else ""


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:  # noqa: PLR2004
            return f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
