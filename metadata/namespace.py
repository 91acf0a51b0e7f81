"""What a page hash means: the identity that all engines of one namespace share, and its digest.

A page hash covers token ids only. Two engines may read each other's pages under a hash only when tenant,
model, weights revision, page size, hash kind and namespace salt agree; the digest of those six is in every
object key.

Pure: values in, values out.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, get_args

from metadata.errors import FieldError, InvalidInput

HashKind = Literal["plain", "bigram"]
HASH_KINDS: Final[tuple[str, ...]] = get_args(HashKind)
MAX_PAGE_SIZE: Final = 65_536
MAX_TEXT: Final = 512

_FINGERPRINT: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Namespace:
    """Identity of a namespace.

    Attributes:
        tenant: the trust domain; taken from the access token, never from a request body.
        model: name or path of the model, as the operator calls it.
        revision: revision of the weights.
        page_size: tokens in a page.
        hash_kind: `plain`, or `bigram` for engines that cache token pairs (EAGLE, MTP).
        salt_fingerprint: `fingerprint(salt)`, or None. The salt itself is a secret and is kept nowhere.
    """

    tenant: str
    model: str
    revision: str
    page_size: int
    hash_kind: str = "plain"
    salt_fingerprint: str | None = None

    def __post_init__(self) -> None:
        errors = _errors(self)
        if errors:
            raise InvalidInput("the namespace cannot be used", errors)

    @property
    def namespace_id(self) -> str:
        """Sixteen hex digits: the first 64 bits of SHA-256 over the canonical JSON of the identity."""
        return _namespace_id(self)

    def to_json(self) -> dict[str, Any]:
        """Return the identity as plain JSON values; holds no secret."""
        return {
            "tenant": self.tenant,
            "model": self.model,
            "revision": self.revision,
            "page_size": self.page_size,
            "hash_kind": self.hash_kind,
            "salt_fingerprint": self.salt_fingerprint,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Namespace:
        """Return the namespace that `to_json` wrote.

        Raises:
            InvalidInput: where the values break a rule.
        """
        return cls(**{name: value.get(name) for name in cls.__slots__})  # type: ignore[arg-type]


def fingerprint(salt: str | None) -> str | None:
    """Return a one-way name of a salt: 128 bits of SHA-256 in hex; None and the empty salt give None.

    Raises:
        InvalidInput: for text that has no UTF-8 form.
    """
    if not salt:
        return None
    try:
        encoded = salt.encode()
    except UnicodeEncodeError:
        # JSON can carry a lone surrogate. The text of the error must not repeat the salt.
        error = FieldError("namespace_salt", "bad_text", "has no UTF-8 form (a lone surrogate)")
        raise InvalidInput("the namespace cannot be used", [error]) from None
    return hashlib.sha256(b"caketin-namespace-salt-v1\n" + encoded).hexdigest()[:32]


@lru_cache(maxsize=1024)  # asked for several times by every call
def _namespace_id(ns: Namespace) -> str:
    text = json.dumps(ns.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(b"caketin-namespace-v1\n" + text.encode()).hexdigest()[:16]


def _errors(ns: Namespace) -> list[FieldError]:
    errors: list[FieldError] = []
    for name in ("tenant", "model", "revision"):
        value: object = getattr(ns, name)
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_TEXT or not value.isprintable():
            errors.append(FieldError(name, "bad_text", f"must be 1 to {MAX_TEXT} printable characters"))
    # `True` and `1.0` equal 1 but are written differently in JSON: equal namespaces would get two ids.
    if type(ns.page_size) is not int or not 1 <= ns.page_size <= MAX_PAGE_SIZE:
        detail = f"is {ns.page_size!r}, must be an integer, 1 to {MAX_PAGE_SIZE} tokens"
        errors.append(FieldError("page_size", "out_of_range", detail))
    if ns.hash_kind not in HASH_KINDS:
        errors.append(
            FieldError("hash_kind", "unknown", f"is {ns.hash_kind!r}, use one of {', '.join(HASH_KINDS)}")
        )
    if ns.salt_fingerprint is not None and not _is_fingerprint(ns.salt_fingerprint):
        # Not repeated in the text: whoever gets here may have passed the salt itself.
        detail = "must be 32 lower-case hex digits, as fingerprint(salt) gives them"
        errors.append(FieldError("salt_fingerprint", "bad_fingerprint", detail))
    return errors


def _is_fingerprint(value: object) -> bool:
    return isinstance(value, str) and _FINGERPRINT.fullmatch(value) is not None
