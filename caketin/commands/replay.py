"""`caketin replay`: a trace or a made-up load through a control plane and its store, every byte compared."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from caketin.access_token import TokenFileOption, access_token
from caketin.commands.console import (
    StoreBytes,
    StoreOption,
    clear_errors,
    ending_as_interrupt,
    err,
    fail,
    out,
    running,
    say_what_runs,
)
from caketin.commands.replay_agent import replay_through_agent
from caketin.commands.replay_agent import say as say_by_tier
from caketin.rdma_options import GidIndex, Mtu, RdmaDevices, ServiceLevel, TrafficClass, rdma_settings
from caketin.replay.driver import ReplaySettings, replay
from caketin.replay.pool_sets import MAX_TP, POOL_SETS, rank_pools
from caketin.replay.rank import Sidecars
from caketin.replay.report import Report
from caketin.replay.trace import TRACE_PAGE_TOKENS, Load, generate, read_trace
from caketin.stack import Stack, StackSettings, cache_folder
from dataplane.rdma_settings import RdmaSettings
from dataplane.store_access import StoreOverrides
from metadata.errors import FieldError, InvalidInput

_GENERATED_REQUESTS: Final = 400
_PREFIX: Final = "replay-"
_NEW_SECONDS: Final = 60.0


def replay_command(
    trace: Annotated[Path | None, typer.Argument(help="a trace file; none: a built-in load")] = None,
    *,
    pools: Annotated[str, typer.Option(help=f"pool set: {', '.join(POOL_SETS)}")] = "deepseek-v4",
    tp: Annotated[int, typer.Option(help="ranks, each a process of its own", min=1, max=MAX_TP)] = 1,
    sidecars: Annotated[
        Sidecars, typer.Option(help="tail: of windowed pools only the last window of a request is backed up")
    ] = "all",
    concurrency: Annotated[
        int,
        typer.Option(
            help="requests in flight; with more than one, hits depend on timing where two share new pages",
            min=1,
            max=256,
        ),
    ] = 1,
    page_bytes: Annotated[int, typer.Option(help="bytes of a page over all pools and ranks")] = 4096,
    page_tokens: Annotated[int, typer.Option(help="tokens of a page", min=1, max=65_536)] = TRACE_PAGE_TOKENS,
    limit: Annotated[int | None, typer.Option(help="replay so many requests only", min=1)] = None,
    seed: Annotated[int, typer.Option(help="of the built-in load")] = 7,
    verify: Annotated[bool, typer.Option(help="compare restored bytes")] = True,
    call_seconds: Annotated[float, typer.Option(help="deadline of a control call", min=0.01)] = 2.0,
    transfer_seconds: Annotated[float, typer.Option(help="deadline of a transfer", min=0.01)] = 10.0,
    json: Annotated[str | None, typer.Option(help="write the numbers to this file (- for stdout)")] = None,
    url: Annotated[str | None, typer.Option(help="a control plane that runs; none: start a stack")] = None,
    token_file: TokenFileOption = None,
    store: StoreOption = "auto",
    store_bytes: StoreBytes = 4 << 30,
    protocol: Annotated[
        Literal["tcp", "rdma"] | None, typer.Option(help="none: as the control plane says, else tcp")
    ] = None,
    devices: RdmaDevices = "",
    gid_index: GidIndex = None,
    traffic_class: TrafficClass = None,
    service_level: ServiceLevel = None,
    mtu: Mtu = None,
    agent: Annotated[
        bool, typer.Option("--agent", help="through the host memory of an agent; exact hits by tier")
    ] = False,
    agent_socket: Annotated[
        Path | None, typer.Option(help="of an agent that runs; none: the stack gets one")
    ] = None,
    host_pages: Annotated[
        int | None, typer.Option(help="pages of the agent's host tier; none: a quarter of the load's", min=1)
    ] = None,
) -> None:
    """Replay a load: look up, prefetch what is restorable, back up the rest, compare the bytes.

    Exit code 1: restored bytes were wrong, or nobody answered for two minutes. Anything that is away for a
    shorter time is counted, no more. Ctrl-C ends it with the table of what was counted until then.
    """
    settings = ReplaySettings(
        url or "",
        pools=pools,
        page_bytes=page_bytes,
        page_tokens=page_tokens,
        verify=verify,
        tp=tp,
        sidecars=sidecars,
        concurrency=concurrency,
        call_seconds=call_seconds,
        transfer_seconds=transfer_seconds,
    )
    with clear_errors(), ending_as_interrupt():
        rdma = rdma_settings(
            "rdma" if url else protocol or "tcp", devices, gid_index, traffic_class, service_level, mtu
        )
        settings = replace(settings, overrides=_overrides(protocol, rdma))
        rank_pools(pools, page_bytes, tp)  # refuses what cannot be, before anything is started
        _check_writable(json)
        load = read_trace(trace, limit) if trace else generate(limit or _GENERATED_REQUESTS, seed=seed)
        if agent or agent_socket is not None:
            through = replay_through_agent(
                settings,
                load,
                host_pages=host_pages,
                socket=agent_socket,
                stack=StackSettings(Path(), None, store, store_bytes, rdma=rdma),
                folder=_folder(),
            )
            say_by_tier(through, json)
            if through.wrong_pages:
                fail(f"{through.wrong_pages} restored pages had wrong bytes")
            raise typer.Exit(1 if through.wrong_pages else 0)
        if url is not None:
            report = _replay(replace(settings, token=access_token(token_file)), load)
        else:
            with (
                _folder() as folder,
                running(Stack(StackSettings(folder, None, store, store_bytes, rdma=rdma))) as stack,
            ):
                say_what_runs(stack)
                report = _replay(replace(settings, url=stack.url), load)
        _say(report, json, embedded=url is None)
    if report.wrong_pages:
        fail(f"{report.wrong_pages} restored pages had wrong bytes")
    code = 1 if report.wrong_pages else 130 if report.ended_early == "interrupted" else 0
    if report.ended_early and not code:
        fail(f"requests are left: {report.ended_early}")
        code = 1
    if report.hanging:
        # A native call that hangs would abort an orderly end of the process; everything else has ended.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


def _overrides(protocol: str | None, rdma: RdmaSettings | None) -> StoreOverrides:
    """Return what the flags say of the store, of which the control plane may say something else."""
    told = {} if rdma is None else {n: v for n, v in asdict(rdma).items() if v not in {None, ""}}
    return StoreOverrides(protocol=protocol, **told)


def _replay(settings: ReplaySettings, load: Load) -> Report:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("pages"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("replaying", total=load.pages)
        return replay(settings, load, lambda pages: progress.advance(task, pages))


def _check_writable(json: str | None) -> None:
    """Refuse a file that the numbers could not be written to, before they are worked out."""
    if json is None or json == "-":
        return
    try:
        with Path(json).open("a", encoding="utf-8"):
            pass
    except OSError as error:
        detail = f"{json} cannot be written: {error.strerror}"
        raise InvalidInput(
            "no place for the numbers", [FieldError("--json", "unwritable", detail)]
        ) from error


def _say(report: Report, json: str | None, *, embedded: bool) -> None:
    if json is not None:
        report.write_json(json)
    if json == "-":
        return
    report.print(out)
    if embedded:
        out.print("The stack of this replay has ended and left nothing behind.")
    out.print(
        "Next: [bold]caketin up[/] keeps a stack running; [bold]caketin replay TRACE --url URL[/] uses it."
    )


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Give a folder for a stack's data, and remove it; also those of replays that were killed."""
    parent = cache_folder()
    parent.mkdir(parents=True, exist_ok=True)
    for other in parent.glob(f"{_PREFIX}*"):
        if _left_behind(other):
            shutil.rmtree(other, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _left_behind(folder: Path) -> bool:
    """Return whether nobody holds the lock of a stack's folder."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        # Made a moment ago, perhaps: its stack comes to the lock next.
        with contextlib.suppress(OSError):
            return time.time() - folder.stat().st_mtime > _NEW_SECONDS
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
