"""One boot of the guest: which cases run there, and what they found."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api.settings import Settings, StoreSettings
from caketin.embedded_redis import EmbeddedRedis
from dataplane.child_process import ChildProcess, free_port
from tests.rdma.guest.run import KILLED_AGENT_MASTER, MASTER
from tests.rdma.kernel import HERE, Kernel, NoGuest, guest_kernel
from tests.servers import serving

REPO = HERE.parents[1]
QEMU = "qemu-system-x86_64"
BOOT_SECONDS = 60.0
MEMORY_MIB = 2560
SECOND_MEMORY_MIB = 1024
WIRE_CASE = "wire"
WIRE_DUMP = "wire.pcap"
NOTED_VERBS = "noted_verbs.so"
_HOST_AS_THE_GUEST_SEES_IT = "10.0.2.2"


@dataclass(frozen=True)
class Outcome:
    """What a case found.

    Attributes:
        facts: plain values.
        seconds: that it took in the guest.
        log: what it printed.
    """

    facts: dict[str, Any]
    seconds: float
    log: str


@dataclass
class Guest:
    """A guest that has run its cases and is off.

    Attributes:
        folder: its results.
        seconds: from the start of QEMU to its end.
    """

    folder: Path
    seconds: float = 0.0
    _shown: set[str] = field(default_factory=set)

    def __getitem__(self, case: str) -> Outcome:
        """What a case found; an error there fails the test here, with its traceback."""
        file = self.folder / f"{case}.json"
        log = self._text(f"{case}.log")
        if not file.exists():
            raise AssertionError(f"{case} did not run in the guest.\n{self._text('console.log')[-4000:]}")
        told = json.loads(file.read_text())
        if "error" in told:
            raise AssertionError(f"{case} failed in the guest:\n{told['error']}\n{log[-4000:]}")
        return Outcome(told["facts"], told["seconds"], log)

    def _text(self, name: str) -> str:
        file = self.folder / name
        return file.read_text(errors="replace") if file.exists() else ""


def run_guest(cases: Sequence[str], folder: Path, seconds: float) -> Guest:
    """Boot, run the cases, and come back when the guest is off or the time is up.

    Raises:
        NoGuest: this machine lacks what it needs; the text says what.
    """
    if shutil.which(QEMU) is None:
        raise NoGuest(f"{QEMU} is not here: apt-get install qemu-system-x86")
    provider = Path("/etc/libibverbs.d/rxe.driver")
    if not provider.exists() or shutil.which("rdma") is None:
        raise NoGuest("soft-RoCE needs apt-get install ibverbs-providers iproute2")
    kernel = guest_kernel()
    folder.chmod(0o777)  # cases may become another user
    _build_noted_verbs(folder)
    _compile_python()
    guest = Guest(folder)
    with ExitStack() as stack:
        redis = EmbeddedRedis.start(folder / "redis", appendonly=False)
        stack.callback(redis.stop)
        ports = []
        for number, master in enumerate((MASTER, KILLED_AGENT_MASTER)):
            url = redis.url.removesuffix("/0") + f"/{number}"
            store = StoreSettings(kind="mooncake", master=master, protocol="rdma", devices="rxe0")
            control = Settings(redis_url=url, port=free_port(), store=store)
            stack.enter_context(serving(control))
            ports.append(control.port)
        job = {"cases": list(cases), "host": _HOST_AS_THE_GUEST_SEES_IT, "control_ports": ports}
        (folder / "job.json").write_text(json.dumps(job))
        started = time.monotonic()
        pair = _Pair(folder, free_port()) if WIRE_CASE in cases else None
        qemu = ChildProcess.start("guest", _command(kernel, folder, 1, pair), folder / "qemu.log")
        stack.callback(qemu.kill)
        if pair is not None:
            qemu.wait_ready(lambda: _listens(pair.port), 10.0)
            other = ChildProcess.start(
                "second guest", _command(kernel, folder, 2, pair), folder / "qemu-2.log"
            )
            stack.callback(other.kill)
        with contextlib.suppress(subprocess.TimeoutExpired):
            qemu.process.wait(BOOT_SECONDS + seconds)
        guest.seconds = time.monotonic() - started
    return guest


@dataclass(frozen=True)
class _Pair:
    """Two guests whose first network interfaces are joined by a wire, which is listened to."""

    folder: Path
    port: int

    @property
    def dump(self) -> Path:
        return self.folder / WIRE_DUMP

    def end(self, number: int) -> str:
        return f"socket,{'listen' if number == 1 else 'connect'}=127.0.0.1:{self.port}"


def _listens(port: int) -> bool:
    """Whether something listens, looked at without a connection: QEMU takes only one."""
    return f":{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text()


def _command(kernel: Kernel, folder: Path, number: int, pair: _Pair | None) -> list[str]:
    """QEMU's command line. Software emulation: nested hardware virtualisation cannot be relied on."""
    if " " in f"{REPO}{sys.executable}":
        raise NoGuest("the guest's kernel cannot be told of paths with spaces")
    told = f"caketin.repo={REPO} caketin.python={sys.executable} caketin.number={number}"
    root = "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap"
    accelerator = os.environ.get("CAKETIN_RDMA_ACCEL", "tcg,thread=multi")
    memory, processors = (MEMORY_MIB, 2) if number == 1 else (SECOND_MEMORY_MIB, 1)
    command = [QEMU, "-machine", "q35", "-accel", accelerator]
    command += ["-cpu", "max", "-smp", str(processors), "-m", str(memory)]
    command += ["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none"]
    console = folder / ("console.log" if number == 1 else "console-2.log")
    command += ["-serial", f"file:{console}", "-kernel", str(kernel.image), "-initrd", str(kernel.initrd)]
    command += ["-append", f"console=ttyS0 panic=-1 quiet mitigations=off {told}"]
    command += ["-virtfs", root]
    command += ["-virtfs", f"local,path={folder},mount_tag=results,security_model=none"]
    first = "hubport,hubid=0" if pair is None else pair.end(number)
    for i, network in enumerate((first, "hubport,hubid=1", "user")):
        address = f"52:54:00:00:{number:02x}:{i:02x}"
        command += ["-netdev", f"{network},id=n{i}"]
        command += ["-device", f"virtio-net-pci,netdev=n{i},mac={address},romfile="]
    if pair is not None and number == 1:
        command += ["-object", f"filter-dump,id=dump,netdev=n0,file={pair.dump},maxlen=96"]
    return ["nice", "-n", "19", *command] if os.environ.get("CAKETIN_RDMA_NICE") else command


def _build_noted_verbs(folder: Path) -> None:
    source = HERE / "guest" / "noted_verbs.c"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise NoGuest("no C compiler is here: apt-get install gcc")
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Werror",
        "-o",
        str(folder / NOTED_VERBS),
        str(source),
    ]
    # Linked with what it stands before, so that it can be opened in its place.
    subprocess.run([*command, "-Wl,--no-as-needed", "-l:libibverbs.so.1", "-ldl"], check=True)


def _compile_python() -> None:
    """Compile the tree: the guest cannot write, and would compile it again in every process."""
    folders = [
        str(REPO / name) for name in ("metadata", "dataplane", "caketin", "api", "tests/rdma", "tests/agent")
    ]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *folders], check=False)
