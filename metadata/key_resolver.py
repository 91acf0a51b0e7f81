"""Suffix resolution for callers that move bytes themselves: pages and pools to object keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from metadata import object_keys
from metadata.errors import AmbiguousVariant, FieldError, InvalidInput, UnknownPool
from metadata.pools import PoolSpec
from metadata.registered import NamespaceView, Variant
from metadata.sglang_keys import SglangLayout

PoolKeys: TypeAlias = tuple[str | None, list[list[str]]]
"""Pool id (None in scheme `sglang`), and one list of keys a page."""

MAX_KEYS: Final = 131_072
"""Keys of one answer: about 20 MB of JSON. Pages x shards x parts could be a thousand times that."""

Choice: TypeAlias = tuple[str | None, Sequence[int] | None]
"""Pool id (None: the only variant of that name) and shards (None: all)."""


def resolve(
    view: NamespaceView, page_hashes: Sequence[bytes], pools: Mapping[str, Choice] | None
) -> dict[str, PoolKeys]:
    """Return the keys of pages in scheme `caketin`, by pool name.

    Args:
        view: the namespace.
        page_hashes: the pages.
        pools: which pools, variants and shards; None: every pool that has bytes.

    Raises:
        UnknownPool: nobody registered the pool, or the pool id.
        AmbiguousVariant: the pool has several variants and no pool id is given.
        InvalidInput: a shard that the pool does not have, or more than `MAX_KEYS` keys.
    """
    if pools is None:
        pools = {v.spec.name: (None, None) for v in view.variants.values() if not v.spec.logical}
    chosen: dict[str, tuple[PoolSpec, Sequence[int]]] = {}
    for name, (pool_id, shards) in pools.items():
        spec = choose_variant(view, name, pool_id).spec
        chosen[name] = (spec, range(spec.shard_count) if shards is None else shards)
    # Before a single suffix is built: those of one pool alone may be 262,144.
    _check_size(len(page_hashes) * sum(len(spec.parts) * len(shards) for spec, shards in chosen.values()))
    return {
        name: (
            spec.pool_id,
            object_keys.object_keys(view.namespace_id, page_hashes, object_keys.suffixes(spec, shards)),
        )
        for name, (spec, shards) in chosen.items()
    }


def resolve_sglang(layout: SglangLayout, page_hashes: Sequence[bytes]) -> dict[str, PoolKeys]:
    """Return the keys of pages as one rank of a stock SGLang engine writes them, by pool name.

    Raises:
        InvalidInput: more than `MAX_KEYS` keys.
    """
    _check_size(len(page_hashes) * sum(len(layout.suffixes(p.name)) for p in layout.pools))
    return {p.name: (None, layout.object_keys(p.name, page_hashes)) for p in layout.pools}


def _check_size(keys: int) -> None:
    if keys > MAX_KEYS:
        detail = f"the answer would have more than {MAX_KEYS} keys: name fewer pages, pools or shards"
        raise InvalidInput("too many keys", [FieldError("page_hashes", "too_many_keys", detail)])


def choose_variant(view: NamespaceView, name: str, pool_id: str | None) -> Variant:
    """Return the variant of a pool: the one of that id, or the only one there is.

    Raises:
        UnknownPool: nobody registered the pool, or the pool id.
        AmbiguousVariant: the pool has several variants and no pool id is given.
    """
    return only_variant(view, name, [v for v in view.by_name(name) if pool_id in {None, v.spec.pool_id}])


def only_variant(view: NamespaceView, name: str, candidates: Sequence[Variant]) -> Variant:
    """Return the one candidate there is for a pool.

    Raises:
        UnknownPool: there is none.
        AmbiguousVariant: there are several.
    """
    if not candidates:
        names = ", ".join(sorted({v.spec.name for v in view.variants.values()}))
        detail = (
            f"nobody registered pool {name!r} (of that id) in namespace {view.namespace_id}; it has {names}"
        )
        raise UnknownPool(detail, [FieldError(f"pools.{name}", "unknown_pool", detail)])
    if len(candidates) > 1:
        ids = ", ".join(v.spec.pool_id for v in candidates)
        detail = (
            f"pool {name!r} has several variants ({ids}): give pools.{name}.pool_id, or in a lookup engine_id"
        )
        raise AmbiguousVariant(detail, [FieldError(f"pools.{name}", "ambiguous_variant", detail)])
    return candidates[0]
