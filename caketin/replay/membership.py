"""A rank's place in the control plane: kept by heartbeats, taken again when it got lost; what it reported."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from dataplane.control_client import ControlClient, ControlSettings, ModelIdentity, RankIdentity
from dataplane.control_plane import ControlRefused
from dataplane.messages import control
from metadata.codec import PageHashes
from metadata.errors import CaketinError
from metadata.page_runs import runs_to_mask
from metadata.pools import RankPool

log = logging.getLogger(__name__)

_UNKNOWN: Final = frozenset({"unknown_engine", "unknown_rank", "unknown_namespace", "unknown_pool"})
"""What a control plane says that has lost its Redis, or thinks this rank has left."""


class NotingClient(ControlClient):
    """A client that remembers what was reported missing, and why."""

    def __init__(self, settings: ControlSettings, me: RankIdentity) -> None:
        super().__init__(settings, me)
        self._lock = threading.Lock()
        self._reasons: dict[bytes, str] = {}
        self.reported_pages = 0

    def missing(
        self,
        namespace_id: str,
        page_hashes: PageHashes,
        generation: bytes | None,
        missing: Mapping[str, control.MissingPool],
    ) -> control.MissingResult:
        """See `ControlClient.missing`."""
        pages: set[int] = set()
        with self._lock:
            for pool in missing.values():
                if pool.reason == "evicted":  # nobody read it, so no request has lost it
                    continue
                for page in runs_to_mask(pool.pages, len(page_hashes)).nonzero()[0].tolist():
                    self._reasons[page_hashes[page]] = pool.reason
                    pages.add(page)
        done = super().missing(namespace_id, page_hashes, generation, missing)
        with self._lock:
            self.reported_pages += len(pages)
        return done

    def reasons(self, page_hashes: PageHashes) -> dict[int, str]:
        """Return why pages were reported, by index, and forget it."""
        with self._lock:
            if not self._reasons:
                return {}
            return {i: self._reasons.pop(h) for i, h in enumerate(page_hashes) if h in self._reasons}


class Membership:
    """Keeps a rank registered, from a thread of its own."""

    def __init__(
        self,
        client: ControlClient,
        model: ModelIdentity,
        pools: Sequence[RankPool],
        registration: control.RegisterResult,
    ) -> None:
        self._client = client
        self._model = model
        self._pools = list(pools)
        self._epoch = registration.epoch
        self._seconds = max(0.2, registration.lease_seconds / 3)
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="replay-heartbeat", daemon=True)
        self.events: Counter[str] = Counter()

    def __enter__(self) -> Membership:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ended.set()
        self._wake.set()
        self._thread.join(self._seconds)

    def seen(self, error: CaketinError) -> None:
        """Look at what a call failed with: where the control plane does not know us, register again soon."""
        if isinstance(error, ControlRefused) and error.refusal in _UNKNOWN:
            self._wake.set()

    def _keep(self) -> None:
        while True:
            woken = self._wake.wait(self._seconds)
            if self._ended.is_set():
                return
            self._wake.clear()
            try:
                self._renew(registered=not woken)
            except CaketinError as error:
                self.events["heartbeat failed"] += 1
                log.info("the rank's lease could not be renewed: %s", error)
                # Sooner than the next heartbeat, so that hits come back soon after the control plane does.
                self._ended.wait(min(1.0, self._seconds))
                self._wake.set()

    def _renew(self, *, registered: bool) -> None:
        if registered:
            try:
                self._client.heartbeat(self._epoch)
            except ControlRefused as error:
                if error.refusal not in _UNKNOWN:
                    raise
            else:
                return
        self._epoch = self._client.register(self._model, self._pools).epoch
        self.events["registered again"] += 1
