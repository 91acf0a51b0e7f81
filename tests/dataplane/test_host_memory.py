import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.host_memory import HostMemory, HostMemoryClosed, HostMemoryInUse, OutOfHostMemory
from dataplane.memory_limits import memory_locked
from metadata.errors import InvalidInput
from metadata.pools import OBJECT_LAYOUTS, Part, PoolSpec


def spec_of(*sizes, layout="page_first", logical=False):
    parts = tuple(Part(f"p{i}", "uint8", size) for i, size in enumerate(sizes))
    return PoolSpec("kv", parts, object_layout=layout, logical=logical)


def in_process(*lines):
    """Run lines in a process of their own, whose limits they may change; returns what it printed."""
    script = "\n".join(
        [
            "import os, resource",
            "from dataplane.host_memory import *",
            "from metadata.pools import *",
            "def spec(size): return PoolSpec('kv', (Part('k', 'uint8', size),))",
            *lines,
        ]
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(OBJECT_LAYOUTS),
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(1, 4),
)
def test_every_byte_written_by_address_is_the_one_its_view_shows(layout, sizes, slots, layers):
    count = layers if layout == "layer_first" else 1
    spec = spec_of(*(n * count for n in sizes), layout=layout)
    memory = HostMemory(spec, slots, layers=layers)
    assert memory.address % mmap.PAGESIZE == 0
    assert memory.length % mmap.PAGESIZE == 0
    assert [(r.address, r.length) for r in memory.pool.regions] == [(memory.address, memory.length)]
    # Each part of each page gets its own number through the view; then it is read at the pool's addresses.
    for slot in range(slots):
        for i, part in enumerate(spec.parts):
            for j, piece in enumerate(memory.fragments(slot, part.part)):
                piece[:] = 1 + (slot * 31 + i * 7 + j) % 255
    whole = memory._bytes
    for slot in range(slots):
        addresses, lengths = memory.pool.buffers([slot]).objects()
        for i, (starts, sizes_here) in enumerate(zip(addresses, lengths, strict=True)):
            assert all(start % 64 == 0 for start in starts)
            for j, (start, size) in enumerate(zip(starts, sizes_here, strict=True)):
                at = start - memory.address
                assert (whole[at : at + size] == 1 + (slot * 31 + i * 7 + j) % 255).all()
    del whole, piece
    memory.close()


def test_memory_starts_zeroed_and_views_do_not_copy():
    memory = HostMemory(spec_of(5000, 10), 3, prefault=True)
    view = memory.view(2, "p0")
    assert view.shape == (5000,)
    assert view.dtype == np.uint8
    assert not view.any()
    view[:] = 9
    assert (memory.columns("p0")[0][2] == 9).all()
    assert not memory.columns("p0")[0][:2].any()
    assert not memory.columns("p1")[0].any()
    assert view.ctypes.data == memory.pool.buffers([2]).addresses[0, 0]


def test_a_layer_first_part_is_seen_in_pieces_only():
    memory = HostMemory(spec_of(12, layout="layer_first"), 4, layers=3)
    assert [piece.size for piece in memory.fragments(0, "p0")] == [4, 4, 4]
    with pytest.raises(InvalidInput, match="3 pieces"):
        memory.view(0, "p0")


def test_what_is_not_there_is_refused_by_name():
    memory = HostMemory(spec_of(8), 4)
    for slot in (-1, 4):
        with pytest.raises(InvalidInput, match=f"is {slot}, must be 0 to 3"):
            memory.view(slot, "p0")
    with pytest.raises(InvalidInput, match="is 'v', the pool has"):
        memory.view(0, "v")
    with pytest.raises(InvalidInput, match="slots: is 0"):
        HostMemory(spec_of(8), 0)


@pytest.mark.parametrize("layers", [0, -1, 3])
def test_a_part_that_is_no_whole_number_of_layers_is_refused(layers):
    with pytest.raises(InvalidInput, match="does not divide the 8 bytes of part 'p0'"):
        HostMemory(spec_of(8, layout="layer_first"), 4, layers=layers)


@pytest.mark.parametrize("layout", OBJECT_LAYOUTS)
def test_a_logical_pool_takes_no_memory(layout):
    memory = HostMemory(spec_of(layout=layout, logical=True), 4, prefault=True, pin=True)
    assert (memory.address, memory.length, memory.pool.regions) == (0, 0, ())
    with memory.hold() as pool:
        assert pool.slots == 4
    memory.close()
    memory.close()


def test_close_refuses_while_a_view_is_alive_and_then_works_twice():
    memory = HostMemory(spec_of(8), 4)
    view = memory.view(1, "p0")
    with pytest.raises(HostMemoryInUse, match="views"):
        memory.close()
    view[:] = 3
    assert memory.view(1, "p0").tolist() == [3] * 8
    del view
    memory.close()
    memory.close()
    with pytest.raises(HostMemoryClosed):
        memory.view(1, "p0")
    with pytest.raises(HostMemoryClosed), memory.hold():
        pass


def test_close_refuses_while_a_transfer_holds_the_addresses():
    memory = HostMemory(spec_of(8), 4)
    started, finish = threading.Event(), threading.Event()

    def transfer():
        with memory.hold():
            started.set()
            finish.wait(10)

    thread = threading.Thread(target=transfer)
    thread.start()
    assert started.wait(10)
    with pytest.raises(HostMemoryInUse, match="held by 1 transfers"):
        memory.close()
    finish.set()
    thread.join()
    memory.close()


def test_a_transfer_that_fails_gives_up_its_hold():
    memory = HostMemory(spec_of(8), 4)
    with pytest.raises(OSError, match="gone"), memory.hold():
        raise OSError("gone")
    memory.close()


def test_closing_unmaps_the_memory():
    def mapped():
        maps = Path("/proc/self/maps").read_text().splitlines()
        return sum(line.startswith(f"{address:x}-") for line in maps)

    memory = HostMemory(spec_of(1 << 20), 4)
    address = memory.address
    assert mapped() == 1
    memory.close()
    assert mapped() == 0


def test_shared_memory_is_one_with_a_child_and_private_memory_is_not():
    lines = [
        "for shared in (True, False):",
        "    memory = HostMemory(spec(8), 4, shared=shared)",
        "    child = os.fork()",
        "    if child == 0:",
        "        memory.view(0, 'k')[:] = 5",
        "        os._exit(0)",
        "    os.waitpid(child, 0)",
        "    print(int(memory.view(0, 'k')[0]))",
    ]
    assert in_process(*lines).split() == ["5", "0"]


def test_prefaulted_memory_is_resident():
    lines = [
        "def resident():",
        "    line = [x for x in open('/proc/self/status') if x.startswith('VmRSS')][0]",
        "    return int(line.split()[1]) * 1024",
        "before = resident()",
        "lazy = HostMemory(spec(1 << 20), 64)",
        "middle = resident()",
        "there = HostMemory(spec(1 << 20), 64, prefault=True)",
        "print(middle - before, resident() - middle)",
    ]
    lazy, there = map(int, in_process(*lines).split())
    assert lazy < 16 << 20
    assert there > 60 << 20


def test_pinned_memory_is_locked_and_unlocked_with_it():
    before = memory_locked()
    memory = HostMemory(spec_of(4096), 2, pin=True)
    assert memory_locked() - before == 8192
    memory.close()
    assert memory_locked() == before


def test_a_memlock_limit_too_small_says_limit_need_and_remedy():
    become_nobody = "os.getuid() or os.setuid(65534)"
    said = in_process(
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))",
        become_nobody,
        "kept = HostMemory(spec(4096), 8, pin=True)",
        "try: HostMemory(spec(1 << 20), 1, pin=True)",
        "except MemlockTooSmall as error: print(error)",
    )
    assert said.startswith("memlock_too_small: pool 'kv' needs 1048576 bytes of locked memory")
    assert "limit is 65536 bytes and 32768 of them are taken" in said
    assert "`ulimit -l 1056`" in said


def test_a_pool_larger_than_the_memory_that_is_left_is_refused_before_it_is_mapped():
    with pytest.raises(OutOfHostMemory, match=r"needs \d{15,} bytes of host memory, \d+ are left") as caught:
        HostMemory(spec_of(1 << 30), 1 << 20, prefault=True)
    assert "fewer slots" in caught.value.detail


def test_an_address_space_limit_is_reported_as_such():
    said = in_process(
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))",
        "try: HostMemory(spec(1 << 30), 2)",
        "except OutOfHostMemory as error: print(error)",
    )
    assert "`ulimit -v`" in said


def test_nothing_stays_behind_when_the_lock_fails():
    said = in_process(
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))",
        "os.getuid() or os.setuid(65534)",
        "for _ in range(200):",
        "    try: HostMemory(spec(1 << 30), 1, pin=True)",
        "    except MemlockTooSmall: pass",
        "line = [x for x in open('/proc/self/status') if x.startswith('VmSize')][0]",
        "print(int(line.split()[1]) // 1024)",
    )
    assert int(said) < 8 * 1024


def test_a_page_is_64_byte_aligned_so_that_no_two_parts_share_a_cache_line():
    memory = HostMemory(spec_of(1, 65), 2)
    assert memory.pool.buffers([0, 1]).addresses.ravel().tolist() == [
        memory.address + offset for offset in (0, 64, 192, 256)
    ]
    assert os.sysconf("SC_PAGE_SIZE") == mmap.PAGESIZE
