"""Each of the doctor's findings, with the environment broken so that it must be made."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from caketin.doctor.rdma import RdmaCheck
from caketin.embedded_redis import EmbeddedRedis
from dataplane.child_process import free_port
from dataplane.mooncake_node import MooncakeCluster
from dataplane.mooncake_store import MooncakeStore
from dataplane.rdma_settings import RdmaSettings
from tests.servers import Stack, stack

__all__ = ["stack"]

REPO = Path(__file__).resolve().parents[2]
KIB = 1024


class Doctor:
    """What the doctor said."""

    def __init__(self, done: subprocess.CompletedProcess[str]):
        assert done.stdout, done.stderr
        self.code = done.returncode
        told = json.loads(done.stdout)
        self.ok = told["ok"]
        self.findings = told["findings"]

    def __getitem__(self, what: str) -> tuple[str, str, str]:
        (row,) = [f for f in self.findings if f["what"] == what]
        return row["state"], row["found"], row["advice"]


def doctor(*arguments: str, before: tuple[str, ...] = (), memlock: int | None = None, **env: str) -> Doctor:
    """Run the doctor.

    Args:
        arguments: further ones.
        before: a command that runs it.
        memlock: limit of locked memory, in bytes.
        env: environment variables.
    """

    def limit() -> None:
        if memlock is not None:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))

    return Doctor(
        subprocess.run(
            [*before, sys.executable, "-m", "caketin", "doctor", "--json", *arguments],
            capture_output=True,
            text=True,
            timeout=90,
            cwd=REPO,
            env={**os.environ, "CAKETIN_REDIS_URL": "", "CAKETIN_URL": "", **env},
            preexec_fn=limit,
            check=False,
        )
    )


def in_a_namespace(script: str) -> tuple[str, ...]:
    """Return the command that runs another one where `script` has changed the mounts."""
    command = ("unshare", "-rm", "sh", "-c", f'{script} && exec "$@"', "sh")
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("this machine lets nobody make mount namespaces")
    return command


def without_the_power_to_lock() -> tuple[str, ...]:
    """Return the command that runs another one without CAP_IPC_LOCK, to which no limit applies."""
    return ("setpriv", "--bounding-set=-ipc_lock") if os.geteuid() == 0 else ()


@pytest.fixture
def rdma(tmp_path: Path) -> Path:
    """A file system with an RDMA device whose port is up."""
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    verbs = tmp_path / "dev/infiniband"
    verbs.mkdir(parents=True)
    (verbs / "uverbs0").touch()
    (tmp_path / "dev/shm").mkdir()
    (tmp_path / "proc").mkdir()
    shutil.copy("/proc/meminfo", tmp_path / "proc/meminfo")
    return tmp_path


def test_a_machine_that_has_what_it_needs(tmp_path: Path):
    found = doctor("--data-dir", str(tmp_path), "--store-bytes", str(64 << 20))
    assert found.code == 0
    assert found.ok
    state, seen, _ = found["Python"]
    assert (state, seen.partition(" ")[0]) == ("ok", sys.version.partition(" ")[0])
    state, seen, _ = found["caketin"]
    assert state == "ok"
    assert str(REPO) in seen
    assert found["huge pages"][0] == "ok"
    assert found["memory"][0] == "ok"


def test_rdma_settings_that_cannot_be_are_refused_and_a_wrong_device_is_named():
    refused = subprocess.run(
        [sys.executable, "-m", "caketin", "doctor", "--rdma", "--mtu", "1500"],
        capture_output=True,
        text=True,
        cwd=REPO,
        check=False,
    )
    assert refused.returncode == 2
    assert "mtu is 1500" in refused.stderr
    found = doctor("--rdma", "--devices", "mlx5_99")
    assert found.code == 1
    state, seen, advice = found["RDMA setting devices"]
    assert state == "bad"
    assert "mlx5_99 is not here" in seen
    assert "--devices" in advice


def test_rdma_of_a_rank_that_no_entry_names_is_told():
    state, seen, _ = doctor("--rdma", "--devices", "tp0=mlx5_0", "--rank", "tp1")["RDMA setting devices"]
    assert state == "bad"
    assert "names no device for rank 'tp1'" in seen


def test_a_device_that_cannot_be_opened_says_what_to_install(rdma: Path):
    """What sysfs shows may still not open: no provider, no /dev/infiniband."""
    (rdma / "sys/class/infiniband/mlx5_0/ports/1/gids").mkdir()
    (rdma / "sys/class/infiniband/mlx5_0/ports/1/gids/0").write_text("fe80::1\n")
    found = {f.what: f for f in RdmaCheck(RdmaSettings(), sysfs=rdma / "sys").findings()}
    assert found["RDMA device mlx5_0"].state == "bad"
    assert "ibverbs-providers" in found["RDMA device mlx5_0"].advice
    assert "0 = fe80::1" in found["RDMA device mlx5_0"].found
    moved = found["RDMA loopback mlx5_0"]
    assert (moved.state, "would go over TCP" in moved.found) == ("bad", True)


def test_the_table_says_the_same_and_what_was_not_asked_for(tmp_path: Path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "caketin",
            "doctor",
            "--data-dir",
            str(tmp_path),
            "--store-bytes",
            str(1 << 60),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "COLUMNS": "250", "NO_COLOR": "1"},
        check=False,
    )
    assert done.returncode == 1
    assert "memlock limit" in done.stdout
    assert "--store-bytes" in done.stdout
    assert "--redis-url" in done.stderr


def test_a_python_that_is_too_new_or_old_is_named():
    from caketin.doctor.software import _python

    for version in ((3, 10), (3, 14), (2, 7)):
        finding = _python(version)
        assert finding.state == "bad"
        assert "3.11, 3.12 and 3.13" in finding.advice


def test_another_copy_of_caketin_on_the_path_is_named(tmp_path: Path):
    info = tmp_path / "caketin-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: caketin\nVersion: 9.9.9\n")
    state, _, advice = doctor(PYTHONPATH=str(tmp_path))["caketin"]
    assert state == "warn"
    assert "9.9.9" in advice


def test_a_shadowed_neighbour_stops_the_command_with_its_name(tmp_path: Path):
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "caketin", "doctor"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1
    assert f"{tmp_path / 'metadata'}" in done.stderr


def needs_mooncake() -> None:
    loads, why = MooncakeStore.available()
    if not loads:
        pytest.skip(f"Mooncake does not load: {why}")


def test_libibverbs_that_does_not_load_is_told_with_the_exact_line(tmp_path: Path):
    needs_mooncake()
    (tmp_path / "libibverbs.so.1").touch()
    found = doctor(LD_LIBRARY_PATH=str(tmp_path))
    assert found.code == 1
    for what in ("libibverbs", "Mooncake"):
        state, seen, advice = found[what]
        assert state == "bad"
        assert "libibverbs.so.1" in seen
        assert "apt-get install -y --no-install-recommends libibverbs1" in advice


def a_wheel(folder: Path, name: str, *, store: str | None = None) -> None:
    info = folder / f"{name.replace('-', '_')}-0.0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n")
    if store is not None:
        (folder / "mooncake").mkdir()
        (folder / "mooncake/__init__.py").touch()
        (folder / "mooncake/store.py").write_text(store)


def test_two_wheels_under_one_import_name_are_told_apart(tmp_path: Path):
    needs_mooncake()
    a_wheel(tmp_path, "mooncake-transfer-engine-cuda13")
    state, seen, advice = doctor(PYTHONPATH=str(tmp_path))["Mooncake"]
    assert state == "bad"
    assert "mooncake-transfer-engine-cuda13 0.0.1" in seen
    assert "mooncake-transfer-engine-non-cuda" in seen
    assert "pip uninstall mooncake-transfer-engine-cuda13 mooncake-transfer-engine-non-cuda" in advice


@pytest.mark.parametrize(
    ("store", "said", "advised"),
    [
        (
            "raise ImportError('libcudart.so.12: cannot open shared object file')",
            "libcudart",
            "Without a GPU",
        ),
        ("raise ImportError('undefined symbol: x')", "undefined symbol", "reinstall"),
        ("import os; os.abort()", "code -6", "reinstall"),
    ],
)
def test_why_a_wheel_does_not_load_is_told(tmp_path: Path, store: str, said: str, advised: str):
    a_wheel(tmp_path, "mooncake-transfer-engine-non-cuda", store=store)
    state, seen, advice = doctor(PYTHONPATH=str(tmp_path))["Mooncake"]
    assert state == "bad"
    assert said in seen
    assert advised in advice


def test_no_mooncake_at_all_leaves_the_file_store():
    from caketin.doctor.software import _ibverbs, _mooncake

    finding = _mooncake({})
    assert finding.state == "warn"
    assert "caketin[cpu]" in finding.advice
    assert _ibverbs(needed=False).state in {"ok", "warn"}


def test_rdma_devices_are_listed_with_their_ports(rdma: Path):
    assert doctor("--root", str(rdma))["RDMA devices"] == ("ok", "mlx5_0 (ACTIVE)", "")


def test_no_rdma_device_means_tcp(rdma: Path):
    shutil.rmtree(rdma / "sys")
    state, seen, advice = doctor("--root", str(rdma))["RDMA devices"]
    assert (state, seen) == ("warn", "none")
    assert "TCP" in advice


def test_an_rdma_port_that_is_down_is_bad(rdma: Path):
    (rdma / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    state, seen, _ = doctor("--root", str(rdma))["RDMA devices"]
    assert (state, seen) == ("bad", "mlx5_0 (DOWN)")


def test_an_rdma_device_that_a_container_may_not_open_is_bad(rdma: Path):
    (rdma / "dev/infiniband/uverbs0").unlink()
    found = doctor("--root", str(rdma))
    state, _, advice = found["RDMA devices"]
    assert (state, found.code) == ("bad", 1)
    assert "--device /dev/infiniband" in advice


def test_a_memlock_limit_is_bad_where_there_is_rdma_and_a_warning_elsewhere(rdma: Path):
    def limited() -> Doctor:
        return doctor("--root", str(rdma), memlock=64 * KIB, before=without_the_power_to_lock())

    state, seen, advice = limited()["memlock limit"]
    assert (state, seen) == ("bad", "64.0 KiB")
    assert "LimitMEMLOCK=infinity" in advice
    shutil.rmtree(rdma / "sys")
    assert limited()["memlock limit"][0] == "warn"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has CAP_IPC_LOCK")
def test_the_memlock_limit_is_none_for_who_may_lock_as_a_pod_with_ipc_lock(rdma: Path):
    only = ("setpriv", "--bounding-set=-all,+ipc_lock", "--no-new-privs")
    assert doctor("--root", str(rdma), memlock=64 * KIB, before=only)["memlock limit"][0] == "ok"


def test_beside_a_storage_node_that_runs_memory_and_huge_pages_are_not_asked_for_again(rdma: Path):
    (rdma / "proc/meminfo").write_text("HugePages_Total: 64\nHugePages_Free: 0\nHugepagesize: 2048 kB\n")

    def found(size: int) -> list[str]:
        told = doctor("--root", str(rdma), "--store-bytes", str(size), MC_STORE_USE_HUGEPAGE="1")
        return [told[what][0] for what in ("huge pages", "memory")]

    assert found(1 << 60) == ["bad", "bad"]
    assert found(0) == ["ok", "ok"]


def test_huge_pages_that_are_asked_for_and_not_there_are_bad():
    state, _, advice = doctor("--store-bytes", str(64 << 20), MC_STORE_USE_HUGEPAGE="1")["huge pages"]
    if state == "ok":
        pytest.skip("this machine has huge pages to spare")
    assert state == "bad"
    assert "vm.nr_hugepages=32" in advice


def test_a_small_dev_shm_is_told():
    small = in_a_namespace("mount -t tmpfs -o size=16m none /dev/shm")
    state, seen, advice = doctor(before=small)["/dev/shm"]
    assert (state, seen) == ("warn", "16.0 MiB of 16.0 MiB free")
    assert "--shm-size" in advice


def test_a_missing_dev_shm_is_bad(rdma: Path):
    (rdma / "dev/shm").rmdir()
    assert doctor("--root", str(rdma))["/dev/shm"][0] == "bad"


def test_a_store_larger_than_the_memory_is_bad():
    found = doctor("--store-bytes", str(1 << 60))
    state, _, advice = found["memory"]
    assert (state, found.code) == ("bad", 1)
    assert "--store-bytes" in advice


def test_a_data_folder_that_cannot_be_written_is_bad(tmp_path: Path):
    (tmp_path / "file").touch()
    state, seen, _ = doctor("--data-dir", str(tmp_path / "file" / "data"))["data folder"]
    assert state == "bad"
    assert "cannot be written" in seen


def test_a_full_disk_is_told(tmp_path: Path):
    full = in_a_namespace(f"mount -t tmpfs -o size=16m none {tmp_path}")
    state, seen, _ = doctor("--data-dir", str(tmp_path), before=full)["data folder"]
    assert state == "warn"
    assert seen.startswith("16.0 MiB free")


@contextlib.contextmanager
def redis(folder: Path, *extra: str) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis.start(folder, extra=extra)
    try:
        yield server
    finally:
        server.stop()


def test_a_redis_that_is_fit_is_not_written_to(tmp_path: Path):
    import redis as driver

    with redis(tmp_path) as server:
        state, seen, _ = doctor("--redis-url", server.url)["Redis"]
        assert state == "ok"
        assert f"127.0.0.1:{server.port}" in seen
        with driver.Redis.from_url(server.url) as client:
            assert client.dbsize() == 0


@pytest.mark.parametrize(
    ("extra", "state", "advised"),
    [
        (("--maxmemory-policy", "allkeys-lru"), "bad", "CONFIG SET maxmemory-policy noeviction"),
        (("--appendonly", "no"), "warn", "appendonly yes"),
        (("--requirepass", "secret-word"), "bad", "--redis-url"),
        (("--replicaof", "127.0.0.1 1"), "bad", "primary"),
    ],
)
def test_a_redis_that_is_not_fit_is_told(tmp_path: Path, extra: tuple[str, ...], state: str, advised: str):
    with redis(tmp_path, *extra) as server:
        found = doctor("--redis-url", server.url)["Redis"]
    assert found[0] == state
    assert advised in found[2]
    assert "secret-word" not in str(found)


def test_a_redis_that_is_not_there_and_a_url_that_is_none(tmp_path: Path):
    port = free_port()
    found = doctor("--redis-url", f"redis://user:secret-word@127.0.0.1:{port}/0")
    assert (found["Redis"][0], found.code) == ("bad", 1)
    assert "secret-word" not in json.dumps(found.findings)
    found = doctor("--redis-url", "http://:secret-word@x")
    assert found["Redis"][0] == "bad"
    assert "secret-word" not in json.dumps(found.findings)


def test_a_master_and_its_storage_nodes_are_seen(tmp_path: Path):
    needs_mooncake()
    with MooncakeCluster(32 << 20, nodes=2, log_folder=tmp_path) as cluster:
        asked = ("--master", cluster.master, "--master-http", cluster.master_http)
        found = doctor(*asked)
        assert found["Mooncake master"] == ("ok", f"listens at {cluster.master}", "")
        assert found["storage nodes"][:2] == ("ok", "2 segments with 0.1 GiB")
        state, _, advice = doctor("--master", cluster.master, "--master-http", f"127.0.0.1:{free_port()}")[
            "storage nodes"
        ]
        assert state == "bad"
        assert "--master-http" in advice
    found = doctor(*asked)
    assert (found["Mooncake master"][0], found.code) == ("bad", 1)
    assert "mooncake_master" in found["Mooncake master"][2]


def test_a_master_without_a_storage_node_is_bad(tmp_path: Path):
    needs_mooncake()
    with MooncakeCluster(32 << 20, nodes=0, log_folder=tmp_path) as cluster:
        found = doctor("--master", cluster.master, "--master-http", cluster.master_http)
        state, _, advice = found["storage nodes"]
    assert state == "bad"
    assert "start one" in advice


def test_a_control_plane_that_is_ready(stack: Stack):
    found = doctor("--url", stack.url)
    assert found["control plane"][0] == "ok"
    assert found["clock"][:2] == ("ok", "agrees with the control plane's")


def test_a_control_plane_that_is_not_there_or_something_else(tmp_path: Path):
    found = doctor("--url", f"http://127.0.0.1:{free_port()}")
    assert (found["control plane"][0], found.code) == ("bad", 1)
    with relay("http://127.0.0.1:1", text="<html>") as url:
        state, seen, _ = doctor("--url", url)["control plane"]
    assert state == "bad"
    assert "no control plane" in seen


def test_a_control_plane_whose_redis_is_gone_says_so(tmp_path: Path):
    from api.settings import Settings, StoreSettings
    from tests.servers import serving

    store = StoreSettings(kind="file", path=str(tmp_path / "store"))
    gone = f"redis://127.0.0.1:{free_port()}/0"
    with serving(Settings(redis_url=gone, port=free_port(), store=store)) as url:
        state, _, advice = doctor("--url", url)["control plane"]
    assert state == "bad"
    assert "redis" in advice


@contextlib.contextmanager
def relay(
    target: str, *, date: str | None = None, version: str | None = None, text: str | None = None
) -> Iterator[str]:
    """Pass requests on to a control plane, and answers back with another date, version or text."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, code = text, 200
            if body is None:
                answer = httpx.get(f"{target}{self.path}", trust_env=False)
                body, code = answer.text, answer.status_code
            if version is not None and self.path == "/openapi.json":
                body = json.dumps({"info": {"version": version}})
            self.send_response_only(code)
            self.send_header("date", date or self.date_time_string())
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_clocks_and_versions_that_differ_are_told(stack: Stack):
    with relay(stack.url, date="Mon, 01 Jan 2024 00:00:00 GMT") as url:
        state, seen, advice = doctor("--url", url)["clock"]
    assert state == "warn"
    assert int(seen.partition(" ")[0]) > 86_400
    assert "NTP" in advice
    with relay(stack.url, version="7.7.7") as url:
        state, seen, _ = doctor("--url", url)["control plane"]
    assert state == "warn"
    assert "7.7.7" in seen
