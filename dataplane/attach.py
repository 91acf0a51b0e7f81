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
from metadata.errors import CaketinError, FieldError
from metadata.namespace import Namespace, fingerprint

log = logging.getLogger(__name__)


class IdentityMismatch(CaketinError):
    """Control plane and engine do not mean the same pages: nothing may be written under such keys.

    Both work out the namespace id, the pool ids and the keys' suffixes for themselves. They differ where the
    two run versions of caketin that do not fit together, or where something between them changes answers.
    """

    code = "identity_mismatch"


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
def attached(client: ControlClient, model: ModelIdentity, pools: Sequence[BoundPool]) -> Iterator[Attached]:
    """Join, and leave at the end: memory unregistered, store closed, rank removed.

    A failure on the way in undoes what was done so far, in the same order.

    Args:
        client: the rank's client.
        model: what its page hashes mean.
        pools: the rank's pools with their memory, which must outlive the block.

    Raises:
        ControlPlaneAway, ControlRefused: the registration failed.
        IdentityMismatch: the control plane answered for other pages.
        StoreError: the store could not be opened, refused memory, or did not take a manifest.
    """
    registration = client.register(model, [p.pool for p in pools])
    with contextlib.ExitStack() as undo:
        undo.callback(_leave, client)
        namespace = _checked_identity(registration, model, pools)
        store = open_store(registration.store)
        undo.callback(store.close)
        for region in (r for p in pools for host in p.hosts for r in host.regions):
            store.register(region.address, region.length)
            undo.callback(store.unregister, region.address)
        mover = PageMover(store, client, registration.namespace_id, pools)
        _write_manifests(store, namespace, pools)
        yield Attached(registration.namespace_id, registration, store, mover)


def _leave(client: ControlClient) -> None:
    """Say goodbye; the lease runs out anyway."""
    try:
        client.leave()
    except CaketinError as error:
        log.info("the rank could not be removed and stays until its lease ends: %s", error)


def _checked_identity(
    registration: RegisterResult, model: ModelIdentity, pools: Sequence[BoundPool]
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
        spec, grant = pool.pool.spec, registration.pools.get(pool.name)
        ours[f"pools.{pool.name}.pool_id"] = spec.pool_id
        theirs[f"pools.{pool.name}.pool_id"] = grant.pool_id if grant else ""
        ours[f"pools.{pool.name}.suffixes"] = " ".join(object_keys.suffixes(spec, pool.shards))
        theirs[f"pools.{pool.name}.suffixes"] = " ".join(grant.suffixes) if grant else ""
    errors = [
        FieldError(field, "mismatch", f"is {theirs[field]!r} for the control plane, {value!r} here")
        for field, value in ours.items()
        if theirs[field] != value
    ]
    if errors:
        raise IdentityMismatch("the control plane names this rank's pages otherwise", errors)
    return namespace


def _write_manifests(store: ObjectStore, namespace: Namespace, pools: Sequence[BoundPool]) -> None:
    """Say in the store itself what the keys mean, for the day on which Redis has lost everything (I3)."""
    for pool in pools:
        spec = pool.pool.spec
        key = object_keys.manifest_key(namespace.namespace_id, spec.pool_id)
        store.put_bytes(key, object_keys.manifest(namespace, spec))
