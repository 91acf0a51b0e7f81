"""Two machines: the storage node is on the other one, and the wire between them is listened to."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rdma.guest.run import FIRST, SECOND
from tests.rdma.guest.rxe import MTU
from tests.rdma.virtual_machine import WIRE_DUMP, Guest

pytestmark = [pytest.mark.rdma, pytest.mark.guest_case("wire")]

ROCE_PORT = 4791
IPV4, UDP = 0x0800, 17


@dataclass(frozen=True)
class Packet:
    """An RDMA packet: who to whom, with which traffic class and how many bytes in all."""

    source: str
    target: str
    traffic_class: int
    length: int


def roce_packets(dump: Path) -> Iterator[Packet]:
    """Read a capture (pcap) and give its RoCE v2 packets."""
    raw = dump.read_bytes()
    at = 24
    while at + 16 <= len(raw):
        kept, length = struct.unpack_from("<II", raw, at + 8)
        frame = raw[at + 16 : at + 16 + kept]
        at += 16 + kept
        if len(frame) < 42 or struct.unpack_from(">H", frame, 12)[0] != IPV4 or frame[23] != UDP:
            continue
        if struct.unpack_from(">H", frame, 36)[0] == ROCE_PORT:
            source, target = (".".join(map(str, frame[i : i + 4])) for i in (26, 30))
            yield Packet(source, target, frame[15], length)


def test_bytes_come_back_from_the_other_machine(guest: Guest) -> None:
    facts = guest["wire"].facts
    assert facts["put"] == facts["get"] == [0] * 8
    assert facts["equal"]
    assert set(facts["queue_pairs"]) == {"rxe0"}


def test_they_went_over_the_wire_in_both_directions_as_roce(guest: Guest) -> None:
    facts = guest["wire"].facts
    there = [p for p in roce_packets(guest.folder / WIRE_DUMP) if (p.source, p.target) == (FIRST, SECOND)]
    back = [p for p in roce_packets(guest.folder / WIRE_DUMP) if (p.source, p.target) == (SECOND, FIRST)]
    for packets in (there, back):
        assert sum(p.length for p in packets if p.length > MTU) >= facts["bytes"]


def test_the_traffic_class_is_on_the_wire(guest: Guest) -> None:
    """Of what this side sends; the answers of the other side have its own."""
    sent = [p for p in roce_packets(guest.folder / WIRE_DUMP) if p.source == FIRST]
    assert {p.traffic_class for p in sent} == {106}
