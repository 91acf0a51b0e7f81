"""What a replay must find, worked out with Python sets alone; imports nothing of the packages."""

import hashlib


def prefix_ids(ids: list[int]) -> list[bytes]:
    """Return what names each page of a request: all block ids up to and with it."""
    found, chain = [], b""
    for block in ids:
        chain = hashlib.sha256(chain + block.to_bytes(8, "little")).digest()
        found.append(chain)
    return found


class UnboundedCache:
    """A cache that forgets nothing by itself; pages need every pool but `windowed` throughout.

    `windowed` is needed on the last page of a prefix only (a window of one page).
    """

    def __init__(self, pools: list[str], windowed: str | None) -> None:
        self.pools = pools
        self.windowed = windowed
        self.lost: dict[bytes, set[str]] = {}
        self.stored: set[bytes] = set()

    def lose(self, page: bytes, pool: str) -> None:
        self.lost.setdefault(page, set()).add(pool)

    def restorable(self, pages: list[bytes]) -> int:
        best = 0
        for i, page in enumerate(pages):
            if page not in self.stored:
                break
            gone = self.lost.get(page, set())
            if gone - {self.windowed}:
                break
            if self.windowed not in gone:
                best = i + 1
        return best

    def request(self, ids: list[int]) -> tuple[int, int]:
        """Serve a request; return its pages and how many of them were hits. All others are stored anew."""
        pages = prefix_ids(ids)
        hits = self.restorable(pages)
        for page in pages[hits:]:
            self.stored.add(page)
            self.lost.pop(page, None)
        return len(pages), hits
