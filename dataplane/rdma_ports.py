"""What the RDMA devices of this machine say of themselves: port, GIDs, MTU, largest registration.

Read from sysfs, and from libibverbs where sysfs does not have it (MTU and registration size), through ctypes:
the base install has no binding of it.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SYSFS: Final = Path("/sys")
_LIBRARY: Final = "libibverbs.so.1"
_DEVICE_ATTR_BYTES: Final = 1024  # struct ibv_device_attr has 232; room for later ones
_MAX_MR_SIZE_AT: Final = 80  # after fw_ver[64], node_guid, sys_image_guid
_PORT_ATTR_BYTES: Final = 256  # struct ibv_port_attr has 52
_ACTIVE_MTU_AT: Final = 8  # after state, max_mtu
_PORT: Final = 1


@dataclass(frozen=True, slots=True)
class Gid:
    """One address of a port.

    Attributes:
        index: in the port's table.
        address: as an IPv6 address; IPv4 ones are mapped.
        kind: `RoCE v2`, `IB/RoCE v1`; empty where the driver does not say.
        interface: network interface that it belongs to; empty for InfiniBand.
    """

    index: int
    address: ipaddress.IPv6Address
    kind: str
    interface: str

    def __str__(self) -> str:
        shown = self.address.ipv4_mapped or self.address
        about = ", ".join(text for text in (self.kind, self.interface) if text)
        return f"{self.index} = {shown} ({about})" if about else f"{self.index} = {shown}"


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """Port 1 of a device.

    Attributes:
        device: its name.
        state: `ACTIVE` when it can be used.
        link_layer: `InfiniBand` or `Ethernet`.
        rate: as the driver writes it, `100 Gb/sec (4X EDR)`.
        numa_node: that the device is attached to, None where unknown.
        gids: that are filled, by index.
    """

    device: str
    state: str
    link_layer: str
    rate: str
    numa_node: int | None
    gids: tuple[Gid, ...]

    def gid(self, index: int) -> Gid | None:
        """Return the GID at `index`, None where that entry is empty."""
        return next((g for g in self.gids if g.index == index), None)

    def usual_gid(self) -> Gid | None:
        """Return the GID to set on RoCE: v2 with an IPv4 address, else v2, else the first."""
        v2 = [g for g in self.gids if g.kind == "RoCE v2"]
        return next(iter([g for g in v2 if g.address.ipv4_mapped] or v2 or self.gids), None)


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What only the device itself says.

    Attributes:
        max_region_bytes: largest memory region that it registers.
        active_mtu: bytes of a packet's payload on port 1; 0 while the port is down.
    """

    max_region_bytes: int
    active_mtu: int


def device_names(sysfs: Path = SYSFS) -> list[str]:
    """Return the names of this machine's RDMA devices."""
    folder = sysfs / "class" / "infiniband"
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def rdma_port(device: str, sysfs: Path = SYSFS) -> RdmaPort:
    """Return what sysfs says of a device's first port; of one that is not there, nothing."""
    folder = sysfs / "class" / "infiniband" / device
    port = folder / "ports" / str(_PORT)
    node = _text(folder / "device" / "numa_node")
    return RdmaPort(
        device,
        _text(port / "state").partition(": ")[2],
        _text(port / "link_layer"),
        _text(port / "rate"),
        int(node) if node.isdigit() else None,
        tuple(_gids(port)),
    )


def device_limits(device: str) -> DeviceLimits | None:
    """Ask a device for its limits; None where it or libibverbs is not there, or it may not be opened."""
    try:
        verbs = ctypes.CDLL(_LIBRARY, use_errno=True)
    except OSError:
        return None
    with _opened(verbs, device.encode()) as context:
        if context is None:
            return None
        attributes = ctypes.create_string_buffer(_DEVICE_ATTR_BYTES)
        port = ctypes.create_string_buffer(_PORT_ATTR_BYTES)
        if verbs.ibv_query_device(context, attributes):
            return None
        if verbs.ibv_query_port(context, ctypes.c_uint8(_PORT), port):
            return None
        largest = int.from_bytes(attributes.raw[_MAX_MR_SIZE_AT : _MAX_MR_SIZE_AT + 8], "little")
        code = int.from_bytes(port.raw[_ACTIVE_MTU_AT : _ACTIVE_MTU_AT + 4], "little")
        return DeviceLimits(largest, 128 << code if code else 0)  # IBV_MTU_256 is 1


def numa_node_of_process(sysfs: Path = SYSFS) -> int | None:
    """Return the NUMA node that has every processor which this process may use; None where several do."""
    mine = os.sched_getaffinity(0)
    nodes = [p for p in (sysfs / "devices" / "system" / "node").glob("node*") if p.name[4:].isdigit()]
    inside = [int(p.name[4:]) for p in nodes if mine <= _cpus(_text(p / "cpulist"))]
    return inside[0] if inside else None


@contextmanager
def _opened(verbs: Any, name: bytes) -> Iterator[ctypes.c_void_p | None]:
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    verbs.ibv_open_device.restype = ctypes.c_void_p
    count = ctypes.c_int()
    listed = verbs.ibv_get_device_list(ctypes.byref(count))
    if not listed:
        yield None
        return
    try:
        pointers = [ctypes.c_void_p(listed[i]) for i in range(count.value)]
        found = next((p for p in pointers if verbs.ibv_get_device_name(p) == name), None)
        opened = None if found is None else verbs.ibv_open_device(found)
        context = ctypes.c_void_p(opened) if opened else None
        try:
            yield context
        finally:
            if context is not None:
                verbs.ibv_close_device(context)
    finally:
        verbs.ibv_free_device_list(listed)


def _gids(port: Path) -> Iterator[Gid]:
    files = [p for p in (port / "gids").glob("*") if p.name.isdigit()]
    for file in sorted(files, key=lambda p: int(p.name)):
        text = _text(file)
        if not text.strip("0:"):
            continue
        kinds = port / "gid_attrs"
        kind, interface = _text(kinds / "types" / file.name), _text(kinds / "ndevs" / file.name)
        yield Gid(int(file.name), ipaddress.IPv6Address(text), kind, interface)


def _cpus(text: str) -> set[int]:
    """Read a list such as `0-3,8`."""
    found: set[int] = set()
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:  # empty entries of the table cannot be read at all
        return ""
