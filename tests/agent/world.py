"""A real agent process beside a real control plane and store, and engines that use it through its client."""

from __future__ import annotations

import hashlib
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from dataplane.agent_client import AgentClient, AgentSession
from dataplane.child_process import ChildProcess
from dataplane.messages.agent import AgentPool, AgentStatus, SessionRequest
from dataplane.messages.control import NamespaceMessage, PoolMessage
from metadata.pools import Part, PoolSpec, RankPool, TrailingPages

KV_SWA = [
    PoolSpec("kv", (Part("k", "uint8", 5000), Part("v", "uint8", 3000))),
    PoolSpec("swa", (Part("page", "uint8", 7000),), hit_policy=TrailingPages(2)),
]
DEEPSEEK_V4 = [
    PoolSpec("kv", (), logical=True),
    PoolSpec("c4", (Part("page", "uint8", 4096),), indices_from="kv"),
    PoolSpec("c128", (Part("page", "uint8", 100),), indices_from="kv"),
    PoolSpec("swa", (Part("page", "uint8", 2000),), hit_policy=TrailingPages(1)),
]


def prompt(name: str, pages: int, *, after: Sequence[bytes] = ()) -> list[bytes]:
    """Page hashes of a sequence; `after` are the pages before them."""
    last = after[-1] if after else b""
    found = []
    for i in range(pages):
        last = hashlib.sha256(last + f"{name} {i}".encode()).digest()
        found.append(last)
    return found


def page_bytes(page: bytes, pool: str, part: str, size: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_128(page + f"{pool}/{part}".encode()).digest(size), np.uint8)


def wait_until(true: Callable[[], object], seconds: float = 20.0, what: str = "") -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not so after {seconds} s: {what or true}"
        time.sleep(0.02)


def session_request(
    specs: Sequence[PoolSpec],
    slots: int | dict[str, int],
    *,
    engine: str = "engine-a",
    rank: str = "dp0-pp0-cp0-tp0",
    incarnation: str | None = None,
    model: str = "agent-test",
) -> SessionRequest:
    pools = []
    for spec in specs:
        source = spec.indices_from or spec.name
        count = slots if isinstance(slots, int) else slots[source]
        message = PoolMessage.of(RankPool(spec, (0,)))
        fields = {name: getattr(message, name) for name in message.__struct_fields__}
        pools.append(AgentPool(**fields, capacity_pages=count))
    return SessionRequest(
        engine_id=engine,
        rank=rank,
        incarnation=incarnation or secrets.token_hex(16),
        namespace=NamespaceMessage(model=model, revision="1", page_size=64),
        pools=pools,
    )


@dataclass
class Engine:
    """An engine's process as far as the agent sees it: a session, and bytes that tell their page."""

    session: AgentSession
    specs: Sequence[PoolSpec]

    @property
    def parts(self) -> list[tuple[str, str, int]]:
        return [(s.name, p.part, p.bytes) for s in self.specs for p in s.parts]

    def fill(
        self, pages: Sequence[bytes], *, parent: bytes | None = None, pools: Sequence[str] | None = None
    ) -> str:
        """Ask for slots and write what is not there; return the token to publish."""
        got = self.session.slots(pages, parent=parent, pools=pools)
        for pool, part, size in self.parts:
            if pool not in got.slots:
                continue
            there = {i for a, b in got.resident_by_pool[pool] for i in range(a, b + 1)}
            memory = self.session.pools[pool].part(part)
            for i, page in enumerate(pages):
                if i not in there:
                    memory[got.slots[pool][i]] = page_bytes(page, pool, part, size)
        return got.token

    def publish(self, pages: Sequence[bytes], *, parent: bytes | None = None, backup: bool = True) -> None:
        """Fill, publish and wait until it is stored."""
        done = self.session.publish(self.fill(pages, parent=parent), backup=backup)
        if done.transfer_id is not None:
            ended = self.session.wait(done.transfer_id)
            assert (ended.state, ended.transfers_done, ended.error) == ("done", True, None), ended

    def check(self, pages: Sequence[bytes], slots: dict[str, list[int]], length: int) -> None:
        """Compare the bytes of the pages that an answer lists."""
        for pool, part, size in self.parts:
            memory = self.session.pools[pool].part(part)
            listed = slots[pool]
            for page, slot in zip(pages[length - len(listed) : length], listed, strict=True):
                assert (memory[slot] == page_bytes(page, pool, part, size)).all(), (pool, part, slot)


@dataclass
class RunningAgent:
    """An agent process of a test."""

    folder: Path
    url: str
    flags: dict[str, object] = field(default_factory=dict)
    child: ChildProcess | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "a.sock"

    @property
    def shared(self) -> Path:
        return Path("/dev/shm") / f"caketin-test-{self.folder.name}"

    def start(self) -> None:
        flags = {
            "socket": self.socket,
            "shared_dir": self.shared,
            "url": self.url,
            "memory": "64Mi",
            "grace_seconds": 0.5,
            "call_seconds": 5,
            "local_hostname": "127.0.0.1",
            **self.flags,
        }
        said = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        command = [sys.executable, "-m", "caketin", "agent", *said]
        self.child = ChildProcess.start("agent", command, self.folder / "agent.log")
        self.child.wait_ready(self._answers, 30)

    def _answers(self) -> bool:
        try:
            self.status()
        except Exception:
            return False
        return True

    def client(self) -> AgentClient:
        return AgentClient(self.socket)

    def status(self) -> AgentStatus:
        with self.client() as client:
            return client.status()

    def ready(self) -> str:
        """What keeps it from being ready, or nothing."""
        transport = httpx.HTTPTransport(uds=str(self.socket))
        with httpx.Client(transport=transport, base_url="http://agent", timeout=10) as plain:
            checks = plain.get("/readyz").json()["checks"]
        return "".join(check["detail"] for check in checks)

    def stop(self) -> int:
        assert self.child is not None
        self.child.stop(30)
        return self.child.process.returncode

    def log(self) -> str:
        return (self.folder / "agent.log").read_text()
