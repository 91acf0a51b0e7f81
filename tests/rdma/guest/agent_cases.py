"""Cases with a `caketin agent` in the guest: a process of its own, used over its socket as engines use it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

# What the daemon loads: imported here, so that the processes that are forked have it.
import caketin.commands.agent  # noqa: F401
import dataplane.agent_server  # noqa: F401
from caketin.__main__ import main as caketin_main
from caketin.replay.pool_sets import rank_pools
from dataplane import rdma_ports
from dataplane.agent_client import AgentAway, AgentClient, AgentRefused
from dataplane.messages.agent import MappedPool
from metadata.pools import Part, PoolSpec
from tests.agent.world import Engine, prompt, session_request
from tests.rdma.guest import run, rxe
from tests.rdma.guest.cases import UNTOUCHED, Facts, Given, case, early_case

MHA, DEEPSEEK_V4 = POOL_SETS = ("mha", "deepseek-v4")
PAGES = 12
PAGE_BYTES = 200_000
KILLED_MASTER, KILLED_HTTP = run.KILLED_AGENT_MASTER, "127.0.0.1:9043"


class GuestAgent:
    """A running agent.

    Attributes:
        pid: of its process.
        socket: where engines call.
    """

    def __init__(self, name: str, **flags: object) -> None:
        """Start it and wait until it answers; `flags` are the command's."""
        folder = Path("/tmp") / name
        folder.mkdir()
        self.socket = folder / "a.sock"
        told = {
            "socket": self.socket,
            "shared_dir": f"/dev/shm/{name}",
            "memory": "64Mi",
            "call_seconds": 20,
            "local_hostname": "127.0.0.1",
            **flags,
        }
        said = [f"--{flag.replace('_', '-')}={value}" for flag, value in told.items()]

        def serve() -> None:
            sys.argv = ["caketin", "agent", *said]
            caketin_main()

        self.pid = run.forked(name, serve)
        run.wait_until(self.socket.exists, 240, name)

    def client(self) -> AgentClient:
        return AgentClient(self.socket, seconds=60)


def attached(client: AgentClient) -> bool:
    """Whether all ranks are registered and the store is open: the socket answers long before."""
    try:
        return bool(client.send("GET", "/readyz"))
    except (AgentAway, AgentRefused):
        return False


def metrics(client: AgentClient) -> tuple[int, int]:
    """Transfers whose call of the store is still out, and quarantined slots, at one moment."""
    values = dict(line.rsplit(" ", 1) for line in client.send("GET", "/metrics").decode().splitlines())
    names = (
        'caketin_agent_transfers{state="hanging"}',
        'caketin_agent_slots{pool="kv",state="quarantined"}',
    )
    hanging, quarantined = (int(float(values[name])) for name in names)
    return hanging, quarantined


@case
def agent(given: Given) -> Facts:
    """Pages there and back through an agent, on a device that registers no more than 1 MiB at once."""
    rdma_ports._LIBRARY = str(run.RESULTS / "noted_verbs.so")
    with rxe.noting("agent", 1 << 20) as file:
        daemon = GuestAgent("agent-process", url=given["control_url"])
        facts = {pools: _there_and_back(daemon, pools) for pools in POOL_SETS}
        noted = rxe.Noted(file)
    os.kill(daemon.pid, signal.SIGTERM)
    ended = os.waitpid(daemon.pid, 0)[1]
    left = [daemon.socket, *Path("/dev/shm/agent-process").glob("*")]
    return {
        **facts,
        "registered": noted.registered,
        "refused": noted.refused,
        "exit_code": os.waitstatus_to_exitcode(ended),
        "left_behind": [str(path) for path in left if path.exists()],
    }


def _there_and_back(daemon: GuestAgent, pools: str) -> Facts:
    """Publish pages and have them stored; let others take all slots; prefetch them, and compare."""
    specs = [p.spec for p in rank_pools(pools, PAGE_BYTES)]
    pages = prompt(f"agent {pools}", PAGES)
    request = session_request(specs, PAGES, engine=f"agent-{pools}", model=f"agent-{pools}")
    with daemon.client() as client, client.open(request) as session:
        run.wait_until(lambda: attached(client), 120, "the agent's place in the control plane")
        engine = Engine(session, specs)
        before = rxe.sent_packets()
        engine.publish(pages)
        between = rxe.sent_packets()
        session.release(engine.fill(prompt("others", PAGES)))
        left = session.match(pages, lock=False).pages
        middle = rxe.sent_packets()
        done = session.wait(session.prefetch(pages))
        after = rxe.sent_packets()
        restored = done.restorable[-1][1] if done.restorable else 0
        try:
            engine.check(pages, done.slots, restored)
            wrong = []
        except AssertionError as error:
            wrong = [str(error)]
        mapped = {n: pool for n, pool in session.opened.pools.items() if pool.path is not None}
        sizes = {(pool, part): size for pool, part, size in engine.parts}
        return {
            "pools": {name: _as_the_agent_has_it(daemon.pid, pool) for name, pool in mapped.items()},
            "stored_bytes": sum(sizes.values()) * len(pages),
            "left": left,
            "restored": restored,
            "wrong": wrong,
            "compared": {n: len(slots) for n, slots in done.slots.items() if session.pools[n].pool.path},
            "compared_bytes": sum(len(done.slots[pool]) * size for (pool, _), size in sizes.items()),
            "ended": [done.state, done.transfers_done, done.error],
            "back_up_packets": between - before,
            "prefetch_packets": after - middle,
            "queue_pairs": rxe.queue_pairs(daemon.pid),
        }


def _as_the_agent_has_it(pid: int, pool: MappedPool) -> Facts:
    """Where a pool lies in the agent's own memory, which is what it registers."""
    assert pool.path is not None
    inode = str(Path(pool.path).stat().st_ino)
    rows = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    base = int(next(row[0].partition("-")[0] for row in rows if row[4] == inode), 16)
    return {
        "regions": [(base, pool.length)],
        "fragments": [(base + part.offset, pool.page_stride, part.bytes) for part in pool.parts],
        "slots": pool.slots,
    }


@early_case
def agent_killed_node(given: Given) -> Facts:
    """A storage node is killed under an agent's prefetch: what the engine sees, and what its slots.

    The pools are shared memory, so this process sees every byte that the agent's device writes.
    """
    run.start_master(KILLED_MASTER, KILLED_HTTP)
    node = run.lend("agent-killed-node", KILLED_MASTER, "rxe1")
    told = {"devices": "rxe1", "gid_index": 1, "traffic_class": 106, "service_level": 3, "mtu": 1024}
    with rxe.noting("agent-of-killed-node") as noted:
        daemon = GuestAgent("agent-of-killed-node", url=given["killed_control_url"], grace_seconds=6, **told)
    spec = PoolSpec("kv", (Part("page", "uint8", 512 << 10),))
    asked, slots, deadline = 48, 56, 10.0
    pages = prompt("killed", asked)
    facts: Facts = {"asked": asked, "slots": slots, "deadline": deadline, "grace_seconds": 6.0}
    request = session_request([spec], slots, engine="agent-killed", model="agent-killed")
    with daemon.client() as client, client.open(request) as session:
        memory = session.pools["kv"].part("page")
        run.wait_until(lambda: attached(client), 120, "the agent's place in the control plane")
        facts["before"] = metrics(client)
        _publish(session, memory, pages, backup=True)
        facts["queue_pairs"] = rxe.queue_pairs(daemon.pid)
        facts["noted"] = rxe.Noted(noted).queue_pairs
        others = session.slots(prompt("others", slots))
        memory[:] = UNTOUCHED
        session.release(others.token)
        facts["left"] = session.match(pages, lock=False).pages
        began = time.monotonic()
        transfer = session.prefetch(pages, policy="timeout", deadline_ms=int(deadline * 1000))
        while (memory[:, :64] == UNTOUCHED).all() and time.monotonic() - began < deadline:
            time.sleep(0.002)
        os.killpg(node, signal.SIGKILL)
        facts["killed_after"] = time.monotonic() - began
        done = session.wait(transfer)
        facts["caller_seconds"] = time.monotonic() - began
        facts["ended"] = [done.state, done.transfers_done, done.restorable, done.token, done.error]
        kv = client.status().pools["kv"]
        facts["after"] = {n: getattr(kv, n) for n in ("free", "resident", "locked", "quarantined")}
        facts["hanging"] = metrics(client)[0]
        try:
            session.slots(prompt("too many", slots - asked + 1))
        except AgentRefused as error:
            facts["too_many"] = error.refusal
        mine = prompt("mine", slots - asked)
        free = _publish(session, memory, mine, backup=False)
        touched = np.setdiff1d(np.arange(slots), free)
        hanging, quarantined = metrics(client)
        while hanging and time.monotonic() - began < 120:
            time.sleep(0.25)
            hanging, quarantined = metrics(client)
        returned = time.monotonic()
        at_return = memory[touched].copy()
        facts["quarantined_at_return"] = quarantined
        facts["native_seconds"] = returned - began
        facts["asked_bytes"] = at_return.size
        facts["arrived_bytes"] = int((at_return != UNTOUCHED).sum())
        while metrics(client)[1] and time.monotonic() - returned < 60:
            time.sleep(0.25)
        facts["quarantine_seconds"] = time.monotonic() - returned
        facts["quarantined_at_end"] = metrics(client)[1]
        time.sleep(4)
        facts["late_bytes"] = int((memory[touched] != at_return).sum())
        facts["mine_intact"] = _intact(session, memory, mine)
        after = prompt("after", asked)
        got = _publish(session, memory, after, backup=False)
        facts["slots_again"] = len(set(got.tolist()) & set(touched.tolist()))
        time.sleep(2)
        facts["after_intact"] = _intact(session, memory, after)
    os.killpg(daemon.pid, signal.SIGKILL)
    return facts


def _row(page: bytes, size: int) -> np.ndarray[Any, Any]:
    """Bytes of a page: its hash, over and over; no long run of them looks untouched."""
    return np.resize(np.frombuffer(page, np.uint8), size)


def _publish(session: Any, memory: Any, pages: list[bytes], *, backup: bool) -> np.ndarray[Any, Any]:
    """Fill slots with pages, publish them, and wait until they are stored where that is asked for."""
    got = session.slots(pages)
    slots = np.array(got.slots["kv"])
    for page, slot in zip(pages, slots.tolist(), strict=True):
        memory[slot] = _row(page, memory.shape[1])
    published = session.publish(got.token, backup=backup)
    if published.transfer_id is not None:
        stored = session.wait(published.transfer_id)
        assert stored.transfers_done, stored
    return slots


def _intact(session: Any, memory: Any, pages: list[bytes]) -> int:
    """Pages that host memory has, and whose bytes are still their own."""
    found = session.match(pages)
    intact = sum(
        bool((memory[slot] == _row(page, memory.shape[1])).all())
        for page, slot in zip(pages, found.slots["kv"], strict=False)
    )
    if found.token is not None:
        session.release(found.token)
    return intact
