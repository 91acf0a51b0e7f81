"""Moves bytes from this process to itself over one RDMA device, the way Mooncake does, and times it.

    python -m dataplane.rdma_loopback DEVICE

A process of its own, since Mooncake reads its settings once a process. The variables of `RdmaSettings` are to
be in the environment. Prints one JSON object; Mooncake's own messages are on standard error.
"""

from __future__ import annotations

import contextlib
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


class NotMoved(Exception):
    """Something did not work; the text is the word of it in the result."""


def loopback(device: str, protocol: str) -> dict[str, Any]:
    """Write blocks from one engine to another, both here, and compare the first and the last.

    Returns:
        `ok`; `why` not; `bytes`, `seconds`; `packets` that the device has sent meanwhile, None where it does
        not count.
    """
    try:
        return {"ok": True, **_timed(device, *_engines(device, protocol))}
    except NotMoved as error:
        return {"ok": False, "why": str(error)}


def _engines(device: str, protocol: str) -> tuple[Any, Any]:
    """Return two engines, sender and receiver, for as long as the process lives."""
    module = importlib.import_module("mooncake.engine")
    engines = module.TransferEngine(), module.TransferEngine()
    for engine in engines:
        if engine.initialize(HOST, "P2PHANDSHAKE", protocol, device) != 0:
            raise NotMoved("initialize")
    if protocol == "rdma" and not opened_verbs():
        raise NotMoved("tcp")  # Mooncake falls back to TCP without a word
    return engines


def _timed(device: str, sender: Any, receiver: Any) -> dict[str, Any]:
    source, target = mmap.mmap(-1, _BLOCK_BYTES), mmap.mmap(-1, _BLOCK_BYTES)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in (source, target)]
    for engine, address in zip((sender, receiver), addresses, strict=True):
        if engine.register_memory(address, _BLOCK_BYTES) != 0:
            raise NotMoved("register")
    session = f"{HOST}:{receiver.get_rpc_port()}"

    def move(number: int) -> None:
        source[:8] = number.to_bytes(8, "little")
        if sender.transfer_sync_write(session, *addresses, _BLOCK_BYTES) != 0:
            raise NotMoved("transfer")

    def compare() -> None:
        if source[:] != target[:]:
            raise NotMoved("bytes")

    before = packets(device)
    move(1)  # pays for the connection
    compare()
    blocks, seconds, start = 0, 0.0, time.perf_counter()
    while seconds < _SECONDS and blocks * _BLOCK_BYTES < _MOST_BYTES:
        move(blocks)
        blocks += 1
        seconds = time.perf_counter() - start
    compare()
    after = packets(device)
    sent = None if before is None or after is None else after - before
    return {"bytes": blocks * _BLOCK_BYTES, "seconds": seconds, "packets": sent}


def opened_verbs(folder: Path = Path("/proc/self/fd")) -> bool:
    """Return whether this process has an RDMA device open."""
    for link in folder.iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith("/dev/infiniband/"):
                return True
    return False


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
