"""Which keys a call asks for: bounded before they are built, and built without asking for a pool id each."""

import hashlib

import pytest

from metadata import key_resolver, object_keys, pools
from metadata.errors import InvalidInput
from metadata.namespace import Namespace
from metadata.pools import Part, PoolSpec
from metadata.registered import NamespaceView, Variant

PARTS = tuple(Part(f"p{i}", "uint8", 1) for i in range(64))
LARGEST = PoolSpec("kv", PARTS, 4096)


def hashes(count: int) -> list[bytes]:
    return [hashlib.sha256(str(i).encode()).digest() for i in range(count)]


def view_of(*specs: PoolSpec) -> NamespaceView:
    identity = Namespace("default", "m", "r", 64, "plain")
    return NamespaceView(identity, {s.pool_id: Variant(s, i, b"") for i, s in enumerate(specs)})


def test_the_largest_pool_works_out_its_id_once_for_all_its_suffixes(monkeypatch):
    """Worked out a suffix, the 262,144 of them held the control plane for 18 s."""
    asked = []
    real = pools._pool_id

    def counting(spec):
        asked.append(spec)
        return real(spec)

    monkeypatch.setattr(pools, "_pool_id", counting)
    assert len(object_keys.suffixes(LARGEST, range(4096))) == 262_144
    assert len(asked) == 1


def test_too_many_keys_are_refused_before_one_is_built(monkeypatch):
    def built(*_):
        raise AssertionError("a suffix was built")

    monkeypatch.setattr(object_keys, "suffixes", built)
    with pytest.raises(InvalidInput, match="too many keys") as caught:
        key_resolver.resolve(view_of(LARGEST), hashes(1), {"kv": (LARGEST.pool_id, None)})
    assert caught.value.errors[0].field == "page_hashes"


def test_as_many_keys_as_one_answer_takes_are_given():
    spec = PoolSpec("kv", PARTS[:2], 4096)
    found = key_resolver.resolve(view_of(spec), hashes(16), None)
    pool_id, keys = found["kv"]
    assert pool_id == spec.pool_id
    assert sum(map(len, keys)) == key_resolver.MAX_KEYS
    with pytest.raises(InvalidInput, match="too many keys"):
        key_resolver.resolve(view_of(spec), hashes(17), None)
