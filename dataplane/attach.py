"""How a rank joins: register with the control plane, open the store it names, register memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataplane.bound_pool import BoundPool
from dataplane.control_client import ControlClient, ModelIdentity
from dataplane.file_store import FileStore
from dataplane.messages.control import FileAccess, MooncakeAccess, RegisterResult
from dataplane.mooncake_native import MooncakeSettings
from dataplane.mooncake_store import MooncakeStore
from dataplane.object_store import ObjectStore
from dataplane.page_mover import PageMover
from metadata import object_keys
from metadata.errors import CaketinError
from metadata.namespace import Namespace, fingerprint

log = logging.getLogger(__name__)


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


def open_store(access: MooncakeAccess | FileAccess) -> ObjectStore:
    """Open the store that a registration names.

    Raises:
        StoreUnavailable: it cannot be reached, or its library does not load; the text says what to do.
    """
    if isinstance(access, FileAccess):
        return FileStore(Path(access.path))
    return MooncakeStore(
        MooncakeSettings(
            master=access.master,
            metadata=access.metadata,
            protocol=access.protocol,
            devices=access.devices,
        )
    )


@contextlib.contextmanager
def attached(
    client: ControlClient, model: ModelIdentity, tenant: str, pools: Sequence[BoundPool]
) -> Iterator[Attached]:
    """Join, and leave at the end: memory unregistered, store closed, rank removed.

    Args:
        client: the rank's client.
        model: what its page hashes mean.
        tenant: whose token the client has, for the manifests.
        pools: the rank's pools with their memory, which must outlive the block.
    """
    registration = client.register(model, [p.pool for p in pools])
    with contextlib.ExitStack() as undo:
        undo.callback(_leave, client)
        store = open_store(registration.store)
        undo.callback(store.close)
        for region in (r for p in pools for host in p.hosts for r in host.regions):
            store.register(region.address, region.length)
            undo.callback(store.unregister, region.address)
        _write_manifests(store, model, tenant, pools)
        mover = PageMover(store, client, registration.namespace_id, pools)
        yield Attached(registration.namespace_id, registration, store, mover)


def _leave(client: ControlClient) -> None:
    """Say goodbye; the lease runs out anyway."""
    try:
        client.leave()
    except CaketinError as error:
        log.info("the rank could not be removed and stays until its lease ends: %s", error)


def _write_manifests(
    store: ObjectStore, model: ModelIdentity, tenant: str, pools: Sequence[BoundPool]
) -> None:
    """Say in the store itself what the keys mean, for the day on which Redis has lost everything (I3)."""
    namespace = Namespace(
        tenant,
        model.model,
        model.revision,
        model.page_size,
        model.hash_kind,
        fingerprint(model.namespace_salt),
    )
    for pool in pools:
        spec = pool.pool.spec
        key = object_keys.manifest_key(namespace.namespace_id, spec.pool_id)
        store.put_bytes(key, object_keys.manifest(namespace, spec))
