"""Who is there: namespaces with their pool variants, engines with their ranks (Redis).

A registration touches two slots of a cluster (the engine's and the namespace's), so it cannot be one script.
The order makes every prefix of it harmless: first the fence is read, then the namespace learns the variants
(which may be known before anybody uses them), and last the rank appears, in one fenced step.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Sequence
from typing import Final

from metadata import object_keys, redis_keys
from metadata.errors import (
    FieldError,
    InvalidInput,
    PoolChanged,
    RedisUnavailable,
    StaleIncarnation,
    UnknownRank,
)
from metadata.pool_json import rank_pool_to_json, spec_differences
from metadata.pools import MAX_POOL_VARIANTS, RankPool, validate_pool_set
from metadata.redis_server import RedisServer, ScriptCall
from metadata.registered import (
    RankRecord,
    Registered,
    RegisteredPool,
    Registration,
    read_rank_record,
)
from metadata.registry_reader import RegistryReader
from metadata.shard_bitmap import shard_bitmap

RETIRED_SECONDS: Final = 86_400
"""How long a replaced incarnation, and a rank whose lease ended, is remembered."""

MAX_RETIRED: Final = 16_384
"""Most replaced incarnations of one engine: the newest are kept."""

_ATTEMPTS: Final = 8


class Registry(RegistryReader):
    """Namespaces, engines and ranks, to read and to write."""

    def __init__(self, redis: RedisServer, *, lease_seconds: int = 30) -> None:
        super().__init__(redis)
        self.lease_seconds = lease_seconds

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
        for attempt in range(_ATTEMPTS):
            if attempt:
                # Several processes write this rank at the same time; without a pause they meet again.
                await asyncio.sleep(random.uniform(0, 0.01 * 2**attempt))  # noqa: S311  no secret
            seen = await self._fence(tenant, r)
            bits = await self._allocate(r)
            args = [r.rank, r.incarnation, seen, json.dumps(r.record())]
            lease = [self.lease_seconds, RETIRED_SECONDS, MAX_RETIRED]
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
        engines = await self._join(r, int(answer[3]))
        if answer[4] not in {b"", r.namespace.namespace_id.encode()}:
            await self._leave(r.engine_id, [r.rank.encode(), *answer[4:6]])
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
            ScriptCall("renew_rank", keys, [rank, incarnation, epoch, self.lease_seconds, RETIRED_SECONDS])
        )
        if answer[0] == b"stale":
            raise _stale(engine_id, rank)
        if answer[0] == b"unknown":
            raise UnknownRank(f"rank {rank!r} of engine {engine_id!r} is not registered: register again")
        members = redis_keys.members(answer[2].decode())
        await self._redis.commands([("ZADD", members, "XX", int(answer[1]), f"{engine_id}/{rank}")])
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
        await self._leave(engine_id, answer[2])
        if int(answer[1]) == 0:
            await self._redis.commands([("ZREM", redis_keys.engines(tenant), engine_id)])
        self._ranks.clear()
        self._engines.pop((tenant, engine_id), None)

    async def _fence(self, tenant: str, r: Registration) -> str:
        """Return what the rank's record is now; refuse a stale incarnation and changed pools."""
        raw, retired = await self._redis.commands(
            [
                ("HGET", redis_keys.ranks(tenant, r.engine_id), r.rank),
                ("ZSCORE", redis_keys.retired(tenant, r.engine_id), f"{r.rank}/{r.incarnation}"),
            ]
        )
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

    async def _join(self, r: Registration, lease_until: int) -> dict[str, int]:
        """List the rank under its namespace and tenant; return how many engines have each of its pools."""
        ns, tenant = r.namespace.namespace_id, r.namespace.tenant
        ids = [p.spec.pool_id for p in r.pools]
        await self._redis.commands(
            [
                ("SADD", redis_keys.NAMESPACES, ns),
                ("ZADD", redis_keys.namespaces(tenant), 0, ns),
                ("ZADD", redis_keys.engines(tenant), 0, r.engine_id),
            ]
        )
        keys = [redis_keys.members(ns), redis_keys.member_pools(ns)]
        who: list[str | bytes | int] = [
            f"{r.engine_id}/{r.rank}",
            lease_until,
            r.incarnation,
            RETIRED_SECONDS,
        ]
        counts = await self._redis.run(ScriptCall("join_namespace", keys, [*who, *ids]))
        return dict(zip(ids, (int(n) for n in counts), strict=True))

    async def _leave(self, engine_id: str, removed: Sequence[bytes]) -> None:
        """Take ranks off their namespaces' lists; `removed` holds rank, namespace, incarnation of each."""
        by_namespace: dict[str, list[str | bytes | int]] = {}
        for rank, ns, incarnation in zip(removed[::3], removed[1::3], removed[2::3], strict=True):
            by_namespace.setdefault(ns.decode(), []).extend([f"{engine_id}/{rank.decode()}", incarnation])
        calls = [
            ScriptCall("leave_namespace", [redis_keys.members(ns), redis_keys.member_pools(ns)], words)
            for ns, words in by_namespace.items()
        ]
        if calls:
            await self._redis.run_all(calls)


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
        f"rank {rank!r} of engine {engine_id!r} was taken over by another process or removed; this "
        "incarnation must not speak for it: a process that goes on registers with a new one"
    )
