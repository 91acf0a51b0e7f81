"""What the data plane tells the control plane, and how that can fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from dataplane.messages import control
from metadata.codec import PageHashes
from metadata.errors import CaketinError

_SERVER_ERROR: Final = 500
_RATE_LIMITED: Final = 429


class ControlPlaneAway(CaketinError):
    """The control plane did not answer in time, or not as itself; a lookup is then a miss."""

    code = "control_plane_away"


@dataclass
class ControlRefused(CaketinError):
    """The control plane refused a call.

    Attributes:
        refusal: the contract's code, such as `stale_incarnation`.
        status: HTTP status.
    """

    refusal: str = ""
    status: int = 0
    code = "control_refused"

    @property
    def passing(self) -> bool:
        """Whether the same call may be taken later: Redis is away, too many calls."""
        return self.status >= _SERVER_ERROR or self.status == _RATE_LIMITED


class ControlPlane(Protocol):
    """What the mover tells the control plane; every failure is a `CaketinError`."""

    def commit(
        self, namespace_id: str, page_hashes: PageHashes, stored: Mapping[str, control.StoredPool]
    ) -> control.CommitResult:
        """Claim what is stored and confirmed; idempotent."""

    def missing(
        self,
        namespace_id: str,
        page_hashes: PageHashes,
        generation: bytes | None,
        missing: Mapping[str, control.MissingPool],
    ) -> control.MissingResult:
        """Report what could not be read; a page's generation must still be the one given."""
