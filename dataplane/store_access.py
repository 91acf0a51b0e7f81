"""Opening the store that a registration names, as this host reaches it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from dataplane.bounce_store import BounceStore
from dataplane.file_store import FileStore
from dataplane.messages.control import FileAccess, MooncakeAccess
from dataplane.mooncake_native import MooncakeSettings
from dataplane.mooncake_store import MooncakeStore
from dataplane.object_store import ObjectStore


@dataclass(frozen=True)
class StoreOverrides:
    """How this host reaches the store, where that differs from what the control plane says.

    Attributes:
        path: of the file store.
        master: `host:port` of Mooncake's master.
        metadata: Mooncake's metadata server.
        protocol: `tcp` or `rdma`.
        devices: RDMA devices, see `rdma_devices`.
        gid_index: see `RdmaSettings`, also of the next four.
        traffic_class: of RoCE packets.
        service_level: InfiniBand's.
        mtu: payload of a packet, the same on both ends.
        max_region_bytes: most bytes to register at once.
        local_hostname: this host as storage nodes reach it.
        lease_seconds: Mooncake's `default_kv_lease_ttl`, where its master was started with another.
        bounce_mib: memory of a bounce lane, at least the largest object; None: no bounce buffers, a call
            blocks until the store returns.
        bounce_lanes: calls that may hang at the same time.
        call_seconds: deadline of a store call; holds with bounce buffers only.
    """

    path: str | None = None
    master: str | None = None
    metadata: str | None = None
    protocol: str | None = None
    devices: str | None = None
    gid_index: int | None = None
    traffic_class: int | None = None
    service_level: int | None = None
    mtu: int | None = None
    max_region_bytes: int | None = None
    local_hostname: str | None = None
    lease_seconds: float | None = None
    bounce_mib: int | None = None
    bounce_lanes: int = 4
    call_seconds: float = 2.0

    def bounced(self, store: ObjectStore) -> ObjectStore:
        """Return a store that may block, behind bounce buffers where they are asked for (M1)."""
        if self.bounce_mib is None:
            return store
        size, lanes = self.bounce_mib << 20, self.bounce_lanes
        return BounceStore(store, call_seconds=self.call_seconds, lanes=lanes, lane_bytes=size)

    def file(self, access: FileAccess) -> Path:
        """Return the folder of the file store."""
        return Path(self.path or access.path)

    def mooncake(self, access: MooncakeAccess, rank: str = "") -> MooncakeSettings:
        """Return how a rank reaches Mooncake."""
        told = {n: getattr(access, n) for n in ("master", "metadata", "protocol", "devices")}
        names = {f.name for f in fields(self)} & {f.name for f in fields(MooncakeSettings)}
        ours = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        return MooncakeSettings(**{**told, **ours}, rank=rank)


AS_TOLD: Final = StoreOverrides()


def open_store(
    access: MooncakeAccess | FileAccess, overrides: StoreOverrides = AS_TOLD, rank: str = ""
) -> ObjectStore:
    """Open the store that a registration names.

    Args:
        access: what the control plane says.
        overrides: what differs on this host.
        rank: name of the rank, for devices that are named by rank.

    Raises:
        StoreUnavailable: it cannot be reached, its library does not load, or RDMA cannot be used as it is
            set; the text says what to do.
        RegistrationFailed: there is no memory for bounce buffers.
    """
    if isinstance(access, FileAccess):
        return FileStore(overrides.file(access), max_bytes=access.max_bytes)
    return overrides.bounced(MooncakeStore(overrides.mooncake(access, rank)))
