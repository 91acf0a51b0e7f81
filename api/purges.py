"""Works off purge jobs: claims first, then the objects of that one namespace, then late claims.

Objects are removed through a small protocol that `caketin serve` hands in, since the API knows no store.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from api.logs import get_logger
from metadata import object_keys
from metadata.errors import CaketinError, RedisUnavailable, UnknownNamespace
from metadata.purge_jobs import LEASE_SECONDS, PurgeJob, PurgeJobs

POLL_SECONDS: Final = 5.0
"""How soon a replica notices a job whose replica died, once the lease is over."""

log = get_logger(__name__)


class ObjectPurger(Protocol):
    """The store, as far as a purge needs it."""

    def remove_prefix(self, prefix: str) -> int:
        """Remove every object whose key starts with `prefix`; return how many there were. May take minutes.

        Args:
            prefix: `ct1/<namespace id>/`, never less.
        """


@dataclass
class PurgeRunner:
    """Runs the jobs of all replicas, one at a time, until cancelled.

    Without a store it takes only the jobs that it was asked for itself: another replica may have one.
    """

    jobs: PurgeJobs
    purger: ObjectPurger | None = None
    poll_seconds: float = POLL_SECONDS
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _asked: set[str] = field(default_factory=set)

    def ask(self, job: PurgeJob) -> None:
        """Look for jobs now, this one among them."""
        self._asked.add(job.job_id)
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled; what is not finished then, another replica or process goes on with."""
        while True:
            self._wake.clear()
            try:
                for job in await self.jobs.open_jobs():
                    mine = self.purger is not None or job.job_id in self._asked
                    if mine and await self.jobs.take(job):
                        await self._work(job)
                        self._asked.discard(job.job_id)
            except RedisUnavailable:
                pass
            except Exception:
                log.exception("purge failed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self.poll_seconds)

    async def _work(self, job: PurgeJob) -> None:
        try:
            job = await self._save(job, state="running", done=0)
            job = await self._clear_claims(job)
            job = await self._remove_objects(job)
            job = await self._clear_claims(job)  # of pages that were committed in between
            with contextlib.suppress(UnknownNamespace):
                await self.jobs.forget_if_unused(job.tenant, job.namespace_id)
            await self._save(job, state="done", total=job.done)
            log.info("namespace purged", job=job.job_id, namespace=job.namespace_id, removed=job.done)
        except RedisUnavailable:
            log.warning("purge waits for Redis", job=job.job_id)
        except _Failed as failure:
            await self._save(job, state="failed", error=str(failure))

    async def _clear_claims(self, job: PurgeJob) -> PurgeJob:
        async for removed in self.jobs.clear_claims(job.namespace_id):
            await self.jobs.renew(job)
            job = await self._save(job, done=job.done + removed)
        return job

    async def _remove_objects(self, job: PurgeJob) -> PurgeJob:
        if self.purger is None:
            raise _Failed("the claims are cleared; this server has no store, so the objects are still there")
        prefix = object_keys.namespace_prefix(job.namespace_id)
        removal = _in_thread(lambda purger=self.purger: purger.remove_prefix(prefix))  # type: ignore[misc]
        try:
            while not removal.done():
                await asyncio.wait({removal}, timeout=LEASE_SECONDS / 3)
                await self.jobs.renew(job)
            removed = removal.result()
        except RedisUnavailable:
            raise
        except Exception as error:
            detail = error.detail if isinstance(error, CaketinError) else f"{type(error).__name__}: {error}"
            log.warning("objects could not be removed", job=job.job_id, reason=detail)
            # The detail may name an address of the store: it stays in the log.
            raise _Failed(
                "the claims are cleared; the store did not remove the objects, see the log"
            ) from error
        return await self._save(job, done=job.done + removed)

    async def _save(self, job: PurgeJob, **changes: object) -> PurgeJob:
        job = replace(job, **changes)  # type: ignore[arg-type]
        job = replace(job, total=max(job.done, job.total))
        await self.jobs.save(job)
        return job


class _Failed(Exception):
    """A job cannot be finished; the text is what its caller is told."""


def _in_thread(call: Callable[[], int]) -> asyncio.Future[int]:
    """Run `call` in a daemon thread: a store that hangs must not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()

    def settle(result: int, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def go() -> None:
        outcome: tuple[int, Exception | None]
        try:
            outcome = (call(), None)
        except Exception as error:  # whatever it is, the waiter must learn of it
            outcome = (0, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=go, name="purge", daemon=True).start()
    return future
