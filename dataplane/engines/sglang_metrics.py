"""What SGLang's storage metrics are made of."""

from __future__ import annotations

import threading
from typing import Final, Literal

from sglang.srt.observability.metrics_collector import StorageMetrics

_GIB: Final = 1 << 30


class MoveMetrics:
    """Pages moved and how fast, since they were last taken. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = StorageMetrics()

    def note(self, kind: Literal["prefetch", "backup"], pages: int, size: int, seconds: float) -> None:
        """Note a call that moved `pages` pages, `size` bytes."""
        with self._lock:
            getattr(self._stats, f"{kind}_pgs").append(pages)
            getattr(self._stats, f"{kind}_bandwidth").append(size / max(seconds, 1e-9) / _GIB)

    def take(self) -> StorageMetrics:
        """Return what was noted, and begin anew."""
        with self._lock:
            taken, self._stats = self._stats, StorageMetrics()
        return taken
