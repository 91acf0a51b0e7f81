"""How a rank joins: register with the control plane, open the store it names, register memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, runtime_checkable

from dataplane.bound_pool import BoundPool
from dataplane.control_client import ControlClient, ModelIdentity
from dataplane.eviction_report import EvictionReport
from dataplane.file_space import OnEvict
from dataplane.host_fragments import ADDRESS_LIMIT
from dataplane.host_pool import Region, registration_chunks
from dataplane.messages.control import FileAccess, MooncakeAccess, RegisterResult
from dataplane.object_store import ObjectStore
from dataplane.page_mover import PageMover
from dataplane.store_access import AS_TOLD, StoreOverrides, open_store
from metadata import object_keys
from metadata.errors import CaketinError, FieldError, InvalidInput
from metadata.namespace import Namespace, fingerprint
from metadata.pools import RankPool

log = logging.getLogger(__name__)

_NO_LIMIT: Final = ADDRESS_LIMIT

Opener: TypeAlias = Callable[[MooncakeAccess | FileAccess, StoreOverrides, str], ObjectStore]
"""Opens the store that a registration names, on this host, for the rank of that name."""


class IdentityMismatch(CaketinError):
    """Control plane and engine do not mean the same pages: nothing may be written under such keys.

    Both work out the namespace id, the pool ids and the keys' suffixes for themselves. They differ where the
    two run versions of caketin that do not fit together, or where something between them changes answers.
    """

    code = "identity_mismatch"


@runtime_checkable
class TellsEvictions(Protocol):
    """A store that says what it evicts: the file store, or a view of one."""

    def tell_evictions(self, on_evict: OnEvict | None) -> None:
        """Set who is told."""


@dataclass(frozen=True)
class Attached:
    """A rank that can move pages.

    Attributes:
        namespace_id: of its page hashes.
        registration: what the control plane answered.
        store: the open store; its memory regions are registered.
        mover: moves this rank's pages.
    """

    namespace_id: str
    registration: RegisterResult
    store: ObjectStore
    mover: PageMover


class RankAttachment:
    """A rank's registration, its open store and its registered memory, for as long as an engine runs.

    `join` may be called again: after a restart of the control plane, or with more pools (late drafts). What
    is in place already stays as it is, so a call that failed half-way is simply made again. Not for several
    threads at once.
    """

    def __init__(
        self,
        client: ControlClient,
        model: ModelIdentity,
        overrides: StoreOverrides = AS_TOLD,
        opener: Opener | None = None,
    ) -> None:
        """Take the parts; nothing is called yet.

        Args:
            client: the rank's client.
            model: what its page hashes mean.
            overrides: how this host reaches the store, where that differs from what a registration says.
            opener: opens the store, which the attachment closes; None: `open_store`.
        """
        self._client = client
        self._model = model
        self._overrides = overrides
        self._opener = opener
        self._store: ObjectStore | None = None
        self._access: MooncakeAccess | FileAccess | None = None
        self._regions: dict[int, int] = {}
        self._registered = False

    def join(self, pools: Sequence[BoundPool], registered: Sequence[RankPool] | None = None) -> Attached:
        """Register, open the store, register memory, write manifests.

        Args:
            pools: the rank's pools with their memory, which must outlive the attachment.
            registered: the pools as they are registered, where the rank holds more shards than it owns: of a
                pool that all ranks have, one writes and the others only read. None: as `pools` says.

        Raises:
            ControlPlaneAway, ControlRefused: the registration failed.
            IdentityMismatch: the control plane answered for other pages.
            StoreError: the store could not be opened, refused memory, or did not take a manifest.
        """
        owned = [p.pool for p in pools] if registered is None else list(registered)
        registration = self._client.register(self._model, owned)
        self._registered = True
        namespace = _checked_identity(registration, self._model, owned)
        store = self._opened(registration.store)
        self._register_memory(store, pools)
        if isinstance(store, TellsEvictions):
            store.tell_evictions(EvictionReport(self._client, registration.namespace_id, owned))
        mover = PageMover(store, self._client, registration.namespace_id, pools)
        _write_manifests(store, namespace, owned)
        return Attached(registration.namespace_id, registration, store, mover)

    def leave(self) -> None:
        """Unregister memory, close the store, remove the rank; again: nothing happens."""
        self._close_store()
        if self._registered:
            self._registered = False
            _leave(self._client)

    def _register_memory(self, store: ObjectStore, pools: Sequence[BoundPool]) -> None:
        """Register what is not, in pieces where the store has a limit (field report 30).

        Two pools may share memory, two shards of one pool may not.
        """
        for region in _regions(pools, store.max_region_bytes):
            if self._regions.get(region.address) != region.length:
                store.register(region.address, region.length)
                self._regions[region.address] = region.length

    def _opened(self, access: MooncakeAccess | FileAccess) -> ObjectStore:
        if self._store is not None and access != self._access:
            log.warning("the control plane names another store now: the old one is closed")
            self._close_store()
        if self._store is None:
            opener = self._opener or open_store
            store = opener(access, self._overrides, self._client.me.rank)
            self._store, self._access = store, access
        return self._store

    def _close_store(self) -> None:
        store, self._store = self._store, None
        regions, self._regions = self._regions, {}
        if store is None:
            return
        with contextlib.ExitStack() as undo:
            undo.callback(store.close)
            for address in regions:
                undo.callback(store.unregister, address)


@contextlib.contextmanager
def attached(
    client: ControlClient,
    model: ModelIdentity,
    pools: Sequence[BoundPool],
    overrides: StoreOverrides = AS_TOLD,
) -> Iterator[Attached]:
    """Join, and leave at the end: memory unregistered, store closed, rank removed.

    A failure on the way in undoes what was done so far, in the same order.

    Args:
        client: the rank's client.
        model: what its page hashes mean.
        pools: the rank's pools with their memory, which must outlive the block.
        overrides: how this host reaches the store, where that differs from what the registration says.

    Raises:
        ControlPlaneAway, ControlRefused: the registration failed.
        IdentityMismatch: the control plane answered for other pages.
        StoreError: the store could not be opened, refused memory, or did not take a manifest.
    """
    attachment = RankAttachment(client, model, overrides)
    try:
        yield attachment.join(pools)
    finally:
        attachment.leave()


def _regions(pools: Sequence[BoundPool], most: int | None) -> list[Region]:
    """Return what to register, each region once.

    Raises:
        InvalidInput: two shards of a pool lie in one region, or a page is larger than `most`.
    """
    for pool in pools:
        regions = [r for host in pool.hosts for r in host.regions]
        if len(set(regions)) < len(regions):
            raise InvalidInput(f"shards {list(pool.shards)} of pool {pool.name!r} lie in one region")
    return registration_chunks([h for pool in pools for h in pool.hosts], _NO_LIMIT if most is None else most)


def _leave(client: ControlClient) -> None:
    """Say goodbye; the lease runs out anyway."""
    try:
        client.leave()
    except CaketinError as error:
        log.info("the rank could not be removed and stays until its lease ends: %s", error)


def _checked_identity(
    registration: RegisterResult, model: ModelIdentity, pools: Sequence[RankPool]
) -> Namespace:
    """Return the namespace, once every name that ends up in a key was worked out here as well.

    Raises:
        IdentityMismatch: with each field that differs.
    """
    if registration.tenant is None:
        detail = "is not in the control plane's answer: its caketin is too old for this one"
        raise IdentityMismatch("the namespace is unknown", [FieldError("tenant", "missing", detail)])
    namespace = Namespace(
        registration.tenant,
        model.model,
        model.revision,
        model.page_size,
        model.hash_kind,
        fingerprint(model.namespace_salt),
    )
    ours = {"namespace_id": namespace.namespace_id}
    theirs = {"namespace_id": registration.namespace_id}
    ours["store.key_prefix"] = object_keys.namespace_prefix(namespace.namespace_id)
    theirs["store.key_prefix"] = registration.store.key_prefix
    for pool in pools:
        spec, grant = pool.spec, registration.pools.get(pool.spec.name)
        ours[f"pools.{spec.name}.pool_id"] = spec.pool_id
        theirs[f"pools.{spec.name}.pool_id"] = grant.pool_id if grant else ""
        ours[f"pools.{spec.name}.suffixes"] = " ".join(object_keys.suffixes(spec, pool.owned_shards))
        theirs[f"pools.{spec.name}.suffixes"] = " ".join(grant.suffixes) if grant else ""
    errors = [
        FieldError(field, "mismatch", f"is {theirs[field]!r} for the control plane, {value!r} here")
        for field, value in ours.items()
        if theirs[field] != value
    ]
    if errors:
        raise IdentityMismatch("the control plane names this rank's pages otherwise", errors)
    return namespace


def _write_manifests(store: ObjectStore, namespace: Namespace, pools: Sequence[RankPool]) -> None:
    """Say in the store itself what the keys mean, for the day on which Redis has lost everything (I3)."""
    for pool in pools:
        spec = pool.spec
        key = object_keys.manifest_key(namespace.namespace_id, spec.pool_id)
        store.put_bytes(key, object_keys.manifest(namespace, spec))
