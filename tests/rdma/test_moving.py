"""Bytes over verbs: registered memory moves and arrives whole, other memory does not; devices are chosen."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rdma.guest.rxe import MTU
from tests.rdma.virtual_machine import Guest

pytestmark = pytest.mark.rdma

MIB = 1 << 20
NOT_REGISTERED, TRANSFER_FAILED = 6, 5


def assert_over_verbs(packets: int, size: int) -> None:
    """At least one packet for each MTU of bytes went over the device: TCP would have moved none of them."""
    assert packets >= size // MTU


def assert_moved(facts: dict[str, Any]) -> None:
    assert facts["errors"] == []
    assert facts["committed"] == facts["promised"] == facts["restored"] == facts["pages"]
    assert facts["wrong"] == []
    assert_over_verbs(facts["back_up_packets"], facts["stored_bytes"])
    assert_over_verbs(facts["prefetch_packets"], facts["read_bytes"])
    assert set(facts["queue_pairs"]) == {"rxe0"}


def assert_registered_without_cutting_a_page(facts: dict[str, Any], most: int | None = None) -> None:
    """The registrations of the pools tile their regions, and every fragment of every slot lies in one."""
    for pool in facts["pools"].values():
        for address, length in pool["regions"]:
            pieces = [(a, n) for a, n in sorted(facts["registered"]) if address <= a < address + length]
            assert [a for a, _ in pieces] == [address, *(a + n for a, n in pieces[:-1])]
            assert sum(n for _, n in pieces) == length
            assert most is None or all(n <= most for _, n in pieces)
        for base, stride, size in pool["fragments"]:
            for start in range(base, base + pool["slots"] * stride, stride):
                assert any(a <= start and start + size <= a + n for a, n in facts["registered"])


@pytest.mark.guest_case("mover_mha")
def test_smoke_mha_pages_come_back_as_they_were_stored(guest: Guest) -> None:
    facts = guest["mover_mha"].facts
    assert_moved(facts)
    assert facts["read_bytes"] == facts["stored_bytes"] == 12 * 200_000
    assert facts["read"] == {"kv": 12}
    assert_registered_without_cutting_a_page(facts)


@pytest.mark.guest_case("mover_mha")
def test_the_settings_of_a_rank_are_those_of_its_queue_pairs(guest: Guest) -> None:
    """But for the MTU, which was set to more than the port has."""
    noted = guest["mover_mha"].facts["noted"]
    assert noted
    assert all(n == {"mtu": MTU, "gid_index": 0, "traffic_class": 106, "service_level": 3} for n in noted)


@pytest.mark.guest_case("mover_deepseek_v4_small_regions")
def test_deepseek_v4_on_a_device_that_registers_a_mebibyte_at_once(guest: Guest) -> None:
    """Field report 30. Of the sliding window only the last page is read."""
    facts = guest["mover_deepseek_v4_small_regions"].facts
    assert_moved(facts)
    read = facts["read"]
    assert read.pop("swa") == 1
    assert read == dict.fromkeys(("deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128"), 12)
    assert facts["max_region_bytes"] == MIB, "the device says so"
    assert facts["refused"] == [], "the device was asked for more than it registers"
    assert max(n for _, n in facts["pools"]["swa"]["regions"]) > MIB
    assert_registered_without_cutting_a_page(facts, MIB)


@pytest.mark.guest_case("store")
def test_registered_memory_moves(guest: Guest) -> None:
    facts = guest["store"].facts
    assert facts["put"] == facts["get"] == [0] * 8
    assert facts["equal"]
    assert facts["registered"] == [facts["region"]]
    assert_over_verbs(facts["put_packets"], facts["bytes"])
    assert_over_verbs(facts["get_packets"], facts["bytes"])


@pytest.mark.guest_case("store")
def test_memory_that_is_not_registered_is_refused(guest: Guest) -> None:
    assert guest["store"].facts["unregistered"] == [NOT_REGISTERED] * 2


@pytest.mark.guest_case("store")
def test_memory_whose_registration_was_forgotten_does_not_move(guest: Guest) -> None:
    """What TCP hides: there it works. So all that moves in this suite was registered."""
    facts = guest["store"].facts
    assert facts["registration_forgotten"] == [TRANSFER_FAILED] * 2
    assert facts["registration_forgotten_get"] == [TRANSFER_FAILED] * 2


@pytest.mark.guest_case("devices_by_rank")
def test_each_rank_uses_its_own_device(guest: Guest) -> None:
    facts = guest["devices_by_rank"].facts
    for rank, device in (("dp0-pp0-cp0-tp0", "rxe0"), ("dp0-pp0-cp0-tp1", "rxe1")):
        assert set(facts[rank]["queue_pairs"]) == {device}
        assert facts[rank]["equal"]
        assert_over_verbs(facts[rank]["put_packets"], facts[rank]["bytes"])
        assert_over_verbs(facts[rank]["get_packets"], facts[rank]["bytes"])


@pytest.mark.guest_case("tcp_control")
def test_over_tcp_no_packet_is_counted(guest: Guest) -> None:
    """The control: else the counts of the other tests would prove nothing."""
    facts = guest["tcp_control"].facts
    assert facts["equal"]
    assert (facts["put_packets"], facts["get_packets"], facts["queue_pairs"]) == (0, 0, [])
