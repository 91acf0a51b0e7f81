"""What a prefetch reads: with what is resident it makes the promised length, and not a page is missed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.agent_files import FolderUnusable, SharedFolder
from dataplane.agent_plan import listed_slots, part_of, plan_read, shorter_length
from dataplane.agent_pools import PoolShape
from dataplane.agent_threads import TransferRoom, in_thread
from dataplane.host_memory import OutOfHostMemory
from dataplane.messages.control import LookupResult
from dataplane.prefetch import _promised_lengths
from dataplane.transfer import NO_SLOT
from metadata.hit_policy import restorable
from metadata.pools import AllPages, BlockGroups, Part, PoolSpec, RankPool, TrailingPages

POLICIES = {"kv": AllPages(), "c4": AllPages(), "swa": TrailingPages(3), "mamba": TrailingPages(1)}


def promised(lengths: list[int], pages: int) -> LookupResult:
    runs = [(n, n) for n in lengths]
    hit = lengths[-1]
    return LookupResult(
        queried_pages=pages,
        hit_pages=hit,
        hit_tokens=hit,
        restorable=runs,
        pools=dict.fromkeys(POLICIES, hit),
        generation=bytes(range(pages)),
        advisory=False,
        degraded=False,
        unchecked_window_pages=0,
        miss=None,
    )


@st.composite
def cases(draw: st.DrawFn):
    pages = draw(st.integers(1, 12))
    there = {n: draw(st.lists(st.booleans(), min_size=pages, max_size=pages)) for n in POLICIES}
    slots = {n: np.where(row, np.arange(pages), NO_SLOT).astype(np.int64) for n, row in there.items()}
    lengths = sorted(draw(st.sets(st.integers(1, pages), min_size=1)))
    return pages, slots, promised(lengths, pages), draw(st.sampled_from(lengths)), draw(st.integers(0, 4))


@settings(max_examples=300, deadline=None)
@given(cases())
def test_what_is_resident_and_what_is_read_make_the_promised_length(case):
    _pages, slots, promise, length, spare = case
    plan = plan_read(promise, slots, POLICIES, length=length, spare={"swa": spare})
    presence = {n: at[:length] != NO_SLOT for n, at in slots.items()}
    if plan is None:
        assert restorable(presence, POLICIES).hit_pages == length
        return
    assert (plan.stop, plan.promise.hit_pages) == (length, length - plan.start)
    assert _promised_lengths(plan.promise, plan.stop - plan.start)[-1]
    assert plan.promise.generation == bytes(range(plan.start, length))
    for name, mask in plan.masks.items():
        presence[name][plan.start :] |= mask
    assert restorable(presence, POLICIES).hit_pages == length
    # Not a page more than needed: what starts earlier does so for a window that is not resident.
    run = min(int(np.argmin(np.append(slots[n][:length] != NO_SLOT, False))) for n in ("kv", "c4"))
    assert plan.start <= run
    if plan.start < run:
        windows = {n: p.window_pages for n, p in POLICIES.items() if isinstance(p, TrailingPages)}
        assert any(
            (slots[n][max(0, length - w) : run] == NO_SLOT).any() and plan.start == max(0, length - w)
            for n, w in windows.items()
        )


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(1, 20), min_size=1), st.data())
def test_a_part_of_a_promise_promises_the_same_lengths(lengths, data):
    promise = promised(sorted(lengths), 20)
    stop = data.draw(st.sampled_from(sorted(lengths)))
    start = data.draw(st.integers(0, stop - 1))
    part = part_of(promise, start, stop)
    told = {n for first, last in part.restorable for n in range(first, last + 1)}
    assert told == {n - start for n in lengths if start < n <= stop}
    assert shorter_length(promise, stop) == max((n for n in lengths if n < stop), default=0)


def test_slots_are_listed_by_policy():
    row = np.array([5, 6, 7, NO_SLOT], np.int64)
    policies = {"kv": AllPages(), "swa": TrailingPages(2), "draft": BlockGroups(1, 1)}
    listed = listed_slots({"kv": row, "swa": row, "draft": np.array([1, NO_SLOT, 3, 4])}, policies, 3)
    assert listed == {"kv": [5, 6, 7], "swa": [6, 7], "draft": [1]}


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
@pytest.mark.parametrize("shards", [(0,), (1, 3)])
def test_no_two_slots_share_a_byte_and_an_engine_finds_each(layout, shards):
    spec = PoolSpec("kv", (Part("k", "u8", 70), Part("v", "u8", 5000)), 4, object_layout=layout)
    shape = PoolShape(RankPool(spec, shards), 5)
    bound = shape.bound(1 << 20)
    seen: set[int] = set()
    parts = iter(shape.parts)
    for host in bound.hosts:
        for part in host.parts:
            told = next(parts)
            assert (told.part, told.bytes) == (part.part, part.bytes)
            (fragment,) = part.fragments
            for slot in range(5):
                at = told.offset + slot * shape.stride
                assert fragment.base + slot * fragment.stride == (1 << 20) + at
                mine = set(range(at, at + told.bytes))
                assert not mine & seen
                assert max(mine) < shape.length
                seen |= mine
    assert next(parts, None) is None


async def test_transfers_are_let_in_in_order_and_within_their_bytes():
    room = TransferRoom(2, 100)
    await room.enter(60)
    waiting = [asyncio.ensure_future(room.enter(size)) for size in (60, 10, 500)]
    await asyncio.sleep(0)
    assert [w.done() for w in waiting] == [False, False, False], "the small one does not overtake"
    room.leave(60)
    await asyncio.sleep(0.01)
    assert [w.done() for w in waiting] == [True, True, False]
    waiting[2].cancel()
    await asyncio.sleep(0.01)
    room.leave(60)
    room.leave(10)
    await room.enter(500)  # alone it may be larger than all
    assert (room.running, room.bytes) == (1, 500)
    late = asyncio.ensure_future(room.enter(1))
    await asyncio.sleep(0)
    room.leave(500)
    late.cancel()  # just as it is let in
    await asyncio.sleep(0.01)
    assert room.running in {0, 1}
    if late.cancelled():
        assert (room.running, room.bytes) == (0, 0)


async def test_an_error_of_a_thread_comes_back_and_a_cancelled_wait_does_no_harm():
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0, "test")
    gone = in_thread(lambda: 1, "test")
    gone.cancel()
    assert await in_thread(lambda: 2, "test") == 2


def test_a_folder_that_is_a_link_or_anothers_is_refused(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(FolderUnusable):
        SharedFolder(tmp_path / "link")
    if os.geteuid() == 0:
        os.chown(tmp_path / "real", 65_534, 65_534)
        with pytest.raises(FolderUnusable, match="belongs to user 65534"):
            SharedFolder(tmp_path / "real")


def test_a_folder_is_private_cleaned_and_gone_at_the_end(tmp_path: Path):
    place = tmp_path / "pools"
    place.mkdir(mode=0o755)
    (place / "s-old").mkdir()
    (place / "s-old" / "kv").write_bytes(b"half a page")
    (place / "precious").symlink_to(tmp_path)
    folder = SharedFolder(place)
    assert {p.name for p in place.iterdir()} == {"lock", "tiers"}
    assert tmp_path.exists()
    assert place.stat().st_mode & 0o777 == 0o700
    with pytest.raises(FolderUnusable, match="another agent"):
        SharedFolder(place)
    file = folder.pool_file(1, "kv", 8192)
    path = folder.link("s-1", 1, "kv")
    assert (path.stat().st_mode & 0o777, path.stat().st_size, path.stat().st_nlink) == (0o600, 8192, 2)
    assert path.stat().st_blocks * 512 >= 8192, "allocated, so that no touch can fail"
    with pytest.raises(OutOfHostMemory):
        folder.pool_file(1, "huge", 1 << 50)
    folder.unlink("s-1")
    assert not path.exists()
    folder.remove_tier(1)
    file.close()
    folder.close()
    folder.close()
    assert not place.exists()
