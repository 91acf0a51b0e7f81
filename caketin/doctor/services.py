"""Redis, Mooncake's master, the control plane: whether they answer, and as what. Nothing is written there."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Final

import httpx

import caketin
from caketin.doctor.finding import Finding
from dataplane.mooncake_master import MasterHttp, check_listening
from dataplane.object_store import StoreUnavailable
from metadata.circuit import CircuitSettings
from metadata.errors import CaketinError, InvalidInput
from metadata.redis_node import Command, NodeSettings, RedisNode
from metadata.redis_topology import topology
from metadata.redis_url import parse_redis_url

_SECONDS: Final = 3.0
_SKEW_SECONDS: Final = 2.0
_NO_EVICTION: Final = "noeviction"
_SKEW: Final = "(seconds that this clock is ahead)"


def redis(url: str) -> Iterator[Finding]:
    """Look at a Redis: every node that holds data."""
    try:
        address = parse_redis_url(url)
    except InvalidInput as error:
        yield Finding("Redis", str(error), "bad", "write it as redis://host:port/0")
        return
    try:
        nodes = asyncio.run(_redis_nodes(url))
    except (CaketinError, OSError, TimeoutError) as error:
        text = error.detail if isinstance(error, CaketinError) else str(error)
        yield Finding("Redis", f"{address}: {text}", "bad", "start it, or correct --redis-url")
        return
    for name, answers in nodes.items():
        yield _redis_node(name, answers)
    skews = {name: float(answers[_SKEW]) for name, answers in nodes.items() if _SKEW in answers}
    if skews:
        yield _redis_clock(*max(skews.items(), key=lambda item: abs(item[1])))


async def _redis_nodes(url: str) -> dict[str, dict[str, str]]:
    circuit = CircuitSettings()
    there = topology(parse_redis_url(url), NodeSettings(_SECONDS, _SECONDS, 4, circuit))
    try:
        return {node.name: await _asked(node) for node in await there.nodes()}
    finally:
        await there.close()


async def _asked(node: RedisNode) -> dict[str, str]:
    sections = [Command(("INFO", section)) for section in ("server", "memory", "replication", "persistence")]
    before = time.time()
    *answers, clock = await node.call([*sections, Command(("TIME",))])
    after = time.time()
    found: dict[str, str] = {}
    if not isinstance(clock, Exception):
        theirs = int(clock[0]) + int(clock[1]) / 1e6
        found[_SKEW] = str(max(before - theirs, 0.0) or min(after - theirs, 0.0))
    for answer in answers:
        if isinstance(answer, Exception):
            raise CaketinError(str(answer))
        lines = (line.partition(":") for line in answer.decode(errors="replace").splitlines())
        found |= {name: value for name, _, value in lines if value}
    return found


def _redis_node(name: str, info: dict[str, str]) -> Finding:
    kind = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info.get("redis_version", "?")
    policy = info.get("maxmemory_policy", "unknown")
    found = f"{kind} {version} at {name}, {info.get('role', '?')}, maxmemory-policy {policy}"
    if policy != _NO_EVICTION:
        advice = (
            f"it may drop parts of the index at any time, and caketin does not start on it: "
            f"CONFIG SET maxmemory-policy {_NO_EVICTION}"
        )
        return Finding("Redis", found, "bad", advice)
    if info.get("role") not in {"master", None}:
        return Finding(
            "Redis", found, "bad", "it is a replica and takes no writes: give the primary's address"
        )
    if info.get("aof_enabled") == "0":
        advice = (
            "claims and registrations end with it: set appendonly yes, where they are to outlive a restart"
        )
        return Finding("Redis", f"{found}, no append-only file", "warn", advice)
    return Finding("Redis", found)


def _redis_clock(name: str, skew: float) -> Finding:
    if abs(skew) <= _SKEW_SECONDS:
        return Finding("Redis' clock", "agrees with this machine's")
    found = f"{abs(skew):.1f} s {'behind' if skew > 0 else 'ahead of'} this machine's ({name})"
    advice = "leases, hit rates and ages of misses go by these clocks: run an NTP client on both machines"
    return Finding("Redis' clock", found, "warn", advice)


def master(address: str, http: str | None) -> Iterator[Finding]:
    """Look at Mooncake's master: whether it listens, and which memory it has to give."""
    try:
        check_listening(address, _SECONDS)
    except StoreUnavailable as error:
        advice = f"start it (mooncake_master --rpc_port={address.rpartition(':')[2]}), or correct --master"
        yield Finding("Mooncake master", error.detail, "bad", advice)
        return
    yield Finding("Mooncake master", f"listens at {address}")
    if http is None:
        return
    asked = MasterHttp(http, seconds=_SECONDS)
    try:
        segments = asked.segments()
    except (StoreUnavailable, ValueError, KeyError) as error:
        text = error.detail if isinstance(error, StoreUnavailable) else str(error)
        yield Finding("storage nodes", text, "bad", "give the metrics port of the master as --master-http")
        return
    finally:
        asked.close()
    total = sum(int(s["size_bytes"]) for s in segments)
    found = f"{len(segments)} segments with {total / (1 << 30):.1f} GiB"
    if segments:
        yield Finding("storage nodes", found)
    else:
        yield Finding("storage nodes", found, "bad", "no node lends memory, every put fails: start one")


def control_plane(url: str, token: str | None) -> Iterator[Finding]:
    """Look at a control plane: whether it is ready, of which version, and what its clock says."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    # No proxy of the environment, but its certificates (SSL_CERT_FILE) and the machine's.
    trust = ssl.create_default_context()
    with httpx.Client(base_url=url, timeout=_SECONDS, trust_env=False, headers=headers, verify=trust) as http:
        try:
            before = time.time()
            answer = http.get("/readyz")
            after = time.time()
            checks = answer.json()["checks"]
            wrong = [f"{c['name']}: {c['detail']}" for c in checks if not c["ok"]]
        except httpx.HTTPError as error:
            advice = "start it (caketin serve, caketin up), or correct --url"
            yield Finding("control plane", f"{url} does not answer: {error}", "bad", advice)
            return
        except (ValueError, KeyError, TypeError):
            found = f"what answers at {url} is no control plane ({answer.status_code})"
            yield Finding("control plane", found, "bad", "correct --url")
            return
        if wrong:
            yield Finding("control plane", f"{url} is not ready", "bad", "; ".join(wrong))
        else:
            yield _version(http, url)
        yield from _clock(answer.headers.get("date"), before, after)


def _version(http: httpx.Client, url: str) -> Finding:
    try:
        theirs = str(http.get("/openapi.json").json()["info"]["version"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return Finding("control plane", f"{url} is ready; its version is not known")
    if theirs == caketin.__version__:
        return Finding("control plane", f"{url} is ready, version {theirs}")
    found = f"{url} is ready, version {theirs}; here is {caketin.__version__}"
    return Finding("control plane", found, "warn", "run one version on both sides")


def _clock(date: str | None, before: float, after: float) -> Iterator[Finding]:
    try:
        theirs = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return
    # The header has whole seconds and a busy server may write it late: a second or two are no finding.
    skew = max(before - (theirs + 1), theirs - after, 0.0)
    if skew <= _SKEW_SECONDS:
        yield Finding("clock", "agrees with the control plane's")
    else:
        found = f"{skew:.0f} s apart from the control plane's"
        advice = "hit rates and ages of misses go by these clocks: run an NTP client on both machines"
        yield Finding("clock", found, "warn", advice)
