"""`caketin agent`: the node daemon that owns host memory and moves it for the engines of its machine."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from caketin.access_token import TokenFileOption, access_token
from caketin.byte_size import byte_size
from caketin.commands.console import clear_errors
from caketin.doctor.pod import shared_folder
from dataplane.agent_server import run_agent
from dataplane.agent_settings import AgentSettings, default_shared_dir, default_socket
from dataplane.rdma_settings import RdmaSettings
from dataplane.store_access import StoreOverrides

_LEAST_MEMORY: Final = 1 << 20
_LOG_LINE: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


log = logging.getLogger(__name__)


def _look_at(folder: Path, memory_bytes: int) -> None:
    """Say so where pools would not lie in memory, or have less of it than the agent may take."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    found = shared_folder(there, memory_bytes)
    if found.state == "bad":
        log.warning("%s: %s: %s", found.what, found.found, found.advice)


def _variable(name: str) -> str:
    return f"CAKETIN_AGENT_{name.upper()}"


def agent(
    url: Annotated[
        str, typer.Option(help="the control plane", envvar=_variable("url"))
    ] = "http://127.0.0.1:7411",
    *,
    socket: Annotated[
        Path | None,
        typer.Option(
            help="path of the Unix socket; none: below $XDG_RUNTIME_DIR, or /tmp", envvar=_variable("socket")
        ),
    ] = None,
    shared_dir: Annotated[
        Path | None,
        typer.Option(
            help="folder on a tmpfs for the pools; none: below /dev/shm", envvar=_variable("shared_dir")
        ),
    ] = None,
    memory: Annotated[
        str,
        typer.Option(help="memory of all pools together, in bytes or as 64Gi", envvar=_variable("memory")),
    ] = "1Gi",
    token_file: TokenFileOption = None,
    host: Annotated[
        str, typer.Option(help="address for metrics and probes over TCP", envvar=_variable("host"))
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            help="TCP port for metrics and probes; 0: none", envvar=_variable("port"), min=0, max=65_535
        ),
    ] = 0,
    allow_uid: Annotated[
        list[int] | None,
        typer.Option(
            help="another user whose engines may call; may be repeated", envvar=_variable("allow_uid")
        ),
    ] = None,
    idle_seconds: Annotated[
        float,
        typer.Option(
            help="a session without a word for so long ends", envvar=_variable("idle_seconds"), min=1
        ),
    ] = 30.0,
    transfers: Annotated[
        int, typer.Option(help="transfers that move bytes at a time", envvar=_variable("transfers"), min=1)
    ] = 4,
    queued_transfers: Annotated[
        int,
        typer.Option(
            help="transfers that may wait; one more is refused", envvar=_variable("queued_transfers"), min=1
        ),
    ] = 256,
    bytes_in_flight: Annotated[
        str,
        typer.Option(
            help="most bytes of the transfers that run, in bytes or as 1Gi",
            envvar=_variable("bytes_in_flight"),
        ),
    ] = "1Gi",
    transfer_seconds: Annotated[
        float,
        typer.Option(
            help="longest deadline of a transfer, and that of one without",
            envvar=_variable("transfer_seconds"),
            min=0.01,
        ),
    ] = 60.0,
    grace_seconds: Annotated[
        float,
        typer.Option(
            help="how long slots rest after a store call that timed out has come back",
            envvar=_variable("grace_seconds"),
            min=0,
        ),
    ] = 5.0,
    drain_seconds: Annotated[
        float,
        typer.Option(
            help="how long transfers may take to end after SIGTERM", envvar=_variable("drain_seconds"), min=0
        ),
    ] = 20.0,
    call_seconds: Annotated[
        float,
        typer.Option(
            help="deadline of a call to the control plane", envvar=_variable("call_seconds"), min=0.01
        ),
    ] = 1.0,
    store_path: Annotated[
        Path | None,
        typer.Option(
            help="file store: its folder here, where that differs from what the control plane says",
            envvar=_variable("store_path"),
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="RDMA devices; none: as the control plane says", envvar=_variable("devices")),
    ] = None,
    gid_index: Annotated[
        int | None, typer.Option(help="RoCE: row of the port's GID table", envvar=_variable("gid_index"))
    ] = None,
    traffic_class: Annotated[
        int | None, typer.Option(help="RoCE: DSCP * 4, 0 to 255", envvar=_variable("traffic_class"))
    ] = None,
    service_level: Annotated[
        int | None,
        typer.Option(help="InfiniBand: service level, 0 to 15", envvar=_variable("service_level")),
    ] = None,
    mtu: Annotated[
        int | None,
        typer.Option(
            help="RDMA: 512, 1024, 2048 or 4096; the same on storage nodes", envvar=_variable("mtu")
        ),
    ] = None,
    local_hostname: Annotated[
        str | None,
        typer.Option(
            help="this machine as storage nodes reach it; none: the address that faces the master",
            envvar=_variable("local_hostname"),
        ),
    ] = None,
) -> None:
    """Own host memory, share it with the engines of this machine, and move it to and from the store.

    Engines call over the Unix socket; docs/agent.md says how. SIGTERM and Ctrl-C end it in order: transfers
    get a while to end.
    """
    logging.basicConfig(level=logging.INFO, format=_LOG_LINE, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with clear_errors():
        # Looked at now; by itself it would be only when the first engine comes.
        rdma = RdmaSettings(devices or "", gid_index, traffic_class, service_level, mtu)
        settings = AgentSettings(
            url=url,
            socket=socket or default_socket(),
            shared_dir=shared_dir or default_shared_dir(),
            memory_bytes=byte_size(memory, "--memory", _LEAST_MEMORY),
            token=access_token(token_file),
            allowed_uids=frozenset(allow_uid or ()),
            host=host,
            port=port or None,
            idle_seconds=idle_seconds,
            transfers=transfers,
            queued_transfers=queued_transfers,
            bytes_in_flight=byte_size(bytes_in_flight, "--bytes-in-flight", _LEAST_MEMORY),
            transfer_seconds=transfer_seconds,
            grace_seconds=grace_seconds,
            drain_seconds=drain_seconds,
            call_seconds=call_seconds,
            store=StoreOverrides(
                path=str(store_path) if store_path else None,
                devices=devices,
                gid_index=rdma.gid_index,
                traffic_class=rdma.traffic_class,
                service_level=rdma.service_level,
                mtu=rdma.mtu,
                local_hostname=local_hostname,
            ),
        )
        _look_at(settings.shared_dir, settings.memory_bytes)
        clean = run_agent(settings, lambda line: typer.echo(line, err=True))
    if not clean:
        # A native call that hangs would abort an orderly end of the process; everything else has ended.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
