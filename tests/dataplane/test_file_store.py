"""What only the file store must do: survive other hands on its files, keep a bound, share a folder."""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.file_space import EvictedShard, FileSpace, on_disk
from dataplane.file_store import FileStore
from dataplane.object_store import ObjectBuffers, StoreCode, StoreError, StoreUnavailable
from dataplane.page_file import (
    Damaged,
    checksum_of,
    encode_header,
    memory_at,
    read_into,
    read_parts,
    write_all,
)
from tests.dataplane.conftest import POOL, Arena, StoreUnderTest, object_key
from tests.dataplane.test_object_store import OK, codes, finish, some_bytes

BLOCK = 4096


def files_of(root: Path) -> list[Path]:
    return sorted(p for p in (root / "objects").rglob("*") if p.is_file())


def drafts_of(root: Path) -> list[Path]:
    return [p for p in (root / "tmp").rglob("*") if p.is_file()]


def put_pages(case: StoreUnderTest, pages: range, size: int = 3000) -> list[str]:
    keys = [case.key(i, part) for i in pages for part in ("k", "v")]
    buffers = case.arena.holding([some_bytes(size, i) for i in range(len(keys))])
    assert not case.store.put(keys, buffers).any()
    return keys


@pytest.fixture
def bounded(tmp_path: Path, namespace_id: str) -> tuple[StoreUnderTest, list[EvictedShard]]:
    """A store with room for ten pages of two small parts, and what it evicted."""
    evicted: list[EvictedShard] = []
    store = FileStore(
        tmp_path / "bounded", max_bytes=10 * 2 * BLOCK, touch_seconds=0.0, on_evict=evicted.extend
    )
    description = {"kind": "file", "root": str(store.root)}
    return StoreUnderTest(store, description, namespace_id, Arena(store, 8 << 20)), evicted


# One file a page and shard


def test_all_parts_of_a_shard_are_in_one_file(file_under_test: StoreUnderTest) -> None:
    root = file_under_test.store.root
    keys = put_pages(file_under_test, range(3))
    assert len(files_of(root)) == 3
    name = keys[0].split("/")[2]
    assert (
        root / "objects" / file_under_test.namespace_id / name[0] / name[1] / f"{name}.{POOL}.0"
    ).is_file()
    assert drafts_of(root) == []


def test_a_part_that_comes_later_joins_the_file_and_leaves_the_others_alone(
    file_under_test: StoreUnderTest,
) -> None:
    store, arena = file_under_test.store, file_under_test.arena
    keys = [file_under_test.key(0, part) for part in ("k", "v", "s")]
    data = [some_bytes(5000, i) for i in range(3)]
    store.put(keys[:1], arena.holding(data[:1]))
    # The first part comes again with other bytes and keeps the old ones.
    assert not store.put(keys, arena.holding([some_bytes(5000, 9), *data[1:]])).any()
    assert len(files_of(store.root)) == 1
    room = arena.room([5000] * 3)
    assert not store.get(keys, room).any()
    assert arena.bytes_of(room) == data
    assert store.used_bytes() == on_disk(files_of(store.root)[0].stat().st_size)


def test_parts_that_join_a_file_at_once_are_all_kept(file_under_test: StoreUnderTest) -> None:
    store, arena = file_under_test.store, file_under_test.arena
    size, parts = 100_000, [f"p{i}" for i in range(8)]
    held = arena.holding([part.encode() * (size // 2) for part in parts])
    together = threading.Barrier(len(parts))

    def add(i: int) -> list[int]:
        together.wait()
        return [
            int(store.put([file_under_test.key(page, parts[i])], held[i : i + 1])[0]) for page in range(5)
        ]

    store.put([file_under_test.key(page, "first") for page in range(5)], arena.holding([b"1"] * 5))
    with ThreadPoolExecutor(len(parts)) as threads:
        assert list(threads.map(add, range(len(parts)))) == [[OK] * 5] * len(parts)
    for page in range(5):
        room = arena.room([size] * len(parts))
        assert not store.get([file_under_test.key(page, part) for part in parts], room).any()
        assert arena.bytes_of(room) == arena.bytes_of(held)
    assert store.used_bytes() == sum(on_disk(p.stat().st_size) for p in files_of(store.root))


def test_a_put_of_another_size_is_told_at_once(file_under_test: StoreUnderTest) -> None:
    store, arena = file_under_test.store, file_under_test.arena
    keys = [file_under_test.key(0, part) for part in ("k", "v")]
    store.put(keys[:1], arena.holding([b"a" * 10]))
    assert store.put(keys, arena.holding([b"b" * 11, b"c"])).tolist() == codes(StoreCode.SIZE_MISMATCH, OK)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "k",
        "../../etc/passwd",
        "ct1/0123456789abcdef/../x",
        f"ct1/0123456789abcdef/{'0' * 63}/3f2a91bc.0/k",
        f"ct1/0123456789abcdef/{'A' * 64}/3f2a91bc.0/k",
        f"ct1/0123456789abcdef/{'0' * 64}/3f2a91bc.00/k",
        f"ct1/0123456789abcdef/{'0' * 64}/3f2a91bc.0/",
        f"ct1/0123456789abcdef/{'0' * 64}/3f2a91bc.0/..",
        f"ct1/0123456789abcdef/{'0' * 64}/3f2a91bc.0/k\n",
        f"ct1/0123456789abcdef/{'0' * 64}/3f2a91bc.0/{'p' * 65}",
        "sglang-model_abc_k",
    ],
)
def test_what_is_no_object_key_touches_no_file(file_under_test: StoreUnderTest, key: str) -> None:
    store, arena = file_under_test.store, file_under_test.arena
    good = file_under_test.key(0)
    held = arena.holding([b"x", b"y"])
    assert store.put([key, good], held).tolist() == codes(StoreCode.INVALID, OK)
    assert len(files_of(store.root)) == 1
    assert store.get([key], held[:1]).tolist() == codes(StoreCode.INVALID)
    assert store.sizes([key]).tolist() == [-1]
    assert store.remove([key]) == 0
    with pytest.raises(StoreError, match="was not stored"):
        store.put_bytes(key, b"x")


def test_an_object_of_thousands_of_fragments(file_under_test: StoreUnderTest) -> None:
    store, arena = file_under_test.store, file_under_test.arena
    pieces = [some_bytes(1 + i % 7, i) for i in range(3000)]
    held = arena.holding(pieces)
    one = ObjectBuffers(held.addresses[None, :], held.lengths[None, :])
    assert not store.put([file_under_test.key(0)], one).any()
    room = arena.room([len(p) for p in pieces])
    assert not store.get(
        [file_under_test.key(0)], ObjectBuffers(room.addresses[None, :], room.lengths[None, :])
    ).any()
    assert arena.bytes_of(room) == pieces


def test_fsync_is_an_option(tmp_path: Path, namespace_id: str) -> None:
    store = FileStore(tmp_path / "store", fsync=True)
    arena = Arena(store, 1 << 16)
    key = object_key(namespace_id, 0)
    assert not store.put([key], arena.holding([b"durable"])).any()
    room = arena.room([7])
    assert not store.get([key], room).any()
    assert arena.bytes_of(room) == [b"durable"]
    store.close()


# Other hands on the files


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _lengthen(path: Path) -> None:
    with path.open("ab") as f:
        f.write(b"x")


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _cut_in_header(path: Path) -> None:
    os.truncate(path, 20)


def _flip_in_table(path: Path) -> None:
    _flip(path, 40)


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def _garbage(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


HANDS = [_truncate, _lengthen, _empty, _cut_in_header, _flip_in_table, _garbage]


@pytest.mark.parametrize("hand", HANDS)
def test_a_damaged_file_is_never_served_and_a_put_replaces_it(
    file_under_test: StoreUnderTest, hand: object
) -> None:
    store, arena = file_under_test.store, file_under_test.arena
    keys = put_pages(file_under_test, range(2))
    (path,) = [p for p in files_of(store.root) if keys[0].split("/")[2] in p.name]
    hand(path)
    room = arena.room([3000] * 4)
    assert store.get(keys, room).tolist() == codes(StoreCode.CHECKSUM, StoreCode.CHECKSUM, OK, OK)
    assert store.exists(keys).tolist() == [False, False, True, True]
    assert store.sizes(keys).tolist() == [-1, -1, 3000, 3000]
    assert sorted(store.keys("ct1/")) == sorted(keys[2:])
    again = [some_bytes(3000, 77)]
    assert not store.put(keys[:1], arena.holding(again)).any()
    room = arena.room([3000])
    assert not store.get(keys[:1], room).any()
    assert arena.bytes_of(room) == again


@pytest.mark.parametrize("part", [0, 1])
def test_a_flipped_bit_is_found_in_the_part_that_has_it(file_under_test: StoreUnderTest, part: int) -> None:
    store, arena = file_under_test.store, file_under_test.arena
    keys = put_pages(file_under_test, range(1))
    (path,) = files_of(store.root)
    _flip(path, path.stat().st_size - (3000 * (2 - part)))  # its first byte
    got = store.get(keys, arena.room([3000] * 2)).tolist()
    assert got == (codes(StoreCode.CHECKSUM, OK) if part == 0 else codes(OK, StoreCode.CHECKSUM))
    assert store.remove([keys[part]]) == 1
    assert not store.put(keys, arena.holding([some_bytes(3000, 5)] * 2)).any()
    assert not store.get(keys, arena.room([3000] * 2)).any()


def test_a_file_under_another_pages_name_is_not_that_page(file_under_test: StoreUnderTest) -> None:
    store, arena = file_under_test.store, file_under_test.arena
    keys = put_pages(file_under_test, range(2))
    paths = {p.name.split(".")[0]: p for p in files_of(store.root)}
    first, second = (paths[keys[i].split("/")[2]] for i in (0, 2))
    shutil.copyfile(first, second)
    assert store.get(keys, arena.room([3000] * 4)).tolist() == codes(OK, OK, *[StoreCode.CHECKSUM] * 2)
    assert not store.exists(keys[2:]).any()


def test_a_deleted_file_is_missing(file_under_test: StoreUnderTest) -> None:
    store, arena = file_under_test.store, file_under_test.arena
    keys = put_pages(file_under_test, range(2))
    (path,) = [p for p in files_of(store.root) if keys[0].split("/")[2] in p.name]
    path.unlink()
    expected = codes(StoreCode.MISSING, StoreCode.MISSING, OK, OK)
    assert store.get(keys, arena.room([3000] * 4)).tolist() == expected


def test_a_small_object_with_a_flipped_bit_raises(file_under_test: StoreUnderTest) -> None:
    store = file_under_test.store
    key = f"ct1/{file_under_test.namespace_id}/manifest/{POOL}"
    store.put_bytes(key, b"manifest")
    (path,) = files_of(store.root)
    _flip(path, path.stat().st_size - 1)
    with pytest.raises(StoreError, match="damaged"):
        store.get_bytes(key)


def test_removing_from_a_damaged_file_removes_it(file_under_test: StoreUnderTest) -> None:
    store = file_under_test.store
    keys = put_pages(file_under_test, range(1))
    _truncate(files_of(store.root)[0])
    assert store.remove(keys[:1]) == 1
    assert files_of(store.root) == []
    assert store.used_bytes() == 0


# The folder


@pytest.mark.parametrize("marker", [b"caketin file store, format 2\n", b"", b"something else"])
def test_a_folder_of_another_format_is_refused_and_left_alone(tmp_path: Path, marker: bytes) -> None:
    (tmp_path / "FORMAT").write_bytes(marker)
    with pytest.raises(StoreUnavailable, match="another format"):
        FileStore(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["FORMAT"]


def test_a_folder_that_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(StoreUnavailable, match="thesis"):
        FileStore(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        FileStore(tmp_path / "file")


def test_a_store_opened_again_has_its_objects(tmp_path: Path, namespace_id: str) -> None:
    for turn in range(2):
        store = FileStore(tmp_path / "store")
        arena = Arena(store, 1 << 16)
        case = StoreUnderTest(store, {}, namespace_id, arena)
        keys = put_pages(case, range(2)) if turn == 0 else [case.key(i, p) for i in range(2) for p in "kv"]
        assert store.exists(keys).all()
        store.close()
    assert list((tmp_path / "store" / "tmp").iterdir()) == []


def test_unfinished_files_of_a_killed_process_go_and_those_of_the_living_stay(
    file_under_test: StoreUnderTest,
) -> None:
    root = file_under_test.store.root
    killed = file_under_test.in_process("put_for_ever", namespace_id="f" * 16, value=1, size=100_000)
    killed.stdin.write("\n")
    killed.stdin.flush()
    while len(files_of(root)) < 20:
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    folders = set((root / "tmp").iterdir())
    assert len(folders) == 2
    (dead,) = [f for f in folders if f.name != Path(file_under_test.store._workspace.path).name]
    (dead / "1-1").write_bytes(b"half a page")
    other = file_under_test.another_client()
    left = set((root / "tmp").iterdir())
    assert dead not in left
    assert len(left) == 2
    other.close()
    put_pages(file_under_test, range(1))


def test_a_writer_killed_at_any_moment_leaves_only_whole_objects(file_under_test: StoreUnderTest) -> None:
    store, arena = file_under_test.store, file_under_test.arena
    size = 50_000
    for turn in range(2):
        namespace_id = f"{turn:016x}"
        writer = file_under_test.in_process("put_for_ever", namespace_id=namespace_id, value=7, size=size)
        writer.stdin.write("\n")
        writer.stdin.flush()
        while not list(store.keys(f"ct1/{namespace_id}/")):
            time.sleep(0.005)
        time.sleep(0.05 * turn)
        writer.kill()
        writer.communicate()
        keys = list(store.keys(f"ct1/{namespace_id}/"))[:100]
        arena.used = 0
        room = arena.room([size] * len(keys))
        assert not store.get(keys, room).any()
        assert set(arena.bytes_of(room)) == {b"\x07" * size}


# The size bound


def test_the_pages_used_longest_ago_are_evicted_and_reported(
    bounded: tuple[StoreUnderTest, list[EvictedShard]],
) -> None:
    case, evicted = bounded
    store, arena = case.store, case.arena
    for i in range(10):
        put_pages(case, range(i, i + 1))
        time.sleep(0.005)  # file times tick
    assert evicted == []
    read, seen = [case.key(0, "k")], [case.key(2, "v")]
    assert not store.get(read, arena.room([3000])).any()
    assert store.exists(seen).all()
    put_pages(case, range(10, 11))
    gone = [i for i in range(11) if not store.exists([case.key(i)], renew=False).all()]
    assert gone == [1, 3]  # one for the page, one more to have some room left
    hashes = {
        EvictedShard(case.namespace_id, bytes.fromhex(case.key(i).split("/")[2]), POOL, 0) for i in gone
    }
    assert set(evicted) == hashes
    assert len(evicted) == len(gone)


def test_a_look_that_renews_nothing_protects_nothing(
    bounded: tuple[StoreUnderTest, list[EvictedShard]],
) -> None:
    case, _ = bounded
    for i in range(10):
        put_pages(case, range(i, i + 1))
        time.sleep(0.005)
    keys = [case.key(i) for i in range(10)]
    case.store.exists(keys[:1], renew=False)
    case.store.sizes(keys[:1])
    list(case.store.keys("ct1/"))
    put_pages(case, range(10, 11))
    assert not case.store.exists(keys[:1], renew=False).any()


def test_the_bound_holds_while_many_pages_pass(bounded: tuple[StoreUnderTest, list[EvictedShard]]) -> None:
    case, evicted = bounded
    for i in range(60):
        put_pages(case, range(i, i + 1))
        on_the_disk = sum(on_disk(p.stat().st_size) for p in files_of(case.store.root))
        assert on_the_disk <= 20 * BLOCK
        assert case.store.used_bytes() == on_the_disk
    assert len(evicted) + len(files_of(case.store.root)) == 60


def test_one_batch_larger_than_the_bound_stores_what_fits(
    bounded: tuple[StoreUnderTest, list[EvictedShard]],
) -> None:
    case, _ = bounded
    keys = put_pages(case, range(25))
    assert sum(on_disk(p.stat().st_size) for p in files_of(case.store.root)) <= 20 * BLOCK
    assert case.store.exists(keys[-2:]).all()


def test_an_object_larger_than_the_bound_has_no_space_and_evicts_nothing(
    bounded: tuple[StoreUnderTest, list[EvictedShard]],
) -> None:
    case, evicted = bounded
    keys = put_pages(case, range(3))
    held = case.arena.holding([b"x" * (21 * BLOCK), b"y"])
    big = [case.key(90), case.key(91)]
    assert case.store.put(big, held).tolist() == codes(StoreCode.NO_SPACE, OK)
    assert case.store.exists([*keys, *big]).tolist() == [True] * 6 + [False, True]
    assert evicted == []
    with pytest.raises(StoreError, match="full"):
        case.store.put_bytes(case.key(92), b"x" * (21 * BLOCK))


def test_manifests_are_never_evicted(bounded: tuple[StoreUnderTest, list[EvictedShard]]) -> None:
    case, _ = bounded
    key = f"ct1/{case.namespace_id}/manifest/{POOL}"
    case.store.put_bytes(key, b"manifest")
    for i in range(30):
        put_pages(case, range(i, i + 1))
    assert case.store.get_bytes(key) == b"manifest"


def test_processes_that_share_a_folder_share_its_bound(tmp_path: Path) -> None:
    bound = 30 * 2 * BLOCK
    store = FileStore(tmp_path / "store", max_bytes=bound)
    description = {"kind": "file", "root": str(store.root), "max_bytes": bound}
    case = StoreUnderTest(store, description, "a" * 16, Arena(store, 1 << 16))
    writers = [
        case.in_process("put_uniform", keys=[case.key(100 * w + i) for i in range(100)], value=w, size=5000)
        for w in range(3)
    ]
    assert finish(writers) == [[OK] * 100] * 3
    on_the_disk = sum(on_disk(p.stat().st_size) for p in files_of(store.root))
    assert 0 < on_the_disk <= bound
    assert abs(store.used_bytes() - on_the_disk) <= bound // 4  # exact again at the next eviction
    store.close()


def test_processes_that_write_at_once_keep_the_count_exact(file_under_test: StoreUnderTest) -> None:
    writers = [
        file_under_test.in_process(
            "put_uniform",
            keys=[file_under_test.key(1000 * w + i) for i in range(300)],
            value=w,
            size=10,
            step=1,
        )
        for w in range(3)
    ]
    assert finish(writers) == [[OK] * 300] * 3
    assert file_under_test.store.used_bytes() == 900 * BLOCK


def test_a_failing_listener_does_not_fail_the_put(tmp_path: Path, namespace_id: str) -> None:
    def listener(_evicted: object) -> None:
        raise RuntimeError("the index is away")

    store = FileStore(tmp_path / "store", max_bytes=4 * BLOCK, on_evict=listener)
    case = StoreUnderTest(store, {}, namespace_id, Arena(store, 1 << 20))
    for i in range(10):
        put_pages(case, range(i, i + 1))
    store.close()


def test_a_count_left_wrong_by_a_killed_process_is_put_right(
    bounded: tuple[StoreUnderTest, list[EvictedShard]],
) -> None:
    case, evicted = bounded
    keys = put_pages(case, range(2))
    space = FileSpace(case.store.root, None, None)
    assert space.reserve(15 * BLOCK)  # as a process that dies before it writes
    put_pages(case, range(2, 4))
    assert case.store.exists(keys).all()
    assert evicted == []
    assert case.store.used_bytes() == 4 * 2 * BLOCK


def test_a_lost_count_is_counted_again(file_under_test: StoreUnderTest) -> None:
    put_pages(file_under_test, range(3))
    root = file_under_test.store.root
    (root / "used-bytes").unlink()
    other = file_under_test.another_client()
    assert other.used_bytes() == 3 * 2 * BLOCK
    other.close()


def test_what_is_removed_no_longer_counts(file_under_test: StoreUnderTest) -> None:
    store = file_under_test.store
    keys = put_pages(file_under_test, range(4))
    assert store.used_bytes() == 4 * 2 * BLOCK
    store.remove(keys[:2])
    assert store.used_bytes() == 3 * 2 * BLOCK
    store.remove(keys[2:3])
    assert store.used_bytes() == (2 * 2 + 1) * BLOCK
    store.remove_prefix(f"ct1/{file_under_test.namespace_id}/")
    assert store.used_bytes() == 0


def test_a_full_disk_is_no_space_and_leaves_nothing_half_written(file_under_test: StoreUnderTest) -> None:
    store, root, arena = file_under_test.store, file_under_test.store.root, file_under_test.arena
    kept = put_pages(file_under_test, range(1))
    held = arena.holding([b"a" * (6 << 20), b"b" * (6 << 20), b"c" * 10])
    keys = [file_under_test.key(1), file_under_test.key(0, "s"), file_under_test.key(2)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Writes stop in the middle of a file, as they do on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, hard))
    try:
        full = StoreCode.NO_SPACE
        assert store.put(keys, held).tolist() == codes(full, full, OK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert drafts_of(root) == []
    assert store.exists([*keys, *kept]).tolist() == [False, False, True, True, True]
    assert len(files_of(root)) == 2
    assert store.used_bytes() == 3 * BLOCK
    assert not store.get(kept, arena.room([3000] * 2)).any()
    assert not store.put(keys, held).any()


# The format of a file


part_names = st.text("abcXYZ019_.-", min_size=1, max_size=64)


@given(st.dictionaries(part_names, st.binary(min_size=1, max_size=3000), max_size=20), st.integers(1, 700))
def test_a_page_file_gives_back_what_went_in(parts: dict[str, bytes], step: int) -> None:
    fd = os.memfd_create("page")
    arrays = {name: np.frombuffer(data, np.uint8) for name, data in parts.items()}
    memory = {name: _cut(array, step) for name, array in arrays.items()}
    table = [(name, len(parts[name]), checksum_of(pieces)) for name, pieces in memory.items()]
    write_all(fd, [encode_header("ct1/x/y", table), *(p for pieces in memory.values() for p in pieces)])
    held = read_parts(fd, "ct1/x/y")
    assert list(held) == list(parts)
    for name, data in parts.items():
        into = np.zeros(len(data), np.uint8)
        assert read_into(fd, held[name], _cut(into, step + 1))
        assert into.tobytes() == data
    with pytest.raises(Damaged):
        read_parts(fd, "ct1/x/z")
    os.close(fd)


def _cut(array: np.ndarray, step: int) -> list:
    starts = range(0, len(array), step)
    return memory_at(
        [int(array.ctypes.data) + at for at in starts], [min(step, len(array) - at) for at in starts]
    )


@given(st.binary(max_size=300))
def test_no_bytes_whatever_crash_the_reader(raw: bytes) -> None:
    fd = os.memfd_create("page")
    os.write(fd, raw)
    with pytest.raises(Damaged):
        read_parts(fd, "ct1/x/y")
    os.close(fd)
