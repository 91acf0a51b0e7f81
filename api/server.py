"""One process that serves: uvicorn with our limits, our logs, and a clean end."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import ssl
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from api.http_protocol import HttpLimits, bounded_protocol
from api.logs import get_logger
from api.settings import Settings, spellings
from api.token_file import open_token_file
from metadata.errors import FieldError, InvalidInput

log = get_logger(__name__)

_FAREWELL_SECONDS: Final = 1.0
"""How long connections are answered after the listener is closed, each told that it was the last time."""

_LOOK_SECONDS: Final = 0.05


class Server(uvicorn.Server):
    """Ends so that a client which keeps its connection loses no call.

    uvicorn closes every connection that is idle at the moment, and with it a request that is just on its way
    there. Here a connection is first answered once more, with `Connection: close`: its next request goes
    elsewhere. Only one that was not used all the while is closed without a word.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new connections, say farewell on the old ones, then end as uvicorn does."""
        for listening in self.servers:
            listening.close()
        for sock in sockets or []:
            sock.close()
        # Answers that are not begun yet have this very list; the next request's have it too.
        self.server_state.default_headers.append((b"connection", b"close"))
        end = asyncio.get_running_loop().time() + _FAREWELL_SECONDS
        while self.server_state.connections and not self.force_exit:
            if asyncio.get_running_loop().time() >= end:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        await super().shutdown(sockets)


def check_files(settings: Settings) -> None:
    """Read the files that say who may call, so that a fault in one is told before the server starts.

    Raises:
        InvalidInput: the token file, the certificate or its key cannot be used.
    """
    open_token_file(settings.token_file)
    if not settings.tls_cert:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # An answer to the question for a passphrase, which would wait for somebody to type it.
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or type(error).__name__
        detail = f"certificate and key cannot be used together: {reason} ({spellings('tls_cert')})"
        raise InvalidInput("TLS cannot be used", [FieldError("tls_cert", "invalid", detail)]) from None


def warn_of_clear_text(settings: Settings) -> None:
    """Say so where tokens would travel for others to read."""
    if not settings.on_loopback and not settings.tls_cert:
        log.warning("no TLS: tokens travel in clear text", host=settings.host, set=spellings("tls_cert"))


def server_config(settings: Settings, app: ASGIApp) -> uvicorn.Config:
    """Return what uvicorn is told; log lines are left to `api.logs`."""
    limits = HttpLimits(
        settings.header_seconds, settings.body_seconds, settings.max_header_bytes, settings.max_connections
    )
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
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
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
    warn_of_clear_text(settings)
    server = Server(server_config(settings, app))
    server.run(sockets=[listener])
    raise SystemExit(0 if server.started else 3)
