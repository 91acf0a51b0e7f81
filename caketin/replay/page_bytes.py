"""Bytes that prove where they come from: every part of every page has its own, made from its identity."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataplane.host_memory import HostMemory

BYTES_VERSION: Final = 2
"""Part of the namespace's revision: raise it when `expected` changes, or stored pages become wrong ones."""

_BLOCK: Final = 4093
"""Bytes made by the hash; longer parts repeat them. A prime, so that no power of two lines up with it."""

_WIPED: Final = 0xA5


def expected(page_hash: bytes, pool: str, shard: int, part: str, size: int) -> NDArray[np.uint8]:
    """Return the bytes of a part of a shard of a page, uint8, (size,)."""
    seed = b"\0".join((page_hash, pool.encode(), b"%d" % shard, part.encode()))
    block = np.frombuffer(hashlib.shake_128(seed).digest(min(size, _BLOCK)), np.uint8)
    return block if size <= _BLOCK else np.resize(block, size)


class PageWriter:
    """Fills, wipes and checks the slots of one shard's memory (page-first layouts)."""

    def __init__(self, memory: HostMemory, shard: int) -> None:
        self._pool = memory.pool.name
        self._shard = shard
        self._parts = [(p.part, p.bytes, memory.columns(p.part)[0]) for p in memory.pool.parts]

    def fill(self, slot: int, page_hash: bytes) -> None:
        """Write the bytes of a page into its slot."""
        for part, size, column in self._parts:
            column[slot] = expected(page_hash, self._pool, self._shard, part, size)

    def wipe(self, slots: NDArray[np.int64]) -> None:
        """Overwrite slots, so that what is read later cannot be what was written before."""
        for _, _, column in self._parts:
            column[slots] = _WIPED

    def intact(self, slot: int, page_hash: bytes) -> bool:
        """Return whether a slot holds exactly the bytes of a page."""
        return all(
            bool((column[slot] == expected(page_hash, self._pool, self._shard, part, size)).all())
            for part, size, column in self._parts
        )
