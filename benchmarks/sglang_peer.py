"""caketin against SGLang's own Mooncake backend: the same host pools, one master, measured in turns.

    $(tests/sglang/setup_env.sh) benchmarks/sglang_peer.py [--pages 128,512,2048] [--sets dsv4,mha]

Needs SGLang and torch, and without them says so and ends well. It starts a stack of its own (Redis, a
Mooncake master with a storage node, the control plane) and drives both backends through the calls of
SGLang's controller: one `batch_exists_v2` for all pages, then KV and its derived pools in batches of 128,
then the window. Ours checks and leases in the store what the index promises; that is in its times. Pairs of
one measurement alternate, so that a busy machine slows both alike; ratios are medians of the pairs' ratios,
beside them their quartiles.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
BATCH = 128
V4_PAGE = 256
# Layers and bytes a layer and page of DeepSeek V4 Flash.
V4_POOLS = {
    "swa": (43, 149_760),
    "deepseek_v4_c4": (21, 37_440),
    "deepseek_v4_c4_indexer": (21, 8_448),
    "deepseek_v4_c128": (20, 1_728),
}


@dataclass
class Peer:
    """One of the two backends and its name."""

    name: str
    backend: Any


def pools_of(kind: str, pages: int) -> dict[str, Any]:
    """Return real SGLang host pools of `pages` pages, by name; the window's pool has two."""
    if kind == "dsv4":
        found: dict[str, Any] = {"kv": LogicalHostPool(pages * V4_PAGE, V4_PAGE, layout="page_first")}
        for name, (layers, size) in V4_POOLS.items():
            found[name] = DeepSeekV4PagedHostPool(
                pool_name=name,
                device_buffers=[torch.zeros((1, size), dtype=torch.uint8) for _ in range(layers)],
                item_bytes=size,
                num_host_pages=2 if name == "swa" else pages,
                slot_page_size=V4_PAGE,
                layout="page_first",
                pin_memory=False,
            )
        return found
    device = MHATokenToKVPool(
        size=64,
        page_size=64,
        dtype=torch.bfloat16,
        head_num=8,
        head_dim=128,
        layer_num=4,
        device="cpu",
        enable_memory_saver=False,
    )
    host = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        64,
        "page_first",
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        host_token_capacity=pages * 64,
    )
    return {"kv": host}


def attach(kind: str, pools: dict[str, Any], backend: str, extra: dict[str, Any]) -> Any:
    """Return an attached backend."""
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=kind == "dsv4",
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=kind,
        extra_config=extra,
    )
    made = StorageBackendFactory.create_backend(backend, config, pools["kv"])
    made.register_mem_pool_host(pools["kv"])
    for name, host in pools.items():
        made.register_mem_host_pool_v2(host, PoolName(name))
    made.on_host_pools_registered()
    return made


class Work:
    """SGLang's calls on one set of pools."""

    def __init__(self, pools: dict[str, Any], pages: int) -> None:
        self.pools, self.pages = pools, pages
        self.page_size = pools["kv"].page_size
        self.rows = torch.arange(pages * self.page_size, dtype=torch.int64)
        self.sidecars = [n for n in pools if n != "kv"]
        self.extra = HiCacheStorageExtraInfo(prefix_keys=None)

    @property
    def bytes(self) -> int:
        """Bytes that a set or get of all pages moves."""
        total = 0
        for name, host in self.pools.items():
            answer = host.get_page_buffer_meta(torch.arange(host.page_size, dtype=torch.int64))
            if answer is not None:
                total += sum(answer[1]) * (1 if name == "swa" else self.pages)
        return total

    def transfers(self, keys: list[str], *, names: list[str], first: int = 0) -> list[Any]:
        found = []
        for name in names:
            window = name == "swa"
            chosen = keys[-1:] if window else keys
            start = 0 if window else first * self.page_size
            found.append(
                PoolTransfer(
                    name=PoolName(name),
                    keys=chosen,
                    host_indices=self.rows[start : start + len(chosen) * self.page_size],
                    hit_policy=PoolHitPolicy.TRAILING_PAGES if window else PoolHitPolicy.ALL_PAGES,
                )
            )
        return found

    def set(self, backend: Any, keys: list[str]) -> None:
        if self.sidecars:
            done = backend.batch_set_v2(self.transfers(keys, names=self.sidecars), self.extra)
            assert all(all(v) for v in done.values()), "a sidecar was not stored"
        for first in range(0, self.pages, BATCH):
            some = keys[first : first + BATCH]
            rows = self.rows[first * self.page_size : (first + len(some)) * self.page_size]
            assert all(backend.batch_set_v1(some, rows, self.extra)), "a page was not stored"
        if hasattr(backend, "flush"):  # ours claims behind the caller's back; that is part of the work
            assert backend.flush(60), "the claims were not made in time"

    def get(self, backend: Any, keys: list[str]) -> None:
        derived = [n for n in self.sidecars if n != "swa"]
        for first in range(0, self.pages, BATCH):
            some = keys[first : first + BATCH]
            rows = self.rows[first * self.page_size : (first + len(some)) * self.page_size]
            assert all(backend.batch_get_v1(some, rows, self.extra)), "a page was not read"
            if derived:
                read = backend.batch_get_v2(self.transfers(some, names=derived, first=first), self.extra)
                assert all(all(v) for v in read.values()), "a derived pool was not read"
        if "swa" in self.pools:
            read = backend.batch_get_v2(self.transfers(keys, names=["swa"]), self.extra)
            assert all(all(v) for v in read.values()), "the window was not read"

    def find(self, backend: Any, keys: list[str]) -> int:
        wanted = self.transfers(keys, names=self.sidecars)
        if not wanted:
            return int(backend.batch_exists(keys, self.extra))
        return int(backend.batch_exists_v2(keys, wanted, self.extra).kv_hit_pages)


def timed(call: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def fresh(count: int) -> list[str]:
    salt = os.urandom(8)
    return [hashlib.sha256(salt + i.to_bytes(4)).hexdigest() for i in range(count)]


def measure(kind: str, pages: int, peers: list[Peer], work: Work, repeats: int) -> dict[str, Any]:
    """Return medians of each peer, and the medians of the pairs' ratios."""
    seconds: dict[str, dict[str, list[float]]] = {
        k: {p.name: [] for p in peers} for k in ("hit", "miss", "set", "get")
    }
    for repeat in range(repeats + 1):  # the first is for warming up
        kept = {p.name: fresh(pages) for p in peers}
        absent = fresh(pages)
        turns = peers if repeat % 2 else peers[::-1]
        took: dict[str, dict[str, float]] = {k: {} for k in seconds}
        for p in turns:
            took["set"][p.name] = timed(work.set, p.backend, kept[p.name])
        for p in turns:
            assert work.find(p.backend, kept[p.name]) == pages, f"{p.name} does not find what it wrote"
            took["hit"][p.name] = timed(work.find, p.backend, kept[p.name])
            took["miss"][p.name] = timed(work.find, p.backend, absent)
        for p in turns:
            took["get"][p.name] = timed(work.get, p.backend, kept[p.name])
        for action, by_peer in took.items() if repeat else ():
            for name, one in by_peer.items():
                seconds[action][name].append(one)
        peers[0].backend._link.joined.store.remove(_all_keys(peers[0].backend, kept["caketin"]))
        peers[1].backend.store.remove_by_regex(".*" + kind + ".*")
    medians = {k: {n: statistics.median(v) for n, v in by.items()} for k, by in seconds.items()}
    ratios = {
        k: quartiles([theirs / ours for ours, theirs in zip(by["caketin"], by["sglang"], strict=True)])
        for k, by in seconds.items()
    }
    return {"set": kind, "pages": pages, "bytes": work.bytes, "seconds": medians, "times_faster": ratios}


def quartiles(values: list[float]) -> list[float]:
    """Return the first quartile, the median and the third."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def _all_keys(backend: Any, keys: list[str]) -> list[str]:
    joined = backend._link.joined
    hashes = PageHashes.from_hex(keys)
    return [k for pool in joined.pools.bound.values() for k in pool.keys(joined.namespace_id, hashes)]


def line(row: dict[str, Any]) -> str:
    s, r = row["seconds"], row["times_faster"]
    cells = [f"{row['set']:>5} {row['pages']:>6}"]
    for what in ("hit", "miss", "set", "get"):
        if what in {"hit", "miss"}:
            of = {n: t * 1e3 for n, t in s[what].items()}
        else:
            of = {n: row["bytes"] / t / 1e9 for n, t in s[what].items()}
        low, middle, high = r[what]
        cells.append(f"{of['caketin']:6.2f} {of['sglang']:6.2f} {middle:5.2f} [{low:4.2f} {high:4.2f}]")
    return " | ".join(cells)


def main() -> int:
    """Measure and print a table, and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", default="128,512,2048")
    parser.add_argument("--sets", default="dsv4,mha")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--segment-gib", type=int, default=12)
    told = parser.parse_args()
    sizes = [int(n) for n in told.pages.split(",")]
    rows = []
    settings = StackSettings(
        Path(tempfile.mkdtemp(prefix="caketin-peer-")), store="mooncake", store_bytes=told.segment_gib << 30
    )
    get_context().override_server_args(page_size=64).install()
    get_parallel().override_permanently(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_rank=0)
    with Stack(settings) as stack:
        assert stack.mooncake is not None
        heads = ("lookup, all hit, ms", "lookup, all miss, ms", "set, GB/s", "get, GB/s")
        print("             | " + " | ".join(f"{h:<31}" for h in heads))
        print("  set  pages | " + " | ".join(["caketin sglang times [quartiles]"] * 4))
        for kind in told.sets.split(","):
            for pages in sizes:
                pools = pools_of(kind, pages)
                ours = {
                    "backend_name": "caketin",
                    "module_path": "caketin.sglang",
                    "class_name": "CaketinStorage",
                    "interface_v1": 1,
                    "control_url": stack.url,
                    "model": f"{kind}-{pages}",
                    "revision": "1",
                    "call_seconds": 5.0,
                }
                theirs = {
                    "master_server_address": stack.mooncake.master,
                    "protocol": "tcp",
                    "local_hostname": "127.0.0.1",
                    "metadata_server": "P2PHANDSHAKE",
                    "global_segment_size": 0,
                    "device_name": "",
                }
                peers = [
                    Peer("caketin", attach(kind, pools, "dynamic", ours)),
                    Peer("sglang", attach(kind, pools, "mooncake", theirs)),
                ]
                rows.append(measure(kind, pages, peers, Work(pools, pages), told.repeats))
                print(line(rows[-1]), flush=True)
                peers[0].backend.close()
                del peers, pools
                gc.collect()
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("torch") is None:
        print("left out: needs SGLang and torch; run it with $(tests/sglang/setup_env.sh)")
        sys.exit(0)
    sys.path.insert(0, str(REPO))
    import warnings

    warnings.filterwarnings("ignore")
    os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "16384")
    os.environ.setdefault("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "16384")
    from tests.sglang import cpu_ops

    cpu_ops.install()
    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang.srt.runtime_context import get_context, get_parallel

    from caketin.stack import Stack, StackSettings
    from metadata.codec import PageHashes

    sys.exit(main())
