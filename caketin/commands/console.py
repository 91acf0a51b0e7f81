"""What commands share towards the person at the terminal: output, errors in a sentence, an end in order."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Annotated, Any, Final, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from caketin.stack import Stack, StoreChoice
from metadata.errors import CaketinError, InvalidInput

out = Console()
err = Console(stderr=True)

INTERRUPTED: Final = 130
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

StoreOption: TypeAlias = Annotated[StoreChoice, typer.Option("--store", help="auto: Mooncake where it loads")]
StoreBytes: TypeAlias = Annotated[
    int, typer.Option(help="memory of the Mooncake storage node, in bytes", min=1 << 24)
]


def fail(text: str) -> None:
    """Print what went wrong, whatever brackets there are in it."""
    err.print(f"[bold red]caketin:[/] {escape(text)}", highlight=False)


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Turn what a user can do something about into a message and exit code 2; Ctrl-C into 130."""
    try:
        yield
    except InvalidInput as error:
        fail("; ".join(f"{e.field} {e.detail}" for e in error.errors) or error.detail)
        raise typer.Exit(2) from None
    except (CaketinError, ValueError, OSError) as error:
        fail(str(error))
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err.print("interrupted")
        raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def ending_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and a closed terminal take the way of Ctrl-C, so that every part is ended in order."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled(interrupt):
        yield


@contextlib.contextmanager
def running(stack: Stack) -> Iterator[Stack]:
    """Run a stack for the block. While it is being ended, another Ctrl-C ends its processes at once."""
    try:
        stack.start()
        yield stack
    finally:
        with _handled(lambda _number, _frame: stack.kill()):
            stack.stop()


def say_what_runs(stack: Stack) -> None:
    """Print which part runs where."""
    table = Table(title="running on this machine")
    table.add_column("part")
    table.add_column("where", overflow="fold")
    table.add_row("control plane", f"{stack.url}  (API: {stack.url}/docs)")
    table.add_row("Redis", stack.redis_url if stack.settings.redis_url is None else "as given")
    place = stack.mooncake.master if stack.mooncake is not None else str(stack.settings.data_dir / "pages")
    table.add_row(f"store: {stack.store}", escape(f"{place}  ({stack.why_store})"))
    if stack.agent_socket is not None:
        table.add_row("agent", escape(str(stack.agent_socket)))
    table.add_row("data and logs", escape(str(stack.settings.data_dir)))
    err.print(table)


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    # What was ignored when we were started (nohup, a job in the background) stays ignored.
    before = {n: signal.getsignal(n) for n in _ENDING if signal.getsignal(n) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
