"""Problems (RFC 9457): the one shape of every error answer, and what each code means."""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

from pydantic import Field

from api.schemas.wire import Body
from metadata.errors import CaketinError

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"
MAX_ERRORS: Final = 100
"""Entries of `errors` that a problem lists; a body of a million faults gets no answer of a million lines."""


class Kind(NamedTuple):
    """Status and title of a code."""

    status: int
    title: str


KINDS: Final[dict[str, Kind]] = {
    "invalid": Kind(422, "The input breaks a rule"),
    "too_many_pages": Kind(422, "One call takes fewer pages"),
    "body_too_large": Kind(413, "The body is too large"),
    "unauthenticated": Kind(401, "A valid token is needed"),
    "forbidden": Kind(403, "The token does not allow this"),
    "quota_exceeded": Kind(403, "The tenant may not claim more"),
    "unknown_engine": Kind(404, "No rank of this engine is registered"),
    "unknown_rank": Kind(404, "The rank is not registered"),
    "unknown_namespace": Kind(404, "The namespace is not known"),
    "unknown_pool": Kind(404, "Nobody registered this pool"),
    "unknown_job": Kind(404, "The job is not known"),
    "unknown_session": Kind(404, "The session is not known"),
    "unknown_transfer": Kind(404, "The transfer is not known"),
    "unknown_token": Kind(404, "The token is not known"),
    "not_found": Kind(404, "There is no such call"),
    "method_not_allowed": Kind(405, "The call exists with another method"),
    "ambiguous_variant": Kind(409, "Several variants of the pool exist"),
    "stale_incarnation": Kind(409, "A newer process life of the rank is registered"),
    "pool_changed": Kind(409, "A pool was registered with other properties"),
    "rate_limited": Kind(429, "Too many calls"),
    "internal": Kind(500, "An error of the server"),
    "redis_unavailable": Kind(503, "Redis does not answer"),
    "no_slots": Kind(507, "The host tier has no free slots"),
}
"""What a code means. A code is never given another meaning."""


class ProblemError(Body):
    """One thing wrong with one field."""

    field: str
    code: str
    detail: str


class Problem(Body):
    """An error answer; `type` is a relative URI that ends in the code. `request_id` finds its log lines."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    errors: list[ProblemError] = Field(default_factory=list)
    request_id: Annotated[str | None, Field(exclude_if=lambda found: found is None)] = None

    @classmethod
    def of(cls, error: CaketinError, request_id: str | None = None) -> Problem:
        """Return the problem that an error of the domain is to a caller."""
        kind = KINDS[error.code]
        shown = [ProblemError(field=e.field, code=e.code, detail=e.detail) for e in error.errors[:MAX_ERRORS]]
        return cls(
            type=f"/problems/{error.code}",
            title=kind.title,
            status=kind.status,
            code=error.code,
            detail=error.detail,
            errors=shown,
            request_id=request_id,
        )
