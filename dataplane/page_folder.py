"""The page files of one file store: found by key, written whole or not at all, extended, read, removed.

A new file is written in the workspace and then *linked* to its name, which fails when somebody else was
first: two writers never undo each other. Parts that come later, and removals of single parts, make a new file
and put it in the old one's place while the folder is locked.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from dataplane.file_space import on_disk
from dataplane.file_workspace import Workspace
from dataplane.object_store import StoreCode
from dataplane.page_file import (
    Damaged,
    Memory,
    StoredPart,
    checksum_of,
    copy_part,
    encode_header,
    read_into,
    read_parts,
    read_table,
    write_all,
)

log = logging.getLogger(__name__)

# What a key is without its part; part names are checked on their own.
_IDENTITY: Final = re.compile(
    r"ct1/([0-9a-f]{16})/(?:manifest|([0-9a-f]{64})/([0-9a-f]{8}\.(?:0|[1-9][0-9]{0,3})))"
)
_NAMESPACE: Final = re.compile(r"ct1/([0-9a-f]{16})/")
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ATTEMPTS: Final = 100  # each lost race means that another process got on; this many means a fault


class PartMemory(NamedTuple):
    """One part in memory: its name, its bytes in total, and where they are."""

    name: str
    size: int
    memory: list[Memory]


class PageFolder:
    """The folder `objects` of a file store."""

    def __init__(self, folder: str, workspace: Workspace, *, fsync: bool, touch_seconds: float) -> None:
        self._folder = folder
        self._workspace = workspace
        self._fsync = fsync
        self._touch_ns = round(touch_seconds * 1e9)

    def path(self, identity: str) -> str | None:
        """Return the file of an identity (a key without its part); None for what is none."""
        match = _IDENTITY.fullmatch(identity)
        if match is None:
            return None
        namespace, page_hash, shard = match.groups()
        if page_hash is None:
            return f"{self._folder}/{namespace}/manifest"
        # 256 folders: with 4,096 a removal of 20,000 files took seven times as long on ext4.
        return f"{self._folder}/{namespace}/{page_hash[0]}/{page_hash[1]}/{page_hash}.{shard}"

    def put(self, identity: str, path: str, parts: Sequence[PartMemory]) -> tuple[list[StoreCode], int]:
        """Store parts; those that exist stay. Returns a code each, and by how much the disk use grew."""
        first: dict[str, PartMemory] = {}
        for part in parts:
            first.setdefault(part.name, part)
        try:
            for _ in range(_ATTEMPTS):
                done = self._create(identity, path, list(first.values())) or self._extend(
                    identity, path, first
                )
                if done is not None:
                    held, grown = done
                    return [_agreement(held[part.name], part.size) for part in parts], grown
        except (OSError, Damaged) as e:
            full = isinstance(e, OSError) and e.errno in _FULL
            log.warning("put: %s was not written: %s", identity, e)
            return [StoreCode.NO_SPACE if full else StoreCode.TRANSFER_FAILED] * len(parts), 0
        log.error("put: %s was not written after %d attempts", identity, _ATTEMPTS)
        return [StoreCode.TRANSFER_FAILED] * len(parts), 0

    def get(self, identity: str, path: str, parts: Sequence[PartMemory]) -> list[StoreCode]:
        """Read parts into memory; a code each."""
        try:
            with _opened(path) as fd:
                if fd is None:
                    return [StoreCode.MISSING] * len(parts)
                held = read_parts(fd, identity)
                codes = [_read(fd, held.get(part.name), part) for part in parts]
                self._touch(fd)
                return codes
        except Damaged as e:
            log.warning("get: the file of %s %s", identity, e)
            return [StoreCode.CHECKSUM] * len(parts)
        except OSError as e:
            log.warning("get: %s was not read: %s", identity, e)
            return [StoreCode.TRANSFER_FAILED] * len(parts)

    def sizes(self, identity: str, path: str, *, renew: bool) -> dict[str, int]:
        """Return the bytes of each part that a file holds; nothing for a missing or damaged file."""
        with _opened(path) as fd:
            if fd is None:
                return {}
            try:
                held = read_parts(fd, identity)
            except Damaged:
                return {}
            if renew:
                self._touch(fd)
            return {name: part.length for name, part in held.items()}

    def remove(self, identity: str, path: str, names: Iterable[str]) -> tuple[int, int]:
        """Remove parts; a damaged file goes as a whole. Returns how many parts went and the bytes freed."""
        asked = set(names)
        with _folder_locked(path) as there, _opened(path) as fd:
            if fd is None or not there:
                return 0, 0
            before = on_disk(os.fstat(fd).st_size)
            try:
                held = read_parts(fd, identity)
            except Damaged:
                _unlink(path)
                return len(asked), before
            kept = {name: part for name, part in held.items() if name not in asked}
            if len(kept) == len(held):
                return 0, 0
            if not kept:
                _unlink(path)
                return len(held), before
            draft, size = self._draft(identity, fd, kept, [])
            _replace(draft, path)
            return len(held) - len(kept), before - on_disk(size)

    def keys(self, prefix: str) -> Iterator[str]:
        """Yield the keys that start with `prefix`; damaged files are left out."""
        match = _NAMESPACE.match(prefix)
        for path in _files_below(f"{self._folder}/{match[1]}" if match else self._folder):
            yield from (key for key in _keys_in(path) if key.startswith(prefix))

    def purge(self, namespace_id: str) -> tuple[int, int]:
        """Remove a namespace. Returns how many parts went and the bytes freed.

        At once for readers, because the folder is moved away before its files are counted and removed.
        """
        grave = self._workspace.new_path()
        try:
            os.rename(f"{self._folder}/{namespace_id}", grave)  # noqa: PTH104
        except FileNotFoundError:
            return 0, 0
        removed = freed = 0
        for path in _files_below(grave):
            removed += sum(1 for _ in _keys_in(path))
            freed += on_disk(os.stat(path).st_size)  # noqa: PTH116
        shutil.rmtree(grave, ignore_errors=True)
        return removed, freed

    def _create(self, identity: str, path: str, parts: list[PartMemory]) -> tuple[dict[str, int], int] | None:
        """Write a new file; None when there is one."""
        if os.path.exists(path):  # noqa: PTH110
            return None
        draft, size = self._draft(identity, -1, {}, parts)
        try:
            _link(draft, path)
        except FileExistsError:
            return None
        finally:
            _unlink(draft)
        return {part.name: part.size for part in parts}, on_disk(size)

    def _extend(
        self, identity: str, path: str, parts: dict[str, PartMemory]
    ) -> tuple[dict[str, int], int] | None:
        """Add the parts that a file lacks; None when there is no such file any more."""
        held = self.sizes(identity, path, renew=False)
        if held.keys() >= parts.keys():
            return held, 0
        try:
            with _folder_locked(path) as there, _opened(path) as fd:
                if fd is None or not there:
                    return None
                before = on_disk(os.fstat(fd).st_size)
                try:
                    kept = read_parts(fd, identity)
                except Damaged as e:
                    log.warning("put: the file of %s %s and is replaced", identity, e)
                    kept = {}
                added = [part for name, part in parts.items() if name not in kept]
                draft, size = self._draft(identity, fd, kept, added)
                _replace(draft, path)
        except FileNotFoundError:
            return None  # the namespace was purged
        sizes = {name: part.length for name, part in kept.items()}
        return sizes | {part.name: part.size for part in added}, on_disk(size) - before

    def _draft(
        self, identity: str, source: int, kept: dict[str, StoredPart], added: list[PartMemory]
    ) -> tuple[str, int]:
        """Write a complete file in the workspace: parts of an open file, then parts in memory."""
        table = [(name, part.length, part.checksum) for name, part in kept.items()]
        table += [(part.name, part.size, checksum_of(part.memory)) for part in added]
        header = encode_header(identity, table)
        draft = self._workspace.new_path()
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            pieces = [piece for part in added for piece in part.memory]
            if kept:
                write_all(fd, [header])
                for part in kept.values():
                    copy_part(source, fd, part)
                write_all(fd, pieces)
            else:
                write_all(fd, [header, *pieces])
            if self._fsync:
                os.fdatasync(fd)
        except BaseException:
            _unlink(draft)
            raise
        finally:
            os.close(fd)
        return draft, len(header) + sum(length for _, length, _ in table)

    def _touch(self, fd: int) -> None:
        now = time.time_ns()
        if now - os.fstat(fd).st_mtime_ns > self._touch_ns:
            with suppress(OSError):  # a read-only mount still serves
                os.utime(fd, ns=(now, now))


def _read(fd: int, stored: StoredPart | None, part: PartMemory) -> StoreCode:
    if stored is None:
        return StoreCode.MISSING
    if stored.length != part.size:
        return StoreCode.SIZE_MISMATCH
    return StoreCode.OK if read_into(fd, stored, part.memory) else StoreCode.CHECKSUM


def _agreement(held: int, asked: int) -> StoreCode:
    return StoreCode.OK if held == asked else StoreCode.SIZE_MISMATCH


def _link(draft: str, path: str) -> None:
    try:
        os.link(draft, path)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)  # noqa: PTH103, PTH120
        os.link(draft, path)


def _replace(draft: str, path: str) -> None:
    try:
        os.replace(draft, path)  # noqa: PTH105
    except BaseException:
        _unlink(draft)
        raise


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108


@contextmanager
def _opened(path: str) -> Iterator[int | None]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _folder_locked(path: str) -> Iterator[bool]:
    """Hold the lock on a file's folder; False when there is no folder."""
    with _opened(os.path.dirname(path)) as fd:  # noqa: PTH120
        if fd is not None:
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd is not None


def _files_below(folder: str) -> Iterator[str]:
    for base, _, names in os.walk(folder):
        yield from (f"{base}/{name}" for name in names)


def _keys_in(path: str) -> Iterator[str]:
    with _opened(path) as fd:
        if fd is not None:
            with suppress(Damaged):
                identity, parts = read_table(fd)
                yield from (f"{identity}/{name}" for name in parts)
