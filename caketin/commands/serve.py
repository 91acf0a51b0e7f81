"""`caketin serve`: the control plane, in one process or several."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import typer

from api.app import create_app
from api.logs import configure_logging, get_logger
from api.metrics import MULTIPROCESS_FOLDER
from api.server import check_files, serve_until_told
from api.settings import ENV_PREFIX, Settings, flag_of, setting_fields, spellings
from caketin.commands.store_purger import StorePurger
from dataplane.child_process import die_with_parent
from metadata.errors import FieldError, InvalidInput

_CONFIG: Final = "config"
_WATCH_SECONDS: Final = 0.2
_RESTART_SECONDS: Final = 1.0
_KILL_AFTER_SECONDS: Final = 5.0

log = get_logger(__name__)


def serve(**given: Any) -> None:
    """Serve the control plane.

    Every setting is a flag, a CAKETIN_* variable, or a line of a TOML file; the first of these that is given
    wins. The effective settings are printed at the start.
    """
    file = given.pop(_CONFIG)
    named = {name: given[_parameter(name)] for name, _ in setting_fields()}
    flags = {name: str(value) for name, value in named.items() if value is not None}
    try:
        settings = Settings.load(flags, file)
        check_files(settings)
        listener = _listen(settings)
    except InvalidInput as error:
        for e in error.errors:
            typer.echo(f"caketin serve: {e.field}: {e.detail}", err=True)
        raise typer.Exit(2) from None
    configure_logging(settings.log_format, settings.log_level, settings.secrets())
    _print(settings, listener)
    if settings.workers == 1:
        _serve_in_this_process(settings, listener)
    raise typer.Exit(_supervise(settings, listener))


def _parameter(name: str) -> str:
    return name.replace(".", "_")


def _signature() -> Iterator[inspect.Parameter]:
    file = typer.Option(
        "--config", envvar=f"{ENV_PREFIX}CONFIG", help="a TOML file with settings", dir_okay=False
    )
    yield inspect.Parameter(
        _CONFIG, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, file]
    )
    for name, field in setting_fields():
        secret = "SecretStr" in str(field.annotation)
        default = "" if secret else str(field.default)
        option: Any = typer.Option(flag_of(name), help=field.description, show_default=default or False)
        # Text, also where a number is meant: the settings class reads all three ways alike.
        kind = bool if field.annotation is bool else str
        yield inspect.Parameter(
            _parameter(name),
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, option],
        )


def with_every_setting_as_flag(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the parameters that typer is to make flags of."""
    parameters = list(_signature())
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


with_every_setting_as_flag(serve)


def _listen(settings: Settings) -> socket.socket:
    """Return the listening socket, so that a port in use is told like any other setting."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        detail = f"cannot listen on {settings.host} port {settings.port}: {error.strerror}"
        raise InvalidInput("", [_setting_error("port", detail)]) from None


def _setting_error(name: str, detail: str) -> FieldError:
    return FieldError(name, "invalid", f"{detail} ({spellings(name)})")


def _print(settings: Settings, listener: socket.socket) -> None:
    shown = settings.shown() | {"port": str(listener.getsockname()[1])}
    width = max(map(len, shown))
    for name, value in shown.items():
        typer.echo(f"{name.ljust(width)}  {value}", err=True)
    sys.stderr.flush()


def _serve_in_this_process(settings: Settings, listener: socket.socket) -> None:
    serve_until_told(settings, create_app(settings, StorePurger(settings.store)), listener)


def _worker(settings: Settings, listener: socket.socket) -> None:
    die_with_parent()
    configure_logging(settings.log_format, settings.log_level, settings.secrets())
    _serve_in_this_process(settings, listener)


class _Told(Exception):
    """Somebody asked this process to end."""


def _supervise(settings: Settings, listener: socket.socket) -> int:
    """Run the workers, replace one that dies, and end them all when told to; return the exit code."""

    def told(_number: int, _frame: FrameType | None) -> None:
        raise _Told

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told)
    context = multiprocessing.get_context("spawn")
    workers: list[BaseProcess] = []

    def start() -> None:
        worker = context.Process(target=_worker, args=(settings, listener), name="caketin-worker")
        worker.start()
        workers.append(worker)

    with tempfile.TemporaryDirectory(prefix="caketin-metrics-") as folder:
        # Read when a worker imports prometheus_client: the workers' numbers meet in these files.
        os.environ[MULTIPROCESS_FOLDER] = folder
        try:
            for _ in range(settings.workers):
                start()
            while True:
                time.sleep(_WATCH_SECONDS)
                for dead in [w for w in workers if not w.is_alive()]:
                    log.error("worker ended", pid=dead.pid, exit_code=dead.exitcode)
                    workers.remove(dead)
                    time.sleep(_RESTART_SECONDS)
                    start()
        except _Told:
            # What connects from here on is refused and goes elsewhere, instead of waiting for nobody.
            listener.close()
            return _end(workers, settings.shutdown_seconds + _KILL_AFTER_SECONDS)


def _end(workers: list[BaseProcess], seconds: float) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + seconds
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()
    # One that was still starting has no handler yet and has done nothing: SIGTERM is its orderly end.
    codes = [worker.exitcode or 0 for worker in workers]
    return max((abs(code) for code in codes if code != -signal.SIGTERM), default=0)
