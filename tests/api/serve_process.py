"""A real `caketin serve` process, with its memory to be measured and its log to be read."""

from __future__ import annotations

import contextlib
import os
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from dataplane.child_process import ChildProcess, free_port


@dataclass
class Served:
    """A running process."""

    url: str
    port: int
    child: ChildProcess

    @property
    def log(self) -> str:
        return self.child.log.read_text(errors="replace")

    def rss(self) -> int:
        """Resident memory in bytes."""
        return rss(self.child.process.pid)


def rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory")


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "caketin", "serve", *flags]


def environment(**more: str) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("CAKETIN_", "COV_"))}
    return own | {"NO_COLOR": "1", "COLUMNS": "200"} | more


@contextlib.contextmanager
def served(
    redis_url: str, folder: Path, *flags: str, ready: bool = True, authority: Path | None = None, **env: str
) -> Iterator[Served]:
    """Run `caketin serve` until the end of the block; with an authority it is asked over HTTPS."""
    port = free_port()
    own = ["--port", str(port), "--redis-url", redis_url, "--store-path", str(folder / "store")]
    child = ChildProcess.start(
        "caketin serve", command(*own, *flags), folder / f"serve-{port}.log", environment(**env)
    )
    trust = True if authority is None else ssl.create_default_context(cafile=authority)
    url = f"{'http' if authority is None else 'https'}://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            path = "readyz" if ready else "healthz"
            return httpx.get(f"{url}/{path}", timeout=2, verify=trust).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        child.wait_ready(answers, 30)
        yield Served(url, port, child)
    finally:
        child.stop(15)
