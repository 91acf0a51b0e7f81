"""Engines of several ranks: one of them asks, and a page is a hit only when every shard of it is there."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

REPO = Path(__file__).resolve().parents[2]
PAGES = 6
WORLD = 4
PAIRS = [[0, 1], [2, 3]]


class Ranks:
    """Four processes that play scenarios together; to import SGLang costs each of them half a minute."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        env = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        self._answers: list[queue.Queue[dict[str, Any]]] = []
        self.processes = []
        self.logs = [folder / f"rank{rank}.log" for rank in range(WORLD)]
        for rank in range(WORLD):
            command = [sys.executable, "-m", "tests.sglang.rank_process", str(rank), str(WORLD), str(port)]
            with self.logs[rank].open("w") as log:
                process = subprocess.Popen(
                    command,
                    cwd=REPO,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            self.processes.append(process)
            self._answers.append(queue.Queue())
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()

    def _listen(self, rank: int) -> None:
        for line in self.processes[rank].stdout or ():
            if line.startswith("RESULT "):
                self._answers[rank].put(json.loads(line.removeprefix("RESULT ")))
        self._answers[rank].put({"error": f"the process ended: {self.logs[rank].read_text()[-3000:]}"})

    def play(self, plane, groups, models, *, share: bool = False, **told) -> list[dict[str, Any]]:
        """Play a scenario; return what each rank says."""
        extras = [plane.extra()] * len(groups) if share else [plane.extra() for _ in groups]
        line = json.dumps({"groups": groups, "models": models, "extras": extras, **told})
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()
        said = [answers.get(timeout=540) for answers in self._answers]
        assert [s for s in said if "error" in s] == []
        return said

    def stop(self) -> None:
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(tmp_path_factory.mktemp("ranks"))
    yield found
    found.stop()


def test_two_ranks_restore_their_own_bytes_and_one_of_them_asks(file_plane, ranks):
    said = ranks.play(file_plane, PAIRS, ["swa", "mla"])
    assert [s["pages"] for s in said] == [PAGES] * WORLD
    assert all(s["same"] for s in said)
    assert [s["leads"] for s in said] == [True, False] * 2


def test_mamba_and_full_attention_on_two_ranks_each(mooncake_plane, ranks):
    said = ranks.play(mooncake_plane, PAIRS, ["mamba", "full"])
    assert all(s["same"] for s in said)


def test_mamba_beside_mla_and_the_indexer_of_dsa_on_two_ranks_each(file_plane, ranks):
    said = ranks.play(file_plane, PAIRS, ["mamba-mla", "dsa"])
    assert [s["pages"] for s in said] == [PAGES] * WORLD
    assert all(s["same"] for s in said)


def test_a_page_without_one_rank_s_shard_is_no_hit_for_any(file_plane, ranks):
    # In one engine the rank that asks misses its shard, in the other the one that does not.
    said = ranks.play(file_plane, PAIRS, ["full", "full"], remove={"0": ["kv", 2], "3": ["kv", 2]})
    assert [s["pages"] for s in said] == [2] * WORLD
    assert all(s["prefix_same"] for s in said)


def test_four_ranks(mooncake_plane, ranks):
    said = ranks.play(mooncake_plane, [[0, 1, 2, 3]], ["full"])
    assert [s["pages"] for s in said] == [PAGES] * WORLD
    assert all(s["same"] for s in said)
    assert [s["leads"] for s in said] == [True, False, False, False]


def test_attention_groups_of_one_engine_have_places_of_their_own_and_share_pages(file_plane, ranks):
    said = ranks.play(file_plane, PAIRS, ["full", "full"], share=True, data_parallel=True)
    assert [s["place"] for s in said] == [f"dp{d}-pp0-cp0-tp{t}" for d in (0, 1) for t in (0, 1)]
    assert [s["leads"] for s in said] == [True, False, True, False]
    assert [s["pages"] for s in said] == [PAGES] * WORLD
