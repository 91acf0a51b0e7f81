"""What the benchmarks of transfers share: pool sets in their real sizes, and the mover of this process."""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.attach import Attached, attached
from dataplane.bound_pool import BoundPool
from dataplane.control_client import ControlClient, ControlSettings, ModelIdentity, RankIdentity
from dataplane.host_memory import HostMemory
from dataplane.page_mover import NO_SLOT
from metadata.codec import PageHashes
from metadata.pools import Part, PoolSpec, RankPool, TrailingPages

PAGE_TOKENS = 256
DEEPSEEK_V4 = [
    PoolSpec("kv", (), logical=True),
    PoolSpec("deepseek_v4_c4", (Part("page", "uint8", 786_240),), indices_from="kv"),
    PoolSpec("deepseek_v4_c4_indexer", (Part("page", "uint8", 177_408),), indices_from="kv"),
    PoolSpec("deepseek_v4_c128", (Part("page", "uint8", 34_560),), indices_from="kv"),
    PoolSpec("swa", (Part("page", "uint8", 6_439_680),), hit_policy=TrailingPages(1)),
]
MHA = [PoolSpec("kv", (Part("k", "bfloat16", 1 << 20), Part("v", "bfloat16", 1 << 20)))]


@dataclass(frozen=True)
class Case:
    """One set of pools at one size; of a window the last page is moved."""

    name: str
    specs: list[PoolSpec]
    pages: int

    @property
    def revision(self) -> str:
        return self.name.replace(" ", "-").replace(",", "")

    @property
    def pools(self) -> list[RankPool]:
        return [RankPool(spec, (0,)) for spec in self.specs]

    @property
    def windows(self) -> list[str]:
        return [s.name for s in self.specs if isinstance(s.hit_policy, TrailingPages)]

    @property
    def bytes(self) -> int:
        """Bytes that a back-up or prefetch moves."""
        return sum(s.bytes_per_page * (1 if s.name in self.windows else self.pages) for s in self.specs)

    def fresh(self) -> PageHashes:
        return PageHashes(secrets.token_bytes(32 * self.pages))


class MoverSide:
    """The mover in this process, on memory of its own."""

    def __init__(
        self, case: Case, joined: Attached, client: ControlClient, bound: Sequence[BoundPool]
    ) -> None:
        self.case, self.joined, self.client = case, joined, client
        self.pools = [b for b in bound if b.hosts]
        every = np.arange(case.pages, dtype=np.int64)
        tail = np.full(case.pages, NO_SLOT, np.int64)
        tail[-1] = 0
        self.slots = {b.name: tail if b.name in case.windows else every for b in self.pools}

    def put(self, hashes: PageHashes) -> float:
        start = time.perf_counter()
        done = self.joined.mover.back_up(hashes, self.slots)
        took = time.perf_counter() - start
        assert done.transfers_done, done.error
        return took

    def get(self, hashes: PageHashes) -> float:
        start = time.perf_counter()
        promise = self.client.lookup(self.joined.namespace_id, hashes)
        done = self.joined.mover.prefetch(hashes, promise, self.slots)
        took = time.perf_counter() - start
        assert done.pages == len(hashes), done.error
        return took

    def drop(self, hashes: PageHashes) -> None:
        for pool in self.pools:
            self.joined.store.remove(pool.keys(self.joined.namespace_id, hashes))


@contextlib.contextmanager
def mover_side(case: Case, url: str, engine_id: str) -> Iterator[MoverSide]:
    """Attach a mover with touched memory for all pages of the case."""
    pages = {s.name: 1 if s.name in case.windows else case.pages for s in case.specs}
    memories = [HostMemory(p.spec, pages[p.spec.name], prefault=True) for p in case.pools]
    bound = [
        BoundPool(p, () if p.spec.logical else (m.pool,)) for p, m in zip(case.pools, memories, strict=True)
    ]
    me = RankIdentity(engine_id, "dp0-pp0-cp0-tp0", secrets.token_hex(16))
    client = ControlClient(ControlSettings(url, call_seconds=10), me)
    model = ModelIdentity("bench", case.revision, PAGE_TOKENS)
    with contextlib.closing(client), attached(client, model, bound) as joined:
        yield MoverSide(case, joined, client, bound)


def row(size: int, one: tuple[str, Sequence[float]], other: tuple[str, Sequence[float]]) -> dict[str, object]:
    """Return speeds in GB/s and how fast `other` is compared with `one`, pair by pair.

    Args:
        size: bytes that each time stands for.
        one: name and times in seconds.
        other: likewise.
    """
    ratios = sorted(a / b for a, b in zip(one[1], other[1], strict=True))
    quarter = len(ratios) // 4
    speeds = {f"{name}_gbps": round(size / statistics.median(times) / 1e9, 3) for name, times in (one, other)}
    middle = [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)]
    return {**speeds, "ratio": round(statistics.median(ratios), 3), "middle_half": middle}
