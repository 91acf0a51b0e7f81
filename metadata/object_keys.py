"""The one builder of object keys (scheme `caketin`): page hash, pool, shard and part to key, and back.

    ct1/{namespace id}/{page hash, 64 hex}/{pool id}.{shard}/{part}     one part of one shard of one page
    ct1/{namespace id}/manifest/{pool id}                               what that pool id stands for

Writer, reader, reconciler and resolver all build their keys here, so a key looked up is by construction a
key written. A key says by itself whose bytes it names (I2). A manifest beside the pages says what the two ids
in it mean (I3), so that a store can be understood after Redis lost everything.

The keys of stock SGLang engines, which are only read, are in `sglang_keys`.

Pure: values in, values out.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np

from metadata.codec import PageHashes
from metadata.errors import FieldError, InvalidInput
from metadata.namespace import Namespace
from metadata.page_hash import HASH_BYTES, check_hashes
from metadata.pools import MAX_SHARDS, NAME_PATTERN, Part, PoolSpec, shard_errors

SCHEME: Final = "ct1"

_NAMESPACE_ID: Final = re.compile(r"[0-9a-f]{16}")
_POOL_ID: Final = re.compile(r"[0-9a-f]{8}")
_OBJECT_KEY: Final = re.compile(
    rf"{SCHEME}/([0-9a-f]{{16}})/([0-9a-f]{{64}})/([0-9a-f]{{8}})\.(0|[1-9][0-9]{{0,3}})/({NAME_PATTERN})"
)
_MANIFEST_KEY: Final = re.compile(rf"{SCHEME}/([0-9a-f]{{16}})/manifest/([0-9a-f]{{8}})")
_MANIFEST_FORMAT: Final = "caketin-pool-manifest-v1"
_MAX_MANIFEST_BYTES: Final = 256 << 10
_GROUP_BYTES: Final = 12
"""Bytes of a page hash that name its lease group: 16 base64 characters, of which 15 are used."""
_GROUP_LENGTH: Final = 15


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """What a key of scheme `caketin` names.

    Attributes:
        namespace_id: 16 hex digits.
        page_hash: 32 bytes.
        pool_id: 8 hex digits.
        shard: index of the slice, from 0.
        part: name of the buffer.
    """

    namespace_id: str
    page_hash: bytes
    pool_id: str
    shard: int
    part: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a pool manifest says.

    Attributes:
        namespace: the namespace's identity.
        spec: the pool variant. Its hit policy and `indices_from` are the defaults: they belong to an engine's
            use of the pool, not to its bytes, so engines that share the pool id may differ in them.
    """

    namespace: Namespace
    spec: PoolSpec


def namespace_prefix(namespace_id: str) -> str:
    """Return what every key of the namespace starts with, `ct1/{namespace id}/`.

    Raises:
        InvalidInput: for anything but 16 lower-case hex digits. A shorter prefix would reach other tenants.
    """
    return f"{SCHEME}/{_namespace_id(namespace_id)}/"


def suffixes(spec: PoolSpec, shards: Sequence[int]) -> list[str]:
    """Return what follows the page hash in the keys of some shards, `/{pool id}.{shard}/{part}`.

    Args:
        spec: the pool variant; a logical one has no parts and so no suffixes.
        shards: ascending, without repeats.

    Returns:
        Shards in the given order, within a shard the parts in the order of the engine's buffers.

    Raises:
        InvalidInput: for shards that do not ascend or that the pool does not have.
    """
    errors = shard_errors("shards", shards, spec.shard_count)
    if errors:
        raise InvalidInput(f"pool {spec.name!r} has no such shards", errors)
    pool_id, parts = spec.pool_id, [p.part for p in spec.parts]
    return [f"/{pool_id}.{shard}/{part}" for shard in shards for part in parts]


def object_keys(namespace_id: str, page_hashes: Sequence[bytes], suffixes: Sequence[str]) -> list[list[str]]:
    """Return one list of keys a page, in the order of `suffixes`.

    Raises:
        InvalidInput: for a namespace id or a page hash that is none.
    """
    return join_keys(namespace_prefix(namespace_id), page_hashes, suffixes)


def flat_object_keys(namespace_id: str, page_hashes: Sequence[bytes], suffixes: Sequence[str]) -> list[str]:
    """Return the keys of all pages in one list: key j of page i is at `i * len(suffixes) + j`.

    Raises:
        InvalidInput: for a namespace id or a page hash that is none.
    """
    if len(suffixes) == 1:  # a lookup's leases: one key of each of thousands of pages
        prefix, suffix = namespace_prefix(namespace_id), suffixes[0]
        return [f"{prefix}{digits}{suffix}" for digits in _hex_of(page_hashes)]
    return list(chain.from_iterable(object_keys(namespace_id, page_hashes, suffixes)))


def join_keys(prefix: str, page_hashes: Sequence[bytes], suffixes: Sequence[str]) -> list[list[str]]:
    """Return `{prefix}{64 hex}{suffix}` for every page and suffix: the step both key schemes share.

    Raises:
        InvalidInput: for a page hash that is none, with its index.
    """
    starts = [prefix + digits for digits in _hex_of(page_hashes)]
    return [[start + suffix for suffix in suffixes] for start in starts]


def _hex_of(page_hashes: Sequence[bytes]) -> list[str]:
    if isinstance(page_hashes, PageHashes):  # one run of bytes, checked when it was made
        return page_hashes.to_hex()
    check_hashes(page_hashes)
    return [h.hex() for h in page_hashes]


def parse(key: str) -> ObjectKey:
    """Return what an object key names: the strict inverse of `object_keys`.

    Raises:
        InvalidInput: for anything that `object_keys` cannot have built, manifests included.
    """
    match = _OBJECT_KEY.fullmatch(key)
    if match is None:
        raise _bad_key(key, f"{SCHEME}/{{namespace id}}/{{64 hex}}/{{pool id}}.{{shard}}/{{part}}")
    namespace_id, page_hash, pool_id, shard, part = match.groups()
    if int(shard) >= MAX_SHARDS:
        raise _bad_key(key, f"a shard below {MAX_SHARDS}")
    return ObjectKey(namespace_id, bytes.fromhex(page_hash), pool_id, int(shard), part)


def group_ids(namespace_id: str, page_hashes: Sequence[bytes]) -> list[str]:
    """Return the lease group of each page: all objects of a page live and are evicted together.

    Mooncake's master copies all group names of a batch once for each of its objects, so a long name makes a
    put four times as expensive. Up to 15 characters live inside a C++ string and are copied for next to
    nothing. They carry 90 bits of the page hash, mixed with the namespace; two pages that met in one group
    would be leased together, nothing else.

    Raises:
        InvalidInput: for a namespace id or a page hash that is none.
    """
    mask = np.frombuffer(bytes.fromhex(_namespace_id(namespace_id)).ljust(_GROUP_BYTES, b"\0"), np.uint8)
    raw = PageHashes.of(page_hashes).raw
    heads = np.frombuffer(raw, np.uint8).reshape(-1, HASH_BYTES)[:, :_GROUP_BYTES] ^ mask
    text = base64.urlsafe_b64encode(heads.tobytes()).decode()
    return [text[at : at + _GROUP_LENGTH] for at in range(0, len(text), _GROUP_LENGTH + 1)]


def purge_pattern(namespace_id: str) -> str:
    """Return the regular expression that matches every key of one namespace and no other key.

    Raises:
        InvalidInput: for anything but 16 lower-case hex digits, so that no purge is wider than a namespace.
    """
    return f"^{namespace_prefix(namespace_id)}"


def manifest_key(namespace_id: str, pool_id: str) -> str:
    """Return the key of a pool's manifest.

    Raises:
        InvalidInput: for a namespace id or a pool id that is none.
    """
    if not _POOL_ID.fullmatch(pool_id):
        error = FieldError("pool_id", "bad_id", f"is {pool_id!r}, must be 8 lower-case hex digits")
        raise InvalidInput("not a pool id", [error])
    return f"{namespace_prefix(namespace_id)}manifest/{pool_id}"


def parse_manifest_key(key: str) -> tuple[str, str]:
    """Return the namespace id and the pool id of a manifest's key.

    Raises:
        InvalidInput: for anything that `manifest_key` cannot have built.
    """
    match = _MANIFEST_KEY.fullmatch(key)
    if match is None:
        raise _bad_key(key, f"{SCHEME}/{{namespace id}}/manifest/{{pool id}}")
    return match[1], match[2]


def manifest(namespace: Namespace, spec: PoolSpec) -> bytes:
    """Return the manifest of a pool variant as canonical JSON; holds no secret (I3).

    Every engine that shares the pool id writes the same bytes, so writing it twice is harmless.
    """
    value = {
        "format": _MANIFEST_FORMAT,
        "namespace_id": namespace.namespace_id,
        "namespace": namespace.to_json(),
        "pool_id": spec.pool_id,
        "pool": spec.variant(),
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def parse_manifest(raw: bytes) -> Manifest:
    """Return what a manifest says, after its ids were computed again from its content.

    Compare `namespace.namespace_id` and `spec.pool_id` with the key it was read from: the content proves only
    that it agrees with itself.

    Raises:
        InvalidInput: for bytes that `manifest` cannot have written: damaged, forged, or of another format.
    """
    if len(raw) > _MAX_MANIFEST_BYTES:
        raise _bad_manifest(f"has {len(raw)} bytes, at most {_MAX_MANIFEST_BYTES}")
    try:
        value = json.loads(raw)
        namespace, spec = Namespace.from_json(value["namespace"]), _spec_of(value["pool"])
    except InvalidInput as e:
        raise _bad_manifest("holds an identity that breaks the rules", e.errors) from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise _bad_manifest("is no JSON object with namespace and pool") from e
    for field, computed in (("namespace_id", namespace.namespace_id), ("pool_id", spec.pool_id)):
        if value.get(field) != computed:
            error = FieldError(
                field, "bad_digest", f"is {value.get(field)!r}, the content gives {computed!r}"
            )
            raise _bad_manifest("does not match its digests", [error])
    if manifest(namespace, spec) != raw:
        raise _bad_manifest("is not in canonical form, or of another format")
    return Manifest(namespace, spec)


def _spec_of(variant: dict[str, Any]) -> PoolSpec:
    return PoolSpec(
        name=variant["name"],
        parts=tuple(Part(*part) for part in variant["parts"]),
        shard_count=variant["shard_count"],
        logical=variant["logical"],
        object_layout=variant["object_layout"],
    )


def _namespace_id(value: str) -> str:
    if _NAMESPACE_ID.fullmatch(value):
        return value
    error = FieldError("namespace_id", "bad_id", f"is {value!r}, must be 16 lower-case hex digits")
    raise InvalidInput("not a namespace id", [error])


def _bad_key(key: str, form: str) -> InvalidInput:
    return InvalidInput("not a key of this scheme", [FieldError("key", "bad_key", f"is {key!r}, not {form}")])


def _bad_manifest(detail: str, errors: Iterable[FieldError] = ()) -> InvalidInput:
    return InvalidInput(f"the manifest {detail}", list(errors) or [FieldError("manifest", "damaged", detail)])
