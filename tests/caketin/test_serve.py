"""`caketin serve` as an operator meets it: settings told, bad ones refused, ended without loss."""

from __future__ import annotations

import hashlib
import http.client
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from caketin.embedded_redis import EmbeddedRedis
from dataplane.child_process import free_port
from tests.api.serve_process import command, environment, rss, served

RANK = "/v1/engines/e/ranks/dp0-pp0-cp0-tp0"
BODY = {
    "incarnation": "9d0c2c1e6f4b4c5fa2f3b9d1e4a7c8b0",
    "namespace": {"model": "m", "revision": "r", "page_size": 4},
    "pools": [{"name": "kv", "parts": [{"part": "k", "dtype": "uint8", "bytes": 8}]}],
}
PAGES = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(10)]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedRedis.start(Path(tmp_path_factory.mktemp("valkey")), appendonly=False)
    yield server.url
    server.stop()


def refused(*flags: str, **env: str) -> str:
    """Run a command that must end by itself with exit code 2; return what it said."""
    done = subprocess.run(
        command(*flags), capture_output=True, text=True, timeout=30, env=environment(**env), check=False
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_the_effective_settings_are_printed_with_secrets_masked(redis_url, tmp_path):
    file = tmp_path / "caketin.toml"
    file.write_text("lease_seconds = 44\n")
    url = redis_url.replace("redis://", "redis://default:plantedpassword@")
    with served(url, tmp_path, "--config", str(file), ready=False, CAKETIN_NOTE_SECONDS="55") as process:
        printed = {
            name: " ".join(value)
            for name, *value in (line.split() for line in process.log.splitlines() if line[:1] != "{")
        }
    assert (printed["lease_seconds"], printed["note_seconds"]) == ("44", "55")
    assert printed["port"] == str(process.port)
    assert printed["redis_url"].startswith("redis://***@127.0.0.1")
    assert "plantedpassword" not in process.log


@pytest.mark.parametrize(
    ("flags", "env"),
    [(["--lease-seconds", "0"], {}), ([], {"CAKETIN_LEASE_SECONDS": "0"})],
)
def test_a_bad_value_ends_it_with_2_and_all_spellings(flags, env, tmp_path):
    said = refused("--store-path", str(tmp_path), *flags, **env)
    for spelling in ("--lease-seconds", "CAKETIN_LEASE_SECONDS", "lease_seconds in the file"):
        assert spelling in said


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refused("--store-path", str(tmp_path), "--port", str(taken.getsockname()[1]))
    assert "--port" in said
    assert "in use" in said


def test_a_redis_url_that_cannot_be_read_is_named_without_its_password(tmp_path):
    said = refused("--store-path", str(tmp_path), "--redis-url", "http://u:plantedpassword@h")
    assert "--redis-url" in said
    assert "plantedpassword" not in said


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_flushes_the_counters_and_ends_with_0_in_time(workers, redis_url, tmp_path):
    engine = f"e{workers}"
    rank = RANK.replace("/e/", f"/{engine}/")
    with served(redis_url, tmp_path, "--workers", workers, "--flush-seconds", "60") as process:
        ns = httpx.put(f"{process.url}{rank}", json=BODY).json()["namespace_id"]
        for _ in range(20):
            body = {"page_hashes": PAGES, "engine_id": engine}
            answer = httpx.post(f"{process.url}/v1/namespaces/{ns}/lookup", json=body)
            assert answer.json()["degraded"] is False
        started = time.monotonic()
        process.child.process.send_signal(signal.SIGTERM)
        assert process.child.process.wait(15) == 0
        assert time.monotonic() - started < 10
    assert "Traceback" not in process.log
    with served(redis_url, tmp_path) as process:
        rates = httpx.get(f"{process.url}/v1/hit-rates", params={"window": "10m", "by": "engine"}).json()
    (row,) = [r for r in rates["series"] if r["labels"]["engine"] == engine]
    assert sum(row["queried_pages"]) == 200


def test_a_request_under_way_is_answered_before_the_end(redis_url, tmp_path):
    with served(redis_url, tmp_path) as process:
        with socket.create_connection(("127.0.0.1", process.port), timeout=10) as client:
            body = b'{"page_hashes": []}'
            head = f"POST /v1/namespaces/{'0' * 16}/lookup HTTP/1.1\r\nHost: localhost\r\n"
            head += f"Content-Length: {len(body)}"
            client.sendall(head.encode() + b"\r\n\r\n" + body[:5])
            time.sleep(0.3)
            process.child.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            client.sendall(body[5:])
            assert client.recv(65_536).startswith(b"HTTP/1.1 404")
        assert process.child.process.wait(10) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_kept_connection_is_answered_once_more_and_told_to_go_elsewhere(redis_url, tmp_path, workers):
    """The call that was on its way when SIGTERM came would be lost else."""
    with served(redis_url, tmp_path, "--workers", str(workers)) as process:
        kept = http.client.HTTPConnection("127.0.0.1", process.port, timeout=10)
        kept.request("GET", "/healthz")
        kept.getresponse().read()
        process.child.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", process.port), timeout=5)
        kept.request("GET", "/healthz")
        answer = kept.getresponse()
        assert (answer.status, answer.getheader("connection")) == (200, "close")
        assert process.child.process.wait(10) == 0


def test_a_client_that_stalls_does_not_hold_up_the_end(redis_url, tmp_path):
    flags = ["--shutdown-seconds", "1", "--body-seconds", "60"]
    head = f"POST /v1/namespaces/{'0' * 16}/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    with (
        served(redis_url, tmp_path, *flags) as process,
        socket.create_connection(("127.0.0.1", process.port), timeout=10) as client,
    ):
        client.sendall(head.encode())
        time.sleep(0.3)
        started = time.monotonic()
        process.child.process.send_signal(signal.SIGTERM)
        assert process.child.process.wait(15) == 0
        assert time.monotonic() - started < 8


def test_it_starts_without_redis_and_says_so(tmp_path):
    url = f"redis://127.0.0.1:{free_port()}/0"
    with served(url, tmp_path, ready=False) as process:
        answer = httpx.get(f"{process.url}/readyz")
        assert (answer.status_code, answer.json()["ready"]) == (503, False)
        assert "127.0.0.1" not in answer.text


def test_the_process_is_small(redis_url, tmp_path):
    with served(redis_url, tmp_path) as process:
        httpx.put(f"{process.url}{RANK}", json=BODY)
        assert rss(process.child.process.pid) < 120 << 20
