"""Everything on one machine, as child processes: Redis, a store, the control plane."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import httpx

from caketin.child_process import ChildFailed, ChildProcess, free_port
from caketin.embedded_redis import EmbeddedRedis
from dataplane.mooncake_node import MooncakeCluster
from dataplane.mooncake_store import MooncakeStore

StoreChoice: TypeAlias = Literal["auto", "file", "mooncake"]


def cache_folder() -> Path:
    """Return the folder that caketin may fill: `$XDG_CACHE_HOME/caketin`, or `~/.cache/caketin`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "caketin"


@dataclass(frozen=True)
class StackSettings:
    """What to start.

    Attributes:
        data_dir: folder for data and logs.
        port: of the control plane; None takes a free one.
        store: `mooncake`, `file`, or `auto`: Mooncake where its library loads.
        store_bytes: memory that the Mooncake storage node lends.
        redis_url: a Redis that runs already; None starts one.
    """

    data_dir: Path
    port: int | None = None
    store: StoreChoice = "auto"
    store_bytes: int = 4 << 30
    redis_url: str | None = None


@dataclass
class Stack:
    """A running stack; a context manager that leaves nothing behind.

    Attributes:
        settings: what was asked for.
        store: kind of the store that was chosen.
        why_store: why it is that one.
        redis_url: where Redis is.
        url: where the control plane is.
        mooncake: the Mooncake cluster, where there is one.
    """

    settings: StackSettings
    store: str = ""
    why_store: str = ""
    redis_url: str = ""
    url: str = ""
    mooncake: MooncakeCluster | None = None
    _redis: EmbeddedRedis | None = None
    _control: ChildProcess | None = None
    _watched: list[ChildProcess] = field(default_factory=list)

    def __enter__(self) -> Stack:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all parts in order and wait until each serves.

        Raises:
            ChildFailed: a part ended or was not ready in time; the text holds the end of its log.
            StoreUnavailable: Mooncake was asked for and does not start.
        """
        folder = self.settings.data_dir
        folder.mkdir(parents=True, exist_ok=True)
        self.redis_url = self.settings.redis_url or self._start_redis(folder)
        store = self._start_store(folder)
        self._start_control(folder, store)

    def stop(self) -> None:
        """End what was started, last first; twice is fine."""
        if self._control is not None:
            self._control.stop()
        if self.mooncake is not None:
            self.mooncake.stop()
        if self._redis is not None:
            self._redis.stop()

    def dead(self) -> str | None:
        """Return which part has ended, with the end of its log, or None while all run."""
        for child in self._watched:
            code = child.process.poll()
            if code is not None:
                return f"{child.name} ended with code {code}:\n{child.tail()}"
        return None

    def _start_redis(self, folder: Path) -> str:
        self._redis = EmbeddedRedis.start(folder / "redis")
        self._watched.append(self._redis.child)
        return self._redis.url

    def _start_store(self, folder: Path) -> dict[str, str]:
        """Start the chosen store; return the settings that tell the control plane of it."""
        wanted = self.settings.store
        loads, why = MooncakeStore.available()
        if wanted == "mooncake" or (wanted == "auto" and loads):
            self.store, self.why_store = "mooncake", "over TCP" if loads else why
            self.mooncake = MooncakeCluster(self.settings.store_bytes, log_folder=folder / "mooncake")
            self.mooncake.start()
            return {"CAKETIN_STORE_KIND": "mooncake", "CAKETIN_STORE_MASTER": self.mooncake.master}
        self.store = "file"
        self.why_store = "as asked" if wanted == "file" else f"Mooncake does not load: {why}"
        return {"CAKETIN_STORE_KIND": "file", "CAKETIN_STORE_PATH": str(folder / "pages")}

    def _start_control(self, folder: Path, store: dict[str, str]) -> None:
        port = self.settings.port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        env = {k: v for k, v in os.environ.items() if not k.startswith("CAKETIN_")}
        env |= store | {"CAKETIN_REDIS_URL": self.redis_url, "CAKETIN_PORT": str(port)}
        command = [sys.executable, "-m", "caketin", "serve"]
        self._control = ChildProcess.start("control plane", command, folder / "control-plane.log", env)
        self._watched.append(self._control)
        self._control.wait_ready(self._ready, 20)

    def _ready(self) -> bool:
        try:
            answer = httpx.get(f"{self.url}/readyz", timeout=1.0, trust_env=False)
        except httpx.TransportError:
            return False
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            wrong = [c["detail"] for c in answer.json()["checks"] if not c["ok"]]
            raise ChildFailed("the control plane cannot be used: " + "; ".join(wrong))
        return answer.status_code == httpx.codes.OK
