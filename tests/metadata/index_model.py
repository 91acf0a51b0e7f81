"""What registry and index should say, as plain sets: the other side of the state machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from metadata.pools import AllPages, HitPolicy, TrailingPages


@dataclass
class ModelPool:
    """A pool as the model sees it."""

    name: str
    shard_count: int
    policy: HitPolicy
    bit: int | None = None
    registered: set[int] = field(default_factory=set)


@dataclass
class ModelPage:
    """Stored shards of each pool, and how often something was cleared."""

    shards: dict[str, set[int]] = field(default_factory=dict)
    cleared: int = 0

    @property
    def generation(self) -> int:
        """0 for a page of which nothing was ever cleared, then 1 to 255 round and round."""
        return 0 if self.cleared == 0 else 1 + (self.cleared - 1) % 255


class IndexModel:
    """Pages by hash."""

    def __init__(self, pools: Iterable[ModelPool], pages: int) -> None:
        self.pools = {p.name: p for p in pools}
        self.pages = [ModelPage() for _ in range(pages)]

    def whole(self, page: int, pool: str) -> bool:
        """Whether every shard is there (H4)."""
        return len(self.pages[page].shards.get(pool, ())) == self.pools[pool].shard_count

    def commit(
        self,
        pages: Sequence[int],
        stored: dict[str, tuple[set[int], set[int]]],
        anchor_shards: set[int],
    ) -> tuple[int, int, list[tuple[int, str]]]:
        """Take a commit; `stored`: pool -> (shards, pages). Return committed, complete, rejected (O2)."""
        committed, complete, rejected = 0, 0, []
        for page in pages:
            named = [name for name, (_, at) in stored.items() if page in at]
            if not named:
                continue
            there = self.pages[page].shards
            anchors = set(there.get("kv", set()))
            if "kv" in named:
                anchors |= stored["kv"][0]
            closed = not anchor_shards <= anchors
            taken = [name for name in named if name == "kv" or not closed]
            rejected += [(page, name) for name in named if name not in taken]
            for name in taken:
                there.setdefault(name, set()).update(stored[name][0])
            committed += bool(taken)
            complete += taken == named and all(self.whole(page, name) for name in named)
        return committed, complete, sorted(rejected)

    def missing(self, page: int, items: dict[str, set[int]], generation: int | None) -> tuple[int, int]:
        """Take a report on one page; return cleared, stale (T2)."""
        state = self.pages[page]
        if generation is not None and generation != state.generation:
            return 0, 1
        hit = [name for name, gone in items.items() if state.shards.get(name, set()) & gone]
        for name in hit:
            state.shards[name] -= items[name]
        state.cleared += bool(hit)
        return len(hit), 0

    def restorable(self, pages: Sequence[int], gates: Iterable[str]) -> list[int]:
        """All lengths at which every gating pool has what it needs (H1, H2)."""
        return [n for n in range(1, len(pages) + 1) if all(self._allows(pages[:n], g) for g in gates)]

    def _allows(self, prefix: Sequence[int], pool: str) -> bool:
        policy = self.pools[pool].policy
        if isinstance(policy, TrailingPages):
            prefix = prefix[-policy.window_pages :]
        else:
            assert isinstance(policy, AllPages)
        return all(self.whole(page, pool) for page in prefix)

    def claimed(self) -> dict[str, int]:
        """Complete pages of each pool."""
        return {name: sum(self.whole(i, name) for i in range(len(self.pages))) for name in self.pools}
