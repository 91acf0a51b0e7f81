"""Tells the index what the store evicted, so that nobody is promised pages that are gone (T3).

Only the file store says what it evicts, to the process whose put needed the room. What a rank of another
namespace, or with other pools, stored is left for its readers to find: the read decides (T1).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Final

import numpy as np

from dataplane.control_plane import ControlPlane
from dataplane.file_space import EvictedShard
from dataplane.messages import control
from dataplane.page_statements import PoolFacts, statements
from metadata.codec import PageHashes
from metadata.errors import CaketinError
from metadata.page_runs import page_runs
from metadata.pools import RankPool

log = logging.getLogger(__name__)

BACKLOG: Final = 65_536
_PAGES_PER_CALL: Final = 2_048  # a call's deadline is short


class EvictionReport:
    """Reports evicted shards of one rank's pools; safe to call from several threads.

    While the control plane is away, what could not be told waits for the next eviction: `BACKLOG` shards at
    most, the oldest are dropped.

    Attributes:
        reported: shards that were told.
        dropped: shards that never will be; their claims stay until somebody reads them.
        foreign: shards of other namespaces and pools.
    """

    def __init__(self, control_plane: ControlPlane, namespace_id: str, pools: Iterable[RankPool]) -> None:
        self._control = control_plane
        self._namespace_id = namespace_id
        self._names = {p.spec.pool_id: p.spec.name for p in pools if not p.spec.logical}
        self._lock = Lock()
        self._waiting: deque[EvictedShard] = deque()
        self.reported = 0
        self.dropped = 0
        self.foreign = 0

    def __call__(self, evicted: Sequence[EvictedShard]) -> None:
        """Report what was evicted, and what waits since the last time."""
        with self._lock:
            ours = [e for e in evicted if e.namespace_id == self._namespace_id and e.pool_id in self._names]
            self.foreign += len(evicted) - len(ours)
            self._waiting.extend(ours)
            self._drop_oldest()
            self._report()

    def _drop_oldest(self) -> None:
        excess = len(self._waiting) - BACKLOG
        for _ in range(excess):
            self._waiting.popleft()
        if excess > 0:
            self.dropped += excess
            log.warning("%d evictions are not reported: the control plane was away too long", excess)

    def _report(self) -> None:
        while self._waiting:
            some = _first_pages(self._waiting, _PAGES_PER_CALL)
            try:
                self._tell(some)
            except CaketinError as error:
                log.warning("%d evictions could not be reported yet: %s", len(self._waiting), error)
                return
            for _ in some:
                self._waiting.popleft()
            self.reported += len(some)

    def _tell(self, evicted: Sequence[EvictedShard]) -> None:
        order = {page_hash: i for i, page_hash in enumerate(dict.fromkeys(e.page_hash for e in evicted))}
        facts: dict[str, PoolFacts] = {}
        for pool_id, name in self._names.items():
            mine = [e for e in evicted if e.pool_id == pool_id]
            if mine:
                shards = tuple(sorted({e.shard for e in mine}))
                holds = np.zeros((len(order), len(shards)), np.bool_)
                for e in mine:
                    holds[order[e.page_hash], shards.index(e.shard)] = True
                facts[name] = PoolFacts(shards, holds, np.zeros(len(order), np.int8))
        pool_ids = {name: pool_id for pool_id, name in self._names.items()}
        for call in statements(facts):
            missing = {
                name: control.MissingPool(
                    pages=page_runs(said.pages), shards=said.shards, reason="evicted", pool_id=pool_ids[name]
                )
                for name, said in call.items()
            }
            # Without a generation, since nobody looked the pages up. A claim made since then is cleared
            # too, which costs a hit and no truth.
            self._control.missing(self._namespace_id, PageHashes.of(list(order)), None, missing)


def _first_pages(evicted: Iterable[EvictedShard], pages: int) -> list[EvictedShard]:
    """Return the leading shards that are of at most `pages` pages."""
    seen: set[bytes] = set()
    taken: list[EvictedShard] = []
    for one in evicted:
        seen.add(one.page_hash)
        if len(seen) > pages:
            break
        taken.append(one)
    return taken
