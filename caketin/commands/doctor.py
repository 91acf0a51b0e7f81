"""`caketin doctor`: what this machine and the services around it have for caketin, and what to do."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape
from rich.table import Table

from caketin.access_token import TokenFileOption, access_token
from caketin.commands.console import clear_errors, err, out
from caketin.doctor import pod, services
from caketin.doctor.finding import Finding, State
from caketin.doctor.machine import Machine
from caketin.doctor.rdma import RdmaCheck
from caketin.doctor.software import software
from caketin.rdma_options import GidIndex, Mtu, RdmaDevices, ServiceLevel, TrafficClass
from caketin.stack import cache_folder
from dataplane.rdma_settings import RdmaSettings

_STYLES: Final[dict[State, str]] = {"ok": "green", "warn": "yellow", "bad": "bold red"}


def doctor(
    *,
    redis_url: Annotated[
        str | None, typer.Option(envvar="CAKETIN_REDIS_URL", help="look at this Redis", show_envvar=True)
    ] = None,
    master: Annotated[str | None, typer.Option(help="host:port of a Mooncake master to look at")] = None,
    master_http: Annotated[str | None, typer.Option(help="host:port of its metrics port")] = None,
    url: Annotated[str | None, typer.Option(envvar="CAKETIN_URL", help="a control plane to look at")] = None,
    token_file: TokenFileOption = None,
    rdma: Annotated[
        bool, typer.Option("--rdma", help="move bytes over RDMA, with the settings below")
    ] = False,
    devices: RdmaDevices = "",
    gid_index: GidIndex = None,
    traffic_class: TrafficClass = None,
    service_level: ServiceLevel = None,
    mtu: Mtu = None,
    rank: Annotated[str, typer.Option(help="choose the devices of this rank, such as tp3")] = "",
    data_dir: Annotated[Path | None, typer.Option(help="folder for the file store's data")] = None,
    store_bytes: Annotated[
        int,
        typer.Option(
            help="memory of the Mooncake storage node that is to start here, in bytes; 0: none is, as beside "
            "one that runs",
            min=0,
        ),
    ] = 4 << 30,
    shared_dir: Annotated[
        Path | None, typer.Option(help="folder for pools in shared memory", file_okay=False)
    ] = None,
    shared_bytes: Annotated[int, typer.Option(help="memory that those pools take", min=0)] = 1 << 30,
    root: Annotated[Path, typer.Option(hidden=True, help="the file system to look at, for tests")] = Path(
        "/"
    ),
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say what is well, what is not, and what to do. Exit code 1 when something is bad."""
    with clear_errors():
        token = access_token(token_file)
        settings = RdmaSettings(devices, gid_index, traffic_class, service_level, mtu)
    machine = Machine(store_bytes, data_dir or cache_folder(), root)
    findings = list(_findings(machine, redis_url, (master, master_http), url, token))
    if rdma:
        findings += RdmaCheck(settings, rank).findings()
    if shared_dir is not None:
        findings.append(pod.shared_folder(shared_dir, shared_bytes))
    if pod.in_pod():
        findings = list(pod.in_chart_words(findings))
    bad = any(f.state == "bad" for f in findings)
    if json:
        typer.echo(jsonlib.dumps({"ok": not bad, "findings": [f.to_json() for f in findings]}, indent=2))
    else:
        _print(findings)
        if not (redis_url or master or url):
            err.print("Services were not asked for: --redis-url, --master, --url look at them.")
    if bad:
        raise typer.Exit(1)


def _findings(
    machine: Machine,
    redis_url: str | None,
    master: tuple[str | None, str | None],
    url: str | None,
    token: str | None,
) -> Iterator[Finding]:
    yield from software()
    yield from machine.findings()
    if redis_url:
        yield from services.redis(redis_url)
    if master[0]:
        yield from services.master(master[0], master[1])
    if url:
        yield from services.control_plane(url, token)


def _print(findings: list[Finding]) -> None:
    table = Table()
    for name in ("what", "", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for f in findings:
        style = _STYLES[f.state]
        table.add_row(escape(f.what), f"[{style}]{f.state}[/]", escape(f.found), escape(f.advice))
    out.print(table)
