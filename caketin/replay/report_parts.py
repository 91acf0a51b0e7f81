"""What the reports of a replay share: durations of calls, and numbers as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table


@dataclass
class Latencies:
    """Durations of calls by their name, in seconds."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def note(self, call: str, seconds: float) -> None:
        """Note how long a call took."""
        self.seconds.setdefault(call, []).append(seconds)

    def summary(self) -> dict[str, dict[str, float]]:
        """Return count, median, 99th percentile and maximum of each call; times in milliseconds."""
        return {name: _summary(seconds) for name, seconds in sorted(self.seconds.items())}

    def table(self, title: str | None = None) -> Table:
        """Return the summary as a table."""
        table = Table(title=title)
        for name in ("call", "count", "median ms", "p99 ms", "max ms"):
            table.add_column(name, justify="left" if name == "call" else "right")
        for name, s in self.summary().items():
            numbers = (f"{s[k]:.2f}" for k in ("p50_ms", "p99_ms", "max_ms"))
            table.add_row(name, f"{s['count']:,.0f}", *numbers)
        return table


def write_json(numbers: Mapping[str, Any], path: str) -> None:
    """Write all numbers to a file, or to standard output for `-`."""
    text = json.dumps(numbers, indent=2) + "\n"
    if path == "-":
        # Not /dev/stdout: in a container that is another user's, and cannot be opened again.
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(path).write_text(text, encoding="utf-8")


def _summary(seconds: list[float]) -> dict[str, float]:
    ms = np.array(seconds) * 1000
    return {
        "count": len(ms),
        "p50_ms": round(float(np.percentile(ms, 50)), 3),
        "p99_ms": round(float(np.percentile(ms, 99)), 3),
        "max_ms": round(float(ms.max()), 3),
    }
