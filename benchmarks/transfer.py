"""Back up and prefetch through the page mover, beside raw Mooncake calls on the same objects, in one run.

    python benchmarks/transfer.py [--json FILE] [--pairs N] [--small]

Both sides move the same bytes between the same registered host memory and the same storage node over
loopback TCP, interleaved, and which one goes first alternates. `raw` is one put (get) per 1,024 objects and
nothing else: no existence check after the put, no lookup, no commit. `mover` is the whole path: put, confirm,
commit over REST to a real control plane with a real Valkey; lookup over REST, lease check, get. The ratio
raw/mover of the times is the mover's share of the raw speed; its interval is the range of the middle half of
the pairs. A case of 512 pages has four times the pairs of one of 2,048: what takes a third of a second varies
by a fifth here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _transfer_cases import DEEPSEEK_V4, MHA, Case, MoverSide, mover_side, row

from caketin.stack import Stack, StackSettings
from dataplane.mooncake_store import MooncakeStore
from dataplane.object_store import ObjectBuffers
from metadata.codec import PageHashes
from metadata.object_keys import group_ids

RAW_BATCH = 1024
MOST_PAGES = 2048


class RawSide:
    """The same pages moved by the store alone; keys and addresses are made beforehand, untimed."""

    def __init__(self, mover: MoverSide) -> None:
        self.mover, self.store = mover, mover.joined.store

    def batches(self, hashes: PageHashes) -> Iterator[tuple[list[str], ObjectBuffers, list[str]]]:
        ns = self.mover.joined.namespace_id
        for pool in self.mover.pools:
            slots = self.mover.slots[pool.name]
            used = np.flatnonzero(slots >= 0)
            named = [hashes[i] for i in used.tolist()]
            keys, buffers = pool.keys(ns, named), pool.buffers(slots[used])
            groups = [g for g in group_ids(ns, named) for _ in range(pool.objects_per_page)]
            for at in range(0, len(keys), RAW_BATCH):
                part = slice(at, at + RAW_BATCH)
                yield keys[part], buffers[part], groups[part]

    def put(self, hashes: PageHashes) -> float:
        batches = list(self.batches(hashes))
        start = time.perf_counter()
        for keys, buffers, groups in batches:
            assert not self.store.put(keys, buffers, groups).any()
        return time.perf_counter() - start

    def get(self, hashes: PageHashes) -> float:
        batches = list(self.batches(hashes))
        start = time.perf_counter()
        for keys, buffers, _ in batches:
            assert not self.store.get(keys, buffers).any()
        return time.perf_counter() - start


def pair(raw: RawSide, mover: MoverSide, raw_first: bool) -> dict[str, float]:
    sides = [("raw", raw, mover.case.fresh()), ("mover", mover, mover.case.fresh())]
    times: dict[str, float] = {}
    for direction in ("put", "get"):
        for name, side, hashes in sides if raw_first else reversed(sides):
            times[f"{name} {direction}"] = getattr(side, direction)(hashes)
    for _, _, hashes in sides:
        mover.drop(hashes)
    return times


def measure(case: Case, url: str, pairs: int) -> dict[str, object]:
    with mover_side(case, url, "bench") as mover:
        raw = RawSide(mover)
        pair(raw, mover, raw_first=True)  # first touch of the segment
        times = [pair(raw, mover, raw_first=i % 2 == 0) for i in range(pairs)]
    found: dict[str, object] = {"case": case.name, "bytes": case.bytes, "pairs": pairs}
    for direction in ("put", "get"):
        by_side = [(name, [t[f"{name} {direction}"] for t in times]) for name in ("raw", "mover")]
        found[direction] = row(case.bytes, by_side[0], by_side[1])
    return found


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    ask.add_argument("--json", type=Path, help="write the numbers to this file")
    ask.add_argument("--pairs", type=int, default=9, help="of 2,048 pages; four times as many of 512")
    ask.add_argument("--small", action="store_true", help="the 512-page cases only")
    chosen = ask.parse_args()
    loads, why = MooncakeStore.available()
    if not loads:
        raise SystemExit(f"Mooncake does not load: {why}")
    sizes = [512] if chosen.small else [512, MOST_PAGES]
    cases = [
        Case(f"{name}, {pages} pages", specs, pages)
        for pages in sizes
        for name, specs in (("DeepSeek V4", DEEPSEEK_V4), ("MHA 1 MiB", MHA))
    ]
    print(f"{'case':28}{'':6}{'raw GB/s':>10}{'mover GB/s':>12}{'raw/mover time':>16}   middle half")
    rows = []
    for case in cases:
        # A stack for each, with room for both sides: a full segment would evict what is about to be read.
        with (
            tempfile.TemporaryDirectory(prefix="caketin-bench-") as folder,
            Stack(
                StackSettings(Path(folder), store="mooncake", store_bytes=2 * case.bytes * 6 // 5)
            ) as stack,
        ):
            rows.append(measure(case, stack.url, chosen.pairs * MOST_PAGES // case.pages))
        for direction in ("put", "get"):
            r = rows[-1][direction]
            low, high = r["middle_half"]
            print(
                f"{case.name:28}{direction:6}{r['raw_gbps']:10.2f}{r['mover_gbps']:12.2f}{r['ratio']:16.3f}"
                f"   {low:.3f} - {high:.3f}",
                flush=True,
            )
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
