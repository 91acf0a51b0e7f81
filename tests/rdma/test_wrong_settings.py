"""Whatever is set wrong is named, by the store that does not open and by `caketin doctor --rdma`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rdma.virtual_machine import Guest

pytestmark = pytest.mark.rdma


def finding(findings: list[dict[str, str]], what: str) -> dict[str, str]:
    (one,) = [f for f in findings if f["what"] == what]
    return one


@pytest.mark.guest_case("wrong_settings")
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("device", "devices: RDMA device mlx5_9 is not here; this host has: rxe0, rxe1"),
        ("gid_index", "gid_index: is 7, an empty row of the GID table of rxe0"),
        ("rank", "devices: names no device for rank 'dp0-pp0-cp0-tp1'"),
        ("mtu", "mtu: is 1500, must be one of"),
    ],
)
def test_a_store_with_a_wrong_setting_does_not_open_and_names_it(guest: Guest, wrong: str, says: str) -> None:
    """Mooncake by itself tries 20 times and then says -600."""
    assert says in guest["wrong_settings"].facts[wrong]["error"]


@pytest.mark.guest_case("memlock")
def test_a_memory_lock_limit_too_small_is_named_when_a_store_opens(guest: Guest) -> None:
    """Field report 29."""
    said = guest["memlock"].facts["opening"]
    assert "memlock: the memory lock limit is 65536 bytes" in said
    assert "ulimit -l" in said
    assert "LimitMEMLOCK" in said


@pytest.mark.guest_case("memlock")
def test_a_limit_that_a_pool_does_not_fit_in_is_named_with_what_is_taken(guest: Guest) -> None:
    facts = guest["memlock"].facts
    said = facts["registering"]
    assert said.startswith("registration_failed: Mooncake refused ")
    assert f"the memory lock limit is {facts['limits'][1]} bytes" in said
    taken = int(said.partition("bytes, ")[2].partition(" ")[0])
    assert taken >= 16 << 20, "what the client itself has registered counts"


@pytest.mark.guest_case("memlock", "doctor_wrong")
@pytest.mark.parametrize(
    ("wrong", "setting", "says"),
    [
        ("devices", "devices", "mlx5_9 is not here; this host has: rxe0, rxe1"),
        ("gid_index", "gid_index", "Set gid_index to 1"),
        ("rank", "devices", "names no device"),
        ("memlock", "memlock", "the memory lock limit is 65536 bytes"),
    ],
)
def test_doctor_names_the_setting_to_change(guest: Guest, wrong: str, setting: str, says: str) -> None:
    findings: list[dict[str, Any]] = (
        guest["memlock"].facts["doctor"] if wrong == "memlock" else guest["doctor_wrong"].facts[wrong]
    )
    found = finding(findings, f"RDMA setting {setting}")
    assert found["state"] == "bad"
    assert says in found["found"]
    assert not [f for f in findings if "loopback" in f["what"]], "what cannot work is not tried"


@pytest.mark.guest_case("doctor_settings")
def test_doctor_moves_bytes_and_prints_device_gid_mtu_and_bandwidth(guest: Guest) -> None:
    findings = guest["doctor_settings"].facts["findings"]
    device = finding(findings, "RDMA device rxe0")
    assert device["state"] == "ok"
    assert "1 = 192.168.77.1 (RoCE v2, eth0)" in device["found"]
    assert "MTU 1024" in device["found"]
    moved = finding(findings, "RDMA loopback rxe0")
    assert moved["state"] == "ok"
    for part in ("MiB over verbs", "GB/s", "GID index 0", "packets counted on the device"):
        assert part in moved["found"]


@pytest.mark.guest_case("doctor_settings")
def test_doctor_doubts_a_gid_that_reaches_one_segment_only_but_tries_it(guest: Guest) -> None:
    doubt = finding(guest["doctor_settings"].facts["findings"], "RDMA setting gid_index")
    assert doubt["state"] == "warn"
    assert "usual is gid_index 1 (1 = 192.168.77.1" in doubt["found"]


@pytest.mark.guest_case("doctor_settings")
def test_every_setting_arrives_at_the_queue_pairs(guest: Guest) -> None:
    noted = guest["doctor_settings"].facts["noted"]
    assert noted
    assert all(n == {"mtu": 512, "gid_index": 0, "traffic_class": 106, "service_level": 3} for n in noted)
