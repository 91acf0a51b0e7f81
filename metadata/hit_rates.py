"""Reading the hit counters: rates over time, and where counts are known to be missing (Redis)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from metadata import redis_keys
from metadata.errors import FieldError, InvalidInput
from metadata.redis_server import RedisServer, pairs

RESOLUTIONS: Final = ((10, 7_200), (60, 172_800), (3_600, 7_776_000))
"""(step, how long it is kept), both in seconds."""

SILENT_SECONDS: Final = 10.0
"""A process that has not flushed for so long, and for ten of its intervals, is gone."""

WHOLE_PREFIX: Final = ""
"""Pool label of the row that counts the prefix as a whole."""

MAX_BUCKETS: Final = 2_000
LABELS: Final = ("tenant", "namespace", "model", "engine", "pool")
METRICS: Final = ("queried_pages", "hit_pages", "read_pages", "lost_pages")


async def hit_rates(
    redis: RedisServer,
    window: int,
    step: int,
    by: Sequence[str],
    tenant: str | None,
    *,
    now: float | None = None,
) -> dict[str, Any]:
    """Return hit rates as the contract's `/hit-rates` gives them.

    Args:
        redis: where the counters are.
        window: seconds to look back.
        step: seconds of one bucket, a multiple of 10.
        by: labels to keep apart, out of `LABELS`.
        tenant: whose counts, or None for all.
        now: Unix time, for tests.

    Raises:
        InvalidInput: the window, the step or a label cannot be served.
        RedisUnavailable: Redis is away.
    """
    base = _resolution(window, step, by)
    at_present = now if now is not None else time.time()
    end = int(at_present) // step * step + step
    start = end - max(1, window // step) * step
    starts = range(start, end, base)
    *answers, living, gone = await redis.commands(
        [
            *(("HGETALL", redis_keys.hits(base, s)) for s in starts),
            ("HGETALL", redis_keys.COUNTING),
            ("HGETALL", redis_keys.COUNTING_GAPS),
        ]
    )
    rows: dict[tuple[str, ...], dict[str, list[int]]] = {}
    buckets = (end - start) // step
    for at, answer in zip(starts, answers, strict=True):
        for raw, pages in pairs(answer).items():
            labels, metric = _parse_field(raw)
            if not _wanted(labels, by, tenant):
                continue
            row = rows.setdefault(tuple(labels[name] for name in by), {})
            values = row.setdefault(metric, [0] * buckets)
            values[(at - start) // step] += int(pages)
    silent = [entry for entry in pairs(living).values() if _is_silent(entry, at_present)]
    return {
        "start": start,
        "step": step,
        "partial_last": True,
        "series": [_row(by, key, rows[key], buckets) for key in sorted(rows)],
        "gaps": _gaps([*pairs(gone).values(), *silent], start, end),
    }


def _is_silent(entry: bytes, now: float) -> bool:
    """Return whether a process is gone without a goodbye, though no other has noted it yet."""
    _, at, interval = (int(n) for n in entry.split())
    return now * 1000 - at > max(SILENT_SECONDS * 1000, 10 * interval)


def _gaps(entries: Iterable[bytes], start: int, end: int) -> list[dict[str, int]]:
    """Return when counts of a killed process are missing: from its last flush on, for one interval at most.

    While Redis was away nothing counted, so that a process that died then lost no more than that either.
    """
    found: list[dict[str, int]] = []
    for entry in entries:
        _, at, interval = (int(n) for n in entry.split())
        first, last = at // 1000, -(-(at + interval) // 1000)
        if last > start and first < end:
            found.append({"start": first, "end": last})
    return sorted(found, key=lambda gap: gap["start"])


def _parse_field(raw: bytes) -> tuple[dict[str, str], str]:
    *labels, metric = json.loads(raw)
    return dict(zip(LABELS, labels, strict=True)), metric


def _wanted(labels: Mapping[str, str], by: Sequence[str], tenant: str | None) -> bool:
    if tenant is not None and labels["tenant"] != tenant:
        return False
    return (labels["pool"] != WHOLE_PREFIX) == ("pool" in by)


def _resolution(window: int, step: int, by: Sequence[str]) -> int:
    errors = [
        FieldError("by", "unknown", f"has {name!r}, use {', '.join(LABELS)}")
        for name in by
        if name not in LABELS
    ]
    fitting = [base for base, kept in RESOLUTIONS if step > 0 and step % base == 0 and window <= kept]
    if not fitting:
        listed = ", ".join(f"multiples of {b} s for windows up to {kept} s" for b, kept in RESOLUTIONS)
        errors.append(
            FieldError("step", "not_kept", f"is {step} s over a window of {window} s; kept are {listed}")
        )
    elif window // step > MAX_BUCKETS:
        errors.append(FieldError("window", "too_long", f"has {window // step} steps, at most {MAX_BUCKETS}"))
    if errors:
        raise InvalidInput("these hit rates are not kept", errors)
    return fitting[0]


def _row(
    by: Sequence[str], key: tuple[str, ...], metrics: Mapping[str, list[int]], buckets: int
) -> dict[str, Any]:
    zeros = [0] * buckets
    row: dict[str, Any] = {"labels": dict(zip(by, key, strict=True))}
    row.update({name: metrics.get(name, zeros) for name in METRICS})
    row["misses"] = {n.removeprefix("miss:"): v for n, v in metrics.items() if n.startswith("miss:")}
    return row
