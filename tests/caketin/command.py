"""The command as a user runs it: real processes, found again by what is in their environment."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from dataplane.child_process import free_port

TRACE = "\n".join(json.dumps({"hash_ids": [0, 1, *range(10 * i, 10 * i + 4)]}) for i in range(1, 6))


def caketin(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "caketin", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        env=environment(cache),
        check=False,
    )


def environment(cache: Path) -> dict[str, str]:
    """Return what a command runs in; the cache folder's name marks all processes that it starts."""
    own = {"XDG_CACHE_HOME": str(cache), "COLUMNS": "200", "NO_COLOR": "1", "CAKETIN_STORE_PATH": str(cache)}
    return {**os.environ, **own}


def processes_of(cache: Path) -> dict[int, str]:
    """Return the processes that a command with this cache folder started: pid -> name."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"XDG_CACHE_HOME={cache}\0".encode() in (entry / "environ").read_bytes()
            if marked:
                found[int(entry.name)] = (entry / "comm").read_text().strip()
        except OSError:
            continue
    return found


def wait_until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@dataclass
class Up:
    """A running `caketin up`."""

    process: subprocess.Popen[bytes]
    url: str
    folder: Path
    out: Path

    def ready(self) -> bool:
        assert self.process.poll() is None, self.out.read_text()
        if "Ctrl-C ends it" not in self.out.read_text():  # it still looks at its parts itself
            return False
        try:
            return httpx.get(f"{self.url}/readyz", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def up(tmp_path: Path, *arguments: str, folder: Path | None = None, port: int | None = None) -> Iterator[Up]:
    """Run `caketin up` and wait until it is ready; at the end it and all its children must be gone."""
    port, folder = port or free_port(), folder or tmp_path / "data"
    store = () if "--store" in arguments else ("--store", "file")
    command = [sys.executable, "-m", "caketin", "up", "--port", str(port), "--data-dir", str(folder)]
    cache = tmp_path / f"cache-{port}"
    out = tmp_path / f"out-{port}"
    with out.open("wb") as written:
        process = subprocess.Popen(
            [*command, *store, *arguments],
            stdout=written,
            stderr=written,
            env=environment(cache),
            start_new_session=True,
        )
    running = Up(process, f"http://127.0.0.1:{port}", folder, out)
    try:
        wait_until(running.ready, 40, "the stack did not start")
        yield running
    finally:
        process.kill()
        process.wait()
        wait_until(lambda: not processes_of(cache), 10, "children outlived their parent")
