"""In a pod: the folder that agent and engines share, and advice in the names of the chart's values."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from caketin.doctor.finding import Finding

VALUES_OF: Final = {
    "RDMA devices": ("store.protocol", "rdma.resourceName", "rdma.hostNetwork"),
    "memlock limit": ("store.protocol", "rdma.resourceName"),
    "huge pages": ("mooncake.storage.hugepages",),
    "memory": ("mooncake.storage.segmentSize", "mooncake.storage.memoryOverhead", "agent.memoryOverhead"),
    "shared folder": ("agent.sharedDir", "agent.hostMemory"),
    "/dev/shm": ("agent.sharedDir",),  # noqa: S108 - the name of a finding
    "Redis": ("redis.mode", "redis.external"),
    "Redis' clock": ("redis.external",),
    "Mooncake master": ("mooncake.mode", "mooncake.external.master", "networkPolicy.clientLabels"),
    "storage nodes": ("mooncake.storage.replicas", "mooncake.external.masterHttp"),
    "control plane": ("api.replicas", "networkPolicy.clientLabels", "networkPolicy.nodeCIDRs"),
}
"""What a finding is about -> the chart's values that decide it."""

_MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


def in_pod() -> bool:
    """Return whether this process runs in a pod; Kubernetes sets the variable in each."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST"))


def in_chart_words(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Add to each advice the chart's values that it is about."""
    for f in findings:
        names = VALUES_OF.get(f.what)
        if f.state == "ok" or names is None:
            yield f
        else:
            yield replace(f, advice=f"{f.advice} (chart: {', '.join(names)})")


def shared_folder(folder: Path, need: int, mounts: Path = Path("/proc/self/mounts")) -> Finding:
    """Look at the folder for pools in shared memory.

    Args:
        folder: the folder.
        need: bytes that the pools will take.
        mounts: the kernel's list of what is mounted where.
    """
    try:
        usage = shutil.disk_usage(folder)
        kind = _file_system(folder.resolve(), mounts.read_text())
    except OSError as error:
        advice = "mount a folder of the node's tmpfs there"
        return Finding("shared folder", f"{folder} cannot be used: {error.strerror}", "bad", advice)
    found = (
        f"{_gib(usage.free)} of {_gib(usage.total)} free on {kind or 'an unknown file system'} at {folder}"
    )
    if kind not in _MEMORY_FILE_SYSTEMS:
        return Finding("shared folder", found, "bad", "pools lie in memory: mount a tmpfs there")
    if usage.free < need:
        advice = f"the pools take {_gib(need)}: mount -o remount,size=... on the node, or give the agent less"
        return Finding("shared folder", found, "bad", advice)
    return Finding("shared folder", found)


def _file_system(folder: Path, mounts: str) -> str:
    """Return the type of the file system that `folder` is on: the last mount of the longest path counts."""
    best, kind = Path(), ""
    for line in mounts.splitlines():
        _, place, this, *_ = line.split(" ")
        path = Path(place.encode().decode("unicode_escape"))  # spaces are written as \040
        if folder.is_relative_to(path) and len(path.parts) >= len(best.parts):
            best, kind = path, this
    return kind


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
