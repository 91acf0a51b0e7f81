"""What a replay must find, worked out with Python sets alone; imports nothing of the packages.

A request is a list of block ids. Its prefix of n pages can be restored when every pool that needs all pages
has the first n of them, and every pool with a window of w has the last w of them (all, where n is less).
What could not be restored is stored anew: every page of every pool, or, with sidecars at the tail, of the
windowed pools only the last window of the request.
"""

import hashlib
from collections.abc import Iterable

POOLS = {
    "deepseek-v4": (("deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128"), {"swa": 1}),
    "mha": (("kv",), {}),
    "mha-swa": (("kv",), {"swa": 4}),
    "mamba-hybrid": (("kv",), {"mamba": 1}),
}
"""Pool set -> pools that need every page, and windows in pages of those that have one."""

OBJECTS = {"deepseek-v4": 4, "mha": 2, "mha-swa": 4, "mamba-hybrid": 4}
"""Pool set -> objects of one page on one rank."""


def prefix_ids(ids: list[int]) -> list[bytes]:
    """Return what names each page of a request: all block ids up to and with it."""
    found, chain = [], b""
    for block in ids:
        chain = hashlib.sha256(chain + block.to_bytes(8, "little")).digest()
        found.append(chain)
    return found


class UnboundedCache:
    """A cache that forgets nothing by itself."""

    def __init__(self, whole: Iterable[str], windows: dict[str, int], *, tail: bool = False):
        self.whole = list(whole)
        self.windows = windows
        self.tail = tail
        self.stored: dict[str, set[bytes]] = {pool: set() for pool in [*self.whole, *windows]}

    @classmethod
    def of(cls, pools: str, *, tail: bool = False) -> "UnboundedCache":
        whole, windows = POOLS[pools]
        return cls(whole, windows, tail=tail)

    def lose(self, page: bytes, pool: str) -> None:
        self.stored[pool].discard(page)

    def restorable(self, pages: list[bytes]) -> int:
        best = 0
        for n, page in enumerate(pages, start=1):
            if any(page not in self.stored[pool] for pool in self.whole):
                break
            if all(self._window_holds(pool, pages[max(0, n - w) : n]) for pool, w in self.windows.items()):
                best = n
        return best

    def request(self, ids: list[int]) -> tuple[int, int]:
        """Serve a request; return its pages and how many of them were hits. All others are stored anew."""
        pages = prefix_ids(ids)
        hits = self.restorable(pages)
        for pool in self.whole:
            self.stored[pool].update(pages[hits:])
        for pool, window in self.windows.items():
            first = max(hits, len(pages) - window) if self.tail else hits
            self.stored[pool].update(pages[first:])
        return len(pages), hits

    def serve(self, requests: Iterable[list[int]]) -> tuple[int, int]:
        """Serve requests in order; return the sums."""
        served = [self.request(ids) for ids in requests]
        return sum(asked for asked, _ in served), sum(hits for _, hits in served)

    def _window_holds(self, pool: str, pages: list[bytes]) -> bool:
        return all(page in self.stored[pool] for page in pages)
