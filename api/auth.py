"""Who may call what: one table for all routes, and the caller that a token makes.

A route that is not in the table is refused to everybody, so that a new one cannot be open by oversight.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from ipaddress import ip_address
from typing import Final, Literal

from api.errors import Refused
from api.limits import RateLimited, RateLimiter
from api.logs import get_logger
from api.schemas.observe import Check
from api.token_file import TokenFile
from api.tokens import ALL_TENANTS, SCOPES, Scope, Token, bearer
from metadata.quota_rules import Quota

LOCAL_TENANT: Final = "default"
"""Whose data a server without tokens holds; such a server listens on loopback only."""
_REALM: Final = 'Bearer realm="caketin"'

log = get_logger(__name__)


class Unauthenticated(Refused):
    """Nobody known calls. What is wrong with a token is not said: the log says it to the operator."""

    code = "unauthenticated"


class Forbidden(Refused):
    """The caller is known and may not do this."""

    code = "forbidden"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    Attributes:
        token_id: name of the token, for logs.
        tenant: whose data the call may see, or `ALL_TENANTS`.
        scopes: what the token allows; `operator` brings `reader` along.
        sees_all: whether numbers over all tenants are shown.
    """

    token_id: str
    tenant: str
    scopes: frozenset[Scope]
    sees_all: bool = False

    @classmethod
    def of(cls, token: Token) -> Caller:
        """Return the caller that shows `token`."""
        scopes: frozenset[Scope] = token.scopes
        if "operator" in scopes:
            scopes |= {"reader"}
        return cls(token.token_id, token.tenant, scopes, token.tenant == ALL_TENANTS)

    @property
    def counts_of(self) -> str | None:
        """Whose counts the caller sees, None for all tenants'."""
        return None if self.tenant == ALL_TENANTS else self.tenant

    def require(self, *scopes: Scope) -> None:
        """Check that the token has one of these scopes.

        Raises:
            Forbidden: it has none of them.
        """
        if self.scopes.isdisjoint(scopes):
            needed = " or ".join(scopes)
            challenge = f'{_REALM}, error="insufficient_scope", scope="{" ".join(scopes)}"'
            detail = f"this call needs a token of scope {needed}"
            raise Forbidden(detail, headers={"WWW-Authenticate": challenge})


ANONYMOUS: Final = Caller("", "", frozenset())
LOCAL: Final = Caller("", LOCAL_TENANT, frozenset(SCOPES), sees_all=True)


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may use a route.

    Attributes:
        scopes: one of these is needed; none: anybody, without a token.
        all_tenants: whether a token of all tenants may (`also`), must (`only`) or must not (`never`) be used.
        lane: calls of one lane share a bucket of the rate limit.
    """

    scopes: tuple[Scope, ...]
    all_tenants: Literal["never", "also", "only"] = "never"
    lane: str = "calls"


_RANK: Final = "/v1/engines/{engine_id}/ranks/{rank}"
_NS: Final = "/v1/namespaces/{ns}"
RULES: Final[dict[tuple[str, str], Rule]] = {
    ("PUT", _RANK): Rule(("engine",)),
    # A lane of its own: a burst of lookups must not cost a rank its lease.
    ("POST", f"{_RANK}/heartbeat"): Rule(("engine",), lane="heartbeats"),
    # A rank leaves by itself, fenced by its incarnation; a whole engine is taken out by an operator.
    ("DELETE", _RANK): Rule(("engine", "operator")),
    ("DELETE", "/v1/engines/{engine_id}"): Rule(("operator",)),
    ("GET", "/v1/engines"): Rule(("reader",)),
    ("GET", "/v1/engines/{engine_id}"): Rule(("reader",)),
    ("GET", "/v1/namespaces"): Rule(("reader",)),
    ("GET", _NS): Rule(("reader",)),
    ("DELETE", _NS): Rule(("operator",)),
    ("GET", "/v1/jobs/{job_id}"): Rule(("operator",)),
    # Purpose `prefetch` needs engine; the route says so once it has read the body.
    ("POST", f"{_NS}/lookup"): Rule(("engine", "reader")),
    ("POST", f"{_NS}/commit"): Rule(("engine",)),
    ("POST", f"{_NS}/missing"): Rule(("engine",)),
    ("POST", f"{_NS}/keys"): Rule(("engine", "reader")),
    ("GET", "/v1/hit-rates"): Rule(("reader",), all_tenants="also"),
    # Counts of the process over all tenants.
    ("GET", "/metrics"): Rule(("operator",), all_tenants="only", lane="scrapes"),
    # For probes, which have no token; /readyz says more to an operator of all tenants.
    ("GET", "/healthz"): Rule(()),
    ("GET", "/readyz"): Rule(()),
}
"""Method and path of every route -> who may use it. The documents of the API itself are open."""


class Access:
    """Says who calls, and refuses what the caller may not do."""

    def __init__(self, tokens: TokenFile | None, limiter: RateLimiter, default_quota: Quota) -> None:
        """Make it.

        Args:
            tokens: the token file; None on a server that only its own machine can reach, where every caller
                may do everything.
            limiter: bounds each token's calls.
            default_quota: of a tenant for which the file names none.
        """
        self.tokens = tokens
        self._limiter = limiter
        self._default_quota = default_quota

    def authorize(self, method: str, path: str, authorization: Sequence[str]) -> Caller:
        """Return who calls.

        Args:
            method: of the call.
            path: template of the route that matched.
            authorization: all headers of that name.

        Raises:
            Unauthenticated: no token, or none that is in force.
            Forbidden: the token does not allow this call.
            RateLimited: the token's bucket is empty.
        """
        rule = RULES.get((method, path))
        if rule is None:
            raise Forbidden("nobody may use this call: no rule says who may")
        caller = self._caller(authorization)
        if not rule.scopes:
            return caller or ANONYMOUS
        if caller is None:
            problem = ', error="invalid_token"' if authorization else ""
            raise Unauthenticated(
                "a bearer token that is in force is needed", headers={"WWW-Authenticate": _REALM + problem}
            )
        if caller is LOCAL:
            return caller
        caller.require(*rule.scopes)
        _check_tenant(rule, caller)
        wait = self._limiter.take((caller.token_id, rule.lane), time.monotonic())
        if wait > 0:
            raise RateLimited.after(wait, "the token makes more calls than the server takes: slow down")
        return caller

    def checks(self) -> list[Check]:
        """Return what `/readyz` says of the tokens.

        A token file that cannot be used is no reason to take no work: the tokens of the last good one are
        in force.
        """
        return [Check(name="tokens", ok=True, detail=self.tokens.state())] if self.tokens is not None else []

    def quota(self, tenant: str) -> Quota:
        """Return how much a tenant may claim."""
        named = self.tokens.quotas.get(tenant) if self.tokens is not None else None
        return named if named is not None else self._default_quota

    def _caller(self, authorization: Sequence[str]) -> Caller | None:
        if self.tokens is None:
            return LOCAL
        shown = bearer(authorization[0]) if len(authorization) == 1 else None
        token = self.tokens.table.find(shown) if shown is not None else None
        if token is None:
            return None
        if token.has_expired(datetime.now(UTC)):
            log.warning("expired token", token_id=token.token_id, tenant=token.tenant)
            return None
        return Caller.of(token)


def require_loopback_name(host: str) -> None:
    """Refuse a call that reached a server without tokens under another name than this machine's own.

    A web page may give its own name the address 127.0.0.1 and have a visitor's browser call here. The browser
    then says the page's name.

    Args:
        host: the `Host` header, empty where there is none.

    Raises:
        Forbidden: the name is not one of loopback.
    """
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name.strip("[]").lower() in {"", "localhost", "::1"} or _is_loopback(name.strip("[]")):
        return
    raise Forbidden(
        f"this server has no tokens and answers to names of its own machine only, not to {name[:64]!r}: call "
        "127.0.0.1 or localhost, or give it a token file"
    )


@lru_cache(maxsize=256)  # asked by every call, and mostly of the same name
def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _check_tenant(rule: Rule, caller: Caller) -> None:
    of_all = caller.tenant == ALL_TENANTS
    if of_all and rule.all_tenants == "never":
        raise Forbidden(
            "the token is of all tenants and sees numbers only: this call needs one of one tenant"
        )
    if not of_all and rule.all_tenants == "only":
        raise Forbidden(f'this call needs an operator\'s token of all tenants (tenant "{ALL_TENANTS}")')
