"""Back up: pages from host memory to the store, KV first, and the index told last (O1-O4).

Per page the anchor's objects, then the pools that derive from it, then the independent sidecars; a later
stage only for pages whose earlier stages are confirmed. A put that succeeded proves nothing: only what the
store confirms is committed, shard by shard.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataplane.beside import Beside
from dataplane.commit_queue import CommitQueue, UnclaimedPages, passing
from dataplane.control_plane import ControlPlane, ControlPlaneAway
from dataplane.messages import control
from dataplane.object_store import ObjectStore, StoreCode
from dataplane.page_statements import PoolFacts, Statement, statements
from dataplane.stage_batch import PoolPages, StageBatch
from dataplane.stage_put import put_confirmed
from dataplane.transfer import (
    NO_SLOT,
    WRITE_CHUNK_PAGES,
    BoolArray,
    PageArray,
    Progress,
    RankPools,
    Slots,
    chunks,
)
from dataplane.transfer_limits import TransferCancelled, TransferLimits
from metadata.codec import PageHashes
from metadata.errors import CaketinError
from metadata.page_runs import page_runs

log = logging.getLogger(__name__)

_CHUNKS_AT_ONCE: Final = 2


@dataclass(frozen=True, slots=True)
class BackedUp:
    """What a back up did.

    Attributes:
        stored: pool name -> pages whose every object of this rank is confirmed, bool (pages,).
        bytes: bytes of those pages.
        committed: pages of which the index took something.
        rejected: what the index did not take, and why; `page` is an index into the call's pages.
        error: what cut the transfer short, or kept the index from learning of all that is stored; None when
            nothing did. What is stored stays stored, and the same call may be made again.
        transfers_done: every page of every pool that was asked for is stored and committed (O4).
    """

    stored: dict[str, BoolArray]
    bytes: int
    committed: int
    rejected: list[control.Rejection]
    error: CaketinError | None
    transfers_done: bool


@dataclass
class _Chunk:
    """Pages that are stored together.

    Attributes:
        pages: which.
        before: the chunk before; None for the first.
        moved: set once all bytes of this one have, or will not.
        failed: they will not all; set before `moved` is.
    """

    pages: slice
    before: _Chunk | None = None
    moved: threading.Event = field(default_factory=threading.Event)
    failed: bool = False


class BackUp:
    """One back up."""

    def __init__(
        self,
        store: ObjectStore,
        control_plane: ControlPlane,
        pools: RankPools,
        *,
        page_hashes: PageHashes,
        slots: Slots,
        progress: Progress | None = None,
        limits: TransferLimits | None = None,
        unclaimed: CommitQueue | None = None,
    ) -> None:
        """Take what is to be stored; see `PageMover.back_up`.

        Raises:
            InvalidInput: slots that do not fit the call.
        """
        self._store = store
        self._control = control_plane
        self._pools = pools
        self._hashes = page_hashes
        self._slots = pools.checked_slots(page_hashes, slots)
        self._progress = progress
        self._limits = limits or TransferLimits()
        self._unclaimed = unclaimed
        pages = len(page_hashes)
        # Which shards of which pages are confirmed, which claims the index took and which it refused.
        self._held = {n: np.zeros((pages, len(pools.bound[n].shards)), np.bool_) for n in self._slots}
        self._claimed = {n: np.zeros(pages, np.bool_) for n in self._slots}
        self._rejected: dict[tuple[int, str], control.Rejection] = {}
        self._committed_to = 0
        self._commit_error: CaketinError | None = None
        self._error: CaketinError | None = None
        self._telling = threading.Lock()

    def run(self) -> BackedUp:
        """Store, confirm and commit, chunk by chunk."""
        parts = list(chunks(len(self._hashes), WRITE_CHUNK_PAGES))
        turns = [_Chunk(at) for at in parts]
        for turn, following in itertools.pairwise(turns):
            following.before = turn
        if len(turns) == 1:
            self._finish(turns[0])
        else:
            self._run_overlapped(turns)
        if self._unclaimed is not None:
            self._keep_unclaimed(self._unclaimed)
        return self._result(self._error or self._commit_error)

    def _run_overlapped(self, parts: Sequence[_Chunk]) -> None:
        """Let the next chunk be made ready, and the last one be confirmed and claimed, beside one that moves.

        The bytes move in the order of the pages all the same: what is cut short leaves a prefix.
        """
        started: list[Beside[None]] = []
        running: deque[tuple[_Chunk, Beside[None]]] = deque()
        try:
            for chunk in parts:
                if self._error is not None or not passing(self._commit_error):
                    break
                started.append(Beside(partial(self._store_chunk, chunk), "back-up"))
                running.append((chunk, started[-1]))
                if len(running) == _CHUNKS_AT_ONCE:
                    self._finish(*running.popleft())
        finally:
            try:
                while running:
                    self._finish(*running.popleft())
            finally:
                # Also after Ctrl-C: until they return the store uses the memory (M1).
                for one in started:
                    one.wait()

    def _finish(self, chunk: _Chunk, work: Beside[None] | None = None) -> None:
        try:
            if work is None:
                self._store_chunk(chunk)
            else:
                work.result()
        except CaketinError as cut:
            self._error = self._error or cut
        finally:
            # Also when the store failed half-way: what it has confirmed by then must not be lost.
            if passing(self._commit_error):
                self._commit(chunk.pages.stop)

    @contextlib.contextmanager
    def _turn(self, chunk: _Chunk, *, last: bool) -> Iterator[None]:
        """Let the bytes of one stage of a chunk move, once all of the chunk before have."""
        before = chunk.before
        if before is not None:
            before.moved.wait()
        self._limits.check()
        # Only what came before counts: one that is ready early may fail before this one has begun to move.
        if before is not None and before.failed:
            raise TransferCancelled("a chunk before failed")
        yield
        if last:
            chunk.moved.set()

    def _keep_unclaimed(self, queue: CommitQueue) -> None:
        """Queue what the control plane was not there to take, or, where it was there, send what waits."""
        if self._commit_error is None:
            if self._committed_to:
                queue.flush(self._control)
        elif passing(self._commit_error):
            stored = [np.flatnonzero(held.any(axis=1)) for held in self._held.values()]
            here = slice(self._committed_to, max((int(at[-1]) + 1 for at in stored if at.size), default=0))
            for _, claims in self._claims(here):
                queue.add(UnclaimedPages(self._pools.namespace_id, self._hashes[here], claims))

    def _result(self, error: CaketinError | None) -> BackedUp:
        stored: dict[str, BoolArray] = {n: np.all(held, axis=1) for n, held in self._held.items()}
        whole = all(
            bool((stored[n] & self._claimed[n])[at != NO_SLOT].all()) for n, at in self._slots.items()
        )
        taken = np.zeros(len(self._hashes), np.bool_)
        for claimed in self._claimed.values():
            taken |= claimed
        return BackedUp(
            stored=stored,
            bytes=sum(int(s.sum()) * self._pools.bound[n].bytes_per_page for n, s in stored.items()),
            committed=int(taken.sum()),
            rejected=[self._rejected[where] for where in sorted(self._rejected)],
            error=error,
            transfers_done=whole and error is None,
        )

    def _store_chunk(self, chunk: _Chunk) -> None:
        try:
            self._store_stages(chunk)
        except BaseException:
            # Not tried by the chunk that is ready either: each try on a dead segment costs a minute.
            chunk.failed = True
            raise
        finally:
            chunk.moved.set()

    def _store_stages(self, chunk: _Chunk) -> None:
        hashes = self._hashes[chunk.pages]
        slots = {n: at[chunk.pages] for n, at in self._slots.items()}
        alive = np.ones(len(hashes), np.bool_)
        stages = self._pools.stages
        for number, stage in enumerate(stages):
            wanted = {n: np.flatnonzero(alive & (slots[n] != NO_SLOT)) for n in stage if n in slots}
            members = [PoolPages(self._pools.bound[n], p, slots[n][p]) for n, p in wanted.items() if p.size]
            later = np.zeros(len(hashes), np.bool_)
            for name in (n for after in stages[number + 1 :] for n in after if n in slots):
                later |= slots[name] != NO_SLOT
            if members:
                batch = StageBatch(self._pools.namespace_id, hashes, tuple(members))
                self._put(batch, chunk, last=not later.any())
            alive &= later
            if not alive.any():
                return
            alive &= self._complete(stage, chunk.pages, np.flatnonzero(alive))

    def _complete(self, stage: Sequence[str], chunk: slice, pages: PageArray) -> BoolArray:
        """Return where every pool of the stage is confirmed: put just now, or there from an earlier call.

        Args:
            stage: pool names.
            chunk: the chunk, whose pages the answer covers.
            pages: pages of the chunk to look at; the others count as incomplete.
        """
        complete = np.zeros(chunk.stop - chunk.start, np.bool_)
        complete[pages] = True
        unseen: list[PoolPages] = []
        for name in stage:
            if name in self._slots:
                put_now = self._slots[name][chunk] != NO_SLOT
                complete &= ~put_now | self._held[name][chunk].all(axis=1)
                left = pages[~put_now[pages] & complete[pages]]
            else:
                left = pages[complete[pages]]
            if left.size:
                unseen.append(PoolPages(self._pools.bound[name], left))
        if unseen:
            batch = StageBatch(self._pools.namespace_id, self._hashes[chunk], tuple(unseen))
            codes = self._store.confirm(batch.keys, batch.sizes)
            for member, at in batch.by_shard(codes):
                complete[member.pages[(at != StoreCode.OK).any(axis=(1, 2))]] = False
        return complete

    def _put(self, batch: StageBatch, chunk: _Chunk, *, last: bool) -> None:
        """Put a batch and note which shards are confirmed (O3)."""
        self._limits.check()
        first_page, turn = chunk.pages.start, self._turn(chunk, last=last)
        put_confirmed(self._store, batch, lambda codes: self._note_held(batch, first_page, codes), turn)
        if self._progress is not None:
            for member in batch.members:
                held = self._held[member.pool.name][first_page + member.pages]
                with self._telling:
                    self._progress(member.pool.name, int(held.all(axis=1).sum()))

    def _note_held(self, batch: StageBatch, first_page: int, codes: NDArray[np.int8]) -> None:
        for member, at in batch.by_shard(codes):
            self._held[member.pool.name][first_page + member.pages] = (at == StoreCode.OK).all(axis=2)

    def _commit(self, stop: int) -> None:
        """Claim what is confirmed of the pages up to `stop` and not claimed yet (O2).

        A control plane that is away for a moment gets these claims together with the next chunk's.
        """
        here = slice(self._committed_to, stop)
        try:
            for call, claims in self._claims(here):
                result = self._control.commit(self._pools.namespace_id, self._hashes[here], claims)
                self._note(here, call, result)
        except CaketinError as error:
            log.warning("what is stored could not be claimed: %s", error)
            self._commit_error = error
        else:
            self._committed_to, self._commit_error = stop, None

    def _claims(self, here: slice) -> Iterator[tuple[dict[str, Statement], dict[str, control.StoredPool]]]:
        """Yield the calls that claim all that is confirmed of some pages."""
        facts = {
            n: PoolFacts(self._pools.bound[n].shards, held[here], np.zeros(len(held[here]), np.int8))
            for n, held in self._held.items()
        }
        for call in statements(facts):
            yield (
                call,
                {n: self._claim(n, said) for n, said in call.items()},
            )

    def _claim(self, name: str, said: Statement) -> control.StoredPool:
        pool_id = self._pools.bound[name].pool.spec.pool_id
        return control.StoredPool(pages=_page_set(said.pages), shards=said.shards, pool_id=pool_id)

    def _note(self, here: slice, call: dict[str, Statement], result: control.CommitResult) -> None:
        refused = {n: np.zeros_like(said.pages) for n, said in call.items()}
        for name, said in call.items():
            for page in np.flatnonzero(said.pages).tolist() if self._rejected else ():
                self._rejected.pop((here.start + page, name), None)
        for one in result.rejected:
            if one.pool not in refused or one.page >= here.stop - here.start:
                raise ControlPlaneAway(f"a commit was answered for page {one.page} of pool {one.pool!r}")
            refused[one.pool][one.page] = True
            page = here.start + one.page
            self._rejected[page, one.pool] = control.Rejection(page=page, pool=one.pool, code=one.code)
        for name, said in call.items():
            self._claimed[name][here][said.pages] = ~refused[name][said.pages]


def _page_set(mask: BoolArray) -> control.PageSet:
    return "all" if mask.all() else page_runs(mask)
