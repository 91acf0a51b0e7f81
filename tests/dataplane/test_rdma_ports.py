"""What sysfs says of RDMA devices, read from a made-up one."""

import os
from pathlib import Path

import pytest

from dataplane.rdma_loopback import opened_verbs, packets
from dataplane.rdma_ports import device_limits, device_names, numa_node_of_process, rdma_port

EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL = "fe80:0000:0000:0000:0ac0:ebff:fe12:3456"
MAPPED = "0000:0000:0000:0000:0000:ffff:c0a8:4d01"


def device(sysfs: Path, name: str, state: str = "4: ACTIVE", gids: tuple[str, ...] = ()) -> Path:
    folder = sysfs / "class/infiniband" / name
    port = folder / "ports/1"
    for sub in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / sub).mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text("Ethernet\n")
    (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    for i, gid in enumerate(gids):
        (port / "gids" / str(i)).write_text(f"{gid}\n")
        if gid != EMPTY:  # the kernel answers EINVAL for the empty ones
            (port / "gid_attrs/types" / str(i)).write_text("IB/RoCE v1\n" if i % 2 == 0 else "RoCE v2\n")
            (port / "gid_attrs/ndevs" / str(i)).write_text("eth0\n")
    return folder


def test_a_port_and_its_gids_without_the_empty_rows(tmp_path: Path):
    folder = device(tmp_path, "mlx5_0", gids=(LINK_LOCAL, LINK_LOCAL, EMPTY, MAPPED))
    (folder / "device").mkdir()
    (folder / "device/numa_node").write_text("1\n")
    port = rdma_port("mlx5_0", tmp_path)
    assert device_names(tmp_path) == ["mlx5_0"]
    assert (port.state, port.link_layer, port.rate, port.numa_node) == (
        *("ACTIVE", "Ethernet", "100 Gb/sec (4X EDR)"),
        1,
    )
    assert list(map(str, port.gids)) == [
        "0 = fe80::ac0:ebff:fe12:3456 (IB/RoCE v1, eth0)",
        "1 = fe80::ac0:ebff:fe12:3456 (RoCE v2, eth0)",
        "3 = 192.168.77.1 (RoCE v2, eth0)",
    ]
    assert port.gid(2) is None
    assert port.gid(3) == port.usual_gid()


def test_the_usual_gid_is_v2_with_an_address_else_v2_else_any(tmp_path: Path):
    device(tmp_path, "a", gids=(LINK_LOCAL, LINK_LOCAL))
    device(tmp_path, "b", gids=(LINK_LOCAL,))
    device(tmp_path, "c")
    usual = {name: rdma_port(name, tmp_path).usual_gid() for name in "abc"}
    assert {name: gid and gid.index for name, gid in usual.items()} == {"a": 1, "b": 0, "c": None}


def test_a_machine_without_devices_and_a_device_that_is_not_there_say_nothing(tmp_path: Path):
    assert device_names(tmp_path) == []
    port = rdma_port("mlx5_0", tmp_path)
    assert (port.state, port.gids, port.numa_node) == ("", (), None)
    assert device_limits("no_such_device") is None


def test_a_negative_numa_node_is_none(tmp_path: Path):
    folder = device(tmp_path, "mlx5_0")
    (folder / "device").mkdir()
    (folder / "device/numa_node").write_text("-1\n")
    assert rdma_port("mlx5_0", tmp_path).numa_node is None


@pytest.mark.parametrize(("cpus", "node"), [({0: "0-1", 1: "2-3"}, 0), ({0: "", 1: "0-400"}, 1)])
def test_the_numa_node_of_a_process_is_the_one_with_all_its_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: dict[int, str], node: int
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    for i, listed in cpus.items():
        (tmp_path / f"devices/system/node/node{i}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{i}/cpulist").write_text(listed + "\n")
    assert numa_node_of_process(tmp_path) == node


def test_a_process_on_several_nodes_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1, 2})
    for i, listed in ((0, "0-1"), (1, "2,3")):
        (tmp_path / f"devices/system/node/node{i}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{i}/cpulist").write_text(listed + "\n")
    assert numa_node_of_process(tmp_path) is None


def test_packets_are_read_where_the_driver_counts_them(tmp_path: Path):
    folder = device(tmp_path, "mlx5_0")
    assert packets("mlx5_0", tmp_path) is None
    (folder / "ports/1/counters").mkdir()
    (folder / "ports/1/counters/port_xmit_packets").write_text("17\n")
    assert packets("mlx5_0", tmp_path) == 17
    (folder / "ports/1/hw_counters").mkdir()
    (folder / "ports/1/hw_counters/sent_pkts").write_text("3\n")
    assert packets("mlx5_0", tmp_path) == 3


def test_a_process_uses_verbs_when_it_has_a_device_open(tmp_path: Path):
    (tmp_path / "3").symlink_to("/dev/null")
    assert not opened_verbs(tmp_path)
    (tmp_path / "4").symlink_to("/dev/infiniband/uverbs0")
    assert opened_verbs(tmp_path)
