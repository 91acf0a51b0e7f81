"""`caketin up` with real processes and signals: one a folder and port, data kept, all ended together."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from caketin.embedded_redis import EmbeddedRedis
from dataplane.mooncake_store import MooncakeStore
from tests.caketin.command import TRACE, Up, caketin, environment, processes_of, up, wait_until


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    path.write_text(TRACE)
    return path


def replayed(running: Up, trace: Path, tmp_path: Path, *arguments: str) -> dict[str, int]:
    cache = tmp_path / "replay-cache"
    done = caketin("replay", str(trace), "--url", running.url, "--json", "-", *arguments, cache=cache)
    assert done.returncode in {0, 1}, done.stderr
    return json.loads(done.stdout)


def children_of(running: Up) -> dict[int, str]:
    cache = running.out.with_name(running.out.name.replace("out", "cache"))
    return {pid: name for pid, name in processes_of(cache).items() if pid != running.process.pid}


def child_with(running: Up, word: bytes) -> int:
    """Return the child whose command line has a word, or a program of that name."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children_of(running)}
    (pid,) = [p for p, said in words.items() if any(w.rpartition(b"/")[2] == word for w in said)]
    return pid


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything_and_pages_and_claims_are_there_next_time(
    tmp_path: Path, trace: Path, number: signal.Signals
):
    with up(tmp_path) as running:
        assert replayed(running, trace, tmp_path)["hit_pages"] == 8
        running.process.send_signal(number)
        assert running.process.wait(60) == 0
        assert not children_of(running)
        folder = running.folder
    with up(tmp_path, folder=folder) as again:
        numbers = replayed(again, trace, tmp_path)
        assert (numbers["hit_pages"], numbers["verified_pages"], numbers["wrong_pages"]) == (30, 30, 0)


def test_claims_outlive_a_stack_that_was_killed(tmp_path: Path, trace: Path):
    with up(tmp_path) as running:
        assert replayed(running, trace, tmp_path)["hit_pages"] == 8
        running.process.kill()
        folder = running.folder
    with up(tmp_path, folder=folder) as again:
        assert replayed(again, trace, tmp_path)["hit_pages"] == 30


def test_with_mooncake_claims_end_with_the_bytes(tmp_path: Path, trace: Path):
    loads, why = MooncakeStore.available()
    if not loads:
        pytest.skip(f"Mooncake does not load: {why}")
    folder = tmp_path / "data"
    for _ in range(2):
        with up(tmp_path, "--store", "mooncake", "--store-bytes", str(64 << 20), folder=folder) as running:
            numbers = replayed(running, trace, tmp_path)
            assert (numbers["promised_pages"], numbers["hit_pages"], numbers["lost_pages"]) == (8, 8, 0)
            names = set(children_of(running).values())
            assert {"mooncake_master"} <= names


def test_a_second_one_on_the_same_folder_says_who_has_it(tmp_path: Path):
    with up(tmp_path) as running:
        done = caketin("up", "--store", "file", "--data-dir", str(running.folder), cache=tmp_path / "second")
        assert done.returncode == 2
        said = " ".join(done.stderr.split())
        assert f"another caketin (process {running.process.pid}) is running on {running.folder}" in said
        assert running.ready()
    assert not processes_of(tmp_path / "second")


def test_a_port_in_use_is_said_with_what_to_do(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        folder = tmp_path / "data"
        asked = ("--port", str(port), "--data-dir", str(folder), "--store", "file")
        done = caketin("up", *asked, cache=tmp_path / "cache")
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in said
    assert "--port" in said
    assert not (folder / "redis").exists()  # said before anything was started
    assert not processes_of(tmp_path / "cache")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (b"valkey-server", ["valkey ended with code -9", "Ready to accept connections"]),
        (b"serve", ["control plane ended with code -9", "redis_url"]),
    ],
)
def test_a_part_that_dies_ends_all_with_the_end_of_its_log(tmp_path: Path, word: bytes, said: list[str]):
    with up(tmp_path) as running:
        os.kill(child_with(running, word), signal.SIGKILL)
        # 2 where `up` itself had not seen all parts ready yet; the server answers a moment earlier.
        assert running.process.wait(60) in {1, 2}
        text = running.out.read_text()
        assert all(part in text for part in said)
        assert not children_of(running)


def test_a_second_ctrl_c_ends_at_once_what_does_not_end_in_order(tmp_path: Path):
    with up(tmp_path) as running:
        os.kill(child_with(running, b"serve"), signal.SIGSTOP)  # it will not end for SIGTERM
        running.process.send_signal(signal.SIGINT)
        with pytest.raises(Exception, match="timed out"):
            running.process.wait(1.5)
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(5) == 0
        assert not children_of(running)


def test_a_redis_that_runs_already_is_used_and_left_running(tmp_path: Path, trace: Path):
    redis = EmbeddedRedis.start(tmp_path / "redis")
    try:
        with up(tmp_path, "--redis-url", redis.url) as running:
            assert replayed(running, trace, tmp_path)["hit_pages"] == 8
            assert "valkey-server" not in children_of(running).values()
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(60) == 0
        assert redis.child.process.poll() is None
    finally:
        redis.stop()


def test_a_redis_that_may_forget_is_refused(tmp_path: Path):
    redis = EmbeddedRedis.start(tmp_path / "redis", extra=("--maxmemory-policy", "allkeys-lru"))
    try:
        arguments = ("--redis-url", redis.url, "--data-dir", str(tmp_path / "data"), "--store", "file")
        done = caketin("up", *arguments, "--port", "17412", cache=tmp_path / "cache")
        assert done.returncode == 2
        assert "noeviction" in " ".join(done.stderr.split())
        assert not processes_of(tmp_path / "cache")
    finally:
        redis.stop()


def test_wrong_bytes_under_a_right_checksum_make_verify_red(tmp_path: Path, trace: Path):
    from tests.replay.test_replay import rewrite

    with up(tmp_path) as running:
        assert replayed(running, trace, tmp_path)["wrong_pages"] == 0
        pages = [p for p in (running.folder / "pages" / "objects").rglob("*") if "." in p.name]
        for path in pages:
            rewrite(path)
        cache = tmp_path / "replay-cache"
        done = caketin("replay", str(trace), "--url", running.url, "--json", "-", cache=cache)
        assert done.returncode == 1
        assert json.loads(done.stdout)["wrong_pages"] == 30
        assert "restored pages had wrong bytes" in done.stderr


def test_a_replay_that_was_killed_leaves_a_folder_that_the_next_one_removes(tmp_path: Path, trace: Path):
    import subprocess
    import sys

    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "caketin", "replay", "--store", "file", "--limit", "100000"]
    process = subprocess.Popen(command, env=environment(cache), stderr=subprocess.DEVNULL)
    folders = lambda: list((cache / "caketin").glob("replay-*/pages/objects/*"))  # noqa: E731
    try:
        wait_until(folders, 40, "it did not start to store")
        other = caketin("replay", str(trace), "--store", "file", cache=cache)
        assert other.returncode == 0
        assert folders()  # a replay that runs keeps its folder
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not processes_of(cache), 10, "children outlived their parent")
    assert folders()
    assert caketin("replay", str(trace), "--store", "file", cache=cache).returncode == 0
    assert not list((cache / "caketin").glob("replay-*"))


def test_two_replays_at_once_do_not_end_each_others_registration(tmp_path: Path):
    with up(tmp_path) as running:
        _two_replays(running.url, tmp_path)


def _two_replays(url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "caketin", "replay", "--url", url, "--json", "-", "--limit"]
    long, short = (
        subprocess.Popen(
            [*command, limit, "--seed", limit],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(tmp_path / "cache"),
        )
        for limit in ("400", "20")
    )
    with long, short:
        for process in (short, long):
            output, _ = process.communicate(timeout=120)
            numbers = json.loads(output)
            assert process.returncode == 0
            assert numbers["hit_pages"] + numbers["backed_up_pages"] == numbers["asked_pages"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--mtu", "1024"], "--protocol is tcp"),
        (["--protocol", "rdma", "--mtu", "1500"], "mtu is 1500"),
        (["--protocol", "rdma", "--devices", "tp=mlx5_0"], "devices has 'tp=mlx5_0'"),
        (["--protocol", "rdma", "--store", "mooncake", "--devices", "mlx5_99"], "mlx5_99 is not here"),
    ],
)
def test_rdma_that_cannot_be_is_told_before_or_while_the_stack_starts(
    tmp_path: Path, flags: list[str], says: str
):
    done = caketin("up", "--data-dir", str(tmp_path / "up"), *flags, cache=tmp_path / "cache")
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())


def test_up_with_an_agent_serves_engines_and_ends_with_it(tmp_path: Path):
    from dataplane.agent_client import AgentClient
    from tests.agent.world import KV_SWA, Engine, prompt, session_request

    folder = Path(tempfile.mkdtemp(prefix="ct-up-"))
    try:
        with up(tmp_path, "--agent", "--agent-memory", "16Mi", folder=folder) as running:
            assert str(folder / "agent.sock") in running.out.read_text().replace("\n", "")
            with AgentClient(folder / "agent.sock") as client, client.open(session_request(KV_SWA, 8)) as s:
                Engine(s, KV_SWA).publish(prompt("p", 4))
                shared = Path(s.opened.pools["kv"].path).parents[1]
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(40) == 0
            assert not shared.exists()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
