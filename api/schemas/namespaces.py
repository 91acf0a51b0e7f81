"""Namespaces and the jobs that purge them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from api.schemas.pools import HitPolicyBody, PartBody
from api.schemas.wire import Body, Count, Integer, PoolId, Secret, Text
from metadata.errors import InvalidInput
from metadata.namespace import MAX_TEXT, Namespace, fingerprint


class NamespaceBody(Body):
    """What an engine's page hashes mean. The tenant is not here: it comes from the token."""

    model: Text
    revision: Text
    page_size: Integer
    hash_kind: Text = "plain"
    namespace_salt: Secret | None = Field(None, max_length=MAX_TEXT)

    def to_namespace(self, tenant: str) -> Namespace:
        """Return the identity that this body means for `tenant`.

        Raises:
            InvalidInput: where a rule of namespaces is broken; the fields start at `namespace`.
        """
        salt = self.namespace_salt.get_secret_value() if self.namespace_salt else None
        try:
            return Namespace(
                tenant, self.model, self.revision, self.page_size, self.hash_kind, fingerprint(salt)
            )
        except InvalidInput as error:
            raise InvalidInput(error.detail, [e.under("namespace") for e in error.errors]) from None


class NamespaceSummary(Body):
    """A namespace in a list."""

    namespace_id: str
    tenant: str
    model: str
    revision: str
    page_size: Count
    hash_kind: str
    salt_fingerprint: str | None
    engines: Count


class NamespaceList(Body):
    """`GET /v1/namespaces`."""

    namespaces: list[NamespaceSummary]
    next_cursor: str | None


class PoolVariantView(Body):
    """One pool variant of a namespace."""

    name: str
    pool_id: PoolId
    bit: Count | None
    logical: bool
    parts: list[PartBody]
    object_layout: str
    hit_policy: HitPolicyBody
    indices_from: str | None
    shards_registered: Count
    shards_expected: Count
    engines: Count
    pages: Count
    bytes: Count


class NamespaceView(NamespaceSummary):
    """`GET /v1/namespaces/{ns}`."""

    pools: list[PoolVariantView]
    pages: Count
    bytes: Count


class PurgeResult(Body):
    """Answer (202) to `DELETE /v1/namespaces/{ns}`."""

    job_id: str


class Job(Body):
    """`GET /v1/jobs/{job_id}`."""

    state: Literal["queued", "running", "done", "failed"]
    done: Count
    total: Count
    error: str | None
