"""A replay of several passes over one load, a part of its stack killed in one of them and started anew later.

    python -m tests.chaos.torment FOLDER STORE PART

runs one and checks it: a process of its own, because a native call that hangs is left to the end of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import redis

from caketin.replay.driver import Replay
from caketin.replay.rank_group import rank_group
from caketin.replay.report import Report
from caketin.replay.trace import Load, generate
from caketin.stack import Stack, StackSettings
from dataplane.child_process import ChildProcess
from dataplane.mooncake_master import MasterHttp
from tests.replay.stacks import PROMPT, SETTINGS

LOAD = generate(60, seed=11)
CALL_SECONDS = 1.0
TRANSFER_SECONDS = 2.0
PASSES = 5
KILLED_IN, RESTARTED_AFTER = 1, 2
"""Killed a third into the second pass, back after the third; the fourth stores again, the fifth must hit."""

NAMES = {"redis": "valkey", "control": "control plane", "master": "mooncake-master", "node": "storage-node"}
SECONDS_UNTIL_MASTER_FORGETS_A_NODE = 20.0


@dataclass
class Victim:
    """A process of the stack: killed, seen dead, and started anew with what it was started with."""

    child: ChildProcess
    command: list[str] = field(init=False)
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        proc = Path("/proc") / str(self.child.process.pid)
        self.command = [a.decode() for a in (proc / "cmdline").read_bytes().split(b"\0")[:-1]]
        pairs = [e.decode().partition("=") for e in (proc / "environ").read_bytes().split(b"\0") if e]
        self.env = {name: value for name, _, value in pairs}

    def kill(self) -> None:
        os.kill(self.child.process.pid, signal.SIGKILL)
        assert self.child.process.wait(10) == -signal.SIGKILL
        assert not Path(f"/proc/{self.child.process.pid}").exists()

    def start_anew(self) -> ChildProcess:
        return ChildProcess.start(f"{self.child.name} anew", self.command, self.child.log, self.env)


@dataclass
class Torment:
    """One part's death and return, and what the replay saw of it."""

    stack: Stack
    part: str
    report: Report = field(init=False)
    hits: list[int] = field(default_factory=lambda: [0])
    degraded: list[int] = field(default_factory=lambda: [0])
    anew: list[ChildProcess] = field(default_factory=list)

    def run(self) -> None:
        (child,) = [c for c in self.stack.children if c.name.startswith(NAMES[self.part])]
        victim = Victim(child)
        settings = replace(
            SETTINGS, url=self.stack.url, call_seconds=CALL_SECONDS, transfer_seconds=TRANSFER_SECONDS
        )
        load = Load("passes", LOAD.requests * PASSES)
        done = 0

        def advance(pages: int) -> None:
            nonlocal done
            before, done = done, done + pages
            if before < LOAD.pages * KILLED_IN + LOAD.pages // 3 <= done:
                victim.kill()
            if done % LOAD.pages == 0:
                self.hits.append(self.report.hit_pages)
                self.degraded.append(self.report.degraded_pages)
                if done == LOAD.pages * (RESTARTED_AFTER + 1):
                    self.anew.append(victim.start_anew())
                    wait_until(self.serves, 30)
                    if self.part == "node":
                        time.sleep(SECONDS_UNTIL_MASTER_FORGETS_A_NODE)

        try:
            with rank_group(settings, load.longest) as group:
                replay = Replay(settings, load, group, advance)
                self.report = replay.report
                replay.run()
                self.report.hanging = group.leader.hanging
        finally:
            for child in self.anew:
                child.stop()

    def serves(self) -> bool:
        """Whether the part that was started anew does its work."""
        match self.part:
            case "redis":
                with redis.Redis.from_url(self.stack.redis_url) as client:
                    try:
                        return bool(client.ping()) and ready(self.stack.url)
                    except redis.RedisError:
                        return False
            case "control":
                return ready(self.stack.url)
            case "master":
                return bool(self._segments())
        return b"storage node ready" in self.anew[0].log.read_bytes().rpartition(b"storage node ready")[1]

    def _segments(self) -> int:
        assert self.stack.mooncake is not None
        master = MasterHttp(self.stack.mooncake.master_http)
        try:
            return len(master.segments()) if master.ready() else 0
        except Exception:
            return 0
        finally:
            master.close()

    def pass_hits(self, number: int) -> int:
        return self.hits[number + 1] - self.hits[number]

    def check(self) -> None:
        report = self.report
        print(self.part, "hits by pass", [self.pass_hits(i) for i in range(PASSES)], "of", LOAD.pages)
        print("degraded", self.degraded, "errors", dict(report.errors), "events", dict(report.events))
        print("lost", dict(report.lost), "unstored", report.unstored_pages, "hanging", report.hanging)
        print({call: round(max(seen), 2) for call, seen in report.latencies.seconds.items()})
        assert report.requests == len(LOAD.requests) * PASSES
        assert report.wrong_pages == 0
        assert report.verified_pages == report.hit_pages
        assert report.promised_pages == report.hit_pages + report.lost_pages
        assert sum(report.lost.values()) == report.lost_pages
        assert sum(report.misses.values()) == report.queried_pages - report.promised_pages
        assert max(report.latencies.seconds["lookup"]) <= 3 * CALL_SECONDS
        for call in ("prefetch", "back up"):
            assert max(report.latencies.seconds[call]) <= 3 * TRANSFER_SECONDS
        # A dead storage node fails the objects that it had, and no call as a whole.
        noticed = (
            report.lost_pages and report.unstored_pages
            if self.part == "node"
            else sum(report.errors.values())
        )
        assert noticed, "nobody noticed that it was gone"
        assert self.pass_hits(RESTARTED_AFTER) < LOAD.pages, "nothing was missing"
        # What was away is back, and the load has been seen whole since: everything is there again.
        assert self.pass_hits(PASSES - 1) == LOAD.pages


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=1, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def wait_until(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come back"
        time.sleep(0.05)


def main(folder: str, store: str, part: str) -> None:
    settings = StackSettings(Path(folder), store=store, store_bytes=64 << 20, control=PROMPT)
    with Stack(settings) as stack:
        torment = Torment(stack, part)
        torment.run()
    torment.check()
    sys.stdout.flush()
    if torment.report.hanging:
        os._exit(0)


def in_a_process(folder: Path, store: str, part: str, seconds: float) -> str:
    """Run one; return what it said.

    Raises:
        AssertionError: with the end of its output, where it failed.
    """
    command = [sys.executable, "-m", "tests.chaos.torment", str(folder), store, part]
    repo = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=repo)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
