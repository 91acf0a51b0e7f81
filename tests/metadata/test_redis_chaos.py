"""Redis killed and frozen under load: nobody hangs, nothing acknowledged is lost, nobody is needed."""

import asyncio
import hashlib
import random
import signal
import time

import numpy as np
import pytest

from metadata.circuit import CircuitSettings
from metadata.errors import RedisUnavailable
from metadata.hit_counters import CountedLookup, HitCounters, Source
from metadata.page_claims import Claim
from metadata.page_index import PageIndex
from metadata.pools import AllPages
from metadata.redis_server import RedisServer, RedisSettings
from tests import redis_servers
from tests.redis_servers import RedisStack, start_server

NS = "9f86d081884c7d65"
GATES = {"kv": (0, AllPages())}
COMMAND_SECONDS = 0.5
PAGES = 8

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


class Load:
    """Writers and readers that note what they were told and how long it took."""

    def __init__(self, url: str, tasks: int) -> None:
        self.redis = RedisServer.connect(
            RedisSettings(
                url,
                connect_seconds=0.2,
                command_seconds=COMMAND_SECONDS,
                circuit=CircuitSettings(3, 0.1),
            )
        )
        self.index = PageIndex(self.redis)
        self.counters = HitCounters(self.redis, flush_seconds=0.1)
        self.acknowledged: list[list[bytes]] = []
        self.slowest = 0.0
        self.refused = 0
        self.answered = 0
        self.counted = 0
        self._stop = asyncio.Event()
        self._tasks = [asyncio.create_task(self._work(t)) for t in range(tasks)]
        self._flusher = asyncio.create_task(self.counters.run())

    async def end(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        self._flusher.cancel()
        await asyncio.gather(self._flusher, return_exceptions=True)
        await self.redis.close()

    async def _timed(self, call):
        began = time.monotonic()
        try:
            result = await call
        except RedisUnavailable:
            self.refused += 1
            await asyncio.sleep(0.01)
            return None
        finally:
            self.slowest = max(self.slowest, time.monotonic() - began)
        self.answered += 1
        return result

    async def _work(self, task: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            pages = [hashlib.sha256(f"{task}/{turn}/{i}".encode()).digest() for i in range(PAGES)]
            whole = Claim("kv", 0, 1, (0,), np.ones(PAGES, np.bool_), guarded=False)
            if await self._timed(self.index.commit(NS, pages, [whole], [])) is not None:
                self.acknowledged.append(pages)
                found = await self._timed(self.index.find(NS, pages, GATES))
                assert found is None or found.restorable.hit_pages == PAGES, "read your own commit"
            self.counters.count(CountedLookup(Source("t", NS, "m", "e"), 1, 0, {}))
            self.counted += 1
            await asyncio.sleep(0)

    async def all_there(self) -> int:
        """How many acknowledged pages the index does not have."""
        lost = 0
        for pages in self.acknowledged:
            lost += PAGES - (await self.index.find(NS, pages, GATES)).restorable.hit_pages
        return lost

    async def until_it_works(self, seconds: float = 20) -> None:
        answered, deadline = self.answered, time.monotonic() + seconds
        while self.answered < answered + 20:
            assert time.monotonic() < deadline, "it did not recover by itself"
            await asyncio.sleep(0.02)


async def torment(stack: RedisStack, rounds: int, tasks: int, seed: int = 1) -> Load:
    """Kill and freeze servers in turn under load; return the load, ended."""
    chance = random.Random(seed)
    load = Load(stack.url, tasks)
    await load.until_it_works()
    for turn in range(rounds):
        victim = chance.choice(stack.data)
        if turn % 2:
            victim.child.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(chance.uniform(0.2, 2.0))
            victim.child.process.send_signal(signal.SIGCONT)
        else:
            victim.child.process.kill()
            victim.child.process.wait()
            await asyncio.sleep(chance.uniform(0.0, 1.0))
            victim.begin_restart()
        await load.until_it_works()
    await load.end()
    return load


def tell(load: Load) -> str:
    return f"{load.answered} answered, {load.refused} refused, slowest {load.slowest:.2f} s"


async def check(load: Load) -> None:
    assert load.refused > 0, "nothing was tormented"
    assert load.slowest <= 3 * COMMAND_SECONDS, tell(load)
    assert await load.all_there() == 0, "an acknowledged commit is lost"
    await load.counters.flush()
    counted = 0
    for step, window in ((10, 7_000),):
        answer = await load.counters.series(window, step, (), "t")
        counted = sum(sum(row["queried_pages"]) for row in answer["series"])
    assert counted == load.counted, "counters are exact: no process of ours died"
    claimed = (await load.index.claimed_pages(NS))[0]
    assert claimed >= len(load.acknowledged) * PAGES


@pytest.mark.parametrize(
    ("rounds", "tasks"), [pytest.param(4, 8, id="smoke"), pytest.param(30, 64, id="long")]
)
async def test_kill_and_freeze_of_a_server_that_syncs_always(tmp_path, rounds, tasks):
    server = start_server(tmp_path, "--appendfsync", "always", appendonly="yes")
    stack = RedisStack("valkey", server.url, [server])
    try:
        load = await torment(stack, rounds, tasks)
        await check(load)
        await load.close()
    finally:
        server.child.process.send_signal(signal.SIGCONT)
        stack.stop()


@pytest.mark.parametrize(("rounds", "tasks"), [pytest.param(12, 32, id="long")])
async def test_kill_and_freeze_of_a_clusters_nodes(tmp_path, rounds, tasks):
    options = ("--appendonly", "yes", "--appendfsync", "always", "--cluster-require-full-coverage", "no")
    stack = redis_servers.start_cluster(tmp_path, None, *options)
    try:
        load = await torment(stack, rounds, tasks, seed=2)
        await check(load)
        await load.close()
    finally:
        for server in stack.data:
            if server.child.process.poll() is None:
                server.child.process.send_signal(signal.SIGCONT)
        stack.stop()
