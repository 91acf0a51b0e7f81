"""How much the file store holds, shared by all processes that use it, and who is evicted when it is full.

The bytes in use stand in one small file that every put changes under a lock. Whoever finds no room takes the
evictor's lock, and only its holder evicts: the others wait for it and look again. Nobody has to be started
for it and nobody's death stops it. A count that a killed process left too high is put right by the next
eviction, which looks at every file anyway.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

log = logging.getLogger(__name__)

_BLOCK: Final = 4096
_COUNT: Final = struct.Struct("<q")
_FREED_AT_ONCE: Final = 0.1  # of the bound, so that the walk over all files is paid once for many puts
_ROUNDS: Final = 3


class EvictedShard(NamedTuple):
    """One shard of one page of one pool, with all its parts, that is no longer stored."""

    namespace_id: str
    page_hash: bytes
    pool_id: str
    shard: int


OnEvict = Callable[[Sequence[EvictedShard]], None]


class _PageFile(NamedTuple):
    path: str
    namespace_id: str
    name: str
    used_ns: int
    bytes: int


def on_disk(length: int) -> int:
    """Return what a file of `length` bytes is counted as: whole blocks."""
    return -(-length // _BLOCK) * _BLOCK


class FileSpace:
    """The size bound of one store's folder. Safe to use from many threads and processes.

    Attributes:
        max_bytes: the bound; None for none.
        on_evict: called with what this process evicted.
    """

    def __init__(self, root: Path, max_bytes: int | None, on_evict: OnEvict | None) -> None:
        """Open the count of the store at `root`; count its files where there is no count yet."""
        self.max_bytes = max_bytes
        self._objects = root / "objects"
        self._count_file = str(root / "used-bytes")
        self._evictor_file = str(root / "evictor.lock")
        self.on_evict = on_evict
        with _locked(self._count_file) as fd:
            if os.fstat(fd).st_size < _COUNT.size:
                _write_count(fd, sum(f.bytes for f in self._page_files()))

    def used(self) -> int:
        """Return the bytes in use, in whole blocks a file."""
        with _locked(self._count_file) as fd:
            return _read_count(fd)

    def reserve(self, count: int) -> bool:
        """Take `count` bytes out of the free space, evicting if need be; False when they do not fit."""
        for _ in range(_ROUNDS):
            with _locked(self._count_file) as fd:
                used = _read_count(fd)
                if self.max_bytes is None or used + count <= self.max_bytes:
                    _write_count(fd, used + count)
                    return True
                if count > self.max_bytes:
                    return False
            self._report(self._evict(count))
        return False

    def release(self, count: int) -> None:
        """Give back `count` bytes."""
        if count:
            with _locked(self._count_file) as fd:
                _write_count(fd, max(0, _read_count(fd) - count))

    def _evict(self, count: int) -> list[EvictedShard]:
        assert self.max_bytes is not None  # noqa: S101 - for mypy; only a bounded store evicts
        with _locked(self._evictor_file):
            with _locked(self._count_file) as fd:
                before = _read_count(fd)
            if before + count <= self.max_bytes:
                return []  # another process made room while we waited
            goal = max(0, int(self.max_bytes * (1 - _FREED_AT_ONCE)) - count)
            total, freed, evicted = self._evict_down_to(goal)
            with _locked(self._count_file) as fd:
                written_meanwhile = _read_count(fd) - before
                _write_count(fd, max(0, total - freed + written_meanwhile))
        return evicted

    def _evict_down_to(self, goal: int) -> tuple[int, int, list[EvictedShard]]:
        """Evict the files used longest ago until `goal` bytes are left.

        Returns bytes before, bytes freed, and what went.

        Two walks instead of a sorted list of all files: 16 bytes a file, and what was used in between stays.
        """
        times, sizes = array("q"), array("q")
        for file in self._page_files():
            times.append(file.used_ns)
            sizes.append(file.bytes)
        total = sum(sizes)
        need = total - goal
        if need <= 0:
            return total, 0, []
        used = np.frombuffer(times, dtype=np.int64)
        order = np.argsort(used, kind="stable")
        freed_after = np.cumsum(np.frombuffer(sizes, dtype=np.int64)[order])
        last = min(int(np.searchsorted(freed_after, need)), len(order) - 1)
        cutoff = int(used[order[last]])
        first_tie = int(np.searchsorted(used[order], cutoff))
        # Clocks tick coarsely: of the files used at the very cutoff only as many go as are needed.
        ties = need - (int(freed_after[first_tie - 1]) if first_tie else 0)
        freed, evicted = 0, []
        for file in self._page_files():
            if file.used_ns > cutoff or (file.used_ns == cutoff and ties <= 0):
                continue
            with suppress(FileNotFoundError):
                os.unlink(file.path)  # noqa: PTH108 - as strings all the way, for speed
                freed += file.bytes
                ties -= file.bytes if file.used_ns == cutoff else 0
                evicted.append(_shard(file))
        return total, freed, evicted

    def _report(self, evicted: list[EvictedShard]) -> None:
        if not evicted:
            return
        log.info("evicted %d page shards", len(evicted))
        if self.on_evict is None:
            return
        try:
            self.on_evict(evicted)
        except Exception:
            log.exception(
                "on_evict failed; the index keeps %d stale claims until they are read", len(evicted)
            )

    def _page_files(self) -> Iterator[_PageFile]:
        for namespace in _folders(str(self._objects)):
            for first in _folders(namespace.path):
                for second in _folders(first.path):
                    for entry in _entries(second.path):
                        with suppress(FileNotFoundError):
                            found = entry.stat(follow_symlinks=False)
                            yield _PageFile(
                                entry.path,
                                namespace.name,
                                entry.name,
                                found.st_mtime_ns,
                                on_disk(found.st_size),
                            )


def _shard(file: _PageFile) -> EvictedShard:
    page_hash, pool_id, shard = file.name.split(".")
    return EvictedShard(file.namespace_id, bytes.fromhex(page_hash), pool_id, int(shard))


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _folders(path: str) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(path) if entry.is_dir(follow_symlinks=False)]


@contextmanager
def _locked(path: str) -> Iterator[int]:
    # Opened anew each time: a lock belongs to an open file, and threads, stores of one process and forked
    # children would share a kept one.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _read_count(fd: int) -> int:
    raw = os.pread(fd, _COUNT.size, 0)
    return int(_COUNT.unpack(raw)[0]) if len(raw) == _COUNT.size else 0


def _write_count(fd: int, value: int) -> None:
    os.pwrite(fd, _COUNT.pack(value), 0)
