"""What is stored while the control plane is away is claimed once it is back, within bounds, counted."""

from dataplane.commit_queue import CommitQueue, UnclaimedPages, passing
from dataplane.control_plane import ControlPlaneAway, ControlRefused
from dataplane.messages import control
from metadata.codec import PageHashes
from metadata.errors import CaketinError
from tests.dataplane.mover_world import NS, all_slots, hashes_of, world_of
from tests.dataplane.prefetch_pools import KV_SWA

STORED = {"kv": control.StoredPool(pages="all", shards=[0])}


class Plane:
    """A control plane that takes commits, or fails each with what a test says."""

    def __init__(self) -> None:
        self.error: CaketinError | None = None
        self.taken: list[PageHashes] = []

    def commit(self, namespace_id, page_hashes, stored):
        assert (namespace_id, stored) == (NS, STORED)
        if self.error is not None:
            raise self.error
        self.taken.append(page_hashes)
        return control.CommitResult(committed=0, complete=0, rejected=[])

    def missing(self, *_args):
        raise AssertionError


def pages(count: int) -> UnclaimedPages:
    return UnclaimedPages(NS, hashes_of(count), STORED)


def test_commits_wait_in_order_and_are_made_once():
    queue, plane = CommitQueue(), Plane()
    for count in (3, 1, 2):
        queue.add(pages(count))
    plane.error = ControlPlaneAway("away")
    queue.flush(plane)
    assert (queue.pages, queue.sent, queue.dropped) == (6, 0, 0)
    plane.error = None
    queue.flush(plane)
    queue.flush(plane)
    assert [len(h) for h in plane.taken] == [3, 1, 2]
    assert (queue.pages, queue.sent, queue.dropped) == (0, 6, 0)


def test_the_oldest_are_dropped_and_counted_when_too_many_wait():
    queue, plane = CommitQueue(pages=5), Plane()
    for count in (3, 2, 1):
        queue.add(pages(count))
    assert (queue.pages, queue.dropped) == (3, 3)
    queue.add(pages(6))
    assert (queue.pages, queue.dropped) == (0, 12)
    queue.flush(plane)
    assert plane.taken == []


def test_a_commit_that_will_never_be_taken_does_not_block_the_others():
    queue, plane = CommitQueue(), Plane()
    queue.add(pages(2))
    plane.error = ControlRefused("no", refusal="unknown_pool", status=404)
    queue.flush(plane)
    assert (queue.pages, queue.sent, queue.dropped) == (0, 0, 2)
    assert passing(ControlRefused("later", refusal="redis_unavailable", status=503))
    assert not passing(ControlRefused("no", refusal="unknown_pool", status=404))


def test_pages_backed_up_during_an_outage_are_claimed_by_the_next_back_up_after_it():
    with world_of(KV_SWA, chunk=2) as world:
        first, second = hashes_of(12)[:6], hashes_of(12)[6:]
        slots = all_slots(world.names, 6)
        for memories in world.memory.values():
            assert memories
        world.claims.away = lambda _verb, _number: True
        done = world.mover.back_up(first, slots)
        assert isinstance(done.error, ControlPlaneAway)
        assert (done.committed, done.transfers_done) == (0, False)
        assert world.mover.unclaimed.pages == 6
        assert world.claims.claimed == set()
        world.claims.away = lambda _verb, _number: False
        assert world.mover.back_up(second, slots).transfers_done
        assert (world.mover.unclaimed.pages, world.mover.unclaimed.sent) == (0, 6)
        assert {h for _, h, _ in world.claims.claimed} == set(hashes_of(12))
