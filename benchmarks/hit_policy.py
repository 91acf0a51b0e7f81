"""Time of `restorable`: 65,536 pages x 16 pools, against a loop in plain Python over the same presence.

The loop is not the brute force of the tests but what one would write without arrays: one pass a pool,
the last missing page carried along. Both must give the same runs, or nothing is printed.

    python benchmarks/hit_policy.py [--pages N] [--pools N] [--repeats N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metadata.hit_policy import restorable
from metadata.pools import AllPages, BlockGroups, HitPolicy, TrailingPages

TARGET_MS = 20.0
WINDOWS = (1, 2, 4, 16, 64, 128, 1_024, 8_192)

Presence = dict[str, NDArray[np.bool_]]
Runs = list[tuple[int, int]]


def policies_of(pools: int) -> dict[str, HitPolicy]:
    """A DeepSeek V4-like mix: an anchor, derived pools, windows of many sizes, one block-grouped pool."""
    policies: dict[str, HitPolicy] = {"kv": AllPages()}
    for i in range(1, pools):
        if i % 5 == 1:
            policies[f"derived_{i}"] = AllPages()
        elif i % 5 == 4:
            policies[f"groups_{i}"] = BlockGroups(4, 8)
        else:
            policies[f"window_{i}"] = TrailingPages(WINDOWS[i % len(WINDOWS)])
    return policies


def all_stored(pages: int, policies: dict[str, HitPolicy]) -> Presence:
    return {name: np.ones(pages, dtype=np.bool_) for name in policies}


def evicted_windows(pages: int, policies: dict[str, HitPolicy]) -> Presence:
    """The anchor whole, a page in ten thousand gone from each window pool."""
    rng = np.random.default_rng(1)
    return {
        name: rng.random(pages) >= (1e-4 if isinstance(policy, TrailingPages) else 0)
        for name, policy in policies.items()
    }


def every_other(pages: int, policies: dict[str, HitPolicy]) -> Presence:
    """As many runs as there can be: windows of one page, every other one stored."""
    presence = all_stored(pages, policies)
    for name, policy in policies.items():
        if policy == TrailingPages(1):
            presence[name][::2] = False
    return presence


def early_hole(pages: int, policies: dict[str, HitPolicy]) -> Presence:
    presence = all_stored(pages, policies)
    presence["kv"][pages // 100] = False
    return presence


SCENARIOS: dict[str, Callable[[int, dict[str, HitPolicy]], Presence]] = {
    "all stored": all_stored,
    "windows evicted": evicted_windows,
    "every other page": every_other,
    "anchor ends at 1 %": early_hole,
}


def runs_by_loop(presence: dict[str, list[bool]], policies: dict[str, HitPolicy]) -> Runs:
    pages = len(next(iter(presence.values())))
    allowed = [True] * pages
    for name, policy in policies.items():
        if isinstance(policy, BlockGroups):
            continue
        window = policy.window_pages if isinstance(policy, TrailingPages) else pages
        holes_until = 0
        for page, there in enumerate(presence[name]):
            if not there:
                holes_until = page + window
            if page < holes_until or not there:
                allowed[page] = False
    runs: Runs = []
    first = None
    for page, good in enumerate(allowed):
        if good and first is None:
            first = page + 1
        elif not good and first is not None:
            runs.append((first, page))
            first = None
    return [*runs, (first, pages)] if first is not None else runs


def median_ms(call: Callable[[], object], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def measure(scenario: str, pages: int, pools: int, repeats: int) -> dict[str, Any]:
    policies = policies_of(pools)
    presence = SCENARIOS[scenario](pages, policies)
    listed = {name: mask.tolist() for name, mask in presence.items()}
    answer = restorable(presence, policies)
    if list(answer.runs) != runs_by_loop(listed, policies):
        raise SystemExit(f"{scenario}: the loop and restorable() differ")
    return {
        "scenario": scenario,
        "runs": len(answer.runs),
        "hit_pages": answer.hit_pages,
        "restorable_ms": round(median_ms(lambda: restorable(presence, policies), repeats), 3),
        "loop_ms": round(median_ms(lambda: runs_by_loop(listed, policies), max(3, repeats // 5)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=65_536)
    parser.add_argument("--pools", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    rows = [measure(scenario, args.pages, args.pools, args.repeats) for scenario in SCENARIOS]
    print(f"restorable(): {args.pages:,} pages x {args.pools} pools, median of {args.repeats}")
    print(f"{'scenario':<20} {'runs':>7} {'hit':>7} {'restorable ms':>14} {'loop ms':>9} {'ratio':>6}")
    for r in rows:
        ratio = r["loop_ms"] / r["restorable_ms"]
        print(
            f"{r['scenario']:<20} {r['runs']:>7} {r['hit_pages']:>7} {r['restorable_ms']:>14.2f} "
            f"{r['loop_ms']:>9.1f} {ratio:>5.0f}x"
        )
    worst = max(r["restorable_ms"] for r in rows)
    verdict = "met" if worst < TARGET_MS else "MISSED"
    print(f"worst {worst:.2f} ms, target {TARGET_MS:.0f} ms: {verdict}")
    if args.json:
        report = {
            "benchmark": "hit_policy",
            "pages": args.pages,
            "pools": args.pools,
            "repeats": args.repeats,
            "target_ms": TARGET_MS,
            "worst_ms": worst,
            "rows": rows,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cpus": os.cpu_count(),
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
