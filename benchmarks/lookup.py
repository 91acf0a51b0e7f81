"""Lookups and commits from client to client, beside the raw calls they stand for, in one run.

    python benchmarks/lookup.py [--json FILE] [--repeats N] [--pages N] [--no-mooncake]

It starts a Valkey, `caketin serve` and, where Mooncake loads, a master with a storage node. `raw MGET` is the
floor of the index: one command for all pages over a kept connection. `raw exists` is what a layout of one
object a pool costs without an index: four keys a page against a real mooncake_master. Times are medians; all
kinds of a table are measured in turns, so that a busy machine slows them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import redis

from caketin.embedded_redis import EmbeddedRedis
from dataplane.child_process import ChildProcess, free_port
from dataplane.control_client import ControlClient, ControlSettings, ModelIdentity, RankIdentity
from dataplane.messages.control import StoredPool
from dataplane.mooncake_node import MooncakeCluster
from dataplane.mooncake_store import MooncakeStore
from metadata import redis_keys
from metadata.codec import PageHashes
from metadata.pools import AllPages, Part, PoolSpec, RankPool, TrailingPages

KEYS_A_PAGE = 4
EXISTS_KEYS = 1_024
WIDE_POOLS, WIDE_SHARDS = 16, 512
COMMIT_PAGES = 16_384
MEMORY_PAGES = 131_072
TARGETS = {
    "hit ms": 4.0,
    "miss ms": 1.5,
    "16 x 512 ratio": 1.3,
    "commit pages/s": 100_000,
    "bytes a page": 144,
    "RSS MB": 120,
}
NAMES = ("deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128")


def hashes(count: int, salt: str) -> PageHashes:
    return PageHashes(b"".join(hashlib.sha256(f"{salt}{i}".encode()).digest() for i in range(count)))


def part(size: int) -> tuple[Part, ...]:
    return (Part("page", "uint8", size),)


def deepseek() -> list[RankPool]:
    """A logical anchor, three pools derived from it, a window: four objects a page."""
    derived = [PoolSpec(name, part(4096), 1, AllPages(), indices_from="kv") for name in NAMES]
    swa = PoolSpec("swa", part(8192), 1, TrailingPages(1))
    anchor = PoolSpec("kv", (), 1, AllPages(), logical=True)
    return [RankPool(spec, (0,)) for spec in (anchor, *derived, swa)]


def wide() -> list[RankPool]:
    """Sixteen pools in 512 shards, all of which this rank owns."""
    specs = [PoolSpec("kv", part(64), WIDE_SHARDS, AllPages())]
    for i in range(1, WIDE_POOLS):
        policy = TrailingPages(4) if i % 3 == 0 else AllPages()
        specs.append(PoolSpec(f"pool{i}", part(64), WIDE_SHARDS, policy))
    return [RankPool(spec, tuple(range(WIDE_SHARDS))) for spec in specs]


@dataclass
class Rank:
    """A registered rank with its client."""

    client: ControlClient
    ns: str
    pools: list[RankPool]

    @classmethod
    def registered(cls, url: str, name: str, pools: list[RankPool]) -> Rank:
        """Register the engine `name` with one rank that has these pools."""
        me = RankIdentity(name, "dp0-pp0-cp0-tp0", "9d0c2c1e6f4b4c5fa2f3b9d1e4a7c8b0")
        client = ControlClient(ControlSettings(url, call_seconds=30, attach_seconds=30), me)
        ns = client.register(ModelIdentity(name, "r", 256), pools).namespace_id
        return cls(client, ns, pools)

    def commit(self, pages: PageHashes) -> None:
        """Claim all pages in all pools."""
        stored = {
            p.spec.name: StoredPool(pages="all", shards=list(p.owned_shards), pool_id=p.spec.pool_id)
            for p in self.pools
            if not p.spec.logical
        }
        done = self.client.commit(self.ns, pages, stored)
        if done.complete != len(pages):
            raise SystemExit(f"only {done.complete} of {len(pages)} pages are complete: {done.rejected[:3]}")

    def lookup(self, pages: PageHashes, hit: int) -> None:
        """Ask, and check the answer."""
        found = self.client.lookup(self.ns, pages)
        if found.hit_pages != hit or found.degraded:
            raise SystemExit(f"{found.hit_pages} pages hit, {hit} are there")


@dataclass
class JsonLookup:
    """A lookup as JSON over a kept connection, as a router would send it."""

    port: int
    ns: str
    engine: str
    hit: int
    pages: PageHashes
    connection: http.client.HTTPConnection = field(init=False)

    def __post_init__(self) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port)

    def __call__(self) -> None:
        """Ask, and check the answer."""
        body = json.dumps({"page_hashes": self.pages.to_hex(), "engine_id": self.engine})
        headers = {"content-type": "application/json"}
        self.connection.request("POST", f"/v1/namespaces/{self.ns}/lookup", body, headers)
        found = json.loads(self.connection.getresponse().read())
        if found["hit_pages"] != self.hit:
            raise SystemExit(f"{found['hit_pages']} pages hit, {self.hit} are there")


def in_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median of each in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 3):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if i >= 3:
                times[name].append((time.perf_counter() - started) * 1e3)
    return {name: round(statistics.median(found), 3) for name, found in times.items()}


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, int, int, str]]:
    """Run Valkey and `caketin serve`; give the URL, port, pid, and Redis' URL."""
    server = EmbeddedRedis.start(folder / "redis", appendonly=False)
    port = free_port()
    flags = ["--port", str(port), "--redis-url", server.url, "--store-path", str(folder / "store")]
    command = [sys.executable, "-m", "caketin", "serve", *flags]
    env = {k: v for k, v in os.environ.items() if not k.startswith("CAKETIN_")}
    child = ChildProcess.start("caketin serve", command, folder / "serve.log", env)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/readyz", timeout=2).status_code == 200
        return False

    try:
        child.wait_ready(ready, 30)
        yield url, port, child.process.pid, server.url
    finally:
        child.stop()
        server.stop()


@contextlib.contextmanager
def raw_exists(
    pages: int, wanted: bool
) -> Iterator[tuple[Callable[[], object], Callable[[], object]] | None]:
    """Run a Mooncake and give a call that asks for all keys that are there, and one for keys that are not."""
    loads, why = MooncakeStore.available()
    if not wanted or not loads:
        print(f"raw exists is left out: {'not wanted' if not wanted else why}", file=sys.stderr)
        yield None
        return
    with MooncakeCluster(256 << 20) as cluster, contextlib.closing(MooncakeStore(cluster.settings)) as store:
        client = store._client
        there = [f"ct1/bench/{i}" for i in range(pages * KEYS_A_PAGE)]
        for key in there:
            client.put(key, b"x" * 64)
        absent = [key.replace("bench", "absent") for key in there]
        if not np.all(np.asarray(client.batch_is_exist(there)) == 1):
            raise SystemExit("the objects of raw exists are not there")
        yield lambda: client.batch_is_exist(there), lambda: client.batch_is_exist(absent)


def commit_rate(rank: Rank) -> float:
    rounds = [hashes(COMMIT_PAGES, f"commit{i}-") for i in range(5)]
    rates = []
    for pages in rounds:
        started = time.perf_counter()
        rank.commit(pages)
        rates.append(len(pages) / (time.perf_counter() - started))
    return statistics.median(rates)


def bytes_a_page(rank: Rank, plain: redis.Redis) -> float:
    def used() -> int:
        plain.execute_command("MEMORY", "PURGE")
        return int(plain.info("memory")["used_memory"])

    before = used()
    for i in range(MEMORY_PAGES // COMMIT_PAGES):
        rank.commit(hashes(COMMIT_PAGES, f"memory{i}-"))
    return (used() - before) / MEMORY_PAGES


def rss_mb(pid: int) -> float:
    out = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(out.stdout) / 1024


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    pages, absent = hashes(args.pages, "hit"), hashes(args.pages, "miss")
    with served(folder) as (url, port, pid, redis_url), redis.Redis.from_url(redis_url) as plain:
        started_mb = rss_mb(pid)
        v4, broad = Rank.registered(url, "v4", deepseek()), Rank.registered(url, "wide", wide())
        v4.commit(pages)
        broad.commit(pages)
        keys = redis_keys.pages(v4.ns, list(pages))
        no_keys = redis_keys.pages(v4.ns, list(absent))
        with raw_exists(args.pages, args.mooncake) as mooncake:
            calls: dict[str, Callable[[], object]] = {
                "hit, msgpack": lambda: v4.lookup(pages, args.pages),
                "hit, 16 x 512, msgpack": lambda: broad.lookup(pages, args.pages),
                "hit, JSON": JsonLookup(port, v4.ns, "v4", args.pages, pages),
                "miss, msgpack": lambda: v4.lookup(absent, 0),
                "miss, JSON": JsonLookup(port, v4.ns, "v4", 0, absent),
                "empty call": lambda: v4.lookup(PageHashes(), 0),
                "raw MGET, hit": lambda: plain.mget(keys),
                "raw MGET, miss": lambda: plain.mget(no_keys),
            }
            if mooncake is not None:
                calls |= {"raw exists, hit": mooncake[0], "raw exists, miss": mooncake[1]}
            times = in_turns(calls, args.repeats)
        rate = commit_rate(v4)
        memory = bytes_a_page(v4, plain)
        return {
            "lookup_ms": times,
            "commit_pages_per_second": round(rate),
            "bytes_a_page": round(memory, 1),
            "rss_mb_at_start": round(started_mb, 1),
            "rss_mb": round(rss_mb(pid), 1),
        }


def verdicts(found: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
    times = found["lookup_ms"]
    exists = times.get("raw exists, hit")
    hit = times["hit, msgpack"]
    limit = max(TARGETS["hit ms"], exists / 2 if exists else 0)
    ratio = times["hit, 16 x 512, msgpack"] / hit
    # The bound by the clock is of a machine on which the raw MGET took 0.9 ms. Where that one alone takes
    # more than the bound, a miss has to be no slower than it.
    miss_limit = max(TARGETS["miss ms"], times["raw MGET, miss"])
    return [
        ("hit ms", hit, f"<= {limit:.1f}", hit <= limit),
        ("miss ms", times["miss, msgpack"], f"<= {miss_limit:.2f}", times["miss, msgpack"] <= miss_limit),
        ("16 x 512 ratio", ratio, "<= 1.3", ratio <= TARGETS["16 x 512 ratio"]),
        (
            "commit pages/s",
            found["commit_pages_per_second"],
            ">= 100,000",
            found["commit_pages_per_second"] >= TARGETS["commit pages/s"],
        ),
        ("bytes a page", found["bytes_a_page"], "<= 144", found["bytes_a_page"] <= TARGETS["bytes a page"]),
        ("RSS MB", found["rss_mb"], "< 120", found["rss_mb"] < TARGETS["RSS MB"]),
    ]


def report(args: argparse.Namespace, found: dict[str, Any]) -> None:
    times = found["lookup_ms"]
    floors = {kind: times[f"raw MGET, {kind}"] for kind in ("hit", "miss")}
    print(f"{args.pages:,} pages, medians of {args.repeats}, client to client")
    print(f"{'call':<26} {'ms':>9} {'x raw MGET':>11} {'x raw exists':>13}")
    for name, ms in times.items():
        kind = "miss" if "miss" in name else "hit"
        exists = times.get(f"raw exists, {kind}")
        ratio = f"{ms / exists:>12.2f}x" if exists else f"{'':>13}"
        print(f"{name:<26} {ms:>9.2f} {ms / floors[kind]:>10.2f}x {ratio}")
    print()
    for name, value, limit, met in verdicts(found):
        print(f"{name:<26} {value:>12,.2f}   {limit:<12} {'met' if met else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=2_048)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--no-mooncake", dest="mooncake", action="store_false")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="caketin-bench-") as folder:
        found = measure(args, Path(folder))
    report(args, found)
    if args.json:
        about = {"benchmark": "lookup", "pages": args.pages, "repeats": args.repeats, "cpus": os.cpu_count()}
        ratios = {
            name: {"value": value, "limit": limit, "met": met} for name, value, limit, met in verdicts(found)
        }
        text = json.dumps(
            {**about, "python": platform.python_version(), **found, "targets": ratios}, indent=2
        )
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
