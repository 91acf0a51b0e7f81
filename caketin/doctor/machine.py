"""The machine: RDMA devices, locked memory, huge pages, shared memory, memory and disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from caketin.doctor.finding import Finding
from dataplane.memory_limits import memlock_room, memory_left

_GIB: Final = 1 << 30
_SHM_BYTES: Final = 1 << 30
_DISK_BYTES: Final = 10 << 30
_HUGEPAGES: Final = "MC_STORE_USE_HUGEPAGE"
_SHM: Final = "/dev/shm"  # noqa: S108 - looked at, nothing is made there


@dataclass(frozen=True)
class Machine:
    """What to look at.

    Attributes:
        store_bytes: memory that a Mooncake storage node which is to start here will lend; 0: none will.
        data_dir: folder for the file store and logs; may not exist yet.
        root: the file system's root, another one in tests.
    """

    store_bytes: int
    data_dir: Path
    root: Path = Path("/")

    def findings(self) -> Iterator[Finding]:
        """Look at everything."""
        devices = self._devices()
        yield self._rdma(devices)
        yield _memlock(rdma=bool(devices))
        yield self._hugepages()
        yield self._shared_memory()
        yield self._memory()
        yield self._disk()

    def _devices(self) -> dict[str, list[str]]:
        """Return the RDMA devices: name -> state of each port, such as `ACTIVE`."""
        folder = self.root / "sys" / "class" / "infiniband"
        names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        return {
            name: [
                _text(port / "state").partition(": ")[2] for port in sorted((folder / name).glob("ports/*"))
            ]
            for name in names
        }

    def _rdma(self, devices: dict[str, list[str]]) -> Finding:
        if not devices:
            advice = "Mooncake goes over TCP: protocol tcp. For RDMA, install the NIC's driver"
            return Finding("RDMA devices", "none", "warn", advice)
        found = ", ".join(f"{name} ({', '.join(ports) or 'no port'})" for name, ports in devices.items())
        if not any("ACTIVE" in ports for ports in devices.values()):
            advice = "no port is up: look at the cable and `ibv_devinfo`, or use protocol tcp"
            return Finding("RDMA devices", found, "bad", advice)
        verbs = sorted((self.root / "dev" / "infiniband").glob("uverbs*"))
        if not any(os.access(device, os.R_OK | os.W_OK) for device in verbs):
            advice = "give it /dev/infiniband (containers: --device /dev/infiniband), or use protocol tcp"
            return Finding("RDMA devices", f"{found}, but no /dev/infiniband/uverbs* to open", "bad", advice)
        return Finding("RDMA devices", found)

    def _hugepages(self) -> Finding:
        counts = dict(_fields(_text(self.root / "proc" / "meminfo")))
        total, free = counts.get("HugePages_Total", 0), counts.get("HugePages_Free", 0)
        size = counts.get("Hugepagesize", 0)
        found = f"{free} of {total} free, {size} KiB each" if total else "none"
        wanted = os.environ.get(_HUGEPAGES, "").lower() not in {"", "0", "false", "off", "no"}
        need = -(-self.store_bytes // (size * 1024)) if size else 0
        if wanted and free < need:
            advice = f"{_HUGEPAGES} is set: sysctl -w vm.nr_hugepages={need}, or unset it"
            return Finding("huge pages", found, "bad", advice)
        return Finding("huge pages", found)

    def _shared_memory(self) -> Finding:
        there = self.root / "dev" / "shm"
        try:
            usage = shutil.disk_usage(there)
        except OSError as error:
            return Finding(_SHM, f"cannot be used: {error.strerror}", "bad", "mount a tmpfs there")
        found = f"{_size(usage.free)} of {_size(usage.total)} free"
        if usage.free >= _SHM_BYTES:
            return Finding(_SHM, found)
        advice = (
            f"pools that processes share lie there; {_size(_SHM_BYTES)} or more should be free: "
            "mount -o remount,size=8g /dev/shm (containers: --shm-size 8g)"
        )
        return Finding(_SHM, found, "warn", advice)

    def _memory(self) -> Finding:
        left = memory_left()
        found = f"{_size(left)} left for this process"
        if left >= self.store_bytes:
            return Finding("memory", found)
        advice = (
            f"a storage node of {_size(self.store_bytes)} does not fit: give --store-bytes less, or raise "
            "the container's memory limit"
        )
        return Finding("memory", found, "bad", advice)

    def _disk(self) -> Finding:
        there = next(p for p in (self.data_dir, *self.data_dir.absolute().parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            advice = "give a --data-dir that this user may write"
            return Finding("data folder", f"{self.data_dir}: {there} cannot be written", "bad", advice)
        try:
            free = shutil.disk_usage(there).free
        except OSError as error:
            return Finding("data folder", f"{self.data_dir}: {error.strerror}", "bad", "choose another")
        found = f"{_size(free)} free at {self.data_dir}"
        if free >= _DISK_BYTES:
            return Finding("data folder", found)
        advice = f"the file store wants room, {_size(_DISK_BYTES)} or more: choose another --data-dir"
        return Finding("data folder", found, "warn", advice)


def _memlock(*, rdma: bool) -> Finding:
    room = memlock_room()
    if room is None:
        return Finding("memlock limit", "unlimited, or none for this process (IPC_LOCK)")
    advice = (
        "RDMA registers (locks) all pool memory: `ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd "
        "unit, --ulimit memlock=-1 for a container"
    )
    return Finding("memlock limit", _size(room.limit), "bad" if rdma else "warn", advice)


def _fields(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            yield name, int(words[0])


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _size(count: int) -> str:
    for unit, size in (("GiB", _GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
