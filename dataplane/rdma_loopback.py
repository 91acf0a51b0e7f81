"""Moves bytes from this process to itself over one RDMA device, the way Mooncake does, and times it.

    python -m dataplane.rdma_loopback DEVICE

A process of its own, since Mooncake reads its settings once a process. The variables of `RdmaSettings` are to
be in the environment. Prints one JSON object; Mooncake's own messages are on standard error.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import sys
import time
from pathlib import Path
from typing import Any, Final

HOST: Final = "127.0.0.1"
_BLOCK_BYTES: Final = 1 << 20
_SECONDS: Final = 1.0
_MOST_BYTES: Final = 8 << 30
_COUNTERS: Final = ("hw_counters/sent_pkts", "counters/port_xmit_packets")


def main(device: str, protocol: str = "rdma") -> int:
    """Run and print what came of it; the exit code is 1 where bytes did not move."""
    result = loopback(device, protocol)
    print(json.dumps(result))  # noqa: T201 - the parent reads it
    return 0 if result["ok"] else 1


def loopback(device: str, protocol: str) -> dict[str, Any]:
    """Write blocks from one engine to another, both here, and compare the first and the last.

    Returns:
        `ok`; `why` not; `bytes`, `seconds`; `packets` that the device has sent meanwhile, None where it does
        not count.
    """
    engine = importlib.import_module("mooncake.engine")
    sender, receiver = engine.TransferEngine(), engine.TransferEngine()
    for one in (sender, receiver):
        if one.initialize(HOST, "P2PHANDSHAKE", protocol, device) != 0:
            return {"ok": False, "why": "initialize"}
    source, target = mmap.mmap(-1, _BLOCK_BYTES), mmap.mmap(-1, _BLOCK_BYTES)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in (source, target)]
    for one, address in zip((sender, receiver), addresses, strict=True):
        if one.register_memory(address, _BLOCK_BYTES) != 0:
            return {"ok": False, "why": "register"}
    session = f"{HOST}:{receiver.get_rpc_port()}"
    before = packets(device)
    blocks, start = 0, time.perf_counter()
    while True:
        source[:8] = blocks.to_bytes(8, "little")
        if sender.transfer_sync_write(session, *addresses, _BLOCK_BYTES) != 0:
            return {"ok": False, "why": "transfer"}
        blocks += 1
        seconds = time.perf_counter() - start
        if blocks == 1:
            if source[:] != target[:]:
                return {"ok": False, "why": "bytes"}
            start = time.perf_counter()  # the first block pays for the connection
            continue
        if seconds >= _SECONDS or blocks * _BLOCK_BYTES >= _MOST_BYTES:
            break
    after = packets(device)
    return {
        "ok": source[:] == target[:],
        "why": "bytes",
        "bytes": (blocks - 1) * _BLOCK_BYTES,
        "seconds": seconds,
        "packets": None if before is None or after is None else after - before,
    }


def packets(device: str, sysfs: Path = Path("/sys")) -> int | None:
    """Return how many packets a device has sent, None where it does not say."""
    port = sysfs / "class" / "infiniband" / device / "ports" / "1"
    for name in _COUNTERS:
        try:
            return int((port / name).read_text())
        except (OSError, ValueError):
            continue
    return None


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    # Mooncake's threads do not always end; what was to be found out is printed.
    import os

    os._exit(code)
