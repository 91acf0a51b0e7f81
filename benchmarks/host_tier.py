"""What a resident page costs in host memory's books: Python heap, and the time of each operation.

The heap is what tracemalloc sees of the tier and of the page hashes it keeps, numpy's columns included, after
all slots were filled. Times are medians on the full tier; hashes are new bytes objects in every call, as they
come out of a request's body.

python benchmarks/host_tier.py [--pages 1000000] [--call 2048] [--repeats 50] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import platform
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dataplane.host_tier import HostTier
from metadata.codec import PageHashes
from metadata.pools import Part, PoolSpec, TrailingPages

WINDOW = 8
PARTS = (Part("page", "uint8", 1 << 20),)


def tier_of(pages: int) -> HostTier:
    """A model with full attention, an indexer beside it, a sliding window and a Mamba state."""
    specs = [
        PoolSpec("kv", PARTS),
        PoolSpec("indexer", PARTS, indices_from="kv"),
        PoolSpec("swa", PARTS, hit_policy=TrailingPages(WINDOW)),
        PoolSpec("mamba", PARTS, hit_policy=TrailingPages(1)),
    ]
    tier = HostTier(specs, {"kv": pages, "swa": pages, "mamba": pages})
    tier.open_session("bench")
    return tier


def chain(start: int, pages: int) -> PageHashes:
    return PageHashes(b"".join(hashlib.sha256(b"%d" % i).digest() for i in range(start, start + pages)))


def insert(tier: HostTier, hashes: PageHashes) -> None:
    tier.publish(tier.reserve("bench", hashes).token)


def fill(pages: int, call: int) -> tuple[HostTier, float, float]:
    """Return a full tier, its heap bytes a page and its peak of heap bytes a page."""
    gc.collect()
    tracemalloc.start()
    tier = tier_of(pages)
    for start in range(0, pages, call):
        insert(tier, chain(start, min(call, pages - start)))
    gc.collect()
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return tier, now / pages, peak / pages


def times(tier: HostTier, pages: int, call: int, repeats: int) -> Iterator[tuple[str, float]]:
    sequences = [PageHashes(bytes(chain(at * call, call).raw)) for at in range(min(repeats, pages // call))]
    turn = itertools.cycle(sequences)

    def median_ms(run: Callable[[], object], after: Callable[[object], object] | None = None) -> float:
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            got = run()
            found.append(time.perf_counter() - start)
            if after:
                after(got)
        return statistics.median(found) * 1e3

    fresh = itertools.count(pages, call)
    singles = iter([chain(start, 1) for start in range(1 << 40, (1 << 40) + repeats)])
    absent = chain(1 << 50, call)

    yield f"match, {call} resident pages", median_ms(lambda: tier.match(next(turn)))
    yield (
        f"match, {call} pages, none resident",
        median_ms(lambda: tier.match(absent)),
    )
    lock = median_ms(lambda: tier.lock("bench", next(turn)), lambda held: tier.release(held.token))
    yield f"lock, {call} pages", lock
    held = [tier.lock("bench", s).token for s in sequences for _ in range(1 + repeats // len(sequences))]
    yield "  and its release", median_ms(lambda: tier.release(held.pop()))
    for token in held:
        tier.release(token)
    yield (
        f"pin, {call} pages",
        median_ms(lambda: tier.pin(next(turn)), lambda pins: tier.release(pins.token)),
    )
    new = iter([chain(start, call) for start in itertools.islice(fresh, repeats)])
    reserved: list[str] = []
    yield (
        f"reserve, {call} pages, as many evicted",
        median_ms(lambda: tier.reserve("bench", next(new)), lambda got: reserved.append(got.token))
        if pages >= call * repeats * 2
        else float("nan"),
    )
    yield (
        "  and their publication",
        median_ms(lambda: tier.publish(reserved.pop())) if reserved else float("nan"),
    )
    yield f"evict, {call} pages", median_ms(lambda: tier.evict("kv", call))
    yield "evict, 1 page", median_ms(lambda: tier.evict("kv", 1))
    yield "reserve and publish 1 page", median_ms(lambda: insert(tier, next(singles)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=1_000_000, help="slots of each pool, all of them filled")
    parser.add_argument("--call", type=int, default=2048, help="pages of one call")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    args = parser.parse_args()
    tier, heap, peak = fill(args.pages, args.call)
    rows = [(name, round(ms, 3)) for name, ms in times(tier, args.pages, args.call, args.repeats)]
    width = max(len(name) for name, _ in rows)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{args.pages} pages resident in three slot spaces: {heap:.0f} bytes of heap a page, peak {peak:.0f}"
    )
    print(f"most resident memory of the process: {rss / 1e6:.0f} MB\n\n{'':{width}}  median ms")
    for name, ms in rows:
        print(f"{name:{width}}  {ms:9.3f}")
    if args.json:
        facts = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
            "pages": args.pages,
            "repeats": args.repeats,
            "heap_bytes_per_page": round(heap, 1),
            "peak_heap_bytes_per_page": round(peak, 1),
            "max_rss_bytes": rss,
        }
        cases = [{"case": name.strip(), "median_ms": ms} for name, ms in rows]
        args.json.write_text(json.dumps({**facts, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
