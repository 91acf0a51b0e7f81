"""The stores of an agent: one for all that use the same, another for who uses other devices."""

from __future__ import annotations

import pytest

from dataplane import agent_store
from dataplane.agent_store import SharedStores
from dataplane.messages.control import FileAccess, MooncakeAccess
from dataplane.store_access import StoreOverrides


@pytest.fixture
def opened(monkeypatch):
    """Ranks for which a store was opened. There are no RDMA devices here to open one with."""
    ranks: list[str] = []

    class Store:
        kind = "mooncake"
        lease_seconds = None
        max_region_bytes = None

    def open_store(_access, _overrides, rank):
        ranks.append(rank)
        return Store()

    monkeypatch.setattr(agent_store, "open_store", open_store)
    return ranks


def mooncake(prefix: str) -> MooncakeAccess:
    return MooncakeAccess(
        master="127.0.0.1:1", metadata="P2PHANDSHAKE", protocol="rdma", devices="", key_prefix=prefix
    )


@pytest.mark.parametrize(
    ("devices", "ranks"),
    [
        ("tp0=rxe0; tp1=rxe1", ["dp0-pp0-cp0-tp0", "dp0-pp0-cp0-tp1"]),
        ("rxe0,rxe1", ["dp0-pp0-cp0-tp0"]),
        ("tp1=rxe1; *=rxe0", ["dp0-pp0-cp0-tp0", "dp0-pp0-cp0-tp1"]),
    ],
)
def test_ranks_share_a_store_where_they_have_the_same_devices(opened, devices, ranks):
    stores, overrides = SharedStores(), StoreOverrides(devices=devices)
    for prefix in ("ct1/a/", "ct1/b/"):
        for rank in ("dp0-pp0-cp0-tp0", "dp0-pp0-cp0-tp1"):
            stores.open(mooncake(prefix), overrides, rank)
    assert opened == ranks


def test_a_file_store_is_one_whatever_the_rank(opened):
    stores = SharedStores()
    for rank in ("dp0-pp0-cp0-tp0", "dp0-pp0-cp0-tp1"):
        stores.open(FileAccess(path="x", max_bytes=None, key_prefix="ct1/a/"), StoreOverrides(), rank)
    assert len(opened) == 1
