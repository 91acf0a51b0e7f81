"""A `caketin agent` over verbs: its pools there and back, and a storage node that dies under a prefetch."""

from __future__ import annotations

import pytest

from tests.rdma.guest.agent_cases import DEEPSEEK_V4, MHA, PAGES, POOL_SETS
from tests.rdma.guest.rxe import MTU
from tests.rdma.test_killed_node import SLACK_SECONDS
from tests.rdma.test_moving import MIB, assert_over_verbs, assert_registered_without_cutting_a_page
from tests.rdma.virtual_machine import Guest

pytestmark = pytest.mark.rdma


@pytest.mark.guest_case("agent")
@pytest.mark.parametrize("pools", POOL_SETS)
def test_pages_come_back_from_the_store_as_they_were_published(guest: Guest, pools: str) -> None:
    """Others took all slots meanwhile, so nothing of them was left in host memory."""
    facts = guest["agent"].facts[pools]
    assert facts["ended"] == ["done", True, None]
    assert (facts["left"], facts["restored"]) == (0, PAGES)
    assert facts["wrong"] == []


@pytest.mark.guest_case("agent")
def test_the_pools_that_were_compared(guest: Guest) -> None:
    """Of the sliding window only the last page is read."""
    facts = guest["agent"].facts
    assert facts[MHA]["compared"] == {"kv": PAGES}
    compressed = dict.fromkeys(("deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128"), PAGES)
    assert facts[DEEPSEEK_V4]["compared"] == {**compressed, "swa": 1}


@pytest.mark.guest_case("agent")
@pytest.mark.parametrize("pools", POOL_SETS)
def test_the_bytes_of_the_agent_went_over_the_device(guest: Guest, pools: str) -> None:
    facts = guest["agent"].facts[pools]
    assert_over_verbs(facts["back_up_packets"], facts["stored_bytes"])
    assert_over_verbs(facts["prefetch_packets"], facts["compared_bytes"])
    assert set(facts["queue_pairs"]) == {"rxe0"}


@pytest.mark.guest_case("agent")
def test_its_shared_memory_is_registered_whole_and_no_page_is_cut(guest: Guest) -> None:
    facts = guest["agent"].facts
    assert facts["refused"] == [], "the device was asked for more than it registers"
    for pools in POOL_SETS:
        found = {"registered": facts["registered"], "pools": facts[pools]["pools"]}
        assert max(n for pool in found["pools"].values() for _, n in pool["regions"]) > MIB
        assert_registered_without_cutting_a_page(found, MIB)


@pytest.mark.guest_case("agent")
def test_an_agent_that_is_told_to_end_leaves_nothing(guest: Guest) -> None:
    facts = guest["agent"].facts
    assert facts["exit_code"] == 0
    assert facts["left_behind"] == []


killed = pytest.mark.guest_case("agent_killed_node")


@killed
def test_the_node_died_while_the_prefetch_read_from_it(guest: Guest) -> None:
    """Else the tests below would look at a transfer that never was."""
    facts = guest["agent_killed_node"].facts
    assert set(facts["queue_pairs"]) == {"rxe1"}
    assert facts["left"] == 0
    assert facts["killed_after"] < facts["deadline"]
    assert 0 < facts["arrived_bytes"] < facts["asked_bytes"]


@killed
def test_the_transfer_ends_as_a_miss_at_its_deadline(guest: Guest) -> None:
    facts = guest["agent_killed_node"].facts
    *ended, error = facts["ended"]
    assert ended == ["failed", False, [], None]
    assert "did not answer" in error
    assert facts["deadline"] - 0.5 <= facts["caller_seconds"] < facts["deadline"] + SLACK_SECONDS


@killed
def test_its_slots_are_nobodys_while_the_call_is_out_and_the_others_serve(guest: Guest) -> None:
    facts = guest["agent_killed_node"].facts
    free = facts["slots"] - facts["asked"]
    assert facts["after"] == {"free": free, "resident": 0, "locked": 0, "quarantined": facts["asked"]}
    assert facts["hanging"] == 1
    assert facts["too_many"] == "no_slots"
    assert facts["mine_intact"] == free


@killed
def test_they_come_back_a_grace_period_after_the_call_did(guest: Guest) -> None:
    facts = guest["agent_killed_node"].facts
    assert facts["native_seconds"] > facts["caller_seconds"]
    assert facts["quarantined_at_return"] == facts["asked"]
    assert facts["quarantine_seconds"] >= facts["grace_seconds"] - 2, "looked at from outside, now and then"
    assert facts["quarantined_at_end"] == 0
    assert facts["slots_again"] == facts["asked"]


@killed
def test_nothing_is_written_to_them_after_the_call_returned(guest: Guest) -> None:
    """Looked for through the grace period, beyond it, and in what others have put there since."""
    facts = guest["agent_killed_node"].facts
    assert facts["late_bytes"] == 0
    assert facts["after_intact"] == facts["asked"]


@killed
def test_the_settings_of_an_agent_are_those_of_its_queue_pairs(guest: Guest) -> None:
    noted = guest["agent_killed_node"].facts["noted"]
    assert noted
    assert all(n == {"mtu": MTU, "gid_index": 1, "traffic_class": 106, "service_level": 3} for n in noted)
