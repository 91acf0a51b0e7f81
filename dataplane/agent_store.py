"""The stores of an agent: opened once for all sessions, memory registered once, and every call watched.

A session's mover sees a `StoreView`. It notes, for the thread that calls, whether a call left memory in
doubt: after a transfer that failed a device may write for a moment more, so the slots of such a call rest
(M1).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dataplane.file_space import EvictedShard, OnEvict
from dataplane.file_store import FileStore
from dataplane.messages.control import FileAccess, MooncakeAccess
from dataplane.object_store import MEMORY_IN_DOUBT, ObjectBuffers, ObjectStore, StoreCode, StoreError
from dataplane.store_access import StoreOverrides, open_store
from metadata.errors import CaketinError, InvalidInput

log = logging.getLogger(__name__)


@dataclass
class StoreHealth:
    """What the last calls of the store say of it.

    Attributes:
        kind: of the store, empty until one was opened.
        detail: what is wrong, empty where nothing is.
        bytes_read: by all transfers.
        bytes_written: by all transfers; of objects that were there already too.
    """

    kind: str = ""
    detail: str = ""
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass
class _Shared:
    store: ObjectStore
    regions: dict[int, int] = field(default_factory=dict)
    told: dict[str, OnEvict] = field(default_factory=dict)

    def tell(self, evicted: Sequence[EvictedShard]) -> None:
        for on_evict in list(self.told.values()):
            on_evict(evicted)


class SharedStores:
    """All stores that registrations have named so far; usually one. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[MooncakeAccess | FileAccess, tuple[str, ...]], _Shared] = {}
        self._doubt = threading.local()
        self.health = StoreHealth()

    def open(self, access: MooncakeAccess | FileAccess, overrides: StoreOverrides, rank: str) -> StoreView:
        """Return a view of the store that a registration names; opened by the first who asks.

        Raises:
            StoreUnavailable, RegistrationFailed: see `store_access.open_store`.
        """
        # A key prefix is a namespace's; the store is the same. Ranks with devices of their own have one each.
        key = _without_prefix(access), _devices(access, overrides, rank)
        with self._lock:
            found = self._open.get(key)
            if found is None:
                try:
                    found = self._open[key] = _Shared(open_store(access, overrides, rank))
                except CaketinError as error:
                    self.health.detail = str(error)
                    raise
                self.health.kind, self.health.detail = found.store.kind, ""
            return StoreView(self, found.store, access.key_prefix)

    def register(self, store: ObjectStore, address: int, length: int) -> None:
        """Register memory with a store, once."""
        with self._lock:
            regions = next(s.regions for s in self._open.values() if s.store is store)
            if regions.get(address) != length:
                store.register(address, length)
                regions[address] = length

    def tell_evictions(self, store: ObjectStore, namespace: str, on_evict: OnEvict | None) -> None:
        """Set who is told of what a store evicts of a namespace: the session of it that joined last."""
        with self._lock:
            shared = next(s for s in self._open.values() if s.store is store)
            shared.told.pop(namespace, None)
            if on_evict is not None:
                shared.told[namespace] = on_evict
            if isinstance(store, FileStore):
                store.tell_evictions(shared.tell)

    def forget(self, first: int, end: int) -> None:
        """Unregister the memory from `first` to before `end` everywhere; no call may use it any more."""
        with self._lock:
            for shared in self._open.values():
                for address in [a for a in shared.regions if first <= a < end]:
                    del shared.regions[address]
                    try:
                        shared.store.unregister(address)
                    except StoreError as error:
                        log.warning("memory could not be unregistered: %s", error)

    @contextlib.contextmanager
    def watching(self) -> Iterator[Callable[[], bool]]:
        """Watch the calls that this thread makes; gives what says whether one left memory in doubt."""
        self._doubt.found = False
        yield lambda: bool(self._doubt.found)

    def saw(self, codes: NDArray[np.int8], moved: int, *, wrote: bool) -> None:
        """Note the outcome of a put or a get of this thread."""
        doubtful = np.isin(codes, MEMORY_IN_DOUBT)
        if doubtful.any():
            self._doubt.found = True
            self.health.detail = StoreCode(int(codes[doubtful][0])).advice
        elif codes.size and (codes == StoreCode.OK).any():
            self.health.detail = ""
        with self._lock:
            if wrote:
                self.health.bytes_written += moved
            else:
                self.health.bytes_read += moved

    def failed(self, error: CaketinError) -> None:
        """Note that a call of this thread failed as a whole."""
        self._doubt.found = True
        self.health.detail = str(error)

    def close(self) -> None:
        """Close all stores; again: nothing happens."""
        with self._lock:
            stores, self._open = list(self._open.values()), {}
        for shared in stores:
            shared.store.close()


class StoreView:
    """Implements `object_store.ObjectStore` over a shared store; closing it leaves the store open."""

    def __init__(self, shared: SharedStores, store: ObjectStore, namespace: str) -> None:
        self._shared = shared
        self._store = store
        self._namespace = namespace
        self.kind = store.kind
        self.lease_seconds = store.lease_seconds
        self.max_region_bytes = store.max_region_bytes

    def register(self, address: int, length: int) -> None:
        """See `ObjectStore.register`; nothing happens where another session did it."""
        self._shared.register(self._store, address, length)

    def tell_evictions(self, on_evict: OnEvict | None) -> None:
        """See `FileStore.tell_evictions`; other stores say nothing of what they evict."""
        self._shared.tell_evictions(self._store, self._namespace, on_evict)

    def unregister(self, address: int) -> None:
        """Nothing: the memory is the tier's, which outlives sessions."""

    def put(
        self, keys: Sequence[str], buffers: ObjectBuffers, groups: Sequence[str] | None = None
    ) -> NDArray[np.int8]:
        """See `ObjectStore.put`."""
        with self._watched():
            codes = self._store.put(keys, buffers, groups)
        self._shared.saw(codes, _moved(buffers, codes), wrote=True)
        return codes

    def get(self, keys: Sequence[str], buffers: ObjectBuffers) -> NDArray[np.int8]:
        """See `ObjectStore.get`."""
        with self._watched():
            codes = self._store.get(keys, buffers)
        self._shared.saw(codes, _moved(buffers, codes), wrote=False)
        return codes

    def confirm(self, keys: Sequence[str], sizes: NDArray[np.int64]) -> NDArray[np.int8]:
        """See `ObjectStore.confirm`."""
        return self._store.confirm(keys, sizes)

    def exists(self, keys: Sequence[str], *, renew: bool = True) -> NDArray[np.bool_]:
        """See `ObjectStore.exists`."""
        return self._store.exists(keys, renew=renew)

    def sizes(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """See `ObjectStore.sizes`."""
        return self._store.sizes(keys)

    def keys(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.keys`."""
        return self._store.keys(prefix)

    def remove(self, keys: Sequence[str]) -> int:
        """See `ObjectStore.remove`."""
        return self._store.remove(keys)

    def remove_prefix(self, prefix: str) -> int:
        """See `ObjectStore.remove_prefix`."""
        return self._store.remove_prefix(prefix)

    def put_bytes(self, key: str, data: bytes) -> None:
        """See `ObjectStore.put_bytes`."""
        self._store.put_bytes(key, data)

    def get_bytes(self, key: str) -> bytes | None:
        """See `ObjectStore.get_bytes`."""
        return self._store.get_bytes(key)

    def close(self) -> None:
        """Nothing: `SharedStores.close` closes the store."""

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except CaketinError as error:
            self._shared.failed(error)
            raise


def _moved(buffers: ObjectBuffers, codes: NDArray[np.int8]) -> int:
    return int(buffers.sizes[codes == StoreCode.OK].sum())


def _devices(access: MooncakeAccess | FileAccess, overrides: StoreOverrides, rank: str) -> tuple[str, ...]:
    if isinstance(access, FileAccess):
        return ()
    with contextlib.suppress(InvalidInput):  # opening it says what is wrong
        return overrides.mooncake(access, rank).chosen_devices
    return ()


def _without_prefix(access: MooncakeAccess | FileAccess) -> MooncakeAccess | FileAccess:
    if isinstance(access, FileAccess):
        return FileAccess(path=access.path, max_bytes=access.max_bytes, key_prefix="")
    return MooncakeAccess(
        master=access.master,
        metadata=access.metadata,
        protocol=access.protocol,
        devices=access.devices,
        key_prefix="",
    )
