"""`caketin storage-node` and `caketin mooncake-master`: a store made of single commands, and its probe."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dataplane.child_process import ChildProcess, accepts, free_ports
from dataplane.mooncake_master import MasterHttp
from dataplane.mooncake_native import MooncakeSettings
from dataplane.mooncake_store import MooncakeStore
from tests.caketin.command import wait_until

SEGMENT = 32 << 20


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "caketin", *words]


class Store:
    """A master and a node, at ports of their own."""

    def __init__(self, folder: Path) -> None:
        loads, why = MooncakeStore.available()
        if not loads:
            pytest.skip(f"Mooncake does not load: {why}")
        self.folder = folder
        self.rpc, self.http, self.health = free_ports(3)
        self.master: ChildProcess | None = None
        self.node: ChildProcess | None = None

    def start_master(self) -> None:
        flags = ["--rpc_address=127.0.0.1", f"--rpc_port={self.rpc}", "--metrics_host=127.0.0.1"]
        flags += [f"--metrics_port={self.http}", "--minloglevel=1"]
        self.master = ChildProcess.start(
            "master", command("mooncake-master", *flags), self.folder / "master.log"
        )
        self.master.wait_ready(lambda: accepts("127.0.0.1", self.rpc), 30)

    def start_node(self, *more: str) -> ChildProcess:
        flags = ["--master", f"127.0.0.1:{self.rpc}", "--master-http", f"127.0.0.1:{self.http}"]
        flags += ["--segment", "32Mi", "--health-port", str(self.health), *more]
        self.node = ChildProcess.start("node", command("storage-node", *flags), self.folder / "node.log")
        return self.node

    def probe(self, path: str) -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{self.health}/{path}", timeout=5, trust_env=False).status_code
        except httpx.TransportError:
            return 0

    def segments(self) -> list[int]:
        asked = MasterHttp(f"127.0.0.1:{self.http}")
        try:
            return [int(s["size_bytes"]) for s in asked.segments()]
        finally:
            asked.close()

    def stop(self) -> None:
        for child in (self.node, self.master):
            if child is not None:
                child.stop()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.stop()


def test_a_node_lends_what_it_was_told_until_it_is_told_to_end(store: Store) -> None:
    store.start_master()
    node = store.start_node("--prefault")
    wait_until(lambda: store.probe("readyz") == 200, 30, "the node is not ready")
    assert store.segments() == [SEGMENT]
    client = MooncakeStore(MooncakeSettings(f"127.0.0.1:{store.rpc}", master_http=f"127.0.0.1:{store.http}"))
    client.put_bytes("ct1/0000000000000000/x", b"bytes")
    assert client.get_bytes("ct1/0000000000000000/x") == b"bytes"
    client.close()
    node.ask_to_end()
    assert node.process.wait(15) == 0, node.tail()
    wait_until(lambda: store.segments() == [], 15, "the master still counts on the memory")


def test_a_node_waits_for_its_master_and_says_meanwhile_that_it_lives_but_is_not_ready(store: Store) -> None:
    store.start_node()
    wait_until(lambda: store.probe("healthz") == 200, 30, "no probe")
    assert store.probe("readyz") == 503
    assert store.probe("else") == 404
    store.start_master()
    wait_until(lambda: store.probe("readyz") == 200, 30, "the node does not join")


def test_a_node_told_to_end_while_it_waits_ends_at_once(store: Store) -> None:
    node = store.start_node()
    wait_until(lambda: store.probe("healthz") == 200, 30, "no probe")
    node.ask_to_end()
    assert node.process.wait(10) == 0, node.tail()


def test_a_node_whose_master_came_back_empty_is_not_ready_until_it_has_joined_again(store: Store) -> None:
    store.start_master()
    store.start_node()
    wait_until(lambda: store.probe("readyz") == 200, 30, "the node is not ready")
    assert store.master is not None
    store.master.kill()
    wait_until(lambda: store.probe("readyz") == 503, 15, "nobody noticed")
    assert store.probe("healthz") == 200
    store.start_master()
    wait_until(lambda: store.probe("readyz") == 200, 60, "the node did not come back")
    assert store.segments() == [SEGMENT]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--segment", "much"], "--segment must be a size such as 64Gi"),
        (["--segment", "1Mi"], "16Mi or more"),
        (["--segment", "32Mi", "--wait-seconds", "0"], "no Mooncake master answers at 127.0.0.1:1"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(words: list[str], says: str) -> None:
    done = subprocess.run(
        command("storage-node", "--master", "127.0.0.1:1", *words),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
