"""The conformance suite: what every object store must do, run against all of them."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dataplane.object_store import (
    ObjectBuffers,
    RegistrationFailed,
    StoreClosed,
    StoreCode,
    UnsafePrefix,
    describe_failures,
)
from tests.dataplane.conftest import StoreUnderTest

ODD_SIZES = [1, 3, 511, 512, 1000, 4095, 4096, 4097, 65_537, 786_240, 1 << 20]


def some_bytes(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8).tobytes()


def finish(processes: list[subprocess.Popen[str]]) -> list[list[int]]:
    """Let waiting processes start at once; return what they print."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    results = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        results.append(json.loads(out.splitlines()[-1]))
    return results


def codes(*values: StoreCode) -> list[int]:
    return [int(v) for v in values]


OK, MISSING, MISMATCH = StoreCode.OK, StoreCode.MISSING, StoreCode.SIZE_MISMATCH


@pytest.mark.parametrize(
    ("addresses", "lengths", "why"),
    [
        (np.zeros(2), np.ones(3), "both be"),
        (np.zeros((2, 2)), np.ones(2), "both be"),
        (np.zeros((1, 1, 1)), np.ones((1, 1, 1)), "both be"),
        (np.zeros(2), np.array([1, -1]), "negative"),
        (np.zeros(2), np.array([1, 0]), "zero bytes"),
        (np.zeros((2, 2)), np.array([[1, 0], [0, 0]]), "zero bytes"),
        (np.zeros((2, 0)), np.zeros((2, 0)), "zero bytes"),
    ],
)
def test_buffers_that_are_none_are_refused(addresses: np.ndarray, lengths: np.ndarray, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ObjectBuffers(addresses.astype(np.uint64), lengths.astype(np.int64))


def test_one_fragment_an_object_is_the_plain_form_however_it_is_given() -> None:
    buffers = ObjectBuffers(np.array([[8], [16]], np.uint64), np.array([[3], [4]]))
    assert not buffers.fragmented
    assert buffers.sizes.tolist() == [3, 4]
    assert buffers.fragments(1) == ([16], [4])


def test_failures_are_described_once_a_code_with_the_first_key_and_what_to_do() -> None:
    text = describe_failures(["a", "b", "c", "d"], np.array([0, 4, 1, 4], np.int8))
    assert text.split("; ") == [
        f"MISSING 1/4 (first c): {StoreCode.MISSING.advice}",
        f"NO_SPACE 2/4 (first b): {StoreCode.NO_SPACE.advice}",
    ]
    assert describe_failures(["a"], np.zeros(1, np.int8)) == ""
    assert all(code.advice for code in StoreCode)


def test_bytes_come_back_as_written_in_all_sizes_and_parts(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    keys = [under_test.key(i, part) for i in range(len(ODD_SIZES)) for part in ("k", "v_0.x")]
    objects = [some_bytes(n, seed) for seed, n in enumerate(n for n in ODD_SIZES for _ in "kv")]
    assert not store.put(keys, arena.holding(objects)).any()
    room = arena.room([len(o) for o in objects])
    assert not store.get(keys, room).any()
    assert arena.bytes_of(room) == objects
    assert not store.confirm(keys, room.sizes).any()


def test_a_missing_object_is_missing_and_its_neighbours_are_read(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    keys = [under_test.key(0), under_test.key(1), under_test.key(2)]
    data = [some_bytes(100, i) for i in range(2)]
    store.put([keys[0], keys[2]], arena.holding(data))
    room = arena.room([100, 100, 100])
    assert store.get(keys, room).tolist() == codes(OK, MISSING, OK)
    assert [arena.bytes_of(room)[i] for i in (0, 2)] == data


def test_a_missing_part_of_a_stored_page_is_missing(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    store.put([under_test.key(0, "k")], arena.holding([b"x" * 100]))
    assert store.get([under_test.key(0, "v")], arena.room([100])).tolist() == codes(MISSING)
    assert store.get([under_test.key(0, "k", shard=1)], arena.room([100])).tolist() == codes(MISSING)


@pytest.mark.parametrize("asked", [1, 999, 1001, 5000])
def test_a_buffer_of_another_size_is_a_mismatch_whichever_way(under_test: StoreUnderTest, asked: int) -> None:
    store, arena = under_test.store, under_test.arena
    keys = [under_test.key(0), under_test.key(1)]
    data = [some_bytes(1000, i) for i in range(2)]
    store.put(keys, arena.holding(data))
    room = arena.room([asked, 1000])
    assert store.get(keys, room).tolist() == codes(MISMATCH, OK)
    assert arena.bytes_of(room)[1] == data[1]


@pytest.mark.parametrize("second", [499, 501])
def test_fragments_of_another_size_in_total_are_a_mismatch(under_test: StoreUnderTest, second: int) -> None:
    store, arena = under_test.store, under_test.arena
    store.put([under_test.key(0)], arena.holding([some_bytes(1000)]))
    room = arena.room([500, second])
    assert store.get([under_test.key(0)], _one_object(room)).tolist() == codes(MISMATCH)


def test_a_get_writes_nothing_outside_its_buffers(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    keys = [under_test.key(0), under_test.key(1)]
    store.put(keys, arena.holding([some_bytes(1000), some_bytes(1000)]))
    around = arena.room([64, 999, 64, 1000, 64])
    store.get(keys, around[np.array([1, 3])])
    guards = arena.bytes_of(around[np.array([0, 2, 4])])
    assert guards == [b"\xee" * 64] * 3


def test_a_second_put_keeps_the_first_bytes(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    keys = [under_test.key(0, "k"), under_test.key(0, "v")]
    first = [some_bytes(700, 1), some_bytes(700, 2)]
    assert not store.put(keys, arena.holding(first)).any()
    assert not store.put(keys, arena.holding([some_bytes(700, 3), some_bytes(700, 4)])).any()
    room = arena.room([700, 700])
    assert not store.get(keys, room).any()
    assert arena.bytes_of(room) == first


def test_a_put_of_another_size_keeps_the_first_and_confirm_tells(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    key, data = under_test.key(0), some_bytes(701, 9)
    store.put([key], arena.holding([some_bytes(700)]))
    assert store.put([key], arena.holding([data])).tolist() in (codes(OK), codes(MISMATCH))
    assert store.confirm([key], np.array([701])).tolist() == codes(MISMATCH)
    assert store.remove([key]) == 1
    assert not store.put([key], arena.holding([data])).any()
    assert store.confirm([key], np.array([701])).tolist() == codes(OK)
    room = arena.room([701])
    assert not store.get([key], room).any()
    assert arena.bytes_of(room) == [data]


def test_confirm_tells_absent_from_present(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    keys = [under_test.key(0), under_test.key(1)]
    store.put(keys[:1], arena.holding([b"a" * 10]))
    assert store.confirm(keys, np.array([10, 10])).tolist() == codes(OK, StoreCode.UNCONFIRMED)


def test_a_key_twice_in_one_put_is_stored_once(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    versions = [b"a" * 50, b"b" * 50]
    assert not store.put([under_test.key(0)] * 2, arena.holding(versions)).any()
    room = arena.room([50])
    assert not store.get([under_test.key(0)], room).any()
    assert arena.bytes_of(room)[0] in versions


def test_processes_that_put_the_same_keys_leave_one_complete_version(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    size, pages = 30_001, 40
    keys = [under_test.key(i, part) for i in range(pages) for part in ("k", "v")]
    writers = [
        under_test.in_process("put_uniform", keys=keys, value=value, size=size) for value in (11, 22, 33)
    ]
    for result in finish(writers):
        assert result == [OK] * len(keys)
    confirmed = store.confirm(keys, np.full(len(keys), size)) == OK
    # Mooncake may answer 0 for a put that met another one and never came to exist (O3).
    assert confirmed.all() or store.kind == "mooncake"
    there = [key for key, yes in zip(keys, confirmed, strict=True) if yes]
    assert len(there) > len(keys) // 2
    room = arena.room([size] * len(there))
    assert not store.get(there, room).any()
    for data in arena.bytes_of(room):
        assert data[:1] in (b"\x0b", b"\x16", b"\x21")
        assert data == data[:1] * size


def test_processes_that_put_different_parts_of_the_same_pages_lose_none(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    # Large parts, one a call: the writers of a page meet while it is being written.
    size, pages = 400_000, 15
    by_part = {part: [under_test.key(i, part) for i in range(pages)] for part in ("k", "v", "s")}
    writers = [
        under_test.in_process("put_uniform", keys=keys, value=ord(part), size=size, step=1)
        for part, keys in by_part.items()
    ]
    assert finish(writers) == [[OK] * pages] * 3
    for part, keys in by_part.items():
        room = arena.room([size] * pages)
        assert not store.get(keys, room).any()
        assert arena.bytes_of(room) == [part.encode() * size] * pages


def test_exists_sizes_and_keys_say_what_is_stored(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    keys = [under_test.key(i, part) for i in range(3) for part in ("k", "v")]
    store.put(keys, arena.holding([b"x" * (i + 1) for i in range(6)]))
    asked = [*keys, under_test.key(3)]
    assert store.exists(asked).tolist() == [True] * 6 + [False]
    assert store.exists(asked, renew=False).tolist() == [True] * 6 + [False]
    assert store.sizes(asked).tolist() == [1, 2, 3, 4, 5, 6, -1]
    assert sorted(store.keys(f"ct1/{under_test.namespace_id}/")) == sorted(keys)
    page = keys[0].rsplit("/", 2)[0]
    assert sorted(store.keys(page)) == sorted(keys[:2])
    assert list(store.keys("ct1/0000000000000000/")) == []


def test_remove_removes_what_it_names_and_counts_what_was_there(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    keys = [under_test.key(i, part) for i in range(2) for part in ("k", "v")]
    data = [some_bytes(300, i) for i in range(4)]
    store.put(keys, arena.holding(data))
    store.get(keys, arena.room([300] * 4))  # now they are leased
    assert store.remove([keys[0], under_test.key(7)]) == 1
    assert store.exists(keys).tolist() == [False, True, True, True]
    room = arena.room([300])
    assert not store.get(keys[1:2], room).any()
    assert arena.bytes_of(room) == data[1:2]
    assert store.remove(keys) == 3
    assert store.remove(keys) == 0
    assert not store.exists(keys).any()


def test_remove_prefix_takes_one_namespace_and_leaves_the_others(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    mine = [under_test.key(i) for i in range(5)]
    # The same namespace id but for its last digit.
    other = under_test.namespace_id[:-1] + ("0" if under_test.namespace_id[-1] != "0" else "1")
    theirs = [key.replace(under_test.namespace_id, other) for key in mine]
    store.put(mine + theirs, arena.holding([b"z" * 20] * 10))
    store.put_bytes(f"ct1/{under_test.namespace_id}/manifest/3f2a91bc", b"manifest")
    assert store.remove_prefix(f"ct1/{under_test.namespace_id}/") == 6
    assert not store.exists(mine).any()
    assert store.exists(theirs).all()
    assert store.remove_prefix(f"ct1/{under_test.namespace_id}/") == 0
    assert store.remove_prefix(f"ct1/{other}/") == 5


@pytest.mark.parametrize(
    "prefix",
    [
        *("", "/", "ct1", "ct1/", "ct1/0123456789abcdef", "ct1/0123456789abcde/", "ct1/0123456789ABCDEF/"),
        *(".*", "ct1/.*/", "ct1/0123456789abcdef/0", "ct1/0123456789abcdef/\n", "xct1/0123456789abcdef/"),
    ],
)
def test_remove_prefix_refuses_anything_but_one_namespace(under_test: StoreUnderTest, prefix: str) -> None:
    store = under_test.store
    store.put([under_test.key(0)], under_test.arena.holding([b"stays"]))
    with pytest.raises(UnsafePrefix):
        store.remove_prefix(prefix)
    assert store.exists([under_test.key(0)]).all()


def test_an_object_removed_or_replaced_behind_the_back_is_never_served(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    keys = [under_test.key(i) for i in range(3)]
    store.put(keys, arena.holding([b"a" * 400] * 3))
    assert not store.get(keys, arena.room([400] * 3)).any()
    other = under_test.another_client()
    assert other.remove(keys[:2]) == 2
    assert finish([under_test.in_process("put_uniform", keys=keys[1:2], value=66, size=401)]) == [[OK]]
    other.close()
    assert store.get(keys, arena.room([400] * 3)).tolist() == codes(MISSING, MISMATCH, OK)
    assert store.sizes(keys).tolist() == [-1, 401, 400]


def _one_object(pieces: ObjectBuffers) -> ObjectBuffers:
    return ObjectBuffers(pieces.addresses[None, :], pieces.lengths[None, :])


def test_an_object_of_several_fragments_is_their_concatenation(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    pieces = [[some_bytes(n, n) for n in sizes] for sizes in ([100, 7, 1000], [1, 4096, 33])]
    addresses, lengths = np.zeros((2, 3), np.uint64), np.zeros((2, 3), np.int64)
    # Fragments of one object lie apart and in any order, as the layers of a layer-first pool may.
    for layer in (1, 2, 0):
        for i in (1, 0):
            held = arena.holding([pieces[i][layer]])
            addresses[i, layer], lengths[i, layer] = held.addresses[0], held.lengths[0]
    keys = [under_test.key(0), under_test.key(1)]
    assert not store.put(keys, ObjectBuffers(addresses, lengths)).any()
    whole = arena.room([1107, 4130])
    assert not store.get(keys, whole).any()
    assert arena.bytes_of(whole) == [b"".join(p) for p in pieces]
    cut = arena.room([500, 607, 4000, 130])
    scattered = ObjectBuffers(cut.addresses.reshape(2, 2), cut.lengths.reshape(2, 2))
    assert not store.get(keys, scattered).any()
    assert arena.bytes_of(scattered) == [b"".join(p) for p in pieces]


def test_padding_fragments_are_ignored(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    held = arena.holding([b"ab", b"cde", b"f"])
    a, n = held.addresses, held.lengths
    padded = ObjectBuffers(
        np.array([[a[0], a[1]], [a[2], 0]], dtype=np.uint64), np.array([[n[0], n[1]], [n[2], 0]])
    )
    keys = [under_test.key(0), under_test.key(1)]
    assert not store.put(keys, padded).any()
    assert store.sizes(keys).tolist() == [5, 1]
    room = arena.room([2, 3, 1])
    into = ObjectBuffers(
        np.array([[room.addresses[0], room.addresses[1]], [room.addresses[2], 0]], dtype=np.uint64),
        padded.lengths,
    )
    assert not store.get(keys, into).any()
    assert arena.bytes_of(into) == [b"abcde", b"f"]


def test_a_batch_of_five_thousand_objects(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    count = 5000
    keys = [under_test.key(i // 2, "kv"[i % 2]) for i in range(count)]
    held = arena.holding([b"%015d" % i for i in range(count)])
    assert not store.put(keys, held).any()
    assert not store.confirm(keys, held.sizes).any()
    assert store.exists(keys).all()
    assert (store.sizes(keys) == 15).all()
    room = arena.room([15] * count)
    assert not store.get(keys, room).any()
    assert arena.bytes_of(room) == [b"%015d" % i for i in range(count)]
    assert len(set(store.keys(f"ct1/{under_test.namespace_id}/"))) == count
    assert store.remove(keys) == count


def test_an_empty_batch_is_no_error(under_test: StoreUnderTest) -> None:
    store = under_test.store
    nothing = ObjectBuffers(np.empty(0, np.uint64), np.empty(0, np.int64))
    for answer in (store.put([], nothing), store.get([], nothing), store.exists([]), store.sizes([])):
        assert answer.shape == (0,)
    assert store.confirm([], np.empty(0, np.int64)).shape == (0,)
    assert store.remove([]) == 0


def test_unregistered_memory_is_refused_and_the_rest_of_the_batch_goes_on(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    foreign = np.full(100, 7, dtype=np.uint8)
    held = arena.holding([b"a" * 100, b"b" * 100])
    addresses = np.array([held.addresses[0], foreign.ctypes.data, held.addresses[1]], np.uint64)
    buffers = ObjectBuffers(addresses, np.full(3, 100))
    keys = [under_test.key(i) for i in range(3)]
    assert store.put(keys, buffers).tolist() == codes(OK, StoreCode.NOT_REGISTERED, OK)
    assert store.exists(keys).tolist() == [True, False, True]
    assert store.get(keys[:1], buffers[1:2]).tolist() == codes(StoreCode.NOT_REGISTERED)
    assert (foreign == 7).all()
    room = arena.room([100])
    assert not store.get(keys[2:], room).any()
    assert arena.bytes_of(room) == [b"b" * 100]


def test_a_buffer_that_leaves_its_region_is_refused(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    end = arena.address + arena.size
    over = ObjectBuffers(np.array([end - 50], np.uint64), np.array([51]))
    exact = ObjectBuffers(np.array([end - 50], np.uint64), np.array([50]))
    before = ObjectBuffers(np.array([arena.address - 1], np.uint64), np.array([50]))
    fragment = ObjectBuffers(np.array([[arena.address, end - 1]], np.uint64), np.array([[5, 2]]))
    for buffers in (over, before, fragment):
        assert store.put([under_test.key(0)], buffers).tolist() == codes(StoreCode.NOT_REGISTERED)
    assert not store.put([under_test.key(0)], exact).any()


def test_registering_twice_or_overlapping_is_refused(under_test: StoreUnderTest) -> None:
    store = under_test.store
    memory = np.zeros(8192, dtype=np.uint8)
    start = int(memory.ctypes.data)
    store.register(start, 4096)
    for address, length in ((start, 4096), (start + 100, 10), (start - 10, 20), (start + 4095, 4097)):
        with pytest.raises(RegistrationFailed, match="overlap"):
            store.register(address, length)
    store.register(start + 4096, 4096)
    store.unregister(start + 4096)
    store.unregister(start)
    with pytest.raises(RegistrationFailed, match="no registered region"):
        store.unregister(start)
    buffers = ObjectBuffers(np.array([start], np.uint64), np.array([10]))
    assert store.put([under_test.key(0)], buffers).tolist() == codes(StoreCode.NOT_REGISTERED)


def test_small_objects_by_value(under_test: StoreUnderTest) -> None:
    store = under_test.store
    keys = [f"ct1/{under_test.namespace_id}/manifest/{i:08x}" for i in range(2)]
    store.put_bytes(keys[0], b'{"a": 1}')
    store.put_bytes(keys[1], b"x" * 70_000)
    store.put_bytes(keys[0], b"another one is not taken")
    assert store.get_bytes(keys[0]) == b'{"a": 1}'
    assert store.get_bytes(keys[1]) == b"x" * 70_000
    assert store.get_bytes(keys[0][:-1] + "9") is None
    assert sorted(store.keys(f"ct1/{under_test.namespace_id}/manifest/")) == sorted(keys)
    assert store.sizes(keys).tolist() == [8, 70_000]
    other = under_test.another_client()
    assert other.get_bytes(keys[0]) == b'{"a": 1}'
    other.close()


def test_groups_are_taken_one_a_key(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    keys = [under_test.key(0), under_test.key(1), under_test.key(2)]
    held = arena.holding([b"1", b"2", b"3"])
    assert not store.put(keys, held, groups=["a", "b", "b"]).any()
    with pytest.raises(ValueError, match="groups"):
        store.put(keys, held, groups=["a"])


def test_keys_and_buffers_must_match_in_number(under_test: StoreUnderTest) -> None:
    store = under_test.store
    held = under_test.arena.holding([b"1", b"2"])
    for call in (store.put, store.get):
        with pytest.raises(ValueError, match="1 keys but 2 buffers"):
            call([under_test.key(0)], held)
    with pytest.raises(ValueError, match="sizes"):
        store.confirm([under_test.key(0)], np.array([1, 2]))


def test_threads_may_use_one_store_at_once(under_test: StoreUnderTest) -> None:
    store, arena = under_test.store, under_test.arena
    count, size = 60, 5000
    held = [arena.holding([some_bytes(size, t * count + i) for i in range(count)]) for t in range(4)]
    rooms = [arena.room([size] * count) for _ in range(4)]

    def work(t: int) -> bool:
        keys = [under_test.key(t * count + i) for i in range(count)]
        return not store.put(keys, held[t]).any() and not store.get(keys, rooms[t]).any()

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    for mine, read in zip(held, rooms, strict=True):
        assert arena.bytes_of(mine) == arena.bytes_of(read)


def test_close_twice_is_fine_and_every_later_call_says_closed(under_test: StoreUnderTest) -> None:
    store = under_test.another_client()
    memory = np.zeros(64, dtype=np.uint8)
    store.register(memory.ctypes.data, 64)
    buffers = ObjectBuffers(np.array([memory.ctypes.data], np.uint64), np.array([64]))
    key = under_test.key(0)
    assert not store.put([key], buffers).any()
    store.close()
    store.close()
    calls = (
        lambda: store.register(memory.ctypes.data, 64),
        lambda: store.unregister(memory.ctypes.data),
        lambda: store.put([key], buffers),
        lambda: store.get([key], buffers),
        lambda: store.confirm([key], np.array([64])),
        lambda: store.exists([key]),
        lambda: store.exists([key], renew=False),
        lambda: store.sizes([key]),
        lambda: list(store.keys("ct1/")),
        lambda: store.remove([key]),
        lambda: store.remove_prefix(f"ct1/{under_test.namespace_id}/"),
        lambda: store.put_bytes(key, b"x"),
        lambda: store.get_bytes(key),
    )
    for call in calls:
        with pytest.raises(StoreClosed, match="closed"):
            call()
    assert under_test.store.exists([key]).all()
