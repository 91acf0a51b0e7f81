"""The chart's pods as it renders them, run as processes: they become ready, and `helm test` passes."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import Rendered, render
from tests.helm.compose import Project
from tests.helm.image_walk import ImageWalk, needs_root
from tests.helm.kubelet import pods_as_services
from tests.helm.test_install_page import LINES

pytestmark = [pytest.mark.helm, pytest.mark.timeout(600)]

VALUES: dict[str, Any] = {
    "api": {"replicas": 1},
    "agent": {"enabled": True, "hostNetwork": False, "hostMemory": "64Mi"},
    "mooncake": {"storage": {"segmentSize": "128Mi"}},
}
PODS = ["redis", "mooncake-master", "mooncake-storage-0", "mooncake-storage-1", "api", "agent"]
TEST = ("doctor", "replay")


@contextlib.contextmanager
def running(rendered: Rendered, folder: Path, pods: list[str]) -> Iterator[Project]:
    needs_root()
    # Their users read their files through it.
    for above in (folder, *list(folder.parents)[:2]):
        above.chmod(0o755)
    order = [*pods, *TEST]
    compose = pods_as_services(rendered, folder, lambda name: f"10.88.0.{order.index(name) + 2}")
    started = Project(ImageWalk(), folder, compose, later=TEST)
    try:
        started.up(pods)
        for pod in started.running.values():
            pod.wait_healthy()
        yield started
    finally:
        started.down()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with running(render(VALUES), tmp_path_factory.mktemp("pods"), PODS) as started:
        yield started


def status(project: Project, pod: str) -> dict[str, str]:
    lines = Path(f"/proc/{project.running[pod].child.process.pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def test_every_pod_is_ready_as_the_user_and_with_the_powers_that_it_was_given(cluster: Project) -> None:
    ipc_lock = 1 << 14
    for pod in PODS:
        told = status(cluster, pod)
        assert told["NoNewPrivs"] == "1"
        if pod == "agent":
            assert told["Uid"].split()[0] == "0"
            assert int(told["CapEff"], 16) == ipc_lock
        else:
            assert told["Uid"].split()[0] == "10001", pod
            assert int(told["CapEff"], 16) == 0, pod


def test_helm_test_passes(cluster: Project) -> None:
    for container in TEST:
        run = cluster.start(container)
        assert run.child.process.wait(120) == 0, run.child.tail()
    assert "wrong bytes" in run.child.log.read_text()


def test_helm_test_passes_over_tls_with_a_certificate_of_a_private_authority(tmp_path: Path) -> None:
    import trustme

    authority = trustme.CA()
    certificate = authority.issue_cert("caketin-api.ml.svc")
    secret = {
        "tls.crt": certificate.cert_chain_pems[0].bytes().decode(),
        "tls.key": certificate.private_key_pem.bytes().decode(),
        "ca.crt": authority.cert_pem.bytes().decode(),
    }
    rendered = render(VALUES | {"tls": {"enabled": True, "existingSecret": "tls"}})
    rendered.objects.append({"kind": "Secret", "metadata": {"name": "tls"}, "stringData": secret})
    with running(rendered, tmp_path, PODS) as started:
        for container in TEST:
            run = started.start(container)
            assert run.child.process.wait(120) == 0, run.child.tail()


def test_the_programs_are_process_one_and_hear_when_they_are_told_to_end(cluster: Project) -> None:
    """A shell in between would keep SIGTERM to itself, and Kubernetes would kill after the grace period."""
    for pod in reversed(PODS):
        if pod.startswith("mooncake-storage"):
            continue
        assert cluster.running[pod].stop() == 0, f"{pod}: {cluster.running[pod].child.tail()}"
    for pod in ("redis", "mooncake-master", "api", "agent"):
        cluster.start(pod).wait_healthy()


def test_redis_asks_for_the_password_and_keeps_what_it_has_over_a_restart(cluster: Project) -> None:
    redis = cluster.running["redis"]
    password = redis.env["REDIS_PASSWORD"]
    assert "NOAUTH" in redis.run(["valkey-cli", "ping"]).stdout
    command = Path(f"/proc/{redis.child.process.pid}/cmdline").read_text()
    assert password not in command
    ask = ["sh", "-c", 'REDISCLI_AUTH="$REDIS_PASSWORD" valkey-cli "$@"', "sh"]
    assert redis.run([*ask, "set", "kept", "yes"]).stdout.strip() == "OK"
    assert redis.stop() == 0
    again = cluster.start("redis")
    again.wait_healthy()
    assert again.run([*ask, "get", "kept"]).stdout.strip() == "yes"
    assert again.run([*ask, "config", "get", "maxmemory-policy"]).stdout.split()[1] == "noeviction"


def test_a_backup_is_restored_with_the_commands_of_the_page(cluster: Project, tmp_path: Path) -> None:
    def ask(*words: str) -> str:
        command = ["sh", "-c", 'REDISCLI_AUTH="$REDIS_PASSWORD" valkey-cli "$@"', "sh", *words]
        return cluster.running["redis"].run(command).stdout.strip()

    def follow(line: str) -> None:
        redis = cluster.running["redis"]
        script = f"redis={shlex.quote(shlex.join(redis.enter()))}\n{line}"
        done = subprocess.run(
            ["bash", "-ec", script],
            cwd=tmp_path,
            env=redis.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    backup, restore = [line for line in LINES if line.startswith("$redis ")]
    for times in ("once", "again"):
        assert ask("set", "old", times) == "OK"
        follow(backup)
        ask("del", "old")
        ask("set", "new", "gone")
        follow(restore)
        assert cluster.running["redis"].child.process.wait(30) == 0
        cluster.start("redis").wait_healthy()
        assert (ask("get", "old"), ask("get", "new")) == (times, "")
    # What is no backup takes nobody's place.
    (tmp_path / "backup.rdb").write_bytes(b"error: not found")
    with pytest.raises(AssertionError):
        follow(restore)
    assert ask("get", "old") == "again"


def test_the_agents_folders_are_the_nodes(cluster: Project) -> None:
    node = cluster.folder / "node"
    assert (node / "run-caketin" / "agent.sock").is_socket()
    assert (node / "dev-shm-caketin" / "lock").exists()
    asked = cluster.running["agent"].run(
        ["curl", "-sS", "--unix-socket", "/run/caketin/agent.sock", "http://agent/readyz"]
    )
    assert json.loads(asked.stdout)["status"] == "ready"
