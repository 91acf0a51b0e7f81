"""Loading Mooncake's native client, connecting it and closing it: what store and storage node share."""

from __future__ import annotations

import importlib
import logging
import os
import socket
from dataclasses import dataclass, fields
from threading import Thread
from typing import Any, Final

from dataplane.mooncake_master import split_address
from dataplane.object_store import StoreUnavailable
from dataplane.rdma_ports import SYSFS
from dataplane.rdma_settings import RdmaSettings, environment, rdma_faults
from metadata.errors import InvalidInput

log = logging.getLogger(__name__)

_ENVIRONMENT: Final = {
    # With the default of 1,024 a batch of more than 2,048 objects fails after 60 s; above 65,535 is refused.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "16384",
    "MC_LOG_LEVEL": "WARNING",
}
_kept_open: list[Any] = []  # clients that could not be closed; their destructors must not run either


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """How to reach a Mooncake cluster.

    Attributes:
        master: `host:port` of the master's RPC.
        master_http: `host:port` of its metrics port; without it, `sizes` and `keys` raise `StoreUnavailable`.
        local_hostname: this host as storage nodes reach it; empty: the address that faces the master.
        metadata: Mooncake's metadata server, or `P2PHANDSHAKE` for none.
        protocol: `tcp` or `rdma`.
        devices: RDMA devices, see `rdma_devices`; empty: Mooncake chooses.
        gid_index: see `RdmaSettings`, also of the next four.
        traffic_class: of RoCE packets.
        service_level: InfiniBand's.
        mtu: payload of a packet, the same on both ends.
        max_region_bytes: most bytes to register at once.
        rank: name of the rank, for devices that are named by rank.
        local_buffer_bytes: scratch memory for `put_bytes` and `get_bytes`; bounds their size.
        batch_objects: most objects in one native call.
        batch_bytes: most bytes in one native call of several objects.
        replicas: copies of each object.
        lease_seconds: the master's `default_kv_lease_ttl`.
        connect_seconds: how long the master may take to accept a connection.
    """

    master: str
    master_http: str | None = None
    local_hostname: str = ""
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    gid_index: int | None = None
    traffic_class: int | None = None
    service_level: int | None = None
    mtu: int | None = None
    max_region_bytes: int | None = None
    rank: str = ""
    local_buffer_bytes: int = 16 << 20
    batch_objects: int = 1024
    batch_bytes: int = 1 << 30
    replicas: int = 1
    lease_seconds: float = 10.0
    connect_seconds: float = 3.0

    @property
    def rdma(self) -> RdmaSettings:
        """How to use RDMA.

        Raises:
            InvalidInput: a value out of range.
        """
        return RdmaSettings(**{f.name: getattr(self, f.name) for f in fields(RdmaSettings)})

    @property
    def chosen_devices(self) -> tuple[str, ...]:
        """This process' devices; empty: Mooncake chooses.

        Raises:
            InvalidInput: the list cannot be read, or has nothing for this process.
        """
        return self.rdma.chosen(self.rank) if self.protocol == "rdma" else ()


def load_native(settings: MooncakeSettings | None = None, segment_bytes: int = 0) -> Any:
    """Import and return `mooncake.store`, with the transport limits that large batches need.

    Mooncake reads its environment while it is loaded, so a client's settings are given here as well as to
    `connect`. Variables that are set already keep their values, where no setting says otherwise.

    Args:
        settings: of the client that is wanted; None: only to see whether it loads.
        segment_bytes: memory that the client is to lend.

    Raises:
        StoreUnavailable: it is not installed, a library it needs is missing, or RDMA cannot be used as it is
            set; the text names the setting.
    """
    if settings is not None:
        _checked_devices(settings, segment_bytes + settings.local_buffer_bytes)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as e:
        raise StoreUnavailable(
            f"Mooncake does not load: {e}. Install caketin[cpu], [cuda12] or [cuda13]; "
            "on Debian the [cpu] wheel also needs the packages libibverbs1, libnuma1 and libcurl4"
        ) from e


def connect(native: Any, settings: MooncakeSettings, segment_bytes: int) -> Any:
    """Return a native client that is set up; with `segment_bytes` it lends memory to the store.

    Raises:
        StoreUnavailable: set-up fails, or RDMA cannot be used as it is set; the text names the setting.
    """
    devices = _checked_devices(settings, segment_bytes + settings.local_buffer_bytes)
    host = settings.local_hostname or _address_towards(settings.master)
    client = native.MooncakeDistributedStore()
    raw = client.setup(
        host,
        settings.metadata,
        segment_bytes,
        settings.local_buffer_bytes,
        settings.protocol,
        ",".join(devices),
        settings.master,
    )
    if raw != 0:
        raise StoreUnavailable(
            f"Mooncake's set-up answered {raw} (host {host}, master {settings.master}, {settings.protocol} "
            f"{','.join(devices) or 'any device'}): see its messages on stderr; with rdma, "
            "`caketin doctor --rdma` says more"
        )
    return client


def close_native(client: Any, seconds: float) -> None:
    """Close a client that nobody uses; give up waiting after `seconds`.

    With its storage node gone a close takes 10 s, which nobody who stops an engine wants to wait for.
    """
    closing = Thread(target=client.close, name="mooncake-close", daemon=True)
    closing.start()
    closing.join(seconds)
    if closing.is_alive():
        keep_open(client)
        log.warning("Mooncake did not close within %g s; it goes on closing by itself", seconds)


def keep_open(client: Any) -> None:
    """Keep a client until the process ends, because a call of it still runs."""
    _kept_open.append(client)


def _checked_devices(settings: MooncakeSettings, locked_bytes: int) -> tuple[str, ...]:
    """Return the devices to use, and set the variables that Mooncake reads.

    Raises:
        StoreUnavailable: something would fail, or another client of this process was told otherwise.
    """
    if settings.protocol != "rdma":
        return ()
    try:
        rdma, devices = settings.rdma, settings.chosen_devices
        errors = list(rdma_faults(rdma, devices, locked_bytes, SYSFS))
        if not errors:
            environment.tell(rdma)
    except InvalidInput as e:
        errors = list(e.errors)
    if errors:
        told = "; ".join(f"{e.field}: {e.detail}" for e in errors)
        raise StoreUnavailable(f"RDMA cannot be used as it is set: {told}")
    return devices


def _address_towards(master: str) -> str:
    host, port = split_address(master)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing; picks the local address of the route
        except OSError as e:
            raise StoreUnavailable(f"no route to the Mooncake master {master}: {e}") from e
        return str(probe.getsockname()[0])
