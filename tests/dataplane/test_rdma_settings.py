"""RDMA settings: what Mooncake is told, and what is wrong before it tries. Over verbs: tests/rdma."""

import os
import sys
from pathlib import Path

import pytest

from dataplane import rdma_settings
from dataplane.memory_limits import MemlockRoom
from dataplane.rdma_ports import DeviceLimits, rdma_port
from dataplane.rdma_settings import RdmaEnvironment, RdmaSettings, gid_doubt, mtu_doubt, rdma_faults
from metadata.errors import InvalidInput
from tests.dataplane.test_rdma_ports import EMPTY, LINK_LOCAL, MAPPED, device

VARIABLES = ("MC_GID_INDEX", "MC_IB_TC", "MC_IB_SL", "MC_MTU")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        # Set first, so that whatever a test sets is undone after it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(rdma_settings, "memlock_room", lambda: None)
    for name in ("mooncake.store", "mooncake.engine"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def faults(settings: RdmaSettings, sysfs: Path, devices: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    return [(e.field, e.detail) for e in rdma_faults(settings, devices, 1 << 20, sysfs)]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"gid_index": -1}, "gid_index"),
        ({"gid_index": 256}, "gid_index"),
        ({"traffic_class": 256}, "traffic_class"),
        ({"service_level": 16}, "service_level"),
        ({"mtu": 1500}, "mtu"),
        ({"max_region_bytes": 0}, "max_region_bytes"),
        ({"devices": "tp=x"}, "devices"),
    ],
)
def test_values_that_mooncake_would_pass_over_are_refused(given: dict, field: str):
    with pytest.raises(InvalidInput) as said:
        RdmaSettings(**given)
    assert [e.field for e in said.value.errors] == [field]


def test_what_is_given_reaches_the_environment_and_what_is_not_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MC_IB_SL", "5")
    RdmaEnvironment().tell(RdmaSettings(gid_index=0, traffic_class=106, mtu=4096))
    assert {name: os.environ.get(name) for name in VARIABLES} == dict(
        zip(VARIABLES, ("0", "106", "5", "4096"), strict=True)
    )


def test_once_mooncake_is_loaded_what_it_has_read_is_all_there_is(monkeypatch: pytest.MonkeyPatch):
    """Also where somebody else has loaded it, such as the engine itself."""
    monkeypatch.setitem(sys.modules, "mooncake.engine", sys)
    monkeypatch.setenv("MC_IB_TC", "106")
    RdmaEnvironment().tell(RdmaSettings(traffic_class=106))
    with pytest.raises(InvalidInput, match="MC_GID_INDEX=3 in its environment") as said:
        RdmaEnvironment().tell(RdmaSettings(gid_index=3))
    assert [e.field for e in said.value.errors] == ["gid_index"]
    assert "MC_GID_INDEX" not in os.environ


def test_a_second_client_of_a_process_cannot_have_others():
    told = RdmaEnvironment()
    told.tell(RdmaSettings(gid_index=3))
    told.tell(RdmaSettings(gid_index=3, devices="mlx5_1"))
    told.tell(RdmaSettings())
    with pytest.raises(InvalidInput) as said:
        told.tell(RdmaSettings(gid_index=1, mtu=1024))
    assert [e.field for e in said.value.errors] == ["gid_index", "mtu"]
    assert os.environ["MC_GID_INDEX"] == "3"


def test_the_region_limit_is_the_least_that_anybody_says(monkeypatch: pytest.MonkeyPatch):
    limits = {"a": DeviceLimits(1 << 40, 4096), "b": DeviceLimits(1 << 30, 4096), "c": DeviceLimits(0, 0)}
    monkeypatch.setattr(rdma_settings, "device_limits", limits.get)
    assert RdmaSettings().region_limit(["a", "b", "c", "unknown"], {}) == 1 << 30
    assert RdmaSettings().region_limit(["a"], {"MC_MAX_MR_SIZE": "4096"}) == 4096
    assert RdmaSettings(max_region_bytes=77).region_limit(["a"], {"MC_MAX_MR_SIZE": "x"}) == 77
    assert RdmaSettings().region_limit(["unknown"], {}) is None


def test_a_machine_that_is_well_has_no_faults(tmp_path: Path):
    device(tmp_path, "mlx5_0", gids=(LINK_LOCAL, EMPTY, EMPTY, MAPPED))
    device(tmp_path, "mlx5_1", state="1: DOWN")
    assert faults(RdmaSettings(gid_index=3), tmp_path) == []
    assert faults(RdmaSettings(), tmp_path, ("mlx5_0",)) == []


def test_a_wrong_device_names_those_that_are_there(tmp_path: Path):
    assert faults(RdmaSettings(), tmp_path)[0][0] == "devices"
    device(tmp_path, "mlx5_0", gids=(MAPPED,))
    ((field, detail),) = faults(RdmaSettings(), tmp_path, ("mlx5_0", "mlx5_7"))
    assert field == "devices"
    assert "mlx5_7 is not here; this host has: mlx5_0" in detail


def test_a_device_whose_port_is_down_names_those_whose_is_up(tmp_path: Path):
    device(tmp_path, "mlx5_0", gids=(MAPPED,))
    device(tmp_path, "mlx5_1", state="1: DOWN")
    ((field, detail),) = faults(RdmaSettings(), tmp_path, ("mlx5_1",))
    assert field == "devices"
    assert "mlx5_1 is DOWN; devices whose port is up: mlx5_0" in detail


def test_no_port_up_at_all_is_a_fault_also_where_mooncake_chooses(tmp_path: Path):
    device(tmp_path, "mlx5_1", state="1: DOWN")
    ((field, detail),) = faults(RdmaSettings(), tmp_path)
    assert field == "devices"
    assert detail.endswith("up: none")


def test_an_empty_row_of_the_gid_table_says_which_to_take(tmp_path: Path):
    device(tmp_path, "mlx5_0", gids=(LINK_LOCAL, EMPTY, EMPTY, MAPPED))
    ((field, detail),) = faults(RdmaSettings(gid_index=2), tmp_path)
    assert field == "gid_index"
    assert "is 2, an empty row" in detail
    assert "3 = 192.168.77.1 (RoCE v2, eth0). Set gid_index to 3" in detail


def test_a_port_without_any_gid_says_what_is_missing(tmp_path: Path):
    device(tmp_path, "mlx5_0")
    assert [f for f, _ in faults(RdmaSettings(), tmp_path)] == ["gid_index"]
    ((field, detail),) = faults(RdmaSettings(gid_index=1), tmp_path)
    assert field == "gid_index"
    assert "none: its network interface has no address" in detail


def test_a_memory_lock_limit_too_small_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    device(tmp_path, "mlx5_0", gids=(MAPPED,))
    monkeypatch.setattr(rdma_settings, "memlock_room", lambda: MemlockRoom(65_536, 4096))
    ((field, detail),) = faults(RdmaSettings(), tmp_path)
    assert field == "memlock"
    assert "`ulimit -l 1028`" in detail


def test_an_mtu_above_the_ports_is_doubted():
    limits = DeviceLimits(1 << 40, 1024)
    assert mtu_doubt(None, "rxe0", limits) is None
    assert mtu_doubt(1024, "rxe0", limits) is None
    assert mtu_doubt(4096, "rxe0", None) is None
    assert mtu_doubt(4096, "rxe0", DeviceLimits(1 << 40, 0)) is None
    doubt = mtu_doubt(4096, "rxe0", limits)
    assert doubt is not None
    assert "set mtu to 1024" in doubt.detail


def test_a_gid_that_reaches_less_than_another_is_doubted(tmp_path: Path):
    """Row 0 is v1, row 1 is v2 and link-local, row 3 is v2 with an address."""
    device(tmp_path, "mlx5_0", gids=(LINK_LOCAL, LINK_LOCAL, EMPTY, MAPPED))
    port = rdma_port("mlx5_0", tmp_path)
    said = {i: d and d.detail for i in (None, 0, 1, 2, 3) if (d := gid_doubt(i, port)) is not None}
    assert sorted(said, key=str) == [0, 1]
    assert "of kind IB/RoCE v1" in said[0]
    assert "one Ethernet segment only" in said[1]
    assert all("usual is gid_index 3 (3 = 192.168.77.1" in detail for detail in said.values())


def test_where_all_gids_are_link_local_none_is_doubted(tmp_path: Path):
    device(tmp_path, "mlx5_0", gids=(EMPTY, LINK_LOCAL, EMPTY, LINK_LOCAL))
    port = rdma_port("mlx5_0", tmp_path)
    assert [gid_doubt(i, port) for i in (1, 3)] == [None, None]
