"""Reading the registry: namespaces with their variants, engines with their ranks (Redis).

Views are cached for a second; a call that meets something unknown reads again before it says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from metadata import redis_keys
from metadata.errors import UnknownEngine, UnknownNamespace, UnknownRank
from metadata.namespace import Namespace
from metadata.pool_json import rank_pool_from_json
from metadata.redis_node import Words
from metadata.redis_server import RedisServer, pairs
from metadata.registered import NamespaceView, RankRecord, Variant, read_rank_record

VIEW_SECONDS: Final = 1.0
MAX_CACHED: Final = 4_096

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Piece(Generic[T]):
    """Part of a list.

    Attributes:
        items: in the order of their ids.
        next_cursor: where to go on, or None at the end.
    """

    items: list[T]
    next_cursor: str | None


class RegistryReader:
    """What is registered."""

    def __init__(self, redis: RedisServer) -> None:
        self._redis = redis
        self._views: dict[str, tuple[float, NamespaceView]] = {}
        self._ranks: dict[tuple[str, str, str], tuple[float, RankRecord]] = {}
        self._engines: dict[tuple[str, str], tuple[float, list[RankRecord]]] = {}

    async def namespace(self, tenant: str, namespace_id: str, *, fresh: bool = False) -> NamespaceView:
        """Return a namespace of this tenant.

        Raises:
            UnknownNamespace: nobody registered it, or it is another tenant's.
        """
        cached = self._views.get(namespace_id)
        now = time.monotonic()
        if cached is None or fresh or cached[0] < now:
            view = await self._read_namespace(namespace_id)
            if view is not None:
                cached = (now + VIEW_SECONDS, view)
                _remember(self._views, namespace_id, cached)
            else:
                cached = None
        if cached is None or cached[1].identity.tenant != tenant:
            raise UnknownNamespace(f"no engine registered namespace {namespace_id!r}")
        return cached[1]

    async def namespaces(self, tenant: str) -> list[NamespaceView]:
        """Return all namespaces of a tenant, sorted by id."""
        (ids,) = await self._redis.commands([("ZRANGE", redis_keys.namespaces(tenant), 0, -1)])
        return await self._read_namespaces(tenant, [i.decode() for i in ids])

    async def namespaces_piece(
        self, tenant: str, *, limit: int = 100, cursor: str | None = None
    ) -> Piece[NamespaceView]:
        """Return at most `limit` namespaces of a tenant, those after `cursor`."""
        ids, following = await self._ids(redis_keys.namespaces(tenant), limit, cursor)
        return Piece(await self._read_namespaces(tenant, ids), following)

    async def members(self, view: NamespaceView) -> dict[str, set[str]]:
        """Return the engines with a live lease that registered each pool variant, by pool id."""
        ns = view.namespace_id
        alive, raw = await self._redis.commands(
            [
                ("ZRANGEBYSCORE", redis_keys.members(ns), int(time.time()), "+inf"),
                ("HGETALL", redis_keys.member_pools(ns)),
            ]
        )
        pools, found = pairs(raw), {pool_id: set[str]() for pool_id in view.variants}
        for member in alive:
            engine_id = member.decode().rpartition("/")[0]
            for pool_id in pools.get(member, b"").decode().split()[1:]:
                found.setdefault(pool_id, set()).add(engine_id)
        return found

    async def engines(self, tenant: str) -> list[str]:
        """Return the ids of a tenant's engines, sorted."""
        (ids,) = await self._redis.commands([("ZRANGE", redis_keys.engines(tenant), 0, -1)])
        return [i.decode() for i in ids]

    async def engines_piece(
        self, tenant: str, *, limit: int = 100, cursor: str | None = None
    ) -> Piece[tuple[str, list[RankRecord]]]:
        """Return at most `limit` engines with their ranks, those after `cursor`, in two round trips.

        Engines that left while the list was read, or went without a word more than a day ago, are left out.
        """
        ids, following = await self._ids(redis_keys.engines(tenant), limit, cursor)
        raw = await self._redis.commands([("HGETALL", redis_keys.ranks(tenant, i)) for i in ids])
        gone = [i for i, found in zip(ids, raw, strict=True) if not found]
        if gone:
            await self._redis.commands([("ZREM", redis_keys.engines(tenant), *gone)])
        there = [(i, _records(i, found)) for i, found in zip(ids, raw, strict=True) if found]
        return Piece(there, following)

    async def engine(self, tenant: str, engine_id: str) -> list[RankRecord]:
        """Return the ranks of an engine, sorted by rank.

        Raises:
            UnknownEngine: no rank of it is registered.
        """
        (raw,) = await self._redis.commands([("HGETALL", redis_keys.ranks(tenant, engine_id))])
        if not raw:
            raise UnknownEngine(f"no rank of engine {engine_id!r} is registered")
        return _records(engine_id, raw)

    async def engine_cached(self, tenant: str, engine_id: str) -> list[RankRecord]:
        """Return the ranks of an engine as they were at most a second ago.

        Raises:
            UnknownEngine: no rank of it is registered.
        """
        cached = self._engines.get((tenant, engine_id))
        now = time.monotonic()
        if cached is None or cached[0] < now:
            cached = (now + VIEW_SECONDS, await self.engine(tenant, engine_id))
            _remember(self._engines, (tenant, engine_id), cached)
        return cached[1]

    async def rank(self, tenant: str, engine_id: str, rank: str, *, fresh: bool = False) -> RankRecord:
        """Return one rank.

        Raises:
            UnknownEngine: no rank of the engine is registered.
            UnknownRank: this rank is not registered.
        """
        key = (tenant, engine_id, rank)
        cached = self._ranks.get(key)
        now = time.monotonic()
        if cached is not None and not fresh and cached[0] >= now:
            return cached[1]
        (raw,) = await self._redis.commands([("HGET", redis_keys.ranks(tenant, engine_id), rank)])
        if raw is None:
            await self.engine(tenant, engine_id)
            raise UnknownRank(f"rank {rank!r} of engine {engine_id!r} is not registered: register again")
        record = read_rank_record(engine_id, rank, json.loads(raw))
        _remember(self._ranks, key, (now + VIEW_SECONDS, record))
        return record

    async def _ids(self, key: str, limit: int, cursor: str | None) -> tuple[list[str], str | None]:
        start = "-" if cursor is None else f"({cursor}"
        (raw,) = await self._redis.commands([("ZRANGEBYLEX", key, start, "+", "LIMIT", 0, limit + 1)])
        ids = [i.decode() for i in raw]
        return ids[:limit], ids[limit - 1] if len(ids) > limit else None

    async def _read_namespace(self, namespace_id: str) -> NamespaceView | None:
        return _view(*await self._redis.commands(_namespace_reads(namespace_id)))

    async def _read_namespaces(self, tenant: str, ids: Sequence[str]) -> list[NamespaceView]:
        raw = await self._redis.commands([words for i in ids for words in _namespace_reads(i)])
        views = [_view(*raw[i : i + 3]) for i in range(0, len(raw), 3)]
        return [v for v in views if v is not None and v.identity.tenant == tenant]


def _namespace_reads(namespace_id: str) -> list[Words]:
    return [
        ("GET", redis_keys.namespace(namespace_id)),
        ("HGETALL", redis_keys.variants(namespace_id)),
        ("HGETALL", redis_keys.shards(namespace_id)),
    ]


def _view(identity: bytes | None, variants: Sequence[bytes], shards: Sequence[bytes]) -> NamespaceView | None:
    if identity is None:
        return None
    registered = pairs(shards)
    known: dict[str, Variant] = {}
    for pool_id, raw in pairs(variants).items():
        record = json.loads(raw)
        spec = rank_pool_from_json(json.loads(record["pool"])).spec
        known[pool_id.decode()] = Variant(spec, int(record["bit"]), registered.get(pool_id, b""))
    return NamespaceView(Namespace.from_json(json.loads(identity)), known)


def _records(engine_id: str, raw: Sequence[bytes]) -> list[RankRecord]:
    ranks = pairs(raw)
    return [read_rank_record(engine_id, k.decode(), json.loads(ranks[k])) for k in sorted(ranks)]


def _remember(cache: dict[K, T], key: K, value: T) -> None:
    """Keep a value; a full cache starts over: what it holds is a second old at most."""
    if len(cache) >= MAX_CACHED:
        cache.clear()
    cache[key] = value
