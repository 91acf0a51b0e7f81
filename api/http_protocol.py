"""uvicorn's HTTP protocol with deadlines and bounds: who sends slowly, endlessly or never reads is let go.

uvicorn bounds idle connections only. A client that sends its head a byte a minute, drips a body that nobody
reads, sends headers without end, or does not take its answer would keep a connection, and what it has sent,
for ever.
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.limits import OVER_CONNECTIONS

_GRACE_SECONDS: Final = 1.0
"""What a handler, which has the same deadline for a body, gets to say so first."""

_SPARE_CONNECTIONS: Final = 64
"""Connections beyond the bound that are told so."""

_HEAD_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one request.

    Attributes:
        header_seconds: from the first byte (or the connection) to the end of the head.
        body_seconds: from there to the end of the body; also how long a client may refuse to read its answer.
        max_header_bytes: of the head.
        max_connections: of the process. A request on one more is refused as a problem, except for probes; far
            more (`_SPARE_CONNECTIONS`) are not even listened to.
    """

    header_seconds: float = 5.0
    body_seconds: float = 10.0
    max_header_bytes: int = 64 << 10
    max_connections: int = 4096


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    limits: ClassVar[HttpLimits] = HttpLimits()

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._deadline: TimerHandle | None = None
        self._write_deadline: TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._marks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first head."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections + _SPARE_CONNECTIONS:
            transport.abort()
            return
        self._arm(self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks."""
        self._disarm()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; the first after an answer start the clock of the next head."""
        if self._deadline is None and self._in_head:
            self._arm(self.limits.header_seconds)
        seen = self._marks
        super().data_received(data)
        # Bytes that ended a head or a body are no part of the count: they may hold a whole body.
        self._head_bytes = self._head_bytes + len(data) if self._in_head and self._marks == seen else 0
        if self._head_bytes > self.limits.max_header_bytes and not self.transport.is_closing():
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        """Start the clock of the body."""
        self._in_head = False
        self._marks += 1
        self._arm(self.limits.body_seconds + _GRACE_SECONDS)
        if len(self.connections) > self.limits.max_connections:
            self.scope["state"][OVER_CONNECTIONS] = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop the clock: from here on the time is the server's."""
        self._in_head = True
        self._marks += 1
        self._disarm()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Start the clock of a client that does not read."""
        super().pause_writing()
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(self.limits.body_seconds, self._let_go)

    def resume_writing(self) -> None:
        """Stop the clock of a client that reads again."""
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
        super().resume_writing()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self._let_go)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _let_go(self) -> None:
        # Not close(), which would wait for the client to take what is left.
        self.transport.abort()


def bounded_protocol(limits: HttpLimits) -> type[BoundedHttpProtocol]:
    """Return the protocol class with these limits; uvicorn takes a class."""
    return type("Bounded", (BoundedHttpProtocol,), {"limits": limits})
