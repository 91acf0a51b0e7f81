"""The one place where the driver's errors become ours, told apart by what an operator has to do."""

from __future__ import annotations

from typing import Final

from redis import exceptions as driver

from metadata.errors import RedisReason, RedisUnavailable

_TEXTS: Final[dict[RedisReason, str]] = {
    "unreachable": "Redis cannot be reached: is it running, and is the address right?",
    "timeout": "Redis did not answer in time: it hangs, is overloaded, or the network drops packets",
    "loading": "Redis is loading its data from disk: it takes calls when that is done",
    "read_only": "Redis is a read-only replica: give the address of the primary, or of the Sentinels",
    "out_of_memory": "Redis has reached its maxmemory and refuses writes: raise it, or purge namespaces",
    "wrong_password": "Redis refuses the user name or password: check the credentials in the Redis URL",
    "no_permission": "the Redis user may not do what caketin needs: "
    "allow it keys ct:*, and @read @write @scripting ping info time config|get cluster|slots",
    "cluster_down": "the Redis Cluster does not serve all slots: a primary is away and not replaced yet",
    "no_primary": "no Sentinel names a primary for this service: is its name right, is a failover over?",
    "refused": "Redis refused the call",
}

_PREFIXES: Final[tuple[tuple[str, RedisReason], ...]] = (
    ("LOADING", "loading"),
    ("READONLY", "read_only"),
    ("OOM", "out_of_memory"),
    ("WRONGPASS", "wrong_password"),
    ("NOAUTH", "wrong_password"),
    ("NOPERM", "no_permission"),
    ("CLUSTERDOWN", "cluster_down"),
    ("MASTERDOWN", "cluster_down"),
    ("BUSY ", "timeout"),
    ("MISCONF", "refused"),
)

SERVER_AWAY: Final[frozenset[RedisReason]] = frozenset({"unreachable", "timeout", "loading", "no_primary"})
"""Reasons for which the next call would fare no better, so that the circuit counts them. A server that
refuses writes still answers lookups; one that refuses a password says so at once."""


def unavailable(reason: RedisReason, seen: object = "", *, where: str = "") -> RedisUnavailable:
    """Return the error for a reason, with what was seen."""
    text = _TEXTS[reason] + (f" (at {where})" if where else "") + (f" [{seen}]" if str(seen) else "")
    return RedisUnavailable(text, reason=reason)


def translated(error: Exception, *, where: str = "") -> RedisUnavailable:
    """Return our error for what the driver or the socket raised."""
    if isinstance(error, RedisUnavailable):
        return error
    return unavailable(_reason(error), f"{type(error).__name__}: {error}", where=where)


def _reason(error: Exception) -> RedisReason:
    text = str(error)
    for kind, reason in _KINDS:
        if isinstance(error, kind):
            return reason
    for prefix, reason in _PREFIXES:
        # The driver strips the code off some errors and not off others; scripts put words around them.
        if text.startswith(prefix) or f" {prefix} " in text or f"-{prefix} " in text:
            return reason
    return "unreachable" if isinstance(error, driver.ConnectionError | OSError) else "refused"


_KINDS: Final[tuple[tuple[type[Exception] | tuple[type[Exception], ...], RedisReason], ...]] = (
    ((driver.TimeoutError, TimeoutError), "timeout"),
    (driver.BusyLoadingError, "loading"),
    (driver.ReadOnlyError, "read_only"),
    (driver.OutOfMemoryError, "out_of_memory"),
    (driver.NoPermissionError, "no_permission"),
    (
        (
            driver.AuthenticationError,
            driver.AuthorizationError,
            driver.AuthenticationWrongNumberOfArgsError,
        ),
        "wrong_password",
    ),
    (driver.ClusterDownError, "cluster_down"),
)
