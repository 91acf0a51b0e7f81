"""`caketin ls` shows what a control plane knows, all of it, as a table or as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from caketin.embedded_redis import EmbeddedRedis
from dataplane.child_process import free_port
from tests.api.conftest import Stack, serving
from tests.api.serve_process import environment

KV = {"name": "kv", "parts": [{"part": "k", "dtype": "uint8", "bytes": 1024}], "shard_count": 2}
SWA = {
    "name": "swa",
    "parts": [{"part": "page", "dtype": "uint8", "bytes": 8}],
    "hit_policy": {"kind": "trailing_pages", "window_pages": 3},
}
PAGES = [f"{i:064x}" for i in range(3)]
RANK = "dp0-pp0-cp0-tp0"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = Path(tmp_path_factory.mktemp("ls"))
    server = EmbeddedRedis.start(folder / "redis", appendonly=False)
    with serving(server.url, folder) as found:
        yield found
    server.stop()


@pytest.fixture(scope="module")
def filled(stack: Stack) -> Stack:
    for i in range(3):
        body = {
            "incarnation": "a" * 32,
            "namespace": {"model": f"model-{i}", "revision": "r", "page_size": 4},
            "pools": [{**KV, "owned_shards": [0]}, SWA],
        }
        answer = httpx.put(f"{stack.url}/v1/engines/e{i}/ranks/{RANK}", json=body).json()
        stored = {"swa": {"pages": "all", "shards": [0]}, "kv": {"pages": "all", "shards": [0]}}
        commit = {"engine_id": f"e{i}", "rank": RANK, "page_hashes": PAGES, "stored": stored}
        assert httpx.post(
            f"{stack.url}/v1/namespaces/{answer['namespace_id']}/commit", json=commit
        ).is_success
    return stack


def ls(*arguments: str, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "caketin", "ls", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment(CAKETIN_URL=url),
        check=False,
    )


def listed(what: str, url: str) -> list[dict]:
    done = ls(what, "--json", url=url)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nothing_registered_is_said(stack):
    done = ls("engines", url=stack.url)
    assert (done.returncode, done.stdout) == (0, "")
    assert "no engines" in done.stderr


def test_engines_namespaces_and_pools_as_json(filled):
    assert [(e["engine"], e["ranks"]) for e in listed("engines", filled.url)] == [
        ("e0", 1),
        ("e1", 1),
        ("e2", 1),
    ]
    spaces = listed("namespaces", filled.url)
    assert sorted(n["model"] for n in spaces) == ["model-0", "model-1", "model-2"]
    assert {(n["pages"], n["bytes"], n["pools"]) for n in spaces} == {(3, 24, 2)}
    pools = listed("pools", filled.url)
    assert len(pools) == 6
    kv = next(p for p in pools if p["pool"] == "kv")
    swa = next(p for p in pools if p["pool"] == "swa")
    assert (kv["shards"], kv["pages"], kv["policy"]) == ("1/2", 0, "all_pages")
    assert (swa["shards"], swa["pages"], swa["policy"]) == ("1/1", 3, "trailing_pages(3)")


@pytest.mark.parametrize(("what", "shown"), [("engines", "e2"), ("namespaces", "model-1"), ("pools", "swa")])
def test_the_table_shows_them(what, shown, filled):
    done = ls(what, url=filled.url)
    assert done.returncode == 0
    assert shown in done.stdout


def test_a_control_plane_that_does_not_answer_is_named():
    url = f"http://127.0.0.1:{free_port()}"
    done = ls("engines", url=url)
    assert done.returncode == 2
    assert url in done.stderr
    assert "Traceback" not in done.stderr


def test_a_word_that_is_nothing_to_list_is_refused(stack):
    assert ls("cakes", url=stack.url).returncode == 2
