"""A store of a tenth of the trace's pages: what is evicted is no hit, and what is promised is there.

Eviction is a fault that happens all day: promised pages that are gone cost an engine the whole prefetch.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from caketin.replay.report import Report
from caketin.replay.trace import Load, read_trace
from caketin.stack import Stack, StackSettings
from dataplane.file_space import on_disk
from dataplane.mooncake_store import MooncakeStore
from tests.replay.oracle import prefix_ids
from tests.replay.stacks import PROMPT, counted, run

REQUESTS = int(os.environ.get("CAKETIN_BOUNDED_REQUESTS", "700"))
"""12031 is the whole trace."""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + REQUESTS // 5)]

PAGE_BYTES = 4096
SEGMENT_PAGE_BYTES = 16_384
"""Mooncake takes no segment below 16 MiB."""

MAX_BROKEN = 0.001
"""Promised pages that may be lost: whose group is under eviction at the moment of the lease."""

ONE_PREFETCH = 2
"""Pages of one such prefetch (seen: 2 in 3,800): here a thousandth of all is hardly more than one page."""

FILES_PER_PAGE = 4
"""The DeepSeek V4 set has four pools with bytes; each is a file of at least a block."""


@contextmanager
def bounded_files(folder: Path, pages: int) -> Iterator[Stack]:
    bound = pages * FILES_PER_PAGE * on_disk(PAGE_BYTES)
    control = {**PROMPT, "CAKETIN_STORE_MAX_BYTES": str(bound)}
    with Stack(StackSettings(folder, store="file", control=control)) as stack:
        yield stack


@contextmanager
def small_segment(folder: Path, pages: int) -> Iterator[Stack]:
    loads, why = MooncakeStore.available()
    if not loads:
        pytest.skip(f"Mooncake does not load: {why}")
    with Stack(
        StackSettings(folder, store="mooncake", store_bytes=pages * SEGMENT_PAGE_BYTES, control=PROMPT)
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def trace(conversation_trace: Path) -> Load:
    return read_trace(conversation_trace, REQUESTS)


def distinct(load: Load) -> int:
    return len({name for ids in load.requests for name in prefix_ids(ids)})


def check(stack: Stack, report: Report) -> None:
    print(json.dumps({k: v for k, v in vars(report).items() if k != "latencies"}, default=str))
    assert report.wrong_pages == 0
    assert report.verified_pages == report.hit_pages > 0
    assert report.promised_pages == report.hit_pages + report.lost_pages
    assert sum(report.lost.values()) == report.lost_pages
    row = counted(stack, "replay")[""]
    assert (row["queried_pages"], row["hit_pages"]) == (report.queried_pages, report.promised_pages)


def check_promises(report: Report) -> None:
    """An engine is promised what the store had and leased, and that is read (T3)."""
    assert report.broken_pages == report.leased_pages - report.hit_pages
    assert report.broken_pages <= report.leased_pages * MAX_BROKEN + ONE_PREFETCH


def test_files_promise_nothing_that_was_evicted(tmp_path: Path, trace: Load):
    with bounded_files(tmp_path, distinct(trace) // 10) as stack:
        report = run(stack, trace, page_bytes=PAGE_BYTES)
        check(stack, report)
        assert report.misses["evicted"] > 0
        assert report.lost_pages <= report.promised_pages // 1000
        assert counted(stack, "replay")[""]["lost_pages"] == report.lost_pages


def test_files_evicted_by_other_requests_in_flight_are_lost_before_they_are_leased_or_not_at_all(
    tmp_path: Path, trace: Load
):
    part = Load("part", trace.requests[:300])
    with bounded_files(tmp_path, distinct(part) // 10) as stack:
        report = run(stack, part, page_bytes=PAGE_BYTES, concurrency=4)
        check(stack, report)
        # Between a lookup and the look at the store another request may have needed the room.
        check_promises(report)


def test_a_small_mooncake_segment_serves_no_wrong_byte_and_keeps_what_it_leased(tmp_path: Path, trace: Load):
    with small_segment(tmp_path, distinct(trace) // 10) as stack:
        report = run(stack, trace, page_bytes=SEGMENT_PAGE_BYTES)
        check(stack, report)
        # The index learns of Mooncake's evictions only from reads, until there is a sweep. The mover looks at
        # the store before it reads, and only an eviction that is under way at that moment comes between.
        check_promises(report)
        assert report.lost_pages + report.unstored_pages > 0, "the segment was never full"
