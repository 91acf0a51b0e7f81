"""How a host reaches the store: what the control plane says, and what differs here."""

from pathlib import Path

import pytest

from dataplane import store_access
from dataplane.bounce_store import BounceStore
from dataplane.engines.sglang_settings import BackendSettings
from dataplane.file_store import FileStore
from dataplane.messages.control import FileAccess, MooncakeAccess
from dataplane.mooncake_native import MooncakeSettings
from dataplane.store_access import StoreOverrides, open_store
from metadata.errors import InvalidInput

TOLD = MooncakeAccess(
    master="10.0.0.5:50051", metadata="P2PHANDSHAKE", protocol="tcp", devices="mlx5_1", key_prefix="ct1/"
)


def test_what_is_set_here_goes_before_what_the_control_plane_says():
    ours = StoreOverrides(protocol="rdma", gid_index=0, traffic_class=106, mtu=1024, local_hostname="a")
    found = ours.mooncake(TOLD, "dp0-pp0-cp0-tp3")
    assert found == MooncakeSettings(
        "10.0.0.5:50051",
        protocol="rdma",
        devices="mlx5_1",
        gid_index=0,
        traffic_class=106,
        mtu=1024,
        local_hostname="a",
        rank="dp0-pp0-cp0-tp3",
    )
    assert (found.rdma.gid_index, found.rdma.service_level) == (0, None)
    assert found.chosen_devices == ("mlx5_1",)


def test_devices_are_nobodys_over_tcp():
    assert StoreOverrides().mooncake(TOLD).chosen_devices == ()


def test_bounce_buffers_stand_before_the_store_that_may_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_access, "MooncakeStore", lambda _settings: FileStore(tmp_path / "in its place"))
    plain, bounced = (open_store(TOLD, o) for o in (StoreOverrides(), StoreOverrides(bounce_mib=1)))
    assert isinstance(plain, FileStore)
    assert isinstance(bounced, BounceStore)
    bounced.close()
    on_disk = FileAccess(path=str(tmp_path / "store"), max_bytes=None, key_prefix="ct1/")
    assert isinstance(open_store(on_disk, StoreOverrides(bounce_mib=1)), FileStore)


def extra(**store: object) -> dict[str, object]:
    return {"control_url": "http://127.0.0.1:1", "store": store}


def test_an_engine_sets_them_in_its_extra_config_and_zero_is_a_value():
    found = BackendSettings.of(extra(gid_index=0, traffic_class=0, service_level=0, mtu=4096)).store
    assert (found.gid_index, found.traffic_class, found.service_level, found.mtu) == (0, 0, 0, 4096)


@pytest.mark.parametrize(
    ("store", "field"),
    [
        ({"mtu": 1500}, "store.mtu"),
        ({"protocol": "RDMA"}, "store.protocol"),
        ({"gid_index": 300}, "store.gid_index"),
        ({"gid_index": "3"}, "store.gid_index"),
        ({"devices": "tp=mlx5_0"}, "store.devices"),
        ({"max_region_bytes": 0}, "store.max_region_bytes"),
    ],
)
def test_what_cannot_be_stops_an_engine_at_its_start_and_names_the_setting(store: dict, field: str):
    with pytest.raises(InvalidInput) as said:
        BackendSettings.of(extra(**store))
    assert [e.field for e in said.value.errors] == [field]
