"""A storage node dies while bytes are on their way from it: the deadline, the quarantine, late writes."""

from __future__ import annotations

import pytest

from tests.rdma.virtual_machine import Guest

pytestmark = [pytest.mark.rdma, pytest.mark.guest_case("killed_node")]

SLACK_SECONDS = 10.0
"""What a slow emulated machine may add to a deadline; Mooncake's own wait is many times longer."""


def test_the_node_died_with_its_queue_pairs_connected_and_bytes_arrived(guest: Guest) -> None:
    """Else the tests below would look at a transfer that never was."""
    facts = guest["killed_node"].facts
    assert set(facts["connected"]) == {"rxe1"}
    assert facts["arrived_bytes"] > 0
    assert facts["arrived_objects"] < facts["asked_objects"]


def test_the_caller_gets_its_answer_at_the_deadline(guest: Guest) -> None:
    facts = guest["killed_node"].facts
    assert facts["outcome"] == ["store_overdue"]
    assert facts["call_seconds"] <= facts["caller_seconds"] < facts["call_seconds"] + SLACK_SECONDS


def test_the_lane_is_quarantined_until_the_call_came_back_and_for_a_grace_period(guest: Guest) -> None:
    facts = guest["killed_node"].facts
    assert facts["quarantined"] == 1
    assert facts["native_seconds"] > facts["caller_seconds"]
    assert facts["quarantined_at_return"] == 1
    assert facts["quarantine_seconds"] >= facts["grace_seconds"]
    assert facts["quarantined_at_end"] == 0


def test_another_call_is_served_meanwhile(guest: Guest) -> None:
    facts = guest["killed_node"].facts
    assert facts["other_lane_serves"] == 4
    assert facts["other_lane_seconds"] < facts["native_seconds"]


def test_no_byte_is_claimed_that_did_not_arrive(guest: Guest) -> None:
    assert 0 not in guest["killed_node"].facts["native_codes"]


def test_the_callers_memory_is_never_written(guest: Guest) -> None:
    assert guest["killed_node"].facts["callers_memory_touched"] == 0


def test_nothing_is_written_after_the_call_returned(guest: Guest) -> None:
    """Looked for through the whole grace period and beyond it."""
    assert guest["killed_node"].facts["late_bytes"] == 0
