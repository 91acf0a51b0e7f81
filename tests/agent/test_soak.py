"""Random kills of engines, the agent and storage nodes while engines compare every byte that they restore."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from caketin.stack import Stack, StackSettings
from dataplane.mooncake_store import MooncakeStore
from tests.agent.engine_process import WRONG_BYTES
from tests.agent.world import KV_SWA, Engine, RunningAgent, prompt, session_request, wait_until

KILLS = int(os.environ.get("CAKETIN_AGENT_KILLS", "60"))
SECONDS_A_KILL = 6.5

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800 + KILLS * SECONDS_A_KILL)]

ENGINES = 2
SLOTS = 48
NAMES = ("engine", "engine", "engine", "agent", "agent", "node")


class Tormented:
    """A stack with an agent and engines that are killed at random."""

    def __init__(self, stack: Stack, agent: RunningAgent, seed: int, folder: Path) -> None:
        self.stack, self.agent, self.folder = stack, agent, folder
        self.dice = random.Random(seed)
        self.model = secrets.token_hex(4)
        self.engines: list[subprocess.Popen[bytes]] = []
        self.killed: Counter[str] = Counter()
        self.started = 0

    def start_engine(self) -> None:
        self.started += 1
        told = {
            "socket": str(self.agent.socket),
            "busy": True,
            "slots": SLOTS,
            "engine": f"engine-{self.started % ENGINES}",
            "model": self.model,
            "seed": self.dice.random(),
        }
        with (self.folder / f"engine-{self.started}.log").open("wb") as log:
            command = [sys.executable, "-m", "tests.agent.engine_process", json.dumps(told)]
            self.engines.append(subprocess.Popen(command, stdout=log, stderr=log))

    def look(self) -> None:
        """No engine has seen a wrong byte, or ended by itself; the agent is there."""
        for engine in self.engines:
            code = engine.poll()
            assert code != WRONG_BYTES, "wrong bytes"
            assert code is None, [p.read_text()[-2000:] for p in self.folder.glob("engine-*.log")]
        assert self.agent.child.process.poll() is None, self.agent.log()[-3000:]

    def kill_one(self) -> None:
        name = self.dice.choice(NAMES)
        self.killed[name] += 1
        if name == "engine":
            at = self.dice.randrange(len(self.engines))
            engine = self.engines.pop(at)
            engine.kill()
            engine.wait()
            self.start_engine()
        elif name == "agent":
            self.agent.child.kill()
            self.agent.start()
        else:
            cluster = self.stack.mooncake
            cluster.kill_node(len(cluster.children) - 2)
            cluster.start_node()

    def end_engines(self) -> None:
        for engine in self.engines:
            engine.kill()
            engine.wait()
        self.engines.clear()

    def restored_pages(self) -> int:
        """Pages that engines have restored and compared."""
        said = "".join(path.read_text() for path in self.folder.glob("engine-*.log"))
        return sum(int(line.split()[1]) for line in said.splitlines() if line.startswith("restored "))


def open_files(agent: RunningAgent) -> int:
    return sum(1 for _ in Path(f"/proc/{agent.child.process.pid}/fd").iterdir())


def shared_memory(agent: RunningAgent) -> set[str]:
    """What there is of this agent; others of the machine come and go."""
    return {p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(agent.shared.name)}


def torment(folder: Path, start_agent, kills: int, seconds: float, seed: int) -> Tormented:
    loads, why = MooncakeStore.available()
    if not loads:
        pytest.skip(f"Mooncake does not load here: {why}")
    print(f"seed {seed}")
    settings = StackSettings(folder / "stack", None, "mooncake", 64 << 20)
    with Stack(settings) as stack:
        agent = start_agent(stack.url, idle_seconds=5, transfer_seconds=4, drain_seconds=2)
        shm_before = shared_memory(agent)
        with agent.client() as client, client.open(session_request(KV_SWA, SLOTS)) as session:
            Engine(session, KV_SWA).publish(prompt("warm", 4))
        descriptors = open_files(agent)
        world = Tormented(stack, agent, seed, folder)
        ends = time.monotonic() + seconds
        try:
            for _ in range(ENGINES):
                world.start_engine()
            while sum(world.killed.values()) < kills and time.monotonic() < ends:
                time.sleep(world.dice.uniform(0.2, 2.0))
                world.look()
                world.kill_one()
            time.sleep(2)
            world.look()
        finally:
            world.end_engines()
        check_nothing_is_left(agent, shm_before, descriptors)
        print(f"{dict(world.killed)}, {world.restored_pages()} pages restored")
        assert world.restored_pages() > kills
        return world


def check_nothing_is_left(agent: RunningAgent, shm_before: set[str], descriptors: int) -> None:
    # A call to a node that was killed may take a minute to come back.
    wait_until(lambda: agent.status().sessions == 0, 20, "sessions end")

    def quiet() -> bool:
        status = agent.status()
        busy = status.transfers.running + status.transfers.queued
        return not busy and all(p.locked == p.quarantined == 0 for p in status.pools.values())

    wait_until(quiet, 150, f"locks and slots come back: {agent.status()}")
    for pool in agent.status().pools.values():
        assert pool.free + pool.resident == pool.slots
    assert shared_memory(agent) == shm_before
    left = {p.name for p in agent.shared.iterdir()}
    assert left == {"lock", "tiers"}, left
    now = open_files(agent)
    assert now <= descriptors + 24, (descriptors, now)
    assert "nobody foresaw" not in agent.log()
    assert agent.stop() == 0
    assert not agent.shared.exists()


def test_a_few_random_kills_smoke(tmp_path, start_agent):
    world = torment(tmp_path, start_agent, kills=8, seconds=120, seed=11)
    assert sum(world.killed.values()) == 8


def test_random_kills_leave_no_slot_no_lock_and_no_wrong_byte(tmp_path, start_agent):
    seed = int(os.environ.get("CAKETIN_AGENT_SEED", "0")) or random.randrange(1 << 30)
    world = torment(tmp_path, start_agent, kills=KILLS, seconds=KILLS * SECONDS_A_KILL, seed=seed)
    assert sum(world.killed.values()) == KILLS
