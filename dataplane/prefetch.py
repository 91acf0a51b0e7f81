"""Prefetch: pages from the store to host memory; what was *read* decides what is restored (O5, T1-T3).

In the order of the stages: pools that need every page, chunk by chunk until one is lost or time is up; then
the windows at the length that is left, and where a window cannot be read, those of the next shorter length;
at last pools that gate nothing. The answer is the longest promised length that the pages in their slots
allow, by the very function that made the promise (H5). What could not be read is reported at the end, each
page once, fenced by the generation that the lookup gave.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from dataplane.beside import Beside
from dataplane.control_plane import ControlPlane
from dataplane.lost_pages import LostPages
from dataplane.messages import control
from dataplane.object_store import ObjectStore, StoreCode, StoreUnavailable, describe_failures
from dataplane.read_log import ReadLog
from dataplane.stage_batch import PoolPages, StageBatch
from dataplane.transfer import CHUNK_BYTES, NO_SLOT, BoolArray, PageArray, Progress, RankPools, Slots, chunks
from dataplane.transfer_limits import WINDOW_SHARE, Clock, TransferLimits, TransferTimedOut
from metadata.codec import PageHashes
from metadata.errors import CaketinError, FieldError, InvalidInput
from metadata.hit_policy import restorable
from metadata.page_runs import runs_to_mask
from metadata.pools import AllPages, BlockGroups, HitPolicy, TrailingPages

log = logging.getLogger(__name__)

FALL_BACK_SECONDS: Final = 2.0
"""How long windows of shorter lengths are tried. A dead storage node blocks each read for a minute; without a
bound, a prefix of a thousand lengths would be a thousand of them."""


_LOOKS: Final = 4
"""How many lengths are looked at for their windows before the first read; the reads look at the others."""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What a prefetch did.

    Attributes:
        pages: the restored length; 0 is a miss.
        read: pool name -> pages of the restored length that are in their slots, bool (pages of the call,).
        bytes: bytes of all pages read.
        lost: pool name -> promised pages that the store no longer has as promised, bool (pages of the call,).
        error: what cut the reading short; None when nothing did.
        transfers_done: the promised length was restored (O4).
        leased_pages: the longest promised length that the store had and leased before the first read. This is
            what may be told to an engine in advance: index and store (T3).
    """

    pages: int
    read: dict[str, BoolArray]
    bytes: int
    lost: dict[str, BoolArray]
    error: CaketinError | None
    transfers_done: bool
    leased_pages: int = 0


@dataclass(slots=True)
class _Lease:
    """Objects that hold a lease on pages.

    Attributes:
        name: of the pool.
        pages: int64 (n,).
        keys: of each page those of some shards and parts, in order.
        shape: how many shards and parts of a page that is, the first ones.
    """

    name: str
    pages: PageArray
    keys: list[str]
    shape: tuple[int, int]

    def keep(self, mask: BoolArray) -> None:
        """Forget the pages that are not in the mask."""
        if not mask.all():
            kept = np.repeat(mask, self.shape[0] * self.shape[1]).tolist()
            self.keys = [key for key, keep in zip(self.keys, kept, strict=True) if keep]
            self.pages = self.pages[mask]


class Prefetch:
    """One prefetch."""

    def __init__(
        self,
        store: ObjectStore,
        control_plane: ControlPlane,
        pools: RankPools,
        *,
        page_hashes: PageHashes,
        promise: control.LookupResult,
        slots: Slots,
        progress: Progress | None = None,
        windows: Mapping[str, int] | None = None,
        limits: TransferLimits | None = None,
        calls: ReadLog | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Take what is to be read; see `PageMover.prefetch`.

        Raises:
            InvalidInput: slots or windows that do not fit the call, a promise that is none for these pages.
        """
        self._store = store
        self._control = control_plane
        self._pools = pools
        self._hashes = page_hashes
        self._slots = pools.checked_slots(page_hashes, slots)
        self._progress = progress
        self._calls = ReadLog(self._slots, len(page_hashes)) if calls is None else calls
        self._clock = clock
        self._limits = limits or TransferLimits()
        self._share = 1.0
        self._promise = promise
        self._asked = promise.hit_pages
        self._promised = _promised_lengths(promise, len(page_hashes))
        self._policies = _policies_of_call(pools.policies, self._slots, windows or {})
        self._gates = {n: p for n, p in self._policies.items() if not isinstance(p, BlockGroups)}
        self._check_wanted()
        # Pages that have a slot and are not known to be lost; pages whose bytes are in their slots.
        self._readable = {n: (at != NO_SLOT)[: self._asked] for n, at in self._slots.items()}
        self._read = {n: np.zeros(self._asked, np.bool_) for n in self._slots}
        self._lost = LostPages(pools, page_hashes)
        self._timed_out: TransferTimedOut | None = None
        self._leased: list[_Lease] = []
        self._leased_at = 0.0
        self._leased_pages = 0

    def run(self) -> Prefetched:
        """Read, report what is lost, and say what is restored."""
        error: CaketinError | None = None
        try:
            self._read_all()
        except CaketinError as cut:
            log.warning("a prefetch was cut short: %s", cut)
            error = cut
        else:
            error = self._timed_out
        finally:
            self._lost.report(self._control, self._promise.generation or None)
            self._lost.remove_damaged(self._store)
        pages = self._longest(self._read, self._asked)
        inside = np.arange(len(self._hashes)) < pages
        read = {n: np.zeros(len(self._hashes), np.bool_) for n in self._read}
        for name, mask in self._read.items():
            read[name][: self._asked] = mask
        return Prefetched(
            pages=pages,
            read={n: mask & inside for n, mask in read.items()},
            bytes=sum(int(m.sum()) * self._pools.bound[n].bytes_per_page for n, m in read.items()),
            lost=self._lost.pages(),
            error=error,
            transfers_done=error is None and 0 < pages == self._asked,
            leased_pages=self._leased_pages,
        )

    def _read_all(self) -> None:
        if not self._asked:
            return
        self._take_leases()
        limit = self._leased_pages = self._longest(self._readable, self._asked)
        limit = self._read_whole(limit)
        limit = self._read_windows(limit)
        if self._timed_out is None:
            self._read_ungated(limit)

    def _read_whole(self, limit: int) -> int:
        """Read pools that need every page: a chunk through all stages, then the next.

        So a transfer that runs out of time has read a prefix of all of them.
        """
        windows = [n for n, p in self._gates.items() if isinstance(p, TrailingPages)]
        self._share = 1 - WINDOW_SHARE if windows else 1.0
        stages = [
            [n for n in stage if isinstance(self._policies.get(n), AllPages)] for stage in self._pools.stages
        ]
        together = sum(self._pools.bound[n].bytes_per_page for names in stages for n in names)
        most = max(1, CHUNK_BYTES // max(1, together))
        steps = [(names, chunk) for chunk in chunks(limit, most) for names in stages if names]
        made: Beside[StageBatch] | None = None
        try:
            for step, (names, chunk) in enumerate(steps):
                batch, made = made, None
                if step + 1 < len(steps):
                    # Its keys and addresses take as long as some megabytes take to move.
                    made = Beside(partial(self._batch_of, *steps[step + 1]), "prefetch")
                pages = range(chunk.start, min(chunk.stop, limit))
                limit = self._read_pages(dict.fromkeys(names, pages), limit, batch)
                # A renewed lease may have shown that a page further on is gone.
                limit = self._longest(self._readable, limit)
        except TransferTimedOut as timed_out:
            log.warning("a prefetch was cut short: %s", timed_out)
            self._timed_out = timed_out
            limit = self._longest(self._read | {n: self._readable[n] for n in windows}, limit)
        finally:
            self._share = 1.0
        return limit

    def _read_windows(self, limit: int) -> int:
        """Read the windows at `limit`, or at the longest shorter length whose windows can be read (O5)."""
        start = self._clock()
        tried = 0
        while limit and limit != tried:
            if tried and self._clock() - start > FALL_BACK_SECONDS:
                log.warning("windows of shorter prefixes are not tried any more: reads take too long")
                return 0
            tried = limit
            for stage in self._pools.stages:
                limit = self._read_pages(self._windows(stage, tried), limit)
                if limit != tried:
                    break
        return limit

    def _windows(self, stage: list[str], length: int) -> dict[str, range]:
        return {
            name: range(max(0, length - policy.window_pages), length)
            for name in stage
            if isinstance(policy := self._policies.get(name), TrailingPages)
        }

    def _read_ungated(self, limit: int) -> None:
        """Read what the promise says of pools that gate nothing, up to the first page that is lost."""
        for name, policy in self._policies.items():
            if isinstance(policy, BlockGroups):
                covered = min(limit, self._promise.pools.get(name, 0))
                self._read_pages({name: range(covered)}, limit)

    def _read_pages(
        self, wanted: Mapping[str, range], limit: int, made: Beside[StageBatch] | None = None
    ) -> int:
        """Read those of the wanted pages that are readable and not read yet, until a gating one is lost.

        Args:
            wanted: by pool name.
            limit: the longest length that is possible so far.
            made: a batch of these pages, where one was made beforehand; used if it is still the right one.

        Returns:
            The longest length that is still possible, at most `limit`.
        """
        at = {n: self._unread(n, pages) for n, pages in wanted.items()}
        for chunk in chunks(max((pages.size for pages in at.values()), default=0)):
            self._keep_leases()
            batch = None if made is None else made.result()
            here = {n: pages[chunk] for n, pages in at.items()}
            if batch is None or not _is_of(batch, here):
                batch = self._batch(here)
            if not self._read_batch(batch):
                return self._longest(self._readable, limit)
        return limit

    def _batch_of(self, names: Sequence[str], chunk: slice) -> StageBatch:
        """Return a batch that is ready to be moved, of what is not read yet of a chunk."""
        batch = self._batch({n: self._unread(n, range(chunk.start, chunk.stop)) for n in names})
        batch.make()
        return batch

    def _batch(self, pages: Mapping[str, PageArray]) -> StageBatch:
        members = [
            PoolPages(self._pools.bound[n], at, self._slots[n][at]) for n, at in pages.items() if at.size
        ]
        return StageBatch(self._pools.namespace_id, self._hashes, tuple(members))

    def _unread(self, name: str, pages: range) -> PageArray:
        found = np.flatnonzero(self._readable[name] & ~self._read[name])
        return found[(found >= pages.start) & (found < pages.stop)]

    def _read_batch(self, batch: StageBatch) -> bool:
        """Read a batch into its slots; return whether all of it was read."""
        self._limits.check(self._share)
        self._calls.begin(batch.members)
        codes = self._store.get(batch.keys, batch.buffers)
        lease_lost = codes == StoreCode.LEASE_LOST
        again = np.flatnonzero(lease_lost)
        if again.size:
            codes[again] = self._store.get([batch.keys[i] for i in again.tolist()], batch.buffers[again])
        self._calls.end(batch, codes, lease_lost)
        if codes.any():
            log.warning("not everything was read: %s", describe_failures(batch.keys, codes))
        keys = batch.by_shard(np.array(batch.keys, dtype=object)) if codes.any() else None
        for member, outcome in batch.by_shard(codes):
            name = member.pool.name
            good = (outcome == StoreCode.OK).all(axis=(1, 2))
            self._read[name][member.pages] = good
            self._readable[name][member.pages] = good
            if keys is not None:
                self._lost.note(member, outcome, next(keys)[1])
            if self._progress is not None:
                self._progress(name, int(good.sum()))
        if (codes == StoreCode.UNAVAILABLE).any():
            # It says nothing of the objects, so there is no shorter length to try.
            raise StoreUnavailable(f"the prefetch ends early: {StoreCode.UNAVAILABLE.advice}")
        return not codes.any()

    def _longest(self, presence: Mapping[str, BoolArray], at_most: int) -> int:
        """Return the longest promised length that the pages in `presence` allow (H5), or 0."""
        lengths = self._promised[: at_most + 1]
        if self._gates and at_most:
            now = restorable({n: presence[n][:at_most] for n in self._gates}, self._gates)
            lengths = lengths & runs_to_mask(now.runs, at_most + 1)
        found = np.flatnonzero(lengths)
        return int(found[-1]) if found.size else 0

    def _take_leases(self) -> None:
        """Check and lease, before the first read, what the promise stands on (T3).

        One object of every promised page's group; and of the windows at the promised length every object: a
        group is a hint, and a window was seen to go while the rest of its page stayed. Where one is gone, the
        windows of the next shorter length are looked at.
        """
        whole = next((n for n, p in self._gates.items() if isinstance(p, AllPages)), None)
        looks = [] if whole is None else [self._lease(whole, range(self._asked), every_object=False)]
        limit = self._asked
        for _ in range(_LOOKS):
            looks += [
                self._lease(n, pages, every_object=True)
                for n, pages in self._windows(list(self._gates), limit).items()
            ]
            self._look(looks)
            self._leased += looks
            looks, before, limit = [], limit, self._longest(self._readable, limit)
            if limit == before:
                return

    def _lease(self, name: str, pages: range, *, every_object: bool) -> _Lease:
        pool, at = self._pools.bound[name], np.arange(pages.start, pages.stop)
        keys = pool.keys(self._pools.namespace_id, self._hashes[pages.start : pages.stop])
        if every_object:
            return _Lease(name, at, keys, (len(pool.shards), pool.parts))
        return _Lease(name, at, keys[:: pool.objects_per_page], (1, 1))

    def _keep_leases(self) -> None:
        """Renew after a third of a lease: a transfer may take longer than one."""
        lease = self._store.lease_seconds
        if lease is not None and self._leased and self._clock() - self._leased_at >= lease / 3:
            self._look(self._leased)

    def _look(self, looks: Sequence[_Lease]) -> None:
        """Ask the store for what is leased, which renews it; what is gone is lost, if it was not read yet."""
        self._limits.check(self._share)
        self._leased_at = self._clock()
        there = self._store.exists([key for look in looks for key in look.keys])
        start = 0
        for look in looks:
            stop = start + len(look.keys)
            objects = there[start:stop].reshape(-1, *look.shape)
            shards: BoolArray = np.asarray(objects.all(axis=2))
            start = stop
            unread = ~self._read[look.name][look.pages]
            for shard in range(look.shape[0]):
                self._lost.gone(look.name, look.pages[~shards[:, shard] & unread], shard)
            whole: BoolArray = np.asarray(shards.all(axis=1))
            self._readable[look.name][look.pages[~whole & unread]] = False
            look.keep(whole)

    def _check_wanted(self) -> None:
        """Refuse a call that has no place for something that the promise makes it read."""
        errors = []
        if self._asked:
            for name, policy in self._pools.policies.items():
                gates = name in self._promise.pools and not isinstance(policy, BlockGroups)
                if gates and name not in self._slots:
                    detail = "is missing: the lookup promised a length that needs the pool"
                    errors.append(FieldError(f"slots.{name}", "missing", detail))
        for name, policy in self._gates.items():
            window = policy.window_pages if isinstance(policy, TrailingPages) else self._asked
            first = max(0, self._asked - window)
            absent = np.flatnonzero(self._slots[name][first : self._asked] == NO_SLOT)
            if absent.size:
                detail = (
                    f"has no slot; the promised {self._asked} pages need pages {first} to {self._asked - 1}"
                )
                errors.append(FieldError(f"slots.{name}[{first + int(absent[0])}]", "no_slot", detail))
        if errors:
            raise InvalidInput("the slots do not hold what is promised", errors)


def _is_of(batch: StageBatch, pages: Mapping[str, PageArray]) -> bool:
    """Return whether a batch has these pages and no others."""
    has = {m.pool.name: m.pages for m in batch.members}
    return has.keys() == {n for n, at in pages.items() if at.size} and all(
        np.array_equal(has[n], at) for n, at in pages.items() if at.size
    )


def _promised_lengths(promise: control.LookupResult, pages: int) -> BoolArray:
    """Return which lengths are promised: entry n is length n, 0 to `hit_pages`."""
    errors = []
    if promise.queried_pages != pages:
        detail = f"is {promise.queried_pages}, the call has {pages} pages"
        errors.append(FieldError("promise.queried_pages", "mismatch", detail))
    if promise.hit_pages > pages:
        detail = f"is {promise.hit_pages}, the call has {pages} pages"
        errors.append(FieldError("promise.hit_pages", "out_of_range", detail))
    if len(promise.generation) not in {0, pages}:
        detail = f"has {len(promise.generation)} bytes, one a page are needed, or none"
        errors.append(FieldError("promise.generation", "mismatch", detail))
    last = promise.restorable[-1][1] if promise.restorable else 0
    if last != promise.hit_pages or (promise.restorable and promise.restorable[0][0] < 1):
        detail = f"are {promise.restorable[:3]}... for {promise.hit_pages} hit pages"
        errors.append(FieldError("promise.restorable", "mismatch", detail))
    if errors:
        raise InvalidInput("the promise is not for these pages", errors)
    return runs_to_mask(promise.restorable, promise.hit_pages + 1, field="promise.restorable")


def _policies_of_call(
    registered: Mapping[str, HitPolicy], slots: Slots, windows: Mapping[str, int]
) -> dict[str, HitPolicy]:
    """Return the policy of each pool that has slots, in the order of the stages."""
    policies = {n: p for n, p in registered.items() if n in slots}
    errors = []
    for name, pages in windows.items():
        if not isinstance(policies.get(name), TrailingPages):
            errors.append(FieldError(f"windows.{name}", "no_window", "is no pool of the call with a window"))
        elif pages < 1:
            errors.append(FieldError(f"windows.{name}", "out_of_range", f"is {pages}, must be at least 1"))
        else:
            policies[name] = TrailingPages(pages)
    if errors:
        raise InvalidInput("the windows do not fit the call", errors)
    return policies
