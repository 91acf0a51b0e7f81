"""A purge takes claims and objects of one namespace and no other; any replica knows and goes on with it."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from api.settings import StoreSettings
from caketin.commands.store_purger import StorePurger
from dataplane.file_store import FileStore
from tests.api.conftest import Stack, serving

RANK = "dp0-pp0-cp0-tp0"
PAGES = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(1500)]
KV = {"name": "kv", "parts": [{"part": "k", "dtype": "uint8", "bytes": 4}]}


class Sick:
    """A store that does not answer, and says where it was looked for."""

    def remove_prefix(self, prefix: str) -> int:
        raise OSError("no route to 10.0.0.5:50051")


class Slow:
    """A store that takes its time."""

    def remove_prefix(self, prefix: str) -> int:
        time.sleep(1.0)
        return 5


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with contextlib.closing(FileStore(tmp_path / "store")) as found:
        yield found


@pytest.fixture
def purger(tmp_path: Path) -> StorePurger:
    return StorePurger(StoreSettings(kind="file", path=str(tmp_path / "store")))


@pytest.fixture
def empty(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as plain:
        plain.flushall()
        yield plain


def filled(stack: Stack, store: FileStore, model: str, incarnation: str = "a" * 32) -> str:
    """Register an engine, store some objects and claim all pages; return the namespace."""
    body = {
        "incarnation": incarnation,
        "namespace": {"model": model, "revision": "r", "page_size": 4},
        "pools": [KV],
    }
    answer = httpx.put(f"{stack.url}/v1/engines/{model}/ranks/{RANK}", json=body).json()
    ns, pool_id = answer["namespace_id"], answer["pools"]["kv"]["pool_id"]
    for page in PAGES[:20]:
        store.put_bytes(f"ct1/{ns}/{page}/{pool_id}.0/k", b"1234")
    claim = {"kv": {"pages": "all", "shards": [0]}}
    who = {"engine_id": model, "rank": RANK, "page_hashes": PAGES, "stored": claim}
    done = httpx.post(f"{stack.url}/v1/namespaces/{ns}/commit", json=who).json()
    assert done["complete"] == len(PAGES)
    return ns


def purge(stack: Stack, ns: str) -> str:
    answer = httpx.delete(f"{stack.url}/v1/namespaces/{ns}")
    assert answer.status_code == 202
    return answer.json()["job_id"]


def ended(stack: Stack, job_id: str) -> dict:
    deadline = time.monotonic() + 20
    while True:
        job = httpx.get(f"{stack.url}/v1/jobs/{job_id}").json()
        assert job["done"] <= job["total"]
        if job["state"] in {"done", "failed"}:
            return job
        assert time.monotonic() < deadline, job
        time.sleep(0.05)


def hits(stack: Stack, ns: str) -> int:
    body = {"page_hashes": PAGES, "purpose": "probe"}
    return httpx.post(f"{stack.url}/v1/namespaces/{ns}/lookup", json=body).json()["hit_pages"]


def test_claims_and_objects_of_that_namespace_go_and_no_other(redis_url, empty, store, purger, tmp_path):
    with serving(redis_url, tmp_path, purger) as stack:
        gone, kept = filled(stack, store, "gone"), filled(stack, store, "kept")
        job = ended(stack, purge(stack, gone))
        assert job == {"state": "done", "done": job["total"], "total": job["total"], "error": None}
        assert job["total"] >= len(PAGES) + 20
        assert hits(stack, gone) == 0
        assert hits(stack, kept) == len(PAGES)
        assert list(store.keys(f"ct1/{gone}/")) == []
        assert len(list(store.keys(f"ct1/{kept}/"))) == 20
        assert list(empty.scan_iter(f"ct:{{{gone}:*")) == []
        view = httpx.get(f"{stack.url}/v1/namespaces/{gone}").json()
        assert (view["pages"], view["engines"]) == (0, 1)


def test_a_namespace_without_engines_is_forgotten_and_can_be_registered_again(
    redis_url, empty, store, purger, tmp_path
):
    with serving(redis_url, tmp_path, purger) as stack:
        ns = filled(stack, store, "m")
        httpx.delete(f"{stack.url}/v1/engines/m")
        assert ended(stack, purge(stack, ns))["state"] == "done"
        time.sleep(1.1)  # views are a second old at most
        assert httpx.get(f"{stack.url}/v1/namespaces/{ns}").json()["code"] == "unknown_namespace"
        assert httpx.get(f"{stack.url}/v1/namespaces").json()["namespaces"] == []
        assert filled(stack, store, "m", "b" * 32) == ns
        assert hits(stack, ns) == len(PAGES)


def test_a_purge_under_way_is_told_by_every_replica_and_not_started_twice(redis_url, empty, store, tmp_path):
    with serving(redis_url, tmp_path, Slow()) as one, serving(redis_url, tmp_path, Slow()) as other:
        ns = filled(one, store, "m")
        job = purge(one, ns)
        assert purge(other, ns) == job
        assert httpx.get(f"{other.url}/v1/jobs/{job}").json()["state"] in {"queued", "running"}
        assert ended(other, job)["state"] == "done"
        assert purge(one, ns) != job


def test_a_store_that_does_not_answer_fails_the_job_without_telling_where_it_is(
    redis_url, empty, store, tmp_path
):
    with serving(redis_url, tmp_path, Sick()) as stack:
        ns = filled(stack, store, "m")
        job = ended(stack, purge(stack, ns))
        assert job["state"] == "failed"
        assert "10.0.0.5" not in job["error"]
        assert hits(stack, ns) == 0


def test_without_a_store_the_claims_go_and_the_job_says_that_the_objects_stay(
    redis_url, empty, store, tmp_path
):
    with serving(redis_url, tmp_path) as stack:
        ns = filled(stack, store, "m")
        job = ended(stack, purge(stack, ns))
        assert (job["state"], "no store" in job["error"]) == ("failed", True)
        assert hits(stack, ns) == 0
        assert len(list(store.keys(f"ct1/{ns}/"))) == 20


def test_a_job_whose_process_died_is_finished_by_another_that_has_a_store(
    redis_url, empty, store, purger, tmp_path
):
    with serving(redis_url, tmp_path, purger) as stack:
        ns = filled(stack, store, "m")
    job = {"tenant": "default", "namespace_id": ns, "state": "running", "done": 3, "total": 9, "error": ""}
    empty.hset("ct:job:purge-00000000deadbeef", mapping=job)
    empty.sadd("ct:jobs", "purge-00000000deadbeef")
    empty.set("ct:job:purge-00000000deadbeef:lease", b"1", px=1500)
    with serving(redis_url, tmp_path), serving(redis_url, tmp_path, purger) as stack:
        assert httpx.get(f"{stack.url}/v1/jobs/purge-00000000deadbeef").json()["state"] == "running"
        assert ended(stack, "purge-00000000deadbeef")["state"] == "done"
        assert hits(stack, ns) == 0


def test_a_server_ends_in_time_while_a_store_hangs(redis_url, empty, store, tmp_path):
    class Hung:
        def remove_prefix(self, prefix: str) -> int:
            time.sleep(60)
            return 0

    with serving(redis_url, tmp_path, Hung()) as stack:
        purge(stack, filled(stack, store, "m"))
        time.sleep(0.5)
        started = time.monotonic()
    assert time.monotonic() - started < 10
