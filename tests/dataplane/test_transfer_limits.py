"""Cancel and deadline: looked at between store calls; what was moved counts, nothing claims to be done."""

import threading

import numpy as np
import pytest

from dataplane.page_mover import TransferCancelled, TransferTimedOut
from dataplane.prefetch import Prefetch
from dataplane.transfer import RankPools
from dataplane.transfer_limits import TransferLimits
from metadata.errors import InvalidInput
from metadata.pools import TrailingPages
from tests.dataplane.mover_world import NS, World, all_slots, hashes_of, promise_of, world_of
from tests.dataplane.prefetch_pools import KV_INDEXER, KV_SWA, pool, store_everything

PAGES = 9
EVERY = set(range(1, PAGES + 1))


class Clock:
    """A clock that every store call of one kind moves on by a second."""

    def __init__(self, world: World, verb: str) -> None:
        self.now = 0.0
        self._verb = verb
        world.store.raising = self._pass

    def _pass(self, verb: str, _number: int) -> None:
        self.now += verb == self._verb

    def __call__(self) -> float:
        return self.now


def prefetch(world: World, limits: TransferLimits, lengths: set[int] = EVERY):
    return Prefetch(
        world.store,
        world.claims,
        RankPools(NS, world.bound),
        page_hashes=hashes_of(PAGES),
        promise=promise_of(world, lengths, PAGES),
        slots=all_slots(world.names, PAGES),
        limits=limits,
    ).run()


def cancel_at(world: World, verb: str, number: int) -> threading.Event:
    flag = threading.Event()

    def look(v: str, n: int) -> None:
        if (v, n) == (verb, number):
            flag.set()

    world.store.raising = look
    return flag


@pytest.mark.parametrize(("seconds", "pages"), [(10.0, 8), (5.0, 0)])
def test_a_prefetch_out_of_time_restores_what_it_read_only_with_the_window_at_that_length(
    seconds: float, pages: int
):
    with world_of(KV_SWA, chunk=1) as world:
        store_everything(world, PAGES)
        clock = Clock(world, "get")
        done = prefetch(world, TransferLimits(None, seconds, clock))
        assert isinstance(done.error, TransferTimedOut)
        # A page a second for four fifths of the time; the window's two pages need two more.
        assert done.pages == pages
        assert not done.transfers_done
        assert np.flatnonzero(done.read["swa"]).tolist() == ([6, 7] if pages else [])
        assert done.lost == {}


def test_a_window_of_one_page_fits_in_the_time_that_is_kept_for_it():
    with world_of([pool("kv"), pool("swa", TrailingPages(1))], chunk=1) as world:
        store_everything(world, PAGES)
        done = prefetch(world, TransferLimits(None, 5.0, Clock(world, "get")))
        assert done.pages == 4
        assert done.read["kv"].sum() == 4
        assert np.flatnonzero(done.read["swa"]).tolist() == [3]
        assert all(world.intact("kv", p, PAGES - 1 - p) for p in range(4))


def test_pools_that_need_every_page_have_the_same_prefix_when_time_is_up():
    with world_of(KV_INDEXER, chunk=1) as world:
        store_everything(world, PAGES)
        done = prefetch(world, TransferLimits(None, 7.0, Clock(world, "get")))
        assert done.pages == 3
        assert isinstance(done.error, TransferTimedOut)


def test_out_of_time_at_a_length_nobody_promised_falls_back_to_a_promised_one():
    with world_of(KV_INDEXER, chunk=1) as world:
        store_everything(world, PAGES)
        done = prefetch(world, TransferLimits(None, 7.0, Clock(world, "get")), {2, 9})
        assert done.pages == 2


def test_a_cancelled_prefetch_makes_no_further_store_call_and_restores_what_it_can():
    with world_of([pool("kv")], chunk=2) as world:
        store_everything(world, PAGES)
        flag = cancel_at(world, "get", 1)
        hashes, slots = hashes_of(PAGES), all_slots(world.names, PAGES)
        done = world.mover.prefetch(hashes, promise_of(world, EVERY, PAGES), slots, cancel=flag)
        assert isinstance(done.error, TransferCancelled)
        assert len(world.store.calls("get")) == 2
        assert (done.pages, done.transfers_done, done.lost) == (4, False, {})
        assert world.claims.reports == []


def test_a_prefetch_cancelled_before_it_began_reads_nothing():
    with world_of(KV_SWA) as world:
        store_everything(world, PAGES)
        flag = threading.Event()
        flag.set()
        hashes, slots = hashes_of(PAGES), all_slots(world.names, PAGES)
        done = world.mover.prefetch(hashes, promise_of(world, EVERY, PAGES), slots, cancel=flag)
        assert (done.pages, done.bytes, done.transfers_done) == (0, 0, False)
        assert world.store.log == []


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_back_up_cut_short_commits_what_is_confirmed_and_is_not_done(how: str):
    with world_of(KV_SWA, chunk=2) as world:
        slots = all_slots(world.names, PAGES)
        world.fill(slots)
        if how == "cancel":
            flag = cancel_at(world, "put", 2)  # the second chunk's KV
            done = world.mover.back_up(hashes_of(PAGES), slots, cancel=flag)
            assert isinstance(done.error, TransferCancelled)
            assert len(world.store.calls("put")) == 3
            assert np.flatnonzero(done.stored["kv"]).tolist() == [0, 1, 2, 3]
            assert np.flatnonzero(done.stored["swa"]).tolist() == [0, 1]
            assert done.committed == 4
        else:
            done = world.mover.back_up(hashes_of(PAGES), slots, deadline_seconds=1e-9)
            assert isinstance(done.error, TransferTimedOut)
            assert (world.store.log, done.committed) == ([], 0)
        assert not done.transfers_done
        again = world.mover.back_up(hashes_of(PAGES), slots)
        assert again.transfers_done


def test_limits_that_are_not_reached_change_nothing():
    with world_of(KV_SWA, chunk=2) as world:
        slots = all_slots(world.names, PAGES)
        world.fill(slots)
        limits = {"cancel": threading.Event(), "deadline_seconds": 600.0}
        assert world.mover.back_up(hashes_of(PAGES), slots, **limits).transfers_done
        promise = promise_of(world, EVERY, PAGES)
        assert world.mover.prefetch(hashes_of(PAGES), promise, slots, **limits).transfers_done


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_deadline_that_is_none_is_refused(seconds: float):
    with pytest.raises(InvalidInput, match="deadline_seconds"):
        TransferLimits(None, seconds)
