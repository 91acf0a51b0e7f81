"""The numbers of a replay through an agent: what host memory had, what L3 had, what was new."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from caketin.replay.report_parts import Latencies, write_json


@dataclass
class AgentReport:
    """Numbers of one replay through an agent.

    Attributes:
        load: name of the load.
        pools: name of the pool set.
        host_slots: pages that the host tier holds.
        requests: replayed.
        asked_pages: pages of all requests.
        host_hit_pages: pages that were restorable from host memory alone when the request came.
        l3_hit_pages: further pages that were restorable once the prefetch had ended.
        stored_pages: pages that were published and written through.
        unstored_pages: pages of back-ups that were not whole.
        no_slots_pages: pages that found no slot in host memory.
        verified_pages: restored pages whose bytes were compared.
        wrong_pages: those that were not what was written; anything but 0 is a fault.
        errors: call and error -> how often.
        seconds: wall clock of the replay.
        latencies: call -> durations.
    """

    load: str
    pools: str
    host_slots: int
    requests: int = 0
    asked_pages: int = 0
    host_hit_pages: int = 0
    l3_hit_pages: int = 0
    stored_pages: int = 0
    unstored_pages: int = 0
    no_slots_pages: int = 0
    verified_pages: int = 0
    wrong_pages: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)
    hanging: int = 0

    @property
    def hit_pages(self) -> int:
        """Restored pages of both tiers."""
        return self.host_hit_pages + self.l3_hit_pages

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as plain JSON values."""
        plain = {n: v for n, v in self.__dict__.items() if n not in {"errors", "latencies", "seconds"}}
        rate = self.asked_pages or 1
        return {
            **plain,
            "hit_pages": self.hit_pages,
            "host_hit_rate": round(self.host_hit_pages / rate, 6),
            "l3_hit_rate": round(self.l3_hit_pages / rate, 6),
            "hit_rate": round(self.hit_pages / rate, 6),
            "errors": dict(sorted(self.errors.items())),
            "seconds": round(self.seconds, 3),
            "latencies": self.latencies.summary(),
        }

    def write_json(self, path: str) -> None:
        """Write all numbers to a file, or to standard output for `-`."""
        write_json(self.to_json(), path)

    def print(self, console: Console) -> None:
        """Print the tables."""
        title = (
            f"{self.load}: {self.requests:,} requests, {self.pools}, host tier of {self.host_slots:,} pages"
        )
        console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
        totals = Table()
        for name in ("", "pages", "of asked"):
            totals.add_column(name, justify="right" if name else "left")
        rows = [
            ("asked for", self.asked_pages),
            ("restored", self.hit_pages),
            ("... from host memory", self.host_hit_pages),
            ("... from L3", self.l3_hit_pages),
            ("written through", self.stored_pages),
            *([("not stored", self.unstored_pages)] if self.unstored_pages else []),
            *([("no slot", self.no_slots_pages)] if self.no_slots_pages else []),
        ]
        for name, pages in rows:
            share = f"{100 * pages / self.asked_pages:.3f} %" if self.asked_pages else ""
            totals.add_row(name, f"{pages:,}", share)
        wrong = f"{self.wrong_pages:,} of {self.verified_pages:,}"
        totals.add_row("wrong bytes", wrong if self.verified_pages else "not compared", "")
        for error, times in sorted(self.errors.items()):
            totals.add_row(error, f"{times:,} times", "")
        console.print(totals)
        console.print(self.latencies.table(f"{self.seconds:.1f} s in all"))
