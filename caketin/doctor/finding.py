"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table.

    Attributes:
        what: what was looked at.
        found: what was seen.
        state: `warn`: works, but not as well as it could; `bad`: something that was asked for will not work.
        advice: what to do, as exact as it can be; empty when all is well.
    """

    what: str
    found: str
    state: State = "ok"
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """Return it as plain values."""
        return asdict(self)
