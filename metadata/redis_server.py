"""The one place that talks to the Redis driver: deadlines, scripts, and errors that become ours.

Callers get values or a `RedisUnavailable`; nobody above catches a driver's exception.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, cast

from redis import exceptions as driver
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript

from metadata import redis_keys
from metadata.errors import RedisUnavailable

ScriptName = Literal[
    "allocate_bits", "clear_claims", "commit_pages", "register_rank", "remove_rank", "renew_rank"
]
SCRIPT_NAMES: Final[tuple[ScriptName, ...]] = (
    "allocate_bits",
    "clear_claims",
    "commit_pages",
    "register_rank",
    "remove_rank",
    "renew_rank",
)
_NO_EVICTION: Final = "noeviction"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One run of one script."""

    script: ScriptName
    keys: Sequence[str | bytes]
    args: Sequence[str | bytes | int]


@dataclass(frozen=True)
class RedisSettings:
    """How to reach Redis.

    Attributes:
        url: `redis://[:password@]host:port/db`.
        connect_seconds: deadline of a connection attempt.
        command_seconds: deadline of one command or pipeline.
        max_connections: bound of the pool; a caller beyond it waits up to `command_seconds`.
    """

    url: str
    connect_seconds: float = 0.5
    command_seconds: float = 1.0
    max_connections: int = 64


@dataclass
class RedisServer:
    """A connected Redis (or Valkey) with caketin's scripts."""

    client: Redis
    _scripts: dict[ScriptName, AsyncScript] = field(default_factory=dict)

    @classmethod
    def connect(cls, settings: RedisSettings) -> RedisServer:
        """Return a server handle; connects on first use."""
        client = Redis.from_url(
            settings.url,
            socket_connect_timeout=settings.connect_seconds,
            socket_timeout=settings.command_seconds,
            max_connections=settings.max_connections,
            # One repeat, for a connection that died while idle. Every script is safe to repeat.
            retry=Retry(NoBackoff(), 1),
        )
        scripts = {name: client.register_script(script_text(name)) for name in SCRIPT_NAMES}
        return cls(client, scripts)

    async def close(self) -> None:
        """Close all connections."""
        await self.client.aclose()

    async def prepare(self) -> None:
        """Check that this server is fit for an index that must not forget, and mark the schema version.

        Raises:
            RedisUnavailable: unreachable, evicting, or holding another schema; the text says what to set.
        """
        problem = await self.unfit()
        if problem is not None:
            raise RedisUnavailable(problem)

    async def unfit(self) -> str | None:
        """Return why this server cannot be used, as one sentence, or None."""

        async def ask() -> str | None:
            policy = await self.client.config_get("maxmemory-policy")
            value = _text(dict(policy).get("maxmemory-policy", _NO_EVICTION))
            if value != _NO_EVICTION:
                return (
                    f"Redis has maxmemory-policy {value!r} and may drop parts of the index at any time: "
                    f"set 'maxmemory-policy {_NO_EVICTION}'"
                )
            await self.client.set(redis_keys.SCHEMA, redis_keys.SCHEMA_VERSION, nx=True)
            version = _text(await self.client.get(redis_keys.SCHEMA))
            if version != redis_keys.SCHEMA_VERSION:
                return (
                    f"Redis holds caketin schema {version!r}, this is version {redis_keys.SCHEMA_VERSION!r}: "
                    "use a database of its own, or the caketin version that wrote it"
                )
            return None

        try:
            return await translated(ask)
        except RedisUnavailable as error:
            return error.detail

    async def run(self, call: ScriptCall) -> Any:
        """Run one script and return what it returns."""
        return await translated(
            lambda: self._scripts[call.script](keys=list(call.keys), args=list(call.args))
        )

    async def run_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run several scripts in one round trip; each is atomic, the row of them is not."""
        if len(calls) == 1:
            return [await self.run(calls[0])]

        async def go() -> list[Any]:
            pipe = self.client.pipeline(transaction=False)
            for call in calls:
                await self._scripts[call.script](keys=list(call.keys), args=list(call.args), client=pipe)
            return await pipe.execute()

        return await translated(go)

    async def values(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of `keys`, None where there is none."""
        return cast(list[bytes | None], await translated(lambda: self.client.mget(keys)))

    async def pipeline(self, fill: Callable[[Pipeline], object]) -> list[Any]:
        """Send what `fill` queues in one round trip and return the answers."""

        async def go() -> list[Any]:
            pipe = self.client.pipeline(transaction=False)
            fill(pipe)
            return await pipe.execute()

        return await translated(go)


async def translated(call: Callable[[], Awaitable[T]]) -> T:
    """Await `call()`; a driver's error becomes `RedisUnavailable`."""
    try:
        return await call()
    except (driver.RedisError, OSError, TimeoutError) as error:
        raise RedisUnavailable(f"Redis did not serve the call: {type(error).__name__}: {error}") from error


def script_text(name: ScriptName) -> str:
    """Return the Lua source of a script."""
    return importlib.resources.files("metadata").joinpath("scripts", f"{name}.lua").read_text("utf-8")


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
