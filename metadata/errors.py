"""What can go wrong on the ground floor, each with a code of the HTTP contract.

One place for them, so that the floors above translate a code instead of catching a driver's error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RedisReason = Literal[
    "unreachable",
    "timeout",
    "loading",
    "read_only",
    "out_of_memory",
    "wrong_password",
    "no_permission",
    "cluster_down",
    "no_primary",
    "evicting",
    "unknown_schema",
    "refused",
]
"""Why Redis cannot be used."""


@dataclass(frozen=True, slots=True)
class FieldError:
    """One thing wrong with one field of the input.

    Attributes:
        field: path of the field as the caller wrote it, such as `pools[2].hit_policy.window_pages`.
        code: short stable word, such as `out_of_range`.
        detail: a sentence that says what was seen and what to do.
    """

    field: str
    code: str
    detail: str

    def under(self, prefix: str) -> FieldError:
        """Return the same error for an object that sits at `prefix` of a larger body."""
        dot = "." if self.field and not self.field.startswith("[") else ""
        return FieldError(f"{prefix}{dot}{self.field}", self.code, self.detail)


@dataclass
class CaketinError(Exception):
    """Base of all errors that a caller may meet.

    Attributes:
        detail: what happened and what to do, for a person.
        errors: one entry a field where the input was at fault.
    """

    code = "internal"
    detail: str
    errors: list[FieldError] = field(default_factory=list)

    def __str__(self) -> str:
        listed = "; ".join(f"{e.field}: {e.detail}" for e in self.errors)
        return f"{self.code}: {self.detail}" + (f" ({listed})" if listed else "")


class InvalidInput(CaketinError):
    """The input breaks a rule of the domain; `errors` names every field at fault."""

    code = "invalid"


class TooManyPages(CaketinError):
    """More pages in one call than it takes."""

    code = "too_many_pages"


class UnknownNamespace(CaketinError):
    """Nobody registered this namespace (or it belongs to another tenant)."""

    code = "unknown_namespace"


class UnknownEngine(CaketinError):
    """No rank of this engine is registered."""

    code = "unknown_engine"


class UnknownRank(CaketinError):
    """The rank is not registered (any more): register again."""

    code = "unknown_rank"


class UnknownPool(CaketinError):
    """A pool was asked for that nobody of the namespace registered (P4)."""

    code = "unknown_pool"


class UnknownJob(CaketinError):
    """No such job was started, or it ended more than a day ago."""

    code = "unknown_job"


class AmbiguousVariant(CaketinError):
    """Several variants of one pool name exist and the call does not say which."""

    code = "ambiguous_variant"


class QuotaExceeded(CaketinError):
    """A commit would take the tenant beyond what it may claim; nothing of it was done."""

    code = "quota_exceeded"


class StaleIncarnation(CaketinError):
    """An older process life of this rank speaks; a newer one has registered."""

    code = "stale_incarnation"


class PoolChanged(CaketinError):
    """A pool was registered again within one incarnation with other properties (I1)."""

    code = "pool_changed"


@dataclass
class RedisUnavailable(CaketinError):
    """Redis did not answer in time, refused, or is not fit for use.

    Attributes:
        reason: which of these it was, for logs, metrics and `/readyz`.
        retry_after_seconds: when to come again; the circuit's next probe where it is open.
    """

    code = "redis_unavailable"
    reason: RedisReason = "refused"
    retry_after_seconds: float = 1.0
