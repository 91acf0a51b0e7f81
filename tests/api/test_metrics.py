"""Metrics: Prometheus' format and naming, bounded labels, numbers that add up, also over several workers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.metrics import MAX_POOL_LABELS, OTHER, Metrics
from tests.api.conftest import serving
from tests.api.serve_process import served
from tests.api.test_first_path import BODY, PAGES, RANK, commit, lookup


def scrape(http: httpx.Client) -> dict[tuple, float]:
    answer = http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(found: dict[tuple, float], name: str, **labels: str) -> float:
    return sum(v for key, v in found.items() if key[0] == name and set(labels.items()) <= set(key[1:]))


@pytest.fixture
def fresh(redis_url, client, tmp_path: Path):
    with serving(redis_url, tmp_path) as stack, httpx.Client(base_url=stack.url) as http:
        yield http


def test_lookups_hits_misses_and_commits_add_up(fresh):
    ns = fresh.put(RANK, json=BODY).json()["namespace_id"]
    lookup(fresh, ns)
    commit(fresh, ns, kv={"pages": "all", "shards": [0]}, swa={"pages": [[0, 4]], "shards": [0]})
    lookup(fresh, ns)
    commit(fresh, ns, swa={"pages": "all", "shards": [0]})
    lookup(fresh, ns)
    lookup(fresh, ns, purpose="route")
    found = scrape(fresh)
    for outcome in ("hit", "partial", "miss"):
        assert value(found, "caketin_lookups_total", purpose="prefetch", outcome=outcome) == 1
    assert value(found, "caketin_lookups_total", purpose="route", outcome="hit") == 1
    assert value(found, "caketin_lookup_queried_pages_total", purpose="prefetch") == 24
    assert value(found, "caketin_lookup_hit_pages_total", purpose="prefetch") == 13
    assert value(found, "caketin_lookup_misses_total", pool="kv", reason="not_stored") == 1
    assert value(found, "caketin_lookup_misses_total", pool="swa", reason="not_stored") == 1
    # Counted lookups alone: the router's is not in the rates of tenants and pools.
    for result, pages in (("queried", 24), ("hit", 13)):
        assert value(found, "caketin_tenant_lookup_pages_total", tenant="default", result=result) == pages
    assert value(found, "caketin_pool_lookup_pages_total", pool="kv", result="queried") == 24
    assert value(found, "caketin_pool_lookup_pages_total", pool="kv", result="hit") == 16
    assert value(found, "caketin_pool_lookup_pages_total", pool="swa", result="hit") == 13
    assert value(found, "caketin_commits_total") == 2
    assert value(found, "caketin_commit_pages_total", result="committed") == 16
    assert value(found, "caketin_registrations_total", result="new") == 1
    assert value(found, "caketin_redis_up") == 1
    assert value(found, "caketin_http_requests_in_progress") == 1
    route = "/v1/namespaces/{ns}/lookup"
    name = "caketin_http_request_duration_seconds_count"
    assert value(found, name, method="POST", route=route, code="200") == 4


def test_labels_do_not_grow_with_what_callers_send(fresh):
    def labels() -> set[tuple]:
        return {key for key in scrape(fresh) if key[0].endswith("_count")}

    fresh.get("/nowhere/0")
    fresh.get(f"/v1/namespaces/{0:016x}")
    fresh.get("/v1/engines/e")
    fresh.request("BREW", "/v1/engines/e")
    labels()
    before = labels()
    for i in range(50):
        fresh.get(f"/nowhere/{i}")
        fresh.get(f"/v1/namespaces/{i:016x}")
        fresh.get(f"/v1/engines/e{i}")
        fresh.request(f"BREW{i}", "/v1/engines/e")
    assert labels() == before
    assert "nowhere" not in fresh.get("/metrics").text


def test_pool_names_are_capped():
    metrics = Metrics()
    names = {metrics.pool_label(f"pool{i}") for i in range(10 * MAX_POOL_LABELS)}
    assert len(names) == MAX_POOL_LABELS + 1
    assert OTHER in names
    assert metrics.pool_label("pool0") == "pool0"


def test_names_follow_prometheus(fresh):
    text = fresh.get("/metrics").text
    families = [f for f in text_string_to_metric_families(text) if f.name.startswith("caketin_")]
    assert len(families) > 12
    for family in families:
        assert re.fullmatch(r"caketin_[a-z][a-z0-9_]*", family.name)
        assert family.documentation.endswith(".")
        assert "milli" not in family.name
        if family.type == "counter":
            assert not family.name.endswith("_total")  # the parser takes the suffix off
            assert any(sample.name.endswith("_total") for sample in family.samples) or not family.samples
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_pages"))


def test_without_redis_the_gauge_is_down_and_lookups_are_degraded(redisless):
    for _ in range(5):
        redisless.post(f"/v1/namespaces/{'0' * 16}/lookup", json={"page_hashes": PAGES})
    found = scrape(redisless)
    assert value(found, "caketin_redis_up") == 0
    assert value(found, "caketin_lookups_total", outcome="degraded") >= 5
    assert value(found, "caketin_lookup_queried_pages_total") == 0


def test_every_worker_answers_for_all_also_for_one_that_was_killed(redis_url, client, tmp_path: Path):
    with served(redis_url, tmp_path, "--workers", "2") as process:
        calls = 60

        def call(_: int) -> None:
            httpx.get(f"{process.url}/v1/engines", timeout=10)

        def counted() -> float:
            with httpx.Client(base_url=process.url, timeout=10) as http:
                found = scrape(http)
            name = "caketin_http_request_duration_seconds_count"
            return value(found, name, route="/v1/engines", code="200")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(call, range(calls)))
        assert {counted() for _ in range(6)} == {calls}
        workers = children(process.child.process.pid)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        deadline = time.monotonic() + 20
        while len(set(children(process.child.process.pid)) - {workers[0]}) < 2:
            assert time.monotonic() < deadline, "the worker was not replaced"
            time.sleep(0.1)
        assert counted() == calls


def children(pid: int) -> list[int]:
    """Return the workers of a process: its children but multiprocessing's resource tracker."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return sorted(found)
