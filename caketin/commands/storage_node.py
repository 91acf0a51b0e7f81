"""`caketin storage-node` and `caketin mooncake-master`: the parts of a Mooncake store, each on its own."""

from __future__ import annotations

import signal
import threading
from typing import Annotated, Final

import typer

from caketin.byte_size import byte_size
from caketin.commands.console import clear_errors
from caketin.rdma_options import GidIndex, Mtu, Protocol, RdmaDevices, ServiceLevel, TrafficClass
from dataplane.mooncake_native import MooncakeSettings
from dataplane.mooncake_node import become_master
from dataplane.storage_node import StorageNode

_LEAST_BYTES: Final = 1 << 24


def storage_node(
    master: Annotated[str, typer.Option(help="host:port of the Mooncake master")],
    segment: Annotated[str, typer.Option(help="memory to lend, in bytes or as 64Gi")],
    *,
    master_http: Annotated[str | None, typer.Option(help="host:port of the master's metrics port")] = None,
    protocol: Protocol = "tcp",
    devices: RdmaDevices = "",
    gid_index: GidIndex = None,
    traffic_class: TrafficClass = None,
    service_level: ServiceLevel = None,
    mtu: Mtu = None,
    local_hostname: Annotated[
        str, typer.Option(help="this machine as others reach it; empty: the address that faces the master")
    ] = "",
    prefault: Annotated[bool, typer.Option("--prefault", help="touch all memory before being ready")] = False,
    wait_seconds: Annotated[float, typer.Option(help="how long to wait for the master", min=0)] = 60.0,
    health_host: Annotated[str, typer.Option(help="address of the probe")] = "127.0.0.1",
    health_port: Annotated[
        int, typer.Option(help="port of the probe (/healthz, /readyz); 0 for none", min=0, max=65_535)
    ] = 0,
) -> None:
    """Lend this machine's memory to a Mooncake store until SIGTERM or Ctrl-C."""
    told_to_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told_to_end.set())
    with clear_errors():
        store = MooncakeSettings(
            master,
            master_http=master_http or None,
            local_hostname=local_hostname,
            protocol=protocol,
            devices=devices,
            gid_index=gid_index,
            traffic_class=traffic_class,
            service_level=service_level,
            mtu=mtu,
        )
        size = byte_size(segment, "--segment", _LEAST_BYTES)
        health = (health_host, health_port) if health_port else None
        node = StorageNode(store, size, prefault=prefault, wait_seconds=wait_seconds, health=health)
        node.run(told_to_end, lambda name: typer.echo(f"storage node {name} lends {size} bytes", err=True))


def mooncake_master(context: typer.Context) -> None:
    """Become `mooncake_master` of Mooncake's wheel; all flags are its own."""
    with clear_errors():
        become_master(context.args)
