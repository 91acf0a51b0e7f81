"""How Mooncake is told to use RDMA, and what is wrong with that on this machine, before Mooncake tries.

Mooncake itself tries a wrong device or GID 20 times, 1.1 s each, and then says -600 for everything.

Four settings reach it through variables of the environment, which it reads once a process, when its library
is loaded: a second client of the process cannot have others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dataplane.memory_limits import memlock_room
from dataplane.rdma_devices import chosen_devices, devices_by_selector
from dataplane.rdma_ports import (
    SYSFS,
    DeviceLimits,
    RdmaPort,
    device_limits,
    device_names,
    numa_node_of_process,
    rdma_port,
)
from metadata.errors import FieldError, InvalidInput

MTUS: Final = (512, 1024, 2048, 4096)
_MOST: Final = {"gid_index": 255, "traffic_class": 255, "service_level": 15}
_VARIABLES: Final = {
    "gid_index": "MC_GID_INDEX",
    "traffic_class": "MC_IB_TC",
    "service_level": "MC_IB_SL",
    "mtu": "MC_MTU",
}
_MODULES: Final = ("mooncake.store", "mooncake.engine")
_REGION_VARIABLE: Final = "MC_MAX_MR_SIZE"


@dataclass(frozen=True, slots=True)
class RdmaSettings:
    """How to use RDMA. None: Mooncake's own choice, or what its variable in the environment says.

    Attributes:
        devices: which, see `rdma_devices`.
        gid_index: row of the port's GID table, the same on all devices that are used.
        traffic_class: of RoCE packets, 0 to 255: DSCP * 4.
        service_level: InfiniBand's, 0 to 15; on RoCE the priority of tagged frames.
        mtu: payload of a packet: 512, 1024, 2048 or 4096; larger than the port's does nothing. The same on
            both ends of a connection, or it fails.
        max_region_bytes: most bytes to register at once; None: what the devices say.

    Raises:
        InvalidInput: a value out of range, or a list of devices that cannot be read.
    """

    devices: str = ""
    gid_index: int | None = None
    traffic_class: int | None = None
    service_level: int | None = None
    mtu: int | None = None
    max_region_bytes: int | None = None

    def __post_init__(self) -> None:
        errors = [
            FieldError(name, "out_of_range", f"is {value}, must be 0 to {most}")
            for name, most in _MOST.items()
            if (value := getattr(self, name)) is not None and not 0 <= value <= most
        ]
        if self.mtu is not None and self.mtu not in MTUS:
            errors.append(FieldError("mtu", "invalid", f"is {self.mtu}, must be one of {MTUS}"))
        if self.max_region_bytes is not None and self.max_region_bytes < 1:
            errors.append(FieldError("max_region_bytes", "out_of_range", "must be at least 1"))
        try:
            devices_by_selector(self.devices)
        except InvalidInput as error:
            errors += error.errors
        if errors:
            raise InvalidInput("the RDMA settings cannot be used", errors)

    def variables(self) -> dict[str, str]:
        """Return what Mooncake reads from the environment, of the settings that are given."""
        given = {v: getattr(self, name) for name, v in _VARIABLES.items()}
        return {variable: str(value) for variable, value in given.items() if value is not None}

    def chosen(self, rank: str = "") -> tuple[str, ...]:
        """Return this process' devices; empty: Mooncake chooses.

        Raises:
            InvalidInput: the list cannot be read, or has nothing for this process.
        """
        return chosen_devices(self.devices, rank, numa_node_of_process())

    def region_limit(self, devices: Iterable[str], environment: Mapping[str, str] = os.environ) -> int | None:
        """Return the most bytes that all of `devices` register at once; None where nobody says."""
        limits = [limit.max_region_bytes for d in devices if (limit := device_limits(d)) is not None]
        told = environment.get(_REGION_VARIABLE, "")
        limits += [int(told)] if told.isdigit() else []
        limits += [self.max_region_bytes] if self.max_region_bytes is not None else []
        return min((limit for limit in limits if limit > 0), default=None)


class RdmaEnvironment:
    """What Mooncake was told in this process when it was loaded; it holds for all clients."""

    def __init__(self) -> None:
        self._told: dict[str, str | None] | None = None

    def tell(self, settings: RdmaSettings) -> None:
        """Set the variables, before Mooncake is loaded.

        Raises:
            InvalidInput: it is loaded already, and reads no others any more.
        """
        now: dict[str, str | None] = {v: os.environ.get(v) for v in _VARIABLES.values()}
        wanted = now | settings.variables()
        loaded = any(name in sys.modules for name in _MODULES)
        fixed = self._told or (now if loaded else wanted)
        errors = [
            FieldError(
                name,
                "fixed",
                f"is {wanted[v]}, but Mooncake was loaded here with {fixed[v] or 'its own choice'}: "
                f"have one value for all of it, or start it with {v}={wanted[v]} in its environment",
            )
            for name, v in _VARIABLES.items()
            if wanted[v] != fixed[v]
        ]
        if errors:
            raise InvalidInput("Mooncake reads its RDMA settings once a process", errors)
        self._told = wanted
        os.environ.update(settings.variables())


environment: Final = RdmaEnvironment()


def rdma_faults(
    settings: RdmaSettings, devices: tuple[str, ...], locked_bytes: int, sysfs: Path = SYSFS
) -> Iterator[FieldError]:
    """Say what would make Mooncake fail; `field` is the setting to change.

    Args:
        settings: how it would be told.
        devices: that were chosen; empty: all of the machine.
        locked_bytes: memory that is registered right at the start.
        sysfs: where the devices are described, another place in tests.
    """
    present = device_names(sysfs)
    absent = [name for name in devices if name not in present]
    if absent or not present:
        named = ", ".join(absent) or "(any)"
        have = ", ".join(present) or "none; install the NIC's driver, or use protocol tcp"
        yield FieldError("devices", "unknown", f"RDMA device {named} is not here; this host has: {have}")
        return
    ports = [rdma_port(name, sysfs) for name in devices or present]
    up = [port for port in ports if port.state == "ACTIVE"]
    down = [port for port in ports if port.state != "ACTIVE"]
    if down and (devices or not up):
        listed = ", ".join(f"{p.device} is {p.state or 'unknown'}" for p in down)
        others = ", ".join(n for n in present if rdma_port(n, sysfs).state == "ACTIVE") or "none"
        yield FieldError("devices", "down", f"the port of {listed}; devices whose port is up: {others}")
    for port in up:
        yield from _gid_faults(settings.gid_index, port)
    yield from _memlock_faults(locked_bytes)


def mtu_doubt(mtu: int | None, device: str, limits: DeviceLimits | None) -> FieldError | None:
    """Return what to know of an MTU that the port does not have; Mooncake then takes the port's."""
    if mtu is None or limits is None or not limits.active_mtu or mtu <= limits.active_mtu:
        return None
    detail = (
        f"is {mtu}, the port of {device} has {limits.active_mtu}, which is what is used: raise the "
        f"interface's MTU (RoCE: to {mtu + 104} or more, on switches too), or set mtu to {limits.active_mtu}"
    )
    return FieldError("mtu", "too_large", detail)


def gid_doubt(index: int | None, port: RdmaPort) -> FieldError | None:
    """Return what to know of a GID that is there but reaches less than another of the port (RoCE)."""
    gid = None if index is None else port.gid(index)
    usual = port.usual_gid()
    if gid is None or usual is None or gid == usual:
        return None
    if gid.kind == usual.kind and gid.address.is_link_local <= usual.address.is_link_local:
        return None
    why = "link-local, for one Ethernet segment only" if gid.kind == usual.kind else f"of kind {gid.kind}"
    detail = f"is {index}, a row of {port.device} that is {why}; usual is gid_index {usual.index} ({usual})"
    return FieldError("gid_index", "unusual", detail)


def _gid_faults(index: int | None, port: RdmaPort) -> Iterator[FieldError]:
    if index is None:
        if not port.gids:
            detail = f"{port.device} has no GID at all: its network interface is down or has no address"
            yield FieldError("gid_index", "no_gid", detail)
        return
    if port.gid(index) is None:
        listed = "; ".join(map(str, port.gids)) or "none: its network interface has no address"
        usual = port.usual_gid()
        advice = f". Set gid_index to {usual.index}" if usual else ""
        detail = f"is {index}, an empty row of the GID table of {port.device}; it has {listed}{advice}"
        yield FieldError("gid_index", "empty", detail)


def _memlock_faults(needed: int) -> Iterator[FieldError]:
    room = memlock_room()
    if room is not None and room.left < needed:
        yield FieldError("memlock", "too_small", room.advice(needed))
