"""Access tokens: how they look, what the token file says of them, and which one a caller shows. Pure.

A token is 256 random bits behind `ct_`, and its SHA-256 is what the file keeps. A slow hash such as scrypt
would protect a password, which people choose and attackers guess; nobody guesses 256 random bits, and every
call would pay for the slowness. That a chosen password is no token is seen to by the form.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, get_args

from metadata.errors import FieldError, InvalidInput
from metadata.quota_rules import Quota

Scope = Literal["engine", "reader", "operator"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
ALL_TENANTS: Final = "*"
"""Tenant of an operator who sees the numbers of all tenants, and the data of none."""
MAX_TOKENS: Final = 1_000
"""Reading a file of so many takes 40 ms, in which the process answers nobody."""
SECRET_BYTES: Final = 32

TOKEN_FORM: Final = re.compile(r"ct_[A-Za-z0-9_-]{43}")
_BEARER: Final = re.compile(r"bearer +([^ ]+) *", re.IGNORECASE)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME_RULE: Final = "must be 1 to 64 of A-Z a-z 0-9 . _ -"
_MAX_COMMENT: Final = 200
_MAX_BOUND: Final = 2**53


@dataclass(frozen=True, slots=True)
class Token:
    """One entry of the token file.

    Attributes:
        token_id: its name in logs and for whoever rotates it; no secret.
        sha256: digest of the token, 32 bytes.
        tenant: whose data it opens, or `ALL_TENANTS`.
        scopes: what it allows.
        expires: from then on it allows nothing; None: never.
        comment: for people.
    """

    token_id: str
    sha256: bytes = field(repr=False)
    tenant: str
    scopes: frozenset[Scope]
    expires: datetime | None = None
    comment: str = ""

    def has_expired(self, now: datetime) -> bool:
        """Return whether it allows nothing any more."""
        return self.expires is not None and now >= self.expires


@dataclass(frozen=True)
class AccessFile:
    """What a token file says: who may call, and how much each tenant may claim."""

    tokens: tuple[Token, ...]
    quotas: Mapping[str, Quota] = field(default_factory=dict)


class TokenTable:
    """Finds the token that a caller shows, in a time that tells nothing of the tokens there are.

    A plain lookup by digest would compare digests byte by byte and stop early. Here the place in the table is
    a keyed hash of the digest, which nobody outside can steer, and the last word has a comparison of constant
    time, which is made for an unknown token too.
    """

    def __init__(self, tokens: Iterable[Token], key: bytes) -> None:
        """Make the table; `key` is 16 to 64 random bytes that never leave the process."""
        self._key = key
        self._places = {self._place(token.sha256): token for token in tokens}

    def __len__(self) -> int:
        return len(self._places)

    def find(self, shown: str) -> Token | None:
        """Return the token that `shown` is, or None; whether it has expired is for the caller to ask."""
        digest = token_digest(shown)
        token = self._places.get(self._place(digest))
        same = hmac.compare_digest(token.sha256 if token is not None else b"\0" * 32, digest)
        return token if same else None

    def _place(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._key, digest_size=32).digest()


def token_text(secret: bytes) -> str:
    """Return the token of 32 random bytes: `ct_` and 43 characters of URL-safe base64."""
    return "ct_" + base64.urlsafe_b64encode(secret).decode().rstrip("=")


def token_digest(token: str) -> bytes:
    """Return what the file keeps of a token."""
    return hashlib.sha256(token.encode()).digest()


def bearer(header: str) -> str | None:
    """Return the token of an `Authorization` header, or None where it holds nothing of a token's form."""
    match = _BEARER.fullmatch(header)
    return match[1] if match and TOKEN_FORM.fullmatch(match[1]) else None


def entry_text(token: Token) -> str:
    """Return the lines that stand for `token` in a token file.

    Raises:
        InvalidInput: the token breaks a rule of the file.
    """
    lines = ["[[token]]", f'id = "{token.token_id}"', f'sha256 = "{token.sha256.hex()}"']
    lines += [f'tenant = "{token.tenant}"', f"scopes = {json.dumps(sorted(token.scopes))}"]
    if token.expires is not None:
        lines.append(f"expires = {token.expires.isoformat(timespec='seconds')}")
    if token.comment:
        lines.append(f"comment = {json.dumps(token.comment, ensure_ascii=False)}")
    text = "\n".join(lines) + "\n"
    read_access_file(text)
    return text


def read_access_file(text: str) -> AccessFile:
    """Return what a token file says.

    Raises:
        InvalidInput: it is not TOML, or an entry breaks a rule; no error repeats what stands for a secret.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"the token file is not TOML: {error}") from None
    errors = [_unknown(name) for name in raw if name not in {"token", "tenants"}]
    tokens = _tokens(raw.get("token"), errors)
    quotas = _quotas(raw.get("tenants", {}), errors)
    if errors:
        raise InvalidInput("the token file cannot be used", errors)
    return AccessFile(tuple(tokens), quotas)


def _tokens(raw: Any, errors: list[FieldError]) -> Sequence[Token]:
    entries = raw if isinstance(raw, list) else []
    # A file that an editor has just emptied must not lock everybody out.
    if not 1 <= len(entries) <= MAX_TOKENS:
        errors.append(
            FieldError("token", "count", f"has {len(entries)} entries, must have 1 to {MAX_TOKENS}")
        )
        return []
    tokens = [_token(entry, f"token[{i}]", errors) for i, entry in enumerate(entries)]
    for name in ("token_id", "sha256"):
        seen: set[object] = set()
        for i, token in enumerate(tokens):
            value = getattr(token, name)
            if value in seen:
                key = name.removeprefix("token_")
                errors.append(FieldError(f"token[{i}].{key}", "twice", "is the same as in an earlier entry"))
            seen.add(value)
    return tokens


def _token(raw: Any, where: str, errors: list[FieldError]) -> Token:
    entry = _Entry(raw if isinstance(raw, dict) else {}, where, errors)
    scopes = entry.take("scopes", _are_scopes, f"must be a list out of {', '.join(SCOPES)}") or ()
    tenant = entry.take("tenant", _is_tenant, f'{_NAME_RULE}, or "{ALL_TENANTS}"')
    if tenant == ALL_TENANTS and set(scopes) != {"operator"}:
        detail = f'must be ["operator"] for tenant "{ALL_TENANTS}": nobody else is shown all tenants'
        errors.append(FieldError(f"{where}.scopes", "all_tenants", detail))
    token = Token(
        token_id=entry.take("id", _is_name, _NAME_RULE) or where,
        sha256=bytes.fromhex(
            entry.take("sha256", _is_sha256, "must be 64 lower-case hex digits: the token's SHA-256")
            # A value of its own for each faulty entry, so that no two count as the same.
            or token_digest(where).hex()
        ),
        tenant=tenant or "",
        scopes=frozenset(scopes),
        expires=entry.take(
            "expires", _is_moment, "must be a date and time with offset, such as 2027-01-31T12:00:00Z", None
        ),
        comment=entry.take(
            "comment", _is_comment, f"must be at most {_MAX_COMMENT} printable characters", ""
        ),
    )
    entry.refuse_the_rest()
    return token


def _quotas(raw: Any, errors: list[FieldError]) -> dict[str, Quota]:
    if not isinstance(raw, dict):
        errors.append(FieldError("tenants", "wrong_type", "must be tables such as [tenants.NAME]"))
        return {}
    quotas: dict[str, Quota] = {}
    for name, bounds in raw.items():
        where = f"tenants.{name[:64]}"
        if not _is_name(name):
            errors.append(FieldError(where, "bad_name", _NAME_RULE))
        entry = _Entry(bounds if isinstance(bounds, dict) else {}, where, errors)
        rule = f"must be an integer, 0 to {_MAX_BOUND}"
        quotas[name] = Quota(
            entry.take("max_pages", _is_bound, rule, None), entry.take("max_bytes", _is_bound, rule, None)
        )
        entry.refuse_the_rest()
    return quotas


_NEEDED: Final = object()


@dataclass
class _Entry:
    """Takes values out of a table of the file and notes what is wrong with them."""

    raw: dict[str, Any]
    where: str
    errors: list[FieldError]
    _taken: set[str] = field(default_factory=set)

    def take(self, name: str, fits: Callable[[Any], bool], rule: str, default: Any = _NEEDED) -> Any:
        """Return a value that fits its rule, else `default`, or None where the value is needed."""
        self._taken.add(name)
        value = self.raw.get(name, default)
        if value is default and default is not _NEEDED:
            return default
        if value is _NEEDED or not fits(value):
            # The value is not repeated: it may be the token itself, in the wrong place.
            code, detail = ("missing", "is missing") if value is _NEEDED else ("invalid", rule)
            self.errors.append(FieldError(f"{self.where}.{name}", code, detail))
            return None
        return value

    def refuse_the_rest(self) -> None:
        """Note every name that nobody took."""
        self.errors += [_unknown(f"{self.where}.{name[:64]}") for name in self.raw if name not in self._taken]


def _unknown(where: str) -> FieldError:
    # Names are bare words of the file; one that could be a token is not repeated.
    shown = where if not TOKEN_FORM.search(where) else "an entry"
    return FieldError(shown, "unknown", "is not known here")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _is_tenant(value: Any) -> bool:
    return value == ALL_TENANTS or _is_name(value)


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _are_scopes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(scope in SCOPES for scope in value)


def _is_moment(value: Any) -> bool:
    return isinstance(value, datetime) and value.tzinfo is not None


def _is_comment(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_COMMENT and value.isprintable()


def _is_bound(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_BOUND
