"""REST client of the control plane, for engines and movers.

Big calls travel as msgpack over kept connections. Every call has a deadline. All calls are safe to repeat,
and are, once, with jitter, when the connection failed before an answer came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import httpx
import tenacity

from dataplane.messages import control
from dataplane.messages.wire import MEDIA_TYPES, Format, Message, decode, encode
from metadata.codec import PageHashes
from metadata.errors import CaketinError, FieldError, InvalidInput
from metadata.namespace import HashKind
from metadata.pools import RankPool

_FIRST_ERROR: Final = 400
_ATTEMPTS: Final = 2

M = TypeVar("M", bound=Message)


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


@dataclass(frozen=True)
class ControlSettings:
    """How to reach the control plane.

    Attributes:
        url: such as `http://127.0.0.1:7411`.
        call_seconds: deadline of connecting plus reading, for lookup, commit, missing and heartbeat.
        attach_seconds: deadline of a registration.
    """

    url: str
    call_seconds: float = 0.2
    attach_seconds: float = 5.0


@dataclass(frozen=True)
class RankIdentity:
    """Who calls.

    Attributes:
        engine_id: 1-128 of `[A-Za-z0-9._-]`.
        rank: such as `dp0-pp0-cp0-tp3`.
        incarnation: random id of this process life.
    """

    engine_id: str
    rank: str
    incarnation: str

    @property
    def path(self) -> str:
        """Path of the rank below the base URL."""
        return f"/v1/engines/{self.engine_id}/ranks/{self.rank}"


@dataclass(frozen=True)
class ModelIdentity:
    """What the rank's page hashes mean; the tenant is the token's."""

    model: str
    revision: str
    page_size: int
    hash_kind: HashKind = "plain"
    namespace_salt: str | None = None


class ControlClient:
    """Calls of one rank; safe to use from several threads.

    Errors of every call: `ControlPlaneAway` where no answer came in time, `ControlRefused` with the
    contract's code where the answer is a problem.
    """

    def __init__(self, settings: ControlSettings, me: RankIdentity) -> None:
        self.me = me
        self._settings = settings
        self._http = httpx.Client(base_url=settings.url, timeout=settings.call_seconds, trust_env=False)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def register(
        self, model: ModelIdentity, pools: Sequence[RankPool], labels: Mapping[str, str] | None = None
    ) -> control.RegisterResult:
        """Register this rank, or renew it."""
        body = control.RegisterRequest(
            incarnation=self.me.incarnation,
            namespace=control.NamespaceMessage(
                model=model.model,
                revision=model.revision,
                page_size=model.page_size,
                hash_kind=model.hash_kind,
                namespace_salt=model.namespace_salt,
            ),
            pools=[control.PoolMessage.of(p) for p in pools],
            labels=dict(labels or {}),
        )
        return self._call(
            "PUT",
            self.me.path,
            body,
            control.RegisterResult,
            form="json",
            seconds=self._settings.attach_seconds,
        )

    def heartbeat(self, epoch: int) -> control.HeartbeatResult:
        """Renew this rank's lease."""
        body = control.HeartbeatRequest(incarnation=self.me.incarnation, epoch=epoch)
        return self._call("POST", f"{self.me.path}/heartbeat", body, control.HeartbeatResult, form="json")

    def leave(self) -> None:
        """Remove this rank; twice is fine."""
        answer = self._send("DELETE", f"{self.me.path}?incarnation={self.me.incarnation}", None, "json", None)
        if answer.status_code >= _FIRST_ERROR:
            raise _refusal(answer)

    def lookup(
        self,
        namespace_id: str,
        page_hashes: PageHashes,
        *,
        first_page: int = 0,
        prefix_hashes: PageHashes | None = None,
        request_id: str | None = None,
    ) -> control.LookupResult:
        """Ask which prefixes of these pages are restorable, by this engine's pools; counts as a lookup."""
        body = control.LookupRequest(
            page_hashes=page_hashes,
            first_page=first_page,
            prefix_hashes=prefix_hashes or PageHashes(),
            engine_id=self.me.engine_id,
            rank=self.me.rank,
            request_id=request_id,
        )
        path = f"/v1/namespaces/{namespace_id}/lookup"
        return self._call("POST", path, body, control.LookupResult)

    def commit(
        self, namespace_id: str, page_hashes: PageHashes, stored: Mapping[str, control.StoredPool]
    ) -> control.CommitResult:
        """Claim what is stored and confirmed; idempotent."""
        body = control.CommitRequest(
            engine_id=self.me.engine_id, rank=self.me.rank, page_hashes=page_hashes, stored=dict(stored)
        )
        return self._call("POST", f"/v1/namespaces/{namespace_id}/commit", body, control.CommitResult)

    def missing(
        self,
        namespace_id: str,
        page_hashes: PageHashes,
        generation: bytes | None,
        missing: Mapping[str, control.MissingPool],
    ) -> control.MissingResult:
        """Report what could not be read; idempotent by its generation."""
        body = control.MissingRequest(
            engine_id=self.me.engine_id,
            rank=self.me.rank,
            page_hashes=page_hashes,
            generation=generation,
            missing=dict(missing),
        )
        return self._call("POST", f"/v1/namespaces/{namespace_id}/missing", body, control.MissingResult)

    def _call(
        self,
        method: str,
        path: str,
        body: Message,
        answer_type: type[M],
        *,
        form: Format = "msgpack",
        seconds: float | None = None,
    ) -> M:
        answer = self._send(method, path, encode(body, form), form, seconds)
        if answer.status_code >= _FIRST_ERROR:
            raise _refusal(answer)
        try:
            return decode(answer.content, form, answer_type)
        except InvalidInput as error:
            raise ControlPlaneAway(f"{path} was answered in another form: {error}") from error

    def _send(
        self, method: str, path: str, content: bytes | None, form: Format, seconds: float | None
    ) -> httpx.Response:
        headers = {"content-type": MEDIA_TYPES[form], "accept": MEDIA_TYPES[form]}
        attempts = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(_ATTEMPTS),
            wait=tenacity.wait_random(0, 0.02),
            retry=tenacity.retry_if_exception_type((httpx.ConnectError, httpx.RemoteProtocolError)),
            reraise=True,
        )
        timeout = seconds if seconds is not None else self._settings.call_seconds
        try:
            return attempts(
                self._http.request, method, path, content=content, headers=headers, timeout=timeout
            )
        except httpx.HTTPError as error:
            what = f"{method} {path} at {self._settings.url}"
            raise ControlPlaneAway(
                f"{what} failed within {timeout} s: {type(error).__name__}: {error}"
            ) from error


def _refusal(answer: httpx.Response) -> CaketinError:
    try:
        problem = decode(answer.content, "json", control.Problem)
    except InvalidInput:
        return ControlPlaneAway(f"{answer.url} answered {answer.status_code} without a problem document")
    errors = [FieldError(e.field, e.code, e.detail) for e in problem.errors]
    return ControlRefused(problem.detail, errors, refusal=problem.code, status=problem.status)
