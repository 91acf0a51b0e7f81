"""SGLang's HiCache storage backend: SGLang's calls translated, and nothing decided.

Loaded by `--hicache-storage-backend dynamic` as `caketin.sglang.CaketinStorage`. Which pools there are and
how their pages lie is `sglang_pools`; what is restorable the control plane says (`page_lookup`); bytes move
in `page_reads` and `page_writes`. Here is the boundary to the engine's threads: nothing is raised to them
once the backend is attached, and every page and pool that is asked for gets a real boolean.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from dataplane.attach import RankAttachment
from dataplane.control_client import ControlClient
from dataplane.control_plane import ControlPlaneAway
from dataplane.engines.link import EngineLink
from dataplane.engines.page_lookup import FoundPages, PageLookup
from dataplane.engines.page_reads import PageReads, SlotPages
from dataplane.engines.page_writes import PageWrites
from dataplane.engines.promises import Promises
from dataplane.engines.sglang_facts import engine_facts, replica_rank
from dataplane.engines.sglang_metrics import MoveMetrics
from dataplane.engines.sglang_pools import EnginePool, RankPlace, engine_pool
from dataplane.engines.sglang_settings import BackendSettings
from dataplane.host_pool import slots_of
from dataplane.messages.control import PoolQuery
from dataplane.messages.observe import Job
from metadata.codec import PageHashes
from metadata.errors import CaketinError
from metadata.pools import ANCHOR, MAX_WINDOW_PAGES, TrailingPages, validate_pool_set

log = logging.getLogger(__name__)

T = TypeVar("T")

_CLEAR_SECONDS: Final = 5.0


def _ended_job(link: EngineLink, job_id: str) -> Job | None:
    """Wait a few seconds for a purge; None: it goes on. That nobody answers meanwhile does not stop it."""
    deadline = time.monotonic() + _CLEAR_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ControlPlaneAway):
            job = link.call(lambda client: client.job(job_id))
            if job.state in {"done", "failed"}:
                return job
        time.sleep(0.02)
    return None


class PurgeFailed(CaketinError):
    """The control plane could not remove all objects of the namespace; its claims are gone."""

    code = "purge_failed"


class CaketinStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types
    """caketin as the L3 tier of one SGLang rank."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        """Read the configuration; nothing is called yet.

        Args:
            storage_config: SGLang's, with the backend's settings in `extra_config`.
            kwargs: SGLang passes an empty one.

        Raises:
            InvalidInput: settings that cannot be used.
        """
        self._settings = BackendSettings.of(storage_config.extra_config)
        self._place = RankPlace(
            tp_rank=storage_config.tp_rank,
            tp_size=storage_config.tp_size,
            pp_rank=storage_config.pp_rank,
            pp_size=storage_config.pp_size,
            cp_rank=storage_config.attn_cp_rank,
            dp_rank=storage_config.dp_rank or replica_rank(),
            replicated=storage_config.is_mla_model,
            writer=storage_config.is_storage_writer,
        )
        self._facts = engine_facts().named(storage_config.model_name)
        # What cannot be used is refused now: SGLang undoes a failed construction, and no failure later on.
        self._settings.model_of(self._facts)
        self._client = ControlClient(self._settings.control, self._settings.me(self._place.name))
        self._metrics = MoveMetrics() if storage_config.enable_storage_metrics else None
        self._hosts: dict[str, Any] = {}
        self._pools: dict[str, EnginePool] = {}
        self._link: EngineLink | None = None
        self._promises = Promises()
        self.registered_pools: dict[Any, Any] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the anchor's host pool."""
        self.mem_pool_host = mem_pool_host
        self._hosts[ANCHOR] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a host pool; one that comes late is registered in the background.

        Raises:
            InvalidInput: the pool cannot be moved.
        """
        name = str(host_pool_name)
        hosts = {**self._hosts, name: host_pool}
        if self._link is not None:
            # One that cannot be moved is refused and leaves the others as they are.
            self._pools = self._translated(hosts)
            self._tell_pools(self._link)
        self._hosts = hosts
        self.registered_pools[host_pool_name] = host_pool

    def on_host_pools_registered(self) -> None:
        """Attach; a control plane or store that is away is tried again in the background.

        Raises:
            InvalidInput: pools that cannot be moved.
        """
        self._pools = self._translated(self._hosts)
        identity = self._settings.identity(self._facts, self._page_size())
        attachment = RankAttachment(self._client, identity, self._settings.store)
        link = EngineLink(self._client, attachment)
        self._lookup = PageLookup(link, self._promises)
        self._reads = PageReads(link, self._promises)
        self._writes = PageWrites(link)
        link.on_tick(lambda joined: self._promises.renew(joined.store), also_away=True)
        link.on_tick(self._writes.settle)
        self._tell_pools(link)
        self._link = link
        if not link.start(self._settings.attach_seconds):
            log.warning("starting without L3: everything is a miss until caketin is attached")

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Say how much of these pages is restorable; one rank of a prefetch group asks."""
        transfers = pool_transfers or []
        attached = self._link is not None and self._link.joined is not None
        if attached and not self._place.leads:
            # The ranks take the minimum: whoever does not ask must not lower it.
            every = {str(t.name): len(keys) for t in transfers}
            return PoolTransferResult(len(keys), {ANCHOR: len(keys), **every}, None)
        found = self._guarded(lambda: self._find(keys, transfers, extra_info), None) if attached else None
        if found is None:
            return PoolTransferResult.empty()
        pools = {str(t.name): found.pools.get(str(t.name), found.pages) for t in transfers}
        lengths = [n for first, last in found.runs for n in range(first, last + 1)]
        return PoolTransferResult(
            found.pages, {ANCHOR: found.pools.get(ANCHOR, found.pages), **pools}, lengths
        )

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many leading pages are restorable."""
        return int(self.batch_exists_v2(keys, None, extra_info).kv_hit_pages)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read anchor pages."""
        anchor = self._pools.get(ANCHOR)
        if anchor is not None and anchor.bound.pool.spec.logical:
            return [True] * len(keys)
        return self._get({ANCHOR: (keys, host_indices)})[ANCHOR]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages of sidecars."""
        return self._get({str(t.name): (t.keys or [], t.host_indices) for t in transfers})

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of sidecars; published with their anchor."""
        given = {str(t.name): (t.keys or [], t.host_indices) for t in transfers}
        answer = {name: [False] * len(keys) for name, (keys, _) in given.items()}
        if self._link is not None:
            start = time.perf_counter()
            nothing: dict[str, NDArray[np.bool_]] = {}
            stored = self._guarded(lambda: self._writes.store_sidecars(self._slot_pages(given)), nothing)
            self._note("backup", stored, start)
            answer |= {name: mask.tolist() for name, mask in stored.items()}
        return answer

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store anchor pages, and publish them with all that waits for them."""
        nothing = [False] * len(keys)
        anchor = self._pools.get(ANCHOR)
        if self._link is None or anchor is None:
            return nothing

        def store() -> list[bool]:
            start = time.perf_counter()
            slots = None if anchor.bound.pool.spec.logical else self._slots(anchor, host_indices)
            mask = self._writes.store_anchor(PageHashes.from_hex(keys), slots)
            self._note("backup", {} if slots is None else {ANCHOR: mask}, start)
            return [bool(stored) for stored in mask.tolist()]

        return self._guarded(store, nothing)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Not offered: pages move by their host indices (`interface_v1`)."""
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Not offered: see `get`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Not offered: see `get`."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not offered: see `get`."""
        return False

    def exists(self, key: str) -> bool:
        """Return whether the page is restorable by itself."""
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Have the control plane purge this namespace, and wait a few seconds for it.

        Raises:
            CaketinError: it cannot be asked, or refuses (a purge needs a token of scope `operator`).
        """
        link, joined = self._link, self._link.joined if self._link is not None else None
        if link is None or joined is None:
            # Returning would have SGLang say that it is cleared.
            raise ControlPlaneAway("nothing is cleared: this rank is not attached")
        self._writes.forget()
        job_id = link.call(lambda client: client.purge(joined.namespace_id))
        self._writes.forget()
        link.rejoin()
        job = _ended_job(link, job_id)
        link.rejoin()
        if job is None:
            log.warning("the purge of namespace %s goes on (job %s)", joined.namespace_id, job_id)
        elif job.state == "failed":
            raise PurgeFailed(f"namespace {joined.namespace_id} is not purged: {job.error}")

    def get_stats(self) -> StorageMetrics | None:
        """Return what moved since the last call, where SGLang collects it."""
        return None if self._metrics is None else self._metrics.take()

    def flush(self, seconds: float = 5.0) -> bool:
        """Wait until what is stored is claimed; return False where the control plane takes longer.

        SGLang need not call it: a write is answered when it is stored, its claim follows in milliseconds.
        """
        return self._link is None or self._writes.flush(seconds)

    def close(self) -> None:
        """Leave: memory unregistered, store closed, rank removed, threads ended. Again: nothing happens."""
        link, self._link = self._link, None
        if link is not None:
            self._writes.close()
            self._lookup.close()
            link.close()

    def _translated(self, hosts: Mapping[str, Any]) -> dict[str, EnginePool]:
        page_size = self._page_size()
        tokens = self._settings.sliding_window_tokens or self._facts.sliding_window_tokens or page_size
        pools = {
            name: engine_pool(
                name,
                host,
                self._place,
                window_pages=min(MAX_WINDOW_PAGES, -(-tokens // page_size)),
                logical_dtype=self._facts.logical_dtype,
                peers=tuple(hosts),
            )
            for name, host in hosts.items()
        }
        validate_pool_set([p.registered for p in pools.values()])
        return pools

    def _tell_pools(self, link: EngineLink) -> None:
        pools = self._pools.values()
        link.set_pools([p.bound for p in pools], [p.registered for p in pools])

    def _page_size(self) -> int:
        host = self._hosts[ANCHOR]
        return int(getattr(host, "logical_page_size", None) or host.page_size)

    def _find(
        self,
        keys: Sequence[str],
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> FoundPages | None:
        queries = {
            str(t.name): self._query(t, len(keys))
            for t in transfers
            if t.hit_policy != PoolHitPolicy.BLOCK_GROUPS  # gates nothing (H3)
        }
        before = len(getattr(extra_info, "prefix_keys", None) or ())
        return self._lookup.find(PageHashes.from_hex(keys), queries, before)

    def _query(self, transfer: PoolTransfer, pages: int) -> PoolQuery:
        """Return what a transfer asks of its pool; SGLang says the window by the number of its keys."""
        pool = self._pools.get(str(transfer.name))
        if pool is None or not isinstance(pool.bound.pool.spec.hit_policy, TrailingPages):
            return PoolQuery()
        trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
        window = max(1, len(transfer.keys or ())) if trailing else pages
        return PoolQuery(window_pages=min(MAX_WINDOW_PAGES, window))

    def _get(self, given: Mapping[str, tuple[Sequence[str], torch.Tensor | None]]) -> dict[str, list[bool]]:
        answer = {name: [False] * len(keys) for name, (keys, _) in given.items()}
        if self._link is None:
            return answer
        start = time.perf_counter()
        nothing: dict[str, NDArray[np.bool_]] = {}
        read = self._guarded(lambda: self._reads.read(self._slot_pages(given)), nothing)
        self._note("prefetch", read, start)
        return answer | {name: mask.tolist() for name, mask in read.items()}

    def _slot_pages(
        self, given: Mapping[str, tuple[Sequence[str], torch.Tensor | None]]
    ) -> dict[str, SlotPages]:
        """Return the pools of a call; one that is not known or whose indices do not fit is left out."""
        found = {}
        for name, (keys, indices) in given.items():
            pool = self._pools.get(name)
            if pool is None or indices is None or len(indices) != len(keys) * pool.page_size:
                got = None if indices is None else len(indices)
                log.warning("pool %r: %d pages with %s indices cannot be moved", name, len(keys), got)
                continue
            found[name] = SlotPages(PageHashes.from_hex(keys), self._slots(pool, indices))
        return found

    @staticmethod
    def _slots(pool: EnginePool, indices: torch.Tensor) -> NDArray[np.int64]:
        return slots_of(indices.numpy(), pool.page_size)

    def _note(
        self, kind: Literal["prefetch", "backup"], moved: Mapping[str, NDArray[np.bool_]], start: float
    ) -> None:
        if self._metrics is not None and moved:
            pages = max(int(mask.sum()) for mask in moved.values())
            size = sum(int(m.sum()) * self._pools[n].bound.bytes_per_page for n, m in moved.items())
            self._metrics.note(kind, pages, size, time.perf_counter() - start)

    @staticmethod
    def _guarded(call: Callable[[], T], otherwise: T) -> T:
        """Return what the call returns; what it raises ends here."""
        try:
            return call()
        except CaketinError as error:
            log.warning("a call of SGLang was answered with nothing: %s", error)
        except Exception:
            log.exception("a call of SGLang was answered with nothing")
        return otherwise
