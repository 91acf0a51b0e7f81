"""One Redis node: its connections, its deadline and its circuit.

A call is a row of commands written at once and answered in order. The driver's own pools and pipelines are
not used: they repeat calls that timed out, wait on locks, and keep no deadline over a whole row. The driver
gives the connection: protocol, TLS, log-in.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hiredis import pack_command
from redis import exceptions as driver
from redis.asyncio.connection import AbstractConnection

from metadata.circuit import Circuit, CircuitSettings
from metadata.redis_errors import SERVER_AWAY, translated, unavailable

_CONNECTING: Final = 4

Words = tuple[str | bytes | int, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        words: the command and its arguments.
        key: one of its keys; decides the node on a cluster. Empty for a command about the node itself.
        packed: the bytes to send where the caller has made them already.
    """

    words: Words
    key: bytes = b""
    packed: bytes = b""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Deadlines and bounds of one node; see `RedisSettings`."""

    connect_seconds: float
    command_seconds: float
    max_connections: int
    circuit: CircuitSettings


class RedisNode:
    """Connections to one node.

    Args:
        name: `host:port`, for messages.
        connect: makes a connected connection; for Sentinels it asks who is the primary first.
        settings: deadlines and bounds.
    """

    def __init__(
        self, name: str, connect: Callable[[], Awaitable[AbstractConnection]], settings: NodeSettings
    ) -> None:
        self.name = name
        self.circuit = Circuit(time.monotonic, settings.circuit)
        self._connect = connect
        self._settings = settings
        self._free: deque[AbstractConnection] = deque()
        self._places = asyncio.Semaphore(settings.max_connections)
        # Dozens that connect at once are late all together; who waits here mostly finds an idle one then.
        self._door = asyncio.Semaphore(_CONNECTING)
        self._prober: asyncio.Task[None] | None = None
        self._closed = False

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one row and return the answers; one that the server refused is an exception in it.

        Raises:
            RedisUnavailable: the circuit is open, or no answer came in time.
        """
        ticket = self.circuit.enter()
        if ticket is None:
            error = unavailable("unreachable", "the circuit is open", where=self.name)
            error.retry_after_seconds = max(self.circuit.seconds_to_probe(), 0.1)
            raise error
        try:
            answers = await self._within_deadline(commands)
        except (driver.RedisError, OSError, TimeoutError) as seen:
            error = translated(seen, where=self.name)
            if error.reason in SERVER_AWAY and self.circuit.failed(ticket):
                self._prober = asyncio.create_task(self._probe_until_back())
            raise error from seen
        self.circuit.succeeded(ticket)
        return answers

    async def close(self) -> None:
        """Stop probing and close all connections, those in use when they come back."""
        self._closed = True
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.gather(self._prober, return_exceptions=True)
        await self.drop_idle()

    async def drop_idle(self) -> None:
        """Close idle connections: they lead to a server that is gone or has changed its role."""
        while self._free:
            await self._free.popleft().disconnect(nowait=True)

    async def _within_deadline(self, commands: Sequence[Command]) -> list[Any]:
        async with asyncio.timeout(self._settings.command_seconds), self._places:
            while True:
                while self._free:
                    idle = self._free.pop()
                    try:
                        return await self._exchange(idle, commands)
                    except (driver.ConnectionError, OSError) as seen:
                        if isinstance(seen, driver.BusyLoadingError):
                            raise
                        # A connection that died while idle says nothing of the server. Every script is safe
                        # to repeat, so this is too, even if the death came after the call was served.
                        await self.drop_idle()
                async with self._door:
                    if self._free:
                        continue
                    fresh = await self._connect()
                return await self._exchange(fresh, commands)

    async def _exchange(self, connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
        try:
            packed: list[bytes] = []
            for command in commands:
                if command.packed:
                    packed.append(command.packed)
                else:
                    # Its stub knows tuples of one word only.
                    packed.append(pack_command(command.words))  # type: ignore[arg-type]
            await connection.send_packed_command(
                packed[0] if len(packed) == 1 else packed, check_health=False
            )
            answers = [await _answer(connection) for _ in commands]
        except BaseException:
            # An answer may still be on its way: nobody else may read from this connection.
            await connection.disconnect(nowait=True)
            raise
        if self._closed or any(isinstance(a, driver.ReadOnlyError) for a in answers):
            # A primary that became a replica: the next connection finds out who took over.
            await connection.disconnect(nowait=True)
            await self.drop_idle()
        else:
            self._free.append(connection)
        return answers

    async def _probe_until_back(self) -> None:
        while self.circuit.is_open:
            await asyncio.sleep(self.circuit.seconds_to_probe())
            if self.circuit.begin_probe():
                self.circuit.end_probe(good=await self._answers())

    async def _answers(self) -> bool:
        try:
            await self.drop_idle()
            (pong,) = await self._within_deadline([PING])
        except (driver.RedisError, OSError, TimeoutError) as seen:
            return translated(seen).reason not in SERVER_AWAY
        return not isinstance(pong, Exception) or translated(pong).reason not in SERVER_AWAY


PING: Final = Command(("PING",))


async def _answer(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except driver.ResponseError as error:
        return error
