"""What a Mooncake master says over HTTP (its metrics port): keys, sizes, segments.

These questions renew no lease and count no hit, which makes them the ones for sweeps (T4). The store client
has no such calls.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any, Final
from urllib.parse import quote

from dataplane.object_store import StoreUnavailable

log = logging.getLogger(__name__)

_KEYS_PER_QUERY: Final = 400  # a request line of some 45 KB; 50 KB was seen to work
_HTTP_OK: Final = 200


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port` (also `[v6]:port`, also with `http://` before it).

    Raises:
        StoreUnavailable: there is no port in it.
    """
    host, colon, port = address.removeprefix("http://").rstrip("/").rpartition(":")
    if not colon or not host or not port.isdigit():
        raise StoreUnavailable(f"{address!r} is no host:port")
    return host.strip("[]"), int(port)


def check_listening(address: str, seconds: float) -> None:
    """Connect once and hang up, because Mooncake's own client takes 90 s to say that nobody is there.

    Raises:
        StoreUnavailable: nothing accepts connections at `address` within `seconds`.
    """
    host, port = split_address(address)
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as e:
        raise StoreUnavailable(f"no Mooncake master answers at {address} within {seconds:g} s: {e}") from e


class MasterWatch:
    """Spares callers the wait for a master that is known to be away.

    Mooncake's client reconnects by itself once a master listens at the same address again (seen within a
    second), but until then every single call takes more than 4 s to say so. After the first such answer the
    port is tried before each call, and a call that cannot succeed fails at once.
    """

    def __init__(self, address: str, seconds: float) -> None:
        """Watch the master at `address`, which may take `seconds` to accept a connection."""
        self._address = address
        self._seconds = seconds
        self.away = False

    def check(self) -> None:
        """Let a call pass, unless the master is known to be away and still is.

        Raises:
            StoreUnavailable: it is.
        """
        if self.away:
            check_listening(self._address, self._seconds)

    def heard(self, *, away: bool) -> None:
        """Note what a call's answer says of the master."""
        if away != self.away:
            log.warning("the Mooncake master at %s %s", self._address, "is away" if away else "is back")
        self.away = away

    def lost(self, call: str) -> StoreUnavailable:
        """Note that a call failed for want of the master, and return what to raise."""
        self.heard(away=True)
        return StoreUnavailable(f"the Mooncake master at {self._address} did not answer: {call} failed")


class MasterHttp:
    """Client of one master's HTTP port. Safe to call from several threads.

    Attributes:
        address: `host:port` of the master's metrics port.
    """

    def __init__(self, address: str, seconds: float = 10.0) -> None:
        self.address = address
        self._seconds = seconds
        self._lock = Lock()
        self._connection: http.client.HTTPConnection | None = None

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Return the sizes in bytes of objects held in memory, -1 where missing or not completely written.

        Raises:
            StoreUnavailable: the master does not answer.
            ValueError: a key holds a comma, which separates keys in the master's request.
        """
        found: list[int] = []
        for at in range(0, len(keys), _KEYS_PER_QUERY):
            found += self._sizes(keys[at : at + _KEYS_PER_QUERY])
        return found

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys that start with `prefix`, read from the master line by line.

        Raises:
            StoreUnavailable: the master does not answer, or breaks off.
        """
        connection = self._connect()
        wanted = prefix.encode()
        try:
            response = self._ask(connection, "/get_all_keys")
            for line in response:
                if line.startswith(wanted) and line != b"\n":
                    yield line.rstrip(b"\r\n").decode()
        except (OSError, http.client.HTTPException) as e:
            raise self._away(e) from e
        finally:
            connection.close()

    def segments(self) -> list[dict[str, Any]]:
        """Return the mounted segments: `segment_name`, `size_bytes`, `base_address`, `te_endpoint`, ...

        Raises:
            StoreUnavailable: the master does not answer.
        """
        listed: list[dict[str, Any]] = json.loads(self._read("/get_segments_detail"))["segments"]
        return listed

    def ready(self) -> bool:
        """Return whether the master serves requests; False where it does not answer at all."""
        try:
            return bool(json.loads(self._read("/health")).get("service_ready"))
        except (StoreUnavailable, ValueError):
            return False

    def close(self) -> None:
        """Close the kept connection; the next call opens another."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _sizes(self, keys: Sequence[str]) -> list[int]:
        bad = next((key for key in keys if "," in key), None)
        if bad is not None:
            raise ValueError(f"the master cannot be asked for a key with a comma: {bad!r}")
        if not keys:
            return []
        body = self._read("/batch_query_keys?keys=" + ",".join(quote(key) for key in keys))
        data: dict[str, Any] = json.loads(body).get("data") or {}
        return [_size(data.get(key)) for key in keys]

    def _read(self, path: str) -> bytes:
        with self._lock:
            for last_try in (False, True):
                connection = self._connection or self._connect()
                self._connection = connection
                try:
                    return self._ask(connection, path).read()
                except (OSError, http.client.HTTPException) as e:
                    # A kept connection may have been closed by the master since: one fresh try tells.
                    connection.close()
                    self._connection = None
                    if last_try:
                        raise self._away(e) from e
        raise AssertionError("not reached")

    def _ask(self, connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
        connection.request("GET", path)
        response = connection.getresponse()
        if response.status != _HTTP_OK:
            response.read()
            question = path.partition("?")[0]
            raise StoreUnavailable(f"master at {self.address} answered {response.status} to {question}")
        return response

    def _connect(self) -> http.client.HTTPConnection:
        host, port = split_address(self.address)
        return http.client.HTTPConnection(host, port, timeout=self._seconds)

    def _away(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"no answer from the Mooncake master's HTTP port at {self.address}: {error}")


def _size(entry: dict[str, Any] | None) -> int:
    if not entry or not entry.get("ok"):
        return -1
    replicas = entry.get("values") or [{}]
    return int(replicas[0].get("size_", -1))
