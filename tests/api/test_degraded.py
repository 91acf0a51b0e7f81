"""Redis frozen, killed and back, seen from an engine over real HTTP: a miss at once, never a stall."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from api.settings import Settings, StoreSettings
from caketin.embedded_redis import EmbeddedRedis
from dataplane.child_process import free_port
from tests.servers import serving

OPEN_BOUND = 3 * 0.050
"""Three times the bound of a lookup while the circuit is open, in seconds."""

PAGES = [f"{i:064x}" for i in range(64)]
RANK = "/v1/engines/e/ranks/dp0-pp0-cp0-tp0"
ME = {"engine_id": "e", "rank": "dp0-pp0-cp0-tp0"}
BODY = {
    "incarnation": "a" * 32,
    "namespace": {"model": "m", "revision": "r", "page_size": 4},
    "pools": [{"name": "kv", "parts": [{"part": "k", "dtype": "uint8", "bytes": 8}]}],
}
COMMIT = {**ME, "page_hashes": PAGES, "stored": {"kv": {"pages": "all", "shards": [0]}}}


@dataclass
class Plane:
    """A control plane whose Redis the test may freeze, kill and start again."""

    client: httpx.Client
    redis: EmbeddedRedis
    folder: Path
    command_seconds: float
    ns: str = ""

    def lookup(self) -> dict:
        answer = self.client.post(f"/v1/namespaces/{self.ns}/lookup", json={"page_hashes": PAGES, **ME})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def commit(self) -> httpx.Response:
        return self.client.post(f"/v1/namespaces/{self.ns}/commit", json=COMMIT)

    def until(self, condition, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.02)

    def start_again(self) -> None:
        self.redis = EmbeddedRedis.start(self.folder, port=self.redis.port, extra=("--appendfsync", "always"))


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    folder = tmp_path / "redis"
    redis = EmbeddedRedis.start(folder, extra=("--appendfsync", "always"))
    settings = Settings(
        redis_url=redis.url,
        port=free_port(),
        redis_command_seconds=0.5,
        store=StoreSettings(kind="file", path=str(tmp_path / "store")),
    )
    with serving(settings) as url, httpx.Client(base_url=url, timeout=30) as client:
        found = Plane(client, redis, folder, settings.redis_command_seconds)
        found.ns = client.put(RANK, json=BODY).json()["namespace_id"]
        assert found.commit().json()["complete"] == len(PAGES)
        assert found.lookup()["hit_pages"] == len(PAGES)
        yield found
        found.redis.child.process.send_signal(signal.SIGCONT)
        found.redis.stop()


def degraded(plane: Plane) -> bool:
    answer = plane.lookup()
    assert answer["degraded"] == (answer["miss"] is not None and answer["miss"]["reason"] == "degraded")
    assert answer["hit_pages"] == (0 if answer["degraded"] else len(PAGES))
    return answer["degraded"]


def open_lookup_seconds(plane: Plane, calls: int = 20) -> float:
    """Return how long the slowest of some lookups took while the circuit is open."""
    slowest = 0.0
    for _ in range(calls):
        start = time.perf_counter()
        assert degraded(plane)
        slowest = max(slowest, time.perf_counter() - start)
    return slowest


def test_a_frozen_redis_makes_lookups_misses_at_once_and_commits_say_when_to_come_back(plane: Plane):
    plane.redis.child.process.send_signal(signal.SIGSTOP)
    start = time.perf_counter()
    plane.until(lambda: degraded(plane), 30, "lookups never degraded")
    for _ in range(6):
        assert degraded(plane)
    assert open_lookup_seconds(plane) < OPEN_BOUND
    # What came before the circuit opened waited one deadline each, a few times.
    assert time.perf_counter() - start < 3 * 4 * plane.command_seconds
    refused = plane.commit()
    assert (refused.status_code, refused.json()["code"]) == (503, "redis_unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    ready = plane.client.get("/readyz")
    assert ready.status_code == 503
    assert "redis" in {c["name"] for c in ready.json()["checks"] if not c["ok"]}
    plane.redis.child.process.send_signal(signal.SIGCONT)
    plane.until(lambda: not degraded(plane), 30, "nobody was needed, and yet it did not come back")
    assert plane.commit().status_code == 200


def test_a_killed_redis_that_starts_again_needs_nobody_and_lost_no_acknowledged_commit(plane: Plane):
    os.kill(plane.redis.child.process.pid, signal.SIGKILL)
    plane.redis.child.process.wait(10)
    plane.until(lambda: degraded(plane), 30, "lookups never degraded")
    plane.until(lambda: plane.commit().status_code == 503, 30, "commits never failed")
    assert open_lookup_seconds(plane) < OPEN_BOUND
    plane.start_again()
    plane.until(lambda: not degraded(plane), 30, "it did not come back by itself")
    assert plane.commit().json() == {"committed": 64, "complete": 64, "rejected": []}


def test_many_engines_at_a_frozen_redis_all_get_their_answer(plane: Plane):
    plane.redis.child.process.send_signal(signal.SIGSTOP)

    def one(_number: int) -> float:
        start = time.perf_counter()
        assert degraded(plane)
        return time.perf_counter() - start

    with ThreadPoolExecutor(32) as many:
        took = list(many.map(one, range(64)))
    assert max(took) < 3 * 4 * plane.command_seconds
    plane.redis.child.process.send_signal(signal.SIGCONT)
    plane.until(lambda: not degraded(plane), 30, "it did not come back by itself")


def test_the_circuit_opens_and_probes_as_it_is_told(tmp_path: Path):
    """One failure is enough here, and nobody looks again for a minute: a Redis that is back stays unasked."""
    redis = EmbeddedRedis.start(tmp_path / "redis", extra=("--appendfsync", "always"))
    settings = Settings(
        redis_url=redis.url,
        port=free_port(),
        redis_failures_to_open=1,
        redis_probe_seconds=60,
        store=StoreSettings(kind="file", path=str(tmp_path / "store")),
    )
    with serving(settings) as url, httpx.Client(base_url=url, timeout=30) as client:
        plane = Plane(client, redis, tmp_path / "redis", settings.redis_command_seconds)
        plane.ns = client.put(RANK, json=BODY).json()["namespace_id"]
        assert plane.commit().status_code == 200
        redis.child.process.send_signal(signal.SIGSTOP)
        assert degraded(plane)
        redis.child.process.send_signal(signal.SIGCONT)
        assert open_lookup_seconds(plane) < OPEN_BOUND
        assert degraded(plane)
    redis.stop()
