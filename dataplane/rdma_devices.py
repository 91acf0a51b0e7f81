"""Which RDMA devices a process uses, from one line of text that all of a cluster's processes may share.

    mlx5_0,mlx5_1                       all of them, for everybody
    tp0=mlx5_0; tp1=mlx5_1; *=mlx5_2    by rank
    numa0=mlx5_0,mlx5_1; numa1=mlx5_4   by the NUMA node that the process is bound to
    auto  (or nothing)                  Mooncake chooses by the memory's place

Before `=` stands `*`, a NUMA node, or words of a rank's name joined by `-`: `tp3`, `dp1-tp0`, also a whole
name such as `dp0-pp0-cp0-tp3`. The first entry that fits counts. `auto` may stand behind `=` too.

Pure: text in, names out.
"""

from __future__ import annotations

import re
from typing import Final

from metadata.errors import FieldError, InvalidInput

AUTO: Final = "auto"
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]+\Z")
_SELECTOR: Final = re.compile(r"(\*|numa[0-9]+|[a-z]+[0-9]+(-[a-z]+[0-9]+)*)\Z")


class NoDeviceForRank(InvalidInput):
    """No entry of the list of devices fits this process."""

    code = "no_device_for_rank"


def chosen_devices(text: str, rank: str = "", numa_node: int | None = None) -> tuple[str, ...]:
    """Return the names of the devices to use; empty: Mooncake chooses.

    Args:
        text: the setting, as above.
        rank: name of the rank, `dp0-pp0-cp0-tp0`; empty for a process that is none, such as a storage node.
        numa_node: that the process is bound to; None where it may run on several.

    Raises:
        InvalidInput: the text cannot be read.
        NoDeviceForRank: it names devices for others only.
    """
    entries = devices_by_selector(text)
    words = {"*", *rank.split("-")} - {""}
    if numa_node is not None:
        words.add(f"numa{numa_node}")
    for selector, devices in entries:
        if set(selector.split("-")) <= words:
            return devices
    who = f"rank {rank!r}" if rank else "a process without a rank"
    where = "bound to no NUMA node" if numa_node is None else f"on NUMA node {numa_node}"
    detail = f"names no device for {who}, {where}: {text!r}; add an entry, such as '*=auto'"
    raise NoDeviceForRank("no RDMA device is named for this process", [_error("unmatched", detail)])


def devices_by_selector(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return selectors and devices, in order; a plain list is one entry for everybody.

    Raises:
        InvalidInput: the text cannot be read.
    """
    if "=" not in text:
        return [("*", _names(text))]
    entries = []
    for entry in filter(None, (e.strip() for e in text.split(";"))):
        selector, equals, names = (s.strip() for s in entry.partition("="))
        if not equals or not _SELECTOR.match(selector):
            detail = f"has {entry!r}; write '*=', 'numa0=', 'tp0=' or 'dp0-tp1=' and devices"
            raise InvalidInput("the list of RDMA devices cannot be read", [_error("invalid", detail)])
        entries.append((selector, _names(names)))
    return entries


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in (n.strip() for n in text.split(",")) if name)
    if names in {(), (AUTO,)}:
        return ()
    bad = next((name for name in names if name == AUTO or not _NAME.match(name)), None)
    if bad is not None:
        detail = f"has {bad!r}, which is no device; write names as in /sys/class/infiniband, or 'auto' alone"
        raise InvalidInput("the list of RDMA devices cannot be read", [_error("invalid", detail)])
    return names


def _error(code: str, detail: str) -> FieldError:
    return FieldError("devices", code, detail)
