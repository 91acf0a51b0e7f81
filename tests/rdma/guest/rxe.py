"""What the guest's soft-RoCE devices have done: packets, queue pairs, registrations."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

MTU = 1024
"""Of the devices: the largest RDMA MTU that fits in the interface's 1,500 bytes."""


def sent_packets(device: str = "rxe0") -> int:
    counters = Path("/sys/class/infiniband") / device / "ports" / "1" / "hw_counters"
    return int((counters / "sent_pkts").read_text())


def queue_pairs(pid: int) -> list[str]:
    """Devices of a process' connected queue pairs, one a pair."""
    shown = subprocess.run(["rdma", "resource", "show", "qp"], capture_output=True, text=True, check=True)
    rows = [line.split() for line in shown.stdout.splitlines()]
    words = [dict(zip(row[::2], row[1::2], strict=False)) for row in rows]
    threads = {p.name for p in Path(f"/proc/{pid}/task").iterdir()}  # the kernel notes the thread
    mine = [w for w in words if w.get("pid") in threads and w.get("type") == "RC" and w["state"] == "RTS"]
    return [w["link"].partition("/")[0] for w in mine]


class Noted:
    """What libibverbs was asked for in this process, see `noted_verbs.c`."""

    def __init__(self, file: Path) -> None:
        self._rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def registered(self) -> list[tuple[int, int]]:
        return [(int(r[1]), int(r[2])) for r in self._rows if r[0] == "mr"]

    @property
    def refused(self) -> list[tuple[int, int]]:
        return [(int(r[1]), int(r[2])) for r in self._rows if r[0] == "refused"]

    @property
    def queue_pairs(self) -> list[dict[str, int]]:
        """Only those that say all four; MTU in bytes."""
        names = ("mtu", "gid_index", "traffic_class", "service_level")
        rows = [dict(zip(names, map(int, r[1:]), strict=True)) for r in self._rows if r[0] == "qp"]
        return [row | {"mtu": 128 << row["mtu"]} for row in rows]


@contextlib.contextmanager
def noting(name: str, max_mr_size: int | None = None) -> Iterator[Path]:
    """Have this process' calls of libibverbs noted in a file; with a size, as if the device took no more."""
    file = Path("/tmp") / f"{name}.verbs"
    os.environ["NOTED_VERBS"] = str(file)
    if max_mr_size is not None:
        os.environ["NOTED_MAX_MR_SIZE"] = str(max_mr_size)
    yield file
