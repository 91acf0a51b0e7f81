"""What lookups promised and reads have not taken yet: its leases, and the generations that fence reports."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from dataplane.object_store import ObjectStore
from metadata.codec import PageHashes

_KEPT: Final = 256
_KEEP_SECONDS: Final = 60.0
"""How long a promise waits for its read. An engine that was to read it but cannot drops it without a word."""


@dataclass
class _Promise:
    page_hashes: PageHashes
    generation: bytes
    keys: list[str]
    windows: dict[str, list[str]]
    made_at: float
    leased_at: float
    place: dict[bytes, int] = field(default_factory=dict)

    def generation_of(self, page_hash: bytes) -> int | None:
        if not self.place:
            self.place = {h: i for i, h in enumerate(self.page_hashes)}
        at = self.place.get(page_hash)
        return None if at is None else self.generation[at]


class Promises:
    """The promises of one rank. Safe to use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._promises: deque[_Promise] = deque(maxlen=_KEPT)

    def add(
        self, page_hashes: PageHashes, generation: bytes, keys: list[str], windows: Mapping[str, list[str]]
    ) -> None:
        """Note an answer.

        Args:
            page_hashes: pages of the lookup.
            generation: as it was answered, one byte a page.
            keys: one leased object a promised page, in order.
            windows: pool name -> the leased objects of its window.
        """
        now = self._clock()
        with self._lock:
            self._promises.append(_Promise(page_hashes, generation, keys, dict(windows), now, now))

    def read(self, name: str, page_hashes: PageHashes) -> None:
        """Note a read of a pool: pages up to its last need no lease any more, nor does the pool's window."""
        if not page_hashes:
            return
        last = page_hashes[-1]
        with self._lock:
            for promise in self._promises:
                if not (promise.keys or promise.windows):
                    continue
                # A key's place is its page's: promised pages are a prefix of the lookup's.
                if (at := _index(promise.page_hashes, last)) is not None:
                    promise.windows.pop(name, None)
                    promise.keys = promise.keys if at + 1 < len(promise.keys) else []

    def generations(self, page_hashes: PageHashes) -> bytes | None:
        """Return the newest known generation of each page, None where one of them is not known."""
        found = bytearray()
        with self._lock:
            newest = list(reversed(self._promises))
            for page_hash in page_hashes:
                known = (p.generation_of(page_hash) for p in newest if p.generation)
                generation = next((g for g in known if g is not None), None)
                if generation is None:
                    return None
                found.append(generation)
        return bytes(found)

    def renew(self, store: ObjectStore) -> None:
        """Renew the leases of what is promised and not read yet, each after a third of its time (T3)."""
        if store.lease_seconds is None:
            return
        now = self._clock()
        due: list[list[str]] = []
        with self._lock:
            for promise in self._promises:
                if now - promise.made_at > _KEEP_SECONDS:
                    promise.keys, promise.windows = [], {}
                if not (promise.keys or promise.windows):
                    continue
                if now - promise.leased_at >= store.lease_seconds / 3:
                    promise.leased_at = now
                    due.append(promise.keys + [k for keys in promise.windows.values() for k in keys])
        for keys in due:
            store.exists(keys)


def _index(page_hashes: PageHashes, page_hash: bytes) -> int | None:
    """Return where a hash is. A search of raw bytes: a promise has thousands, a read asks once."""
    at = page_hashes.raw.find(page_hash)
    while at >= 0 and at % len(page_hash):
        at = page_hashes.raw.find(page_hash, at + 1)
    return at // len(page_hash) if at >= 0 else None
