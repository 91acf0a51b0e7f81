"""What stands behind a Redis URL: one server, the primary that Sentinels name, or a cluster's primaries.

All three answer one question: which node serves this key. A cluster's map of slots is read again when a node
says `MOVED`, and when one cannot be reached.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

from redis import exceptions as driver
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from metadata.errors import RedisUnavailable
from metadata.redis_errors import translated, unavailable
from metadata.redis_node import Command, NodeSettings, RedisNode
from metadata.redis_url import RedisAddress

SLOTS: Final = 16_384
_REDIRECTS: Final = 4
_TRY_AGAIN_SECONDS: Final = 0.02
_MAP_SECONDS: Final = 0.2
_STALE: Final = (driver.MovedError, driver.ClusterDownError)


class RedisTopology(Protocol):
    """Sends each command to the node that serves it."""

    by_slot: bool
    """Whether the keys of one command must lie in one slot."""

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        """Return the answers in order; one that a server refused is an exception in it.

        Raises:
            RedisUnavailable: a node did not answer; the commands for other nodes may have been done.
        """
        ...

    async def nodes(self) -> list[RedisNode]:
        """Return the nodes that hold data."""
        ...

    def known(self) -> list[RedisNode]:
        """Return the nodes met so far."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


def topology(address: RedisAddress, settings: NodeSettings) -> RedisTopology:
    """Return what stands behind an address; connects on first use."""
    if address.topology == "cluster":
        return Cluster(address, settings)
    return OneNode(address, settings)


class OneNode:
    """A single server, or whichever server the Sentinels call primary."""

    by_slot = False

    def __init__(self, address: RedisAddress, settings: NodeSettings) -> None:
        self._address = address
        self._settings = settings
        self._node = RedisNode(str(address), self._connect, settings)

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        """Return the answers in order."""
        return await self._node.call(commands)

    async def nodes(self) -> list[RedisNode]:
        """Return the one node."""
        return [self._node]

    def known(self) -> list[RedisNode]:
        """Return the one node."""
        return [self._node]

    async def close(self) -> None:
        """Close all connections."""
        await self._node.close()

    async def _connect(self) -> AbstractConnection:
        host, port = ("", 0) if self._address.path else self._address.hosts[0]
        if self._address.topology == "sentinel":
            host, port = await self._primary()
        return await connected(self._address, host, port, self._settings.connect_seconds)

    async def _primary(self) -> tuple[str, int]:
        """Return who is primary, by the first Sentinel that knows; they are asked at the same time."""
        asked = [asyncio.create_task(self._ask_sentinel(host, port)) for host, port in self._address.hosts]
        try:
            for answer in asyncio.as_completed(asked):
                found = await answer
                if found is not None:
                    return found
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise unavailable("no_primary", where=str(self._address))

    async def _ask_sentinel(self, host: str, port: int) -> tuple[str, int] | None:
        sentinel = RedisAddress(
            "single",
            ((host, port),),
            tls=self._address.tls,
            username=self._address.sentinel_username,
            password=self._address.sentinel_password,
            tls_files=self._address.tls_files,
        )
        try:
            connection = await connected(sentinel, host, port, self._settings.connect_seconds)
        except (driver.RedisError, OSError, TimeoutError):
            return None
        try:
            await connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.service)
            found = await connection.read_response()
        except (driver.RedisError, OSError):
            return None
        finally:
            await connection.disconnect(nowait=True)
        return (found[0].decode(), int(found[1])) if found else None


class Cluster:
    """The primaries of a Redis Cluster."""

    by_slot = True

    def __init__(self, address: RedisAddress, settings: NodeSettings) -> None:
        self._address = address
        self._settings = settings
        self._nodes: dict[tuple[str, int], RedisNode] = {}
        self._slots: list[RedisNode | None] = []
        self._reading = asyncio.Lock()
        self._read_at = 0.0
        self._stale = True

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        """Return the answers in order; follows slots that move."""
        try:
            async with asyncio.timeout(2 * self._settings.command_seconds):
                return await self._call(commands)
        except TimeoutError as seen:
            raise unavailable("timeout", where=str(self._address)) from seen

    async def nodes(self) -> list[RedisNode]:
        """Return the primaries."""
        async with asyncio.timeout(self._settings.command_seconds):
            await self._know_slots()
        return list(self._nodes.values())

    def known(self) -> list[RedisNode]:
        """Return the nodes met so far."""
        return list(self._nodes.values())

    async def close(self) -> None:
        """Close all connections."""
        for node in self._nodes.values():
            await node.close()

    async def _call(self, commands: Sequence[Command]) -> list[Any]:
        answers: list[Any] = [None] * len(commands)
        todo = list(range(len(commands)))
        for _ in range(_REDIRECTS):
            await self._know_slots()
            await self._send(commands, todo, answers)
            again = [i for i in todo if isinstance(answers[i], driver.AskError | driver.TryAgainError)]
            self._stale = self._stale or any(isinstance(answers[i], _STALE) for i in todo)
            todo = await self._asked_elsewhere(commands, again, answers)
            if not todo:
                break
        return answers

    async def _send(self, commands: Sequence[Command], todo: Sequence[int], answers: list[Any]) -> None:
        by_node: dict[RedisNode, list[int]] = {}
        for i in todo:
            by_node.setdefault(self._node(commands[i].key), []).append(i)
        done = await asyncio.gather(
            *(node.call([commands[i] for i in places]) for node, places in by_node.items()),
            return_exceptions=True,
        )
        for places, result in zip(by_node.values(), done, strict=True):
            if isinstance(result, BaseException):
                # Whoever replaces the node is in another node's map.
                self._stale = True
                raise result
            for i, answer in zip(places, result, strict=True):
                answers[i] = answer

    async def _asked_elsewhere(
        self, commands: Sequence[Command], again: Sequence[int], answers: list[Any]
    ) -> list[int]:
        """Follow the redirections of slots that are just moving; return what has to be sent once more."""
        left: list[int] = []
        for i in again:
            seen = answers[i]
            if isinstance(seen, driver.MovedError):
                self._slots[seen.slot_id] = self._known(*_endpoint(seen))
                left.append(i)
            elif isinstance(seen, driver.AskError):
                node = self._known(*_endpoint(seen))
                answers[i] = (await node.call([Command(("ASKING",)), commands[i]]))[1]
            else:
                left.append(i)
        if any(isinstance(answers[i], driver.TryAgainError) for i in left):
            await asyncio.sleep(_TRY_AGAIN_SECONDS)
        return left

    def _node(self, key: bytes) -> RedisNode:
        node = self._slots[key_slot(key)]
        if node is None:
            self._stale = True
            raise unavailable("cluster_down", f"nobody serves slot {key_slot(key)}", where=str(self._address))
        return node

    def _known(self, host: str, port: int) -> RedisNode:
        node = self._nodes.get((host, port))
        if node is None:
            node = self._nodes[host, port] = RedisNode(
                f"{host}:{port}",
                lambda: connected(self._address, host, port, self._settings.connect_seconds),
                self._settings,
            )
        return node

    async def _know_slots(self) -> None:
        """Read the map of slots where it is not known or proved wrong, at most some times a second."""
        async with self._reading:
            known = bool(self._slots)
            if not self._stale or (known and time.monotonic() - self._read_at < _MAP_SECONDS):
                return
            self._read_at = time.monotonic()
            try:
                await self._adopt(*await self._read_slots())
            except RedisUnavailable:
                # An old map serves the nodes that still live.
                if not known:
                    raise
                return
            self._stale = False

    async def _read_slots(self) -> tuple[str, list[Any]]:
        """Return the host and CLUSTER SLOTS of the first node that answers; all are asked at once."""
        seen: Exception | None = None
        asked = [
            asyncio.create_task(self._ask_slots(*place)) for place in {*self._nodes, *self._address.hosts}
        ]
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    return await answer
                except (driver.RedisError, OSError, TimeoutError) as error:
                    seen = error
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if seen is None:
            raise unavailable("unreachable", where=str(self._address))
        raise translated(seen, where=str(self._address)) from seen

    async def _ask_slots(self, host: str, port: int) -> tuple[str, list[Any]]:
        connection = await connected(self._address, host, port, self._settings.connect_seconds)
        try:
            async with asyncio.timeout(self._settings.connect_seconds):
                await connection.send_command("CLUSTER", "SLOTS")
                return host, await connection.read_response()
        finally:
            await connection.disconnect(nowait=True)

    async def _adopt(self, asked_host: str, ranges: list[Any]) -> None:
        slots: list[RedisNode | None] = [None] * SLOTS
        primaries: set[tuple[str, int]] = set()
        for first, last, primary, *_ in ranges:
            host = (primary[0] or b"").decode()
            place = (host if host not in {"", "?"} else asked_host, int(primary[1]))
            primaries.add(place)
            slots[int(first) : int(last) + 1] = [self._known(*place)] * (int(last) + 1 - int(first))
        self._slots = slots
        for place in set(self._nodes) - primaries:
            await self._nodes.pop(place).close()


async def connected(address: RedisAddress, host: str, port: int, seconds: float) -> AbstractConnection:
    """Return a connection that has logged in, within `seconds`."""
    options: dict[str, Any] = {
        "db": address.db,
        "username": address.username,
        "password": address.password,
        "socket_connect_timeout": seconds,
        # The deadline is the node's, over a whole row of commands.
        "socket_timeout": None,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    connection: AbstractConnection
    if address.path:
        connection = UnixDomainSocketConnection(path=address.path, **options)
    elif address.tls:
        tls_files: dict[str, Any] = dict(address.tls_files)
        checks = tls_files.pop("ssl_check_hostname", "true").lower() not in {"false", "no", "0"}
        connection = SSLConnection(host=host, port=port, ssl_check_hostname=checks, **tls_files, **options)
    else:
        connection = Connection(host=host, port=port, **options)
    async with asyncio.timeout(seconds):
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
    return connection


def _endpoint(error: driver.AskError) -> tuple[str, int]:
    return str(error.host), int(error.port)
