"""The command line as a user meets it: real processes, real signals, nothing left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from caketin.child_process import free_port

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


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    path.write_text(TRACE)
    return path


@pytest.mark.parametrize("pools", ["deepseek-v4", "mha-swa"])
def test_replay_gives_exact_numbers_and_leaves_nothing_behind(tmp_path: Path, trace: Path, pools: str):
    cache = tmp_path / "cache"
    done = caketin("replay", str(trace), "--store", "file", "--pools", pools, "--json", "-", cache=cache)
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert (numbers["requests"], numbers["asked_pages"]) == (5, 30)
    assert (numbers["promised_pages"], numbers["hit_pages"], numbers["backed_up_pages"]) == (8, 8, 22)
    assert (numbers["verified_pages"], numbers["wrong_pages"], numbers["lost_pages"]) == (8, 0, 0)
    assert numbers["misses"] == {"not_stored": 22}
    assert not processes_of(cache)
    assert not list((cache / "caketin").glob("replay-*"))


def test_replay_prints_a_table_and_what_to_do_next(tmp_path: Path, trace: Path):
    done = caketin("replay", str(trace), "--store", "file", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert re.search(r"restored from L3\W+8\W+26.667 %", done.stdout)
    assert "caketin up" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "absent.jsonl"], "absent.jsonl cannot be read: No such file"),
        (["replay", "--pools", "gpt"], "use one of deepseek-v4, mha-swa"),
        (["replay", "--page-bytes", "1"], "--page-bytes"),
        (["replay", "--store", "tape"], "auto, file or mooncake"),
        (["replay", "--url", "http://127.0.0.1:1"], "127.0.0.1:1"),
        (["serve", "--host", "0.0.0.0"], "use 127.0.0.1"),
        (["serve", "--port", "70000"], "port"),
    ],
)
def test_what_a_user_gets_wrong_is_said_in_a_sentence(tmp_path: Path, arguments: list[str], said: str):
    done = caketin(*arguments, cache=tmp_path / "cache")
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    port = free_port()
    folder = tmp_path / "data"
    command = [sys.executable, "-m", "caketin", "up", "--store", "file", "--port", str(port)]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [*command, "--data-dir", str(folder)], stdout=out, stderr=out, env=environment(tmp_path)
        )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, (tmp_path / "out").read_text()
        try:
            return httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(ready, 30, "the stack did not start")
        yield process, url, folder
    finally:
        process.kill()
        process.wait()
        wait_until(lambda: not processes_of(tmp_path), 10, "children outlived their parent")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_ends_everything_on_a_signal_and_keeps_what_was_stored(
    running, tmp_path: Path, trace: Path, number
):
    process, url, folder = running
    first = caketin("replay", str(trace), "--url", url, "--json", "-", cache=tmp_path / "cache")
    assert json.loads(first.stdout)["hit_pages"] == 8
    again = caketin("replay", str(trace), "--url", url, "--json", "-", cache=tmp_path / "cache")
    assert json.loads(again.stdout)["hit_pages"] == 30
    process.send_signal(number)
    assert process.wait(15) == 0
    assert not processes_of(tmp_path)
    assert any((folder / "pages").rglob("*"))


def test_up_ends_with_an_error_when_a_part_dies(running, tmp_path: Path):
    process, _, _ = running
    pids = [pid for pid, name in processes_of(tmp_path).items() if name.startswith("valkey")]
    assert len(pids) == 1
    os.kill(pids[0], signal.SIGKILL)
    assert process.wait(15) == 1
    assert "valkey ended with code -9" in (tmp_path / "out").read_text()
    assert not processes_of(tmp_path)


def test_a_byte_flipped_in_the_store_is_never_served(running, tmp_path: Path, trace: Path):
    _, url, folder = running
    assert caketin("replay", str(trace), "--url", url, cache=tmp_path / "cache").returncode == 0
    files = [p for p in (folder / "pages" / "objects").rglob("*") if p.is_file() and "manifest" not in str(p)]
    assert files
    for path in files:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(bytes(content))
    done = caketin("replay", str(trace), "--url", url, "--json", "-", cache=tmp_path / "cache")
    numbers = json.loads(done.stdout)
    assert numbers["wrong_pages"] == 0
    assert numbers["lost_pages"] > 0
