"""The command line as a user meets it: what it prints, what it refuses, what it leaves behind."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.caketin.command import TRACE, caketin, environment, processes_of, wait_until


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


def test_replay_through_an_agent_gives_exact_numbers_and_leaves_nothing_behind(tmp_path: Path, trace: Path):
    cache = tmp_path / "cache"
    command = ["replay", str(trace), "--agent", "--store", "file", "--host-pages", "12", "--json", "-"]
    done = caketin(*command, cache=cache)
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert (numbers["requests"], numbers["asked_pages"], numbers["host_slots"]) == (5, 30, 12)
    assert (numbers["hit_pages"], numbers["stored_pages"], numbers["errors"]) == (8, 22, {})
    # What all requests begin with is the youngest in host memory.
    assert (numbers["host_hit_pages"], numbers["l3_hit_pages"]) == (8, 0)
    assert (numbers["verified_pages"], numbers["wrong_pages"]) == (8, 0)
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
        (
            ["replay", "--pools", "gpt"],
            "--pools is 'gpt', use one of deepseek-v4, mha, mha-swa",
        ),
        (["replay", "--page-bytes", "1"], "--page-bytes"),
        (["replay", "--json", "/absent/x.json"], "/absent/x.json cannot be written: No such file"),
        (["replay", "--store", "tape"], "'auto', 'file', 'mooncake'"),
        (["replay", "--tp", "0"], "--tp"),
        (["replay", "--sidecars", "some"], "'all', 'tail'"),
        (["replay", "--concurrency", "0"], "--concurrency"),
        (["replay", "--agent", "--tp", "2"], "replays one rank and one request at a time"),
        (["replay", "--agent", "--url", "http://127.0.0.1:1"], "with --agent-socket"),
        (["replay", "--agent-socket", "/absent.sock"], "/absent.sock"),
        (["up", "--port", "0"], "--port"),
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


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_ctrl_c_ends_a_replay_with_the_table_of_what_was_counted_until_then(tmp_path: Path, ranks: str):
    cache, out = tmp_path / "cache", tmp_path / "out"
    command = [sys.executable, "-m", "caketin", "replay", "--store", "file", "--pools", "mha", "--tp", ranks]
    with out.open("wb") as file:
        running = subprocess.Popen(
            [*command, "--limit", "200000"], stdout=file, stderr=file, env=environment(cache)
        )

        def stored() -> bool:
            assert running.poll() is None, out.read_text()
            pages = (cache / "caketin").glob("replay-*/pages/objects/*/*/*/*")
            return len(list(pages)) >= 300  # by then some conversations have come back

        wait_until(stored, 60, "too little was stored")
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130, out.read_text()
    said = out.read_text()
    assert "(ended early: interrupted)" in said
    assert re.search(r"wrong bytes\W+0 of", said)
    assert not processes_of(cache)
    assert not list((cache / "caketin").glob("replay-*"))
