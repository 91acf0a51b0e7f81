"""Pools as plain JSON values, as the contract and Redis hold them, and where two of them differ.

Pure: values in, values out.
"""

from __future__ import annotations

import json
from typing import Any

from metadata.errors import FieldError, InvalidInput
from metadata.pools import AllPages, BlockGroups, HitPolicy, Part, PoolSpec, RankPool, TrailingPages


def policy_to_json(policy: HitPolicy) -> dict[str, Any]:
    """Return the policy as the contract writes it."""
    match policy:
        case AllPages():
            return {"kind": "all_pages"}
        case TrailingPages(window):
            return {"kind": "trailing_pages", "window_pages": window}
    return {"kind": "block_groups", "block": policy.block, "group": policy.group}


def policy_from_json(value: dict[str, Any]) -> HitPolicy:
    """Return the policy that `policy_to_json` wrote.

    The numbers are checked by the pool that takes the policy; one left out counts as 0, which no pool takes.

    Raises:
        InvalidInput: for a kind that does not exist.
    """
    match value.get("kind"):
        case "all_pages":
            return AllPages()
        case "trailing_pages":
            return TrailingPages(value.get("window_pages", 0))
        case "block_groups":
            return BlockGroups(value.get("block", 0), value.get("group", 0))
        case other:
            kinds = "all_pages, trailing_pages, block_groups"
            raise InvalidInput(
                "unknown hit policy",
                [FieldError("hit_policy.kind", "unknown", f"is {other!r}, use one of {kinds}")],
            )


def rank_pool_to_json(pool: RankPool) -> dict[str, Any]:
    """Return a rank's pool as the contract writes it in a registration."""
    return {
        "name": pool.spec.name,
        "logical": pool.spec.logical,
        "parts": _parts_json(pool.spec),
        "shard_count": pool.spec.shard_count,
        "owned_shards": list(pool.owned_shards),
        "hit_policy": policy_to_json(pool.spec.hit_policy),
        "indices_from": pool.spec.indices_from,
        "object_layout": pool.spec.object_layout,
        "host_bytes": pool.host_bytes,
    }


def rank_pool_from_json(value: dict[str, Any]) -> RankPool:
    """Return the pool that `rank_pool_to_json` wrote.

    Raises:
        InvalidInput: where the values break a rule.
    """
    spec = PoolSpec(
        name=value["name"],
        parts=tuple(Part(p["part"], p["dtype"], p["bytes"]) for p in value["parts"]),
        shard_count=value["shard_count"],
        hit_policy=policy_from_json(value["hit_policy"]),
        indices_from=value.get("indices_from"),
        logical=value.get("logical", False),
        object_layout=value.get("object_layout", "page_first"),
    )
    return RankPool(spec, tuple(value["owned_shards"]), value.get("host_bytes"))


def spec_differences(old: RankPool, new: RankPool) -> list[FieldError]:
    """Return one entry a field in which two registrations of one pool differ, with both values (I1)."""
    pairs: list[tuple[str, object, object]] = [
        ("parts", _parts_json(old.spec), _parts_json(new.spec)),
        ("shard_count", old.spec.shard_count, new.spec.shard_count),
        ("owned_shards", list(old.owned_shards), list(new.owned_shards)),
        ("hit_policy", policy_to_json(old.spec.hit_policy), policy_to_json(new.spec.hit_policy)),
        ("indices_from", old.spec.indices_from, new.spec.indices_from),
        ("logical", old.spec.logical, new.spec.logical),
        ("object_layout", old.spec.object_layout, new.spec.object_layout),
    ]
    return [
        FieldError(name, "changed", f"was {json.dumps(was)}, now {json.dumps(now)}")
        for name, was, now in pairs
        if was != now
    ]


def _parts_json(spec: PoolSpec) -> list[dict[str, Any]]:
    return [{"part": p.part, "dtype": p.dtype, "bytes": p.bytes} for p in spec.parts]
