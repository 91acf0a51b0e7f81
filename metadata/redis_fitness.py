"""Whether a Redis is fit to hold an index that must not forget, and what to set where it is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from redis import exceptions as driver

from metadata import redis_keys
from metadata.errors import RedisUnavailable
from metadata.redis_errors import translated
from metadata.redis_node import Command, RedisNode
from metadata.redis_topology import RedisTopology

_NO_EVICTION: Final = "noeviction"


@dataclass(frozen=True, slots=True)
class Fitness:
    """What a look at Redis found.

    Attributes:
        problem: why it cannot be used, or None.
        remarks: what could not be checked in the usual way; not in the way of using it.
    """

    problem: RedisUnavailable | None = None
    remarks: tuple[str, ...] = ()


async def fitness(there: RedisTopology) -> Fitness:
    """Look at every node that holds data, and mark the schema version."""
    remarks: list[str] = []
    try:
        for node in await there.nodes():
            problem = await _evicts(node, remarks)
            if problem is not None:
                return Fitness(problem, tuple(remarks))
        return Fitness(await _schema(there), tuple(remarks))
    except RedisUnavailable as error:
        return Fitness(error, tuple(remarks))
    except (driver.RedisError, OSError, TimeoutError) as error:
        return Fitness(translated(error), tuple(remarks))


async def _evicts(node: RedisNode, remarks: list[str]) -> RedisUnavailable | None:
    asked, info = await node.call(
        [Command(("CONFIG", "GET", "maxmemory-policy")), Command(("INFO", "memory"))]
    )
    policy = asked[1].decode() if not isinstance(asked, Exception) and asked else None
    if policy is None:
        if isinstance(info, Exception):
            raise translated(info, where=node.name)
        policy = _info(info).get("maxmemory_policy")
        why = "is not permitted" if isinstance(asked, Exception) else "says nothing"
        remarks.append(f"CONFIG GET {why} at {node.name}: took maxmemory-policy {policy!r} from INFO")
    if policy == _NO_EVICTION:
        return None
    text = (
        f"Redis has maxmemory-policy {policy!r} and may drop parts of the index at any time: "
        f"set 'maxmemory-policy {_NO_EVICTION}' (at {node.name})"
    )
    return RedisUnavailable(text, reason="evicting")


async def _schema(there: RedisTopology) -> RedisUnavailable | None:
    key = redis_keys.SCHEMA.encode()
    # The write also shows a full server and a replica, which both still answer reads.
    marked, version = await there.call(
        [
            Command(("SET", key, redis_keys.SCHEMA_VERSION, "NX"), key),
            Command(("GET", key), key),
        ]
    )
    for answer in (marked, version):
        if isinstance(answer, Exception):
            raise translated(answer)
    if version == redis_keys.SCHEMA_VERSION.encode():
        return None
    text = (
        f"Redis holds caketin schema {_text(version)!r}, this is version {redis_keys.SCHEMA_VERSION!r}: "
        "use a database of its own, or the caketin version that wrote it"
    )
    return RedisUnavailable(text, reason="unknown_schema")


def _info(raw: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in raw.decode(errors="replace").splitlines())
    return {name: value for name, _, value in lines}


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
