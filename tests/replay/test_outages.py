"""A replay goes on when a part is away: it counts, keeps its deadlines, ends with its report."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from caketin.embedded_redis import EmbeddedRedis
from caketin.replay.driver import replay
from caketin.replay.lanes import Lanes, NoLane, TransferOverdue
from caketin.replay.report import Report
from caketin.replay.trace import Load, generate
from caketin.stack import Stack, StackSettings
from dataplane.child_process import ChildFailed, ChildProcess
from dataplane.mooncake_store import MooncakeStore
from tests.replay.stacks import SETTINGS, run

LOAD = generate(80, seed=9)
CALL_SECONDS = 1.0


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(StackSettings(tmp_path / "stack", store="file")) as running:
        yield running


def run_and(
    stack: Stack, do: dict[int, Callable[[], object]], load: Load = LOAD, **settings: object
) -> Report:
    """Replay, and do things once so many pages were dealt with."""
    pages = 0

    def advance(more: int) -> None:
        nonlocal pages
        before, pages = pages, pages + more
        for at in [at for at in do if before < at <= pages]:
            do[at]()

    return replay(
        replace(SETTINGS, url=stack.url, **{"call_seconds": CALL_SECONDS, **settings}), load, advance
    )


def child(stack: Stack, name: str) -> ChildProcess:
    (found,) = [c for c in stack.children if c.name.startswith(name)]
    return found


def slowest(report: Report, call: str) -> float:
    return max(report.latencies.seconds[call])


def test_the_control_plane_killed_in_mid_replay_is_counted_and_no_miss(stack: Stack):
    report = run_and(stack, {300: child(stack, "control plane").kill})
    assert report.requests == len(LOAD.requests)
    assert report.degraded_pages == LOAD.pages - report.queried_pages > 0
    assert sum(report.misses.values()) == report.queried_pages - report.promised_pages
    assert report.errors["lookup: control_plane_away"] == report.degraded
    assert report.errors["back up: control_plane_away"] > 0
    assert report.wrong_pages == 0
    assert slowest(report, "lookup") < 3 * CALL_SECONDS


def test_a_control_plane_that_stays_away_ends_the_replay_with_its_report(stack: Stack):
    report = run_and(stack, {300: child(stack, "control plane").kill}, give_up_seconds=0.5)
    assert report.ended_early == "no answer for 0.5 s"
    assert 0 < report.degraded < report.requests < len(LOAD.requests)


def test_a_control_plane_that_hangs_costs_no_call_more_than_its_deadline(stack: Stack):
    part = Load("short", LOAD.requests[:20])
    os_pid = child(stack, "control plane").process.pid
    report = run_and(stack, {60: lambda: os.kill(os_pid, signal.SIGSTOP)}, part, call_seconds=0.5)
    os.kill(os_pid, signal.SIGCONT)
    assert report.requests == 20
    assert report.degraded > 0
    assert slowest(report, "lookup") < 3 * 0.5
    assert report.wrong_pages == 0


def test_redis_killed_and_started_anew_in_mid_replay_hits_come_back_by_themselves(stack: Stack):
    folder = stack.settings.data_dir / "redis"
    port = int(stack.redis_url.rpartition(":")[2].partition("/")[0])
    started_anew: list[EmbeddedRedis] = []

    def kill() -> None:
        child(stack, "valkey").kill()

    def start() -> None:
        started_anew.append(EmbeddedRedis.start(folder, port=port))
        deadline = time.monotonic() + 20
        while httpx.get(f"{stack.url}/readyz", trust_env=False).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    load = Load("twice", LOAD.requests * 2)
    try:
        report = run_and(stack, {300: kill, LOAD.pages: start}, load=load)
    finally:
        for server in started_anew:
            server.stop()
    assert report.requests == len(load.requests)
    assert 0 < report.degraded < len(LOAD.requests)
    assert report.wrong_pages == 0
    assert slowest(report, "lookup") < 3 * CALL_SECONDS
    # What was stored while Redis was away was not claimed: the second half stores it again.
    assert report.hit_pages > LOAD.pages / 3


def test_a_redis_that_lost_everything_makes_the_rank_register_again(stack: Stack):
    import redis

    with redis.Redis.from_url(stack.redis_url) as client:
        long = Load("long", LOAD.requests * 3)
        report = run_and(stack, {500: client.flushall}, long)
    assert report.requests == len(long.requests)
    assert report.events["registered again"] >= 1
    assert report.wrong_pages == 0
    tail = run(stack, LOAD)
    assert tail.degraded == 0
    assert tail.hit_pages > 0


def test_a_store_that_cannot_be_written_is_counted(stack: Stack):
    pages = stack.settings.data_dir / "pages"
    moved = pages.with_name("moved")

    def take_away() -> None:
        pages.rename(moved)
        pages.write_text("no folder")

    report = run_and(stack, {300: take_away})
    assert report.requests == len(LOAD.requests)
    assert report.errors["back up: store_error"] > 0
    assert report.hit_pages < LOAD.pages
    assert (report.wrong_pages, report.degraded) == (0, 0)
    assert sum(report.lost.values()) == report.lost_pages > 0


def test_a_rank_that_dies_ends_the_replay_with_its_name(stack: Stack):
    import multiprocessing

    def kill() -> None:
        (rank,) = multiprocessing.active_children()
        rank.kill()

    with pytest.raises(ChildFailed, match=r"rank tp1 ended with code -9"):
        run_and(stack, {100: kill}, pools="mha", tp=2)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_storage_node_that_is_gone_or_hangs_holds_up_no_call(tmp_path: Path, number: signal.Signals):
    loads, why = MooncakeStore.available()
    if not loads:
        pytest.skip(f"Mooncake does not load: {why}")
    # A process of its own: a client under a call that hangs is left to the end of its process.
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.replay.test_outages import storage_node_outage\n"
        "storage_node_outage(Path(sys.argv[1]), int(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def storage_node_outage(folder: Path, number: int) -> None:
    seconds = 2.0
    with Stack(StackSettings(folder / "stack", store="mooncake", store_bytes=64 << 20)) as stack:
        node = child(stack, "storage-node").process
        report = run_and(stack, {300: lambda: os.kill(node.pid, number)}, transfer_seconds=seconds)
    assert report.requests == len(LOAD.requests)
    assert report.wrong_pages == 0
    assert report.unstored_pages > 0
    assert slowest(report, "prefetch") < 3 * seconds
    assert slowest(report, "back up") < 3 * seconds
    assert sum(report.lost.values()) == report.lost_pages
    assert (report.hanging > 0) == (number == signal.SIGSTOP)
    hangs = sum(n for name, n in report.errors.items() if "transfer" in name)
    assert (hangs > 0) == (number == signal.SIGSTOP), report.errors
    if report.hanging:
        os._exit(0)


def test_a_transfer_that_hangs_keeps_its_slots_until_it_returned():
    release = threading.Event()
    lanes = Lanes(2, 3)
    told: list[threading.Event] = []

    def hang(slots, abandoned):
        told.append(abandoned)
        release.wait(20)
        return slots

    def use(slots, _abandoned):
        return slots.tolist()

    with pytest.raises(TransferOverdue):
        lanes.run(hang, 0.05)
    seen = [lanes.run(use, 5) for _ in range(3)]
    assert seen[0] == seen[1] == seen[2]
    with pytest.raises(TransferOverdue):
        lanes.run(hang, 0.05)
    with pytest.raises(NoLane):
        lanes.run(hang, 5)
    assert [abandoned.is_set() for abandoned in told] == [True, True]
    release.set()
    deadline = time.monotonic() + 10
    while lanes.busy:
        assert time.monotonic() < deadline
    assert len(lanes.run(use, 5)) == 3
    with pytest.raises(ZeroDivisionError):
        lanes.run(lambda *_: 1 / 0, 5)
    assert lanes.run(lambda *_: 7, 5) == 7
