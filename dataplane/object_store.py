"""What a store of page objects does: the protocol, its value types and its errors.

A store keeps *objects* (one part of one shard of one page) under the keys of `metadata.object_keys`. It moves
bytes between host memory and itself, tells the truth about every object of a batch, and decides nothing:
order, confirmation and what a missing object means belong to the page mover.

Three rules hold for every implementation, and one conformance suite checks them:

* A get is `OK` only when an object of exactly the asked size filled its buffers (T1). Buffers of any other
  outcome may hold anything.
* A put on a key that exists keeps the old object. `OK` after a put is not proof: `confirm` is (O3).
* Memory is registered before its address is used, also where the transport would not mind (TCP, files), so
  that a missing registration shows up before the first RDMA deployment.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from threading import Condition, Lock
from typing import Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from metadata.errors import CaketinError

NAMESPACE_PREFIX: Final = re.compile(r"ct1/[0-9a-f]{16}/\Z")
"""The only prefixes that `remove_prefix` takes: all of one namespace, never less of a key than that."""

_FORMS: Final = (1, 2)  # dimensions of `ObjectBuffers`: one fragment an object, or several


class StoreCode(IntEnum):
    """What became of one object of a batch. Fits in an int8; only `OK` is success."""

    OK = 0
    MISSING = 1
    SIZE_MISMATCH = 2
    CHECKSUM = 3
    NO_SPACE = 4
    TRANSFER_FAILED = 5
    NOT_REGISTERED = 6
    LEASE_LOST = 7
    INVALID = 8
    UNCONFIRMED = 9
    UNAVAILABLE = 10

    @property
    def advice(self) -> str:
        """What the code means and what to do, in one sentence."""
        return _ADVICE[self]


_ADVICE: Final[dict[StoreCode, str]] = {
    StoreCode.OK: "done",
    StoreCode.MISSING: "the store does not hold the object: evicted, removed or never completely written",
    StoreCode.SIZE_MISMATCH: "the object has another size than its registration says: remove it by its key",
    StoreCode.CHECKSUM: "the stored bytes are damaged or belong to another key: remove the object",
    StoreCode.NO_SPACE: "the store is full: add storage nodes or raise the size bound",
    StoreCode.TRANSFER_FAILED: "the bytes did not move: storage node gone, network or disk fault",
    StoreCode.NOT_REGISTERED: "the buffer lies outside the registered memory: register the region first",
    StoreCode.LEASE_LOST: "the object's lease ran out during the transfer: read it again",
    StoreCode.INVALID: "the store refused key or buffer: see the log for the first such key",
    StoreCode.UNCONFIRMED: "the put met another writer's and never came to exist: put it again later",
    StoreCode.UNAVAILABLE: "the store's master did not answer",
}


MEMORY_IN_DOUBT: Final = (StoreCode.TRANSFER_FAILED, StoreCode.LEASE_LOST, StoreCode.UNAVAILABLE)
"""After these a device may write to the object's memory for a moment more (M1)."""


class StoreError(CaketinError):
    """A store cannot do what a whole call asks for. Single objects fail with a `StoreCode` instead."""

    code = "store_error"


class StoreClosed(StoreError):
    """A call came after `close`."""

    code = "store_closed"


class StoreUnavailable(StoreError):
    """The store could not be opened or reached; the detail says what was tried."""

    code = "store_unavailable"


class RegistrationFailed(StoreError):
    """Memory could not be registered or unregistered; the detail says what to change."""

    code = "registration_failed"


class UnsafePrefix(StoreError):
    """A prefix that is not exactly one namespace was to be removed."""

    code = "unsafe_prefix"


@dataclass(frozen=True, slots=True)
class ObjectBuffers:
    """Where the bytes of n objects lie in host memory.

    The form (n,) is one fragment an object and costs nothing. The form (n, f) is for objects whose bytes are
    scattered (layer-first pools): up to f fragments an object, concatenated in order, padded with length 0.
    A one-column (n, 1) array becomes (n,).

    Attributes:
        addresses: uint64, shape (n,) or (n, f); the address of a padding fragment is ignored.
        lengths: int64, same shape, bytes; at least one byte an object.
    """

    addresses: NDArray[np.uint64]
    lengths: NDArray[np.int64]

    def __post_init__(self) -> None:
        addresses = np.asarray(self.addresses, dtype=np.uint64)
        lengths = np.asarray(self.lengths, dtype=np.int64)
        if addresses.shape != lengths.shape or len(addresses.shape) not in _FORMS:
            raise ValueError(
                f"addresses {addresses.shape} and lengths {lengths.shape} must both be (n,) or both (n, f)"
            )
        if addresses.shape[1:] == (1,):
            addresses, lengths = addresses[:, 0], lengths[:, 0]
        object.__setattr__(self, "addresses", addresses)
        object.__setattr__(self, "lengths", lengths)
        if lengths.size and int(lengths.min()) < 0:
            raise ValueError("lengths must not be negative")
        if self.count and int(self.sizes.min()) < 1:
            raise ValueError("an object of zero bytes cannot be stored; drop its part from keys and buffers")

    @property
    def count(self) -> int:
        """Number of objects, n."""
        return int(self.addresses.shape[0])

    @property
    def fragmented(self) -> bool:
        """Whether objects have several fragments (the form (n, f))."""
        return self.addresses.ndim > 1

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each object, int64 (n,)."""
        return self.lengths.sum(axis=1) if self.fragmented else self.lengths

    def fragments(self, i: int) -> tuple[list[int], list[int]]:
        """Return addresses and lengths of object `i`, padding left out."""
        if not self.fragmented:
            return [int(self.addresses[i])], [int(self.lengths[i])]
        used = self.lengths[i] > 0
        return self.addresses[i][used].tolist(), self.lengths[i][used].tolist()

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> Self:
        """Return the buffers of some of the objects."""
        return type(self)(self.addresses[rows], self.lengths[rows])


class ObjectStore(Protocol):
    """Keeps objects. Safe to call from several threads; a call blocks until the memory is no longer used.

    Attributes:
        kind: `mooncake` or `file`.
        lease_seconds: how long a read or a renewing `exists` protects an object from eviction; None where
            the store has no leases and only keeps what was used last.
        max_region_bytes: most bytes that `register` takes at once; None where there is no limit.
    """

    kind: str
    lease_seconds: float | None
    max_region_bytes: int | None

    def register(self, address: int, length: int) -> None:
        """Make memory usable as source and destination.

        Args:
            address: first byte.
            length: bytes; every fragment must lie within one registered region.

        Raises:
            RegistrationFailed: overlap with a registered region, or the device refuses (memory lock limit).
        """

    def unregister(self, address: int) -> None:
        """Forget the region that starts at `address`.

        Raises:
            RegistrationFailed: no region starts there.
        """

    def put(
        self, keys: Sequence[str], buffers: ObjectBuffers, groups: Sequence[str] | None = None
    ) -> NDArray[np.int8]:
        """Store n objects.

        A key that exists keeps its old object: `OK` when the sizes agree. The file store answers
        `SIZE_MISMATCH` when they do not; Mooncake cannot tell before `confirm`.

        Args:
            keys: n object keys.
            buffers: their bytes.
            groups: one group name a key; members of a group are leased and evicted together where the store
                can (a hint).

        Returns:
            A `StoreCode` per object, int8 (n,).
        """

    def get(self, keys: Sequence[str], buffers: ObjectBuffers) -> NDArray[np.int8]:
        """Read n objects into memory; a `StoreCode` per object, int8 (n,). Renews leases."""

    def confirm(self, keys: Sequence[str], sizes: NDArray[np.int64]) -> NDArray[np.int8]:
        """Say what is there after a put (O3): `OK`, `UNCONFIRMED` (absent) or `SIZE_MISMATCH`, int8 (n,).

        Args:
            keys: n object keys.
            sizes: the bytes each must have, int64 (n,).
        """

    def exists(self, keys: Sequence[str], *, renew: bool = True) -> NDArray[np.bool_]:
        """Return which objects are there, bool (n,); renews their leases unless told not to."""

    def sizes(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """Return the objects' sizes in bytes, int64 (n,), -1 where missing. Renews no lease (T4)."""

    def keys(self, prefix: str) -> Iterator[str]:
        """Yield the keys that start with `prefix`, in no order; a sweep, not a snapshot."""

    def remove(self, keys: Sequence[str]) -> int:
        """Remove objects, leased or not; return how many were there."""

    def remove_prefix(self, prefix: str) -> int:
        """Remove every object of one namespace; return how many were there.

        Raises:
            UnsafePrefix: `prefix` is not `ct1/<16 hex digits>/`.
        """

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store one small object, such as a manifest; keeps an existing one.

        Raises:
            StoreError: it could not be stored.
        """

    def get_bytes(self, key: str) -> bytes | None:
        """Return a small object's bytes, None when it is missing.

        Raises:
            StoreError: it is there and could not be read.
        """

    def close(self) -> None:
        """Release everything; again: no effect. Later calls raise `StoreClosed`."""


class CallGate:
    """Lets calls in until it is closed, and lets `close` wait for those inside.

    A store is torn down only when no call uses it: under a running call memory would be written that nobody
    owns any more, or the process would crash.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = Condition()
        self._running = 0
        self._closed = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count the body as a running call.

        Raises:
            StoreClosed: the gate is closed.
        """
        with self._changed:
            if self._closed:
                raise StoreClosed(f"the {self._name} store is closed")
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def close(self) -> bool:
        """Let nobody in any more; return False when that was so already."""
        with self._changed:
            was_open, self._closed = not self._closed, True
        return was_open

    def wait_idle(self, seconds: float | None = None) -> bool:
        """Wait until no call runs; return False when some still do after `seconds` (None: for ever)."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, seconds)


class RegisteredRegions:
    """The memory a store may touch: disjoint regions, looked up for whole batches at once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._arrays = (np.empty(0, np.uint64), np.empty(0, np.uint64))

    def add(self, address: int, length: int) -> None:
        """Add a region.

        Raises:
            RegistrationFailed: no bytes, or it overlaps a region.
        """
        if address <= 0 or length <= 0:
            raise RegistrationFailed(f"cannot register {length} bytes at {address:#x}")
        with self._lock:
            at = bisect_right(self._starts, address)
            overlaps_before = at > 0 and self._ends[at - 1] > address
            overlaps_after = at < len(self._starts) and self._starts[at] < address + length
            if overlaps_before or overlaps_after:
                raise RegistrationFailed(
                    f"{length} bytes at {address:#x} overlap memory that is registered already; "
                    "register a region once, or unregister it first"
                )
            self._starts.insert(at, address)
            self._ends.insert(at, address + length)
            self._rebuild()

    def discard(self, address: int) -> None:
        """Take out the region that starts at `address`.

        Raises:
            RegistrationFailed: no region starts there.
        """
        with self._lock:
            if address not in self._starts:
                raise RegistrationFailed(f"no registered region starts at {address:#x}")
            at = self._starts.index(address)
            del self._starts[at], self._ends[at]
            self._rebuild()

    def starts(self) -> list[int]:
        """Return the first addresses of all regions."""
        with self._lock:
            return list(self._starts)

    def covers(self, buffers: ObjectBuffers) -> NDArray[np.bool_]:
        """Return which objects lie in registered memory, each fragment in one region, bool (n,)."""
        starts, ends = self._arrays
        addresses = buffers.addresses
        if not starts.size:
            return np.zeros(buffers.count, dtype=np.bool_)
        at = np.searchsorted(starts, addresses, side="right") - 1
        stops = addresses + buffers.lengths.astype(np.uint64)
        inside = (at >= 0) & (stops <= ends[at]) & (stops > addresses)
        if not buffers.fragmented:
            return inside
        within: NDArray[np.bool_] = (inside | (buffers.lengths == 0)).all(axis=1)
        return within

    def _rebuild(self) -> None:
        self._arrays = (np.array(self._starts, np.uint64), np.array(self._ends, np.uint64))


def check_batch(keys: Sequence[str], buffers: ObjectBuffers) -> None:
    """Refuse a batch whose keys and buffers do not belong together.

    Raises:
        ValueError: different numbers of keys and buffers.
    """
    if len(keys) != buffers.count:
        raise ValueError(f"{len(keys)} keys but {buffers.count} buffers")


def check_namespace_prefix(prefix: str) -> None:
    """Refuse to remove by anything but a whole namespace (field report 16).

    Raises:
        UnsafePrefix: `prefix` is not `ct1/<16 hex digits>/`.
    """
    if not NAMESPACE_PREFIX.match(prefix):
        raise UnsafePrefix(f"objects are removed by namespace only: 'ct1/<16 hex>/', not {prefix!r}")


def describe_failures(keys: Sequence[str], codes: NDArray[np.int8]) -> str:
    """Return one line a failure code: how many objects, the first key, the advice; empty when all is well."""
    lines = []
    for value in np.unique(codes):
        code = StoreCode(int(value))
        if code is not StoreCode.OK:
            hit = np.flatnonzero(codes == value)
            lines.append(f"{code.name} {len(hit)}/{len(codes)} (first {keys[int(hit[0])]}): {code.advice}")
    return "; ".join(lines)
