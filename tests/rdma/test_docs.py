"""docs/rdma.md is followed in the guest, command by command."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dataplane.rdma_devices import devices_by_selector
from tests.rdma.virtual_machine import REPO, Guest

pytestmark = pytest.mark.rdma


def told(guest: Guest, start: str) -> dict[str, Any]:
    return next(f for f in guest["docs_followed"].facts["followed"] if f["line"].startswith(start))


@pytest.mark.guest_case("docs_followed")
def test_every_command_works(guest: Guest) -> None:
    followed = guest["docs_followed"].facts["followed"]
    assert len(followed) >= 6
    assert [(f["line"], f["output"]) for f in followed if f["code"] != 0] == []


@pytest.mark.guest_case("docs_followed")
def test_the_first_look_shows_the_devices(guest: Guest) -> None:
    assert told(guest, "ls /sys")["output"].split() == ["rxe0", "rxe1"]
    assert "link rxe0/1 state ACTIVE" in told(guest, "rdma link")["output"]


@pytest.mark.guest_case("docs_followed")
def test_doctor_moves_bytes_over_the_device(guest: Guest) -> None:
    found = told(guest, "caketin doctor --rdma")
    assert found["packets"] > 1000
    assert "over verbs" in " ".join(found["output"].split())


@pytest.mark.guest_case("docs_followed")
def test_the_replay_compares_its_bytes_and_they_went_over_the_device(guest: Guest) -> None:
    found = told(guest, "caketin replay")
    assert found["packets"] > 50
    assert "mooncake" in found["output"]


def test_the_lines_of_devices_can_be_read() -> None:
    text = (REPO / "docs" / "rdma.md").read_text()
    (block,) = re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.split("   ")[0] for line in block.splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert devices_by_selector(line)
