"""Quotas over real HTTP: a commit beyond them is refused whole, and everything else goes on."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from metadata import quotas
from tests.api.access_scene import TOKENS, client_of, guarded, write
from tests.api.conftest import Stack, serving

RANK = "/v1/engines/e/ranks/dp0-pp0-cp0-tp"
KV = {"name": "kv", "parts": [{"part": "k", "dtype": "uint8", "bytes": 100}]}
SWA = {
    "name": "swa",
    "parts": [{"part": "page", "dtype": "uint8", "bytes": 10}],
    "hit_policy": {"kind": "trailing_pages", "window_pages": 1},
}


def pages(first: int, last: int) -> list[str]:
    return [hashlib.sha256(str(i).encode()).hexdigest() for i in range(first, last)]


def quota(text: str) -> str:
    return f"{TOKENS}\n[tenants.acme]\n{text}\n"


class Engine:
    """One rank of a tenant, and what it asks."""

    def __init__(
        self, http: httpx.Client, revision: str = "r", tp: int = 1, own: int = 0, shards: int = 1
    ) -> None:
        self.shards = list(range(own, own + shards))
        self.http, self.rank = http, f"dp0-pp0-cp0-tp{own}"
        sharded = {**KV, "shard_count": tp, "owned_shards": self.shards}
        body = {
            "incarnation": secrets.token_hex(16),
            "namespace": {"model": "m", "revision": revision, "page_size": 4},
            "pools": [sharded, SWA],
        }
        answer = http.put(f"{RANK}{own}", json=body)
        assert answer.status_code in {200, 201}, answer.text
        self.ns = answer.json()["namespace_id"]

    def commit(self, hashes: list[str], pools: tuple[str, ...] = ("kv",)) -> httpx.Response:
        shards = {"kv": self.shards, "swa": [0]}
        stored = {name: {"pages": "all", "shards": shards[name]} for name in pools}
        body = {"engine_id": "e", "rank": self.rank, "page_hashes": hashes, "stored": stored}
        return self.http.post(f"/v1/namespaces/{self.ns}/commit", json=body)

    def hit(self, hashes: list[str]) -> int:
        body = {"page_hashes": hashes, "engine_id": "e", "pools": {}, "purpose": "prefetch"}
        return int(self.http.post(f"/v1/namespaces/{self.ns}/lookup", json=body).json()["hit_pages"])


def refused(answer: httpx.Response) -> str:
    assert (answer.status_code, answer.json()["code"]) == (403, "quota_exceeded"), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    return str(answer.json()["detail"])


def keys(stack: Stack) -> dict[bytes, Any]:
    """All that the index holds of pages."""
    with redis.Redis.from_url(stack.redis_url) as plain:
        return {key: plain.dump(key) for key in plain.keys("ct:{*:*}:*")}


def let_the_sum_age() -> None:
    time.sleep(quotas.FRESH_SECONDS + 0.05)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_commit_that_does_not_fit_is_refused_whole_with_the_numbers(redis_url: str, tmp_path: Path) -> None:
    with (
        guarded(redis_url, tmp_path, quota("max_pages = 10")) as stack,
        client_of(stack, "acme-engine") as http,
    ):
        engine = Engine(http)
        assert engine.commit(pages(0, 8)).status_code == 200
        let_the_sum_age()
        before = keys(stack)
        detail = refused(engine.commit(pages(8, 11)))
        assert "8 pages claimed of 10" in detail
        assert "3 more" in detail
        assert keys(stack) == before
        # What is there is found as before, and what still fits is taken.
        assert engine.hit(pages(0, 11)) == 8
        assert engine.commit(pages(8, 10)).status_code == 200
        let_the_sum_age()
        assert engine.hit(pages(0, 11)) == 10
        refused(engine.commit(pages(10, 11)))
        assert engine.hit(pages(0, 11)) == 10


def test_the_very_first_commit_is_judged_too(redis_url: str, tmp_path: Path) -> None:
    with (
        guarded(redis_url, tmp_path, quota("max_pages = 3")) as stack,
        client_of(stack, "acme-engine") as http,
    ):
        engine = Engine(http)
        refused(engine.commit(pages(0, 4)))
        assert engine.hit(pages(0, 4)) == 0
        assert engine.commit(pages(0, 3)).status_code == 200


def test_bytes_count_over_all_pools_and_shards(redis_url: str, tmp_path: Path) -> None:
    # Two shards of 100 bytes and a page of 10: 210 bytes a complete page.
    text = quota("max_bytes = 1000")
    with guarded(redis_url, tmp_path, text) as stack, client_of(stack, "acme-engine") as http:
        ranks = [Engine(http, tp=2, own=own) for own in (0, 1)]
        for rank in ranks:
            assert rank.commit(pages(0, 4)).status_code == 200
        assert ranks[0].commit(pages(0, 4), ("swa",)).status_code == 200
        let_the_sum_age()
        assert "840 bytes claimed of 1000" in refused(ranks[0].commit(pages(4, 6), ("kv",)))
        assert "110 more" not in refused(ranks[0].commit(pages(4, 6), ("kv", "swa")))
        assert ranks[0].commit(pages(4, 5), ("kv", "swa")).status_code == 200


def test_a_commit_brings_the_bytes_of_all_shards_that_it_names(redis_url: str, tmp_path: Path) -> None:
    text = quota("max_bytes = 1000")
    with guarded(redis_url, tmp_path, text) as stack, client_of(stack, "acme-engine") as http:
        engine = Engine(http, tp=2, shards=2)
        assert "1200 more" in refused(engine.commit(pages(0, 6)))
        assert engine.commit(pages(0, 5)).status_code == 200


def test_all_namespaces_of_a_tenant_count_and_none_of_another(redis_url: str, tmp_path: Path) -> None:
    with (
        guarded(redis_url, tmp_path, quota("max_pages = 10")) as stack,
        client_of(stack, "acme-engine") as http,
        client_of(stack, "globex-everything") as other,
    ):
        # Without a line of its own and without a default, a tenant is not bound.
        unbound = Engine(other)
        assert unbound.commit(pages(0, 50)).status_code == 200
        one = Engine(http, "one")
        assert one.commit(pages(0, 6)).status_code == 200
        let_the_sum_age()
        two = Engine(http, "two")
        assert "6 pages claimed" in refused(two.commit(pages(0, 5)))
        assert two.commit(pages(0, 4)).status_code == 200
        let_the_sum_age()
        refused(two.commit(pages(4, 5)))
        assert unbound.commit(pages(50, 60)).status_code == 200


def test_a_default_binds_tenants_without_a_line_and_a_line_wins(redis_url: str, tmp_path: Path) -> None:
    text = quota("max_pages = 20")
    with (
        guarded(redis_url, tmp_path, text, tenant_max_pages=5, tenant_max_bytes=10_000) as stack,
        client_of(stack, "acme-engine") as http,
        client_of(stack, "globex-everything") as other,
    ):
        refused(Engine(other).commit(pages(0, 6)))
        assert Engine(http).commit(pages(0, 6)).status_code == 200


def test_a_default_binds_the_one_tenant_of_a_server_without_tokens(redis_url: str, tmp_path: Path) -> None:
    with redis.Redis.from_url(redis_url) as plain:
        plain.flushall()
    with (
        serving(redis_url, tmp_path, tenant_max_pages=5) as stack,
        httpx.Client(base_url=stack.url) as http,
    ):
        refused(Engine(http).commit(pages(0, 6)))


def test_room_that_is_made_can_be_used_within_a_second(redis_url: str, tmp_path: Path) -> None:
    with (
        guarded(redis_url, tmp_path, quota("max_pages = 4")) as stack,
        client_of(stack, "acme-engine") as http,
        client_of(stack, "acme-operator") as operator,
    ):
        engine = Engine(http)
        assert engine.commit(pages(0, 4)).status_code == 200
        let_the_sum_age()
        refused(engine.commit(pages(4, 6)))
        gone = {"kv": {"pages": [[0, 1]], "shards": [0], "reason": "gone"}}
        body = {"engine_id": "e", "rank": engine.rank, "page_hashes": pages(0, 4), "missing": gone}
        cleared = http.post(f"/v1/namespaces/{engine.ns}/missing", json=body).json()
        assert cleared["cleared"] == 2
        wait_until(lambda: engine.commit(pages(4, 6)).status_code == 200, "room was not seen")
        let_the_sum_age()
        refused(engine.commit(pages(6, 7)))
        job = operator.delete(f"/v1/namespaces/{engine.ns}").json()["job_id"]
        wait_until(
            lambda: operator.get(f"/v1/jobs/{job}").json()["state"] in {"done", "failed"}, "the purge hangs"
        )
        engine = Engine(http)
        wait_until(lambda: engine.commit(pages(6, 10)).status_code == 200, "the purge was not seen")


def test_a_quota_changes_without_a_restart(redis_url: str, tmp_path: Path) -> None:
    with (
        guarded(redis_url, tmp_path, quota("max_pages = 1")) as stack,
        client_of(stack, "acme-engine") as http,
    ):
        engine = Engine(http)
        refused(engine.commit(pages(0, 2)))
        write(tmp_path / "new", quota("max_pages = 2")).replace(tmp_path / "tokens.toml")
        wait_until(lambda: engine.commit(pages(0, 2)).status_code == 200, "the new quota is not in force")


@pytest.mark.parametrize("what", ["a shard of others", "pages outside"])
def test_other_faults_of_a_commit_are_told_first(redis_url: str, tmp_path: Path, what: str) -> None:
    with (
        guarded(redis_url, tmp_path, quota("max_pages = 0")) as stack,
        client_of(stack, "acme-engine") as http,
    ):
        engine = Engine(http)
        body = {"engine_id": "e", "rank": engine.rank, "page_hashes": pages(0, 2)}
        stored = {
            "a shard of others": {"kv": {"pages": "all", "shards": [3]}},
            "pages outside": {"kv": {"pages": [[0, 7]], "shards": [0]}},
        }[what]
        answer = http.post(f"/v1/namespaces/{engine.ns}/commit", json={**body, "stored": stored})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
