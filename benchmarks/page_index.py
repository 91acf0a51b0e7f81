"""The page index against raw Redis calls on the same server, in the same run.

    python benchmarks/page_index.py [--json FILE] [--runs N] [--url URL]

`raw MGET` is the floor of a lookup: the driver's own client, keys ready-made, one command for all pages.
`find` reads in chunks, decides which lengths are restorable, and gives the generations. Without --url it
starts a Valkey of its own. Times are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from redis.asyncio import Redis, RedisCluster

from caketin.embedded_redis import EmbeddedRedis
from metadata import redis_keys
from metadata.page_claims import AnchorShards, Claim
from metadata.page_index import PageIndex
from metadata.pools import AllPages, TrailingPages
from metadata.redis_server import RedisServer, RedisSettings

NS = "9f86d081884c7d65"
PAGES = 2_048
COMMIT_PAGES = 65_536
SHARDS = 512
GATES = {"kv": (0, AllPages()), "swa": (9, TrailingPages(8))}


def hashes(n: int, salt: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{salt}{i}".encode()).digest() for i in range(n)]


def claim(pool: str, bit: int, n: int, shards: tuple[int, ...] = (0,), count: int = 1) -> Claim:
    return Claim(pool, bit, count, shards, np.ones(n, np.bool_), pool != "kv")


async def median_ms(call: Callable[[], Awaitable[object]], runs: int) -> float:
    await call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        await call()
        times.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(times), 3)


async def lookups(index: PageIndex, raw: Redis | None, runs: int) -> dict[str, float]:
    pages = hashes(PAGES)
    await index.commit(NS, pages, [claim("kv", 0, PAGES), claim("swa", 9, PAGES)], [])
    absent = hashes(PAGES, "absent")
    found: dict[str, float] = {}
    if raw is not None:
        keys = redis_keys.pages(NS, pages)
        found["raw MGET, 2048 pages"] = await median_ms(lambda: raw.mget(keys), runs)
        found["raw MGET, 64 pages"] = await median_ms(lambda: raw.mget(keys[:64]), runs)
    found["find, 2048 pages hit"] = await median_ms(lambda: index.find(NS, pages, GATES), runs)
    found["find, 2048 pages, miss at the first"] = await median_ms(
        lambda: index.find(NS, absent, GATES), runs
    )
    many = {f"pool{b}": (b, AllPages()) for b in range(1, 16)}
    shards = tuple(range(SHARDS))
    wide = [claim("kv", 0, PAGES, shards, SHARDS)]
    wide += [claim(name, bit, PAGES, shards, SHARDS) for name, (bit, _) in many.items()]
    await index.commit(NS, pages, wide, [])
    gates = {"kv": (0, AllPages()), **many}
    found["find, 2048 pages hit, 16 pools x 512 shards"] = await median_ms(
        lambda: index.find(NS, pages, gates), runs
    )
    return found


async def commits(index: PageIndex, runs: int) -> dict[str, float]:
    found: dict[str, float] = {}

    async def rate(name: str, *rounds: tuple[list[Claim], list[AnchorShards]]) -> None:
        rates = []
        for run in range(runs):
            pages = hashes(COMMIT_PAGES, f"{name}{run}")
            start = time.perf_counter()
            for claims, anchors in rounds:
                await index.commit(NS, pages, claims, anchors)
            rates.append(len(rounds) * COMMIT_PAGES / (time.perf_counter() - start))
        found[name] = round(statistics.median(rates))

    n = COMMIT_PAGES
    await rate("commit, one pool, one shard", ([claim("kv", 0, n)], []))
    await rate(
        "commit, kv and a sidecar in one call",
        ([claim("kv", 0, n), claim("swa", 9, n)], [AnchorShards(0, 1, (0,))]),
    )
    halves = [([claim("kv", 0, n, (s,), 2)], []) for s in range(2)]
    await rate("commit, one pool, each of two shards", *halves)
    return found


async def memory_per_page(server: RedisServer, index: PageIndex) -> float:
    async def used() -> int:
        (info,) = await server.commands([("INFO", "memory")])
        return int(next(x for x in info.decode().splitlines() if x.startswith("used_memory_dataset:"))[20:])

    await server.commands([("FLUSHALL", "SYNC")])
    n = 200_000
    pages = hashes(n)
    before = await used()
    await index.commit(NS, pages, [claim("kv", 0, n), claim("last", 63, n)], [])
    return round((await used() - before) / n, 1)


async def measure(url: str, runs: int) -> dict[str, dict[str, float]]:
    server = RedisServer.connect(RedisSettings(url, command_seconds=30))
    await server.prepare()
    index = PageIndex(server)
    raw: Redis | RedisCluster | None = None if server.by_slot else Redis.from_url(url)
    report = {"ms": await lookups(index, raw, runs), "pages per second": await commits(index, 3)}
    if raw is not None:
        report["bytes"] = {"Redis memory of a complete page": await memory_per_page(server, index)}
        await raw.aclose()
    await server.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--runs", type=int, default=31)
    parser.add_argument("--url", help="a Redis that runs already and may be emptied")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        own = None if args.url else EmbeddedRedis.start(Path(folder), appendonly=False)
        try:
            report = asyncio.run(measure(args.url or own.url, args.runs))
        finally:
            if own is not None:
                own.stop()
    for unit, rows in report.items():
        for name, value in rows.items():
            print(f"{name:<46} {value:>12,} {unit}")
    if args.json:
        args.json.write_text(json.dumps({"runs": args.runs, **report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
