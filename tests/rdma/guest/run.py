"""Runs cases in the guest, each in a process of its own, forked after the slow imports are done.

Reads `job.json` in the results folder (which cases, and where the control plane is), writes `CASE.json` and
`CASE.log` there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path("/results")
REPO = Path(__file__).parents[3]
CASE_SECONDS, LONG_CASE_SECONDS = 300.0, 800.0
MASTER = "127.0.0.1:50051"
MASTER_HTTP = "127.0.0.1:9003"
KILLED_AGENT_MASTER = "127.0.0.1:50091"
WIRE_MASTER = "192.168.77.1:50081"
WIRE_MASTER_HTTP = "192.168.77.1:9033"
FIRST, SECOND = "192.168.77.1", "192.168.77.2"
CONTROL_PORT, KILLED_CONTROL_PORT = 7411, 7413
SEGMENT_BYTES = 64 << 20


def main() -> None:
    if sys.argv[1:] == ["2"]:
        second()
        return
    job = json.loads((RESULTS / "job.json").read_text())
    start_master(MASTER, MASTER_HTTP)
    if "wire" in job["cases"]:
        start_master(WIRE_MASTER, WIRE_MASTER_HTTP)
    say("importing")
    from dataplane.mooncake_native import load_native

    start_lending("node", MASTER, "rxe0,rxe1")  # loads Mooncake meanwhile
    from tests.rdma.guest import agent_cases, cases  # noqa: F401 - where more cases are

    say("imported")
    for port, to in zip((CONTROL_PORT, KILLED_CONTROL_PORT), job["control_ports"], strict=True):
        forked(f"forward-{port}", lambda port=port, to=to: forward(port, job["host"], to))
    wait_for_node("node")
    say("Mooncake is up")
    given = {
        "master": MASTER,
        "master_http": MASTER_HTTP,
        "control_url": f"http://127.0.0.1:{CONTROL_PORT}",
        "killed_control_url": f"http://127.0.0.1:{KILLED_CONTROL_PORT}",
    }
    seconds = {name: LONG_CASE_SECONDS if name in cases.LONG else CASE_SECONDS for name in job["cases"]}
    waiting = sorted(job["cases"], key=cases.order)
    running: dict[int, tuple[str, float]] = {}
    while waiting or running:
        alone = [name for name, _ in running.values() if name not in cases.LONG]
        if waiting and (waiting[0] in cases.EARLY or not alone):
            name = waiting.pop(0)
            if name in cases.PRELOADED:
                load_native()
            running[start(cases.CASES[name], name, given)] = (name, time.monotonic())
        reap(running, seconds)


def second() -> None:
    """The second machine of a pair: a storage node, until the machine is ended."""
    wait_until(lambda: accepts(WIRE_MASTER), 60, "the first machine")
    lend("node-2", WIRE_MASTER, "rxe0", host=SECOND)
    say("storage node of the second machine is ready")
    signal.pause()


def start_master(address: str, http: str) -> subprocess.Popen[bytes]:
    """Start `mooncake_master`, without importing anything of Mooncake."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.origin is not None
    (host, port), (_, http_port) = address.split(":"), http.split(":")
    command = [
        str(Path(spec.origin).parent / "mooncake_master"),
        f"--rpc_address={host}",
        f"--rpc_port={port}",
    ]
    command += [
        f"--metrics_port={http_port}",
        f"--metrics_host={host}",
        "--rpc_thread_num=2",
        "--minloglevel=1",
    ]
    with (RESULTS / f"master-{port}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def lend(name: str, master: str, devices: str, protocol: str = "rdma", host: str = "127.0.0.1") -> int:
    """Start a storage node as `caketin` has it, and wait until its memory can be used; its process id."""
    pid = start_lending(name, master, devices, protocol, host)
    wait_for_node(name)
    return pid


def start_lending(
    name: str, master: str, devices: str, protocol: str = "rdma", host: str = "127.0.0.1"
) -> int:
    """Start a storage node; its process id."""
    from dataplane import mooncake_node

    wait_until(lambda: accepts(master), 60, f"the master at {master}")
    arguments = ["node", "--master", master, "--segment-bytes", str(SEGMENT_BYTES), "--protocol", protocol]
    arguments += ["--devices", devices, "--local-hostname", host]
    return forked(name, lambda: mooncake_node.main(arguments))


def wait_for_node(name: str) -> None:
    """Wait until the memory of a storage node can be used."""
    log = RESULTS / f"{name}.log"
    wait_until(lambda: "storage node ready" in log.read_text(errors="replace"), 90, name)


def accepts(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what} is not there after {seconds:g} s"
        time.sleep(0.1)


def forward(port: int, host: str, to: int) -> None:
    """Pass connections on to the host's control plane, which answers to names of its own machine only."""
    listener = socket.create_server(("127.0.0.1", port))
    while True:
        here, _ = listener.accept()
        there = socket.create_connection((host, to))
        for source, target in ((here, there), (there, here)):
            threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65_536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def forked(name: str, work: Callable[[], Any]) -> int:
    """Run `work` in a child, its output in the results folder."""
    (RESULTS / f"{name}.log").write_text("")
    child = os.fork()
    if child:
        return child
    os.setsid()
    log = os.open(RESULTS / f"{name}.log", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code: object = 0
    try:
        work()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)  # native clients that hang must not hold the end


def start(case: Callable[[dict[str, Any]], Any], name: str, given: dict[str, Any]) -> int:
    def work() -> None:
        began = time.monotonic()
        try:
            result: dict[str, Any] = {"facts": case(given)}
        except BaseException:
            result = {"error": traceback.format_exc()}
        write(name, result | {"seconds": round(time.monotonic() - began, 1)})

    return forked(name, work)


def reap(running: dict[int, tuple[str, float]], seconds: dict[str, float]) -> None:
    for child, (name, began) in list(running.items()):
        if os.waitpid(child, os.WNOHANG)[0]:
            del running[child]
            say(f"{name}: {time.monotonic() - began:.0f} s")
            if not (RESULTS / f"{name}.json").exists():
                write(name, {"error": "the process ended without a word"})
        elif time.monotonic() - began > seconds[name] and not (RESULTS / f"{name}.json").exists():
            write(name, {"error": f"not done after {seconds[name]:g} s"})
            os.killpg(child, signal.SIGKILL)
    time.sleep(0.1)


def write(name: str, result: dict[str, Any]) -> None:
    half = RESULTS / f".{name}"
    half.write_text(json.dumps(result))
    half.rename(RESULTS / f"{name}.json")


def say(text: str) -> None:
    up = Path("/proc/uptime").read_text().split()[0]
    print(f"[{up} s] {text}", flush=True)


if __name__ == "__main__":
    main()
