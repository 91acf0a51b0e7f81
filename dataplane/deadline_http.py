"""HTTP exchanges under one deadline each: connect, write, wait and read together.

The time-outs of HTTP clients hold for one operation on the socket. A server that sends a byte every 100 ms
then holds its caller for as long as it likes, header by header, and so does a host name with many addresses.
Here the time-out of every operation on the socket is what is left until the exchange must end.

A request is a few lines and its body, sent at once. Answers are read by the standard library: of the clients
tried it takes the least time, and a lookup's answer is waited for by a scheduler.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import queue
import re
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from metadata.errors import FieldError, InvalidInput

MAX_ANSWER_BYTES: Final = 64 << 20
"""No answer of the control plane comes near; a peer that sends more is not the control plane."""

_KEEP_SECONDS: Final = 30.0
_MAX_IDLE: Final = 16
_READ_BYTES: Final = 64 << 10
_PORTS: Final = {"http": 80, "https": 443}
_ONE_LINE: Final = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")

_Address: TypeAlias = tuple[Any, ...]


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
        self._resolver = _Resolver()
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
                answer = connection.exchange(method, request, deadline)
            except BaseException:
                self._release(connection, good=False)
                raise
            self._release(connection, good=connection.reusable)
        except TimeoutError as error:
            raise NoAnswer(f"no answer in time ({error})", before_answer=False) from error
        except (http.client.HTTPException, OSError, ValueError) as error:
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
        found = self._resolver.addresses(server.host, server.port, deadline)
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
        self._raw = _DeadlineReader(sock)
        self._reader = _Reader(self._raw, _READ_BYTES)
        self.reusable = False

    def exchange(self, method: str, request: bytes, deadline: Deadline) -> Answer:
        """Send a request and read its answer.

        Raises:
            TimeoutError: at the deadline.
            OSError, HTTPException: the connection failed, or what came is no answer.
        """
        self.reusable = False
        self._raw.deadline = deadline
        self._socket.settimeout(deadline.left())  # holds for all of `sendall`
        self._socket.sendall(request)
        # It asks for the socket's reading side, and uses nothing else of a socket.
        response = http.client.HTTPResponse(self, method=method)  # type: ignore[arg-type]
        try:
            response.begin()
            content = _content(response)
        finally:
            response.close()
            self._raw.deadline = None
        # What came beside the answer would be taken for the next one.
        self.reusable = not response.will_close and not self._reader.peek(1)
        return Answer(response.status, content)

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return where an answer is read from."""
        return self._reader

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


def _content(response: http.client.HTTPResponse) -> bytes:
    """Return the body of an answer.

    Raises:
        HTTPException: it is too long, or cut off.
    """
    if response.length is not None and response.length <= MAX_ANSWER_BYTES:
        return response.read()
    content = response.read(MAX_ANSWER_BYTES + 1) if response.length is None else b""
    if response.length is not None or len(content) > MAX_ANSWER_BYTES:
        raise http.client.HTTPException(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
    return content


class _Reader(io.BufferedReader):
    """What was read and not yet taken; outlives the answers that are read from it."""

    def close(self) -> None:
        """Stay open: the response closes what it reads from, the connection is kept."""


class _DeadlineReader(io.RawIOBase):
    """The reading side of a socket.

    Attributes:
        deadline: of the exchange; None between two of them, when nothing is read.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._socket = sock
        self.deadline: Deadline | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self.deadline is None:
            return None
        self._socket.settimeout(self.deadline.left())
        count = self._socket.recv_into(buffer)
        self.deadline.answered |= count > 0
        return count


class _Resolver:
    """Looks names up beside the caller: `getaddrinfo` has no time-out of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[tuple[str, int], list[queue.SimpleQueue[list[_Address] | OSError]]] = {}

    def addresses(self, host: str, port: int, deadline: Deadline) -> list[_Address]:
        """Return the addresses of a host.

        Raises:
            OSError: there are none.
            TimeoutError: no answer until the deadline.
        """
        with contextlib.suppress(OSError):
            return _addresses(host, port, socket.AI_NUMERICHOST)
        mine: queue.SimpleQueue[list[_Address] | OSError] = queue.SimpleQueue()
        with self._lock:
            # One thread a name, however many callers wait: a resolver that hangs must not collect threads.
            waiting = self._running.setdefault((host, port), [])
            waiting.append(mine)
            if len(waiting) == 1:
                threading.Thread(target=self._resolve, args=(host, port), daemon=True).start()
        try:
            found = mine.get(timeout=deadline.left())
        except queue.Empty:
            raise TimeoutError(f"{host} was not resolved in time") from None
        if isinstance(found, OSError):
            raise found
        return found

    def _resolve(self, host: str, port: int) -> None:
        found: list[_Address] | OSError
        try:
            found = _addresses(host, port, 0)
        except OSError as error:
            found = error
        except UnicodeError as error:
            found = OSError(str(error))
        with self._lock:
            waiting = self._running.pop((host, port))
        for one in waiting:
            one.put(found)


def _addresses(host: str, port: int, flags: int) -> list[_Address]:
    return [found[4] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)]
