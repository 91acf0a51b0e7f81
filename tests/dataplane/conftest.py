"""Stores to test against: a real folder, and a real Mooncake master with a storage node beside it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from dataplane.bounce_store import BounceStore
from dataplane.file_store import FileStore
from dataplane.mooncake_node import MooncakeCluster
from dataplane.mooncake_store import MooncakeStore
from dataplane.object_store import ObjectBuffers, ObjectStore
from tests.dataplane.store_process import open_store
from tests.servers import stack

__all__ = ["stack"]

REPO = Path(__file__).resolve().parents[2]
POOL = "3f2a91bc"
SEGMENT_BYTES = 192 << 20


def object_key(namespace_id: str, page: int, part: str = "k", pool_id: str = POOL, shard: int = 0) -> str:
    """The key of one part of the page number `page` of a test."""
    page_hash = hashlib.sha256(b"%d" % page).hexdigest()
    return f"ct1/{namespace_id}/{page_hash}/{pool_id}.{shard}/{part}"


@dataclass
class Arena:
    """Registered memory that hands out buffers one after the other."""

    store: ObjectStore
    size: int
    memory: np.ndarray = field(init=False)
    used: int = 0

    def __post_init__(self) -> None:
        self.memory = np.zeros(self.size, dtype=np.uint8)
        self.store.register(self.address, self.size)

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def room(self, sizes: Sequence[int], fill: int = 0xEE) -> ObjectBuffers:
        """Fresh memory for objects of these sizes, filled so that unread bytes show."""
        starts = self.used + np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
        total = int(sum(sizes))
        assert self.used + total <= self.size, "the arena is too small for this test"
        self.memory[self.used : self.used + total] = fill
        self.used += total
        return ObjectBuffers((starts + self.address).astype(np.uint64), np.array(sizes, dtype=np.int64))

    def holding(self, objects: Sequence[bytes]) -> ObjectBuffers:
        """Fresh memory that holds these objects."""
        buffers = self.room([len(data) for data in objects])
        at = int(buffers.addresses[0]) - self.address
        joined = np.frombuffer(b"".join(objects), dtype=np.uint8)
        self.memory[at : at + len(joined)] = joined
        return buffers

    def bytes_of(self, buffers: ObjectBuffers) -> list[bytes]:
        """What the buffers hold, fragments of an object joined."""
        found = []
        for i in range(buffers.count):
            pieces = [
                self.memory[a - self.address : a - self.address + n].tobytes()
                for a, n in zip(*buffers.fragments(i), strict=True)
            ]
            found.append(b"".join(pieces))
        return found


@dataclass
class StoreUnderTest:
    """A store, a namespace of its own in it, and ways to come at it from elsewhere."""

    store: ObjectStore
    description: dict[str, str]
    namespace_id: str
    arena: Arena

    def key(self, page: int, part: str = "k", shard: int = 0) -> str:
        return object_key(self.namespace_id, page, part, shard=shard)

    def another_client(self) -> ObjectStore:
        return open_store(self.description)

    def in_process(self, verb: str, **arguments: object) -> subprocess.Popen[str]:
        """Start `store_process.py VERB` on the same store; it waits for a line on its input."""
        command = [sys.executable, "-m", "tests.dataplane.store_process", verb]
        process = subprocess.Popen(
            [*command, json.dumps(self.description), json.dumps(arguments)],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPO)},
        )
        assert process.stdout is not None
        ready = process.stdout.readline()
        if ready != "ready\n":
            process.kill()
            raise AssertionError(f"the process did not start: {ready} {process.communicate()[1]}")
        return process


@pytest.fixture(scope="session")
def mooncake_cluster() -> Iterator[MooncakeCluster]:
    loads, why = MooncakeStore.available()
    if not loads:
        pytest.skip(f"Mooncake does not load here: {why}")
    with MooncakeCluster(SEGMENT_BYTES, lease_seconds=2.0) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def mooncake_store(mooncake_cluster: MooncakeCluster) -> Iterator[MooncakeStore]:
    store = MooncakeStore(mooncake_cluster.settings)
    yield store
    store.close()


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def namespace_id() -> str:
    return uuid.uuid4().hex[:16]


@pytest.fixture(params=["file", "mooncake", "bounced"])
def under_test(request: pytest.FixtureRequest, namespace_id: str) -> Iterator[StoreUnderTest]:
    """One store after the other; the conformance suite runs on both."""
    store: ObjectStore
    if request.param == "file":
        store = request.getfixturevalue("file_store")
        description = {"kind": "file", "root": str(store.root)}
    elif request.param == "bounced":
        inner = request.getfixturevalue("file_store")
        # Small lanes, so that batches go in pieces.
        store = BounceStore(inner, call_seconds=60, lanes=2, lane_bytes=1 << 20)
        description = {"kind": "file", "root": str(inner.root)}
    else:
        store = request.getfixturevalue("mooncake_store")
        cluster = request.getfixturevalue("mooncake_cluster")
        description = {"kind": "mooncake", "master": cluster.master, "master_http": cluster.master_http}
    arena = Arena(store, 24 << 20)
    yield StoreUnderTest(store, description, namespace_id, arena)
    store.remove_prefix(f"ct1/{namespace_id}/")
    store.unregister(arena.address)


@pytest.fixture
def file_under_test(file_store: FileStore, namespace_id: str) -> StoreUnderTest:
    description = {"kind": "file", "root": str(file_store.root)}
    return StoreUnderTest(file_store, description, namespace_id, Arena(file_store, 24 << 20))
