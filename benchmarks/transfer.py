"""Back up and prefetch through the page mover, beside raw Mooncake calls on the same objects, in one run.

    python benchmarks/transfer.py [--json FILE] [--pairs N] [--small]

Both sides move the same bytes between the same registered host memory and the same storage node over
loopback TCP, interleaved, and which one goes first alternates. `raw` is one put (get) per 1,024 objects and
nothing else: no existence check after the put, no lookup, no commit. `mover` is the whole path: put, confirm,
commit over REST to a real control plane with a real Valkey; lookup over REST, lease check, get. The ratio
raw/mover of the times is the mover's share of the raw speed; its interval is the range of the middle half of
the pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from caketin.stack import Stack, StackSettings
from dataplane.attach import Attached, attached
from dataplane.bound_pool import BoundPool
from dataplane.control_client import ControlClient, ControlSettings, ModelIdentity, RankIdentity
from dataplane.host_memory import HostMemory
from dataplane.mooncake_store import MooncakeStore
from dataplane.page_mover import NO_SLOT
from metadata.codec import PageHashes
from metadata.object_keys import group_ids
from metadata.pools import Part, PoolSpec, RankPool, TrailingPages

DEEPSEEK_V4 = [
    PoolSpec("kv", (), logical=True),
    PoolSpec("deepseek_v4_c4", (Part("page", "uint8", 786_240),), indices_from="kv"),
    PoolSpec("deepseek_v4_c4_indexer", (Part("page", "uint8", 177_408),), indices_from="kv"),
    PoolSpec("deepseek_v4_c128", (Part("page", "uint8", 34_560),), indices_from="kv"),
    PoolSpec("swa", (Part("page", "uint8", 6_439_680),), hit_policy=TrailingPages(1)),
]
MHA = [PoolSpec("kv", (Part("k", "bfloat16", 1 << 20), Part("v", "bfloat16", 1 << 20)))]
RAW_BATCH = 1024


@dataclass(frozen=True)
class Case:
    """One set of pools at one size."""

    name: str
    specs: list[PoolSpec]
    pages: int


class Side:
    """The same pages moved by the mover or by the store alone."""

    def __init__(self, case: Case, joined: Attached, client: ControlClient, bound: list[BoundPool]) -> None:
        self.case, self.joined, self.client = case, joined, client
        self.pools = [b for b in bound if b.hosts]
        every = np.arange(case.pages, dtype=np.int64)
        self.slots = {b.name: every for b in self.pools if b.name != "swa"}
        if any(b.name == "swa" for b in self.pools):
            tail = np.full(case.pages, NO_SLOT, np.int64)
            tail[-1] = 0
            self.slots["swa"] = tail

    def fresh(self) -> PageHashes:
        return PageHashes(secrets.token_bytes(32 * self.case.pages))

    def objects(self, hashes: PageHashes):
        ns = self.joined.namespace_id
        for pool in self.pools:
            used = np.flatnonzero(self.slots[pool.name] != NO_SLOT)
            named = [hashes[i] for i in used.tolist()]
            buffers = pool.buffers(self.slots[pool.name][used])
            groups = [g for g in group_ids(ns, named) for _ in range(pool.objects_per_page)]
            yield pool.keys(ns, named), buffers, groups

    def raw_put(self, hashes: PageHashes) -> float:
        batches = list(self.objects(hashes))
        start = time.perf_counter()
        for keys, buffers, groups in batches:
            for at in range(0, len(keys), RAW_BATCH):
                part = slice(at, at + RAW_BATCH)
                assert not self.joined.store.put(keys[part], buffers[part], groups[part]).any()
        return time.perf_counter() - start

    def raw_get(self, hashes: PageHashes) -> float:
        batches = list(self.objects(hashes))
        start = time.perf_counter()
        for keys, buffers, _ in batches:
            for at in range(0, len(keys), RAW_BATCH):
                part = slice(at, at + RAW_BATCH)
                assert not self.joined.store.get(keys[part], buffers[part]).any()
        return time.perf_counter() - start

    def mover_put(self, hashes: PageHashes) -> float:
        start = time.perf_counter()
        done = self.joined.mover.back_up(hashes, self.slots)
        took = time.perf_counter() - start
        assert done.transfers_done, done.error
        return took

    def mover_get(self, hashes: PageHashes) -> float:
        start = time.perf_counter()
        promise = self.client.lookup(self.joined.namespace_id, hashes)
        done = self.joined.mover.prefetch(hashes, promise, self.slots)
        took = time.perf_counter() - start
        assert done.pages == self.case.pages, done.error
        return took

    def drop(self, hashes: PageHashes) -> None:
        for keys, _, _ in self.objects(hashes):
            self.joined.store.remove(keys)


def pair(side: Side, raw_first: bool) -> dict[str, float]:
    raw_pages, mover_pages = side.fresh(), side.fresh()
    times: dict[str, float] = {}
    puts = [("raw put", side.raw_put, raw_pages), ("mover put", side.mover_put, mover_pages)]
    gets = [("raw get", side.raw_get, raw_pages), ("mover get", side.mover_get, mover_pages)]
    for calls in (puts, gets):
        for name, call, hashes in calls if raw_first else reversed(calls):
            times[name] = call(hashes)
    side.drop(raw_pages)
    side.drop(mover_pages)
    return times


def measure(case: Case, url: str, pairs: int) -> dict[str, object]:
    pools = [RankPool(spec, (0,)) for spec in case.specs]
    slots = {p.spec.name: 1 if p.spec.name == "swa" else case.pages for p in pools}
    memories = [HostMemory(p.spec, slots[p.spec.name], prefault=True) for p in pools]
    bound = [BoundPool(p, () if p.spec.logical else (m.pool,)) for p, m in zip(pools, memories, strict=True)]
    me = RankIdentity("bench", "dp0-pp0-cp0-tp0", secrets.token_hex(16))
    client = ControlClient(ControlSettings(url, call_seconds=10), me)
    model = ModelIdentity("bench", case.name.replace(" ", "-"), 256)
    with contextlib.closing(client), attached(client, model, bound) as joined:
        side = Side(case, joined, client, bound)
        pair(side, raw_first=True)  # first touch of the segment
        times = [pair(side, raw_first=i % 2 == 0) for i in range(pairs)]
    size = sum(p.spec.bytes_per_page * (1 if p.spec.name == "swa" else case.pages) for p in pools)
    row: dict[str, object] = {"case": case.name, "bytes": size, "pairs": pairs}
    for direction in ("put", "get"):
        raw = [t[f"raw {direction}"] for t in times]
        mover = [t[f"mover {direction}"] for t in times]
        ratios = sorted(a / b for a, b in zip(raw, mover, strict=True))
        row[direction] = {
            "raw_gbps": size / statistics.median(raw) / 1e9,
            "mover_gbps": size / statistics.median(mover) / 1e9,
            "ratio": statistics.median(ratios),
            "middle_half": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        }
    return row


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    ask.add_argument("--json", type=Path, help="write the numbers to this file")
    ask.add_argument("--pairs", type=int, default=9)
    ask.add_argument("--small", action="store_true", help="the 512-page cases only")
    chosen = ask.parse_args()
    loads, why = MooncakeStore.available()
    if not loads:
        raise SystemExit(f"Mooncake does not load: {why}")
    cases = [Case("DeepSeek V4, 512 pages", DEEPSEEK_V4, 512), Case("MHA 1 MiB pages, 512", MHA, 512)]
    if not chosen.small:
        cases += [
            Case("DeepSeek V4, 2048 pages", DEEPSEEK_V4, 2048),
            Case("MHA 1 MiB pages, 2048", MHA, 2048),
        ]
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="caketin-bench-") as folder,
        Stack(StackSettings(Path(folder), store="mooncake", store_bytes=6 << 30)) as stack,
    ):
        rows = [measure(case, stack.url, chosen.pairs) for case in cases]
    print(f"{'case':28}{'':6}{'raw GB/s':>10}{'mover GB/s':>12}{'raw/mover time':>16}   middle half")
    for row in rows:
        for direction in ("put", "get"):
            r = row[direction]
            low, high = r["middle_half"]
            print(
                f"{row['case']:28}{direction:6}{r['raw_gbps']:10.2f}{r['mover_gbps']:12.2f}{r['ratio']:16.3f}"
                f"   {low:.3f} - {high:.3f}"
            )
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
