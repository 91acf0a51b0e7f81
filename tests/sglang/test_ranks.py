"""Engines of several ranks: one of them asks, and a page is a hit only when every shard of it is there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

REPO = Path(__file__).resolve().parents[2]
PAGES = 6


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_ranks(plane, groups, tmp_path, **told):
    """Run a process a rank; return what each says, by rank."""
    world = sum(len(ranks) for ranks in groups)
    common = {"world": world, "port": free_port(), "groups": groups, "extra": plane.extra(), **told}
    env = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(world):
        log = (tmp_path / f"rank{rank}.log").open("w")
        command = [sys.executable, "-m", "tests.sglang.rank_process", json.dumps({"rank": rank, **common})]
        processes.append(subprocess.Popen(command, cwd=REPO, env=env, stdout=log, stderr=log))
    try:
        codes = [p.wait(240) for p in processes]
    finally:
        for p in processes:
            if p.poll() is None:
                p.kill()
                p.wait()
    texts = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(world)]
    assert codes == [0] * world, "\n".join(t[-3000:] for t in texts)
    lines = [next(x for x in t.splitlines() if x.startswith("RESULT ")) for t in texts]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


@pytest.mark.parametrize("model", ["swa", "mla"])
def test_two_ranks_restore_their_own_bytes_and_one_of_them_asks_smoke(file_plane, tmp_path, model):
    said = run_ranks(file_plane, [[0, 1]], tmp_path, model=model, sharded=model != "mla")
    assert [s["pages"] for s in said] == [PAGES, PAGES]
    assert all(s["same"] for s in said)
    assert [s["leads"] for s in said] == [True, False]


def test_sharded_mamba_states_on_two_ranks(file_plane, tmp_path):
    said = run_ranks(file_plane, [[0, 1]], tmp_path, model="mamba")
    assert all(s["same"] for s in said)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_page_without_one_rank_s_shard_is_no_hit_for_any(file_plane, tmp_path, rank):
    said = run_ranks(file_plane, [[0, 1]], tmp_path, model="full", remove={str(rank): ["kv", 2]})
    assert [s["pages"] for s in said] == [2, 2]
    assert all(s["prefix_same"] for s in said)


def test_four_ranks(mooncake_plane, tmp_path):
    said = run_ranks(mooncake_plane, [[0, 1, 2, 3]], tmp_path, model="full")
    assert [s["pages"] for s in said] == [PAGES] * 4
    assert all(s["same"] for s in said)


def test_attention_groups_under_data_parallelism_share_and_do_not_meet(file_plane, tmp_path):
    said = run_ranks(file_plane, [[0, 1], [2, 3]], tmp_path, model="full")
    assert [s["place"] for s in said] == [f"dp{d}-pp0-cp0-tp{t}" for d in (0, 1) for t in (0, 1)]
    assert [s["leads"] for s in said] == [True, False, True, False]
    assert all(s["same"] for s in said)
