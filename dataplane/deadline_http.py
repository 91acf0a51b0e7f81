"""HTTP exchanges under one deadline each: connect, write, wait and read together.

The time-outs of HTTP clients hold for one operation on the socket. A server that sends a byte every 100 ms
then holds its caller for as long as it likes, header by header, and so does a host name with many addresses.
Here the value that the HTTP library passes down as a time-out is the moment at which the exchange ends, and
the socket's time-out is what is left until then.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import httpcore

from metadata.errors import FieldError, InvalidInput

MAX_ANSWER_BYTES: Final = 64 << 20
"""No answer of the control plane comes near; a peer that sends more is not the control plane."""

_KEEP_SECONDS: Final = 30.0
_MAX_IDLE: Final = 16
_WRITE_BYTES: Final = 256 << 10

_Address: TypeAlias = tuple[Any, ...]
_Options: TypeAlias = Iterable[tuple[Any, ...]]


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


class Deadline(float):
    """The moment at which an exchange ends, on the monotonic clock; travels where a time-out would.

    Attributes:
        answered: whether a byte of an answer came.
    """

    answered: bool

    def __new__(cls, seconds: float) -> Deadline:
        """Return the deadline that is `seconds` from now."""
        made = super().__new__(cls, time.monotonic() + seconds)
        made.answered = False
        return made

    def left(self) -> float:
        """Return the seconds left.

        Raises:
            TimeoutError: none are.
        """
        seconds = self - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the deadline has passed")
        return seconds


class DeadlineHttp:
    """Kept connections to one server. Safe to use from several threads."""

    def __init__(self, url: str) -> None:
        """Connect on first use.

        Args:
            url: of the server, `http` or `https`, with or without a path.

        Raises:
            InvalidInput: for a URL that is none.
        """
        self._base = _checked(url)
        self._pool = httpcore.ConnectionPool(
            max_connections=None,
            max_keepalive_connections=_MAX_IDLE,
            keepalive_expiry=_KEEP_SECONDS,
            network_backend=_DeadlineBackend(),
        )
        self._closed = False

    def close(self) -> None:
        """Close all connections; again: nothing happens. A running exchange ends as failed."""
        self._closed = True
        self._pool.close()

    def exchange(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str], deadline: Deadline
    ) -> Answer:
        """Send a request and return the whole answer.

        Raises:
            NoAnswer: none came until the deadline, the connection failed, the peer speaks no HTTP, or
                the client is closed.
        """
        if self._closed:
            raise NoAnswer("the client is closed", before_answer=False)
        try:
            left = deadline.left()
            with self._pool.stream(
                method,
                self._base + path,
                headers=list(headers.items()),
                content=content,
                extensions={
                    "timeout": {"pool": left, **dict.fromkeys(("connect", "read", "write"), deadline)}
                },
            ) as response:
                return Answer(response.status, b"".join(_bounded(response.iter_stream())))
        except (httpcore.TimeoutException, TimeoutError) as error:
            raise NoAnswer(f"no answer in time ({type(error).__name__})", before_answer=False) from error
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            raise NoAnswer(f"{type(error).__name__}: {error}", before_answer=not deadline.answered) from error
        except Exception as error:
            # A connection that is closed under a running exchange fails in ways of its own.
            if self._closed:
                raise NoAnswer("the client is closed", before_answer=False) from error
            raise


def _checked(url: str) -> str:
    try:
        parsed = httpcore.URL(url.rstrip("/"))
        port = parsed.port
        usable = parsed.scheme in {b"http", b"https"} and parsed.host and (port is None or 0 < port <= 65_535)  # noqa: PLR2004
    except (ValueError, TypeError, AttributeError):
        usable = False
    if not usable:
        detail = f"is {url!r}, give it as http://host:port"
        raise InvalidInput("the control plane has no such address", [FieldError("url", "bad_url", detail)])
    return url.rstrip("/")


def _bounded(chunks: Iterable[bytes]) -> Iterator[bytes]:
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise httpcore.RemoteProtocolError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
        yield chunk


class _DeadlineStream(httpcore.NetworkStream):
    """A socket whose operations end at the deadline of the exchange."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        deadline = _deadline(timeout)
        with _mapped(httpcore.ReadTimeout, httpcore.ReadError):
            self._socket.settimeout(deadline.left())
            data = self._socket.recv(max_bytes)
        deadline.answered |= bool(data)
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        deadline, rest = _deadline(timeout), memoryview(buffer)
        with _mapped(httpcore.WriteTimeout, httpcore.WriteError):
            while rest:
                self._socket.settimeout(deadline.left())
                rest = rest[self._socket.send(rest[:_WRITE_BYTES]) :]

    def close(self) -> None:
        self._socket.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        try:
            with _mapped(httpcore.ConnectTimeout, httpcore.ConnectError):
                self._socket.settimeout(_deadline(timeout).left())
                return _DeadlineStream(ssl_context.wrap_socket(self._socket, server_hostname=server_hostname))
        except BaseException:
            self.close()
            raise

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":  # the library asks this of an idle connection before it uses it again
            return _is_readable(self._socket)
        return self._socket if info == "socket" else None


class _DeadlineBackend(httpcore.NetworkBackend):
    """Opens connections within the deadline of the exchange."""

    def __init__(self) -> None:
        self._resolver = _Resolver()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: _Options | None = None,
    ) -> httpcore.NetworkStream:
        deadline = _deadline(timeout)
        with _mapped(httpcore.ConnectTimeout, httpcore.ConnectError):
            found = self._resolver.addresses(host, port, deadline)
            for i, address in enumerate(found):
                # An address that swallows packets leaves time for those after it.
                seconds = deadline.left() / (len(found) - i)
                try:
                    sock = socket.create_connection(address[:2], timeout=seconds)
                except OSError:
                    if i + 1 == len(found):
                        raise
                    continue
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return _DeadlineStream(sock)
            raise OSError(f"{host} has no address")


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


def _deadline(timeout: float | None) -> Deadline:
    if not isinstance(timeout, Deadline):  # every exchange passes one
        raise TypeError(f"{timeout!r} is no deadline")
    return timeout


@contextlib.contextmanager
def _mapped(on_time_out: type[Exception], on_failure: type[Exception]) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise on_time_out(str(error)) from error
    except OSError as error:
        raise on_failure(str(error)) from error


def _is_readable(sock: socket.socket) -> bool:
    """Return whether the peer sent something, or closed: an idle connection is then of no use."""
    if sock.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
