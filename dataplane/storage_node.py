"""A storage node: lends its memory to a Mooncake store until it is told to end, and says whether it is well.

Its probe answers over HTTP: `/healthz` while the process runs, `/readyz` while the master has the node's
segment.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from dataplane.mooncake_master import MasterHttp, check_listening
from dataplane.mooncake_native import MooncakeSettings, connect, load_native
from dataplane.object_store import StoreUnavailable

log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_PROBE_SECONDS: Final = 3.0
_RETRY_SECONDS: Final = 0.5


@dataclass(frozen=True)
class StorageNode:
    """What a storage node is told.

    Attributes:
        store: where the master is, and how bytes travel.
        segment_bytes: memory to lend.
        prefault: touch all of it first; needs `store.master_http`.
        wait_seconds: how long the master may take to be there at the start.
        health: host and port of the probe; None for none.
    """

    store: MooncakeSettings
    segment_bytes: int
    prefault: bool = False
    wait_seconds: float = 0.0
    health: tuple[str, int] | None = None

    def run(self, told_to_end: threading.Event, ready: Callable[[str], None]) -> None:
        """Lend memory until `told_to_end`; `ready` is called with the node's name in the store.

        Raises:
            StoreUnavailable: the master is not there in time, or Mooncake's set-up fails.
        """
        probe = _Probe(self.store.master_http)
        server = probe.listen(*self.health) if self.health else None
        try:
            if not self._wait_for_master(told_to_end):
                return
            client = self._lend()
            try:
                probe.name = str(client.get_hostname())
                ready(probe.name)
                told_to_end.wait()
            finally:
                client.close()
        finally:
            if server is not None:
                server.shutdown()
                server.server_close()

    def _wait_for_master(self, told_to_end: threading.Event) -> bool:
        """Return whether the master listens; False when told to end before."""
        deadline = time.monotonic() + self.wait_seconds
        while True:
            try:
                check_listening(self.store.master, self.store.connect_seconds)
            except StoreUnavailable:
                if time.monotonic() >= deadline:
                    raise
                if told_to_end.wait(_RETRY_SECONDS):
                    return False
            else:
                return True

    def _lend(self) -> Any:
        before = self._base_addresses() if self.prefault else set()
        client = connect(load_native(self.store, self.segment_bytes), self.store, self.segment_bytes)
        if self.prefault:
            for base in self._base_addresses() - before:
                _populate(*base)
        return client

    def _base_addresses(self) -> set[tuple[int, int]]:
        if self.store.master_http is None:
            raise StoreUnavailable(
                "--prefault needs --master-http, which says where the segment lies in memory"
            )
        asked = MasterHttp(self.store.master_http)
        found = {(int(s["base_address"], 16), int(s["size_bytes"])) for s in asked.segments()}
        asked.close()
        return found


class _Probe:
    """Answers whether the node is well."""

    def __init__(self, master_http: str | None) -> None:
        self.name = ""
        self._master_http = master_http

    def listen(self, host: str, port: int) -> ThreadingHTTPServer:
        """Answer at `host:port` until the server is shut down."""
        probe = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _PROBE_SECONDS

            def do_GET(self) -> None:
                wrong = probe.problem() if self.path == "/readyz" else ""
                known = self.path in {"/healthz", "/readyz"}
                self.send_response(503 if wrong else 200 if known else 404)
                self.end_headers()
                self.wfile.write((wrong or "ok").encode() + b"\n")

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing: a probe comes every few seconds."""

        server = ThreadingHTTPServer((host, port), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="probe", daemon=True).start()
        return server

    def problem(self) -> str:
        """Return why the node is not ready, empty when it is."""
        if not self.name:
            return "the segment is not mounted yet"
        if self._master_http is None:
            return ""
        asked = MasterHttp(self._master_http, seconds=_PROBE_SECONDS)
        try:
            names = {s["segment_name"] for s in asked.segments()}
        except (StoreUnavailable, ValueError, KeyError) as error:
            return f"the master does not say: {error}"
        finally:
            asked.close()
        return "" if self.name in names else f"the master does not have the segment of {self.name}"


def _populate(base: int, length: int) -> None:
    # Makes the pages present and keeps what is in them, so an object that is already there is safe.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(base), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
        log.warning("the segment could not be prefaulted: %s", os.strerror(ctypes.get_errno()))
