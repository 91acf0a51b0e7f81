"""What a replay found: numbers first, then the table a person reads."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table


@dataclass
class Latencies:
    """Durations of one kind of call, in seconds."""

    seconds: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Return count, median, 99th percentile and maximum; times in milliseconds."""
        if not self.seconds:
            return {"count": 0}
        ms = np.array(self.seconds) * 1000
        return {
            "count": len(ms),
            "p50_ms": round(float(np.percentile(ms, 50)), 3),
            "p99_ms": round(float(np.percentile(ms, 99)), 3),
            "max_ms": round(float(ms.max()), 3),
        }


@dataclass
class Report:
    """Totals of a replay.

    Attributes:
        load: name of the load.
        pools: name of the pool set.
        store: kind of the store.
        requests: replayed.
        asked_pages: pages that the requests have together.
        promised_pages: pages that the lookups said are restorable.
        hit_pages: pages that were restored, that is read.
        backed_up_pages: pages that were stored anew.
        lost_pages: promised and not restored.
        wrong_pages: restored pages whose bytes were not what was written; anything but 0 is a fault.
        verified_pages: restored pages whose bytes were compared.
        pool_hits: pool -> pages that the pool alone would have allowed, as the lookups say.
        misses: reason -> pages that were not restorable.
        bytes_read: from the store.
        bytes_written: to the store.
        degraded: lookups that the control plane could not answer.
        seconds: wall clock of the replay.
        latencies: call -> durations.
    """

    load: str
    pools: str
    store: str
    requests: int = 0
    asked_pages: int = 0
    promised_pages: int = 0
    hit_pages: int = 0
    backed_up_pages: int = 0
    lost_pages: int = 0
    wrong_pages: int = 0
    verified_pages: int = 0
    pool_hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0
    bytes_written: int = 0
    degraded: int = 0
    seconds: float = 0.0
    latencies: dict[str, Latencies] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Restored pages of the asked ones, 0 to 1."""
        return self.hit_pages / self.asked_pages if self.asked_pages else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as plain JSON values."""
        plain = {
            name: value
            for name, value in self.__dict__.items()
            if name not in {"pool_hits", "misses", "latencies", "seconds"}
        }
        return {
            **plain,
            "hit_rate": round(self.hit_rate, 6),
            "pool_hits": dict(sorted(self.pool_hits.items())),
            "misses": dict(sorted(self.misses.items())),
            "seconds": round(self.seconds, 3),
            "latencies": {name: lat.summary() for name, lat in sorted(self.latencies.items())},
        }

    def print(self, console: Console) -> None:
        """Print the table."""
        console.print(self._totals())
        console.print(self._by_pool())
        console.print(self._calls())

    def write_json(self, path: str) -> None:
        """Write all numbers to a file, or to standard output for `-`."""
        text = json.dumps(self.to_json(), indent=2) + "\n"
        with open("/dev/stdout" if path == "-" else path, "w", encoding="utf-8") as out:  # noqa: PTH123
            out.write(text)

    def _totals(self) -> Table:
        table = Table(title=f"{self.load}: {self.requests:,} requests, {self.pools}, store: {self.store}")
        table.add_column("")
        table.add_column("pages", justify="right")
        table.add_column("of asked", justify="right")
        rows = [
            ("asked for", self.asked_pages),
            ("promised by the lookup", self.promised_pages),
            ("restored from L3", self.hit_pages),
            ("backed up", self.backed_up_pages),
            ("promised but lost", self.lost_pages),
            *((f"miss: {reason}", pages) for reason, pages in self.misses.most_common()),
        ]
        for name, pages in rows:
            share = f"{100 * pages / self.asked_pages:.3f} %" if self.asked_pages else ""
            table.add_row(name, f"{pages:,}", share)
        wrong = f"{self.wrong_pages:,} of {self.verified_pages:,}"
        table.add_row("wrong bytes", wrong if self.verified_pages else "not compared", "")
        return table

    def _by_pool(self) -> Table:
        table = Table(title="by pool: the longest prefix that each allows")
        table.add_column("pool")
        table.add_column("pages", justify="right")
        table.add_column("hit rate", justify="right")
        for name, pages in sorted(self.pool_hits.items()):
            share = f"{100 * pages / self.asked_pages:.3f} %" if self.asked_pages else ""
            table.add_row(name, f"{pages:,}", share)
        return table

    def _calls(self) -> Table:
        title = f"{_size(self.bytes_read)} read, {_size(self.bytes_written)} written in {self.seconds:.1f} s"
        table = Table(title=title)
        for name in ("call", "count", "median ms", "p99 ms", "max ms"):
            table.add_column(name, justify="left" if name == "call" else "right")
        for name, latency in sorted(self.latencies.items()):
            s = latency.summary()
            if s["count"]:
                numbers = (f"{s[k]:.2f}" for k in ("p50_ms", "p99_ms", "max_ms"))
                table.add_row(name, f"{s['count']:,.0f}", *numbers)
        return table


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:  # noqa: PLR2004
            return f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
