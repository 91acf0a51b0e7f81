"""RDMA: what is set, what the devices have, and whether bytes move over each of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from caketin.doctor.finding import Finding
from dataplane.rdma_ports import DeviceLimits, RdmaPort, device_limits, device_names, rdma_port
from dataplane.rdma_settings import RdmaSettings, gid_doubt, mtu_doubt, rdma_faults
from metadata.errors import FieldError, InvalidInput

FLAGS: Final = {
    "devices": "--devices",
    "gid_index": "--gid-index",
    "traffic_class": "--traffic-class",
    "service_level": "--service-level",
    "mtu": "--mtu",
}
"""Setting -> flag of the doctor. Elsewhere the settings have the same names."""

_LOOPBACK_SECONDS: Final = 90.0
_LOOPBACK_BYTES: Final = 2 << 20
_NO_LIMIT: Final = 1 << 62
_GID_USED: Final = re.compile(r"GID_Index (\d+)")
_TROUBLE: Final = re.compile(r"^[EW]\d{4} ")
_WHY: Final = {
    "initialize": "Mooncake could not open the device",
    "tcp": "Mooncake did not open the device and would go over TCP",
    "register": "memory could not be registered",
    "transfer": "the queue pairs were not connected, or the transfer failed",
    "bytes": "bytes arrived wrong",
}
_REMEDY: Final = {
    "initialize": "see gid_index and devices; /dev/infiniband must be there and open to this user",
    "tcp": "its provider (Debian: ibverbs-providers) and /dev/infiniband must be there, for this user",
    "register": "see memlock: `ulimit -l unlimited`",
    "transfer": "try another gid_index (RoCE: one of kind RoCE v2 with the address of this network), and a "
    "smaller mtu; the port must have an address",
    "bytes": "this is a fault of driver or device: update them",
}


@dataclass(frozen=True)
class RdmaCheck:
    """What to look at.

    Attributes:
        settings: that the data plane would have.
        rank: name of a rank, for devices that are named by rank.
        sysfs: where devices are described, another place in tests.
    """

    settings: RdmaSettings
    rank: str = ""
    sysfs: Path = Path("/sys")

    def findings(self) -> Iterator[Finding]:
        """Look at everything; nothing is moved where something is known not to work."""
        try:
            chosen = self.settings.chosen(self.rank)
        except InvalidInput as error:
            yield from map(_fault, error.errors)
            return
        faults = list(rdma_faults(self.settings, chosen, _LOOPBACK_BYTES, self.sysfs))
        yield from map(_fault, faults)
        present = device_names(self.sysfs)
        ports = [rdma_port(name, self.sysfs) for name in chosen or present if name in present]
        for port in ports:
            yield from self._port(port, asked_for=bool(chosen))
        if not faults:
            yield from (self._loopback(port.device) for port in ports if port.state == "ACTIVE")

    def _port(self, port: RdmaPort, *, asked_for: bool) -> Iterator[Finding]:
        limits = device_limits(port.device)
        yield _device(port, limits, self.settings, asked_for=asked_for)
        doubts = (
            mtu_doubt(self.settings.mtu, port.device, limits),
            gid_doubt(self.settings.gid_index, port),
        )
        for doubt in doubts:
            if doubt is not None:
                found = f"{FLAGS[doubt.field]} {doubt.detail}"
                yield Finding(f"RDMA setting {doubt.field}", found, "warn", "see there")

    def _loopback(self, device: str) -> Finding:
        what = f"RDMA loopback {device}"
        command = [sys.executable, "-m", "dataplane.rdma_loopback", device]
        environment = {**os.environ, **self.settings.variables(), "MC_LOG_LEVEL": "INFO"}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_LOOPBACK_SECONDS,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Finding(what, f"not done after {_LOOPBACK_SECONDS:g} s", "bad", _REMEDY["transfer"])
        result = _last_json(done.stdout)
        if result is None:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            return Finding(what, f"could not be tried: {said}", "bad", "see Mooncake and libibverbs above")
        if not result["ok"]:
            trouble = [line for line in done.stderr.splitlines() if _TROUBLE.match(line)]
            said = trouble[-1].partition("] ")[2] if trouble else "no message"
            return Finding(what, f"{_WHY[result['why']]}: {said}", "bad", _REMEDY[result["why"]])
        return Finding(what, _moved(result, done.stderr))


def _fault(error: FieldError) -> Finding:
    flag = FLAGS.get(error.field)
    found = f"{flag} {error.detail}" if flag else error.detail
    advice = f"change the setting {error.field} (here: {flag})" if flag else "raise the limit as said"
    return Finding(f"RDMA setting {error.field}", found, "bad", advice)


def _device(
    port: RdmaPort, limits: DeviceLimits | None, settings: RdmaSettings, *, asked_for: bool
) -> Finding:
    gids = "; ".join(map(str, port.gids)) or "none"
    found = f"{port.state or 'no port'}, {port.link_layer or 'unknown link'}, {port.rate or 'rate unknown'}"
    found += f"; GIDs: {gids}"
    if port.numa_node is not None:
        found += f"; NUMA node {port.numa_node}"
    if limits is None:
        advice = (
            "libibverbs cannot open it: the provider's package (Debian: ibverbs-providers), /dev/infiniband"
        )
        return Finding(f"RDMA device {port.device}", found, "bad", advice)
    found += f"; MTU {limits.active_mtu}"
    most = settings.max_region_bytes or limits.max_region_bytes
    if most < _NO_LIMIT:
        found += f"; registers up to {most} bytes at once"
    if port.state == "ACTIVE":
        return Finding(f"RDMA device {port.device}", found)
    advice = "cable, switch port, `ip link set ... up`; on InfiniBand a subnet manager"
    return Finding(f"RDMA device {port.device}", found, "bad" if asked_for else "warn", advice)


def _moved(result: dict[str, Any], log: str) -> str:
    rate = result["bytes"] / result["seconds"] / 1e9
    text = f"{result['bytes'] >> 20} MiB over verbs, {rate:.3g} GB/s"
    used = _GID_USED.search(log)
    text += f", GID index {used[1]}" if used else ""
    if result["packets"] is not None:
        text += f", {result['packets']} packets counted on the device"
    return text


def _last_json(text: str) -> dict[str, Any] | None:
    for line in reversed(text.splitlines()):
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        return found
    return None
