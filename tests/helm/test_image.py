"""The Dockerfile: walked step by step in a chroot, until the service answers from inside it."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from caketin.embedded_redis import EmbeddedRedis
from dataplane.child_process import ChildProcess, free_port, free_ports
from tests.helm.dockerfile import read_dockerfile
from tests.helm.image_walk import REPO, Image, ImageWalk, in_namespace, needs_root, script_in

pytestmark = [pytest.mark.helm, pytest.mark.timeout(900)]

MIB = 1 << 20


@pytest.fixture(scope="module")
def walk() -> ImageWalk:
    needs_root()
    return ImageWalk()


@pytest.fixture(scope="module")
def api(walk: ImageWalk) -> Image:
    return walk.build("api")


@pytest.fixture(scope="module")
def dataplane(walk: ImageWalk) -> Image:
    return walk.build("dataplane")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis.start(tmp_path / "redis", appendonly=False)
    yield server
    server.stop()


def run(image: Image, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as the image's user on a read-only root."""
    script = script_in(image.layers, command, user=image.config.user, mounts=[("tmpfs", "mode=1777", "/tmp")])
    return subprocess.run(
        in_namespace(script),
        env=image.config.env | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@contextlib.contextmanager
def container(
    image: Image, log: Path, arguments: Sequence[str] | None = None, **env: str
) -> Iterator[ChildProcess]:
    """Run the image as a runtime would: entry point, its command or `arguments`, user, variables."""
    config = image.config
    command = [*config.entrypoint, *(config.command if arguments is None else arguments)]
    script = script_in(image.layers, command, user=config.user, mounts=[("tmpfs", "mode=1777", "/tmp")])
    child = ChildProcess.start(log.stem, in_namespace(script), log, config.env | env)
    try:
        yield child
    finally:
        child.stop(15)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_hadolint_finds_nothing_smoke() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    found = shutil.which(str(linter)) or shutil.which("hadolint")
    assert found, "hadolint comes with the extra helm"
    done = subprocess.run(
        [found, "--failure-threshold", "style", str(REPO / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_both_images_end_as_a_user_with_a_health_check_and_no_shell_between_smoke() -> None:
    stages = {s.name: s for s in read_dockerfile(REPO / "Dockerfile")}
    for target in ("api", "dataplane"):
        last = {i.word: i.rest for i in stages[target].instructions}
        uid = last["USER"].split(":")[0]
        assert uid.isdigit(), "Kubernetes cannot tell that a user with a name is not root"
        assert int(uid) > 0
        assert "HEALTHCHECK" in last
        # A shell as process 1 would keep SIGTERM from the program.
        assert last["ENTRYPOINT"].startswith("[")
        assert "COPY" in last
        assert last["COPY"].startswith("--from=")


def test_the_build_context_holds_what_is_copied_and_little_else_smoke() -> None:
    lines = (REPO / ".dockerignore").read_text().split()
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = set()
    for stage in read_dockerfile(REPO / "Dockerfile"):
        for i in stage.instructions:
            if i.word == "COPY" and not i.rest.startswith("--from"):
                copied |= set(i.rest.split()[:-1])
    assert lines[0] == "*"
    assert copied == let_in
    assert all((REPO / name).exists() for name in copied)


def test_the_control_plane_answers_from_inside_its_image(
    api: Image, redis: EmbeddedRedis, tmp_path: Path
) -> None:
    port = free_port()
    env = {"CAKETIN_REDIS_URL": redis.url, "CAKETIN_STORE_PATH": "/tmp/pages", "CAKETIN_PORT": str(port)}
    url = f"http://127.0.0.1:{port}"
    with container(api, tmp_path / "api.log", **env) as child:
        child.wait_ready(lambda: answers(f"{url}/readyz"), 60)
        assert httpx.get(f"{url}/openapi.json", trust_env=False).json()["info"]["title"]
        status = Path(f"/proc/{child.process.pid}/status").read_text()
        assert "Uid:\t10001\t10001" in status
        # The image's own health check, against the port that it is for.
        check = [part.replace("7411", str(port)) for part in api.config.healthcheck]
        assert run(api, *check).returncode == 0
        child.ask_to_end()
        assert child.process.wait(20) == 0, child.tail()
    assert run(api, *check).returncode != 0


def test_the_root_is_read_only_and_the_program_does_not_mind(api: Image) -> None:
    done = run(api, "sh", "-c", "touch /opt/caketin/x; caketin --version")
    assert "Read-only file system" in done.stderr
    assert done.stdout.startswith("caketin "), done.stderr


def test_the_api_image_has_neither_torch_nor_mooncake_nor_pip(api: Image) -> None:
    code = (
        "import importlib.util as u; print([m for m in ('torch', 'mooncake', 'pip', 'setuptools') "
        "if u.find_spec(m)])"
    )
    assert run(api, "/opt/caketin/bin/python", "-c", code).stdout.strip() == "[]"
    own = api.own_bytes()
    assert own < 250 * MIB, f"{own / MIB:.0f} MiB on top of Debian"


def test_what_is_installed_is_what_the_constraints_say(api: Image, dataplane: Image) -> None:
    pinned = {}
    for line in (REPO / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        pinned[name.lower().replace("_", "-")] = version
    code = (
        "from importlib.metadata import distributions as d\n"
        "for x in d(): print(x.metadata['Name'].lower().replace('_', '-'), x.version)"
    )
    for image in (api, dataplane):
        done = run(image, "/opt/caketin/bin/python", "-c", code)
        installed = dict(line.split() for line in done.stdout.splitlines())
        assert "caketin" in installed
        for name, version in installed.items():
            assert name == "caketin" or pinned.get(name) == version, f"{name} {version} is not pinned"


def test_no_setuid_program_of_ours_and_nothing_left_of_the_build(api: Image, dataplane: Image) -> None:
    for image in (api, dataplane):
        assert image.files("src/*") == []
        assert image.files("var/lib/apt/lists/*_Packages*") == []
        assert image.files("*.deb") == []


def test_a_store_made_of_the_dataplane_image_restores_every_byte(
    api: Image, dataplane: Image, redis: EmbeddedRedis, tmp_path: Path
) -> None:
    rpc, http, health, port = free_ports(4)
    master = ["mooncake-master", f"--rpc_port={rpc}", f"--metrics_port={http}", "--rpc_address=127.0.0.1"]
    master += ["--metrics_host=127.0.0.1", "--minloglevel=1"]
    node = ["storage-node", f"--master=127.0.0.1:{rpc}", f"--master-http=127.0.0.1:{http}"]
    node += ["--segment=64Mi", f"--health-port={health}"]
    env = {
        "CAKETIN_REDIS_URL": redis.url,
        "CAKETIN_PORT": str(port),
        "CAKETIN_STORE_KIND": "mooncake",
        "CAKETIN_STORE_MASTER": f"127.0.0.1:{rpc}",
    }
    with (
        container(dataplane, tmp_path / "master.log", master),
        container(dataplane, tmp_path / "node.log", node) as storage,
        container(api, tmp_path / "api.log", **env) as control,
    ):
        storage.wait_ready(lambda: answers(f"http://127.0.0.1:{health}/readyz"), 60)
        control.wait_ready(lambda: answers(f"http://127.0.0.1:{port}/readyz"), 60)
        done = run(
            dataplane, "caketin", "replay", f"--url=http://127.0.0.1:{port}", "--limit=20", "--json=-",
            "--page-bytes=16384", "--call-seconds=10",
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["wrong_pages"] == 0
    assert report["verified_pages"] == report["hit_pages"] > 0, report
