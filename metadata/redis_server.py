"""The one door to Redis: commands, scripts, deadlines, and errors that become ours.

Callers get values or a `RedisUnavailable`; nobody above catches a driver's exception. Whatever is sent may be
sent twice (a connection that dies while the answer travels), so every script here is safe to repeat.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from redis import exceptions as driver

from metadata.circuit import CircuitSettings
from metadata.redis_errors import translated
from metadata.redis_fitness import Fitness, fitness
from metadata.redis_node import Command, NodeSettings, Words
from metadata.redis_topology import RedisTopology, topology
from metadata.redis_url import parse_redis_url

ScriptName = Literal[
    "allocate_bits",
    "clear_claims",
    "commit_pages",
    "flush_counts",
    "join_namespace",
    "leave_namespace",
    "register_rank",
    "remove_rank",
    "renew_rank",
]
SCRIPT_NAMES: Final[tuple[ScriptName, ...]] = get_args(ScriptName)


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One run of one script; all `keys` lie in one slot."""

    script: ScriptName
    keys: Sequence[str | bytes]
    args: Sequence[str | bytes | int]


@dataclass(frozen=True)
class RedisSettings:
    """How to reach Redis.

    Attributes:
        url: one of the forms of `metadata.redis_url`.
        connect_seconds: deadline of a connection attempt, within `command_seconds`.
        command_seconds: deadline of one row of commands on one node.
        max_connections: bound of connections to one node; a caller beyond it waits up to `command_seconds`.
        circuit: when to stop asking a node, and how often to look whether it is back.
    """

    url: str = field(repr=False)
    connect_seconds: float = 0.5
    command_seconds: float = 1.0
    max_connections: int = 64
    circuit: CircuitSettings = field(default_factory=CircuitSettings)


class RedisServer:
    """A Redis (or Valkey) with caketin's scripts: one server, a cluster, or what Sentinels call primary."""

    def __init__(self, there: RedisTopology) -> None:
        self._there = there
        self._scripts = {name: script_text(name) for name in SCRIPT_NAMES}
        self._digests = {
            name: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
            for name, text in self._scripts.items()
        }

    @classmethod
    def connect(cls, settings: RedisSettings) -> RedisServer:
        """Return a handle; connects on first use.

        Raises:
            InvalidInput: the URL cannot be read.
        """
        node = NodeSettings(
            settings.connect_seconds, settings.command_seconds, settings.max_connections, settings.circuit
        )
        return cls(topology(parse_redis_url(settings.url), node))

    @property
    def by_slot(self) -> bool:
        """Whether the keys of one command must lie in one slot: a cluster."""
        return self._there.by_slot

    async def close(self) -> None:
        """Close all connections."""
        await self._there.close()

    async def prepare(self) -> None:
        """Check that this Redis is fit for an index that must not forget, and mark the schema version.

        Raises:
            RedisUnavailable: unreachable, evicting, or holding another schema; the text says what to set.
        """
        found = await self.fitness()
        if found.problem is not None:
            raise found.problem

    async def fitness(self) -> Fitness:
        """Return whether this Redis can be used, and what could not be checked."""
        return await fitness(self._there)

    async def unfit(self) -> str | None:
        """Return why this Redis cannot be used, as one sentence, or None."""
        problem = (await self.fitness()).problem
        return problem.detail if problem is not None else None

    def open_circuits(self) -> list[str]:
        """Return the nodes that are not asked at present, as `host:port`; reads nothing over the network."""
        return [node.name for node in self._there.known() if node.circuit.is_open]

    async def run(self, call: ScriptCall) -> Any:
        """Run one script and return what it returns.

        Raises:
            RedisUnavailable: it was not served, or nobody knows whether it was: it is safe to repeat.
        """
        return (await self.run_all([call]))[0]

    async def run_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run several scripts in one round trip a node; each is atomic, the row of them is not.

        Raises:
            RedisUnavailable: at least one was not served, the others may have been: they are safe to repeat.
        """
        answers = await self._there.call([self._command(call, "EVALSHA") for call in calls])
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, driver.NoScriptError)]
        if unknown:
            again = await self._there.call([self._command(calls[i], "EVAL") for i in unknown])
            for i, answer in zip(unknown, again, strict=True):
                answers[i] = answer
        return _served(answers)

    async def commands(self, commands: Sequence[Words]) -> list[Any]:
        """Send plain commands, each with its key as first argument, in one round trip a node.

        Returns:
            The answers as they come over the wire: a hash is a flat list of fields and values.

        Raises:
            RedisUnavailable: at least one was not served.
        """
        return await self.send([Command(words, _bytes(words[1])) for words in commands])

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands that are made already.

        Raises:
            RedisUnavailable: at least one was not served.
        """
        return _served(await self._there.call(commands)) if commands else []

    async def scan(self, pattern: str, step: int) -> AsyncIterator[list[bytes]]:
        """Give the keys that match a pattern, some at a time; `step` keys are looked at in one command.

        Raises:
            RedisUnavailable: a step was not served.
        """
        for node in await self._there.nodes():
            cursor = b"0"
            while True:
                words = ("SCAN", cursor, "MATCH", pattern, "COUNT", step)
                cursor, keys = _served(await node.call([Command(words)]))[0]
                if keys:
                    yield keys
                if cursor == b"0":
                    break

    def _command(self, call: ScriptCall, verb: Literal["EVAL", "EVALSHA"]) -> Command:
        what = self._digests[call.script] if verb == "EVALSHA" else self._scripts[call.script]
        words = (verb, what, len(call.keys), *call.keys, *call.args)
        return Command(words, _bytes(call.keys[0]))


def script_text(name: ScriptName) -> str:
    """Return the Lua source of a script."""
    return importlib.resources.files("metadata").joinpath("scripts", f"{name}.lua").read_text("utf-8")


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return a hash that came over the wire as a flat list."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _served(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, Exception):
            raise translated(answer) from answer
    return answers


def _bytes(value: str | bytes | int) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
