"""Who is there: namespaces with their pool variants, engines with their ranks (Redis).

A registration touches two slots of a cluster (the engine's and the namespace's), so it cannot be one script.
The order makes every prefix of it harmless: first the fence is read, then the namespace learns the variants
(which may be known before anybody uses them), and last the rank appears, in one fenced step.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any, Final

from metadata import object_keys, redis_keys
from metadata.errors import (
    FieldError,
    InvalidInput,
    PoolChanged,
    RedisUnavailable,
    StaleIncarnation,
    UnknownEngine,
    UnknownNamespace,
    UnknownRank,
)
from metadata.namespace import Namespace
from metadata.pool_json import rank_pool_from_json, rank_pool_to_json, spec_differences
from metadata.pools import MAX_POOL_VARIANTS, RankPool, validate_pool_set
from metadata.redis_server import RedisServer, ScriptCall
from metadata.registered import (
    NamespaceView,
    RankRecord,
    Registered,
    RegisteredPool,
    Registration,
    Variant,
    read_rank_record,
)
from metadata.shard_bitmap import shard_bitmap

RETIRED_SECONDS: Final = 86_400
VIEW_SECONDS: Final = 1.0
_ATTEMPTS: Final = 8


class Registry:
    """Namespaces, engines and ranks.

    Views are cached for a second; a call that meets something unknown reads again before it says so.
    """

    def __init__(self, redis: RedisServer, *, lease_seconds: int = 30) -> None:
        self._redis = redis
        self.lease_seconds = lease_seconds
        self._views: dict[str, tuple[float, NamespaceView]] = {}
        self._ranks: dict[tuple[str, str, str], tuple[float, RankRecord]] = {}
        self._engines: dict[tuple[str, str], tuple[float, list[RankRecord]]] = {}

    async def register(self, registration: Registration) -> Registered:
        """Register a rank, or renew it with the same or more pools.

        Raises:
            InvalidInput: the pools do not fit together, or the namespace has too many variants.
            PoolChanged: a pool differs from this incarnation's earlier registration.
            StaleIncarnation: a newer process life of this rank has registered.
        """
        r = registration
        tenant = r.namespace.tenant
        validate_pool_set(list(r.pools))
        keys = [redis_keys.ranks(tenant, r.engine_id), redis_keys.retired(tenant, r.engine_id)]
        for _ in range(_ATTEMPTS):
            seen = await self._fence(tenant, r)
            bits = await self._allocate(r)
            args = [r.rank, r.incarnation, seen, json.dumps(r.record())]
            lease = [self.lease_seconds, RETIRED_SECONDS]
            answer = await self._redis.run(ScriptCall("register_rank", keys, [*args, *lease]))
            if answer[0] == b"ok":
                break
            if answer[0] == b"stale":
                raise _stale(r.engine_id, r.rank)
        else:
            raise RedisUnavailable(f"rank {r.rank!r} is registered by several processes at once; try again")
        self._ranks.pop((tenant, r.engine_id, r.rank), None)
        self._engines.pop((tenant, r.engine_id), None)
        self._views.pop(r.namespace.namespace_id, None)
        engines = await self._join(r)
        pools = {
            p.spec.name: RegisteredPool(
                p.spec.pool_id,
                bits[p.spec.pool_id],
                object_keys.suffixes(p.spec, p.owned_shards),
                engines[p.spec.pool_id],
            )
            for p in r.pools
        }
        return Registered(r.namespace.namespace_id, int(answer[1]), bool(answer[2]), pools)

    async def heartbeat(self, tenant: str, engine_id: str, rank: str, incarnation: str, epoch: int) -> int:
        """Renew a rank's lease and return its length in seconds.

        Raises:
            UnknownRank: not registered, or registered otherwise since: register again.
            StaleIncarnation: a newer process life of this rank has registered.
        """
        keys = [redis_keys.ranks(tenant, engine_id), redis_keys.retired(tenant, engine_id)]
        answer = await self._redis.run(
            ScriptCall("renew_rank", keys, [rank, incarnation, epoch, self.lease_seconds])
        )
        if answer == b"stale":
            raise _stale(engine_id, rank)
        if answer == b"unknown":
            raise UnknownRank(f"rank {rank!r} of engine {engine_id!r} is not registered: register again")
        return self.lease_seconds

    async def remove(self, tenant: str, engine_id: str, rank: str = "", incarnation: str = "") -> None:
        """Remove one rank or (with no rank) an engine; twice is fine, and nothing leaves L3.

        Raises:
            StaleIncarnation: the rank is registered by another incarnation.
        """
        keys = [redis_keys.ranks(tenant, engine_id), redis_keys.retired(tenant, engine_id)]
        answer = await self._redis.run(ScriptCall("remove_rank", keys, [rank, incarnation, RETIRED_SECONDS]))
        if answer[0] == b"stale":
            raise _stale(engine_id, rank)
        if int(answer[1]) == 0:
            await self._redis.pipeline(lambda p: p.srem(redis_keys.engines(tenant), engine_id))
        self._ranks.clear()
        self._engines.pop((tenant, engine_id), None)

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
                cached = self._views[namespace_id] = (now + VIEW_SECONDS, view)
            else:
                cached = None
        if cached is None or cached[1].identity.tenant != tenant:
            raise UnknownNamespace(f"no engine registered namespace {namespace_id!r}")
        return cached[1]

    async def namespaces(self, tenant: str) -> list[NamespaceView]:
        """Return all namespaces of a tenant."""
        (ids,) = await self._redis.pipeline(lambda p: p.smembers(redis_keys.NAMESPACES))
        views = [await self._read_namespace(i.decode()) for i in sorted(ids)]
        return [v for v in views if v is not None and v.identity.tenant == tenant]

    async def members(self, view: NamespaceView) -> dict[str, set[str]]:
        """Return the engines that registered each pool variant, by pool id."""
        ids = sorted(view.variants)
        answers = await self._redis.pipeline(
            lambda p: [p.smembers(redis_keys.members(view.namespace_id, i)) for i in ids]
        )
        return {i: {m.decode() for m in found} for i, found in zip(ids, answers, strict=True)}

    async def engines(self, tenant: str) -> list[str]:
        """Return the ids of a tenant's engines, sorted."""
        (ids,) = await self._redis.pipeline(lambda p: p.smembers(redis_keys.engines(tenant)))
        return sorted(i.decode() for i in ids)

    async def engine(self, tenant: str, engine_id: str) -> list[RankRecord]:
        """Return the ranks of an engine, sorted by rank.

        Raises:
            UnknownEngine: no rank of it is registered.
        """
        (raw,) = await self._redis.pipeline(lambda p: p.hgetall(redis_keys.ranks(tenant, engine_id)))
        if not raw:
            raise UnknownEngine(f"no rank of engine {engine_id!r} is registered")
        return [read_rank_record(engine_id, k.decode(), json.loads(raw[k])) for k in sorted(raw)]

    async def engine_cached(self, tenant: str, engine_id: str) -> list[RankRecord]:
        """Return the ranks of an engine as they were at most a second ago.

        Raises:
            UnknownEngine: no rank of it is registered.
        """
        cached = self._engines.get((tenant, engine_id))
        now = time.monotonic()
        if cached is None or cached[0] < now:
            cached = (now + VIEW_SECONDS, await self.engine(tenant, engine_id))
            self._engines[tenant, engine_id] = cached
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
        (raw,) = await self._redis.pipeline(lambda p: p.hget(redis_keys.ranks(tenant, engine_id), rank))
        if raw is None:
            await self.engine(tenant, engine_id)
            raise UnknownRank(f"rank {rank!r} of engine {engine_id!r} is not registered: register again")
        record = read_rank_record(engine_id, rank, json.loads(raw))
        self._ranks[key] = (now + VIEW_SECONDS, record)
        return record

    async def _fence(self, tenant: str, r: Registration) -> str:
        """Return what the rank's record is now; refuse a stale incarnation and changed pools."""
        member = f"{r.rank}/{r.incarnation}"

        def ask(pipe: Any) -> None:
            pipe.hget(redis_keys.ranks(tenant, r.engine_id), r.rank)
            pipe.zscore(redis_keys.retired(tenant, r.engine_id), member)

        raw, retired = await self._redis.pipeline(ask)
        if retired is not None:
            raise _stale(r.engine_id, r.rank)
        if raw is None:
            return ""
        old = json.loads(raw)
        if old["incarnation"] == r.incarnation:
            _refuse_changes(read_rank_record(r.engine_id, r.rank, old), r)
        return f"{old['digest']}/{old['incarnation']}"

    async def _allocate(self, r: Registration) -> dict[str, int]:
        ns = r.namespace.namespace_id
        args: list[str | bytes | int] = [json.dumps(r.namespace.to_json()), MAX_POOL_VARIANTS]
        for p in r.pools:
            digest = hashlib.sha256(json.dumps(p.spec.variant(), sort_keys=True).encode()).hexdigest()
            pool = json.dumps(rank_pool_to_json(RankPool(p.spec, ())))
            args += [
                p.spec.pool_id,
                json.dumps({"digest": digest, "pool": pool}),
                shard_bitmap(p.owned_shards, p.spec.shard_count),
            ]
        keys = [redis_keys.variants(ns), redis_keys.shards(ns), redis_keys.namespace(ns)]
        answer = await self._redis.run(ScriptCall("allocate_bits", keys, args))
        if answer[0] == b"full":
            detail = (
                f"the namespace has {int(answer[1])} pool variants and takes {MAX_POOL_VARIANTS}: purge the "
                "namespace, or give the engines a revision of their own"
            )
            raise InvalidInput("too many pool variants", [FieldError("pools", "too_many_variants", detail)])
        if answer[0] == b"collision":
            detail = f"pool id {answer[1].decode()} belongs to other bytes by chance: rename a part"
            raise InvalidInput("pool ids collide", [FieldError("pools", "collision", detail)])
        return {p.spec.pool_id: int(b) for p, b in zip(r.pools, answer[1:], strict=True)}

    async def _join(self, r: Registration) -> dict[str, int]:
        ns = r.namespace.namespace_id
        ids = [p.spec.pool_id for p in r.pools]

        def join(pipe: Any) -> None:
            pipe.sadd(redis_keys.NAMESPACES, ns)
            pipe.sadd(redis_keys.engines(r.namespace.tenant), r.engine_id)
            for pool_id in ids:
                pipe.sadd(redis_keys.members(ns, pool_id), r.engine_id)
            for pool_id in ids:
                pipe.scard(redis_keys.members(ns, pool_id))

        answers = await self._redis.pipeline(join)
        return dict(zip(ids, (int(n) for n in answers[-len(ids) :]), strict=True))

    async def _read_namespace(self, namespace_id: str) -> NamespaceView | None:
        def ask(pipe: Any) -> None:
            pipe.get(redis_keys.namespace(namespace_id))
            pipe.hgetall(redis_keys.variants(namespace_id))
            pipe.hgetall(redis_keys.shards(namespace_id))

        identity, variants, shards = await self._redis.pipeline(ask)
        if identity is None:
            return None
        known: dict[str, Variant] = {}
        for pool_id, raw in variants.items():
            record = json.loads(raw)
            spec = rank_pool_from_json(json.loads(record["pool"])).spec
            known[pool_id.decode()] = Variant(spec, int(record["bit"]), shards.get(pool_id, b""))
        return NamespaceView(Namespace.from_json(json.loads(identity)), known)


def _refuse_changes(old: RankRecord, new: Registration) -> None:
    errors: list[FieldError] = []
    if old.namespace_id != new.namespace.namespace_id:
        detail = f"was {old.namespace_id}, now {new.namespace.namespace_id}"
        errors.append(FieldError("namespace", "changed", detail))
    listed = {p.spec.name: (i, p) for i, p in enumerate(new.pools)}
    for pool in old.pools:
        if pool.spec.name not in listed:
            errors.append(FieldError("pools", "removed", f"{pool.spec.name!r} is registered and not listed"))
            continue
        at, now = listed[pool.spec.name]
        errors += [e.under(f"pools[{at}]") for e in spec_differences(pool, now)]
    if errors:
        raise PoolChanged(
            "a rank may add pools within one incarnation, not change them; register a new incarnation", errors
        )


def _stale(engine_id: str, rank: str) -> StaleIncarnation:
    return StaleIncarnation(
        f"a newer process registered rank {rank!r} of engine {engine_id!r}; this one must not speak for it"
    )
