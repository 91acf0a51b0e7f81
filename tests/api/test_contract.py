"""The contract's worked examples, each really provoked over HTTP: same status, same code, same values.

What depends on the run (ids, ages, leases, texts for people) is compared by its shape.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from metadata import redis_keys
from metadata.page_hash import page_hashes
from tests.api.conftest import Stack
from tests.contract.fixtures import FOLDER, Fixture, load_all

ENGINE, RANK = "sglang-prefill-0", "dp0-pp0-cp0-tp0"
# Access control answers these; its own tests provoke them.
OF_ACCESS_CONTROL = {
    *("any.unauthenticated", "any.forbidden", "any.rate_limited", "purge.forbidden"),
    "commit.quota_exceeded",
}
FIXTURES = {
    f.file: f for f in load_all() if not f.file.startswith("agent") and f.file not in OF_ACCESS_CONTROL
}

# Values of the run: compared by type only.
OF_THE_RUN = {
    *("namespace_id", "pool_id", "epoch", "lease_seconds_left", "job_id", "detail", "age_seconds", "start"),
    *("store", "suffixes", "bit", "salt_fingerprint", "tenant", "next_cursor"),
}
# Examples that show a moment in a larger installation.
SHAPE_ONLY = {
    "namespace",
    "job",
    "job.failed",
    "hit_rates",
    "readyz",
    "engine",
    "register",
    "register.renewed",
}


@dataclass
class Scene:
    """What a set-up works with, and what it tells the call."""

    http: httpx.Client
    redis: redis.Redis
    fixture: Fixture
    ns: str = "0" * 16
    engine_id: str = ENGINE
    rank: str = RANK
    job_id: str = "purge-00000000"
    content: bytes | None = None
    request: Any = None
    others: dict[str, str] = field(default_factory=dict)

    def register(self, body: dict, engine: str = ENGINE, rank: str = RANK) -> dict:
        answer = self.http.put(f"/v1/engines/{engine}/ranks/{rank}", json=body)
        assert answer.status_code in {200, 201}, answer.text
        self.ns = answer.json()["namespace_id"]
        return answer.json()

    def commit(self, hashes: list[str], **stored: dict) -> None:
        body = {"engine_id": ENGINE, "rank": RANK, "page_hashes": hashes, "stored": stored}
        answer = self.http.post(f"/v1/namespaces/{self.ns}/commit", json=body)
        assert (answer.status_code, answer.json().get("rejected")) == (200, []), answer.text

    def lose(self, hashes: list[str], **missing: dict) -> None:
        body = {
            "engine_id": ENGINE,
            "rank": RANK,
            "page_hashes": hashes,
            "missing": missing,
            "generation": None,
        }
        answer = self.http.post(f"/v1/namespaces/{self.ns}/missing", json=body)
        assert answer.status_code == 200, answer.text

    def note(self, page: str, bit: int, reason: str) -> None:
        """Say why a claim went, as the sweep does."""
        (key,) = redis_keys.notes(self.ns, [bytes.fromhex(page)])
        self.redis.hset(key, str(bit), f"{reason} {int(time.time()) - 38} ".encode() + b"\1")

    def generations(self, hashes: list[str], values: bytes) -> None:
        """Set the pages' generations, which hundreds of losses would."""
        for page, value in zip(hashes, values, strict=True):
            (key,) = redis_keys.pages(self.ns, [bytes.fromhex(page)])
            self.redis.setrange(key, 0, bytes([value]))


def of(file: str) -> Any:
    return json.loads((FOLDER / f"{file}.json").read_text())["request"]


def run(*pages: int) -> dict:
    return {"pages": [list(pages)], "shards": [0]}


ALL = {"pages": "all", "shards": [0]}
NEWER = "f" * 32


def deepseek(s: Scene) -> None:
    """The contract's engine: a logical anchor, c4 derived from it, a window."""
    s.register(of("register"))


def as_asked(s: Scene) -> None:
    s.register(s.fixture.request)


def replaced(s: Scene) -> None:
    """The request's incarnation was there and a newer one took over."""
    old = of("register") | {"incarnation": s.fixture.request["incarnation"]}
    s.register(old)
    s.register(old | {"incarnation": NEWER})


def beating(s: Scene) -> None:
    epoch = s.register(of("register"))["epoch"]
    s.request = s.fixture.request | {"epoch": epoch}


def renamed_before(s: Scene) -> None:
    """The pool set of the register example was registered; the fixture's differs."""
    s.register(of("register"))


def pool(
    name: str, shards: int = 1, owned: tuple[int, ...] = (0,), window: int | None = None, **more
) -> dict:
    policy = {"kind": "all_pages"} if window is None else {"kind": "trailing_pages", "window_pages": window}
    parts = [{"part": p, "dtype": "bfloat16", "bytes": 64} for p in more.get("parts", ("k", "v"))]
    return {
        "name": name,
        "parts": parts,
        "shard_count": shards,
        "owned_shards": list(owned),
        "hit_policy": policy,
    }


def body(*pools: dict, page_size: int = 256, model: str = "m") -> dict:
    identity = {"model": model, "revision": "r", "page_size": page_size, "namespace_salt": None}
    return {"incarnation": "9d0c2c1e6f4b4c5fa2f3b9d1e4a7c8b0", "namespace": identity, "pools": list(pools)}


def sharded(s: Scene) -> None:
    """kv in two shards, both of this rank, and a window."""
    s.register(body(pool("kv", 2, (0, 1)), pool("swa", window=1)))


def two_variants(s: Scene) -> None:
    s.register(body(pool("kv")))
    s.register(body(pool("kv", parts=("k",))), engine="other")


def two_ranks(s: Scene) -> None:
    for rank in (RANK, "dp0-pp0-cp0-tp1"):
        s.register(of("register"), rank=rank)
    s.register(of("register"), engine="sglang-prefill-1")


def four_engines(s: Scene) -> None:
    for i in range(4):
        s.register(of("register"), engine=f"e{i}")


def holes(s: Scene) -> None:
    """Windows at pages 0 and 2 only; the last one was evicted."""
    deepseek(s)
    hashes = s.fixture.request["page_hashes"]
    s.commit(hashes, deepseek_v4_c4=ALL, swa=ALL)
    s.lose(hashes, swa={"pages": [[1, 1], [3, 3]], "shards": [0], "reason": "checksum"})
    s.note(hashes[3], bit_of(s, "swa"), "evicted")
    s.generations(hashes, bytes(range(4)))


def bit_of(s: Scene, name: str) -> int:
    pools = s.http.get(f"/v1/namespaces/{s.ns}").json()["pools"]
    return next(p["bit"] for p in pools if p["name"] == name)


def long_prompt(s: Scene) -> None:
    deepseek(s)
    hashes = [f"{i:064x}" for i in range(2048)]
    s.commit(hashes, deepseek_v4_c4=ALL)
    s.commit(hashes, swa={"pages": [[0, 999], [1009, 2039]], "shards": [0]})
    s.note(hashes[2040], bit_of(s, "swa"), "evicted")
    s.request = of("lookup") | {"page_hashes": hashes}


def long_commit(s: Scene) -> None:
    """128 pages; the anchor of one of them is not there."""
    deepseek(s)
    hashes = [f"{i:064x}" for i in range(129)]
    stored = {
        "swa": {"pages": [[0, 128]], "shards": [0]},
        "deepseek_v4_c4": {"pages": [[0, 4], [6, 128]], "shards": [0]},
    }
    s.request = {"engine_id": ENGINE, "rank": RANK, "page_hashes": hashes, "stored": stored}


def mid_sequence(s: Scene) -> None:
    window = pool("swa", window=4)
    c4 = pool("deepseek_v4_c4") | {"indices_from": "kv"}
    anchor = {"name": "kv", "logical": True, "parts": []}
    s.register(body(anchor, c4, window))
    request = s.fixture.request
    hashes = request["prefix_hashes"] + request["page_hashes"]
    s.commit(hashes, deepseek_v4_c4=ALL, swa=ALL)
    s.generations(request["page_hashes"], b"\xff")


def tokens(s: Scene) -> None:
    s.register(body(pool("kv", 4, (0, 1, 2, 3)), pool("swa", 4, (0, 1, 2, 3), window=1), page_size=3))
    r = s.fixture.request
    found = page_hashes(r["token_ids"], 3, cache_salt=r["cache_salt"], extra_key=r["extra_key"])
    hashes = [h.hex() for h in found]
    s.commit(hashes, kv={"pages": "all", "shards": [0, 1, 2, 3]}, swa={"pages": [[0, 0]], "shards": [0, 2]})
    s.lose(hashes, kv={"pages": [[1, 1]], "shards": [0, 1, 2, 3], "reason": "gone"})


def seven_gone(s: Scene) -> None:
    s.register(body(pool("kv", 3, (0, 1, 2))))
    hashes = s.fixture.request["page_hashes"]
    s.commit(hashes, kv={"pages": "all", "shards": [0, 1, 2]})
    s.generations(hashes, bytes(range(10)))


def sick_segment(s: Scene) -> None:
    sharded(s)
    hashes = s.fixture.request["page_hashes"]
    s.commit(hashes, kv={"pages": "all", "shards": [0, 1]}, swa=ALL)


def losing(s: Scene) -> None:
    """The pools that the refused reports name."""
    deepseek(s)


def purged(s: Scene) -> None:
    deepseek(s)
    s.job_id = s.http.delete(f"/v1/namespaces/{s.ns}").json()["job_id"]


def too_many(s: Scene) -> None:
    deepseek(s)
    hashes = ["00" * 32] * 65_537
    call = s.fixture.call.rpartition("/")[2]
    s.request = {
        "lookup": {"page_hashes": hashes},
        "keys": {"page_hashes": hashes},
        "commit": {"engine_id": ENGINE, "rank": RANK, "page_hashes": hashes, "stored": {"swa": ALL}},
        "missing": {
            "engine_id": ENGINE,
            "rank": RANK,
            "page_hashes": hashes,
            "missing": {"swa": ALL | {"reason": "gone"}},
        },
    }[call]


def too_large(s: Scene) -> None:
    deepseek(s)
    s.content = b" " * ((8 << 20) + 1)


def nothing(_: Scene) -> None:
    pass


def path_engine_9(s: Scene) -> None:
    deepseek(s)
    s.engine_id = "sglang-prefill-9"


def evicting(s: Scene) -> None:
    s.redis.config_set("maxmemory-policy", "allkeys-lru")


UNKNOWN_NS = nothing
SETUPS: dict[str, Callable[[Scene], None]] = {
    "register": nothing,
    "register.renewed": as_asked,
    "register.pool_changed": renamed_before,
    "register.stale_incarnation": replaced,
    "register.invalid": nothing,
    "register.invalid_fields": nothing,
    "heartbeat": beating,
    "heartbeat.unknown_rank": nothing,
    "heartbeat.stale_incarnation": replaced,
    "heartbeat.invalid": deepseek,
    "remove_rank": deepseek,
    "remove_rank.invalid": deepseek,
    "remove_engine": deepseek,
    "engines": two_ranks,
    "engines.invalid": nothing,
    "engine": deepseek,
    "engine.unknown_engine": path_engine_9,
    "namespaces": four_engines,
    "namespaces.invalid": nothing,
    "namespace": deepseek,
    "namespace.unknown_namespace": nothing,
    "purge": deepseek,
    "purge.unknown_namespace": nothing,
    "job": purged,
    "job.failed": purged,
    "job.unknown_job": nothing,
    "keys": sharded,
    "keys.sglang": deepseek,
    "keys.ambiguous_variant": two_variants,
    "keys.invalid": deepseek,
    "keys.invalid_layout": deepseek,
    "keys.too_many_pages": too_many,
    "keys.unknown_namespace": nothing,
    "keys.unknown_pool": sharded,
    "lookup": holes,
    "lookup.contract": long_prompt,
    "lookup.degraded": nothing,
    "lookup.mid_sequence": mid_sequence,
    "lookup.tokens": tokens,
    "lookup.ambiguous_variant": two_variants,
    "lookup.invalid": deepseek,
    "lookup.invalid_hash": deepseek,
    "lookup.invalid_twice": deepseek,
    "lookup.too_many_pages": too_many,
    "lookup.unknown_engine": deepseek,
    "lookup.unknown_namespace": nothing,
    "lookup.unknown_pool": deepseek,
    "lookup.unknown_rank": deepseek,
    "commit": deepseek,
    "commit.contract": long_commit,
    "commit.invalid": losing,
    "commit.invalid_fields": deepseek,
    "commit.too_many_pages": too_many,
    "commit.unknown_engine": deepseek,
    "commit.unknown_namespace": nothing,
    "commit.unknown_pool": deepseek,
    "commit.unknown_rank": deepseek,
    "missing": seven_gone,
    "missing.unfenced": sick_segment,
    "missing.evicted": sick_segment,
    "missing.invalid": losing,
    "missing.invalid_fields": deepseek,
    "missing.invalid_generation": deepseek,
    "missing.too_many_pages": too_many,
    "missing.unknown_engine": deepseek,
    "missing.unknown_namespace": nothing,
    "missing.unknown_pool": deepseek,
    "missing.unknown_rank": deepseek,
    "hit_rates": nothing,
    "hit_rates.invalid": nothing,
    "healthz": nothing,
    "readyz": nothing,
    "readyz.not_ready": evicting,
    "any.body_too_large": too_large,
    "any.redis_unavailable": nothing,
}
WITHOUT_REDIS = {"lookup.degraded", "any.redis_unavailable"}


def test_every_example_is_provoked():
    assert set(SETUPS) == set(FIXTURES)


@pytest.fixture
def away(redisless: httpx.Client) -> httpx.Client:
    return redisless


@pytest.mark.parametrize("file", sorted(set(SETUPS) - WITHOUT_REDIS))
def test_the_example_happens(file: str, stack: Stack, client: httpx.Client, tmp_path: Path):
    with redis.Redis.from_url(stack.redis_url) as plain:
        scene = Scene(client, plain, FIXTURES[file])
        try:
            SETUPS[file](scene)
            check(scene)
        finally:
            plain.config_set("maxmemory-policy", "noeviction")


@pytest.mark.parametrize("file", sorted(WITHOUT_REDIS))
def test_the_example_happens_when_redis_is_away(file: str, redisless: httpx.Client):
    fixture = FIXTURES[file]
    if fixture.call != "*":
        check(Scene(redisless, redis.Redis(), fixture))
        return
    for method, path in (
        ("GET", "/v1/engines"),
        ("GET", "/v1/namespaces"),
        ("GET", f"/v1/namespaces/{'0' * 16}"),
    ):
        answer = redisless.request(method, path)
        assert answer.status_code == fixture.status
        compare(fixture, fixture.response, answer.json())
        assert int(answer.headers["retry-after"]) >= 1


def check(scene: Scene) -> None:
    fixture = scene.fixture
    call = "POST /v1/namespaces/{ns}/lookup" if fixture.call == "*" else fixture.call
    method, _, path = call.partition(" ")
    names = {"ns": scene.ns, "engine_id": scene.engine_id, "rank": scene.rank, "job_id": scene.job_id}
    url = path.format(**names) + (f"?{fixture.query}" if fixture.query else "")
    request = scene.request if scene.request is not None else fixture.request
    content = (
        scene.content if scene.content is not None else json.dumps(request).encode() if request else None
    )
    answer = scene.http.request(method, url, content=content)
    assert answer.status_code == fixture.status, answer.text[:2000]
    if fixture.response is None:
        assert answer.content == b""
        return
    actual = answer.json()
    if "keys" in fixture.call and fixture.status == 200:
        actual = as_in_the_example(fixture.response, actual, scene.ns)
    if fixture.file == "lookup.contract":
        actual["generation"] = fixture.response["generation"]
    compare(fixture, fixture.response, actual)


def as_in_the_example(expected: dict, actual: dict, ns: str) -> dict:
    """Return the keys with the example's namespace and pool ids."""
    text = json.dumps(actual).replace(ns, "4b5d1c6f0a9e8d72")
    for name, found in actual["pools"].items():
        if found["pool_id"] is not None:
            text = text.replace(found["pool_id"], expected["pools"][name]["pool_id"])
    return json.loads(text)


def compare(fixture: Fixture, expected: Any, actual: Any) -> None:
    if isinstance(actual, dict) and "code" in actual:
        assert actual.pop("request_id")
    differ = list(differences(expected, actual, "", exact=fixture.file not in SHAPE_ONLY))
    assert not differ, json.dumps(actual)[:2000]


def differences(expected: Any, actual: Any, at: str, *, exact: bool):
    if isinstance(expected, dict) and isinstance(actual, dict):
        run_dependent = at.rpartition(".")[2] in OF_THE_RUN
        if set(expected) - set(actual) and not run_dependent:
            yield f"{at}: lacks {set(expected) - set(actual)}"
        # The contract's own registration shows one of the pools.
        if set(actual) - set(expected) - {"tenant"} and not run_dependent and at != ".pools":
            yield f"{at}: has {set(actual) - set(expected)} more"
        for name in set(expected) & set(actual):
            yield from differences(
                expected[name], actual[name], f"{at}.{name}", exact=exact and name not in OF_THE_RUN
            )
    elif isinstance(expected, list) and isinstance(actual, list):
        exact = exact and not at.startswith(".engines[0].namespaces")
        if exact and len(expected) != len(actual):
            yield f"{at}: has {len(actual)} entries, not {len(expected)}"
        for i, pair in enumerate(zip(expected, actual, strict=False)):
            yield from differences(*pair, f"{at}[{i}]", exact=exact)
    elif exact and expected != actual:
        yield f"{at}: {actual!r}, not {expected!r}"
    elif expected is not None and actual is not None and type(expected) is not type(actual):
        yield f"{at}: {type(actual).__name__}, not {type(expected).__name__}"
