"""The cases that run in the guest. Each gives facts, as plain values; what they must be is in `tests/rdma`.

A case runs in a forked process of its own, so it may change the environment, limits and user as it likes. To
add one, for another part that moves bytes: a function here, and a test that names it in its `guest_case`.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - looked for when a name is resolved, and another user may not read it
import hashlib
import json
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from caketin.doctor.rdma import RdmaCheck
from caketin.replay.page_bytes import PageWriter
from caketin.replay.pool_sets import rank_pools
from dataplane import rdma_ports
from dataplane.attach import attached
from dataplane.bounce_store import BounceStore, StoreOverdue
from dataplane.bound_pool import BoundPool
from dataplane.control_client import ControlClient, ControlSettings, ModelIdentity, RankIdentity
from dataplane.host_memory import HostMemory
from dataplane.mooncake_native import MooncakeSettings
from dataplane.mooncake_store import MooncakeStore
from dataplane.object_store import ObjectBuffers, StoreError
from dataplane.rdma_settings import RdmaSettings
from dataplane.store_access import AS_TOLD, StoreOverrides
from metadata.codec import PageHashes
from metadata.pools import Part, PoolSpec, RankPool
from tests.rdma.guest import run, rxe

Given = dict[str, Any]
Facts = dict[str, Any]
CASES: dict[str, Callable[[Given], Facts]] = {}
LONG: set[str] = set()
"""Cases that run beside the others."""
PRELOADED = {"store", "memlock", "devices_by_rank", "mover_deepseek_v4_small_regions", "agent"}
"""Cases for which Mooncake is loaded beforehand: they set nothing that it reads while it is loaded."""
EARLY: set[str] = set()
"""Long cases that mostly wait, on the second device: they may start at any time."""
NS = "0123456789abcdef"
UNTOUCHED = 0xEE

# Two devices of one machine do not reach each other in the guest, as on a rail-optimised cluster.
os.environ["MC_ENABLE_DEST_DEVICE_AFFINITY"] = "1"


def case(function: Callable[[Given], Facts]) -> Callable[[Given], Facts]:
    CASES[function.__name__] = function
    return function


def long_case(function: Callable[[Given], Facts]) -> Callable[[Given], Facts]:
    LONG.add(function.__name__)
    return case(function)


def early_case(function: Callable[[Given], Facts]) -> Callable[[Given], Facts]:
    EARLY.add(function.__name__)
    return long_case(function)


def order(name: str) -> tuple[bool, ...]:
    """What waits long first; then the control that wants silent devices; last those that share a library."""
    return name not in EARLY, name != "tcp_control", name != "docs_followed", name in PRELOADED


def settings(given: Given, **more: Any) -> MooncakeSettings:
    told = {"protocol": "rdma", "devices": "rxe0", "local_hostname": "127.0.0.1", **more}
    return MooncakeSettings(given["master"], master_http=given["master_http"], **told)


class Bench:
    """Objects in memory: the first half to write from, the second to read into."""

    def __init__(self, count: int, size: int) -> None:
        self.memory = HostMemory(PoolSpec("kv", (Part("k", "uint8", size),)), 2 * count)
        self.count, self.size = count, size
        salt = secrets.token_hex(8)
        self.keys = [f"ct1/{NS}/{salt}{i:048x}/3f2a91bc.0/k" for i in range(count)]
        column = self.memory.columns("k")[0]
        self.source, self.target = column[:count], column[count:]
        pattern = (np.arange(size) % 251).astype(np.uint8)
        for i in range(count):
            self.source[i] = pattern + np.uint8(7 * i % 256)
        self.target[:] = UNTOUCHED

    def buffers(self, *, second: bool = False) -> ObjectBuffers:
        slots = np.arange(self.count) + (self.count if second else 0)
        table = self.memory.pool.buffers(slots)
        return ObjectBuffers(table.addresses.ravel(), np.ascontiguousarray(table.lengths).ravel())

    def round_trip(self, store: Any, device: str = "rxe0") -> Facts:
        before = rxe.sent_packets(device)
        put = store.put(self.keys, self.buffers()).tolist()
        between = rxe.sent_packets(device)
        got = store.get(self.keys, self.buffers(second=True)).tolist()
        return {
            "put": put,
            "get": got,
            "equal": bool((self.source == self.target).all()),
            "put_packets": between - before,
            "get_packets": rxe.sent_packets(device) - between,
            "bytes": self.count * self.size,
            "queue_pairs": rxe.queue_pairs(os.getpid()),
        }


class RegistersNothing(MooncakeStore):
    """A store that only says that it has registered: what a change that forgets it would be."""

    def register(self, address: int, length: int) -> None:
        self._regions.add(address, length)

    def unregister(self, address: int) -> None:
        self._regions.discard(address)


@case
def store(given: Given) -> Facts:
    """Registered memory, memory that is not, and memory that is only said to be."""
    bench, stray = Bench(8, 100_000), Bench(2, 100_000)
    opened = RegistersNothing(settings(given))
    with rxe.noting("store") as file:
        MooncakeStore.register(opened, bench.memory.address, bench.memory.length)
        registered = rxe.Noted(file).registered
    facts = bench.round_trip(opened)
    facts["region"] = [bench.memory.address, bench.memory.length]
    facts["registered"] = registered
    facts["max_region_bytes"] = opened.max_region_bytes
    facts["unregistered"] = opened.put(stray.keys, stray.buffers()).tolist()
    opened.register(stray.memory.address, stray.memory.length)
    facts["registration_forgotten"] = opened.put(stray.keys, stray.buffers()).tolist()
    facts["registration_forgotten_get"] = opened.get(bench.keys[:2], stray.buffers(second=True)).tolist()
    return facts


@case
def wrong_settings(given: Given) -> Facts:
    """What opening a store says, and how soon."""
    facts: Facts = {}
    for name, more in {
        "device": {"devices": "rxe0,mlx5_9"},
        "gid_index": {"gid_index": 7},
        "rank": {"devices": "tp0=rxe0", "rank": "dp0-pp0-cp0-tp1"},
        "mtu": {"mtu": 1500},
    }.items():
        began = time.monotonic()
        facts[name] = {"error": _opening(settings(given, **more)), "seconds": time.monotonic() - began}
    return facts


@case
def memlock(given: Given) -> Facts:
    """As a user who may lock little: too little to open a store, then too little to register a pool."""
    memory = HostMemory(PoolSpec("kv", (Part("k", "uint8", 1 << 20),)), 64)
    hard = 40 << 20
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, hard))
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    doctor = [f.to_json() for f in RdmaCheck(RdmaSettings("rxe0")).findings()]
    opening = _opening(settings(given))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    opened = MooncakeStore(settings(given))
    try:
        opened.register(memory.address, memory.length)
        registering = ""
    except StoreError as error:
        registering = str(error)
    return {"doctor": doctor, "opening": opening, "registering": registering, "limits": [64 << 10, hard]}


def _opening(told: MooncakeSettings) -> str:
    try:
        MooncakeStore(told)
    except StoreError as error:
        return str(error)
    return ""


def moved(
    given: Given, pools: str, *, max_mr_size: int | None = None, overrides: StoreOverrides = AS_TOLD
) -> Facts:
    """Join as a rank, back up pages, look them up, prefetch them into other slots, compare."""
    own = rank_pools(pools, 200_000)
    pages = 12
    if max_mr_size is not None:  # what asks the device for its limits asks the pretended one
        rdma_ports._LIBRARY = str(run.RESULTS / "noted_verbs.so")
    with rxe.noting(f"moved-{pools}", max_mr_size) as file:
        hosts = [HostMemory(p.spec, 2 * pages) for p in own]
        bound = [BoundPool(p, () if p.spec.logical else (m.pool,)) for p, m in zip(own, hosts, strict=True)]
        me = RankIdentity(f"guest-{pools}", "dp0-pp0-cp0-tp0", secrets.token_hex(16))
        client = ControlClient(ControlSettings(given["control_url"], call_seconds=20), me)
        hashes = PageHashes.of([hashlib.sha256(f"{pools}{i}".encode()).digest() for i in range(pages)])
        model = ModelIdentity(pools, "r", 64)
        with contextlib.closing(client), attached(client, model, bound, overrides) as joined:
            facts = _there_and_back(client, joined, own, hosts, hashes)
            facts["queue_pairs"] = rxe.queue_pairs(os.getpid())
            most = joined.store.max_region_bytes
        noted = rxe.Noted(file)
    facts["max_region_bytes"] = most
    facts["refused"] = noted.refused
    facts["noted"] = noted.queue_pairs
    facts["registered"] = noted.registered
    facts["pools"] = {
        m.pool.name: {
            "regions": [(r.address, r.length) for r in m.pool.regions],
            "fragments": [(f.base, f.stride, f.length) for p in m.pool.parts for f in p.fragments],
            "slots": m.pool.slots,
        }
        for m in hosts
        if m.pool.parts
    }
    return facts


def _there_and_back(
    client: ControlClient, joined: Any, own: list[RankPool], hosts: list[HostMemory], hashes: PageHashes
) -> Facts:
    writers = {p.spec.name: PageWriter(m, 0) for p, m in zip(own, hosts, strict=True) if m.pool.parts}
    first = np.arange(len(hashes), dtype=np.int64)
    second = first + len(hashes)
    for writer in writers.values():
        for slot, page_hash in zip(first.tolist(), hashes, strict=True):
            writer.fill(slot, page_hash)
        writer.wipe(second)
    before = rxe.sent_packets()
    stored = joined.mover.back_up(hashes, dict.fromkeys(writers, first), deadline_seconds=60)
    between = rxe.sent_packets()
    promise = client.lookup(joined.namespace_id, hashes)
    read = joined.mover.prefetch(hashes, promise, dict.fromkeys(writers, second), deadline_seconds=60)
    wrong = [
        (name, slot)
        for name, writer in writers.items()
        for slot, page_hash, done in zip(second.tolist(), hashes, read.read[name], strict=True)
        if done and not writer.intact(slot, page_hash)
    ]
    return {
        "pages": len(hashes),
        "committed": stored.committed,
        "stored_bytes": stored.bytes,
        "promised": promise.hit_pages,
        "restored": read.pages,
        "read_bytes": read.bytes,
        "read": {name: int(done.sum()) for name, done in read.read.items()},
        "wrong": wrong,
        "errors": [str(e) for e in (stored.error, read.error) if e is not None],
        "back_up_packets": between - before,
        "prefetch_packets": rxe.sent_packets() - between,
    }


@case
def mover_mha(given: Given) -> Facts:
    """With every setting; the MTU is more than the port has."""
    told = StoreOverrides(gid_index=0, traffic_class=106, service_level=3, mtu=4096)
    return moved(given, "mha", overrides=told)


@case
def mover_deepseek_v4_small_regions(given: Given) -> Facts:
    """On a device that registers no more than 1 MiB at once."""
    return moved(given, "deepseek-v4", max_mr_size=1 << 20)


@case
def devices_by_rank(given: Given) -> Facts:
    """Two ranks with one line of settings, each on its own device."""
    facts: Facts = {}
    for rank, device in (("dp0-pp0-cp0-tp0", "rxe0"), ("dp0-pp0-cp0-tp1", "rxe1")):
        done = Path(f"/tmp/{rank}.json")

        def one(rank: str = rank, device: str = device, done: Path = done) -> None:
            bench = Bench(4, 100_000)
            opened = MooncakeStore(settings(given, devices="tp0=rxe0; tp1=rxe1", rank=rank))
            opened.register(bench.memory.address, bench.memory.length)
            done.write_text(json.dumps(bench.round_trip(opened, device)))

        os.waitpid(run.forked(f"devices-{rank}", one), 0)
        facts[rank] = json.loads(done.read_text())
    return facts


@case
def doctor_settings(_given: Given) -> Facts:
    """Every setting other than Mooncake's own choice."""
    told = RdmaSettings("rxe0", gid_index=0, traffic_class=106, service_level=3, mtu=512)
    with rxe.noting("doctor") as file:
        findings = [f.to_json() for f in RdmaCheck(told).findings()]
        return {"findings": findings, "noted": rxe.Noted(file).queue_pairs}


@case
def doctor_wrong(_given: Given) -> Facts:
    """Each wrong setting by itself."""
    wrong = {
        "devices": RdmaSettings("mlx5_9"),
        "gid_index": RdmaSettings("rxe0", gid_index=7),
        "rank": RdmaSettings("tp3=rxe0"),
    }
    return {name: [f.to_json() for f in RdmaCheck(told).findings()] for name, told in wrong.items()}


@case
def tcp_control(given: Given) -> Facts:
    """The same bytes over TCP: no packet on the devices, or the counts of the other cases prove nothing."""
    master, http = "127.0.0.1:50071", "127.0.0.1:9023"
    run.start_master(master, http)
    run.lend("tcp-node", master, "", protocol="tcp")
    bench = Bench(8, 100_000)
    opened = MooncakeStore(settings({"master": master, "master_http": http}, protocol="tcp", devices=""))
    opened.register(bench.memory.address, bench.memory.length)
    return bench.round_trip(opened)


@long_case
def docs_followed(given: Given) -> Facts:
    """Every command of the page, line by line, as its reader would type it.

    But for one thing: a replay uses the control plane that runs, which takes minutes to load in the guest.
    """
    text = (run.REPO / "docs" / "rdma.md").read_text()
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "200",
    }
    followed = []
    for told in lines:
        line = f"{told} --url {given['control_url']}" if told.startswith("caketin replay") else told
        before, began = rxe.sent_packets(), time.monotonic()
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, check=False, env=environment, cwd="/tmp"
        )
        followed.append(
            {
                "line": line,
                "code": done.returncode,
                "output": (done.stdout + done.stderr)[-6000:],
                "packets": rxe.sent_packets() - before,
                "seconds": round(time.monotonic() - began, 1),
            }
        )
        print(json.dumps(followed[-1]), flush=True)
    return {"followed": followed}


@case
def wire(_given: Given) -> Facts:
    """A storage node on another machine."""
    log = run.RESULTS / "node-2.log"
    run.wait_until(lambda: log.exists() and "node ready" in log.read_text(), 100, "the second machine")
    at = {"master": run.WIRE_MASTER, "master_http": run.WIRE_MASTER_HTTP}
    told = {"local_hostname": run.FIRST, "traffic_class": 106, "gid_index": 1}
    bench = Bench(8, 100_000)
    opened = MooncakeStore(settings(at, **told))
    opened.register(bench.memory.address, bench.memory.length)
    return bench.round_trip(opened)


@early_case
def killed_node(_given: Given) -> Facts:
    """A storage node is killed in the middle of a get: what the caller sees, and what the memory."""
    master, http, device = "127.0.0.1:50061", "127.0.0.1:9013", "rxe1"
    run.start_master(master, http)
    node = run.lend("killed-node", master, device)
    opened = MooncakeStore(settings({"master": master, "master_http": http}, devices=device))
    returned: list[tuple[float, Any, int]] = []
    real = opened.get

    def noted_get(*arguments: Any) -> Any:
        codes = real(*arguments)
        returned.append((time.monotonic(), codes.tolist(), bounced.quarantined))
        return codes

    opened.get = noted_get  # type: ignore[method-assign]
    limits = {"call_seconds": 6.0, "grace_seconds": 6.0}
    bounced = BounceStore(opened, lanes=2, lane_bytes=25 << 20, **limits)
    bench = Bench(48, 512 << 10)
    opened.register(bench.memory.address, bench.memory.length)
    bounced.register(bench.memory.address, bench.memory.length)
    put = opened.put(bench.keys, bench.buffers()).tolist()
    connected = rxe.queue_pairs(os.getpid())
    lanes = [lane._memory for lane in bounced._lanes]
    for memory in lanes:
        memory[:] = UNTOUCHED
    outcome: list[str] = []

    def get() -> None:
        try:
            outcome.append(str(bounced.get(bench.keys, bench.buffers(second=True)).tolist()))
        except StoreOverdue as error:
            outcome.append(error.code)

    before = rxe.sent_packets(device)
    began = time.monotonic()
    caller = threading.Thread(target=get)
    caller.start()
    while rxe.sent_packets(device) - before < 300:
        time.sleep(0.01)
    os.killpg(node, signal.SIGKILL)
    caller.join()
    facts: Facts = {
        **limits,
        "asked_objects": bench.count,
        "put": sorted(set(put)),
        "connected": connected,
        "outcome": outcome,
        "caller_seconds": time.monotonic() - began,
        "quarantined": bounced.quarantined,
    }
    began_exists = time.monotonic()
    facts["other_lane_serves"] = len(bounced.exists(bench.keys[:4]))
    facts["other_lane_seconds"] = time.monotonic() - began_exists
    while not returned and time.monotonic() - began < 110:
        time.sleep(0.05)
    at_return = [memory.copy() for memory in lanes]
    facts["native_seconds"] = returned[0][0] - began if returned else None
    facts["native_codes"] = sorted(set(returned[0][1])) if returned else None
    facts["quarantined_at_return"] = returned[0][2] if returned else None
    facts["arrived_bytes"] = int(sum((memory != UNTOUCHED).sum() for memory in at_return))
    inside = [memory[: bench.source.size].reshape(bench.source.shape) for memory in at_return]
    facts["arrived_objects"] = max(int((i == bench.source).all(axis=1).sum()) for i in inside)
    while bounced.quarantined and time.monotonic() - began < 130:
        time.sleep(0.5)
    facts["quarantine_seconds"] = time.monotonic() - returned[0][0] if returned else None
    time.sleep(4)
    facts["late_bytes"] = int(sum((m != a).sum() for m, a in zip(lanes, at_return, strict=True)))
    facts["quarantined_at_end"] = bounced.quarantined
    facts["callers_memory_touched"] = int((bench.target != UNTOUCHED).sum())
    return facts
