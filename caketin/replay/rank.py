"""One rank of an engine that has no model: its memory, its place in the store, its transfers, its bytes."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event
from typing import Final, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from caketin.replay.lanes import Lanes, NoLane, Slots, TransferOverdue, Work
from caketin.replay.membership import Membership, NotingClient
from caketin.replay.page_bytes import BYTES_VERSION, PageWriter
from caketin.replay.pool_sets import rank_pools
from caketin.replay.trace import TRACE_PAGE_TOKENS
from dataplane.attach import Attached, attached
from dataplane.bound_pool import BoundPool
from dataplane.control_client import ControlSettings, ModelIdentity, RankIdentity
from dataplane.host_memory import HostMemory
from dataplane.memory_limits import memory_left
from dataplane.messages.control import LookupResult
from dataplane.page_mover import NO_SLOT
from dataplane.store_access import AS_TOLD, StoreOverrides
from metadata.codec import PageHashes
from metadata.errors import CaketinError
from metadata.pools import RankPool, TrailingPages

Sidecars: TypeAlias = Literal["all", "tail"]
T = TypeVar("T")

_PATIENCE: Final = 2
"""Deadlines that a transfer is waited for: it ends at its deadline by itself, unless a call of it hangs."""

_SPARE_LANES: Final = 2
"""Lanes beyond the requests in flight: so many transfers may hang before others are not tried."""


@dataclass(frozen=True)
class ReplaySettings:
    """How to replay.

    Attributes:
        url: of the control plane.
        pools: name of a pool set.
        page_bytes: bytes of a page over all pools and shards.
        page_tokens: tokens of a page.
        verify: whether restored bytes are compared.
        tp: ranks, each a process of its own.
        sidecars: `tail`: of pools with a trailing window only the last window of each request is backed up,
            as engines do; `all`: every page of every pool.
        concurrency: requests in flight.
        engine_id: what to register as; a name of its own for each replay, since two that share one would end
            each other's registration.
        model: name of the namespace's model.
        call_seconds: deadline of a control call.
        transfer_seconds: deadline of a transfer.
        give_up_seconds: how long no lookup may have an answer before the replay ends.
        token: access token, or None.
        overrides: how this host reaches the store, where that differs from what the control plane says.
    """

    url: str
    pools: str = "deepseek-v4"
    page_bytes: int = 4096
    page_tokens: int = TRACE_PAGE_TOKENS
    verify: bool = False
    tp: int = 1
    sidecars: Sidecars = "all"
    concurrency: int = 1
    engine_id: str = field(default_factory=lambda: f"replay-{secrets.token_hex(4)}")
    model: str = "replay"
    call_seconds: float = 2.0
    transfer_seconds: float = 10.0
    give_up_seconds: float = 120.0
    token: str | None = field(default=None, repr=False)
    overrides: StoreOverrides = AS_TOLD


@dataclass(frozen=True)
class Restored:
    """What became of one prefetch on one rank.

    Attributes:
        pages: the restored length.
        bytes: read.
        seconds: in the mover.
        wrong: restored pages whose bytes were not what was written.
        lost_because: why the first page behind the restored ones was lost; None where nothing was.
        error: code of what went wrong, None where nothing did.
        leased_pages: the longest promised length that the store had, and leased, before the first read.
    """

    pages: int
    bytes: int = 0
    seconds: float = 0.0
    wrong: list[int] = field(default_factory=list)
    lost_because: str | None = None
    error: str | None = None
    leased_pages: int = 0


@dataclass(frozen=True)
class Stored:
    """What became of one back up on one rank.

    Attributes:
        claimed: pages that the index took something of.
        bytes: of the pages that are stored and confirmed.
        seconds: in the mover.
        unstored: pages that lack something of what was to be stored.
        rejected: code -> claims that the index refused.
        error: code of what went wrong, None where nothing did.
    """

    claimed: int
    bytes: int = 0
    seconds: float = 0.0
    unstored: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    error: str | None = None


class Rank:
    """A rank that has joined. Its calls may come from several threads, as many as requests in flight."""

    def __init__(
        self,
        settings: ReplaySettings,
        joined: Attached,
        pools: list[BoundPool],
        writers: dict[str, PageWriter],
        *,
        client: NotingClient,
        membership: Membership,
        lanes: Lanes,
        writes: frozenset[str],
    ) -> None:
        self.client = client
        self.membership = membership
        self.store = joined.store.kind
        self.namespace_id = joined.namespace_id
        self._settings = settings
        self._mover = joined.mover
        self._writers = writers
        self._lanes = lanes
        # Pools that this rank backs up, and the window of those that have one.
        self._windows = {
            p.name: p.pool.spec.hit_policy.window_pages
            for p in pools
            if isinstance(p.pool.spec.hit_policy, TrailingPages)
        }
        self._writes = [name for name in writers if name in writes]

    @property
    def hanging(self) -> int:
        """Transfers that have not returned, though nobody waits for them any more."""
        return self._lanes.busy

    def prefetch(self, hashes: PageHashes, promise: LookupResult) -> Restored:
        """Read what is promised, and compare the bytes where that is asked for."""

        def work(lane: Slots, abandoned: Event) -> Restored:
            slots = lane[: len(hashes)]
            if self._settings.verify:
                for writer in self._writers.values():
                    writer.wipe(slots)
            start = time.perf_counter()
            done = self._mover.prefetch(
                hashes,
                promise,
                dict.fromkeys(self._writers, slots),
                cancel=abandoned,
                deadline_seconds=self._settings.transfer_seconds,
            )
            seconds = time.perf_counter() - start
            wrong = self._wrong(hashes, slots, done.read) if self._settings.verify and done.pages else []
            reasons = self.client.reasons(hashes)
            because = reasons[min(reasons)] if reasons else None
            error = self._code_of(done.error)
            return Restored(done.pages, done.bytes, seconds, wrong, because, error, done.leased_pages)

        return self._on_a_lane(work, lambda code, seconds: Restored(0, 0, seconds, [], code, code))

    def back_up(self, hashes: PageHashes, first: int) -> Stored:
        """Store the pages from `first` on: of each pool those that an engine would write."""

        def work(lane: Slots, abandoned: Event) -> Stored:
            rest = hashes[first:]
            slots = {name: self._written(name, lane[: len(rest)]) for name in self._writes}
            for name, at in slots.items():
                fill = self._writers[name].fill
                for slot, page_hash in zip(at.tolist(), rest, strict=True):
                    if slot != NO_SLOT:
                        fill(slot, page_hash)
            start = time.perf_counter()
            done = self._mover.back_up(
                rest, slots, cancel=abandoned, deadline_seconds=self._settings.transfer_seconds
            )
            seconds = time.perf_counter() - start
            whole = np.ones(len(rest), np.bool_)
            for name, at in slots.items():
                whole &= done.stored[name] | (at == NO_SLOT)
            return Stored(
                claimed=done.committed,
                bytes=done.bytes,
                seconds=seconds,
                unstored=int((~whole).sum()),
                rejected=Counter(r.code for r in done.rejected),
                error=self._code_of(done.error),
            )

        if not self._writes:
            return Stored(0)
        lost = len(hashes) - first
        return self._on_a_lane(work, lambda code, seconds: Stored(0, 0, seconds, lost, error=code))

    def _written(self, name: str, slots: Slots) -> Slots:
        if self._settings.sidecars == "all" or name not in self._windows:
            return slots
        tail = slots.copy()
        tail[: max(0, len(slots) - self._windows[name])] = NO_SLOT
        return tail

    def _on_a_lane(self, work: Work[T], failed: Callable[[str, float], T]) -> T:
        start = time.perf_counter()
        try:
            return self._lanes.run(work, _PATIENCE * self._settings.transfer_seconds)
        except (NoLane, TransferOverdue) as error:
            return failed(error.code, time.perf_counter() - start)

    def _wrong(self, hashes: PageHashes, slots: Slots, read: dict[str, NDArray[np.bool_]]) -> list[int]:
        wrong: set[int] = set()
        for name, writer in self._writers.items():
            for page in np.flatnonzero(read[name]).tolist():
                if not writer.intact(int(slots[page]), hashes[page]):
                    wrong.add(page)
        return sorted(wrong)

    def _code_of(self, error: CaketinError | None) -> str | None:
        if error is None:
            return None
        self.membership.seen(error)
        return getattr(error, "refusal", "") or error.code


@contextlib.contextmanager
def joined_rank(settings: ReplaySettings, tp_rank: int, longest: int) -> Iterator[Rank]:
    """Join as one rank, and leave at the end.

    Args:
        settings: of the replay.
        tp_rank: which rank.
        longest: pages of the longest request.

    Raises:
        InvalidInput: no such pool set or page size.
        ControlPlaneAway, ControlRefused: the registration failed.
        StoreUnavailable: the store that the control plane names cannot be reached.
        OutOfHostMemory: the slots do not fit in memory.
    """
    own = rank_pools(settings.pools, settings.page_bytes, settings.tp, tp_rank)
    pages = max(1, longest)
    lanes = settings.concurrency + _spare_lanes(own, pages, settings.concurrency)
    memories = [HostMemory(p.spec, pages * lanes) for p in own]
    bound = [BoundPool(p, () if p.spec.logical else (m.pool,)) for p, m in zip(own, memories, strict=True)]
    me = RankIdentity(settings.engine_id, f"dp0-pp0-cp0-tp{tp_rank}", secrets.token_hex(16))
    control = ControlSettings(settings.url, call_seconds=settings.call_seconds, token=settings.token)
    client = NotingClient(control, me)
    revision = f"{settings.pools}-{settings.page_bytes}-{BYTES_VERSION}"
    model = ModelIdentity(settings.model, revision, settings.page_tokens)
    writers = {
        p.spec.name: PageWriter(m, p.owned_shards[0])
        for p, m in zip(own, memories, strict=True)
        if m.pool.parts
    }
    # Where all ranks hold the same bytes, one of them writes.
    writes = frozenset(p.spec.name for p in own if p.spec.shard_count > 1 or tp_rank == 0)
    with (
        contextlib.closing(client),
        attached(client, model, bound, settings.overrides) as joined,
        Membership(client, model, own, joined.registration) as membership,
    ):
        yield Rank(
            settings,
            joined,
            bound,
            writers,
            client=client,
            membership=membership,
            lanes=Lanes(lanes, pages),
            writes=writes,
        )


def _spare_lanes(pools: list[RankPool], pages: int, needed: int) -> int:
    """Return how many lanes more fit in half of the memory that is left."""
    lane = sum(p.spec.bytes_per_page for p in pools) * pages
    return max(0, min(_SPARE_LANES, memory_left() // 2 // max(1, lane) - needed))
