"""Whether the process can take work, check by check, and what is wrong if not."""

from __future__ import annotations

from typing import Final

from api.errors import told
from api.schemas.observe import Check
from metadata.errors import RedisUnavailable, UnknownRank
from metadata.redis_server import RedisServer
from metadata.registry import Registry

_CHECK_OF: Final = {"evicting": "eviction_policy", "unknown_schema": "schema"}
"""Why Redis cannot be used -> the check that says so; every other reason is the check `redis`."""


async def readiness(redis: RedisServer, registry: Registry) -> list[Check]:
    """Return the checks (reachable, scripts run, may not evict, schema known) up to the first failed one."""
    found = await redis.fitness()
    problem = found.problem
    failed = "" if problem is None else _CHECK_OF.get(problem.reason, "redis")
    checks = [Check(name="redis", ok=failed != "redis", detail="; ".join(found.remarks))]
    if failed != "redis":
        checks += [await _scripts(registry), Check(name="eviction_policy", ok=True, detail="noeviction")]
        checks += [Check(name="schema", ok=True, detail="")]
    if problem is None:
        return checks
    at = [check.name for check in checks].index(failed)
    return [*checks[:at], Check(name=failed, ok=False, detail=told(problem))]


async def _scripts(registry: Registry) -> Check:
    """Run a script that changes nothing: the heartbeat of a rank that cannot be."""
    try:
        await registry.heartbeat("", "readyz", "dp0-pp0-cp0-tp0", "nobody", 0)
    except UnknownRank:
        return Check(name="scripts", ok=True, detail="")
    except RedisUnavailable as error:
        return Check(name="scripts", ok=False, detail=told(error))
    return Check(name="scripts", ok=False, detail="a rank that nobody registered has a heartbeat")
