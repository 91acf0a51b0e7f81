"""Objects in files: the embedded default. No root, no daemon; many processes may read and write one folder.

    FORMAT                                                  what the folder is
    objects/{ns}/{hex}/{hex}/{hash}.{pool id}.{shard}       all parts of one shard of one page (`page_file`)
    objects/{ns}/manifest                                   the pool manifests, as parts; never evicted
    tmp/{random}/                                           unfinished files of one live process
    used-bytes, evictor.lock                                the size bound (`file_space`)

This module takes batches apart into files; `page_folder` does each file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataplane.file_space import FileSpace, OnEvict, on_disk
from dataplane.file_workspace import Workspace, claim_folder
from dataplane.object_store import (
    CallGate,
    ObjectBuffers,
    RegisteredRegions,
    StoreCode,
    StoreError,
    check_batch,
    check_namespace_prefix,
)
from dataplane.page_file import Memory, memory_at
from dataplane.page_folder import PageFolder, PartMemory

_PART_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_HEADER_BYTES: Final = 256  # a generous header of one part; each further part adds at most 77 bytes


@dataclass(slots=True)
class _File:
    """The objects of one batch that belong to one file."""

    identity: str
    path: str
    rows: list[int] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    def in_memory(self, sizes: list[int], memory: Callable[[int], list[Memory]]) -> list[PartMemory]:
        """Return its parts with the memory of the batch that is theirs."""
        return [
            PartMemory(part, sizes[row], memory(row)) for row, part in zip(self.rows, self.parts, strict=True)
        ]


class FileStore:
    """A folder of page files. Implements `object_store.ObjectStore`; `groups` are ignored, it has no leases.

    Attributes:
        root: the folder.
    """

    kind = "file"

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int | None = None,
        fsync: bool = False,
        touch_seconds: float = 10.0,
        on_evict: OnEvict | None = None,
    ) -> None:
        """Open a store, making its folder where there is none.

        Args:
            root: the folder; it must be new, empty, or a file store of this format.
            max_bytes: size bound, counted in blocks of 4 KiB a file; None for none.
            fsync: whether a put returns only after its bytes are on the disk. A page that a power cut tears
                is found by its checksum, so a cache does without.
            touch_seconds: a read marks a file as used when its mark is older than this.
            on_evict: called with what this process evicted, from within the put that needed the room.

        Raises:
            StoreUnavailable: the folder holds something else, or cannot be written.
        """
        self.root = root
        self.lease_seconds: float | None = None
        self.max_region_bytes: int | None = None
        claim_folder(root)
        self._workspace = Workspace(root / "tmp")
        self._folder = PageFolder(
            str(root / "objects"), self._workspace, fsync=fsync, touch_seconds=touch_seconds
        )
        self._space = FileSpace(root, max_bytes, on_evict)
        self._regions = RegisteredRegions()
        self._gate = CallGate(self.kind)

    def tell_evictions(self, on_evict: OnEvict | None) -> None:
        """Set who is called with what this process evicts, in place of what `on_evict` was."""
        self._space.on_evict = on_evict

    def used_bytes(self) -> int:
        """Return the bytes in use by all processes, in blocks of 4 KiB a file."""
        return self._space.used()

    def register(self, address: int, length: int) -> None:
        """See `ObjectStore.register`. Files need no registration; the address is remembered and checked."""
        with self._call():
            self._regions.add(address, length)

    def unregister(self, address: int) -> None:
        """See `ObjectStore.unregister`."""
        with self._call():
            self._regions.discard(address)

    def put(
        self, keys: Sequence[str], buffers: ObjectBuffers, groups: Sequence[str] | None = None
    ) -> NDArray[np.int8]:
        """See `ObjectStore.put`. Says `SIZE_MISMATCH` for a key that exists with another size."""
        check_batch(keys, buffers)
        if groups is not None and len(groups) != len(keys):
            raise ValueError(f"{len(keys)} keys but {len(groups)} groups")
        with self._call():
            codes = self._codes(keys, buffers)
            self._put_files(self._files(keys, codes), buffers, codes)
        return codes

    def get(self, keys: Sequence[str], buffers: ObjectBuffers) -> NDArray[np.int8]:
        """See `ObjectStore.get`."""
        check_batch(keys, buffers)
        with self._call():
            codes = self._codes(keys, buffers)
            self._get_files(self._files(keys, codes), buffers, codes)
        return codes

    def confirm(self, keys: Sequence[str], sizes: NDArray[np.int64]) -> NDArray[np.int8]:
        """See `ObjectStore.confirm`."""
        if len(keys) != len(sizes):
            raise ValueError(f"{len(keys)} keys but {len(sizes)} sizes")
        found = self.sizes(keys)
        codes = np.where(found == sizes, StoreCode.OK, StoreCode.SIZE_MISMATCH).astype(np.int8)
        codes[found < 0] = StoreCode.UNCONFIRMED
        return codes

    def exists(self, keys: Sequence[str], *, renew: bool = True) -> NDArray[np.bool_]:
        """See `ObjectStore.exists`; renewing marks the files as used."""
        present: NDArray[np.bool_] = self._look_up(keys, renew) >= 0
        return present

    def sizes(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """See `ObjectStore.sizes`."""
        return self._look_up(keys, renew=False)

    def keys(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.keys`. Damaged files are left out."""
        with self._call():
            return self._folder.keys(prefix)

    def remove(self, keys: Sequence[str]) -> int:
        """See `ObjectStore.remove`. A damaged file goes as a whole."""
        removed = freed = 0
        with self._call():
            for file in self._files(keys, np.zeros(len(keys), dtype=np.int8)):
                count, size = self._folder.remove(file.identity, file.path, file.parts)
                removed, freed = removed + count, freed + size
            self._space.release(freed)
        return removed

    def remove_prefix(self, prefix: str) -> int:
        """See `ObjectStore.remove_prefix`."""
        check_namespace_prefix(prefix)
        with self._call():
            removed, freed = self._folder.purge(prefix.split("/")[1])
            self._space.release(freed)
        return removed

    def put_bytes(self, key: str, data: bytes) -> None:
        """See `ObjectStore.put_bytes`."""
        held = np.frombuffer(data, dtype=np.uint8)
        buffers = ObjectBuffers(np.array([held.ctypes.data], np.uint64), np.array([len(data)]))
        codes = np.zeros(1, dtype=np.int8)
        with self._call():
            self._put_files(self._files([key], codes), buffers, codes)
        code = StoreCode(int(codes[0]))
        if code not in (StoreCode.OK, StoreCode.SIZE_MISMATCH):
            raise StoreError(f"{key} ({len(data)} bytes) was not stored: {code.advice}")

    def get_bytes(self, key: str) -> bytes | None:
        """See `ObjectStore.get_bytes`."""
        size = int(self.sizes([key])[0])
        if size < 0:
            return None
        data = np.empty(size, dtype=np.uint8)
        buffers = ObjectBuffers(np.array([data.ctypes.data], np.uint64), np.array([size]))
        codes = np.zeros(1, dtype=np.int8)
        with self._call():
            self._get_files(self._files([key], codes), buffers, codes)
        code = StoreCode(int(codes[0]))
        if code not in (StoreCode.OK, StoreCode.MISSING):
            raise StoreError(f"{key} could not be read: {code.advice}")
        return data.tobytes() if code is StoreCode.OK else None

    def close(self) -> None:
        """See `ObjectStore.close`. Waits for running calls."""
        if self._gate.close():
            self._gate.wait_idle()
            self._workspace.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._gate.call():
            try:
                yield
            except OSError as e:
                raise StoreError(f"the file store at {self.root} failed: {e}") from e

    def _codes(self, keys: Sequence[str], buffers: ObjectBuffers) -> NDArray[np.int8]:
        codes = np.zeros(len(keys), dtype=np.int8)
        codes[~self._regions.covers(buffers)] = StoreCode.NOT_REGISTERED
        return codes

    def _files(self, keys: Sequence[str], codes: NDArray[np.int8]) -> list[_File]:
        """Group the objects whose code is `OK` by file; keys that name no object become `INVALID`."""
        files: dict[str, _File | None] = {}
        for row, (key, code) in enumerate(zip(keys, codes.tolist(), strict=True)):
            if code:
                continue
            identity, _, part = key.rpartition("/")
            if identity not in files:
                path = self._folder.path(identity)
                files[identity] = _File(identity, path) if path else None
            file = files[identity]
            if file is None or not _PART_NAME.fullmatch(part):
                codes[row] = StoreCode.INVALID
                continue
            file.rows.append(row)
            file.parts.append(part)
        return [file for file in files.values() if file is not None and file.rows]

    def _put_files(self, files: list[_File], buffers: ObjectBuffers, codes: NDArray[np.int8]) -> None:
        # Room is taken for the whole batch at once, and file by file only when that is too much.
        if self._put_where_room(files, buffers, codes):
            return
        for file in files:
            if not self._put_where_room([file], buffers, codes):
                codes[file.rows] = StoreCode.NO_SPACE

    def _put_where_room(self, files: list[_File], buffers: ObjectBuffers, codes: NDArray[np.int8]) -> bool:
        memory, sizes = _memory_of(buffers), buffers.sizes.tolist()
        need = sum(on_disk(sum(_HEADER_BYTES + sizes[row] for row in file.rows)) for file in files)
        if not self._space.reserve(need):
            return False
        taken = 0
        try:
            for file in files:
                parts = file.in_memory(sizes, memory)
                codes[file.rows], grown = self._folder.put(file.identity, file.path, parts)
                taken += grown
        finally:
            self._space.release(need - taken)
        return True

    def _get_files(self, files: list[_File], buffers: ObjectBuffers, codes: NDArray[np.int8]) -> None:
        memory, sizes = _memory_of(buffers), buffers.sizes.tolist()
        for file in files:
            codes[file.rows] = self._folder.get(file.identity, file.path, file.in_memory(sizes, memory))

    def _look_up(self, keys: Sequence[str], renew: bool) -> NDArray[np.int64]:
        found = np.full(len(keys), -1, dtype=np.int64)
        with self._call():
            for file in self._files(keys, np.zeros(len(keys), dtype=np.int8)):
                held = self._folder.sizes(file.identity, file.path, renew=renew)
                for row, part in zip(file.rows, file.parts, strict=True):
                    found[row] = held.get(part, -1)
        return found


def _memory_of(buffers: ObjectBuffers) -> Callable[[int], list[Memory]]:
    if buffers.fragmented:
        return lambda row: memory_at(*buffers.fragments(row))
    addresses, lengths = buffers.addresses.tolist(), buffers.lengths.tolist()
    return lambda row: memory_at((addresses[row],), (lengths[row],))
