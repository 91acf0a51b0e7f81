"""`caketin up`: everything on this machine, until Ctrl-C."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from caketin.byte_size import byte_size
from caketin.commands.console import (
    StoreBytes,
    StoreOption,
    clear_errors,
    ending_as_interrupt,
    err,
    fail,
    running,
    say_what_runs,
)
from caketin.rdma_options import (
    GidIndex,
    Mtu,
    Protocol,
    RdmaDevices,
    ServiceLevel,
    TrafficClass,
    rdma_settings,
)
from caketin.stack import AgentOptions, Stack, StackSettings, cache_folder


def up(  # noqa: PLR0917 - flags
    port: Annotated[int, typer.Option(help="port of the control plane", min=1, max=65_535)] = 7411,
    data_dir: Annotated[Path | None, typer.Option(help="folder for data and logs", file_okay=False)] = None,
    store: StoreOption = "auto",
    store_bytes: StoreBytes = 4 << 30,
    redis_url: Annotated[
        str | None, typer.Option(help="a Redis that runs already; none: one is started")
    ] = None,
    protocol: Protocol = "tcp",
    devices: RdmaDevices = "",
    gid_index: GidIndex = None,
    traffic_class: TrafficClass = None,
    service_level: ServiceLevel = None,
    mtu: Mtu = None,
    agent: Annotated[bool, typer.Option("--agent", help="run an agent for engines too")] = False,
    agent_memory: Annotated[
        str, typer.Option(help="memory of the agent's pools, in bytes or as 64Gi")
    ] = "1Gi",
) -> None:
    """Run Redis, a store and the control plane on this machine until Ctrl-C, and an agent where asked for.

    With the file store, pages and claims stay in the data folder for the next time. With Mooncake they are in
    memory and end with the stack.
    """
    with clear_errors(), ending_as_interrupt():
        rdma = rdma_settings(protocol, devices, gid_index, traffic_class, service_level, mtu)
        options = AgentOptions(byte_size(agent_memory, "--agent-memory", 1 << 20)) if agent else None
        folder = data_dir or cache_folder() / "up"
        settings = StackSettings(folder, port, store, store_bytes, redis_url, rdma=rdma, agent=options)
        try:
            with running(Stack(settings)) as stack:
                say_what_runs(stack)
                err.print("Ctrl-C ends it.")
                _watch(stack)
        except KeyboardInterrupt:
            err.print("ended")


def _watch(stack: Stack) -> None:
    while (dead := stack.dead()) is None:
        time.sleep(0.2)
    fail(dead)
    raise typer.Exit(1)
