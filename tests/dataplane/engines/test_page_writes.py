"""Sidecars that wait for their anchor: claimed with it, or once the index has it, or given up in the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.engines import page_writes as page_writes_module
from dataplane.engines.page_reads import SlotPages
from dataplane.engines.page_writes import SETTLE_SECONDS, PageWrites
from metadata.codec import PageHashes

JOINED: Any = SimpleNamespace(owned={"kv": (0,), "swa": (0,)}, anchors=("kv",), writes_anchor=True)
PAGES = PageHashes(b"".join(n.to_bytes(32) for n in (1, 2)))
ROWS = np.ones((2, 1), np.bool_)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def offered() -> list[list[int]]:
    return []


@pytest.fixture
def writes(clock: Clock, offered: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> PageWrites:
    link: Any = SimpleNamespace(joined=JOINED)
    found = PageWrites(link, clock)
    monkeypatch.setattr(
        found._claims,
        "claim_rows",
        lambda _joined, pages: offered.append([int.from_bytes(h) for h, _ in pages]) if pages else None,
    )
    slots = np.arange(2)
    found._wait({"swa": SlotPages(PAGES, slots)}, {"swa": ROWS})
    return found


def tick(writes: PageWrites, clock: Clock, seconds: float = SETTLE_SECONDS * 2) -> None:
    clock.now += seconds
    writes.settle(JOINED)


def test_a_sidecar_without_an_anchor_is_offered_once_by_itself(writes, clock, offered):
    tick(writes, clock)
    tick(writes, clock)
    assert offered == [[1, 2]]


def test_a_sidecar_is_offered_again_once_the_index_has_taken_its_anchor(writes, clock, offered):
    """The anchor's claim was late: by itself the sidecar was refused."""
    tick(writes, clock)
    writes._taken(PAGES[:1], {"kv": ROWS[:1]})
    tick(writes, clock)
    assert offered == [[1, 2], [1]]
    writes._taken(PAGES[:1], {"swa": ROWS[:1]})
    tick(writes, clock)
    assert offered == [[1, 2], [1]]


def test_a_sidecar_goes_on_waiting_where_its_anchor_was_not_stored(writes):
    taken = writes._take(JOINED, PAGES, {"kv": np.array([[True], [False]])})
    assert taken["swa"].tolist() == [[True], [False]]
    assert list(writes._waiting) == [PAGES[1]]


def test_a_sidecar_whose_anchor_never_comes_is_given_up(writes, clock, offered):
    tick(writes, clock)
    tick(writes, clock, page_writes_module.GIVE_UP_SECONDS)
    assert not writes._waiting
    assert offered == [[1, 2]]


def test_a_sidecar_that_was_not_offered_yet_is_not_given_up(writes, clock, offered):
    tick(writes, clock, 2 * page_writes_module.GIVE_UP_SECONDS)
    assert offered == [[1, 2]]
    assert len(writes._waiting) == 2
