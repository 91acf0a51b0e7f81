import resource

import pytest

from dataplane.memory_limits import MemlockRoom, memlock_limit, memlock_room, memory_left, memory_locked

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """A machine with 8 GiB available; `write(path, text)` adds files to its /proc and /sys/fs/cgroup."""

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:    {8 * GIB // 1024} kB\n")
    write.left = lambda: memory_left(tmp_path / "proc", tmp_path / "cgroup")
    write.proc = tmp_path / "proc"
    return write


def test_without_control_groups_the_machine_is_the_limit(machine):
    assert machine.left() == 8 * GIB


def test_where_nothing_is_known_nothing_is_limited(tmp_path):
    assert memory_left(tmp_path, tmp_path) == 1 << 62
    assert memory_locked(tmp_path) == 0


def test_the_tightest_group_above_the_process_counts(machine):
    machine("proc/self/cgroup", "0::/pods/engine\n")
    machine("cgroup/pods/engine/memory.max", "max\n")
    machine("cgroup/pods/memory.max", f"{4 * GIB}\n")
    machine("cgroup/pods/memory.current", f"{3 * GIB}\n")
    machine("cgroup/memory.max", f"{6 * GIB}\n")
    assert machine.left() == GIB


def test_file_cache_that_can_be_dropped_is_not_counted_as_taken(machine):
    machine("proc/self/cgroup", "0::/\n")
    machine("cgroup/memory.max", f"{4 * GIB}\n")
    machine("cgroup/memory.current", f"{3 * GIB}\n")
    machine("cgroup/memory.stat", f"anon 5\ninactive_file {2 * GIB}\n")
    assert machine.left() == 3 * GIB
    machine("cgroup/memory.stat", "anon 5\n")
    assert machine.left() == GIB


def test_a_container_whose_group_has_the_hosts_path_finds_its_own_limit(machine):
    machine("proc/self/cgroup", "12:cpu:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    machine("cgroup/memory/memory.limit_in_bytes", f"{2 * GIB}\n")
    machine("cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
    assert machine.left() == GIB


def test_a_group_over_its_limit_leaves_nothing(machine):
    machine("proc/self/cgroup", "0::/\n")
    machine("cgroup/memory.max", "100\n")
    machine("cgroup/memory.current", "200\n")
    assert machine.left() == 0


def test_this_process_has_some_memory_left():
    assert 0 < memory_left() < 1 << 50


def test_the_memlock_limit_is_the_soft_one():
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert memlock_limit() == (None if soft == resource.RLIM_INFINITY else soft)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, hard))
    try:
        assert memlock_limit() == 4096
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def status(machine, capabilities: int, pinned_kib: int):
    machine("proc/self/status", f"VmPin:\t{pinned_kib} kB\nCapEff:\t{capabilities:016x}\n")
    return machine.proc


def test_room_to_register_is_the_limit_less_what_is_pinned(machine, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (1 << 20, 1 << 20))
    room = memlock_room(status(machine, 0x1FF & ~(1 << 14), 24))
    assert room == MemlockRoom(1 << 20, 24 * 1024)
    assert room.left == (1 << 20) - 24 * 1024
    assert "`ulimit -l 1048`" in room.advice(1 << 20)
    assert MemlockRoom(1, 5).left == 0


def test_there_is_no_limit_with_the_capability_or_without_one_set(machine, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (1 << 20, 1 << 20))
    assert memlock_room(status(machine, 1 << 14, 24)) is None
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (resource.RLIM_INFINITY, 0))
    assert memlock_room(status(machine, 0, 24)) is None
