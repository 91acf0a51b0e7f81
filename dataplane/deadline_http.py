"""HTTP exchanges under one deadline each: connect, write, wait and read together.

The time-outs of HTTP clients hold for one operation on the socket. A server that sends a byte every 100 ms
then holds its caller for as long as it likes, header by header, and so does a host name with many addresses.
Here the time-out of every operation on the socket is what is left until the exchange must end.

A request is a few lines and its body, sent at once, and answers are parsed by httptools: a lookup's answer is
waited for by a scheduler, and of the ways tried this takes the least time.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httptools

from dataplane.name_resolver import NameResolver
from metadata.errors import FieldError, InvalidInput

MAX_ANSWER_BYTES: Final = 64 << 20
"""No answer of the control plane comes near; a peer that sends more is not the control plane."""

_KEEP_SECONDS: Final = 30.0
_MAX_IDLE: Final = 16
_READ_BYTES: Final = 64 << 10
_PORTS: Final = {"http": 80, "https": 443}
_MAX_HEAD_BYTES: Final = 64 << 10
_FIRST_FINAL: Final = 200
_WITHOUT_BODY: Final = frozenset({204, 304})
_ONE_LINE: Final = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")


class NoAnswer(Exception):
    """An exchange failed.

    Attributes:
        before_answer: the connection failed before one byte of an answer came, so it may be tried again.
    """

    def __init__(self, what: str, *, before_answer: bool) -> None:
        super().__init__(what)
        self.before_answer = before_answer


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    content: bytes


class Deadline:
    """The moment at which an exchange ends.

    Attributes:
        answered: whether a byte of an answer came.
    """

    __slots__ = ("_at", "answered")

    def __init__(self, seconds: float) -> None:
        """Make the deadline that is `seconds` from now."""
        self._at = time.monotonic() + seconds
        self.answered = False

    def left(self) -> float:
        """Return the seconds left.

        Raises:
            TimeoutError: none are.
        """
        seconds = self._at - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the deadline has passed")
        return seconds


@dataclass(frozen=True, slots=True)
class _Server:
    """Where requests go.

    Attributes:
        tls: None without.
        authority: the value of `Host`.
        path: what comes before every path.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None
    authority: str
    path: str

    @classmethod
    def of(cls, url: str) -> _Server:
        """Read a URL.

        Raises:
            InvalidInput: for a URL that is none.
        """
        try:
            parsed = urlsplit(url.rstrip("/"))
            port, host = parsed.port, parsed.hostname or ""
            parts = (parsed.netloc, parsed.path or "-", host)
            usable = parsed.scheme in _PORTS and not (parsed.query or parsed.fragment or parsed.username)
            usable = usable and port != 0 and all(_ONE_LINE.fullmatch(part) for part in parts)
        except ValueError:
            usable = False
        if not usable:
            detail = f"is {url!r}, give it as http://host:port"
            raise InvalidInput(
                "the control plane has no such address", [FieldError("url", "bad_url", detail)]
            )
        tls = ssl.create_default_context() if parsed.scheme == "https" else None
        return cls(host, port or _PORTS[parsed.scheme], tls, parsed.netloc, parsed.path)


class DeadlineHttp:
    """Kept connections to one server. Safe to use from several threads."""

    def __init__(self, url: str) -> None:
        """Connect on first use.

        Args:
            url: of the server, `http` or `https`, with or without a path. Whom TLS trusts is the machine's
                business (`SSL_CERT_FILE`).

        Raises:
            InvalidInput: for a URL that is none.
        """
        self._server = _Server.of(url)
        self._resolver = NameResolver()
        self._lock = threading.Lock()
        self._idle: deque[tuple[float, _Connection]] = deque()
        self._busy: set[_Connection] = set()
        self._closed = False

    def close(self) -> None:
        """Close all connections; again: nothing happens. A running exchange ends as failed."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, deque()
            for connection in self._busy:
                connection.interrupt()
        for _, connection in idle:
            connection.close()

    def exchange(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str], deadline: Deadline
    ) -> Answer:
        """Send a request and return the whole answer.

        Raises:
            NoAnswer: none came until the deadline, the connection failed, the peer speaks no HTTP, or
                the client is closed.
        """
        request = self._request(method, path, content, headers)
        try:
            connection = self._connection(deadline)
            try:
                answer = connection.exchange(request, deadline)
            except BaseException:
                self._release(connection, good=False)
                raise
            self._release(connection, good=connection.reusable)
        except TimeoutError as error:
            raise NoAnswer(f"no answer in time ({error})", before_answer=False) from error
        except (_NoHttp, OSError) as error:
            if self._closed:
                raise NoAnswer("the client is closed", before_answer=False) from error
            raise NoAnswer(f"{type(error).__name__}: {error}", before_answer=not deadline.answered) from error
        return answer

    def _request(self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]) -> bytes:
        lines = [
            f"{method} {self._server.path}{path} HTTP/1.1",
            f"host: {self._server.authority}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        if content is not None:
            lines.append(f"content-length: {len(content)}")
        for line in lines:
            if not _ONE_LINE.fullmatch(line):
                raise InvalidInput(
                    "no such request can be made", [FieldError("path", "bad_format", f"{line!r} is no line")]
                )
        return "\r\n".join([*lines, "", ""]).encode("ascii") + (content or b"")

    def _connection(self, deadline: Deadline) -> _Connection:
        """Return an idle connection that the peer still holds, or a new one; it is busy from here on."""
        oldest = time.monotonic() - _KEEP_SECONDS
        while True:
            with self._lock:
                self._check_open()
                if not self._idle:
                    break
                since, connection = self._idle.pop()
                self._busy.add(connection)
            if since > oldest and not connection.is_readable:
                return connection
            self._release(connection, good=False)
        connection = _Connection(self._connect(deadline))
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection
        connection.close()
        raise NoAnswer("the client is closed", before_answer=False)

    def _check_open(self) -> None:
        if self._closed:
            raise NoAnswer("the client is closed", before_answer=False)

    def _release(self, connection: _Connection, *, good: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            kept = good and not self._closed
            if kept:
                self._idle.append((time.monotonic(), connection))
            spare = self._idle.popleft()[1] if len(self._idle) > _MAX_IDLE else None
        if not kept:
            connection.close()
        if spare is not None:
            spare.close()

    def _connect(self, deadline: Deadline) -> socket.socket:
        server = self._server
        found = self._resolver.addresses(server.host, server.port, deadline.left())
        for i, address in enumerate(found):
            # An address that swallows packets leaves time for those after it.
            seconds = deadline.left() / (len(found) - i)
            try:
                sock = socket.create_connection(address[:2], timeout=seconds)
            except OSError:
                if i + 1 == len(found):
                    raise
                continue
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if server.tls is not None:
                    sock.settimeout(deadline.left())
                    sock = server.tls.wrap_socket(sock, server_hostname=server.host)
            except BaseException:
                sock.close()
                raise
            return sock
        raise OSError(f"{server.host} has no address")


class _Connection:
    """One connection; used by one thread at a time, but for `interrupt`.

    Attributes:
        reusable: whether the last exchange left it fit for another.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.reusable = False

    def exchange(self, request: bytes, deadline: Deadline) -> Answer:
        """Send a request and read its answer.

        Raises:
            TimeoutError: at the deadline.
            OSError, _NoHttp: the connection failed, or what came is no answer.
        """
        self.reusable = False
        self._socket.settimeout(deadline.left())  # holds for all of `sendall`
        self._socket.sendall(request)
        answer = _AnswerReader()
        while not answer.complete:
            self._socket.settimeout(deadline.left())
            data = self._socket.recv(_READ_BYTES)
            deadline.answered |= bool(data)
            answer.feed(data)
        self.reusable = answer.leaves_reusable
        return Answer(answer.status, b"".join(answer.content))

    @property
    def is_readable(self) -> bool:
        """Whether the peer sent something, or closed: an idle connection is then of no use."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def interrupt(self) -> None:
        """Make what another thread is waiting for here fail."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it."""
        self._socket.close()


class _NoHttp(Exception):
    """What came is no answer, or one that is too long or cut off."""


class _AnswerReader:
    """Reads one answer; httptools calls the methods that start with `on_`.

    Attributes:
        status: of the answer.
        content: its body in the pieces that came.
        complete: whether the whole answer is there.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._in_head = True
        self._framed = False
        self._kept = self._beyond = False
        self._bytes = self._body_bytes = self._length = 0
        self.status = 0
        self.content: list[bytes] = []
        self.complete = False

    @property
    def leaves_reusable(self) -> bool:
        """Whether the next answer may come over the same connection."""
        # What came beside this answer would be taken for the next one.
        return self._kept and not self._beyond

    def feed(self, data: bytes) -> None:
        """Take what came; nothing means that the peer has ended the connection.

        Raises:
            _NoHttp: it is no answer, or one that is too long or cut off.
        """
        if not data:
            if self._in_head or self._framed:
                raise _NoHttp("the answer was cut off" if self._bytes else "the connection was closed")
            # Without a length the end of the connection is the end of the body.
            self.complete = True
            return
        self._bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                raise _NoHttp(f"the answer is no HTTP: {error}") from error
            self._beyond = True
        if self._in_head and self._bytes > _MAX_HEAD_BYTES:
            raise _NoHttp(f"the answer's head has more than {_MAX_HEAD_BYTES} bytes")
        if max(self._length, self._body_bytes) > MAX_ANSWER_BYTES:
            raise _NoHttp(f"the answer has more than {MAX_ANSWER_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._beyond |= self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        field = name.lower()
        if field == b"content-length" and not self.complete:
            self._framed, self._length = True, int(value)  # the parser has seen that it is a number
        elif field == b"transfer-encoding" and not self.complete:
            self._framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        # An interim answer (100 Continue) is followed by the one that counts.
        if status >= _FIRST_FINAL and not self.complete:
            self.status, self._in_head = status, False
            self._framed |= status in _WITHOUT_BODY

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self._body_bytes += len(body)
            self.content.append(body)

    def on_message_complete(self) -> None:
        if not self._in_head and not self.complete:
            self.complete = True
            self._kept = bool(self._parser.should_keep_alive())
