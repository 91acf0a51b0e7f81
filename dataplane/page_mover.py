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
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataplane.bound_pool import BoundPool
from dataplane.messages import control
from dataplane.object_store import ObjectStore, StoreCode, describe_failures
from metadata.codec import PageHashes
from metadata.errors import CaketinError, FieldError, InvalidInput
from metadata.hit_policy import Restorable, restorable
from metadata.object_keys import group_id
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
    """The state of one prefetch."""

    hashes: PageHashes
    slots: Slots
    good: dict[str, BoolArray]
    """Pages that are read or, for a trailing pool, not yet known to be lost."""
    read: dict[str, BoolArray]
    reasons: dict[str, dict[int, LossReason]]
    failed: dict[str, BoolArray] = field(default_factory=dict)


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
        reading = _Reading(
            hashes=page_hashes,
            slots=slots,
            good={name: np.ones(asked, np.bool_) for name in slots},
            read={name: np.zeros(asked, np.bool_) for name in slots},
            reasons={name: {} for name in slots},
            failed={name: np.zeros(asked, np.bool_) for name in slots},
        )
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
        alive = np.ones(chunk.stop - chunk.start, np.bool_)
        for stage in self._stages:
            confirmed = alive.copy()
            for name in stage:
                given = slots.get(name)
                here = given[chunk] if given is not None else np.full(len(alive), NO_SLOT)
                wanted = alive & (here != NO_SLOT)
                done = self._put(name, page_hashes[chunk], here, wanted)
                if given is not None:
                    stored[name][chunk] = done
                    if progress is not None:
                        progress(name, int(done.sum()))
                if stage is not self._stages[-1]:
                    # A page without a slot here may have been stored by an earlier call: the store knows.
                    confirmed &= done | self._confirm(name, page_hashes[chunk], alive & (here == NO_SLOT))
            alive = confirmed

    def _put(
        self, name: str, page_hashes: PageHashes, slots: NDArray[np.int64], wanted: BoolArray
    ) -> BoolArray:
        """Put the wanted pages of a pool; return those whose every object is confirmed (O3)."""
        done = np.zeros(len(wanted), np.bool_)
        at = np.flatnonzero(wanted)
        if not at.size:
            return done
        pool = self._pools[name]
        hashes = [page_hashes[i] for i in at.tolist()]
        keys = pool.keys(self._namespace_id, hashes)
        buffers = pool.buffers(slots[at])
        groups = [g for h in hashes for g in [group_id(self._namespace_id, h)] * pool.objects_per_page]
        codes = self._store.put(keys, buffers, groups)
        codes = np.where(codes == StoreCode.OK, self._store.confirm(keys, buffers.sizes), codes)
        wrong = np.flatnonzero(codes == StoreCode.SIZE_MISMATCH)
        if wrong.size:
            # Somebody's object of another size sits under our key: it is worth nothing to anybody.
            log.warning("removing objects of a wrong size: %s", describe_failures(keys, codes))
            bad = [keys[i] for i in wrong]
            self._store.remove(bad)
            again = self._store.put(bad, buffers[wrong], [groups[i] for i in wrong])
            codes[wrong] = np.where(
                again == StoreCode.OK, self._store.confirm(bad, buffers.sizes[wrong]), again
            )
        if codes.any():
            log.warning("pool %s was not stored completely: %s", name, describe_failures(keys, codes))
        done[at] = _whole_pages(codes, pool.objects_per_page)
        return done

    def _confirm(self, name: str, page_hashes: PageHashes, wanted: BoolArray) -> BoolArray:
        """Return which of the wanted pages the store holds completely already."""
        found = np.zeros(len(wanted), np.bool_)
        at = np.flatnonzero(wanted)
        if at.size:
            pool = self._pools[name]
            keys = pool.keys(self._namespace_id, [page_hashes[i] for i in at.tolist()])
            codes = self._store.confirm(keys, np.tile(pool.object_sizes, at.size))
            found[at] = _whole_pages(codes, pool.objects_per_page)
        return found

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
        for page in np.flatnonzero(~self._store.exists(keys)):
            _mark_lost(reading, name, int(page), "gone")

    def _read_prefix(
        self, reading: _Reading, promise: control.LookupResult, asked: int, progress: Progress | None
    ) -> int:
        """Read stage by stage; return the restored length."""
        limit = self._allowed(reading, promise, asked)
        for name in (n for stage in self._stages for n in stage):
            if name in reading.slots and isinstance(self._policies[name], AllPages):
                self._read(reading, name, range(limit), progress)
                limit = self._allowed(reading, promise, limit)
        # A window that cannot be read leaves shorter lengths, whose windows are other pages (O5).
        while limit:
            for name in self._trailing(reading):
                window = self._window(name)
                self._read(reading, name, range(max(0, limit - window), limit), progress)
            left = self._allowed(reading, promise, limit)
            if left == limit:
                break
            limit = left
        return limit

    def _read(self, reading: _Reading, name: str, pages: range, progress: Progress | None) -> None:
        """Read those of `pages` that are neither read nor lost."""
        open_pages = reading.good[name] & ~reading.read[name]
        at = np.array([i for i in pages if open_pages[i]], np.int64)
        pool = self._pools[name]
        for start in range(0, at.size, CHUNK_PAGES):
            some = at[start : start + CHUNK_PAGES]
            keys = pool.keys(self._namespace_id, [reading.hashes[i] for i in some.tolist()])
            codes = self._store.get(keys, pool.buffers(reading.slots[name][some]))
            whole = _whole_pages(codes, pool.objects_per_page)
            reading.read[name][some[whole]] = True
            for row in np.flatnonzero(~whole):
                worst = codes[row * pool.objects_per_page : (row + 1) * pool.objects_per_page].max()
                _mark_lost(reading, name, int(some[row]), _REASONS.get(StoreCode(int(worst))))
            if not whole.all():
                log.info("pool %s was not read completely: %s", name, describe_failures(keys, codes))
            if progress is not None:
                progress(name, int(whole.sum()))

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

    def _trailing(self, reading: _Reading) -> list[str]:
        return [n for n, p in self._policies.items() if n in reading.slots and isinstance(p, TrailingPages)]

    def _window(self, name: str) -> int:
        policy = self._policies[name]
        return policy.window_pages if isinstance(policy, TrailingPages) else 0

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


def _mark_lost(reading: _Reading, name: str, page: int, reason: LossReason | None) -> None:
    reading.good[name][page] = False
    reading.failed[name][page] = True
    if reason is not None:
        reading.reasons[name][page] = reason


def _whole_pages(codes: NDArray[np.int8], objects_per_page: int) -> BoolArray:
    whole: BoolArray = (codes.reshape(-1, objects_per_page) == StoreCode.OK).all(axis=1)
    return whole


def _chunks(pages: int) -> Iterator[slice]:
    for start in range(0, pages, CHUNK_PAGES):
        yield slice(start, min(start + CHUNK_PAGES, pages))


def _page_set(mask: BoolArray) -> control.PageSet:
    return "all" if mask.all() else page_runs(mask)
