"""The life of a deployment: control planes replaced under load, Redis backed up and restored."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dataplane.child_process import ChildProcess, free_port
from tests.api.serve_process import command, environment
from tests.helm.chart import defaults
from tests.redis_servers import Server, redis_binary, start_server

pytestmark = [pytest.mark.helm, pytest.mark.timeout(300)]

REQUESTS = 250


class Service:
    """What Kubernetes' Service is to its clients: each new connection goes to one of the endpoints.

    As there, a connection stays with its endpoint when that is taken from the list.
    """

    def __init__(self) -> None:
        self.endpoints: list[int] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._turn = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._turn += 1
            port = self.endpoints[self._turn % len(self.endpoints)]
            try:
                server = socket.create_connection(("127.0.0.1", port))
            except OSError:
                client.close()
                continue
            for a, b in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            target.close()


class Pods:
    """Control planes over one Redis and one store, by port."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self._redis_url = redis_url
        self._folder = folder
        self._running: dict[int, ChildProcess] = {}

    def start(self) -> int:
        """Start one and wait until it is ready."""
        port = free_port()
        flags = ["--port", str(port), "--redis-url", self._redis_url]
        flags += ["--store-path", str(self._folder / "store"), "--log-requests"]
        log = self._folder / f"pod-{port}.log"
        child = ChildProcess.start("pod", command(*flags), log, environment())
        self._running[port] = child

        def ready() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 200
            except httpx.HTTPError:
                return False

        child.wait_ready(ready, 30)
        return port

    def end(self, port: int) -> tuple[int, str]:
        """SIGTERM; return the exit code and the log."""
        child = self._running.pop(port)
        child.ask_to_end()
        return child.process.wait(20), child.log.read_text()

    def stop(self) -> None:
        for child in self._running.values():
            child.stop(15)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Server]:
    server = start_server(tmp_path / "redis", appendonly="yes")
    yield server
    server.child.stop()


@pytest.fixture
def pods(redis: Server, tmp_path: Path) -> Iterator[Pods]:
    started = Pods(redis.url, tmp_path)
    yield started
    started.stop()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


def replaying(url: str, report: Path, requests: int = REQUESTS) -> subprocess.Popen[bytes]:
    """Start a replay, which takes every call that fails into its report."""
    words = [sys.executable, "-m", "caketin", "replay", "--url", url, "--limit", str(requests)]
    words += ["--json", str(report), "--page-bytes", "16384", "--call-seconds", "5"]
    with report.with_suffix(".log").open("wb") as out:
        return subprocess.Popen(words, stdout=out, stderr=out, env=environment())


def finished(process: subprocess.Popen[bytes], report: Path) -> dict:
    assert process.wait(200) == 0, report.with_suffix(".log").read_text()
    return json.loads(report.read_text())


def test_a_rolling_update_under_load_loses_no_call(pods: Pods, service: Service, tmp_path: Path) -> None:
    """What Kubernetes does with the chart's Deployment: one more, then one fewer, until all are new."""
    drain_seconds = 1.0  # the chart's 10 s wait for proxies all over a cluster; here there is one
    assert defaults()["api"]["drainSeconds"] >= drain_seconds
    service.endpoints = [pods.start(), pods.start()]
    process = replaying(service.url, tmp_path / "report.json")
    logs = []
    while process.poll() is None and len(logs) < 4:
        time.sleep(0.5)
        new = pods.start()
        old = service.endpoints[0]
        service.endpoints = [*service.endpoints[1:], new]  # no new connection goes there
        time.sleep(drain_seconds)  # the preStop hook; it still serves
        code, log = pods.end(old)
        assert code == 0, log
        logs.append(log)
    report = finished(process, tmp_path / "report.json")
    assert len(logs) >= 2, "the replay was over before the update was"
    assert sum(log.count("/lookup") for log in logs) > 0, "no replaced pod ever served a call"
    assert report["errors"] == {}
    assert (report["degraded"], report["wrong_pages"], report["lost_pages"]) == (0, 0, 0)
    # The same load on a control plane that nobody touched finds exactly the same.
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    server = start_server(quiet / "redis")
    alone = Pods(server.url, quiet)
    try:
        url = f"http://127.0.0.1:{alone.start()}"
        expected = finished(replaying(url, quiet / "report.json"), quiet / "report.json")
    finally:
        alone.stop()
        server.child.stop()
    assert report["hit_pages"] == expected["hit_pages"] > 0
    assert report["backed_up_pages"] == expected["backed_up_pages"]


def test_a_plain_client_that_keeps_its_connection_loses_no_call_either(pods: Pods, service: Service) -> None:
    """Without retries, as a router in another language may be: each connection is told that it ends."""
    service.endpoints = [pods.start(), pods.start()]
    host = service.url.removeprefix("http://")
    ended = threading.Event()
    counts: Counter[str] = Counter()
    path = "/v1/namespaces/9f86d081884c7d65/lookup"

    def call(pages: int) -> None:
        body = json.dumps({"page_hashes": [f"{page:064x}" for page in range(pages)]})
        client = http.client.HTTPConnection(host, timeout=10)
        while not ended.is_set():
            try:
                client.request("POST", path, body, {"content-type": "application/json"})
                answer = client.getresponse()
                answer.read()
                counts[str(answer.status)] += 1
            except (OSError, http.client.HTTPException) as error:
                counts[repr(error)] += 1
                client.close()

    callers = [threading.Thread(target=call, args=(pages,)) for pages in (1, 1, 500, 500)]
    for caller in callers:
        caller.start()
    for _ in range(4):
        time.sleep(0.5)
        new, old = pods.start(), service.endpoints[0]
        service.endpoints = [*service.endpoints[1:], new]
        time.sleep(1)  # the preStop hook
        assert pods.end(old)[0] == 0
    ended.set()
    for caller in callers:
        caller.join()
    assert set(counts) == {"404"}, counts  # nobody registered that namespace, and each call was answered


def test_ending_without_a_drain_is_what_the_drain_is_for(pods: Pods, service: Service) -> None:
    """The test above can fail: a pod that is still an endpoint when it ends costs whoever calls it."""
    service.endpoints = [pods.start()]
    assert httpx.get(f"{service.url}/healthz", trust_env=False).status_code == 200
    pods.end(service.endpoints[0])
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{service.url}/healthz", trust_env=False)


def claims(url: str) -> dict[str, int]:
    """Pages claimed in each namespace."""
    answer = httpx.get(f"{url}/v1/namespaces", params={"limit": 1000}, trust_env=False).json()
    found = {}
    for name in [n["namespace_id"] for n in answer["namespaces"]]:
        found[name] = httpx.get(f"{url}/v1/namespaces/{name}", trust_env=False).json()["pages"]
    return found


def test_a_backup_of_redis_brings_claims_and_hit_rates_back(tmp_path: Path) -> None:
    """docs/install.md: BGSAVE, copy the file; restore: it becomes the base of an append-only file."""
    binary = redis_binary()
    folder = tmp_path / "redis"
    server = start_server(folder, binary=binary, appendonly="yes")
    pods = Pods(server.url, tmp_path)
    backup = tmp_path / "backup.rdb"
    try:
        url = f"http://127.0.0.1:{pods.start()}"
        finished(replaying(url, tmp_path / "one.json", 40), tmp_path / "one.json")
        time.sleep(1.5)  # counts go to Redis once a second
        before = claims(url)
        hits = httpx.get(
            f"{url}/v1/hit-rates", params={"window": "24h", "step": "1h"}, trust_env=False
        ).json()
        with server.plain() as plain:
            taken = plain.lastsave()
            plain.bgsave()
            deadline = time.monotonic() + 20
            while plain.lastsave() == taken and plain.info("persistence")["rdb_bgsave_in_progress"]:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        shutil.copy(folder / "dump.rdb", backup)
    finally:
        pods.stop()
        server.child.stop()
    assert sum(before.values()) > 0
    # Another machine: nothing but the file.
    new = tmp_path / "new"
    log = new / "appendonlydir"
    log.mkdir(parents=True)
    shutil.copy(backup, log / "appendonly.aof.1.base.rdb")
    (log / "appendonly.aof.manifest").write_text("file appendonly.aof.1.base.rdb seq 1 type b\n")
    server = start_server(new, binary=binary, appendonly="yes")
    pods = Pods(server.url, tmp_path)
    try:
        url = f"http://127.0.0.1:{pods.start()}"
        assert claims(url) == before
        again = httpx.get(
            f"{url}/v1/hit-rates", params={"window": "24h", "step": "1h"}, trust_env=False
        ).json()
        assert again["series"] == hits["series"]
        # What is claimed is found: the same load hits from its first request on.
        report = finished(replaying(url, tmp_path / "two.json", 40), tmp_path / "two.json")
        assert report["hit_pages"] == report["asked_pages"] > 0
        assert report["wrong_pages"] == 0
    finally:
        pods.stop()
        server.child.stop()
