"""One process that serves: uvicorn with our limits, our logs, and a clean end."""

from __future__ import annotations

import math
import signal
import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from api.http_protocol import HttpLimits, bounded_protocol
from api.settings import Settings


def server_config(settings: Settings, app: ASGIApp) -> uvicorn.Config:
    """Return what uvicorn is told; log lines are left to `api.logs`."""
    limits = HttpLimits(settings.header_seconds, settings.body_seconds, settings.max_header_bytes)
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=bounded_protocol(limits),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=math.ceil(settings.idle_seconds),
        timeout_graceful_shutdown=math.ceil(settings.shutdown_seconds),
    )


def serve_until_told(settings: Settings, app: ASGIApp, listener: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C; requests under way end, counters are flushed, the exit code is 0.

    Raises:
        SystemExit: at the end.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(0)

    # uvicorn handles both signals while it serves, and sends itself the same one again at the end: by default
    # that would be death by signal.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    server = uvicorn.Server(server_config(settings, app))
    server.run(sockets=[listener])
    raise SystemExit(0 if server.started else 3)
