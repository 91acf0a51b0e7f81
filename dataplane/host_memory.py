"""Host memory for one pool: allocated, prefaulted, locked, and seen as pages.

For processes that own their pages: the agent, `caketin replay`, tests. An engine brings memory of its own and
describes it with `host_pool` alone.

    page_first    |k0 v0|k1 v1|k2 v2|                     a page is one run
    layer_first   |k0 k1 k2|k0 k1 k2|v0 v1 v2|v0 v1 v2|   one run a part and layer
                      L0       L1       L0       L1

Uses mmap and numpy, no torch: the base install has none.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataplane import host_pool
from dataplane.host_pool import HostPool, LayerBuffers, PageBuffer, Region
from dataplane.memory_limits import memlock_limit, memory_left, memory_locked
from metadata.errors import CaketinError, FieldError, InvalidInput
from metadata.pools import PoolSpec

PART_ALIGNMENT: Final = 64
"""Parts start on a cache line: no two share one, and a part can be viewed as any dtype."""

_TOUCH_STEP: Final = 1 << 30
"""Bytes prefaulted between two chances for a signal to come in."""


class OutOfHostMemory(CaketinError):
    """The machine, or this process' memory limit, has less memory left than the pool needs."""

    code = "out_of_host_memory"


class MemlockTooSmall(CaketinError):
    """The memory may not be locked: the process' memlock limit is below what the pool needs."""

    code = "memlock_too_small"


class HostMemoryInUse(CaketinError):
    """Somebody still holds the memory: a view of it, or an address that is in a transfer (M1)."""

    code = "host_memory_in_use"


class HostMemoryClosed(CaketinError):
    """The memory was given back."""

    code = "host_memory_closed"


class HostMemory:
    """The zeroed memory of `slots` pages of a pool.

    Keep it referenced as long as an address of its pool is in use anywhere: addresses do not keep it alive.
    `hold()` around a transfer makes `close()` refuse.

    Attributes:
        pool: its addresses; those of a logical pool are none, and it takes no memory.
        address: of the first byte, on a memory page boundary; 0 for a logical pool.
        length: bytes, whole memory pages; 0 for a logical pool.
    """

    pool: HostPool
    address: int
    length: int

    def __init__(
        self,
        spec: PoolSpec,
        slots: int,
        *,
        layers: int = 1,
        shared: bool = True,
        prefault: bool = False,
        pin: bool = False,
    ) -> None:
        """Allocate.

        Args:
            spec: what a page is made of.
            slots: pages.
            layers: layers of the pool; only the layer-first layout asks.
            shared: a shared instead of a private mapping. Private memory is copied on write after a fork, and
                a device may go on writing into the copy that nobody reads.
            prefault: touch every memory page now; the first touch costs several times a later one.
            pin: lock the memory, as registering it for RDMA will: fails early and says why.

        Raises:
            InvalidInput: no slots, or a part that is not a whole number of layers.
            OutOfHostMemory: less memory is left than this takes.
            MemlockTooSmall: `pin`, and the limit does not allow it.
        """
        # Planned once at a made-up address, so that nothing is allocated for what cannot be.
        self.length = sum(r.length for r in _plan(spec, slots, layers, mmap.PAGESIZE).regions)
        self._guard = threading.Lock()
        self._holders = 0
        self._map = _allocate(spec.name, self.length, shared) if self.length else None
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(self._map or b"", dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data) if self._map else 0
        self.pool = _plan(spec, slots, layers, self.address)
        self._fragments = {p.part: p.fragments for p in self.pool.parts}
        if pin and self._map:
            _lock_pages(spec.name, self.address, self.length)
        if prefault:
            _touch(self._bytes)

    def view(self, slot: int, part: str) -> NDArray[np.uint8]:
        """Return the bytes of a part that is in one piece, uint8, (bytes,), without a copy.

        Raises:
            InvalidInput: no such slot or part, or the part is in several pieces (see `fragments`).
            HostMemoryClosed: after `close`.
        """
        pieces = self.fragments(slot, part)
        if len(pieces) > 1:
            detail = f"of {part!r} is in {len(pieces)} pieces, one a layer; take `fragments`"
            raise InvalidInput("no single view", [FieldError("part", "in_pieces", detail)])
        return pieces[0]

    def fragments(self, slot: int, part: str) -> list[NDArray[np.uint8]]:
        """Return the bytes of a part, one uint8 array a fragment in the order of the object, without a copy.

        Raises:
            InvalidInput: no such slot or part.
            HostMemoryClosed: after `close`.
        """
        if not 0 <= slot < self.pool.slots:
            detail = f"is {slot}, must be 0 to {self.pool.slots - 1}"
            raise InvalidInput(
                f"pool {self.pool.name!r} has no such slot", [FieldError("slot", "out_of_range", detail)]
            )
        return [column[slot] for column in self.columns(part)]

    def columns(self, part: str) -> list[NDArray[np.uint8]]:
        """Return the part of all slots, one uint8 array (slots, bytes) a fragment, without a copy.

        Raises:
            InvalidInput: no such part.
            HostMemoryClosed: after `close`.
        """
        memory = self._open()
        fragments = self._fragments.get(part)
        if fragments is None:
            detail = f"is {part!r}, the pool has {list(self._fragments)}"
            raise InvalidInput(
                f"pool {self.pool.name!r} has no such part", [FieldError("part", "unknown", detail)]
            )
        return [
            np.ndarray(
                (self.pool.slots, f.length),
                dtype=np.uint8,
                buffer=memory,
                offset=f.base - self.address,
                strides=(f.stride, 1),
            )
            for f in fragments
        ]

    @contextmanager
    def hold(self) -> Iterator[HostPool]:
        """Keep the memory mapped while its addresses are out of hand, and give them.

        Raises:
            HostMemoryClosed: after `close`.
        """
        with self._guard:
            self._open()
            self._holders += 1
        try:
            yield self.pool
        finally:
            with self._guard:
                self._holders -= 1

    def close(self) -> None:
        """Give the memory back; again: nothing happens.

        Raises:
            HostMemoryInUse: a transfer holds it or a view of it is alive; it stays as it was.
        """
        with self._guard:
            if self._holders:
                raise HostMemoryInUse(f"pool {self.pool.name!r} is held by {self._holders} transfers")
            memory, self._bytes = self._bytes, None
            # The array itself counts as a view of the mapping.
            del memory
            if self._map is None:
                return
            try:
                self._map.close()
            except BufferError:
                self._bytes = np.frombuffer(self._map, dtype=np.uint8)
                raise HostMemoryInUse(
                    f"pool {self.pool.name!r} has views that are still alive; drop them first"
                ) from None
            self._map = None

    def _open(self) -> NDArray[np.uint8]:
        memory = self._bytes
        if memory is None:
            raise HostMemoryClosed(f"the memory of pool {self.pool.name!r} was given back")
        return memory


def _plan(spec: PoolSpec, slots: int, layers: int, base: int) -> HostPool:
    """Return the pool of a mapping that starts at `base`."""
    if spec.object_layout == "layer_first":
        layered, end = _layer_buffers(spec, slots, layers, base)
        return host_pool.layer_first(spec, slots, layered, _whole(base, end))
    buffers, end = _page_buffers(spec, slots, base)
    make = host_pool.page_first if spec.object_layout == "page_first" else host_pool.page_first_direct
    return make(spec, slots, buffers, _whole(base, end))


def _page_buffers(spec: PoolSpec, slots: int, base: int) -> tuple[list[PageBuffer], int]:
    stride = sum(_aligned(p.bytes) for p in spec.parts)
    buffers, at = [], base
    for part in spec.parts:
        buffers.append(PageBuffer(part.part, at, part.bytes, stride))
        at += _aligned(part.bytes)
    return buffers, base + stride * slots


def _layer_buffers(spec: PoolSpec, slots: int, layers: int, base: int) -> tuple[list[LayerBuffers], int]:
    buffers, at = [], base
    for part in spec.parts:
        if layers < 1 or part.bytes % layers:
            detail = f"is {layers}, which does not divide the {part.bytes} bytes of part {part.part!r}"
            raise InvalidInput("no whole layers", [FieldError("layers", "not_divisible", detail)])
        row = part.bytes // layers
        run = _aligned(row) * slots
        starts = tuple(at + layer * run for layer in range(layers))
        buffers.append(LayerBuffers(part.part, starts, row, _aligned(row)))
        at += layers * run
    return buffers, at


def _whole(base: int, end: int) -> list[Region]:
    """Return the mapping as one region of whole memory pages; none where there are no bytes."""
    length = -(-(end - base) // mmap.PAGESIZE) * mmap.PAGESIZE
    return [Region(base, length)] if length else []


def _aligned(size: int) -> int:
    return -(-size // PART_ALIGNMENT) * PART_ALIGNMENT


def _allocate(name: str, length: int, shared: bool) -> mmap.mmap:
    left = memory_left()
    what = f"pool {name!r} needs {length} bytes of host memory"
    if length > left:
        raise OutOfHostMemory(f"{what}, {left} are left; give it fewer slots or the process more memory")
    flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | mmap.MAP_ANONYMOUS
    try:
        return mmap.mmap(-1, length, flags=flags)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise OutOfHostMemory(
            f"{what} and the system refuses them though {left} are left: look at `ulimit -v` "
            "and vm.overcommit_memory"
        ) from error


def _touch(memory: NDArray[np.uint8]) -> None:
    """Write to every memory page of fresh, zeroed memory."""
    for at in range(0, memory.size, _TOUCH_STEP):
        memory[at : at + _TOUCH_STEP : mmap.PAGESIZE] = 0


def _lock_pages(name: str, address: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(length)) == 0:
        return
    code = ctypes.get_errno()
    what = f"pool {name!r} needs {length} bytes of locked memory"
    limit = memlock_limit()
    if code == errno.EAGAIN or limit is None:
        raise OutOfHostMemory(f"{what}, which the system could not lock: {os.strerror(code)}")
    locked = memory_locked()
    kib = -(-(locked + length) // 1024)
    raise MemlockTooSmall(
        f"{what}, the memlock limit is {limit} bytes and {locked} of them are taken. Raise it to {kib} KiB "
        f"or more where the process is started: `ulimit -l {kib}` (or unlimited), LimitMEMLOCK=infinity in a "
        "systemd unit, `--ulimit memlock=-1` for a container; or grant CAP_IPC_LOCK"
    )
