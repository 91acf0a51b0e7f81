"""Any history of inserts, matches, locks, transfers and evictions agrees with a plain model."""

import pytest
from hypothesis import Phase

from dataplane.host_ledger import SpaceReservation
from dataplane.host_pages import ResidentPages
from dataplane.host_slots import SlotSpace
from tests.dataplane.host_machine import SETS, drive


@pytest.mark.parametrize("pool_set", SETS)
def test_short_histories_agree_with_the_model(pool_set):
    drive(pool_set, examples=20, steps=30)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pool_set", SETS)
@pytest.mark.parametrize(
    ("examples", "steps"),
    [pytest.param(20, 400, id="smoke"), pytest.param(200, 20_000 // len(SETS), id="long")],
)
def test_long_histories_agree_with_the_model(pool_set, examples, steps):
    """A history has up to 40 steps; all pool sets together are checked after 20,000 steps or more."""
    assert drive(pool_set, examples=examples, steps=40) >= steps


def window_of(change):
    """`ResidentPages.covered` with a window that is `change` pages longer than it should be."""

    def covered(self, space, nodes):
        window = self.layout.windows[space]
        first = 0 if window is None else max(0, nodes.size - window - change)
        slots = self.tree.slots_of(space, nodes[first:])
        return slots[slots >= 0]

    return covered


def unlock_all_but_the_first(self, slots, generations):
    same = slots[self.generation[slots] == generations][1:]
    self.host_locks[same] -= 1
    return same[self.idle(same)]


def release_what_a_lock_would_take_now(self, kind, taken):
    """The release walks up from the last page once more, over what was revived or inserted since."""
    of = self.spaces[taken.space]
    page = int(of.page[taken.slots[-1]]) if taken.slots.size else -1
    slots = self.covered(taken.space, self.above(self.tree.hashes[page])) if page >= 0 else taken.slots
    idle = (of.unlock if kind.name == "HOST_LOCK" else of.unpin)(slots, of.generation[slots])
    of.ages.enter(idle)


def split_off_all(self, _kept):
    """An overdue transfer gives back slots that the store may still write."""
    return honest_split(self, None)


honest_split = SpaceReservation.split


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        pytest.param(ResidentPages, "covered", window_of(-1), id="window too short"),
        pytest.param(ResidentPages, "covered", window_of(1), id="window too long"),
        pytest.param(SlotSpace, "unlock", unlock_all_but_the_first, id="release short by one"),
        pytest.param(ResidentPages, "give", release_what_a_lock_would_take_now, id="release walks again"),
        pytest.param(SpaceReservation, "split", split_off_all, id="split gives all back"),
    ],
)
@pytest.mark.parametrize("pool_set", ["kv+swa", "deepseek_v4"])
def test_the_machine_finds_a_planted_fault(pool_set, where, name, fault, monkeypatch):
    # Not shrunk: that it is found is all there is to know.
    test = {"phases": [Phase.generate], "database": None, "print_blob": False}
    monkeypatch.setattr(where, name, fault)
    with pytest.raises((AssertionError, ExceptionGroup)):
        drive(pool_set, examples=100, steps=40, **test)
