"""Object keys of stock SGLang engines (scheme `sglang`), for reading what they wrote through Mooncake.

The rule, read from SGLang 0.5.23's Mooncake backend and checked against vectors of its own key builder:

    [tag_][model with / as -_]{page hash}_{rank}_{object}

*rank* depends on whether every TP rank holds other bytes or all hold the same:

    sharded by rank    `{tp_rank}`, with pipeline stages `{tp_rank}_{pp_rank}`
    replicated         empty (so `__` stands before the object), with pipeline stages `{pp_rank}`

*objects* depend on the pool; `stem` is empty for `kv` and `{pool}_` for any other:

    MHA kv, draft, swa, draft_swa     sharded       `{stem}k`, `{stem}v`
    MLA kv, draft                     replicated    `{stem}k`
    mamba                             sharded       `temporal` (if it has bytes), `conv_0`, `conv_1`, ...
    MLA swa, draft_swa, all others    replicated    `{pool}`: one object, packed page by page

MHA or MLA is the engine's attention, save that a draft pool goes by its own: an MHA draft on an MLA engine is
sharded. "All others" (indexer, the DeepSeek V4 pools) are packed on an MHA engine as well.

Neither dtype nor width nor TP size is in these keys (I2): a read of another length than the layout's is all
that tells two engines apart. Without the layout they cannot be parsed. Not covered, because they are other
keys: decode context parallelism, `tp_lcm_size` (heads split over objects), the direct linker, and the
`unified` key scheme.

Pure: values in, values out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, get_args

from metadata.errors import FieldError, InvalidInput, UnknownPool
from metadata.object_keys import join_keys
from metadata.page_hash import HEX_DIGITS
from metadata.pools import ANCHOR, MAX_PARTS, MAX_SHARDS, name_error, range_error, shard_errors

Attention = Literal["mha", "mla"]
ATTENTIONS: Final[tuple[str, ...]] = get_args(Attention)

# The pools that SGLang's own backend treats apart by name; any other pool is one packed object a page.
_STATE_POOL: Final = "mamba"
_LATENT_POOLS: Final = (ANCHOR, "draft")
_PAIR_POOLS: Final = (ANCHOR, "swa", "draft", "draft_swa")
_OWN_ATTENTION_POOLS: Final = ("draft", "draft_swa")

_PAGE: Final = re.compile(rf"[0-9a-f]{{{HEX_DIGITS}}}")
# Object names start with a letter and ranks hold none: a suffix falls apart in one way only.
_SUFFIX: Final = re.compile(r"_((?:[0-9]{1,4}(?:_[0-9]{1,4})?)?)_([A-Za-z][A-Za-z0-9_.-]*)")


@dataclass(frozen=True, slots=True)
class SglangPool:
    """A pool of a stock engine, as far as its keys depend on it.

    Attributes:
        name: SGLang's name of the pool.
        attention: `mha` or `mla` of a draft pool's own model; None means the engine's.
        conv_states: number of convolution states of a Mamba pool; 0 for any other pool.
        temporal: whether a Mamba pool has a temporal state; a conv-only model's has no bytes and no object.
    """

    name: str
    attention: str | None = None
    conv_states: int = 0
    temporal: bool = True


@dataclass(frozen=True, slots=True)
class SglangKey:
    """What a key of scheme `sglang` names, given the layout it was built with.

    Attributes:
        page_hash: 32 bytes.
        pool: SGLang's name of the pool.
        shard: `pp_rank * tp_size + tp_rank` of a pool that is sharded by rank, else `pp_rank`.
        part: `k`, `v`, `temporal`, `conv_0`, ...; `page` for a packed pool.
    """

    page_hash: bytes
    pool: str
    shard: int
    part: str


@dataclass(frozen=True, slots=True)
class SglangLayout:
    """One rank of a stock SGLang engine: all that its keys depend on.

    Attributes:
        model: model name as SGLang's storage config has it; None or empty leaves it out of the keys.
        extra_backend_tag: the tag of `--hicache-storage-backend-extra-config`; None leaves it out.
        tp_rank: rank within the attention TP group.
        tp_size: size of the attention TP group.
        pp_rank: pipeline stage.
        pp_size: number of pipeline stages.
        attention: `mla` where SGLang treats the main pool as replicated (MLA, DeepSeek V4), else `mha`.
        pools: the pools that the engine registered.
    """

    model: str | None
    extra_backend_tag: str | None = None
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attention: str = "mha"
    pools: tuple[SglangPool, ...] = (SglangPool(ANCHOR),)

    def __post_init__(self) -> None:
        errors = _layout_errors(self)
        if errors:
            raise InvalidInput("the SGLang layout cannot be used", errors)
        _pools_of_objects(self)

    @property
    def key_prefix(self) -> str:
        """What every key starts with: `[tag_][model_]`."""
        named = [] if self.extra_backend_tag is None else [self.extra_backend_tag]
        if self.model:
            named.append(self.model.replace("/", "-"))
        # An empty tag alone leaves no mark, before a model it leaves its underscore: so does SGLang's.
        return "_".join(named) + "_" if named else ""

    def shard_count(self, pool: str) -> int:
        """Return the number of independent slices of a page of the pool, over all ranks.

        Raises:
            UnknownPool: for a pool the layout does not list.
        """
        return self.pp_size * (self.tp_size if _is_sharded(self, self._pool(pool)) else 1)

    def own_shard(self, pool: str) -> int:
        """Return the slice that this rank holds.

        Raises:
            UnknownPool: for a pool the layout does not list.
        """
        if _is_sharded(self, self._pool(pool)):
            return self.pp_rank * self.tp_size + self.tp_rank
        return self.pp_rank

    def suffixes(self, pool: str, shards: Sequence[int] | None = None) -> list[str]:
        """Return what follows the page hash in the pool's keys.

        Args:
            pool: SGLang's name of the pool.
            shards: ascending; None means this rank's own.

        Returns:
            Shards in the given order, within a shard the parts in the order of the engine's buffers.

        Raises:
            UnknownPool: for a pool the layout does not list.
            InvalidInput: for shards that do not ascend or that the pool does not have.
        """
        if shards is None:
            shards = [self.own_shard(pool)]
        errors = shard_errors("shards", shards, self.shard_count(pool))
        if errors:
            raise InvalidInput(f"pool {pool!r} has no such shards", errors)
        chosen = self._pool(pool)
        names = [name for name, _ in _objects(self, chosen)]
        return [f"_{_rank(self, chosen, shard)}_{name}" for shard in shards for name in names]

    def object_keys(
        self, pool: str, page_hashes: Sequence[bytes], shards: Sequence[int] | None = None
    ) -> list[list[str]]:
        """Return one list of keys a page, each in the order of `suffixes`.

        Raises:
            UnknownPool: for a pool the layout does not list.
            InvalidInput: for shards that the pool does not have or a page hash that is none.
        """
        return join_keys(self.key_prefix, page_hashes, self.suffixes(pool, shards))

    def parse(self, key: str) -> SglangKey:
        """Return what a key names, of any rank of this engine.

        Raises:
            InvalidInput: for a key that no rank of an engine with this layout writes.
        """
        start = len(self.key_prefix)
        page, suffix = key[start : start + HEX_DIGITS], _SUFFIX.fullmatch(key, start + HEX_DIGITS)
        if key.startswith(self.key_prefix) and _PAGE.fullmatch(page) and suffix is not None:
            rank, name = suffix.groups()
            pool, part = _pools_of_objects(self).get(name, (None, ""))
            shard = None if pool is None else _shard_of(self, pool, rank)
            if pool is not None and shard is not None:
                return SglangKey(bytes.fromhex(page), pool.name, shard, part)
        detail = f"is {key!r}, which no rank of this layout writes"
        raise InvalidInput("not a key of this layout", [FieldError("key", "bad_key", detail)])

    def _pool(self, name: str) -> SglangPool:
        for pool in self.pools:
            if pool.name == name:
                return pool
        listed = ", ".join(p.name for p in self.pools)
        raise UnknownPool(f"the layout has no pool {name!r}, only {listed}")


def _attention(layout: SglangLayout, pool: SglangPool) -> str:
    return pool.attention or layout.attention


def _is_sharded(layout: SglangLayout, pool: SglangPool) -> bool:
    if pool.name == _STATE_POOL:
        return True
    return pool.name in _PAIR_POOLS and _attention(layout, pool) == "mha"


def _objects(layout: SglangLayout, pool: SglangPool) -> list[tuple[str, str]]:
    """Return (name in the key, part) of each object of one shard of a page."""
    if pool.name == _STATE_POOL:
        parts = ["temporal"] if pool.temporal else []
        parts += [f"conv_{i}" for i in range(pool.conv_states)]
        return [(part, part) for part in parts]
    stem = "" if pool.name == ANCHOR else f"{pool.name}_"
    if _is_sharded(layout, pool):
        return [(f"{stem}k", "k"), (f"{stem}v", "v")]
    if pool.name in _LATENT_POOLS:
        return [(f"{stem}k", "k")]
    return [(pool.name, "page")]


def _rank(layout: SglangLayout, pool: SglangPool, shard: int) -> str:
    if not _is_sharded(layout, pool):
        return f"{shard}" if layout.pp_size > 1 else ""
    pp_rank, tp_rank = divmod(shard, layout.tp_size)
    return f"{tp_rank}_{pp_rank}" if layout.pp_size > 1 else f"{tp_rank}"


def _shard_of(layout: SglangLayout, pool: SglangPool, rank: str) -> int | None:
    """Return the shard that `_rank` writes as `rank`, or None if there is none."""
    numbers = [int(number) for number in rank.split("_") if number] + [0, 0]
    shard = numbers[1] * layout.tp_size + numbers[0]
    exists = shard < layout.shard_count(pool.name) and _rank(layout, pool, shard) == rank
    return shard if exists else None


@lru_cache(maxsize=64)
def _pools_of_objects(layout: SglangLayout) -> dict[str, tuple[SglangPool, str]]:
    """Return object name -> (pool, part); no two objects of a layout may share a name."""
    found: dict[str, tuple[SglangPool, str]] = {}
    for i, pool in enumerate(layout.pools):
        for name, part in _objects(layout, pool):
            if name in found:
                detail = f"{pool.name!r} and {found[name][0].name!r} would both write objects named {name!r}"
                error = FieldError(f"pools[{i}].name", "ambiguous", detail)
                raise InvalidInput("the SGLang layout cannot be used", [error])
            found[name] = (pool, part)
    return found


def _layout_errors(layout: SglangLayout) -> list[FieldError]:
    errors: list[FieldError] = []
    for axis in ("tp", "pp"):
        size: int = getattr(layout, f"{axis}_size")
        size_errors = range_error(f"{axis}_size", size, 1, MAX_SHARDS)
        rank: int = getattr(layout, f"{axis}_rank")
        errors += size_errors or range_error(f"{axis}_rank", rank, 0, size - 1)
    if not errors and layout.tp_size * layout.pp_size > MAX_SHARDS:
        detail = f"tp_size * pp_size is {layout.tp_size * layout.pp_size}, must be at most {MAX_SHARDS}"
        errors.append(FieldError("pp_size", "out_of_range", detail))
    errors += _attention_error("attention", layout.attention)
    for i, pool in enumerate(layout.pools):
        errors += [e.under(f"pools[{i}]") for e in _pool_errors(pool)]
    return errors


def _pool_errors(pool: SglangPool) -> list[FieldError]:
    errors = name_error("name", pool.name)
    if not errors and not pool.name[0].isalpha():
        errors.append(FieldError("name", "bad_name", f"is {pool.name!r}, SGLang's names start with a letter"))
    if pool.attention is not None:
        errors += _attention_error("attention", pool.attention)
        if pool.name not in _OWN_ATTENTION_POOLS:
            detail = "only a draft pool has an attention kind of its own; leave it null"
            errors.append(FieldError("attention", "not_draft", detail))
    if pool.name == _STATE_POOL:
        return errors + range_error("conv_states", pool.conv_states, 0 if pool.temporal else 1, MAX_PARTS - 1)
    return errors + range_error("conv_states", pool.conv_states, 0, 0)


def _attention_error(field: str, value: str) -> list[FieldError]:
    if value in ATTENTIONS:
        return []
    return [FieldError(field, "unknown", f"is {value!r}, use one of {', '.join(ATTENTIONS)}")]
