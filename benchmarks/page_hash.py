"""Time from token ids to page hashes, against a plain hashlib loop over ready-made bytes in the same run.

    python benchmarks/page_hash.py [--json FILE] [--runs N]

`loop` is the floor: one SHA-256 per page over pages that are already packed. What is above it is the price of
taking any sequence or array, checking every token and packing it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from metadata.page_hash import from_hex, join, page_hashes, split, to_hex

TOKENS = 131_072
TARGET_MS = 10.0  # at page size 64
PAGE_SIZES = (1, 16, 64, 256)
MANY_PAGES = 65_536


def plain_loop(pages: list[bytes]) -> list[bytes]:
    previous, hashes = b"", []
    for page in pages:
        previous = hashlib.sha256(previous + page).digest()
        hashes.append(previous)
    return hashes


def median_ms(call: Callable[[], object], runs: int) -> float:
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def measure(runs: int) -> list[dict[str, object]]:
    ids = np.random.default_rng(7).integers(0, 150_000, TOKENS)
    wide = ids.copy()
    wide[TOKENS // 2] = 2**40
    forms = {
        "list of int": ids.tolist(),
        "int64 array": ids,
        "uint32 array": ids.astype(np.uint32),
        "int64 array, one wide token": wide,
    }
    rows: list[dict[str, object]] = []
    for page_size in PAGE_SIZES:
        packed = ids.astype("<u4").tobytes()
        step = 4 * page_size
        pages = [packed[i : i + step] for i in range(0, len(packed), step)]
        assert plain_loop(pages) == page_hashes(ids, page_size)
        rows.append(row("hashlib loop", page_size, median_ms(lambda p=pages: plain_loop(p), runs)))
        for name, form in forms.items():
            ms = median_ms(lambda f=form, s=page_size: page_hashes(f, s), runs)
            rows.append(row(name, page_size, ms))
        ms = median_ms(lambda s=page_size: page_hashes(ids, s, hash_kind="bigram"), runs)
        rows.append(row("int64 array, bigram", page_size, ms))
    return rows


def row(name: str, page_size: int, ms: float) -> dict[str, object]:
    return {"input": name, "page_size": page_size, "pages": TOKENS // page_size, "ms": round(ms, 3)}


def measure_converters(runs: int) -> list[dict[str, object]]:
    hashes = page_hashes(range(MANY_PAGES), 1)
    hexed, packed = to_hex(hashes), join(hashes)
    calls: dict[str, Callable[[], object]] = {
        "to_hex": lambda: to_hex(hashes),
        "from_hex": lambda: from_hex(hexed),
        "join": lambda: join(hashes),
        "split": lambda: split(packed),
    }
    return [
        {"converter": n, "pages": MANY_PAGES, "ms": round(median_ms(c, runs), 3)} for n, c in calls.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()

    rows, converters = measure(args.runs), measure_converters(args.runs)
    print(f"{TOKENS} tokens, median of {args.runs}\n")
    print(f"{'page size':>9} {'pages':>7}  {'input':<28} {'ms':>9}")
    for r in rows:
        print(f"{r['page_size']:>9} {r['pages']:>7}  {r['input']:<28} {r['ms']:>9}")
    print(f"\n{MANY_PAGES} hashes")
    for r in converters:
        print(f"{'':>17}  {r['converter']:<28} {r['ms']:>9}")
    worst = max(float(str(r["ms"])) for r in rows if r["page_size"] == 64)
    print(f"\npage size 64, slowest form: {worst} ms (target: under {TARGET_MS} ms)")
    if args.json:
        report = {"tokens": TOKENS, "runs": args.runs, "target_ms": TARGET_MS, "hashing": rows}
        args.json.write_text(json.dumps({**report, "converters": converters}, indent=1) + "\n")


if __name__ == "__main__":
    main()
