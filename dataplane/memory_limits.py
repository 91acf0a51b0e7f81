"""How much memory this process may still take and lock, as Linux says.

A mapping that the machine cannot fill is granted all the same and the process is killed at its first touch:
so whoever allocates asks here first.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")
_IPC_LOCK: Final = 14  # number of CAP_IPC_LOCK


class MemlockRoom(NamedTuple):
    """How much memory a process without the capability to lock more may register with RDMA devices.

    Attributes:
        limit: `ulimit -l`, in bytes.
        taken: bytes that are registered already.
    """

    limit: int
    taken: int

    @property
    def left(self) -> int:
        """Bytes that may still be registered."""
        return max(0, self.limit - self.taken)

    def advice(self, needed: int) -> str:
        """Return what to change so that `needed` bytes more can be registered."""
        kib = -(-(self.taken + needed) // 1024)
        return (
            f"the memory lock limit is {self.limit} bytes, {self.taken} of them are taken and {needed} more "
            f"are needed. Where the process is started: `ulimit -l {kib}` or `ulimit -l unlimited`, "
            "LimitMEMLOCK=infinity in a systemd unit, `--ulimit memlock=-1` and capability IPC_LOCK for a "
            "container"
        )


class _ControlGroup(NamedTuple):
    """Names of the files of one version of control groups."""

    folder: str
    limit: str
    usage: str
    reclaimable: str


_VERSIONS: Final = {
    "": _ControlGroup("", "memory.max", "memory.current", "inactive_file"),
    "memory": _ControlGroup(
        "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
}


def memory_left(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Return the bytes that this process may still take without swapping or being killed.

    The least of what the machine has available and what is left in the control groups that this process is
    in, any level up. Files that are not there set no limit.
    """
    return min([_available(proc), *_group_room(proc, cgroup)])


def memlock_limit() -> int | None:
    """Return the bytes that this process may lock (`ulimit -l`), None if there is no limit."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def memory_locked(proc: Path = _PROC) -> int:
    """Return the bytes that this process has locked."""
    return _kib_field(proc / "self" / "status", "VmLck") or 0


def memlock_room(proc: Path = _PROC) -> MemlockRoom | None:
    """Return how much may be registered with RDMA devices; None where there is no limit.

    What devices have registered is counted apart from what `mlock` has (`VmPin`). A process with CAP_IPC_LOCK
    has no limit; in a user namespace it has none only if that is the first one.
    """
    limit = memlock_limit()
    status = proc / "self" / "status"
    if limit is None or (_capabilities(status) >> _IPC_LOCK) & 1:
        return None
    return MemlockRoom(limit, _kib_field(status, "VmPin") or 0)


def _capabilities(status: Path) -> int:
    words = [line.split() for line in _text(status).splitlines() if line.startswith("CapEff:")]
    return int(words[0][1], 16) if words else 0


def _available(proc: Path) -> int:
    found = _kib_field(proc / "meminfo", "MemAvailable")
    return 1 << 62 if found is None else found


def _kib_field(file: Path, name: str) -> int | None:
    for line in _text(file).splitlines():
        field, _, rest = line.partition(":")
        if field == name:
            return int(rest.split()[0]) * 1024
    return None


def _group_room(proc: Path, cgroup: Path) -> Iterator[int]:
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        names = _VERSIONS.get(controllers)
        if names is None:
            continue
        root = cgroup / names.folder
        own = root / path.lstrip("/")
        # In a container the path may be the host's, and its own group is the root here.
        for folder in {root, own, *(p for p in own.parents if p.is_relative_to(root))}:
            limit = _text(folder / names.limit).strip()
            if limit.isdigit():
                usage = int(_text(folder / names.usage) or 0)
                yield max(0, int(limit) - usage + _stat(folder, names.reclaimable))


def _stat(folder: Path, name: str) -> int:
    for line in _text(folder / "memory.stat").splitlines():
        field, _, value = line.partition(" ")
        if field == name:
            return int(value)
    return 0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
