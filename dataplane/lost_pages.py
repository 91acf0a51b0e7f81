"""The pages that a prefetch could not read: what is reported, why, and what is removed (T2)."""

from __future__ import annotations

import logging
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataplane.control_plane import ControlPlane
from dataplane.messages import control
from dataplane.object_store import ObjectStore, StoreCode
from dataplane.page_statements import PoolFacts, statements
from dataplane.stage_batch import PoolPages
from dataplane.transfer import BoolArray, PageArray, RankPools
from metadata.codec import PageHashes
from metadata.errors import CaketinError
from metadata.page_runs import page_runs

log = logging.getLogger(__name__)

LossReason: TypeAlias = Literal["timeout", "gone", "checksum", "size_mismatch"]

_REASONS: Final[tuple[LossReason, ...]] = ("timeout", "gone", "checksum", "size_mismatch")
"""From the weakest evidence to the strongest: a page gets one report, with the strongest of its objects."""

_REASON_OF: Final[dict[StoreCode, LossReason]] = {
    StoreCode.MISSING: "gone",
    StoreCode.UNCONFIRMED: "gone",
    StoreCode.SIZE_MISMATCH: "size_mismatch",
    StoreCode.CHECKSUM: "checksum",
    StoreCode.TRANSFER_FAILED: "timeout",
    StoreCode.LEASE_LOST: "timeout",
}
"""What a failed read says of the object. Codes left out say something of *us* (memory, store away): the claim
stands."""

_EVIDENCE: Final = np.array([_REASONS.index(_REASON_OF[c]) if c in _REASON_OF else -1 for c in StoreCode])
"""By code: index into `_REASONS`, -1 where the object is not to blame."""


class LostPages:
    """What a prefetch has lost so far, by pool, page and shard."""

    def __init__(self, pools: RankPools, page_hashes: PageHashes) -> None:
        self._pools = pools
        self._hashes = page_hashes
        self._evidence: dict[str, NDArray[np.int8]] = {}
        self._damaged: list[str] = []

    def note(self, member: PoolPages, codes: NDArray[np.int8], keys: NDArray[np.str_] | None = None) -> None:
        """Note the outcome of reads.

        Args:
            member: the pool and its pages.
            codes: `StoreCode` of each object, (pages, owned shards, parts).
            keys: of the objects, same shape; None where none can be damaged.
        """
        evidence = _EVIDENCE[codes].max(axis=2).astype(np.int8)
        if (evidence >= 0).any():
            table = self._table(member.pool.name)
            table[member.pages] = np.maximum(table[member.pages], evidence)
        if keys is not None:
            self._damaged += keys[codes == StoreCode.CHECKSUM].tolist()

    def gone(self, name: str, pages: PageArray, shard: int) -> None:
        """Note pages that lack an object of the rank's `shard`-th shard; of other shards nothing is said."""
        if pages.size:
            table = self._table(name)
            table[pages, shard] = np.maximum(table[pages, shard], _REASONS.index("gone"))

    def pages(self) -> dict[str, BoolArray]:
        """Return the lost pages of each pool that has any, bool (pages of the call,)."""
        return {name: np.any(table >= 0, axis=1) for name, table in self._evidence.items()}

    def report(self, control_plane: ControlPlane, generation: bytes | None) -> None:
        """Clear the claims of what is lost; the control plane being away changes nothing of what was read."""
        facts = {
            name: PoolFacts(self._pools.bound[name].shards, table >= 0, table.max(axis=1))
            for name, table in self._evidence.items()
        }
        try:
            for call in statements(facts):
                missing = {
                    name: control.MissingPool(
                        pages=page_runs(said.pages),
                        shards=said.shards,
                        reason=_REASONS[said.reason],
                        pool_id=self._pools.bound[name].pool.spec.pool_id,
                    )
                    for name, said in call.items()
                }
                control_plane.missing(self._pools.namespace_id, self._hashes, generation, missing)
        except CaketinError as error:
            log.warning("lost pages could not be reported: %s", error)

    def remove_damaged(self, store: ObjectStore) -> None:
        """Remove objects whose bytes are damaged: a put keeps what exists, so they would stay for ever."""
        if not self._damaged:
            return
        try:
            store.remove(self._damaged)
        except CaketinError as error:
            log.warning("damaged objects could not be removed: %s", error)

    def _table(self, name: str) -> NDArray[np.int8]:
        shape = (len(self._hashes), len(self._pools.bound[name].shards))
        return self._evidence.setdefault(name, np.full(shape, -1, np.int8))
