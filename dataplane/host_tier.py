"""The pages that are resident in a node's host memory: what is there, who holds it, what goes next.

One `HostTier` stands for one set of pools of one namespace that engines share: same page hashes, same bytes.
It computes and remembers; it never touches the memory. All calls belong to one thread (the agent's event
loop): each is atomic, none blocks, none has an `await` within.

**Words.** A *slot* holds one page of a pool and of all pools with `indices_from` that pool; so `kv`, `c4` and
`c128` of one page have one slot number, `swa` another. Pools that share slots live and die together; `swa`
and `mamba` live and die on their own: a page may lose its window data and stay (a *tombstone*). Per-page
answers are arrays over the pages of the call, -1 (`NO_SLOT`) where a page has no slot: as `PageMover` takes
them.

**How an agent uses it.** `page_hashes` are raw 32-byte hashes in the order of the sequence; `parent` is the
hash of the page before the first one, None where the call starts the sequence.

    tier = HostTier(specs, {"kv": 4096, "swa": 512})       # slots of each pool without `indices_from`
    tier.open_session("s-51c0")

    found = tier.match(hashes)                             # touches nothing
    held = tier.lock("s-51c0", hashes)                     # the longest restorable prefix; held.pages, .slots
    tier.release(held.token)                               # lock, pin or reservation; again: UnknownToken

Publish by an engine: it asks for slots, fills those that are not `resident`, publishes.

    got = tier.reserve("s-51c0", hashes, parent=None, pools=["kv", "swa"])    # NoSlots -> 507
    ...                                                    # the engine writes got.slots where ~got.resident
    done = tier.publish(got.token)                         # done.published, done.given_back, done.slots
    pins = tier.pin(hashes)                                # for the write-through: nobody's session, so it
    ...  await to_thread(mover.back_up, hashes, bytes_only(pins.slots))       # survives the engine's death
    tier.release(pins.token)

Prefetch: `fresh=True`, because a mover writes to every slot that it is handed, and a resident page must never
be written. Pages of a window pool outside the promised window need no slot: give masks.

    got = tier.reserve(session, hashes, parent=p, pools={"kv": all_pages, "swa": last_window}, fresh=True)
    tier.hand_to_store(got.token)                          # before the thread starts
    ...  read = await to_thread(mover.prefetch, hashes, promise, bytes_only(got.slots))
    tier.store_returned(got.token)                         # in a `finally`, also on failure
    tier.publish(got.token, filled=read.read)              # attaches what was read, frees the rest
    held = tier.lock(session, hashes, parent=p)            # no await between these lines: nothing is evicted

A deadline passes or the engine cancels while a store call is blocked: `tier.split(token, kept)` parts what
that call may not write any more from what it may; the former is published, the latter given up by
`tier.cancel(token)`. Slots that the store may still write become *quarantined*; `store_returned(token)`,
after the agent's period of grace, frees them (and returns True: there is nothing to publish). `publish`
raises `UnknownToken` then.

A session dies: `tier.end_session(session)` releases its locks and pins, frees what it reserved, and
quarantines what a store call is writing. Pins without session (write-through) stay until they are released.

`bytes_only` stands for leaving out the logical anchor, which a mover has no bytes of.

**Two writers of one page.** Both reserve slots; who publishes first wins, the other gives its slot back and
is told (`given_back`), and its later pages hang below the winner's copy. A copy with more pools replaces one
with fewer where nothing holds the poorer one. A reservation locks the pages it was told are `resident`, so
what an engine was told is there stays until it publishes or cancels.

**Locks and pins.** A host lock says that a session counts on the page staying in host memory; a device pin
says that a device or a store reads its bytes now. They are separate counts; either keeps a page where it is.
`lock` covers a prefix: all pages of pools that need all, back to the start of the sequence; of a window pool
the window that ends at the last page. `pin` covers exactly the pages of the call. Both write down which slots
of which generation they took, and `release` replays that, whatever happened in between.

**Eviction.** Per slot space, least recently held first, never what is locked or pinned. Within a call the
first page of the sequence is the youngest. `reserve` evicts what it needs; `evict` on demand. Every eviction
is reported in the answer of the call that did it. A page counts as used when it is published and when its
last hold is released; `match` alone does not count.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataplane.host_answers import (
    Ended,
    Evicted,
    Locked,
    Match,
    PageMasks,
    PageSlots,
    Pinned,
    Published,
    Reserved,
    SlotCounts,
)
from dataplane.host_chain import chain_of
from dataplane.host_ledger import NO_SLOT, Hold, HoldKind, Ledger, Reservation, SpaceReservation
from dataplane.host_pages import ResidentPages
from dataplane.host_publish import publish
from dataplane.host_reserve import reserve
from dataplane.host_sanity import broken_rules
from dataplane.host_slots import QUARANTINED, RESERVED
from dataplane.host_spaces import Pools, Spaces
from dataplane.host_tree import NodeArray
from metadata.errors import FieldError, InvalidInput
from metadata.hit_policy import PageMask, Restorable, restorable
from metadata.pools import PoolSpec, TrailingPages

__all__ = ["NO_SLOT", "HostTier"]


class HostTier:
    """See the module's text."""

    def __init__(self, specs: Sequence[PoolSpec], slots: Mapping[str, int]) -> None:
        """Begin with every slot free.

        Args:
            specs: the pools.
            slots: pages that fit, for each pool without `indices_from`; may name derived pools too.

        Raises:
            InvalidInput: the pools do not fit together, or the slots do not fit the pools.
        """
        self._layout = Spaces(specs, slots)
        self._pages = ResidentPages(self._layout)
        self._ledger = Ledger()

    # Looking

    def match(
        self, page_hashes: Sequence[bytes], *, parent: bytes | None = None, pools: Pools = None
    ) -> Match:
        """Say what of a call is resident, and which lengths that restores. Nothing is touched.

        Args:
            page_hashes: pages of the call, in order.
            parent: the page before them. Windows are checked over what is resident before the call; for pools
                that need all pages the caller vouches for its own side, as in a lookup.
            pools: the pools that gate, the anchor always among them; None for all.

        Raises:
            InvalidInput: a hash that is none.
            UnknownPool: there is no such pool.
        """
        hashes = chain_of(page_hashes, parent, distinct=False)
        chosen = self._layout.chosen(pools)
        nodes = self._pages.tree.find(hashes)
        slots = self._pages.slots(chosen, nodes)
        return Match(self._restorable(slots, parent), slots)

    def status(self) -> dict[str, SlotCounts]:
        """Return the counts of each slot space under the name of the pool that owns it."""
        counts = {}
        for name, space in zip(self._layout.names, self._pages.spaces, strict=True):
            reserved = int(np.count_nonzero(space.state == RESERVED))
            quarantined = int(np.count_nonzero(space.state == QUARANTINED))
            counts[name] = SlotCounts(
                space.capacity, space.free, reserved, space.resident, space.locked, quarantined
            )
        return counts

    @property
    def pages(self) -> int:
        """Pages in the tree, tombstones among them."""
        return len(self._pages.tree)

    @property
    def sessions(self) -> tuple[str, ...]:
        """The open sessions."""
        return tuple(self._ledger.sessions)

    def translation(self, pool: str) -> NDArray[np.int32]:
        """Return which slot of `pool` the page has that is resident in a slot of the anchor.

        Returns:
            int32, (slots of the anchor,), `NO_SLOT` where there is no such page or it has no slot of `pool`.
            A read-only view: it follows every change.

        Raises:
            UnknownPool: there is no such pool.
        """
        view: NDArray[np.int32] = self._pages.translation[self._layout.space_of(pool)].view()
        view.flags.writeable = False
        return view

    def sanity_check(self) -> list[str]:
        """Walk everything and return what is broken, a sentence each; an empty list is the right answer."""
        return broken_rules(self._pages, self._ledger)

    # Sessions

    def open_session(self, session: str) -> None:
        """Begin a session.

        Raises:
            InvalidInput: there is one of that name.
        """
        self._ledger.open(session)

    def end_session(self, session: str) -> Ended:
        """Give back all that a session holds, at once.

        Raises:
            UnknownSession: it is not open.
        """
        self._ledger.check(session)
        locks, quarantined = [], []
        freed = dict.fromkeys(self._layout.names, 0)
        for token in list(self._ledger.sessions[session]):
            if token in self._ledger.holds:
                self._end_hold(token)
                locks.append(token)
                continue
            own = self._ledger.reservations[token].spaces
            if self.cancel(token):
                for space, part in own.items():
                    freed[self._layout.names[space]] += part.own_slots.size
            else:
                quarantined.append(token)
        del self._ledger.sessions[session]
        return Ended(tuple(locks), freed, tuple(quarantined))

    # Locks and pins

    def lock(
        self,
        session: str,
        page_hashes: Sequence[bytes],
        *,
        parent: bytes | None = None,
        length: int | None = None,
        pools: Pools = None,
    ) -> Locked:
        """Keep a prefix in host memory until the token is released.

        Args:
            session: whose lock it is.
            page_hashes: pages of the call, in order.
            parent: the page before them; the lock covers the pages before the call too, also where nothing
                of the call itself can be restored.
            length: pages of the call to lock; None for the longest restorable length. What is not resident is
                skipped.
            pools: the pools that gate, and whose slots are locked; None for all.

        Raises:
            UnknownSession, UnknownPool: there is no such thing.
            InvalidInput: a hash that is none or comes twice, a chain that contradicts what is known, or a
                length beyond the call.
        """
        self._ledger.check(session)
        hashes = chain_of(page_hashes, parent)
        chosen = self._layout.chosen(pools)
        nodes = self._pages.tree.find(hashes)
        self._check_chain(nodes, parent)
        slots = self._pages.slots(chosen, nodes)
        found = self._restorable(slots, parent)
        pages = found.hit_pages if length is None else length
        if not 0 <= pages <= len(hashes):
            detail = f"is {pages}, the call has {len(hashes)} pages"
            raise InvalidInput(
                "the lock does not fit the call", [FieldError("length", "out_of_range", detail)]
            )
        prefix = np.concatenate((self._pages.above(parent), nodes[:pages]))
        spaces = sorted({self._layout.pools[name].space for name in chosen})
        covered = {space: self._pages.covered(space, prefix) for space in spaces}
        token = self._hold(HoldKind.HOST_LOCK, session, covered)
        return Locked(token, pages, found, self._within_lock(slots, pages))

    def pin(self, page_hashes: Sequence[bytes], *, pools: Pools = None, session: str | None = None) -> Pinned:
        """Keep exactly these pages where they are while a device or a store reads them.

        Args:
            page_hashes: pages of the call.
            pools: which of their slots; None for all. A mask chooses pages.
            session: whose pin it is; None for one that ends with its release alone.

        Raises:
            UnknownSession, UnknownPool: there is no such thing.
            InvalidInput: a hash that is none or comes twice, a mask that does not fit.
        """
        if session is not None:
            self._ledger.check(session)
        hashes = chain_of(page_hashes, None)
        asked = self._layout.asked(pools, len(hashes))
        nodes = self._pages.tree.find(hashes)
        names = list(self._layout.pools if pools is None else pools)
        slots = self._pages.slots(names, nodes)
        for name, mask in pools.items() if isinstance(pools, Mapping) else ():
            slots[name][~mask] = NO_SLOT
        covered = {}
        for space in asked:
            rows = [slots[n] for n in names if self._layout.pools[n].space == space]
            own = np.maximum.reduce(rows)
            covered[space] = own[own >= 0]
        return Pinned(self._hold(HoldKind.DEVICE_PIN, session, covered), slots)

    def release(self, token: str) -> None:
        """End a lock or a pin; a reservation is cancelled.

        Raises:
            UnknownToken: it was released already, or its session ended.
        """
        if token in self._ledger.reservations:
            self.cancel(token)
        else:
            self._end_hold(token)

    # Filling slots

    def reserve(
        self,
        session: str | None,
        page_hashes: Sequence[bytes],
        *,
        parent: bytes | None = None,
        pools: Pools = None,
        fresh: bool = False,
    ) -> Reserved:
        """Give out slots for pages, evicting as many as that takes.

        Args:
            session: whose slots they are; None for a transfer of the agent's own.
            page_hashes: pages of the call, in order.
            parent: the page before them.
            pools: names, or a mask over the pages for each; None for all pools on all pages.
            fresh: give a slot for every page, also for one that is resident: for whoever writes them all.

        Raises:
            UnknownSession, UnknownPool: there is no such thing.
            InvalidInput: no page, no pool, a hash that is none or comes twice, a chain that contradicts what
                is known, or a mask that does not fit.
            NoSlots: a pool has too few, even if all that may go went. Nothing was done.
        """
        if session is not None:
            self._ledger.check(session)
        hashes = chain_of(page_hashes, parent)
        if not hashes or (pools is not None and not pools):
            empty = "pools" if hashes else "page_hashes"
            error = FieldError(empty, "empty", "is empty; a reservation is for some pools of some pages")
            raise InvalidInput("nothing is asked for", [error])
        nodes = self._pages.tree.find(hashes)
        self._check_chain(nodes, parent)
        asked = self._layout.asked(pools, len(hashes))
        spaces, evicted = reserve(self._pages, nodes, asked, fresh=fresh)
        names = tuple(self._layout.pools) if pools is None else tuple(pools)
        token = self._ledger.add_reservation(Reservation(session, hashes, parent, names, spaces))
        slots, resident = self._reserved_slots(names, spaces)
        return Reserved(token, slots, resident, tuple(evicted))

    def hand_to_store(self, token: str) -> None:
        """Note that a call of the store is about to get the addresses of a reservation's slots (M1).

        Raises:
            UnknownToken: it ended.
        """
        self._ledger.reservation(token).store_calls += 1

    def store_returned(self, token: str) -> bool:
        """Note that such a call has come back, or never started.

        Returns:
            Whether that ended a quarantine: the slots are free, there is nothing to publish.

        Raises:
            UnknownToken: no call has these slots.
        """
        found = self._ledger.in_store(token)
        found.store_calls -= 1
        if not found.quarantined or found.store_calls:
            return False
        self._free_own(found)
        self._ledger.end_reservation(token)
        return True

    def publish(self, token: str, filled: Mapping[str, PageMask] | None = None) -> Published:
        """Make filled slots resident, give the others back, and release the locks of the reservation.

        Args:
            token: of the reservation; it ends.
            filled: for each pool the pages whose bytes are in their slots, bool (pages,); None for all that
                were asked for. Pools and pages without a slot of the reservation's own are passed over.

        Raises:
            UnknownToken: it ended, or was quarantined.
            InvalidInput: a store call still has the slots, a mask does not fit, or the chain contradicts one
                that was published since. The reservation stays.
        """
        found = self._ledger.reservation(token)
        if found.store_calls:
            detail = f"{token!r} is with {found.store_calls} calls of the store: wait for `store_returned`"
            raise InvalidInput("the slots are still written", [FieldError("token", "in_store", detail)])
        pages = len(found.page_hashes)
        bits = self._layout.asked(found.pools if filled is None else filled, pages, "filled")
        self._check_chain(self._pages.tree.find(found.page_hashes), found.parent)
        done = publish(self._pages, found, bits)
        self._ledger.end_reservation(token)
        return done

    def split(self, token: str, kept: Mapping[str, PageMask]) -> str:
        """Part a reservation: the slots that no call of the store may write any more become one of its own.

        For a transfer that is given up while a call is blocked: what the calls before it have read is
        published under the new token, the old one is cancelled and so quarantines the rest (M1).

        Args:
            token: of the reservation; it keeps its locks and its calls of the store.
            kept: for each pool the pages whose slots it keeps, bool (pages,): those that a call may still
                write. A slot stays if one of the pools that share it needs it.

        Returns:
            The token of the new reservation, which no call of the store has.

        Raises:
            UnknownToken: it ended, or was quarantined.
            InvalidInput: a mask that does not fit.
        """
        found = self._ledger.reservation(token)
        bits = self._layout.asked(kept, len(found.page_hashes), "kept")
        spaces = {space: part.split(bits.get(space)) for space, part in found.spaces.items()}
        return self._ledger.add_reservation(
            Reservation(found.session, found.page_hashes, found.parent, found.pools, spaces)
        )

    def cancel(self, token: str) -> bool:
        """Give up a reservation: its slots become free, or quarantined while a store call has them.

        Returns:
            Whether its slots are free now.

        Raises:
            UnknownToken: it ended, or was given up before.
        """
        found = self._ledger.reservation(token)
        for space, part in found.spaces.items():
            self._pages.give(HoldKind.HOST_LOCK, part.locks(space))
            part.drop_shared()
        if found.store_calls:
            for space, part in found.spaces.items():
                self._pages.spaces[space].quarantine(part.own_slots)
            self._ledger.detach(token)
            found.quarantined = True
            return False
        self._free_own(found)
        self._ledger.end_reservation(token)
        return True

    def evict(self, pool: str, count: int) -> Evicted:
        """Evict up to `count` pages of a pool, and with them what shares its slots.

        Raises:
            UnknownPool: there is no such pool.
            InvalidInput: a negative count.
        """
        space = self._layout.space_of(pool)
        if count < 0:
            detail = f"is {count}, must not be negative"
            raise InvalidInput("nothing can be evicted", [FieldError("count", "out_of_range", detail)])
        return self._pages.evict(space, count)

    # Within

    def _restorable(self, slots: PageSlots, parent: bytes | None) -> Restorable:
        policies = {name: self._layout.pools[name].policy for name in slots}
        presence = {name: row != NO_SLOT for name, row in slots.items()}
        before = self._pages.before(parent, self._layout.longest_window)
        windows = [n for n, policy in policies.items() if isinstance(policy, TrailingPages)]
        prefix = {name: self._pages.presence(name, before) for name in windows}
        return restorable(presence, policies, first_page=before.size, prefix_presence=prefix)

    def _check_chain(self, nodes: NodeArray, parent: bytes | None) -> None:
        at = self._pages.tree.contradiction(nodes, parent)
        if at is not None:
            detail = "is known as the page after another one; a page hash covers all pages before it"
            error = FieldError(f"page_hashes[{at}]", "other_parent", detail)
            raise InvalidInput("the pages are no chain", [error])

    def _hold(
        self, kind: HoldKind, session: str | None, covered: Mapping[int, NDArray[np.int64]]
    ) -> str | None:
        taken = [self._pages.take(kind, space, slots) for space, slots in covered.items() if slots.size]
        return self._ledger.add_hold(Hold(kind, session, tuple(taken))) if taken else None

    def _end_hold(self, token: str) -> None:
        hold = self._ledger.end_hold(token)
        for taken in hold.taken:
            self._pages.give(hold.kind, taken)

    def _within_lock(self, slots: PageSlots, pages: int) -> PageSlots:
        for name, row in slots.items():
            window = self._layout.windows[self._layout.pools[name].space]
            row[pages:] = NO_SLOT
            if window is not None:
                row[: max(0, pages - window)] = NO_SLOT
        return slots

    def _reserved_slots(
        self, names: Sequence[str], spaces: Mapping[int, SpaceReservation]
    ) -> tuple[PageSlots, PageMasks]:
        slots, resident = {}, {}
        for name in names:
            info = self._layout.pools[name]
            part = spaces[info.space]
            wanted = (part.asked & info.bits) == info.bits
            slots[name] = np.where(wanted, np.maximum(part.own, part.shared), NO_SLOT)
            resident[name] = wanted & (part.shared != NO_SLOT)
        return slots, resident

    def _free_own(self, reservation: Reservation) -> None:
        for space, part in reservation.spaces.items():
            self._pages.spaces[space].give_back(part.own_slots)
