"""Hit rates over time, and the health of the process."""

from __future__ import annotations

import re
from typing import Final, Literal, Self, TypeAlias, get_args

from api.schemas.wire import Body, Count
from metadata.errors import FieldError, InvalidInput

Dimension: TypeAlias = Literal["pool", "model", "tenant", "engine", "namespace"]
DIMENSIONS: Final[tuple[str, ...]] = get_args(Dimension)

_DURATION: Final = re.compile(r"([1-9][0-9]{0,8})([smhd]?)\Z", re.ASCII)
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


class HitRatesQuery(Body):
    """What `GET /v1/hit-rates` asks for; `window` and `step` in seconds."""

    window: int
    step: int
    by: list[Dimension]

    @classmethod
    def parse(cls, window: str = "3600", step: str = "60", by: str = "") -> Self:
        """Return the query of the URL's texts; durations are seconds or such as `90s`, `5m`, `1h`, `7d`.

        Raises:
            InvalidInput: with every parameter at fault.
        """
        errors: list[FieldError] = []
        window_seconds = _duration("window", window, errors)
        step_seconds = _duration("step", step, errors)
        if not errors and step_seconds > window_seconds:
            errors.append(FieldError("step", "out_of_range", "must not be longer than the window"))
        names = [name for name in by.split(",") if name]
        for name in names:
            if name not in DIMENSIONS:
                detail = f"is {name[:64]!r}, use any of {', '.join(DIMENSIONS)}"
                errors.append(FieldError("by", "unknown", detail))
        if errors:
            raise InvalidInput("the query cannot be answered", errors)
        return cls.model_validate(
            {"window": window_seconds, "step": step_seconds, "by": list(dict.fromkeys(names))}
        )


class HitSeries(Body):
    """One row: a value a bucket, oldest first."""

    labels: dict[str, str]
    queried_pages: list[Count]
    hit_pages: list[Count]
    read_pages: list[Count]
    lost_pages: list[Count]
    misses: dict[str, list[Count]]


class HitGap(Body):
    """When the counts of a control-plane process that was killed are missing, Unix seconds."""

    start: Count
    end: Count


class HitRates(Body):
    """`GET /v1/hit-rates`; buckets are multiples of `step`, UTC."""

    start: Count
    step: Count
    partial_last: bool
    series: list[HitSeries]
    gaps: list[HitGap]


class Health(Body):
    """`GET /healthz`: the process runs."""

    status: Literal["ok"] = "ok"


class Check(Body):
    """One thing that must hold before the process takes work."""

    name: str
    ok: bool
    detail: str


class Readiness(Body):
    """`GET /readyz`: 200 when ready, else 503, and what is wrong."""

    ready: bool
    checks: list[Check]


def _duration(field: str, text: str, errors: list[FieldError]) -> int:
    match = _DURATION.match(text)
    if match is None:
        errors.append(FieldError(field, "bad_duration", "must be seconds, or such as 90s, 5m, 1h, 7d"))
        return 0
    return int(match[1]) * _SECONDS[match[2]]
