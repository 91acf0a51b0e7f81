"""Hit counters on every kind of Redis: exactly once, by time, a gap where a process was killed (C1, C2)."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from metadata import hit_counters, redis_keys
from metadata.errors import InvalidInput, RedisUnavailable
from metadata.hit_counters import CountedLookup, CountedPages, HitCounters, Source
from metadata.redis_server import RedisServer, RedisSettings
from tests import redis_servers
from tests.redis_servers import start_server

SOURCE = Source("t", "9f86d081884c7d65", "model", "engine")
AT = 1_764_576_005


def lookup(queried=10, hit=4, *, at=AT, request_id=None, source=SOURCE, miss=("swa", "evicted")):
    return CountedLookup(source, queried, hit, {"kv": queried, "swa": hit}, miss, request_id, at)


async def rates(counters: HitCounters, by=(), *, tenant="t", window=60, step=10, now=AT):
    return await counters.series(window, step, by, tenant, now=now)


def total(answer, metric="queried_pages"):
    return sum(sum(row[metric]) for row in answer["series"])


async def test_counts_of_the_whole_prefix_and_of_each_pool(redis_server):
    counters = HitCounters(redis_server)
    counters.count(lookup())
    counters.count(lookup(6, 6, at=AT - 20, miss=None))
    counters.count(CountedPages(SOURCE, "lost_pages", {"": 3, "swa": 3}, AT))
    answer = await rates(counters)
    (row,) = answer["series"]
    assert row["queried_pages"] == [0, 0, 0, 6, 0, 10]
    assert row["hit_pages"] == [0, 0, 0, 6, 0, 4]
    assert row["lost_pages"] == [0, 0, 0, 0, 0, 3]
    assert row["misses"] == {"evicted": [0, 0, 0, 0, 0, 6]}
    assert answer["partial_last"]
    by_pool = {row["labels"]["pool"]: row for row in (await rates(counters, ["pool"]))["series"]}
    assert by_pool["kv"]["hit_pages"][-1] == 10
    assert by_pool["swa"]["misses"] == {"evicted": [0, 0, 0, 0, 0, 6]}


async def test_every_resolution_has_the_same_sums(redis_server):
    counters = HitCounters(redis_server)
    for at in (AT, AT - 100, AT - 3_500):
        counters.count(lookup(at=at))
    for window, step in ((7_200, 10), (7_200, 60), (7_200, 3_600)):
        assert total(await rates(counters, window=window, step=step)) == 30


async def test_replicas_add_up(redis_server):
    replicas = [HitCounters(redis_server) for _ in range(4)]
    for counters in replicas:
        for _ in range(25):
            counters.count(lookup())
    await asyncio.gather(*(c.flush() for c in replicas))
    assert total(await rates(replicas[0])) == 1_000


async def test_a_request_id_counts_once_whichever_replica_it_is_repeated_at(redis_server):
    first, second = HitCounters(redis_server), HitCounters(redis_server)
    for counters in (first, first, second):
        counters.count(lookup(request_id="r1"))
    second.count(lookup(request_id="r2"))
    other = Source("other", SOURCE.namespace, "model", "engine")
    second.count(lookup(request_id="r1", source=other))
    await asyncio.gather(first.flush(), second.flush())
    first.count(lookup(request_id="r1", at=AT + 5))
    assert total(await rates(first, now=AT + 5)) == 20
    assert total(await rates(first, tenant="other")) == 10, "a tenant's ids are its own"


async def test_a_request_id_is_remembered_for_ten_minutes(redis_stack, redis_server):
    counters = HitCounters(redis_server)
    counters.count(lookup(request_id="r"))
    await counters.flush()
    key = redis_keys.counted_request("t", "r")
    assert 590 <= redis_stack.ask(key, "TTL", key) <= 600


async def test_more_than_one_flush_holds_is_taken_in_several(redis_server, monkeypatch):
    monkeypatch.setattr(hit_counters, "ASKED_PER_FLUSH", 7)
    counters = HitCounters(redis_server)
    for i in range(50):
        counters.count(lookup(request_id=f"r{i}"))
    assert counters.backlog == 50
    await counters.flush()
    assert counters.backlog == 0
    assert total(await rates(counters)) == 500


async def test_a_flush_that_is_sent_twice_counts_once(redis_server):
    counters = HitCounters(redis_server)
    counters.count(lookup())
    counters.count(lookup(request_id="r"))
    sealed = counters._seal(goodbye=False)
    assert await redis_server.run(sealed) == 1
    assert await redis_server.run(sealed) == 0
    counters.count(lookup())
    assert total(await rates(counters)) == 30


class AnswerEater:
    """A proxy that passes commands on and can swallow the answers: served, but nobody hears of it."""

    def __init__(self, port: int) -> None:
        self.target, self.eat, self.port = port, False, 0
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target)

        async def answers():
            while data := await up_reader.read(65_536):
                if self.eat:
                    writer.transport.abort()
                    return
                writer.write(data)
                await writer.drain()

        back = asyncio.create_task(answers())
        self._tasks.add(back)
        try:
            while data := await reader.read(65_536):
                up_writer.write(data)
                await up_writer.drain()
        except ConnectionError:
            pass
        finally:
            up_writer.close()
            writer.close()


async def test_a_flush_whose_answer_is_cut_off_counts_once(tmp_path):
    server = start_server(tmp_path)
    try:
        async with AnswerEater(server.port) as proxy:
            redis = RedisServer.connect(RedisSettings(f"redis://127.0.0.1:{proxy.port}"))
            counters = HitCounters(redis)
            await counters.flush()  # the script is known and a connection is idle
            counters.count(lookup())
            counters.count(lookup(request_id="r"))
            proxy.eat = True
            with pytest.raises(RedisUnavailable):
                await counters.flush()
            with server.plain() as plain:
                assert plain.exists(redis_keys.hits(10, AT // 10 * 10)), "it was served all the same"
            counters.count(lookup())
            proxy.eat = False
            await counters.flush()
            assert total(await rates(counters)) == 30
            await redis.close()
    finally:
        server.child.stop()


async def test_a_flush_that_times_out_on_a_frozen_server_counts_once(tmp_path):
    server = start_server(tmp_path)
    redis = RedisServer.connect(RedisSettings(server.url, command_seconds=0.2))
    try:
        counters = HitCounters(redis)
        await counters.flush()
        for _ in range(3):
            counters.count(lookup())
            server.child.process.send_signal(signal.SIGSTOP)
            with pytest.raises(RedisUnavailable):
                await counters.flush()
            server.child.process.send_signal(signal.SIGCONT)
            deadline = time.monotonic() + 10
            while redis.open_circuits():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
        assert total(await rates(counters)) == 30
    finally:
        server.child.process.send_signal(signal.SIGCONT)
        await redis.close()
        server.child.stop()


async def test_while_redis_is_away_counts_wait_in_bounded_memory(redis_server, monkeypatch):
    monkeypatch.setattr(hit_counters, "MAX_PENDING", 10)
    counters = HitCounters(redis_server)
    for i in range(15):
        counters.count(lookup(request_id=f"r{i}"))
    assert counters.dropped == 5
    for i in range(15):
        counters.count(lookup(source=Source("t", "ns", "m", f"e{i}")))
    assert counters.backlog <= 10 + 10 + 10
    assert counters.dropped > 5
    await counters.flush()
    assert counters.backlog == 0


async def test_sums_are_exact_beyond_what_a_double_holds_and_stay_at_the_end_of_64_bits(
    redis_stack, redis_server
):
    counters = HitCounters(redis_server)
    key = redis_keys.hits(10, AT // 10 * 10)
    row = hit_counters._row(SOURCE, "", "queried_pages")
    redis_stack.ask(key, "HSET", key, row, str(2**53))
    counters.count(lookup(1, 0))
    assert total(await rates(counters)) == 2**53 + 1
    redis_stack.ask(key, "HSET", key, row, str(2**63 - 2))
    counters.count(lookup(65_536, 0))
    assert total(await rates(counters)) == 2**63 - 1


async def test_rows_are_bounded_and_the_rest_counts_as_other(redis_stack, redis_server, monkeypatch):
    monkeypatch.setattr(hit_counters, "MAX_ROWS", 40)
    counters = HitCounters(redis_server)
    for i in range(200):
        counters.count(lookup(source=Source("t", SOURCE.namespace, "model", f"e{i}")))
        if i % 50 == 49:
            await counters.flush()
    key = redis_keys.hits(10, AT // 10 * 10)
    rows = redis_stack.ask(key, "HLEN", key)
    assert rows <= 40 + 8, "and the rows that count the rest"
    answer = await rates(counters, ["engine"])
    assert total(answer) == 2_000, "nothing is lost"
    named = {row["labels"]["engine"] for row in answer["series"]}
    assert "other" in named
    assert total(await rates(counters, ["pool"])) == 4_000


async def test_a_tenant_sees_its_own_counts_only(redis_server):
    counters = HitCounters(redis_server)
    counters.count(lookup(source=Source("a", "n", "m", "e")))
    counters.count(lookup(20, 1, source=Source("b", "n", "m", "e")))
    assert total(await rates(counters, tenant="a")) == 10
    assert total(await rates(counters, tenant="b")) == 20
    assert total(await rates(counters, tenant=None)) == 30
    assert total(await rates(counters, tenant="c")) == 0


@pytest.mark.parametrize(
    ("window", "step", "by", "field"),
    [
        (60, 7, (), "step"),
        (60, 0, (), "step"),
        (10**8, 3_600, (), "step"),
        (172_800, 10, (), "step"),
        (172_800, 60, (), "window"),
        (60, 10, ("colour",), "by"),
    ],
)
async def test_what_is_not_kept_is_refused(redis_server, window, step, by, field):
    with pytest.raises(InvalidInput) as caught:
        await HitCounters(redis_server).series(window, step, by, "t")
    assert caught.value.errors[0].field == field


async def test_time_buckets_end(redis_stack, redis_server):
    counters = HitCounters(redis_server)
    counters.count(lookup())
    await counters.flush()
    for step, kept in ((10, 7_200), (60, 172_800), (3_600, 7_776_000)):
        key = redis_keys.hits(step, AT // step * step)
        assert kept < redis_stack.ask(key, "TTL", key) <= kept + step


async def test_a_graceful_stop_flushes_and_leaves_no_gap(redis_stack, redis_server):
    counters = HitCounters(redis_server, flush_seconds=30)
    task = asyncio.create_task(counters.run())
    deadline = time.monotonic() + 10
    while not redis_stack.ask(redis_keys.COUNTING, "HLEN", redis_keys.COUNTING):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    counters.count(lookup())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert redis_stack.ask(redis_keys.COUNTING, "HLEN", redis_keys.COUNTING) == 0
    later = await HitCounters(redis_server).series(60, 10, (), "t", now=AT)
    assert total(later) == 10
    assert later["gaps"] == []


def silenced(redis_stack, process: str, seconds_ago: float, number: int = 3) -> int:
    """Make a process look as if its last flush was some time ago; return when, in ms."""
    at = int((time.time() - seconds_ago) * 1000)
    redis_stack.ask(redis_keys.COUNTING, "HSET", redis_keys.COUNTING, process, f"{number} {at} 1000")
    return at


async def test_a_process_that_went_silent_leaves_a_gap_of_one_interval(redis_stack, redis_server):
    at = silenced(redis_stack, "dead", 60)
    counters = HitCounters(redis_server)
    gap = {"start": at // 1000, "end": -(-(at + 1000) // 1000)}
    for _ in range(2):
        answer = await counters.series(3_600, 60, (), "t")
        assert answer["gaps"] == [gap]
    assert redis_stack.ask(redis_keys.COUNTING_GAPS, "HKEYS", redis_keys.COUNTING_GAPS) == [b"dead"]
    assert (await counters.series(30, 10, (), "t"))["gaps"] == [], "outside the window"


async def test_a_process_that_flushes_is_no_gap(redis_stack, redis_server):
    silenced(redis_stack, "alive", 5)
    assert (await HitCounters(redis_server).series(3_600, 60, (), "t"))["gaps"] == []


async def test_a_process_that_was_only_away_takes_its_gap_back_and_counts_once(redis_stack, redis_server):
    away, other = HitCounters(redis_server), HitCounters(redis_server)
    away.count(lookup())
    sealed = away._seal(goodbye=False)
    await redis_server.run(sealed)
    silenced(redis_stack, away.process, 60, number=1)
    await other.flush()
    assert redis_stack.ask(redis_keys.COUNTING_GAPS, "HLEN", redis_keys.COUNTING_GAPS) == 1
    assert await redis_server.run(sealed) == 0, "its number was kept with the gap"
    assert redis_stack.ask(redis_keys.COUNTING_GAPS, "HLEN", redis_keys.COUNTING_GAPS) == 0
    assert total(await rates(other)) == 10


async def test_gaps_are_bounded_and_the_newest_stay(redis_stack, redis_server, monkeypatch):
    monkeypatch.setattr(hit_counters, "MAX_GAPS", 5)
    for i in range(20):
        silenced(redis_stack, f"p{i:02d}", 1_000 - i)
    await HitCounters(redis_server).flush()
    left = redis_stack.ask(redis_keys.COUNTING_GAPS, "HKEYS", redis_keys.COUNTING_GAPS)
    assert sorted(left) == [b"p%02d" % i for i in range(15, 20)]


COUNTING_PROCESS = """
import asyncio, sys, time
from metadata.hit_counters import CountedLookup, HitCounters, Source
from metadata.redis_server import RedisServer, RedisSettings

async def main():
    counters = HitCounters(RedisServer.connect(RedisSettings(sys.argv[1])), flush_seconds=0.2)
    task = asyncio.create_task(counters.run())
    counted = 0
    while True:
        counters.count(CountedLookup(Source("t", "n", "m", "e"), 1, 0, {}))
        counted += 1
        print(counted, flush=True)
        await asyncio.sleep(0.005)

asyncio.run(main())
"""


def start_counting(url: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", COUNTING_PROCESS, url],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(redis_servers.REPO)},
    )


@pytest.mark.chaos
async def test_smoke_a_killed_process_loses_one_interval_at_most_and_leaves_a_gap(tmp_path, monkeypatch):
    monkeypatch.setattr("metadata.hit_rates.SILENT_SECONDS", 1.0)
    monkeypatch.setattr(hit_counters, "SILENT_SECONDS", 1.0)
    server = start_server(tmp_path)
    redis = RedisServer.connect(RedisSettings(server.url))
    process = start_counting(server.url)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(300)]
        killed_at = time.time()
        process.kill()
        rest = process.stdout.read().split()
        counted = int(([line.strip() for line in lines] + rest)[-1])
        await asyncio.sleep(2.2)
        counters = HitCounters(redis, flush_seconds=0.2)
        answer = await counters.series(600, 10, (), "t")
        got = total(answer)
        # One interval of 0.2 s is 40 lookups at most; the rest is the machine being slow to flush.
        assert counted - 400 < got <= counted
        (gap,) = answer["gaps"]
        assert gap["start"] <= killed_at <= gap["end"] + 5
    finally:
        process.kill()
        process.wait()
        await redis.close()
        server.child.stop()
