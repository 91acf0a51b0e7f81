"""Claims behind the writer's back: in order, many pages in a call, nothing lost while nobody takes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.control_plane import ControlPlaneAway
from dataplane.engines import claims as claims_module
from dataplane.engines.claims import Claims
from dataplane.messages.control import CommitResult, Rejection
from metadata.codec import PageHashes

SPECS = {
    n: SimpleNamespace(pool=SimpleNamespace(spec=SimpleNamespace(pool_id=f"id-{n}"))) for n in ("kv", "swa")
}
JOINED: Any = SimpleNamespace(
    namespace_id="0" * 16, owned={"kv": (0, 1), "swa": (1,)}, pools=SimpleNamespace(bound=SPECS)
)
PATIENCE = 20.0


def hashes(*numbers: int) -> PageHashes:
    return PageHashes(b"".join(n.to_bytes(32) for n in numbers))


def rows(pages: int, shards: int = 2) -> np.ndarray:
    return np.ones((pages, shards), np.bool_)


class Plane:
    """What the claims see of a link: it notes the calls, holds them up, refuses them."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.entered = threading.Event()
        self.open = threading.Event()
        self.open.set()
        self.away = False
        self.most = 1 << 30
        self.failed = 0
        self.rejected: list[Rejection] = []

    def commit(self, namespace_id: str, page_hashes: PageHashes, stored: Any) -> CommitResult:
        self.entered.set()
        assert self.open.wait(PATIENCE)
        if self.away or len(page_hashes) > self.most:
            self.failed += 1
            raise ControlPlaneAway("away")
        pages = [int.from_bytes(h) for h in page_hashes]
        self.calls.append({"pages": pages, **{n: (s.pages, s.shards, s.pool_id) for n, s in stored.items()}})
        return CommitResult(committed=len(pages), complete=len(pages), rejected=self.rejected)

    @staticmethod
    def forgotten(_: object) -> bool:
        return False


@pytest.fixture
def plane() -> Plane:
    return Plane()


@pytest.fixture
def taken() -> list[list[int]]:
    return []


@pytest.fixture
def claims(plane: Plane, taken: list[list[int]]) -> Iterator[Claims]:
    link: Any = plane
    found = Claims(link, lambda pages, _: taken.append([int.from_bytes(h) for h in pages]))
    yield found
    plane.open.set()
    found.close(PATIENCE)


def test_a_claim_names_pages_shards_and_variant(claims, plane, taken):
    held = {"kv": rows(3), "swa": np.array([[False], [False], [True]])}
    claims.claim(JOINED, hashes(1, 2, 3), held)
    assert claims.flush(PATIENCE)
    assert plane.calls == [
        {"pages": [1, 2, 3], "kv": ([(0, 2)], [0, 1], "id-kv"), "swa": ([(2, 2)], [1], "id-swa")}
    ]
    assert taken == [[1, 2, 3]]


def test_what_comes_during_a_call_goes_into_one_call_in_order(claims, plane):
    plane.open.clear()
    claims.claim(JOINED, hashes(1), {"kv": rows(1)})
    assert plane.entered.wait(PATIENCE)
    for first in (2, 4, 6):
        claims.claim(JOINED, hashes(first, first + 1), {"kv": rows(2)})
    claims.claim(JOINED, hashes(8), {"swa": rows(1, 1)})
    assert not claims.flush(0.01)
    plane.open.set()
    assert claims.flush(PATIENCE)
    assert [c["pages"] for c in plane.calls] == [[1], [2, 3, 4, 5, 6, 7, 8]]
    assert plane.calls[1]["kv"][0] == [(0, 5)]
    assert plane.calls[1]["swa"][0] == [(6, 6)]


def test_a_page_s_sidecar_is_claimed_in_a_call_after_its_anchor_s(claims, plane):
    plane.open.clear()
    claims.claim(JOINED, hashes(1), {"kv": rows(1)})
    assert plane.entered.wait(PATIENCE)
    claims.claim(JOINED, hashes(2, 3), {"kv": rows(2)})
    claims.claim(JOINED, hashes(3), {"swa": rows(1, 1)})
    plane.open.set()
    assert claims.flush(PATIENCE)
    assert [sorted(c) for c in plane.calls] == [["kv", "pages"], ["kv", "pages"], ["pages", "swa"]]


def test_calls_that_take_too_long_get_smaller_until_they_do_not(claims, plane, taken):
    """Many pages of many shards can take longer than the deadline, at every try, and open the circuit."""
    plane.most = 600
    pages = range(1, 4097)
    claims.claim(JOINED, hashes(*pages), {"kv": rows(len(pages)), "swa": rows(len(pages), 1)})
    while not claims.flush(0.2):
        claims.retry(JOINED)
        assert plane.failed < 8
    assert sorted(p for c in plane.calls for p in c["pages"]) == list(pages)
    assert sorted(p for some in taken for p in some) == list(pages)
    assert claims._call_pages < claims_module.CALL_PAGES
    plane.most = 1 << 30
    for _ in range(260):
        claims.claim(JOINED, hashes(1), {"kv": rows(1)})
        assert claims.flush(PATIENCE)
    assert claims._call_pages == claims_module.CALL_PAGES


def test_what_cannot_be_claimed_now_is_kept_and_claimed_later(claims, plane, taken):
    plane.away = True
    claims.claim(JOINED, hashes(1), {"kv": rows(1)})
    claims.claim(JOINED, hashes(1), {"swa": rows(1, 1)})
    assert not claims.flush(0.2)
    plane.away = False
    claims.retry(JOINED)
    assert claims.flush(PATIENCE)
    assert [sorted(c) for c in plane.calls] == [["kv", "pages", "swa"]]
    assert taken == [[1]]


def test_a_negative_entry_is_claimed_later_and_a_missing_anchor_is_not(claims, plane, taken):
    plane.rejected = [
        Rejection(page=0, pool="kv", code="negative_entry"),
        Rejection(page=1, pool="swa", code="anchor_missing"),
    ]
    claims.claim(JOINED, hashes(1, 2, 3), {"kv": rows(3), "swa": rows(3, 1)})
    assert not claims.flush(0.2)
    assert taken == [[3]]
    plane.rejected = []
    claims.retry(JOINED)
    assert claims.flush(PATIENCE)
    assert plane.calls[1] == {"pages": [1], "kv": ([(0, 0)], [0, 1], "id-kv")}


def test_a_sidecar_is_kept_with_the_anchor_that_is_only_taken_later(claims, plane, taken):
    """The anchor has a negative entry, so the sidecar of the same call has none: both are claimed again."""
    plane.rejected = [
        Rejection(page=0, pool="swa", code="anchor_missing"),
        Rejection(page=0, pool="kv", code="negative_entry"),
    ]
    claims.claim(JOINED, hashes(1, 2), {"kv": rows(2), "swa": rows(2, 1)})
    assert not claims.flush(0.2)
    plane.rejected = []
    claims.retry(JOINED)
    assert claims.flush(PATIENCE)
    assert plane.calls[1] == {
        "pages": [1],
        "kv": ([(0, 0)], [0, 1], "id-kv"),
        "swa": ([(0, 0)], [1], "id-swa"),
    }
    assert taken == [[2], [1]]


def test_rows_of_a_pool_that_has_other_shards_now_are_left_out(claims, plane):
    claims.claim_rows(JOINED, [((1).to_bytes(32), {"kv": rows(1)[0], "swa": np.ones(3, np.bool_)})])
    assert claims.flush(PATIENCE)
    assert [sorted(c) for c in plane.calls] == [["kv", "pages"]]


def test_a_writer_waits_where_too_much_is_queued(claims, plane, monkeypatch):
    monkeypatch.setattr(claims_module, "MAX_QUEUED_PAGES", 2)
    plane.open.clear()
    claims.claim(JOINED, hashes(1), {"kv": rows(1)})
    assert plane.entered.wait(PATIENCE)
    claims.claim(JOINED, hashes(2, 3), {"kv": rows(2)})
    writer = threading.Thread(target=claims.claim, args=(JOINED, hashes(4), {"kv": rows(1)}))
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    plane.open.set()
    writer.join(PATIENCE)
    assert claims.flush(PATIENCE)
    assert sorted(p for c in plane.calls for p in c["pages"]) == [1, 2, 3, 4]


def test_a_writer_does_not_wait_for_ever(claims, plane, monkeypatch):
    monkeypatch.setattr(claims_module, "MAX_QUEUED_PAGES", 1)
    plane.open.clear()
    claims.claim(JOINED, hashes(1), {"kv": rows(1)})
    assert plane.entered.wait(PATIENCE)
    claims.claim(JOINED, hashes(2), {"kv": rows(1)})
    claims.claim(JOINED, hashes(3), {"kv": rows(1)}, room_seconds=0.05)
    plane.open.set()
    assert not claims.flush(0.2)
    claims.retry(JOINED)
    assert claims.flush(PATIENCE)
    assert sorted(p for c in plane.calls for p in c["pages"]) == [1, 2, 3]


def test_chores_take_only_what_there_is_room_for_and_do_not_wait(claims, plane, monkeypatch):
    monkeypatch.setattr(claims_module, "MAX_QUEUED_PAGES", 2)
    plane.away = True
    for page in (1, 2, 3):
        claims.claim(JOINED, hashes(page), {"kv": rows(1)})
    assert not claims.flush(0.2)
    plane.away = False
    plane.open.clear()
    plane.entered.clear()
    claims.claim(JOINED, hashes(9), {"kv": rows(1)})
    assert plane.entered.wait(PATIENCE)
    start = time.monotonic()
    claims.retry(JOINED)
    claims.claim_rows(JOINED, [((4).to_bytes(32), {"kv": rows(1)[0]})])
    assert time.monotonic() - start < claims_module._ROOM_SECONDS
    plane.open.set()
    assert not claims.flush(0.2)
    assert [c["pages"] for c in plane.calls] == [[9], [1, 2]]
    claims.retry(JOINED)
    assert claims.flush(PATIENCE)
    assert sorted(p for c in plane.calls for p in c["pages"]) == [1, 2, 3, 4, 9]


def test_forgetting_drops_what_waits_and_waits_for_the_call_under_way(claims, plane):
    plane.open.clear()
    claims.claim(JOINED, hashes(1), {"kv": rows(1)})
    assert plane.entered.wait(PATIENCE)
    claims.claim(JOINED, hashes(2), {"kv": rows(1)})
    threading.Timer(0.1, plane.open.set).start()
    claims.forget(PATIENCE)
    assert claims.flush(0.0)
    assert [c["pages"] for c in plane.calls] == [[1]]


def test_closing_makes_the_claims_that_wait_and_later_ones_at_once(claims, plane):
    claims.claim(JOINED, hashes(1), {"kv": rows(1)})
    claims.close(PATIENCE)
    assert [c["pages"] for c in plane.calls] == [[1]]
    claims.claim(JOINED, hashes(2), {"kv": rows(1)})
    assert [c["pages"] for c in plane.calls] == [[1], [2]]
    assert "caketin-claims" not in [t.name for t in threading.enumerate()]


def test_nothing_held_is_no_claim(claims, plane):
    claims.claim(JOINED, hashes(1), {"kv": np.zeros((1, 2), np.bool_)})
    claims.claim(JOINED, PageHashes(), {})
    assert claims.flush(PATIENCE)
    assert plane.calls == []


def test_a_claim_that_fails_as_nobody_foresaw_does_not_end_the_thread(claims, plane):
    broken, plane.commit = plane.commit, None
    claims.claim(JOINED, hashes(1), {"kv": rows(1)})
    assert claims.flush(PATIENCE)
    plane.commit = broken
    claims.claim(JOINED, hashes(2), {"kv": rows(1)})
    assert claims.flush(PATIENCE)
    assert [c["pages"] for c in plane.calls] == [[2]]
