"""What it costs to turn page slots into addresses: medians, as a table and as JSON.

python benchmarks/host_pool.py [--pages 2048] [--repeats 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dataplane.host_pool import HostPool, LayerBuffers, PageBuffer, layer_first, page_first, slots_of
from metadata.pools import Part, PoolSpec

BASE = 0x7F00_0000_0000
PAGE_BYTES = 1 << 20


def page_first_pool(slots: int, parts: int) -> HostPool:
    names = [f"p{i}" for i in range(parts)]
    spec = PoolSpec("kv", tuple(Part(name, "uint8", PAGE_BYTES) for name in names))
    buffers = [PageBuffer(name, BASE + i * slots * PAGE_BYTES, PAGE_BYTES) for i, name in enumerate(names)]
    return page_first(spec, slots, buffers)


def layer_first_pool(slots: int, layers: int) -> HostPool:
    row = PAGE_BYTES // 64
    spec = PoolSpec(
        "kv",
        (Part("k", "uint8", row * layers), Part("v", "uint8", row * layers)),
        object_layout="layer_first",
    )
    half = slots * row * layers
    buffers = [LayerBuffers.packed(n, BASE + i * half, layers, slots, row) for i, n in enumerate("kv")]
    return layer_first(spec, slots, buffers)


def median_ms(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def cases(pages: int) -> dict[str, Callable[[], object]]:
    capacity = 2 * pages
    slots = np.random.default_rng(7).permutation(capacity)[:pages].astype(np.int64)
    tokens = (slots[:, None] * 256 + np.arange(256)).ravel()
    flat, layered = page_first_pool(capacity, 4), layer_first_pool(capacity, 61)
    return {
        f"buffers, page_first, {pages} pages x 4 parts": lambda: flat.buffers(slots),
        f"  and as Python lists, {pages} x 4": lambda: flat.buffers(slots).addresses.ravel().tolist(),
        f"buffers, layer_first, {pages} pages x 2 parts x 61 layers": lambda: layered.buffers(slots),
        f"  and as lists an object, {pages} x 2 x 61": lambda: layered.buffers(slots).objects(),
        f"slots_of, {pages} pages x 256 tokens": lambda: slots_of(tokens, 256),
        f"registration_chunks of 1 GiB, {capacity} slots x 4 parts": lambda: flat.registration_chunks(
            1 << 30
        ),
        f"pool construction, layer_first, {capacity} slots": lambda: layer_first_pool(capacity, 61),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the medians there too")
    args = parser.parse_args()
    found = {name: median_ms(call, args.repeats) for name, call in cases(args.pages).items()}
    width = max(map(len, found))
    print(f"{'':{width}}  median ms")
    for name, ms in found.items():
        print(f"{name:{width}}  {ms:9.3f}")
    if args.json:
        machine = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
        }
        rows = [{"case": name.strip(), "median_ms": ms} for name, ms in found.items()]
        args.json.write_text(json.dumps({"repeats": args.repeats, **machine, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
