"""What a pool of the cache is: its parts, its shards, which pages of it a prefix needs, and its id.

A *pool* is one component of a hybrid model's cache (`kv`, `swa`, `mamba`, ...). The names are an open set: a
new pool needs a registration, not a change here. Nothing in this module looks at a pool's name.

Pure: values in, values out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, get_args

from metadata.errors import FieldError, InvalidInput

ANCHOR: Final = "kv"
"""The pool every prefix stands on; all others are sidecars."""

MAX_POOL_VARIANTS: Final = 64
MAX_PARTS: Final = 64
MAX_SHARDS: Final = 4096
MAX_PART_BYTES: Final = 16 << 30
MAX_WINDOW_PAGES: Final = 65_536
MAX_JSON_INT: Final = 2**53 - 1

ObjectLayout = Literal["page_first", "page_first_direct", "layer_first"]
OBJECT_LAYOUTS: Final[tuple[str, ...]] = get_args(ObjectLayout)

NAME_PATTERN: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
"""Form of pool and part names: they are segments of object keys and of file names."""

_NAME: Final = re.compile(NAME_PATTERN)
_MAX_DTYPE: Final = 64


@dataclass(frozen=True, slots=True)
class Part:
    """One buffer of a shard of a page: `k`, `v`, `temporal`, `conv_0`, ...

    Attributes:
        part: name, the last segment of the object key.
        dtype: element type as the engine calls it (`bfloat16`, `float8_e4m3fn`, `uint8`).
        bytes: size of this part of one shard of one page; 0 means that the part does not exist.
    """

    part: str
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class AllPages:
    """A prefix of n pages needs all n pages of the pool (full attention and what is derived from it)."""

    kind = "all_pages"


@dataclass(frozen=True, slots=True)
class TrailingPages:
    """A prefix of n pages needs the last `window_pages` pages before n (sliding window, Mamba state)."""

    window_pages: int
    kind = "trailing_pages"


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """Never gates a prefix; reports the pages that the leading complete groups cover (H3).

    Attributes:
        block: pages in one block.
        group: blocks in one group; a group counts only when all its pages are there.
    """

    block: int
    group: int
    kind = "block_groups"


HitPolicy: TypeAlias = AllPages | TrailingPages | BlockGroups


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One way a pool's bytes look (a *pool variant*) and how a prefix depends on it.

    Attributes:
        name: the pool's name within a registration.
        parts: in the order of the engine's buffers; parts of zero bytes are dropped on construction (P2).
        shard_count: independent slices of a page: TP ranks x CP ranks x pipeline stages that hold the pool;
            1 where every rank holds the same bytes.
        hit_policy: which pages a prefix needs.
        indices_from: the pool whose page slots this one shares (its pages live and die with that pool's).
        logical: an anchor that has indices but no bytes (DeepSeek V4).
        object_layout: order of the bytes within one object.
    """

    name: str
    parts: tuple[Part, ...]
    shard_count: int = 1
    hit_policy: HitPolicy = AllPages()
    indices_from: str | None = None
    logical: bool = False
    object_layout: str = "page_first"

    def __post_init__(self) -> None:
        errors = _spec_errors(self)
        if errors:
            raise InvalidInput(f"pool {self.name!r} cannot be registered", errors)
        object.__setattr__(self, "parts", tuple(p for p in self.parts if p.bytes > 0))

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one shard of one page, over all parts."""
        return sum(p.bytes for p in self.parts)

    @property
    def pool_id(self) -> str:
        """Eight hex digits that name these bytes; equal exactly when two engines may share them.

        The first 32 bits of SHA-256 over the canonical JSON of name, parts, object layout and shard count.
        Hit policy and `indices_from` say how an engine *uses* a page, not what its bytes are: left out.
        """
        return _pool_id(self)

    def variant(self) -> dict[str, Any]:
        """Return what the pool id is made of, as plain JSON values."""
        return {
            "name": self.name,
            "parts": [[p.part, p.dtype, p.bytes] for p in self.parts],
            "object_layout": self.object_layout,
            "shard_count": self.shard_count,
            "logical": self.logical,
        }


@dataclass(frozen=True, slots=True)
class RankPool:
    """A pool as one rank holds it.

    Attributes:
        spec: the variant.
        owned_shards: ascending shards whose bytes this rank holds and writes.
        host_bytes: size of the rank's host memory for the pool, for the operator's eyes; None if unknown.
    """

    spec: PoolSpec
    owned_shards: tuple[int, ...]
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        errors = shard_errors("owned_shards", self.owned_shards, self.spec.shard_count)
        if self.host_bytes is not None:
            errors += range_error("host_bytes", self.host_bytes, 0, MAX_JSON_INT)
        if errors:
            raise InvalidInput(f"pool {self.spec.name!r} cannot be registered", errors)


def validate_pool_set(pools: list[RankPool]) -> None:
    """Check the rules that hold between the pools of one rank.

    Raises:
        InvalidInput: every fault with its field; the fields start at `pools[i]`.
    """
    errors: list[FieldError] = []
    if not pools:
        errors.append(FieldError("pools", "empty", "is empty; register at least the anchor pool 'kv'"))
    if len(pools) > MAX_POOL_VARIANTS:
        errors.append(FieldError("pools", "too_many", f"has {len(pools)} pools, at most {MAX_POOL_VARIANTS}"))
    by_name: dict[str, PoolSpec] = {}
    for i, pool in enumerate(pools):
        if pool.spec.name in by_name:
            errors.append(FieldError(f"pools[{i}].name", "duplicate", f"{pool.spec.name!r} is listed twice"))
        by_name[pool.spec.name] = pool.spec
    for i, pool in enumerate(pools):
        errors.extend(e.under(f"pools[{i}]") for e in _source_errors(pool.spec, by_name))
    errors.extend(_anchor_errors(pools, by_name))
    if errors:
        raise InvalidInput("the pools do not fit together", errors)


def derived_from(source: str, specs: dict[str, PoolSpec]) -> list[str]:
    """Return the names of the pools that share `source`'s page slots, directly or through another pool."""
    found: list[str] = []
    frontier = [source]
    while frontier:
        at = frontier.pop()
        for name, spec in specs.items():
            if spec.indices_from == at and name not in found and name != source:
                found.append(name)
                frontier.append(name)
    return sorted(found)


def anchor_pools(specs: dict[str, PoolSpec]) -> list[str]:
    """Return the pools whose bytes *are* the anchor: `kv`, or what makes up a logical one (P1).

    A logical anchor is made up of the pools that derive from it and hold every page; a derived window, or a
    pool that gates nothing, says nothing of whether a page's anchor is there.
    """
    anchor = specs.get(ANCHOR)
    if anchor is None:
        return []
    if not anchor.logical:
        return [ANCHOR]
    return [n for n in derived_from(ANCHOR, specs) if isinstance(specs[n].hit_policy, AllPages)]


def write_stages(specs: dict[str, PoolSpec]) -> list[list[str]]:
    """Return pool names in the order they are written and read: anchor, derived, independent sidecars (O1).

    Logical pools have no bytes and appear in no stage; empty stages are left out.
    """
    derived = derived_from(ANCHOR, specs)
    anchor = [n for n in (ANCHOR,) if n in specs]
    rest = sorted(n for n in specs if n != ANCHOR and n not in derived)
    stages = [[n for n in names if not specs[n].logical] for names in (anchor, derived, rest)]
    return [s for s in stages if s]


def shard_errors(field: str, shards: Sequence[int], shard_count: int) -> list[FieldError]:
    """Return what is wrong with a list of shards of a pool: each once, ascending, 0 to `shard_count` - 1."""
    if any(type(s) is not int for s in shards):
        return [FieldError(field, "bad_type", f"is {list(shards)}, must be integers")]
    errors: list[FieldError] = []
    if list(shards) != sorted(set(shards)):
        errors.append(
            FieldError(field, "not_ascending", f"is {list(shards)}, list each shard once, ascending")
        )
    outside = [s for s in shards if not 0 <= s < shard_count]
    if outside:
        errors.append(FieldError(field, "out_of_range", f"has {outside}, shards are 0 to {shard_count - 1}"))
    return errors


@lru_cache(maxsize=4096)  # asked for several times by every call
def _pool_id(spec: PoolSpec) -> str:
    return hashlib.sha256(_canonical(spec.variant())).hexdigest()[:8]


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def range_error(field: str, value: object, low: int, high: int) -> list[FieldError]:
    """Return what is wrong with a value that must be an integer, `low` to `high`."""
    # `True` and `1.0` equal 1 but are written differently in JSON: equal specs would get two pool ids.
    if type(value) is not int:
        return [FieldError(field, "bad_type", f"is {value!r}, must be an integer")]
    if low <= value <= high:
        return []
    return [FieldError(field, "out_of_range", f"is {value}, must be {low} to {high}")]


def name_error(field: str, value: object) -> list[FieldError]:
    """Return what is wrong with a value that must be the name of a pool or part."""
    if isinstance(value, str) and _NAME.fullmatch(value):
        return []
    return [
        FieldError(
            field, "bad_name", f"is {value!r}, use 1-64 of A-Z a-z 0-9 _ . - (first: letter, digit, _)"
        )
    ]


def _spec_errors(spec: PoolSpec) -> list[FieldError]:
    errors = name_error("name", spec.name)
    errors += range_error("shard_count", spec.shard_count, 1, MAX_SHARDS)
    if spec.object_layout not in OBJECT_LAYOUTS:
        listed = ", ".join(OBJECT_LAYOUTS)
        errors.append(
            FieldError("object_layout", "unknown", f"is {spec.object_layout!r}, use one of {listed}")
        )
    errors += _parts_errors(spec)
    errors += _policy_errors(spec.hit_policy)
    return errors


def _parts_errors(spec: PoolSpec) -> list[FieldError]:
    errors: list[FieldError] = []
    if len(spec.parts) > MAX_PARTS:
        errors.append(FieldError("parts", "too_many", f"has {len(spec.parts)} parts, at most {MAX_PARTS}"))
    seen: set[str] = set()
    for i, p in enumerate(spec.parts):
        errors += name_error(f"parts[{i}].part", p.part)
        errors += range_error(f"parts[{i}].bytes", p.bytes, 0, MAX_PART_BYTES)
        errors += _dtype_error(f"parts[{i}].dtype", p.dtype)
        if p.part in seen:
            errors.append(FieldError(f"parts[{i}].part", "duplicate", f"{p.part!r} is listed twice"))
        seen.add(p.part)
    has_bytes = any(p.bytes for p in spec.parts)
    if spec.logical and has_bytes:
        errors.append(
            FieldError("parts", "logical_with_bytes", "a logical pool has no bytes; leave parts empty")
        )
    if not spec.logical and not has_bytes:
        errors.append(FieldError("parts", "empty", "has no bytes; give at least one part, or set logical"))
    return errors


def _dtype_error(field: str, value: object) -> list[FieldError]:
    if isinstance(value, str) and 1 <= len(value) <= _MAX_DTYPE and value.isprintable():
        return []
    detail = f"is {value!r}, name the element type in 1 to {_MAX_DTYPE} printable characters"
    return [FieldError(field, "bad_text", detail)]


def _policy_errors(policy: object) -> list[FieldError]:
    match policy:
        case AllPages():
            return []
        case TrailingPages(window):
            return range_error("hit_policy.window_pages", window, 1, MAX_WINDOW_PAGES)
        case BlockGroups(block, group):
            errors = range_error("hit_policy.block", block, 1, MAX_WINDOW_PAGES)
            return errors + range_error("hit_policy.group", group, 1, MAX_WINDOW_PAGES)
        case _:
            return [FieldError("hit_policy", "unknown", f"is {policy!r}, which is no hit policy")]


def _anchor_errors(pools: list[RankPool], by_name: dict[str, PoolSpec]) -> list[FieldError]:
    """Refuse an anchor that gates nothing: an empty store would answer a full hit."""
    anchor = by_name.get(ANCHOR)
    if anchor is None:
        return []
    at = next(i for i, pool in enumerate(pools) if pool.spec.name == ANCHOR)
    if not isinstance(anchor.hit_policy, AllPages):
        detail = f"is {anchor.hit_policy.kind}; every prefix stands on all pages of 'kv': use all_pages"
        return [FieldError(f"pools[{at}].hit_policy.kind", "anchor", detail)]
    if anchor.logical and not anchor_pools(by_name):
        detail = "'kv' is logical and no pool with indices_from 'kv' has the hit policy all_pages"
        return [FieldError("pools", "anchor_without_bytes", detail)]
    return []


def _source_errors(spec: PoolSpec, by_name: dict[str, PoolSpec]) -> list[FieldError]:
    if spec.name == ANCHOR and spec.indices_from is not None:
        return [FieldError("indices_from", "anchor", "the anchor has page slots of its own; leave it null")]
    if spec.name != ANCHOR and spec.logical:
        return [FieldError("logical", "not_anchor", "only the anchor 'kv' may be logical")]
    if spec.indices_from is None:
        return []
    seen = {spec.name}
    at: str | None = spec.indices_from
    while at is not None:
        if at not in by_name:
            return [FieldError("indices_from", "unknown_pool", f"names {at!r}, which is not registered")]
        if at in seen:
            return [FieldError("indices_from", "cycle", f"comes back to {at!r}")]
        seen.add(at)
        at = by_name[at].indices_from
    return []
