"""What the agent refuses, and how that is told: problems (RFC 9457) with the contract's codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from dataplane.host_answers import NoSlots
from metadata.errors import CaketinError

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"
_MAX_ERRORS: Final = 100


class UnknownTransfer(CaketinError):
    """The transfer was never started, or ended too long ago (404)."""

    code = "unknown_transfer"


class Forbidden(CaketinError):
    """The peer is another user's process, or asks over TCP for what only the socket gives (403)."""

    code = "forbidden"


class Unauthenticated(CaketinError):
    """The kernel does not say who the peer is (401)."""

    code = "unauthenticated"


@dataclass
class RateLimited(CaketinError):
    """As much is under way as the agent takes (429)."""

    retry_after_seconds: int = 1
    code = "rate_limited"


class Draining(CaketinError):
    """The agent is ending: nothing new is begun (503)."""

    code = "draining"


class BodyTooLarge(CaketinError):
    """The body has more bytes than the agent takes (413)."""

    code = "body_too_large"


class NotFound(CaketinError):
    """There is no such call (404)."""

    code = "not_found"


class MethodNotAllowed(CaketinError):
    """The call exists with another method (405)."""

    code = "method_not_allowed"


class Internal(CaketinError):
    """A fault of the agent's own code; its log says more (500)."""

    code = "internal"


class _Kind(NamedTuple):
    status: int
    title: str


_KINDS: Final[dict[str, _Kind]] = {
    "invalid": _Kind(422, "The input breaks a rule"),
    "too_many_pages": _Kind(422, "One call takes fewer pages"),
    "body_too_large": _Kind(413, "The body is too large"),
    "unauthenticated": _Kind(401, "A valid token is needed"),
    "forbidden": _Kind(403, "The token does not allow this"),
    "unknown_pool": _Kind(404, "Nobody registered this pool"),
    "unknown_session": _Kind(404, "The session is not known"),
    "unknown_transfer": _Kind(404, "The transfer is not known"),
    "unknown_token": _Kind(404, "The token is not known"),
    "not_found": _Kind(404, "There is no such call"),
    "method_not_allowed": _Kind(405, "The call exists with another method"),
    "stale_incarnation": _Kind(409, "A newer process life of the rank is registered"),
    "pool_changed": _Kind(409, "A pool was registered with other properties"),
    "rate_limited": _Kind(429, "Too many calls"),
    "internal": _Kind(500, "An error of the server"),
    "draining": _Kind(503, "The agent is ending"),
    "no_slots": _Kind(507, "The host tier has no free slots"),
    "out_of_host_memory": _Kind(507, "The machine has too little shared memory"),
}


class ProblemAnswer(NamedTuple):
    """An error answer: status, headers, body."""

    status: int
    headers: dict[str, str]
    body: bytes


def problem(error: CaketinError) -> ProblemAnswer:
    """Return the answer that tells `error`; the code of one that no caller can help is `internal`."""
    code = error.code if error.code in _KINDS else "internal"
    kind = _KINDS[code]
    told: dict[str, Any] = {
        "type": f"/problems/{code}",
        "title": kind.title,
        "status": kind.status,
        "code": code,
        "detail": error.detail,
        "errors": [
            {"field": e.field, "code": e.code, "detail": e.detail} for e in error.errors[:_MAX_ERRORS]
        ],
    }
    if isinstance(error, NoSlots):
        told["pools"] = {
            name: {"asked": s.asked, "free": s.free, "locked": s.locked} for name, s in error.pools.items()
        }
    headers = {}
    if isinstance(error, RateLimited):
        headers["Retry-After"] = str(error.retry_after_seconds)
    return ProblemAnswer(kind.status, headers, msgspec.json.encode(told))
