"""What the registry knows, as values: pool variants, namespaces, ranks, registrations. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from metadata.namespace import Namespace
from metadata.pool_json import rank_pool_from_json, rank_pool_to_json
from metadata.pools import PoolSpec, RankPool
from metadata.shard_bitmap import has_shard


@dataclass(frozen=True, slots=True)
class Variant:
    """A pool variant of a namespace as the registry knows it.

    Attributes:
        spec: the variant, with the hit policy of the rank that registered it first.
        bit: its bit in a page's value.
        registered: bitmap of the shards that some rank registered, ever.
    """

    spec: PoolSpec
    bit: int
    registered: bytes

    @property
    def missing_shards(self) -> list[int]:
        """Shards that nobody ever registered; the pool can never be complete while there are any."""
        return [s for s in range(self.spec.shard_count) if not has_shard(self.registered, s)]


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """A namespace with its variants by pool id."""

    identity: Namespace
    variants: dict[str, Variant]

    @property
    def namespace_id(self) -> str:
        """The namespace's printable digest."""
        return self.identity.namespace_id

    def by_name(self, name: str) -> list[Variant]:
        """Return the variants of one pool name, by bit."""
        found = [v for v in self.variants.values() if v.spec.name == name]
        return sorted(found, key=lambda v: v.bit)


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One registered rank."""

    engine_id: str
    rank: str
    incarnation: str
    namespace_id: str
    pools: tuple[RankPool, ...]
    min_pages: int
    labels: dict[str, str]
    epoch: int
    lease_until: float

    @property
    def specs(self) -> dict[str, PoolSpec]:
        """The pools' specs by name."""
        return {p.spec.name: p.spec for p in self.pools}

    def pool(self, name: str) -> RankPool | None:
        """Return the rank's pool of that name, or None."""
        return next((p for p in self.pools if p.spec.name == name), None)


@dataclass(frozen=True, slots=True)
class RegisteredPool:
    """What a rank learns of one of its pools."""

    pool_id: str
    bit: int
    suffixes: list[str]
    engines: int


@dataclass(frozen=True, slots=True)
class Registered:
    """What a registration answers."""

    namespace_id: str
    epoch: int
    new: bool
    pools: dict[str, RegisteredPool]


@dataclass(frozen=True, slots=True)
class Registration:
    """What a rank says of itself."""

    engine_id: str
    rank: str
    incarnation: str
    namespace: Namespace
    pools: tuple[RankPool, ...]
    min_pages: int = 1
    labels: dict[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the rank's record; pools and labels are text: Lua's JSON loses empty lists."""
        pools = json.dumps([rank_pool_to_json(p) for p in self.pools], sort_keys=True)
        body = {
            "namespace_id": self.namespace.namespace_id,
            "pools": pools,
            "min_pages": self.min_pages,
            "labels": json.dumps(self.labels, sort_keys=True),
        }
        text = json.dumps(body, sort_keys=True).encode()
        return {"incarnation": self.incarnation, "digest": hashlib.sha256(text).hexdigest()[:16], **body}


def read_rank_record(engine_id: str, rank: str, raw: dict[str, Any]) -> RankRecord:
    """Return the rank that a record in Redis describes."""
    return RankRecord(
        engine_id=engine_id,
        rank=rank,
        incarnation=raw["incarnation"],
        namespace_id=raw["namespace_id"],
        pools=_rank_pools(raw["pools"]),
        min_pages=int(raw["min_pages"]),
        labels=json.loads(raw["labels"]),
        epoch=int(raw["epoch"]),
        lease_until=float(raw["lease_until"]),
    )


@lru_cache(maxsize=4096)
def _rank_pools(text: str) -> tuple[RankPool, ...]:
    """Return the pools that a record's text describes.

    Read again with every heartbeat but seldom changed: 512 ranks of 16 pools cost 0.1 s to read anew.
    """
    pools = (rank_pool_from_json(p) for p in json.loads(text))
    return tuple(replace(pool, spec=_one_of_its_kind(pool.spec)) for pool in pools)


@lru_cache(maxsize=4096)
def _one_of_its_kind(spec: PoolSpec) -> PoolSpec:
    """Return one object for equal specs, so that all ranks of an engine share it."""
    return spec
