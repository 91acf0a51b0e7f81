"""A TCP server that answers as a test tells it to, byte by byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Conversation = Callable[[socket.socket, "RudeServer"], None]
"""Has one accepted connection to itself; the connection is closed when it returns."""


@dataclass
class RudeServer:
    """Listens on loopback.

    Attributes:
        port: where.
        connections: how many were accepted.
        requests: every request that was read whole, head and body.
        closed: connections that this side has closed.
        changed: tells of `closed`.
        ending: set when the test is over; conversations wait on it instead of sleeping.
    """

    port: int
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)
    closed: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_closed(self, count: int) -> None:
        """Wait until that many connections were closed from this side."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.closed >= count, 10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def read_request(self, sock: socket.socket) -> bytes:
        """Read one request; empty when the peer has gone."""
        raw = b""
        while b"\r\n\r\n" not in raw:
            more = sock.recv(65_536)
            if not more:
                return b""
            raw += more
        head, _, body = raw.partition(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        while len(body) < length:
            body += sock.recv(65_536)
        whole = head + b"\r\n\r\n" + body
        self.requests.append(whole)
        return whole


def answer(status: int, body: bytes, media_type: str = "application/json", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {media_type}\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


@contextlib.contextmanager
def rude_server(conversation: Conversation, *, port: int = 0) -> Iterator[RudeServer]:
    """Serve; every connection gets a thread with `conversation`."""
    listener = socket.create_server(("127.0.0.1", port))
    server = RudeServer(listener.getsockname()[1])
    threads: list[threading.Thread] = []
    open_sockets: list[socket.socket] = []

    def converse(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            conversation(sock, server)
        with server.changed:
            server.closed += 1
            server.changed.notify_all()

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            server.connections += 1
            open_sockets.append(sock)
            thread = threading.Thread(target=converse, args=(sock,), daemon=True)
            threads.append(thread)
            thread.start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield server
    finally:
        server.ending.set()
        # Closing alone does not wake a thread that is blocked in accept().
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join(5)
        for sock in open_sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(5)
