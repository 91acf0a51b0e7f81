"""An exact model of what two tiers hit, worked out from page names alone: an LRU of pages above a store that
forgets nothing. Knows nothing of the agent but its rules: pages of a prefix are held while it is used, what
is evicted is what was used least recently, and within a request the first page counts as used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class TwoTiers:
    """Hits of a host tier of `slots` pages and of an unbounded L3, for a pool that needs every page."""

    slots: int
    host_hits: int = 0
    l3_hits: int = 0
    asked: int = 0
    _host: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _l3: set[bytes] = field(default_factory=set)

    def request(self, ids: Sequence[bytes]) -> None:
        host = self._run(ids, self._host)
        both = max(host, self._run(ids, self._l3))
        self.asked += len(ids)
        self.host_hits += host
        self.l3_hits += both - host
        held = set(ids[:host])
        for page in ids[host:]:
            if len(self._host) >= self.slots:
                del self._host[next(p for p in self._host if p not in held)]
            self._host[page] = None
            held.add(page)
        for page in reversed(ids):
            self._host.move_to_end(page)
        self._l3.update(ids)

    @staticmethod
    def _run(ids: Iterable[bytes], there: object) -> int:
        count = 0
        for page in ids:
            if page not in there:  # type: ignore[operator]
                break
            count += 1
        return count
