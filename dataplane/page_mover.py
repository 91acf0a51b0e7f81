"""Moves pages between host memory and the store, KV first, and keeps the control plane's index honest.

Back up (O1-O3): per page the anchor's objects, then the pools that derive from it, then the independent
sidecars; a later stage only for pages whose earlier stages are confirmed; the index learns of a page last.

Prefetch (O5, T1, T2): in the same order. What was *read* decides what is restored: the largest length that
the lookup allowed and whose every gating pool, windows included, was read. What could not be read is reported
at once, fenced by the generation that the lookup gave.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataplane.bound_pool import BoundPool
from dataplane.messages import control
from dataplane.object_store import ObjectBuffers, ObjectStore, StoreCode, describe_failures
from dataplane.stage_batch import PoolPages, StageBatch
from metadata.codec import PageHashes
from metadata.errors import CaketinError, FieldError, InvalidInput
from metadata.hit_policy import Restorable, restorable
from metadata.page_runs import page_runs
from metadata.pools import AllPages, HitPolicy, PoolSpec, TrailingPages, write_stages

log = logging.getLogger(__name__)

NO_SLOT: Final = -1
CHUNK_PAGES: Final = 256

BoolArray: TypeAlias = NDArray[np.bool_]
Slots: TypeAlias = Mapping[str, NDArray[np.int64]]
"""Pool name -> page slot of each page of the call, int64 (pages,); `NO_SLOT` where a page has none."""

Progress: TypeAlias = Callable[[str, int], None]
"""Told a pool's name and how many more of its pages were moved."""

LossReason: TypeAlias = Literal["gone", "size_mismatch", "timeout", "checksum"]

_REASONS: Final[dict[StoreCode, LossReason]] = {
    StoreCode.MISSING: "gone",
    StoreCode.UNCONFIRMED: "gone",
    StoreCode.SIZE_MISMATCH: "size_mismatch",
    StoreCode.CHECKSUM: "checksum",
    StoreCode.TRANSFER_FAILED: "timeout",
    StoreCode.LEASE_LOST: "timeout",
}
"""What a failed read says of the object. Codes left out say something of *us* (memory, store away): the claim
stands."""


class ControlPlane(Protocol):
    """What the mover tells the control plane."""

    def commit(
        self, namespace_id: str, page_hashes: PageHashes, stored: Mapping[str, control.StoredPool]
    ) -> control.CommitResult:
        """Claim what is stored."""

    def missing(
        self,
        namespace_id: str,
        page_hashes: PageHashes,
        generation: bytes | None,
        missing: Mapping[str, control.MissingPool],
    ) -> control.MissingResult:
        """Report what could not be read."""


@dataclass(frozen=True, slots=True)
class BackedUp:
    """What a back up did.

    Attributes:
        stored: pool name -> pages whose every object of this rank is confirmed.
        bytes: bytes of those pages.
        committed: pages that the index took.
        rejected: (page, pool) that the index did not take.
        transfers_done: every page of every pool that was asked for is stored and committed (O4).
    """

    stored: dict[str, BoolArray]
    bytes: int
    committed: int
    rejected: list[tuple[int, str]]
    transfers_done: bool


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What a prefetch did.

    Attributes:
        pages: the restored length; 0 is a miss.
        read: pool name -> pages that are in their slots.
        bytes: bytes read.
        lost: pool name -> promised pages that could not be read.
        transfers_done: the asked length was restored (O4).
    """

    pages: int
    read: dict[str, BoolArray]
    bytes: int
    lost: dict[str, BoolArray]
    transfers_done: bool


@dataclass
class _Reading:
    """The state of one prefetch, over the promised pages.

    Attributes:
        hashes: hashes of the call's pages.
        slots: where to put them.
        good: pages that are read or not yet known to be lost.
        read: pages that are in their slots.
        failed: pages that could not be read.
        reasons: why, where the object is to blame.
    """

    hashes: PageHashes
    slots: Slots
    good: dict[str, BoolArray]
    read: dict[str, BoolArray]
    failed: dict[str, BoolArray]
    reasons: dict[str, dict[int, LossReason]]

    @classmethod
    def of(cls, hashes: PageHashes, slots: Slots, pages: int) -> _Reading:
        """Return the state before the first read."""
        none = {name: np.zeros(pages, np.bool_) for name in slots}
        return cls(
            hashes,
            slots,
            good={name: ~mask for name, mask in none.items()},
            read=none,
            failed={name: mask.copy() for name, mask in none.items()},
            reasons={name: {} for name in slots},
        )

    def unread(self, name: str, pages: range) -> NDArray[np.int64]:
        """Return those of `pages` that are neither read nor lost."""
        found = np.flatnonzero(self.good[name] & ~self.read[name])
        return found[(found >= pages.start) & (found < pages.stop)].astype(np.int64)

    def lose(self, name: str, page: int, reason: LossReason | None) -> None:
        """Note that a page could not be read; without a reason the fault is ours and the claim stands."""
        self.good[name][page] = False
        self.failed[name][page] = True
        if reason is not None:
            self.reasons[name][page] = reason


class PageMover:
    """Moves the pages of one rank. Not for two threads at once."""

    def __init__(
        self, store: ObjectStore, control_plane: ControlPlane, namespace_id: str, pools: Sequence[BoundPool]
    ) -> None:
        self._store = store
        self._control = control_plane
        self._namespace_id = namespace_id
        self._pools = {p.name: p for p in pools}
        self._specs: dict[str, PoolSpec] = {p.name: p.pool.spec for p in pools}
        # A rank that owns no shard of a pool (another pipeline stage's) has nothing of it to move.
        stages = [[n for n in stage if self._pools[n].hosts] for stage in write_stages(self._specs)]
        self._stages = [stage for stage in stages if stage]
        self._policies: dict[str, HitPolicy] = {
            n: self._specs[n].hit_policy for stage in self._stages for n in stage
        }

    def back_up(self, page_hashes: PageHashes, slots: Slots, progress: Progress | None = None) -> BackedUp:
        """Store pages, confirm them, and tell the index.

        Args:
            page_hashes: pages of the call, in order.
            slots: where their bytes are; a pool or page without a slot is left alone.
            progress: called after every chunk and pool.

        Raises:
            InvalidInput: slots that do not fit the call.
            CaketinError: the control plane did not take the commit; what is stored stays stored.
        """
        self._check_slots(page_hashes, slots)
        pages = len(page_hashes)
        stored = {name: np.zeros(pages, np.bool_) for name in slots}
        committed, rejected = 0, []
        for chunk in _chunks(pages):
            self._store_chunk(page_hashes, slots, chunk, stored, progress)
            result = self._commit(page_hashes, chunk, stored)
            committed += result.committed
            rejected += [(chunk.start + r.page, r.pool) for r in result.rejected]
        asked = {name: slots[name] != NO_SLOT for name in slots}
        return BackedUp(
            stored=stored,
            bytes=sum(int(mask.sum()) * self._page_bytes(name) for name, mask in stored.items()),
            committed=committed,
            rejected=rejected,
            transfers_done=not rejected and all(bool((stored[n] == asked[n]).all()) for n in slots),
        )

    def prefetch(
        self,
        page_hashes: PageHashes,
        promise: control.LookupResult,
        slots: Slots,
        progress: Progress | None = None,
    ) -> Prefetched:
        """Read the longest prefix that the lookup promised and the store still has.

        Args:
            page_hashes: pages of the call, in order.
            promise: the lookup's answer for exactly these pages.
            slots: where to put them; a trailing pool needs slots for its window at every length that it may
                come to.
            progress: called after every chunk and pool.

        Raises:
            InvalidInput: slots that do not fit the call.
        """
        self._check_slots(page_hashes, slots)
        asked = promise.hit_pages
        reading = _Reading.of(page_hashes, slots, asked)
        self._renew_leases(reading, asked)
        pages = self._read_prefix(reading, promise, asked, progress)
        lost = {name: mask for name, mask in reading.failed.items() if mask.any()}
        if lost:
            self._report(reading, promise.generation)
        read = {name: mask & (np.arange(asked) < pages) for name, mask in reading.read.items()}
        return Prefetched(
            pages=pages,
            read=read,
            bytes=sum(int(m.sum()) * self._page_bytes(n) for n, m in reading.read.items()),
            lost=lost,
            transfers_done=pages == asked and asked > 0,
        )

    def _store_chunk(
        self,
        page_hashes: PageHashes,
        slots: Slots,
        chunk: slice,
        stored: dict[str, BoolArray],
        progress: Progress | None,
    ) -> None:
        hashes = page_hashes[chunk]
        alive = np.ones(len(hashes), np.bool_)
        for number, stage in enumerate(self._stages):
            here = {n: slots[n][chunk] for n in stage if n in slots}
            wanted = {n: np.flatnonzero(alive & (at != NO_SLOT)) for n, at in here.items()}
            done = self._put([PoolPages(self._pools[n], p, here[n][p]) for n, p in wanted.items()], hashes)
            for name, pages in done.items():
                stored[name][chunk.start + pages] = True
                if progress is not None:
                    progress(name, len(pages))
            if number + 1 < len(self._stages):
                alive &= self._confirmed(stage, hashes, here, done, alive)

    def _put(self, members: Sequence[PoolPages], page_hashes: PageHashes) -> dict[str, NDArray[np.int64]]:
        """Put pages; return for each pool those whose every object is confirmed (O3)."""
        batch = StageBatch(self._namespace_id, page_hashes, tuple(m for m in members if m.pages.size))
        if not batch.members:
            return {}
        codes = self._put_confirmed(batch.keys, batch.buffers, batch.groups)
        wrong = np.flatnonzero(codes == StoreCode.SIZE_MISMATCH)
        if wrong.size:
            # Somebody's object of another size sits under our key: it is worth nothing to anybody.
            log.warning("removing objects of a wrong size: %s", describe_failures(batch.keys, codes))
            bad = [batch.keys[i] for i in wrong]
            self._store.remove(bad)
            codes[wrong] = self._put_confirmed(bad, batch.buffers[wrong], [batch.groups[i] for i in wrong])
        if codes.any():
            log.warning("not everything was stored: %s", describe_failures(batch.keys, codes))
        return batch.whole(codes)

    def _put_confirmed(
        self, keys: Sequence[str], buffers: ObjectBuffers, groups: Sequence[str]
    ) -> NDArray[np.int8]:
        codes = self._store.put(keys, buffers, groups)
        return np.where(codes == StoreCode.OK, self._store.confirm(keys, buffers.sizes), codes)

    def _confirmed(
        self,
        stage: Sequence[str],
        page_hashes: PageHashes,
        slots: Slots,
        done: Mapping[str, NDArray[np.int64]],
        alive: BoolArray,
    ) -> BoolArray:
        """Return the pages that have every pool of the stage: put just now, or stored by an earlier call."""
        complete = alive.copy()
        unseen: list[PoolPages] = []
        for name in stage:
            here = np.zeros(len(alive), np.bool_)
            here[done.get(name, np.empty(0, np.int64))] = True
            without_slot = slots[name] == NO_SLOT if name in slots else np.ones(len(alive), np.bool_)
            asked = np.flatnonzero(alive & without_slot)
            if asked.size:
                unseen.append(PoolPages(self._pools[name], asked))
                here |= without_slot
            complete &= here
        if unseen:
            batch = StageBatch(self._namespace_id, page_hashes, tuple(unseen))
            found = batch.whole(self._store.confirm(batch.keys, batch.sizes))
            for member in unseen:
                complete[np.setdiff1d(member.pages, found[member.pool.name])] = False
        return complete

    def _commit(
        self, page_hashes: PageHashes, chunk: slice, stored: Mapping[str, BoolArray]
    ) -> control.CommitResult:
        claims = {
            name: control.StoredPool(
                pages=_page_set(mask[chunk]), shards=list(self._pools[name].pool.owned_shards)
            )
            for name, mask in stored.items()
            if mask[chunk].any()
        }
        if not claims:
            return control.CommitResult(committed=0, complete=0, rejected=[])
        return self._control.commit(self._namespace_id, page_hashes[chunk], claims)

    def _renew_leases(self, reading: _Reading, pages: int) -> None:
        """Lease one object of every promised page's group, so that it stays while we read (T3)."""
        name = self._stages[0][0]
        if name not in reading.slots or not pages:
            return
        pool = self._pools[name]
        keys = pool.keys(self._namespace_id, reading.hashes[:pages])[:: pool.objects_per_page]
        for page in np.flatnonzero(~self._store.exists(keys)).tolist():
            reading.lose(name, page, "gone")

    def _read_prefix(
        self, reading: _Reading, promise: control.LookupResult, asked: int, progress: Progress | None
    ) -> int:
        """Read stage by stage; return the restored length."""
        limit = self._allowed(reading, promise, asked)
        for stage in self._stages:
            whole = [n for n in stage if n in reading.slots and isinstance(self._policies[n], AllPages)]
            self._read(reading, dict.fromkeys(whole, range(limit)), progress)
            limit = self._allowed(reading, promise, limit)
        # A window that cannot be read leaves shorter lengths, whose windows are other pages (O5).
        while limit:
            self._read(reading, self._windows(reading, limit), progress)
            left = self._allowed(reading, promise, limit)
            if left == limit:
                break
            limit = left
        return limit

    def _windows(self, reading: _Reading, length: int) -> dict[str, range]:
        """Return the window of every trailing pool at a length."""
        return {
            name: range(max(0, length - policy.window_pages), length)
            for name, policy in self._policies.items()
            if name in reading.slots and isinstance(policy, TrailingPages)
        }

    def _read(self, reading: _Reading, wanted: Mapping[str, range], progress: Progress | None) -> None:
        """Read those of the wanted pages that are neither read nor lost."""
        at = {name: reading.unread(name, pages) for name, pages in wanted.items()}
        longest = max((pages.size for pages in at.values()), default=0)
        for start in range(0, longest, CHUNK_PAGES):
            some = {name: pages[start : start + CHUNK_PAGES] for name, pages in at.items()}
            members = [PoolPages(self._pools[n], p, reading.slots[n][p]) for n, p in some.items() if p.size]
            batch = StageBatch(self._namespace_id, reading.hashes, tuple(members))
            codes = self._store.get(batch.keys, batch.buffers)
            if codes.any():
                log.info("not everything was read: %s", describe_failures(batch.keys, codes))
            for name, worst in batch.by_page(codes).items():
                good = worst == StoreCode.OK
                reading.read[name][some[name][good]] = True
                for page, code in zip(some[name][~good].tolist(), worst[~good].tolist(), strict=True):
                    reading.lose(name, page, _REASONS.get(StoreCode(code)))
                if progress is not None:
                    progress(name, int(good.sum()))

    def _allowed(self, reading: _Reading, promise: control.LookupResult, at_most: int) -> int:
        """Return the largest length that the lookup promised and the pages read so far allow (H5)."""
        policies = {n: p for n, p in self._policies.items() if n in reading.slots}
        now = restorable(reading.good, policies)
        promised = Restorable(promise.hit_pages, tuple(promise.restorable), {}, 0, None)
        length = at_most
        while length and not (now.allows(length) and promised.allows(length)):
            length = min(now.largest_at_most(length), promised.largest_at_most(length), length - 1)
        return length

    def _report(self, reading: _Reading, generation: bytes) -> None:
        """Tell the control plane what is gone; it not answering changes nothing of what was read."""
        for reason in ("gone", "size_mismatch", "timeout", "checksum"):
            missing: dict[str, control.MissingPool] = {}
            for name, pages in reading.reasons.items():
                mask = np.zeros(len(reading.hashes), np.bool_)
                mask[[p for p, why in pages.items() if why == reason]] = True
                if mask.any():
                    missing[name] = control.MissingPool(
                        pages=page_runs(mask), shards=list(self._pools[name].pool.owned_shards), reason=reason
                    )
            if missing:
                try:
                    self._control.missing(self._namespace_id, reading.hashes, generation, missing)
                except CaketinError as error:
                    log.warning("lost pages could not be reported: %s", error)

    def _page_bytes(self, name: str) -> int:
        return int(self._pools[name].object_sizes.sum())

    def _check_slots(self, page_hashes: PageHashes, slots: Slots) -> None:
        errors = []
        for name, given in slots.items():
            if name not in self._pools or self._specs[name].logical:
                errors.append(
                    FieldError(f"slots.{name}", "unknown_pool", "is no pool of this rank with bytes")
                )
            elif given.shape != (len(page_hashes),):
                detail = f"has shape {given.shape}, the call has {len(page_hashes)} pages"
                errors.append(FieldError(f"slots.{name}", "bad_shape", detail))
        if errors:
            raise InvalidInput("the slots do not fit the call", errors)


def _chunks(pages: int) -> Iterator[slice]:
    for start in range(0, pages, CHUNK_PAGES):
        yield slice(start, min(start + CHUNK_PAGES, pages))


def _page_set(mask: BoolArray) -> control.PageSet:
    return "all" if mask.all() else page_runs(mask)
