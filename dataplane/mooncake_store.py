"""Objects in Mooncake Store: zero copy from registered memory, over RDMA or TCP.

Mooncake answers with one integer an object. What those integers hide, and what this module does about it:

* a get into a larger buffer returns the smaller length and no error: only the exact length is `OK` (T1);
* a get into a smaller buffer returns -600, as do other faults: the size is asked for, then it is told apart;
* a put returns 0 for a key that exists with any size, and for one that meets another writer's unfinished put
  and never comes to exist: `confirm` asks for existence and size in one go (O3);
* over TCP unregistered memory works until the first RDMA device: every address is checked here;
* with the master away each call takes 4 s to say -900 or, worse, that nothing is there: `MasterWatch`;
* any call on a closed client crashes the process: calls are counted, and `close` waits for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataplane.memory_limits import memlock_room
from dataplane.mooncake_codes import INVALID_PARAMS, NOT_FOUND, TRANSFER_FAIL, store_code, store_codes
from dataplane.mooncake_master import MasterHttp, MasterWatch, check_listening
from dataplane.mooncake_native import MooncakeSettings, close_native, connect, keep_open, load_native
from dataplane.object_store import (
    CallGate,
    ObjectBuffers,
    RegisteredRegions,
    RegistrationFailed,
    StoreCode,
    StoreError,
    StoreUnavailable,
    check_batch,
    check_namespace_prefix,
    describe_failures,
)
from dataplane.rdma_ports import device_names

log = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 5.0

_Batch: TypeAlias = Callable[[list[str], ObjectBuffers, list[str] | None], NDArray[np.int8]]


class MooncakeStore:
    """A client without a segment of its own. Implements `object_store.ObjectStore`."""

    kind = "mooncake"

    def __init__(self, settings: MooncakeSettings) -> None:
        """Connect.

        Raises:
            StoreUnavailable: Mooncake cannot be imported, no master answers, no such device, or set-up fails.
        """
        self.lease_seconds: float | None = settings.lease_seconds
        self.max_region_bytes: int | None = None
        self._settings = settings
        self._native = load_native(settings)
        check_listening(settings.master, settings.connect_seconds)
        self._client = connect(self._native, settings, segment_bytes=0)
        if settings.protocol == "rdma":
            devices = settings.chosen_devices or tuple(device_names())
            self.max_region_bytes = settings.rdma.region_limit(devices)
        self._http = MasterHttp(settings.master_http) if settings.master_http else None
        self._regions = RegisteredRegions()
        self._gate = CallGate(self.kind)
        self._watch = MasterWatch(settings.master, settings.connect_seconds)

    @staticmethod
    def available() -> tuple[bool, str]:
        """Return whether Mooncake loads here, and why not."""
        try:
            load_native()
        except StoreUnavailable as e:
            return False, e.detail
        return True, ""

    def register(self, address: int, length: int) -> None:
        """See `ObjectStore.register`."""
        with self._gate.call():
            self._regions.add(address, length)
            raw = self._client.register_buffer(address, length)
            if raw != 0:
                self._regions.discard(address)
                raise RegistrationFailed(registration_advice(address, length, raw, self._settings.protocol))

    def unregister(self, address: int) -> None:
        """See `ObjectStore.unregister`."""
        with self._gate.call():
            self._regions.discard(address)
            raw = self._client.unregister_buffer(address)
            if raw != 0:
                raise RegistrationFailed(f"Mooncake did not unregister the region at {address:#x}: {raw}")

    def put(
        self, keys: Sequence[str], buffers: ObjectBuffers, groups: Sequence[str] | None = None
    ) -> NDArray[np.int8]:
        """See `ObjectStore.put`. `OK` needs `confirm`: Mooncake answers 0 for puts it did not do."""
        check_batch(keys, buffers)
        if groups is not None and len(groups) != len(keys):
            raise ValueError(f"{len(keys)} keys but {len(groups)} groups")
        with self._call():
            return self._move(keys, buffers, groups, self._put)

    def get(self, keys: Sequence[str], buffers: ObjectBuffers) -> NDArray[np.int8]:
        """See `ObjectStore.get`. Blocks 60 s when the node that owns the bytes has just died."""
        check_batch(keys, buffers)
        with self._call():
            return self._move(keys, buffers, None, self._get)

    def confirm(self, keys: Sequence[str], sizes: NDArray[np.int64]) -> NDArray[np.int8]:
        """See `ObjectStore.confirm`."""
        if len(keys) != len(sizes):
            raise ValueError(f"{len(keys)} keys but {len(sizes)} sizes")
        with self._call():
            found = self._stored_sizes(keys)
        codes = np.where(found == sizes, StoreCode.OK, StoreCode.SIZE_MISMATCH).astype(np.int8)
        codes[found < 0] = StoreCode.UNCONFIRMED
        return codes

    def exists(self, keys: Sequence[str], *, renew: bool = True) -> NDArray[np.bool_]:
        """See `ObjectStore.exists`. Without `renew` the question goes to the master's HTTP port."""
        if not renew:
            return self.sizes(keys) >= 0
        found: list[int] = []
        with self._call():
            for chunk in self._chunks(keys):
                found += self._client.batch_is_exist(chunk)
        answer = np.array(found, dtype=np.int64)
        if (answer < 0).any():
            raise self._watch.lost("an existence query")
        self._watch.heard(away=False)
        present: NDArray[np.bool_] = answer == 1
        return present

    def sizes(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """See `ObjectStore.sizes`."""
        with self._gate.call():
            return np.array(self._master_http().sizes(keys), dtype=np.int64)

    def keys(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.keys`."""
        with self._gate.call():
            return self._master_http().keys(prefix)

    def remove(self, keys: Sequence[str]) -> int:
        """See `ObjectStore.remove`."""
        removed = 0
        with self._call():
            for chunk in self._chunks(keys):
                raw = self._client.batch_remove(chunk, True)
                removed += raw.count(0)
                faults = {r for r in raw if r not in (0, NOT_FOUND)}
                if any(store_code(r) is StoreCode.UNAVAILABLE for r in faults):
                    raise self._watch.lost("a removal")
                if faults:
                    raise StoreError(f"Mooncake answered {sorted(faults)} to a removal of {len(chunk)} keys")
        return removed

    def remove_prefix(self, prefix: str) -> int:
        """See `ObjectStore.remove_prefix`."""
        check_namespace_prefix(prefix)
        with self._call():
            removed = int(self._client.remove_by_regex(f"^{prefix}", True))
        if store_code(removed) is StoreCode.UNAVAILABLE:
            raise self._watch.lost("a removal")
        if removed < 0:
            raise StoreError(f"Mooncake answered {removed} to the removal of {prefix}")
        return removed

    def put_bytes(self, key: str, data: bytes) -> None:
        """See `ObjectStore.put_bytes`. At most `local_buffer_bytes`."""
        with self._call():
            raw = self._client.put(key, data, self._config(None))
        code = store_code(raw)
        if code is StoreCode.UNAVAILABLE:
            raise self._watch.lost("a put")
        if code is not StoreCode.OK:
            raise StoreError(
                f"{key} ({len(data)} bytes) was not stored, Mooncake answered {raw}: {code.advice}"
            )

    def get_bytes(self, key: str) -> bytes | None:
        """See `ObjectStore.get_bytes`."""
        with self._call():
            code = store_code(size := self._client.get_size(key))
            if code is StoreCode.UNAVAILABLE:
                raise self._watch.lost("a get")
            if code is StoreCode.MISSING:
                return None
            data = bytes(self._client.get(key))
        if len(data) != size:
            raise StoreError(f"{key} has {size} bytes, {len(data)} could be read")
        return data

    def close(self) -> None:
        """See `ObjectStore.close`.

        Waits for running calls, 5 s at most. A call that hangs on a dead node keeps its native client: it is
        then left to the end of the process, because closing it under the call would crash.
        """
        if not self._gate.close():
            return
        if self._http is not None:
            self._http.close()
        if not self._gate.wait_idle(_CLOSE_SECONDS):
            keep_open(self._client)
            log.warning("calls hang in Mooncake; its client is left open")
            return
        for address in self._regions.starts():
            self._client.unregister_buffer(address)
        close_native(self._client, _CLOSE_SECONDS)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Count a call that needs the master, unless it would only wait for one that is away."""
        with self._gate.call():
            self._watch.check()
            yield

    def _move(
        self, keys: Sequence[str], buffers: ObjectBuffers, groups: Sequence[str] | None, one_batch: _Batch
    ) -> NDArray[np.int8]:
        usable = self._regions.covers(buffers)
        codes = np.full(len(keys), StoreCode.NOT_REGISTERED, dtype=np.int8)
        if not usable.all():
            good = np.flatnonzero(usable)
            if good.size:
                rest = _pick(keys, good), buffers[good], None if groups is None else _pick(groups, good)
                codes[good] = self._move(*rest, one_batch)
            return codes
        for rows in batch_bounds(buffers.sizes, self._settings.batch_objects, self._settings.batch_bytes):
            some = None if groups is None else list(groups[rows])
            codes[rows] = one_batch(list(keys[rows]), buffers[rows], some)
            away = bool((codes[rows] == StoreCode.UNAVAILABLE).any())
            self._watch.heard(away=away)
            if away:
                codes[rows.stop :] = StoreCode.UNAVAILABLE
                break
        return codes

    def _put(self, keys: list[str], buffers: ObjectBuffers, groups: list[str] | None) -> NDArray[np.int8]:
        config = self._config(groups)
        if buffers.fragmented:
            pointers, lengths = _fragment_lists(buffers)
            raw = self._client.batch_put_from_multi_buffers(keys, pointers, lengths, config)
        else:
            raw = self._client.batch_put_from(
                keys, buffers.addresses.tolist(), buffers.lengths.tolist(), config
            )
        codes = store_codes(raw)
        if codes.any():
            log.warning("put: %s; Mooncake answered %s", describe_failures(keys, codes), sorted(set(raw)))
        return codes

    def _get(self, keys: list[str], buffers: ObjectBuffers, _groups: object) -> NDArray[np.int8]:
        if buffers.fragmented:
            pointers, lengths = _fragment_lists(buffers)
            raw = self._client.batch_get_into_multi_buffers(keys, pointers, lengths)
        else:
            raw = self._client.batch_get_into(keys, buffers.addresses.tolist(), buffers.lengths.tolist())
        got = np.array(raw, dtype=np.int64)
        asked = buffers.sizes
        codes = np.zeros(len(keys), dtype=np.int8)
        if np.array_equal(got, asked):
            return codes
        codes[got != asked] = StoreCode.SIZE_MISMATCH
        for i in np.flatnonzero(got < 0):
            codes[i] = store_code(int(got[i]))
        self._tell_sizes_apart(keys, asked, got, codes)
        if (codes > StoreCode.MISSING).any():
            log.warning("get: %s; Mooncake answered %s", describe_failures(keys, codes), sorted(set(raw)))
        return codes

    def _tell_sizes_apart(
        self, keys: list[str], asked: NDArray[np.int64], got: NDArray[np.int64], codes: NDArray[np.int8]
    ) -> None:
        """Find the mismatches among the faults: a small buffer gives -600, large fragments give -800."""
        unclear = np.flatnonzero((got == INVALID_PARAMS) | (got == TRANSFER_FAIL))
        if unclear.size:
            try:
                stored = self._stored_sizes([keys[int(i)] for i in unclear])
            except StoreUnavailable:
                codes[unclear] = StoreCode.UNAVAILABLE
                return
            codes[unclear[stored < 0]] = StoreCode.MISSING
            codes[unclear[(stored >= 0) & (stored != asked[unclear])]] = StoreCode.SIZE_MISMATCH

    def _stored_sizes(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """Return sizes of complete objects, -1 where missing; unlike `sizes`, this renews leases.

        Raises:
            StoreUnavailable: the master does not answer.
        """
        complete = self._native.ReplicaStatus.COMPLETE
        sizes: list[int] = []
        for chunk in self._chunks(keys):
            replicas = self._client.batch_get_replica_desc(chunk)
            absent = next((key for key in chunk if key not in replicas), None)
            # An empty answer is also all that a failed call gives. Only a call that says so tells them apart.
            if absent is not None and self._client.batch_is_exist([absent])[0] < 0:
                raise self._watch.lost("a query of sizes")
            sizes += [_replica_size(replicas.get(key, ()), complete) for key in chunk]
        return np.array(sizes, dtype=np.int64)

    def _chunks(self, keys: Sequence[str]) -> Iterator[list[str]]:
        step = self._settings.batch_objects
        for at in range(0, len(keys), step):
            yield list(keys[at : at + step])

    def _config(self, groups: list[str] | None) -> Any:
        config = self._native.ReplicateConfig()
        config.replica_num = self._settings.replicas
        if groups is not None:
            config.group_ids = groups
        return config

    def _master_http(self) -> MasterHttp:
        if self._http is None:
            raise StoreUnavailable("keys and sizes need the master's metrics port: set `master_http`")
        return self._http


def batch_bounds(sizes: NDArray[np.int64], max_objects: int, max_bytes: int) -> Iterator[slice]:
    """Cut a batch into runs of at most `max_objects` and `max_bytes`; a larger object goes alone."""
    count = len(sizes)
    ends = np.cumsum(sizes)
    at = 0
    while at < count:
        before = int(ends[at - 1]) if at else 0
        fitting = int(np.searchsorted(ends, before + max_bytes, side="right"))
        stop = min(count, at + max_objects, max(fitting, at + 1))
        yield slice(at, stop)
        at = stop


def _pick(values: Sequence[str], rows: NDArray[np.intp]) -> list[str]:
    return [values[i] for i in rows.tolist()]


def _fragment_lists(buffers: ObjectBuffers) -> tuple[list[list[int]], list[list[int]]]:
    if (buffers.lengths > 0).all():
        return buffers.addresses.tolist(), buffers.lengths.tolist()
    pairs = [buffers.fragments(i) for i in range(buffers.count)]
    return [p for p, _ in pairs], [n for _, n in pairs]


def _replica_size(replicas: Sequence[Any], complete: object) -> int:
    for replica in replicas:
        if replica.is_memory_replica() and replica.status == complete:
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
    return -1


def registration_advice(address: int, length: int, raw: int, protocol: str) -> str:
    """Return what a refused registration means and what to change (field report 29)."""
    text = f"Mooncake refused {length} bytes at {address:#x} with {raw}"
    if protocol == "tcp":
        return f"{text}: is the memory mapped and not registered with this client already?"
    room = memlock_room()
    if room is not None and room.left < length:
        return f"{text}: {room.advice(length)}"
    return (
        f"{text}: larger than the device registers at once (max_mr_size in `ibv_devinfo -v`)? Set "
        "max_region_bytes to less"
    )
