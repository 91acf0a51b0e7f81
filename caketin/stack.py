"""Everything on one machine, as child processes: Redis, a store, the control plane."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

import httpx

from caketin.embedded_redis import EmbeddedRedis
from dataplane.child_process import ChildFailed, ChildProcess, free_port
from dataplane.mooncake_node import MooncakeCluster
from dataplane.mooncake_store import MooncakeStore
from dataplane.rdma_settings import RdmaSettings, environment
from metadata.errors import CaketinError

StoreChoice: TypeAlias = Literal["auto", "file", "mooncake"]

_HOST: Final = "127.0.0.1"
_AGENT_SECONDS: Final = 30.0
_READY_SECONDS: Final = 120.0  # slow machines; a part that ends is noticed at once


class InUse(CaketinError):
    """Something else has what the stack needs: the folder, or the port."""

    code = "in_use"

    def __str__(self) -> str:
        return self.detail


def cache_folder() -> Path:
    """Return the folder that caketin may fill: `$XDG_CACHE_HOME/caketin`, or `~/.cache/caketin`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "caketin"


@dataclass(frozen=True)
class AgentOptions:
    """The agent of a stack.

    Attributes:
        memory_bytes: most bytes of its pools.
        socket: where engines find it; None: `agent.sock` in the data folder.
        settings: further settings, by the names of its variables without `CAKETIN_AGENT_`, in lower case.
    """

    memory_bytes: int = 1 << 30
    socket: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StackSettings:
    """What to start.

    Attributes:
        data_dir: folder for data and logs.
        port: of the control plane; None takes a free one.
        store: `mooncake`, `file`, or `auto`: Mooncake where its library loads.
        store_bytes: memory that the Mooncake storage node lends.
        redis_url: a Redis that runs already; None starts one.
        control: further settings of the control plane, as `CAKETIN_*` variables.
        rdma: how Mooncake moves bytes over RDMA; None: over TCP.
        agent: an agent for engines of this machine; None starts none.
    """

    data_dir: Path
    port: int | None = None
    store: StoreChoice = "auto"
    store_bytes: int = 4 << 30
    redis_url: str | None = None
    control: Mapping[str, str] = field(default_factory=dict)
    rdma: RdmaSettings | None = None
    agent: AgentOptions | None = None


class FolderLock:
    """A folder taken by this process until it ends. A lock instead of a process id: ids come again."""

    def __init__(self, folder: Path) -> None:
        """Take `folder`, making it where there is none.

        Raises:
            InUse: another process has it, or it cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InUse(f"{folder} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise InUse(
                f"another caketin (process {holder or 'unknown'}) is running on {folder}: end it, or give "
                "this one a --data-dir of its own"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others have the folder."""
        os.close(self._fd)


@dataclass
class Stack:
    """A running stack; a context manager that leaves nothing behind. For the main thread.

    Claims live as long as the bytes they speak of: with the file store both are on disk and outlive the
    stack; with Mooncake both are in memory and end with it.

    Attributes:
        settings: what was asked for.
        store: kind of the store that was chosen.
        why_store: why it is that one.
        redis_url: where Redis is.
        url: where the control plane is.
        mooncake: the Mooncake cluster, where there is one.
        agent_socket: where the agent is, where there is one.
    """

    settings: StackSettings
    store: str = ""
    why_store: str = ""
    redis_url: str = field(default="", repr=False)
    url: str = ""
    mooncake: MooncakeCluster | None = None
    _redis: EmbeddedRedis | None = None
    agent_socket: Path | None = None
    _control: ChildProcess | None = None
    _agent: ChildProcess | None = None
    _lock: FolderLock | None = None

    def __enter__(self) -> Stack:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def children(self) -> list[ChildProcess]:
        """The processes that were started, in that order."""
        redis = [self._redis.child] if self._redis else []
        control = [self._control] if self._control else []
        agent = [self._agent] if self._agent else []
        return [*redis, *(self.mooncake.children if self.mooncake else []), *control, *agent]

    def start(self) -> None:
        """Start all parts in order and wait until each serves.

        Raises:
            InUse: another stack has the folder, or something listens at the port.
            ChildFailed: a part ended or was not ready in time; the text holds the end of its log.
            StoreUnavailable: Mooncake was asked for and does not start.
        """
        folder = self.settings.data_dir
        if self.settings.rdma is not None:
            environment.tell(self.settings.rdma)  # a look whether Mooncake loads is a load
        self._lock = FolderLock(folder)
        port = _checked_port(self.settings.port)
        self._choose_store()
        self.redis_url = self.settings.redis_url or self._start_redis(folder)
        store = self._start_store(folder)
        self._start_control(folder, port, store)
        if self.settings.agent is not None:
            self._start_agent(folder, self.settings.agent)

    def stop(self) -> None:
        """End what was started, last first; twice is fine."""
        if self._agent is not None:
            self._agent.stop(_AGENT_SECONDS)
        if self._control is not None:
            self._control.stop(10.0)
        if self.mooncake is not None:
            self.mooncake.stop()
        if self._redis is not None:
            self._redis.stop()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def kill(self) -> None:
        """End all processes at once; `stop`, which may be waiting for them, then has nothing to wait for."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()

    def dead(self) -> str | None:
        """Return which part has ended, with the end of its log, or None while all run."""
        return next((ended for child in self.children if (ended := child.ended()) is not None), None)

    def _choose_store(self) -> None:
        wanted = self.settings.store
        loads, why = (False, "") if wanted == "file" else MooncakeStore.available()
        if wanted == "mooncake" or (wanted == "auto" and loads):
            self.store = "mooncake"
            self.why_store = f"in memory, over {'TCP' if self.settings.rdma is None else 'RDMA'}"
        else:
            self.store = "file"
            self.why_store = "as asked" if wanted == "file" else f"Mooncake does not load: {why}"

    def _start_redis(self, folder: Path) -> str:
        on_disk = self.store == "file"
        self._redis = EmbeddedRedis.start(
            folder / ("redis" if on_disk else "redis-in-memory"), appendonly=on_disk
        )
        return self._redis.url

    def _start_store(self, folder: Path) -> dict[str, str]:
        """Start the chosen store; return the settings that tell the control plane of it."""
        if self.store == "file":
            return {"CAKETIN_STORE_KIND": "file", "CAKETIN_STORE_PATH": str((folder / "pages").resolve())}
        rdma = self.settings.rdma
        self.mooncake = MooncakeCluster(
            self.settings.store_bytes,
            log_folder=folder / "mooncake",
            ready_seconds=_READY_SECONDS,
            rdma=rdma,
        )
        self.mooncake.start()
        told = {"KIND": "mooncake", "MASTER": self.mooncake.master}
        told |= {} if rdma is None else {"PROTOCOL": "rdma", "DEVICES": rdma.devices}
        return {f"CAKETIN_STORE_{name}": value for name, value in told.items()}

    def _start_control(self, folder: Path, port: int, store: dict[str, str]) -> None:
        self.url = f"http://{_HOST}:{port}"
        env = {k: v for k, v in os.environ.items() if not k.startswith("CAKETIN_")}
        env |= store | {"CAKETIN_REDIS_URL": self.redis_url, "CAKETIN_PORT": str(port)}
        env |= self.settings.control
        command = [sys.executable, "-m", "caketin", "serve"]
        self._control = ChildProcess.start("control plane", command, folder / "control-plane.log", env)
        self._control.wait_ready(self._ready, _READY_SECONDS)

    def _start_agent(self, folder: Path, options: AgentOptions) -> None:
        self.agent_socket = options.socket or folder.resolve() / "agent.sock"
        told = {
            "url": self.url,
            "socket": str(self.agent_socket),
            "shared_dir": _shared_dir(folder),
            "memory": str(options.memory_bytes),
            "local_hostname": _HOST,
            **options.settings,
        }
        env = {k: v for k, v in os.environ.items() if not k.startswith("CAKETIN_")}
        env |= {f"CAKETIN_AGENT_{name.upper()}": value for name, value in told.items()}
        command = [sys.executable, "-m", "caketin", "agent"]
        self._agent = ChildProcess.start("agent", command, folder / "agent.log", env)
        self._agent.wait_ready(self._agent_answers, _READY_SECONDS)

    def _agent_answers(self) -> bool:
        transport = httpx.HTTPTransport(uds=str(self.agent_socket))
        try:
            with httpx.Client(transport=transport, timeout=1.0) as client:
                return client.get("http://agent/healthz").is_success
        except httpx.TransportError:
            return False

    def _ready(self) -> bool:
        try:
            answer = httpx.get(f"{self.url}/readyz", timeout=1.0, trust_env=False)
        except httpx.TransportError:
            return False
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            wrong = [c["detail"] for c in answer.json()["checks"] if not c["ok"]]
            raise ChildFailed("the control plane cannot be used: " + "; ".join(wrong))
        return answer.status_code == httpx.codes.OK


def _shared_dir(folder: Path) -> str:
    """Return the agent's folder for a data folder, always the same: the next one cleans up after a crash."""
    name = hashlib.sha256(bytes(folder.resolve())).hexdigest()[:12]
    return f"/dev/shm/caketin-{os.getuid()}-{name}"  # noqa: S108  made private by the agent


def _checked_port(port: int | None) -> int:
    """Return the port to use, after a look whether it is free.

    Raises:
        InUse: it is not.
    """
    if port is None:
        return free_port(_HOST)
    try:
        socket.create_server((_HOST, port)).close()
    except OSError as error:
        detail = f"cannot listen on {_HOST} port {port}: {error.strerror}. Is another caketin up running? "
        raise InUse(detail + "Choose another port with --port") from None
    return port
