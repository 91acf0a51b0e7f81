"""Purging a namespace: jobs whose state is in Redis, so that any replica answers and any replica goes on.

A job clears the namespace's claims in bounded steps. Its objects are removed by whoever runs the job (see
`api.purges`), which also renews the job's lease. A process that dies loses the lease, and another one starts
the job over: every step may be repeated. Two processes that work on one job at once do no harm either.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Literal, cast

from metadata import redis_keys
from metadata.errors import UnknownJob
from metadata.page_index import PageIndex
from metadata.redis_node import Words
from metadata.redis_server import RedisServer, pairs
from metadata.registry import Registry

JobState = Literal["queued", "running", "done", "failed"]

KEPT_SECONDS: Final = 86_400
LEASE_SECONDS: Final = 30
_KEYS_PER_STEP: Final = 1_000


@dataclass(frozen=True, slots=True)
class PurgeJob:
    """One job.

    Attributes:
        job_id: such as `purge-5f1c2d3e`.
        tenant: whose namespace it is.
        namespace_id: what is purged.
        state: where it stands.
        done: keys of Redis and objects of the store that are removed.
        total: how many there are, as far as is known; never below `done`.
        error: why it failed, or None.
    """

    job_id: str
    tenant: str
    namespace_id: str
    state: JobState = "queued"
    done: int = 0
    total: int = 0
    error: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is work left."""
        return self.state in {"queued", "running"}


@dataclass(frozen=True, slots=True)
class PurgeJobs:
    """Jobs over one registry and one index."""

    redis: RedisServer
    registry: Registry
    index: PageIndex

    async def start(self, tenant: str, namespace_id: str) -> PurgeJob:
        """Queue a purge; where one is under way already, return that one.

        Raises:
            UnknownNamespace: nobody registered it, or it is another tenant's.
        """
        await self.registry.namespace(tenant, namespace_id, fresh=True)
        for job in await self.open_jobs():
            if (job.tenant, job.namespace_id) == (tenant, namespace_id):
                return job
        pages = max((await self.index.claimed_pages(namespace_id)).values(), default=0)
        job = PurgeJob(f"purge-{secrets.token_hex(8)}", tenant, namespace_id, total=pages)
        await self.save(job)
        return job

    async def job(self, tenant: str, job_id: str) -> PurgeJob:
        """Return a job of this tenant.

        Raises:
            UnknownJob: there is none of that id, or it ended more than a day ago.
        """
        job = await self._read(job_id)
        if job is None or job.tenant != tenant:
            raise UnknownJob(f"there is no job {job_id!r}; a job is remembered for a day")
        return job

    async def open_jobs(self) -> list[PurgeJob]:
        """Return the jobs with work left."""
        (ids,) = await self.redis.commands([("SMEMBERS", redis_keys.OPEN_JOBS)])
        found = [await self._read(i.decode()) for i in sorted(ids)]
        return [job for job in found if job is not None and job.is_open]

    async def take(self, job: PurgeJob) -> bool:
        """Return whether the job was free and is now ours for `LEASE_SECONDS`."""
        key = redis_keys.job_lease(job.job_id)
        (taken,) = await self.redis.commands([("SET", key, b"1", "NX", "EX", LEASE_SECONDS)])
        return taken is not None

    async def renew(self, job: PurgeJob) -> None:
        """Keep the job for another `LEASE_SECONDS`."""
        key = redis_keys.job_lease(job.job_id)
        await self.redis.commands([("SET", key, b"1", "EX", LEASE_SECONDS)])

    async def save(self, job: PurgeJob) -> None:
        """Write where a job stands, for all replicas to see."""
        record: dict[str, str | int] = {
            "tenant": job.tenant,
            "namespace_id": job.namespace_id,
            "state": job.state,
            "done": job.done,
            "total": max(job.done, job.total),
            "error": job.error or "",
        }

        key = redis_keys.job(job.job_id)
        fields: list[str | int] = [word for field in record.items() for word in field]
        commands: list[Words] = [("HSET", key, *fields), ("EXPIRE", key, KEPT_SECONDS)]
        if job.is_open:
            commands += [("SADD", redis_keys.OPEN_JOBS, job.job_id)]
        else:
            commands += [("SREM", redis_keys.OPEN_JOBS, job.job_id)]
            commands += [("DEL", redis_keys.job_lease(job.job_id))]
        await self.redis.commands(commands)

    async def clear_claims(self, namespace_id: str) -> AsyncIterator[int]:
        """Remove pages, bitmaps, notes and counts of a namespace; give the keys removed in each step."""
        # SCAN, so that no step holds up Redis, however many keys there are.
        pattern = redis_keys.namespace_keys_pattern(namespace_id)
        async for keys in self.redis.scan(pattern, _KEYS_PER_STEP):
            yield sum(await self.redis.commands([("UNLINK", key) for key in keys]))

    async def forget_if_unused(self, tenant: str, namespace_id: str) -> bool:
        """Forget the namespace itself unless a rank with a live lease is in it; return whether it did.

        An engine that registers at this very moment is told to register again by its next commit.

        Raises:
            UnknownNamespace: it is forgotten already.
        """
        view = await self.registry.namespace(tenant, namespace_id, fresh=True)
        if any((await self.registry.members(view)).values()):
            return False
        keys = [redis_keys.namespace(namespace_id), redis_keys.variants(namespace_id)]
        keys += [redis_keys.shards(namespace_id), redis_keys.members(namespace_id)]
        keys += [redis_keys.member_pools(namespace_id)]
        await self.redis.commands(
            [
                ("SREM", redis_keys.NAMESPACES, namespace_id),
                ("ZREM", redis_keys.namespaces(tenant), namespace_id),
                *(("DEL", key) for key in keys),
            ]
        )
        return True

    async def _read(self, job_id: str) -> PurgeJob | None:
        (raw,) = await self.redis.commands([("HGETALL", redis_keys.job(job_id))])
        if not raw:
            return None
        text = {key.decode(): value.decode() for key, value in pairs(raw).items()}
        return PurgeJob(
            job_id,
            text["tenant"],
            text["namespace_id"],
            cast(JobState, text["state"]),
            int(text["done"]),
            int(text["total"]),
            text["error"] or None,
        )
