"""What only Mooncake needs: its odd answers, its limits, its processes' life and death."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane import mooncake_native
from dataplane import mooncake_store as mooncake_store_module
from dataplane.memory_limits import MemlockRoom
from dataplane.mooncake_codes import store_code, store_codes
from dataplane.mooncake_master import MasterHttp, split_address
from dataplane.mooncake_native import MooncakeSettings
from dataplane.mooncake_node import MooncakeCluster, master_binary
from dataplane.mooncake_store import MooncakeStore, batch_bounds, registration_advice
from dataplane.object_store import ObjectBuffers, RegistrationFailed, StoreClosed, StoreCode, StoreUnavailable
from tests.dataplane.conftest import REPO, SEGMENT_BYTES, Arena, object_key
from tests.dataplane.test_object_store import codes


def _wait_until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def arena(mooncake_store: MooncakeStore) -> Arena:
    arena = Arena(mooncake_store, 1 << 20)
    yield arena
    mooncake_store.unregister(arena.address)


# Batches


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 20), st.integers(1, 300))
def test_batches_keep_their_bounds_and_the_order(sizes: list[int], objects: int, size: int) -> None:
    runs = list(batch_bounds(np.array(sizes, dtype=np.int64), objects, size))
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(sizes)))
    for run in runs:
        chosen = sizes[run]
        assert 1 <= len(chosen) <= objects
        assert sum(chosen) <= size or len(chosen) == 1
    for run, after in pairwise(runs):
        assert run.stop - run.start == objects or sum(sizes[run]) + sizes[after.start] > size


def test_transport_limits_are_raised_before_mooncake_is_imported() -> None:
    code = (
        "import os; os.environ['MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER'] = '77'\n"
        "from dataplane.mooncake_store import MooncakeStore\n"
        "import sys; assert 'mooncake' not in sys.modules\n"
        "print(MooncakeStore.available()[0], os.environ['MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER'],"
        " os.environ['MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER'])"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("MC_")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "16384", "77"]


def test_without_mooncake_available_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['mooncake'] = None\n"
        "from dataplane.mooncake_store import MooncakeStore\n"
        "print(MooncakeStore.available())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("(False, ")
    assert "caketin[cpu]" in done.stdout


# Who is not there


def test_an_absent_master_is_told_in_seconds_with_its_address() -> None:
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"no Mooncake master answers at 127\.0\.0\.1:9 "):
        MooncakeStore(MooncakeSettings("127.0.0.1:9"))
    assert time.monotonic() - started < 30  # Mooncake's own client takes 90 s


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:port"])
def test_an_address_without_a_port_is_refused(address: str) -> None:
    with pytest.raises(StoreUnavailable, match="no host:port"):
        split_address(address)


def test_addresses_are_taken_in_their_usual_forms() -> None:
    assert split_address("http://10.0.0.1:9003/") == ("10.0.0.1", 9003)
    assert split_address("[::1]:9003") == ("::1", 9003)


def test_an_absent_rdma_device_is_told_at_once_with_those_that_are_there(
    mooncake_cluster: MooncakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "class" / "infiniband" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(mooncake_native, "SYSFS", tmp_path)
    settings = MooncakeSettings(mooncake_cluster.master, protocol="rdma", devices="mlx5_0,mlx5_7")
    with pytest.raises(StoreUnavailable, match="device mlx5_7 is not here; this host has: mlx5_0"):
        MooncakeStore(settings)
    monkeypatch.setattr(mooncake_native, "SYSFS", tmp_path / "none")
    with pytest.raises(StoreUnavailable, match="this host has: none"):
        MooncakeStore(MooncakeSettings(mooncake_cluster.master, protocol="rdma"))


def test_the_local_address_is_the_one_that_faces_the_master(mooncake_cluster: MooncakeCluster) -> None:
    store = MooncakeStore(MooncakeSettings(mooncake_cluster.master))
    assert store._client.get_hostname().startswith("127.0.0.1:")
    store.close()


def test_without_the_masters_http_port_sweeps_say_what_to_set(mooncake_cluster: MooncakeCluster) -> None:
    store = MooncakeStore(MooncakeSettings(mooncake_cluster.master, local_hostname="127.0.0.1"))
    for call in (
        lambda: store.sizes(["a"]),
        lambda: store.keys(""),
        lambda: store.exists(["a"], renew=False),
    ):
        with pytest.raises(StoreUnavailable, match="master_http"):
            call()
    assert not store.exists(["a"]).any()
    store.close()


def test_a_wrong_http_port_is_told(mooncake_cluster: MooncakeCluster) -> None:
    asked = MasterHttp("127.0.0.1:9", seconds=1.0)
    for call in (lambda: asked.sizes(["a"]), lambda: list(asked.keys()), asked.segments):
        with pytest.raises(StoreUnavailable, match=r"HTTP port at 127\.0\.0\.1:9"):
            call()
    assert not asked.ready()


# Its answers


def test_keys_of_any_characters_can_be_swept(mooncake_store: MooncakeStore) -> None:
    names = ["weird key+%&/x", "Qwen-Qwen3_ü_k", "a=b?c#d"]
    for name in names:
        mooncake_store.put_bytes(name, b"12345")
    try:
        assert mooncake_store.sizes(names).tolist() == [5, 5, 5]
        assert set(names) <= set(mooncake_store.keys(""))
        with pytest.raises(ValueError, match="comma"):
            mooncake_store.sizes(["a,b"])
    finally:
        assert mooncake_store.remove(names) == 3


def test_an_object_larger_than_the_store_has_no_space(
    mooncake_store: MooncakeStore, namespace_id: str
) -> None:
    memory = np.zeros(SEGMENT_BYTES + 1, dtype=np.uint8)
    mooncake_store.register(memory.ctypes.data, memory.nbytes)
    buffers = ObjectBuffers(np.array([memory.ctypes.data], np.uint64), np.array([memory.nbytes]))
    key = object_key(namespace_id, 0)
    assert mooncake_store.put([key], buffers).tolist() == codes(StoreCode.NO_SPACE)
    assert not mooncake_store.exists([key]).any()
    mooncake_store.unregister(memory.ctypes.data)


def test_a_sweep_renews_no_lease_and_a_look_does(
    mooncake_cluster: MooncakeCluster, mooncake_store: MooncakeStore, arena: Arena, namespace_id: str
) -> None:
    native = mooncake_store._client
    keys = [object_key(namespace_id, i) for i in range(2)]
    for _ in range(5):  # a put may meet what another test's left behind on a busy master
        if (
            not mooncake_store.put(keys, arena.holding([b"1", b"2"])).any()
            and min(mooncake_store.sizes(keys)) > 0
        ):
            break
    assert mooncake_store.sizes(keys).tolist() == [1, 1]
    mooncake_store.exists(keys, renew=False)
    list(mooncake_store.keys(""))
    assert native.remove(keys[0]) == 0  # an unforced removal refuses what is leased
    mooncake_store.exists(keys[1:])
    assert native.remove(keys[1]) == -706
    assert mooncake_store.remove(keys) == 1


def test_the_masters_connection_is_opened_again_after_it_broke(mooncake_cluster: MooncakeCluster) -> None:
    asked = MasterHttp(mooncake_cluster.master_http)
    assert asked.sizes(["nothing"]) == [-1]
    asked._connection.sock.close()
    assert asked.sizes(["nothing"]) == [-1]
    asked.close()
    assert asked.sizes(["nothing"]) == [-1]
    asked.close()


def test_memory_that_mooncake_refuses_is_not_remembered(
    mooncake_store: MooncakeStore, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = np.zeros(64, dtype=np.uint8)
    address = int(memory.ctypes.data)
    assert mooncake_store._client.register_buffer(address, 64) == 0  # behind our back
    with pytest.raises(RegistrationFailed, match="refused 64 bytes"):
        mooncake_store.register(address, 64)
    assert mooncake_store._client.unregister_buffer(address) == 0
    mooncake_store.register(address, 64)
    mooncake_store.unregister(address)


@pytest.mark.parametrize(
    ("limit", "protocol", "says"),
    [
        (65_536, "rdma", r"limit is 65536 bytes, 0 .*1048576 more are needed.*ulimit -l 1024.*LimitMEMLOCK"),
        (1 << 30, "rdma", "max_region_bytes"),
        (None, "rdma", "max_region_bytes"),
        (65_536, "tcp", "is the memory mapped"),
    ],
)
def test_a_refused_registration_says_what_to_change(
    limit: int | None, protocol: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = None if limit is None else MemlockRoom(limit, 0)
    monkeypatch.setattr(mooncake_store_module, "memlock_room", lambda: room)
    assert re.search(says, registration_advice(0x1000, 1 << 20, -600, protocol))


def test_close_waits_for_a_running_call(mooncake_cluster: MooncakeCluster) -> None:
    store = MooncakeStore(mooncake_cluster.settings)
    left: list[float] = []

    def call() -> None:
        with store._gate.call():
            time.sleep(0.3)
            left.append(time.monotonic())

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.05)
    store.close()
    assert left
    assert left[0] <= time.monotonic()
    thread.join()


def test_close_does_not_wait_for_ever_for_a_call_that_hangs(
    mooncake_cluster: MooncakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_store_module, "_CLOSE_SECONDS", 0.1)
    store = MooncakeStore(mooncake_cluster.settings)
    returned = threading.Event()

    def hang() -> None:
        with store._gate.call():
            returned.wait()
            assert store._client.batch_is_exist(["the client still works"]) == [0]

    thread = threading.Thread(target=hang)
    thread.start()
    _wait_until(lambda: not store._gate.wait_idle(0.0))
    store.close()
    with pytest.raises(StoreClosed):
        store.exists(["a"])
    returned.set()
    thread.join()
    assert store._client in mooncake_native._kept_open
    mooncake_native._kept_open.remove(store._client)
    store._client.close()


# The cluster's processes


def test_a_cluster_starts_serves_and_leaves_nothing(tmp_path: Path) -> None:
    segment_bytes = 128 << 20  # more than a node takes for itself
    cluster = MooncakeCluster(segment_bytes, nodes=2, prefault=True, log_folder=tmp_path / "logs")
    before = set(_children(os.getpid()))
    with cluster:
        started = set(_children(os.getpid())) - before
        assert len(started) == 3
        segments = MasterHttp(cluster.master_http).segments()
        assert [s["size_bytes"] for s in segments] == [segment_bytes] * 2
        nodes = [pid for pid in started if b"mooncake_node" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(nodes) == 2
        for pid in nodes:
            smaps = Path(f"/proc/{pid}/smaps_rollup").read_text()
            (rss,) = [line.split()[1] for line in smaps.splitlines() if line.startswith("Rss:")]
            assert int(rss) * 1024 > segment_bytes  # prefaulted
    assert not any(_alive(pid) for pid in started)
    cluster.stop()
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == [
        "mooncake-master-0.log",
        "storage-node-0.log",
        "storage-node-1.log",
    ]


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from dataplane.mooncake_node import MooncakeCluster\n"
        "with MooncakeCluster(16 << 20, log_folder=pathlib.Path(sys.argv[1])) as cluster:\n"
        "    print('up', cluster.master_http, flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], cwd=REPO, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline().startswith("up ")
    children = _children(parent.pid)
    assert len(children) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    _wait_until(lambda: not any(_alive(pid) for pid in children))


def test_a_cluster_that_is_not_ready_in_time_is_ended_and_says_so() -> None:
    before = set(_children(os.getpid()))
    cluster = MooncakeCluster(16 << 20, ready_seconds=0.0)
    with pytest.raises(StoreUnavailable, match="mooncake-master-0 was not ready after 0 s"):
        cluster.start()
    assert set(_children(os.getpid())) == before
    assert not cluster.log_folder.exists()


def test_a_node_that_ends_at_once_shows_the_end_of_its_log() -> None:
    with pytest.raises(StoreUnavailable, match=r"(?s)storage-node-0 ended with .*Traceback.*"):
        MooncakeCluster(1 << 62).start()


def test_a_cluster_is_started_in_the_main_thread_only() -> None:
    errors: list[BaseException] = []

    def start() -> None:
        try:
            MooncakeCluster(16 << 20).start()
        except RuntimeError as e:
            errors.append(e)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_a_node_without_a_master_ends_in_seconds() -> None:
    command = [sys.executable, "-m", "dataplane.mooncake_node", "node", "--master", "127.0.0.1:9"]
    done = subprocess.run(
        [*command, "--segment-bytes", "1000000"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "no Mooncake master answers at 127.0.0.1:9" in done.stderr


def test_the_masters_binary_is_found() -> None:
    assert master_binary().name == "mooncake_master"


def test_after_its_node_died_a_get_is_honest_and_close_is_quick(namespace_id: str) -> None:
    with MooncakeCluster(16 << 20) as cluster:
        store = MooncakeStore(cluster.settings)
        arena = Arena(store, 1 << 16)
        keys = [object_key(namespace_id, i) for i in range(3)]
        assert not store.put(keys, arena.holding([b"x" * 1000] * 3)).any()
        assert not store.get(keys, arena.room([1000] * 3)).any()
        cluster.kill_node()
        assert set(store.get(keys, arena.room([1000] * 3)).tolist()) <= {
            StoreCode.TRANSFER_FAILED,
            StoreCode.MISSING,
        }
        started = time.monotonic()
        store.close()
        assert time.monotonic() - started < 9  # Mooncake's own takes 10 s


def test_a_master_that_is_away_is_an_error_and_no_loss_and_a_new_one_is_found_without_help(
    namespace_id: str,
) -> None:
    with MooncakeCluster(16 << 20) as cluster:
        store = MooncakeStore(cluster.settings)
        arena = Arena(store, 1 << 16)
        keys = [object_key(namespace_id, i) for i in range(3)]
        sizes = np.full(3, 1000)
        kept = arena.holding([b"x" * 1000] * 3)
        assert not store.put(keys, kept).any()
        master = cluster.children[0].process
        os.kill(master.pid, signal.SIGKILL)
        assert master.wait(10) == -signal.SIGKILL
        assert set(store.get(keys, arena.room([1000] * 3)).tolist()) == {StoreCode.UNAVAILABLE}
        calls: list[Callable[[], object]] = [
            lambda: store.get(keys, arena.room([1000] * 3)),
            lambda: store.put(keys, kept),
            lambda: store.confirm(keys, sizes),
            lambda: store.exists(keys),
            lambda: store.remove(keys),
            lambda: store.put_bytes(keys[0], b"x"),
            lambda: store.get_bytes(keys[0]),
        ]
        started = time.monotonic()
        for call in calls:
            with pytest.raises(StoreUnavailable, match=re.escape(cluster.master)):
                call()
        assert time.monotonic() - started < 4  # Mooncake's own client takes that long for each
        cluster.restart_master()
        deadline = time.monotonic() + 30
        while set(store.put(keys, kept).tolist()) != {StoreCode.OK} or store.confirm(keys, sizes).any():
            assert time.monotonic() < deadline, "the client did not find the new master"
            time.sleep(0.1)
        read = arena.room([1000] * 3)
        assert not store.get(keys, read).any()
        assert arena.bytes_of(read) == [b"x" * 1000] * 3
        store.close()


def test_with_the_master_away_nothing_is_told_to_be_missing(namespace_id: str) -> None:
    with MooncakeCluster(16 << 20) as cluster:
        store = MooncakeStore(cluster.settings)
        cluster.children[0].kill()
        with pytest.raises(StoreUnavailable):
            store.confirm([object_key(namespace_id, 1)], np.array([1000]))
        store.close()


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (4096, StoreCode.OK),
        (0, StoreCode.OK),
        (-704, StoreCode.MISSING),
        (-712, StoreCode.MISSING),
        (-800, StoreCode.TRANSFER_FAILED),
        (-900, StoreCode.UNAVAILABLE),
        (-901, StoreCode.UNAVAILABLE),
        (-1010, StoreCode.UNAVAILABLE),
        (-1, StoreCode.INVALID),
        (-9999, StoreCode.INVALID),
    ],
)
def test_every_code_of_mooncake_has_a_name_and_advice(raw: int, code: StoreCode) -> None:
    assert store_code(raw) is code
    assert store_codes([raw]).tolist() == [code]
    assert code.advice
