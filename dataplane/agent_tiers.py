"""The host tiers of an agent: one for each namespace and set of pools, shared by all engines that have these.

A tier outlives its sessions: what an engine published is there for the next one. Its memory goes to another
tier when that needs it and no session uses this one.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dataplane.agent_files import SharedFolder
from dataplane.agent_pools import PoolMemory, PoolShape, shapes_of
from dataplane.agent_store import SharedStores
from dataplane.host_answers import Evicted
from dataplane.host_tier import HostTier
from dataplane.messages.agent import AgentPool
from dataplane.messages.control import BlockGroupsPolicy, NamespaceMessage, Policy, TrailingPagesPolicy
from dataplane.transfer import PageArray
from metadata.errors import FieldError, InvalidInput
from metadata.pools import (
    AllPages,
    BlockGroups,
    HitPolicy,
    Part,
    PoolSpec,
    RankPool,
    TrailingPages,
    validate_pool_set,
)

TierKey: TypeAlias = tuple[NamespaceMessage, frozenset[RankPool]]


@dataclass(frozen=True)
class PoolPlan:
    """A checked set of pools.

    Attributes:
        pools: as the rank registers them.
        capacities: slots of each pool without `indices_from`.
    """

    pools: list[RankPool]
    capacities: dict[str, int]

    @property
    def shapes(self) -> dict[str, PoolShape]:
        """How the pools lie in memory."""
        return shapes_of(self.pools, self.capacities)

    def key(self, namespace: NamespaceMessage) -> TierKey:
        """Return what sessions have in common that share a tier."""
        return namespace, frozenset(RankPool(p.spec, p.owned_shards) for p in self.pools)


class Tier:
    """One host tier and its memory. All calls belong to the event loop.

    Attributes:
        number: of this agent's tiers.
        plan: its pools.
        host: what is resident.
        memory: where it lies.
        unsaved: resident pages that no transfer has stored yet, in the order of their publishing; whether
            somebody wants them stored.
        busy: transfers that use the memory.
        backing_up: pages of back-ups that were asked for and have not returned, and of how many.
        stored_at: when what is unsaved was last looked at, on the monotonic clock.
        evicted: pool -> pages that were evicted so far.
    """

    def __init__(self, number: int, plan: PoolPlan, memory: PoolMemory) -> None:
        self.number = number
        self.plan = plan
        self.memory = memory
        self.host = HostTier([p.spec for p in plan.pools], plan.capacities)
        self.specs = {p.spec.name: p.spec for p in plan.pools}
        self.mapped = frozenset(b.name for b in memory.bound if b.hosts)
        self.unsaved: dict[bytes, bool] = {}
        self.busy = 0
        self.backing_up: Counter[bytes] = Counter()
        self.stored_at = 0.0
        self.evicted: dict[str, int] = {}
        self._tag = secrets.token_hex(3)

    def waiting(self, most: int) -> list[bytes]:
        """Return pages that are to be stored and that nobody is storing, the oldest first, at most `most`."""
        asked = (h for h, wanted in self.unsaved.items() if wanted and h not in self.backing_up)
        return list(itertools.islice(asked, most))

    def backed_up(self, page_hashes: Iterable[bytes]) -> None:
        """Note that a back-up of these pages, which `backing_up` was told of, is over."""
        self.backing_up.subtract(page_hashes)
        self.backing_up = +self.backing_up

    @property
    def sessions(self) -> int:
        """Open sessions."""
        return len(self.host.sessions)

    @property
    def in_use(self) -> bool:
        """Whether somebody needs its pages, which may be a back-up that waits and whose engine is gone."""
        return bool(self.sessions or self.busy or self.backing_up)

    def outside(self, token: str) -> str:
        """Return how a token of the tier is called outside: other tiers, and other lives, have the same."""
        return f"{token}-{self._tag}"

    def inside(self, token: str) -> str | None:
        """Return the tier's own name of a token, None where the token is not of this tier."""
        name, _, tag = token.rpartition("-")
        return name if tag == self._tag else None

    def bytes_of(self, slots: dict[str, PageArray]) -> dict[str, PageArray]:
        """Return the slots that a mover may be handed: those of pools that have bytes here."""
        return {n: at for n, at in slots.items() if n in self.mapped}

    def note_evicted(self, evicted: Iterable[Evicted]) -> None:
        """Count what was evicted; what is gone from all pools need not be stored any more."""
        for one in evicted:
            self.evicted[one.pool] = self.evicted.get(one.pool, 0) + len(one.page_hashes)
            pages = [h for h in one.page_hashes if h in self.unsaved]
            if pages:  # of which other pools may still have something
                left = self.host.match(pages).slots.values()
                for i in np.flatnonzero(np.logical_and.reduce([at < 0 for at in left])).tolist():
                    self.unsaved.pop(pages[i], None)

    def owner_of(self, pool: str) -> str:
        """Return the pool whose slots a pool has: itself, or what it derives from."""
        while (source := self.specs[pool].indices_from) is not None:
            pool = source
        return pool


class Tiers:
    """All tiers, within the memory that they may take together.

    `make` runs in a thread, so whoever walks the tiers walks a copy.
    """

    def __init__(self, folder: SharedFolder, memory_bytes: int, stores: SharedStores) -> None:
        self._folder = folder
        self._limit = memory_bytes
        self._stores = stores
        self._tiers: dict[TierKey, Tier] = {}
        self._made = 0

    def __iter__(self) -> Iterator[Tier]:
        return iter(list(self._tiers.values()))

    @property
    def used_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(t.memory.length for t in self)

    def find(self, key: TierKey) -> Tier | None:
        """Return the tier of a key."""
        return self._tiers.get(key)

    def make(self, key: TierKey, plan: PoolPlan) -> Tier:
        """Make a tier; takes the time that touching its memory takes.

        Raises:
            InvalidInput: it needs more memory than there is, even without all tiers that nobody uses.
            OutOfHostMemory: the tmpfs has less room than the agent may take.
        """
        shapes = plan.shapes
        self._make_room(sum(s.length for s in shapes.values()))
        self._made += 1
        tier = Tier(self._made, plan, PoolMemory(self._folder, self._made, shapes))
        self._tiers[key] = tier
        return tier

    def of_token(self, token: str) -> tuple[Tier, str] | None:
        """Return the tier that gave a token out, and its own name of it."""
        for tier in self:
            inside = tier.inside(token)
            if inside is not None:
                return tier, inside
        return None

    def close(self) -> None:
        """Give all memory back that no call of a store still uses."""
        for key, tier in list(self._tiers.items()):
            if not tier.busy:
                self._drop(key)

    def _make_room(self, length: int) -> None:
        for key in [k for k, t in self._tiers.items() if not t.in_use]:
            if self.used_bytes + length <= self._limit:
                return
            self._drop(key)
        if self.used_bytes + length > self._limit:
            left = self._limit - self.used_bytes
            detail = f"need {length} bytes of memory; {left} are left of the agent's {self._limit}"
            errors = [FieldError("pools", "out_of_memory", detail)]
            raise InvalidInput("the pools do not fit in the agent's memory", errors)

    def _drop(self, key: TierKey) -> None:
        tier = self._tiers.pop(key)
        for first, end in tier.memory.ranges:
            self._stores.forget(first, end)
        tier.memory.close()


def plan_of(pools: Sequence[AgentPool]) -> PoolPlan:
    """Return the pools of a session request, checked.

    Raises:
        InvalidInput: every fault with its field, starting at `pools[i]`.
    """
    errors: list[FieldError] = []
    checked: list[RankPool] = []
    for i, pool in enumerate(pools):
        try:
            checked.append(rank_pool_of(pool))
        except InvalidInput as error:
            errors += [e.under(f"pools[{i}]") for e in error.errors]
    if errors:
        raise InvalidInput("the pools cannot be used", errors)
    validate_pool_set(checked)
    capacities = {}
    at = {p.name: i for i, p in enumerate(pools)}
    for i, pool in enumerate(pools):
        source: AgentPool = pool
        while source.indices_from is not None:
            source = pools[at[source.indices_from]]
        where = f"pools[{i}].capacity_pages"
        if pool.capacity_pages < 1:
            errors.append(FieldError(where, "out_of_range", "is 0, must be at least 1"))
        elif pool.capacity_pages != source.capacity_pages:
            detail = (
                f"is {pool.capacity_pages}; {source.name!r}, whose slots it has, has {source.capacity_pages}"
            )
            errors.append(FieldError(where, "mismatch", detail))
        elif source is pool:
            capacities[pool.name] = pool.capacity_pages
    if errors:
        raise InvalidInput("the pools cannot be used", errors)
    return PoolPlan(checked, capacities)


def rank_pool_of(pool: AgentPool) -> RankPool:
    """Return a pool of a request as the domain's.

    Raises:
        InvalidInput: it breaks a rule.
    """
    spec = PoolSpec(
        name=pool.name,
        parts=tuple(Part(p.part, p.dtype, p.bytes) for p in pool.parts),
        shard_count=pool.shard_count,
        hit_policy=_policy(pool.hit_policy),
        indices_from=pool.indices_from,
        logical=pool.logical,
        object_layout=pool.object_layout,
    )
    return RankPool(spec, tuple(pool.owned_shards), pool.host_bytes)


def _policy(policy: Policy) -> HitPolicy:
    match policy:
        case TrailingPagesPolicy(window_pages=window):
            return TrailingPages(window)
        case BlockGroupsPolicy(block=block, group=group):
            return BlockGroups(block, group)
        case _:
            return AllPages()
