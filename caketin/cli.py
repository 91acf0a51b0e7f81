"""The command line. Each command puts parts together and says in plain words what came of it."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import caketin
from caketin.access_token import TokenFileOption, access_token
from caketin.commands import token
from caketin.commands.ls import ls
from caketin.commands.serve import serve
from caketin.replay.driver import ReplaySettings, replay
from caketin.replay.pool_sets import POOL_SETS
from caketin.replay.report import Report
from caketin.replay.trace import TRACE_PAGE_TOKENS, Load, generate, read_trace
from caketin.stack import Stack, StackSettings, StoreChoice, cache_folder
from dataplane.child_process import ChildFailed
from metadata.errors import CaketinError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="L3 tier of the hierarchical KV cache.")
out = Console()
err = Console(stderr=True)

StoreOption = Annotated[str, typer.Option("--store", help="auto, file, or mooncake")]
StoreBytes = Annotated[int, typer.Option(help="memory of the Mooncake storage node, in bytes", min=1 << 24)]


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """Start with `caketin replay` or `caketin up`."""
    if version:
        out.print(f"caketin {caketin.__version__}")
        raise typer.Exit


app.command()(serve)
app.command()(ls)
app.add_typer(token.app, name="token")


@app.command()
def up(
    port: Annotated[int, typer.Option(help="port of the control plane")] = 7411,
    data_dir: Annotated[Path | None, typer.Option(help="folder for data and logs")] = None,
    store: StoreOption = "auto",
    store_bytes: StoreBytes = 4 << 30,
    redis_url: Annotated[str | None, typer.Option(help="a Redis that runs already")] = None,
) -> None:
    """Run Redis, a store and the control plane on this machine until Ctrl-C."""
    folder = data_dir or cache_folder() / "up"
    settings = StackSettings(folder, port, _store_choice(store), store_bytes, redis_url)
    with _clear_errors(), _terminated_as_interrupt(), Stack(settings) as stack:
        _say_what_runs(stack)
        with contextlib.suppress(KeyboardInterrupt):
            while (dead := stack.dead()) is None:
                time.sleep(0.2)
            err.print(f"[bold red]{dead}[/]", markup=True)
            raise typer.Exit(1)


@app.command(name="replay")
def replay_command(
    trace: Annotated[Path | None, typer.Argument(help="a trace file; none: a built-in load")] = None,
    *,
    pools: Annotated[str, typer.Option(help=f"pool set: {', '.join(POOL_SETS)}")] = "deepseek-v4",
    page_bytes: Annotated[int, typer.Option(help="bytes of a page over all pools")] = 4096,
    page_tokens: Annotated[int, typer.Option(help="tokens of a page", min=1, max=65_536)] = TRACE_PAGE_TOKENS,
    limit: Annotated[int | None, typer.Option(help="replay so many requests only", min=1)] = None,
    verify: Annotated[bool, typer.Option(help="compare restored bytes")] = True,
    json: Annotated[str | None, typer.Option(help="write the numbers to this file (- for stdout)")] = None,
    url: Annotated[str | None, typer.Option(help="a control plane that runs; none: start a stack")] = None,
    token_file: TokenFileOption = None,
    store: StoreOption = "auto",
    store_bytes: StoreBytes = 4 << 30,
) -> None:
    """Replay a load: look up, prefetch what is restorable, back up the rest, compare the bytes."""
    with _clear_errors(), _terminated_as_interrupt():
        load = generate(limit or 400) if trace is None else read_trace(trace, limit)
        if url is not None:
            shown = access_token(token_file)
            report = _replay(ReplaySettings(url, pools, page_bytes, page_tokens, verify, token=shown), load)
        else:
            cache_folder().mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="replay-", dir=cache_folder()) as folder:
                settings = StackSettings(Path(folder), None, _store_choice(store), store_bytes)
                with Stack(settings) as stack:
                    _say_what_runs(stack)
                    report = _replay(ReplaySettings(stack.url, pools, page_bytes, page_tokens, verify), load)
        if json is not None:
            report.write_json(json)
        if json != "-":
            report.print(out)
            _say_what_next(url is None)
        if report.wrong_pages:
            err.print(f"[bold red]{report.wrong_pages} restored pages had wrong bytes[/]")
            raise typer.Exit(1)


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


def _store_choice(value: str) -> StoreChoice:
    match value:
        case "auto" | "file" | "mooncake":
            return value
    raise typer.BadParameter("use auto, file or mooncake", param_hint="--store")


def _say_what_runs(stack: Stack) -> None:
    table = Table(title="running on this machine")
    table.add_column("part")
    table.add_column("where")
    table.add_row("control plane", f"{stack.url}  (API: {stack.url}/docs)")
    table.add_row("Redis", stack.redis_url if stack.settings.redis_url is None else "as given")
    place = stack.mooncake.master if stack.mooncake is not None else str(stack.settings.data_dir / "pages")
    table.add_row(f"store: {stack.store}", f"{place}  ({stack.why_store})")
    table.add_row("data and logs", str(stack.settings.data_dir))
    err.print(table)


def _say_what_next(embedded: bool) -> None:
    if embedded:
        out.print("The stack of this replay has ended and left nothing behind.")
    out.print(
        "Next: [bold]caketin up[/] keeps a stack running; [bold]caketin replay TRACE --url URL[/] uses it."
    )


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    """Turn what a user can do something about into a message and exit code 2."""
    try:
        yield
    except (CaketinError, ChildFailed, ValueError) as error:
        err.print(f"[bold red]caketin:[/] {error}", highlight=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err.print("interrupted")
        raise typer.Exit(130) from None


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Let SIGTERM take the way of Ctrl-C, so that every part is ended in order."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
