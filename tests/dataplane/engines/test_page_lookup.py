"""Lookups ask the store ahead only where that may help."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.control_plane import ControlPlaneAway
from dataplane.engines import page_lookup as page_lookup_module
from dataplane.engines.page_lookup import PageLookup
from dataplane.engines.promises import Promises
from metadata.codec import PageHashes

PAGES = PageHashes(b"".join(n.to_bytes(32) for n in range(4)))


class Store:
    def __init__(self, lease_seconds: float | None) -> None:
        self.lease_seconds = lease_seconds
        self.asked: list[list[str]] = []

    def exists(self, keys: list[str]) -> np.ndarray:
        self.asked.append(list(keys))
        return np.ones(len(keys), np.bool_)


class Link:
    """A link whose control plane answers with hits, is degraded, or away."""

    def __init__(self, store: Store) -> None:
        self.joined = SimpleNamespace(store=store, pools=SimpleNamespace(bound={}, policies={}))
        self.state = "hit"

    def call(self, _make: Any) -> Any:
        if self.state == "away":
            raise ControlPlaneAway("away")
        return SimpleNamespace(
            degraded=self.state == "degraded",
            hit_pages=4,
            restorable=[(1, 4)],
            generation=bytes(4),
            pools={"kv": 4},
        )


@pytest.fixture(params=[10.0, None])
def store(request: pytest.FixtureRequest) -> Store:
    return Store(request.param)


@pytest.fixture
def link(store: Store) -> Link:
    return Link(store)


@pytest.fixture
def promises() -> Promises:
    return Promises()


@pytest.fixture
def lookup(link: Any, promises: Promises, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageLookup]:
    monkeypatch.setattr(page_lookup_module, "_lease_keys", lambda _joined, hashes: [h.hex() for h in hashes])
    found = PageLookup(link, promises)
    yield found
    found.close()


@pytest.mark.parametrize("state", ["away", "degraded"])
def test_the_store_is_not_asked_for_lookups_that_nobody_answers(lookup, link, store, state):
    assert lookup.find(PAGES, {}).pages == 4
    link.state = state
    assert lookup.find(PAGES, {}) is None
    for _ in range(5):
        assert lookup.find(PAGES, {}) is None
    lookup._ahead.submit(lambda: None).result()
    assert len(store.asked) == 2  # with the hit, and with the first that nobody answered
    link.state = "hit"
    assert lookup.find(PAGES, {}).pages == 4


def test_keys_are_kept_only_where_there_are_leases_to_renew(lookup, promises, store):
    assert lookup.find(PAGES, {}).pages == 4
    (promise,) = promises._promises
    assert promise.keys == ([] if store.lease_seconds is None else [h.hex() for h in PAGES])
    assert promises.generations(PAGES) == bytes(4)
