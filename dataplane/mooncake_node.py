"""A small Mooncake cluster of our own: one master and storage nodes as child processes on loopback.

For the embedded stack and for tests. In production the master and its nodes are deployed by themselves.

    python -m dataplane.mooncake_node node --master 127.0.0.1:50051 --segment-bytes 1073741824

is a storage node: it lends its memory to the store until SIGTERM. `caketin storage-node` is the same for
machines of their own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Final, NoReturn, Self

from dataplane.child_process import ChildFailed, ChildProcess, accepts, free_ports
from dataplane.mooncake_master import MasterHttp, split_address
from dataplane.mooncake_native import MooncakeSettings, load_native
from dataplane.object_store import StoreUnavailable
from dataplane.rdma_settings import RdmaSettings
from dataplane.storage_node import StorageNode

_LOOPBACK: Final = "127.0.0.1"
_READY: Final = "caketin storage node ready"
_RDMA_NUMBERS: Final = ("gid_index", "traffic_class", "service_level", "mtu")
_STARTS: Final = 3  # a port that was free a moment ago may be taken by the time the master binds it


class MooncakeCluster:
    """One `mooncake_master` and its storage nodes, all on loopback; a context manager.

    Close the stores that use it first: a client whose node is gone takes 10 s to close.

    Attributes:
        master: `host:port` of the master's RPC, once started.
        master_http: `host:port` of its metrics port, once started.
        log_folder: where the children's output is, once started.
    """

    def __init__(
        self,
        segment_bytes: int,
        *,
        nodes: int = 1,
        prefault: bool = False,
        lease_seconds: float = 10.0,
        log_folder: Path | None = None,
        ready_seconds: float = 30.0,
        rdma: RdmaSettings | None = None,
    ) -> None:
        """Describe a cluster; `start` starts it.

        Args:
            segment_bytes: memory that each storage node lends.
            nodes: storage nodes.
            prefault: touch all of that memory before a node is ready (its first use is slow otherwise).
            lease_seconds: how long a read protects an object from eviction.
            log_folder: where to write the children's output; None: a temporary folder, removed by `stop`.
            ready_seconds: how long each child may take to be ready.
            rdma: move bytes over RDMA, in this way; None: over TCP.
        """
        self.master = ""
        self.master_http = ""
        self._segment_bytes = segment_bytes
        self._node_count = nodes
        self._prefault = prefault
        self._lease_seconds = lease_seconds
        self._ready_seconds = ready_seconds
        self._rdma = rdma
        self._own_folder = log_folder is None
        self.log_folder = log_folder or Path()
        self._master: ChildProcess | None = None
        self._nodes: list[ChildProcess] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def settings(self) -> MooncakeSettings:
        """What a client needs to use this cluster."""
        return MooncakeSettings(
            self.master,
            master_http=self.master_http,
            local_hostname=_LOOPBACK,
            lease_seconds=self._lease_seconds,
            **({} if self._rdma is None else {"protocol": "rdma", **asdict(self._rdma)}),
        )

    def start(self) -> None:
        """Start the master and the nodes and wait until they serve. Nothing is left behind when it fails.

        Only in the main thread: its children die with the thread that started them.

        Raises:
            StoreUnavailable: a child ended or was not ready in time; the text holds the end of its log.
            RuntimeError: called in another thread.
        """
        if self._own_folder:
            self.log_folder = Path(tempfile.mkdtemp(prefix="caketin-mooncake-"))
        self.log_folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start_master()
            for _ in range(self._node_count):
                self.start_node()
        except BaseException as error:
            self.stop()
            if isinstance(error, ChildFailed):
                raise StoreUnavailable(error.detail) from error
            raise

    @property
    def children(self) -> list[ChildProcess]:
        """The running processes: the master, then the nodes."""
        return [*([self._master] if self._master else []), *self._nodes]

    def start_node(self) -> None:
        """Start one more storage node and wait until its memory can be used.

        Raises:
            ChildFailed: it ended or was not ready in time.
        """
        name = f"storage-node-{len(self._nodes)}"
        arguments = ["--master", self.master, "--master-http", self.master_http]
        arguments += ["--segment-bytes", str(self._segment_bytes)]
        arguments += [] if self._rdma is None else ["--protocol", "rdma", *_rdma_flags(self._rdma)]
        node = self._spawn(name, ["node", *arguments, *(["--prefault"] if self._prefault else [])])
        self._nodes.append(node)
        node.wait_ready(lambda: _READY.encode() in node.log.read_bytes(), self._ready_seconds)

    def kill_node(self, index: int = 0) -> None:
        """Kill a storage node at once, as a crash would; its bytes are gone."""
        self._nodes[index].kill()

    def restart_master(self) -> None:
        """Start a master that ended, at the same ports. It remembers no object; its nodes come back to it.

        Raises:
            ChildFailed: it ended or was not ready in time.
        """
        if self._master is None:
            raise ChildFailed("the cluster was not started")
        self._master.stop()
        self._master = self._spawn(f"{self._master.name}-again", ["master", *self._master_flags()])
        self._master.wait_ready(self._master_serves, self._ready_seconds)

    def stop(self) -> None:
        """End nodes, then master; twice is fine."""
        for node in self._nodes:
            node.ask_to_end()
        for node in self._nodes:
            node.stop()
        self._nodes.clear()
        if self._master is not None:
            self._master.stop()
            self._master = None
        if self._own_folder and self.master:
            shutil.rmtree(self.log_folder, ignore_errors=True)

    def _start_master(self) -> None:
        for attempt in range(_STARTS):
            rpc, http = free_ports(2)
            self.master, self.master_http = f"{_LOOPBACK}:{rpc}", f"{_LOOPBACK}:{http}"
            self._master = self._spawn(f"mooncake-master-{attempt}", ["master", *self._master_flags()])
            try:
                self._master.wait_ready(self._master_serves, self._ready_seconds)
            except ChildFailed:
                if self._master.process.poll() is None or attempt == _STARTS - 1:
                    raise
                continue
            return

    def _master_flags(self) -> list[str]:
        (host, rpc), (_, http) = split_address(self.master), split_address(self.master_http)
        flags = [f"--rpc_address={host}", f"--rpc_port={rpc}"]
        flags += [f"--metrics_host={host}", f"--metrics_port={http}"]
        # Without the log level the master writes a line for every put of a key that exists.
        return [*flags, f"--default_kv_lease_ttl={round(self._lease_seconds * 1000)}", "--minloglevel=1"]

    def _master_serves(self) -> bool:
        asked = MasterHttp(self.master_http, seconds=1.0)
        try:
            return asked.ready() and accepts(*split_address(self.master))
        finally:
            asked.close()

    def _spawn(self, name: str, arguments: list[str]) -> ChildProcess:
        # The package is imported by its name, wherever this process found it.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-m", "dataplane.mooncake_node", *arguments]
        log_file = self.log_folder / f"{name}.log"
        log_file.unlink(missing_ok=True)  # what an earlier process said in it is not this one's
        return ChildProcess.start(name, command, log_file, environment)


def _rdma_flags(rdma: RdmaSettings) -> list[str]:
    given = {"devices": rdma.devices or None} | {name: getattr(rdma, name) for name in _RDMA_NUMBERS}
    return [word for name, v in given.items() if v is not None for word in (_flag(name), str(v))]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def master_binary() -> Path:
    """Return the path of `mooncake_master`: in the wheel, beside the interpreter, or on PATH.

    Raises:
        StoreUnavailable: there is none.
    """
    module = load_native()
    places = [
        Path(module.__file__).parent / "mooncake_master",
        Path(sys.executable).parent / "mooncake_master",
    ]
    on_path = shutil.which("mooncake_master")
    places += [Path(on_path)] if on_path else []
    for place in places:
        if place.is_file() and os.access(place, os.X_OK):
            return place
    raise StoreUnavailable("mooncake_master is neither in Mooncake's wheel nor beside Python nor on PATH")


def main(arguments: list[str] | None = None) -> int:
    """Run as a child: `node` lends memory to a store, `master` becomes `mooncake_master`."""
    parser = argparse.ArgumentParser(prog="python -m dataplane.mooncake_node")
    roles = parser.add_subparsers(dest="role", required=True)
    node = roles.add_parser("node", help="lend memory to a Mooncake store")
    node.add_argument("--master", required=True, help="host:port of the master's RPC")
    node.add_argument("--master-http", help="host:port of the master's metrics port")
    node.add_argument("--segment-bytes", type=int, required=True)
    node.add_argument("--prefault", action="store_true", help="touch all memory before being ready")
    node.add_argument("--protocol", default="tcp")
    node.add_argument("--devices", default="")
    for name in _RDMA_NUMBERS:
        node.add_argument(_flag(name), type=int)
    node.add_argument("--local-hostname", default="")
    roles.add_parser("master", help="become mooncake_master; further flags are its own")
    chosen, flags = parser.parse_known_args(arguments)
    if chosen.role == "node" and flags:
        parser.error(f"unknown arguments: {' '.join(flags)}")
    if chosen.role == "master":
        become_master(flags)
    return _lend_memory(chosen)


def become_master(flags: list[str]) -> NoReturn:
    """Replace this process by `mooncake_master`.

    Raises:
        StoreUnavailable: there is none.
    """
    binary = str(master_binary())
    os.execv(binary, [binary, *flags])  # noqa: S606


def _lend_memory(chosen: argparse.Namespace) -> int:
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    store = MooncakeSettings(
        chosen.master,
        master_http=chosen.master_http,
        local_hostname=chosen.local_hostname,
        protocol=chosen.protocol,
        devices=chosen.devices,
        **{name: getattr(chosen, name) for name in _RDMA_NUMBERS},
    )
    node = StorageNode(store, chosen.segment_bytes, prefault=chosen.prefault)
    # The parent waits for this line.
    node.run(stopped, lambda name: print(_READY, name, chosen.segment_bytes, flush=True))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
