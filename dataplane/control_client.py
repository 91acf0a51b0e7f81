"""REST client of the control plane, for engines and movers.

Big calls travel as msgpack over kept connections. Every call has one deadline over all of it, retry included.
All calls are safe to repeat, and are, once, when the connection failed before an answer came.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

import tenacity

from dataplane.control_plane import ControlPlaneAway, ControlRefused
from dataplane.deadline_http import Answer, Deadline, DeadlineHttp, NoAnswer
from dataplane.messages import control, observe
from dataplane.messages.wire import MEDIA_TYPES, Format, Message, decode, encode
from metadata.codec import ENGINE_ID, RANK, PageHashes
from metadata.errors import CaketinError, FieldError, InvalidInput
from metadata.namespace import HashKind
from metadata.pools import RankPool

__all__ = [
    "ControlClient",
    "ControlPlaneAway",
    "ControlRefused",
    "ControlSettings",
    "ModelIdentity",
    "RankIdentity",
]

_OK: Final = range(200, 300)
_REFUSED: Final = range(400, 600)
_ATTEMPTS: Final = tenacity.Retrying(
    stop=tenacity.stop_after_attempt(2),
    wait=tenacity.wait_random(0, 0.02),
    retry=tenacity.retry_if_exception(lambda e: isinstance(e, NoAnswer) and e.before_answer),
    reraise=True,
)
"""Safe to use from several threads; made once, since making it takes as long as sending a request."""

_IDENTITY: Final = {"engine_id": ENGINE_ID, "rank": RANK, "incarnation": r"[A-Za-z0-9._-]{1,64}"}
"""What ends up in a path must not change it."""

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{1,512}")

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class ControlSettings:
    """How to reach the control plane.

    Attributes:
        url: such as `http://127.0.0.1:7411`.
        call_seconds: deadline of connecting plus reading, for lookup, commit, missing and heartbeat.
        attach_seconds: deadline of a registration.
        token: shown with every call, or None: a control plane without a token file asks for none.
    """

    url: str
    call_seconds: float = 0.2
    attach_seconds: float = 5.0
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # It goes into a header, which it must not end; the text does not repeat it.
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            fault = FieldError("token", "bad_format", f"must match {_TOKEN.pattern}")
            raise InvalidInput("the access token cannot be used", [fault])


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

    def __post_init__(self) -> None:
        errors = []
        for name, form in _IDENTITY.items():
            value: str = getattr(self, name)
            if not re.fullmatch(form, value):
                errors.append(FieldError(name, "bad_format", f"is {value!r}, must match {form}"))
        if errors:
            raise InvalidInput("the rank cannot be named so", errors)

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
        self._http = DeadlineHttp(settings.url)

    def close(self) -> None:
        """Close all connections; again: nothing happens. Later calls fail as `ControlPlaneAway`."""
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
        path = f"{self.me.path}?incarnation={self.me.incarnation}"
        answer = self._send("DELETE", path, None, "json", None)
        if answer.status not in _OK:
            raise _refusal(path, answer)

    def lookup(
        self,
        namespace_id: str,
        page_hashes: PageHashes,
        *,
        first_page: int = 0,
        prefix_hashes: PageHashes | None = None,
        pools: Mapping[str, control.PoolQuery] | None = None,
        min_pages: int = 1,
        request_id: str | None = None,
        purpose: Literal["prefetch", "route", "probe"] = "prefetch",
    ) -> control.LookupResult:
        """Ask which prefixes of these pages are restorable; counts as one lookup, however often it is sent.

        Args:
            namespace_id: as the registration gave it.
            page_hashes: pages of the call, in order.
            first_page: pages of the sequence before them.
            prefix_hashes: hashes of the pages right before `first_page`, for windows that reach there.
            pools: the sidecars that gate, and windows other than the registered; None: all of this engine.
            min_pages: shorter prefixes are not worth a transfer.
            request_id: names the request where the caller may ask twice for it; None takes a fresh one.
            purpose: only `prefetch` counts as a lookup; the others' answers are advisory.
        """
        body = control.LookupRequest(
            page_hashes=page_hashes,
            first_page=first_page,
            prefix_hashes=prefix_hashes or PageHashes(),
            engine_id=self.me.engine_id,
            rank=self.me.rank,
            pools=None if pools is None else dict(pools),
            min_pages=min_pages,
            purpose=purpose,
            # A lookup that is sent again after a broken connection must not count twice (C1).
            request_id=request_id or secrets.token_hex(8),
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

    def purge(self, namespace_id: str) -> str:
        """Have all claims and objects of a namespace removed; return the id of the job that does it."""
        path = f"/v1/namespaces/{namespace_id}"
        seconds = self._settings.attach_seconds
        return self._call("DELETE", path, None, observe.PurgeResult, form="json", seconds=seconds).job_id

    def job(self, job_id: str) -> observe.Job:
        """Return how far a purge is."""
        return self._call("GET", f"/v1/jobs/{job_id}", None, observe.Job, form="json")

    def _call(
        self,
        method: str,
        path: str,
        body: Message | None,
        answer_type: type[M],
        *,
        form: Format = "msgpack",
        seconds: float | None = None,
    ) -> M:
        content = None if body is None else encode(body, form)
        answer = self._send(method, path, content, form, seconds)
        if answer.status not in _OK:
            raise _refusal(path, answer)
        try:
            return decode(answer.content, form, answer_type)
        except InvalidInput as error:
            raise ControlPlaneAway(f"{path} was answered in another form: {error}") from error

    def _send(
        self, method: str, path: str, content: bytes | None, form: Format, seconds: float | None
    ) -> Answer:
        headers = {"content-type": MEDIA_TYPES[form], "accept": MEDIA_TYPES[form]}
        if self._settings.token is not None:
            headers["authorization"] = f"Bearer {self._settings.token}"
        allowed = self._settings.call_seconds if seconds is None else seconds
        deadline = Deadline(allowed)
        try:
            return _ATTEMPTS(self._http.exchange, method, path, content, headers, deadline)
        except NoAnswer as error:
            what = f"{method} {path} at {self._settings.url} failed within {allowed} s"
            raise ControlPlaneAway(f"{what}: {error}") from error


def _refusal(path: str, answer: Answer) -> CaketinError:
    if answer.status in _REFUSED:
        try:
            problem = decode(answer.content, "json", control.Problem)
        except InvalidInput:
            pass
        else:
            errors = [FieldError(e.field, e.code, e.detail) for e in problem.errors]
            return ControlRefused(problem.detail, errors, refusal=problem.code, status=answer.status)
    return ControlPlaneAway(f"{path} was answered with {answer.status} and no problem document")
