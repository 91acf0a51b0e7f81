"""What an operator tells the SGLang backend, and who the engine is where they do not."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from dataplane.control_client import ControlSettings, ModelIdentity, RankIdentity
from dataplane.rdma_settings import RdmaSettings
from dataplane.store_access import AS_TOLD, StoreOverrides
from metadata.errors import FieldError, InvalidInput
from metadata.namespace import HashKind

log = logging.getLogger(__name__)

UNVERSIONED: Final = "unversioned"
_SGLANG_KEYS: Final = frozenset(
    {"backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "allocator"}
)
_NO_MODEL: Final = frozenset({"", "none", "dummy"})
_WEIGHT_INDEXES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_MOST: Final = 1 << 20
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pth", "*.gguf")


@dataclass(frozen=True)
class BackendSettings:
    """The backend's part of `--hicache-storage-backend-extra-config`.

    Attributes:
        control_url: of the control plane; the only one that is needed.
        token: access token; a value `@file` is read from the file.
        engine_id: name of the engine, one for all its ranks; None: `CAKETIN_ENGINE_ID`, else the host name.
        model: name of the model; None: the served model's name, else its path.
        revision: revision of the weights; None: see `revision_of`.
        namespace_salt: separates engines that otherwise mean the same pages.
        call_seconds: deadline of a lookup, commit or report.
        attach_seconds: deadline of a registration, and how long an engine's start waits for it.
        sliding_window_tokens: of the model, for lookups by others; None: as SGLang's configuration says.
        store: how this host reaches the store.
    """

    control_url: str
    token: str | None = field(default=None, repr=False)
    engine_id: str | None = None
    model: str | None = None
    revision: str | None = None
    namespace_salt: str | None = field(default=None, repr=False)
    call_seconds: float = 0.2
    attach_seconds: float = 5.0
    sliding_window_tokens: int | None = None
    store: StoreOverrides = AS_TOLD

    @classmethod
    def of(cls, extra_config: Mapping[str, Any] | None) -> BackendSettings:
        """Read the settings; what is null is as if it were not there.

        SGLang's own `extra_backend_tag` keeps engines apart as it does with other backends: it is a salt.

        Raises:
            InvalidInput: `control_url` is missing, a name is unknown, a value has the wrong type, or the file
                of the token cannot be read.
        """
        given = {k: v for k, v in (extra_config or {}).items() if k not in _SGLANG_KEYS}
        tag = given.pop("extra_backend_tag", None)
        if tag is not None:
            given.setdefault("namespace_salt", tag)
        errors = _errors(given, _TYPES, "")
        if not given.get("control_url"):
            errors.insert(0, FieldError("control_url", "missing", "is needed: http://host:port"))
        store = given.pop("store", None) or {}
        if isinstance(store, Mapping):
            errors += _errors(store, _STORE_TYPES, "store.") or _rdma_errors(store)
        if errors:
            raise InvalidInput("the storage backend's extra config cannot be used", errors)
        given, store = ({k: v for k, v in told.items() if v is not None} for told in (given, store))
        if given.get("token", "").startswith("@"):
            given["token"] = _token_of(Path(given["token"][1:]))
        return cls(**given, store=StoreOverrides(**store))

    def model_of(self, engine: EngineFacts) -> str:
        """Return the name of the namespace's model.

        Raises:
            InvalidInput: nobody says it.
        """
        model = self.model or engine.model
        if not model:
            detail = "is not known: give extra_config a 'model'"
            raise InvalidInput("the namespace needs a model", [FieldError("model", "missing", detail)])
        return model

    @property
    def control(self) -> ControlSettings:
        """How to reach the control plane."""
        return ControlSettings(self.control_url, self.call_seconds, self.attach_seconds, self.token)

    def me(self, rank: str) -> RankIdentity:
        """Return who calls, with an incarnation of its own."""
        name = self.engine_id or os.environ.get("CAKETIN_ENGINE_ID") or socket.gethostname()
        clean = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:128]
        return RankIdentity(clean, rank, secrets.token_hex(16))

    def identity(self, engine: EngineFacts, page_size: int) -> ModelIdentity:
        """Return what the engine's page hashes mean."""
        revision = self.revision or revision_of(engine)
        return ModelIdentity(
            self.model_of(engine), revision, page_size, engine.hash_kind, self.namespace_salt
        )


_NUMBER: Final = (int, float)
_RDMA_NUMBERS: Final = ("gid_index", "traffic_class", "service_level", "mtu", "max_region_bytes")
_STORE_TYPES: Final[dict[str, Any]] = {
    **dict.fromkeys(("path", "master", "metadata", "protocol", "devices", "local_hostname"), str),
    **dict.fromkeys(("bounce_mib", "bounce_lanes", *_RDMA_NUMBERS), int),
    **dict.fromkeys(("lease_seconds", "call_seconds"), _NUMBER),
}
_TYPES: Final[dict[str, Any]] = {
    "control_url": str,
    "token": str,
    "engine_id": str,
    "model": str,
    "revision": str,
    "namespace_salt": str,
    "call_seconds": _NUMBER,
    "attach_seconds": _NUMBER,
    "sliding_window_tokens": int,
    "store": Mapping,
}


@dataclass(frozen=True)
class EngineFacts:
    """What SGLang's configuration tells of the engine.

    Attributes:
        model: name that it serves the model under, or its path.
        model_path: where its weights are.
        revision: that the server was started with.
        hash_kind: `bigram` where the tree caches pairs of tokens.
        logical_dtype: of the cache, where it was chosen.
        sliding_window_tokens: of the model.
    """

    model: str | None = None
    model_path: str | None = None
    revision: str | None = None
    hash_kind: HashKind = "plain"
    logical_dtype: str | None = None
    sliding_window_tokens: int | None = None

    def named(self, model: str | None) -> EngineFacts:
        """Return the facts with SGLang's name of the model, where it has one."""
        return replace(self, model=model) if model else self


def revision_of(engine: EngineFacts) -> str:
    """Return what tells these weights from others under the same name.

    The server's `--revision`; else a fingerprint of a local model's config and weight index (or the names and
    sizes of its weight files); else `unversioned`, with a warning: after an update of the weights under the
    same name, pages of the old ones would be served.
    """
    if engine.revision:
        return engine.revision
    folder = Path(engine.model_path or "")
    if engine.model_path and (folder / "config.json").is_file():
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        index = next((folder / n for n in _WEIGHT_INDEXES if (folder / n).is_file()), None)
        if index is not None:
            digest.update(index.read_bytes())
        for path in sorted(p for pattern in _WEIGHTS for p in folder.glob(pattern)):
            digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
        return f"local-{digest.hexdigest()[:16]}"
    log.warning(
        "the revision of %r is not known: pages are kept under %r. Give --revision, or 'revision' in the "
        "extra config, and change it with the weights",
        engine.model,
        UNVERSIONED,
    )
    return UNVERSIONED


def _token_of(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError) as error:
        # What is in the file stays out of the text.
        detail = (
            f"{str(file)!r} cannot be read: {error.strerror if isinstance(error, OSError) else 'no text'}"
        )
        raise InvalidInput(
            "the access token cannot be used", [FieldError("token", "unreadable", detail)]
        ) from None


def _errors(given: Mapping[str, Any], types: Mapping[str, Any], prefix: str) -> list[FieldError]:
    errors = []
    for name, value in given.items():
        if name not in types:
            detail = f"is not known; known are {', '.join(sorted(types))}"
            errors.append(FieldError(f"{prefix}{name}", "unknown", detail))
        elif value is not None and (isinstance(value, bool) or not isinstance(value, types[name])):
            errors.append(FieldError(f"{prefix}{name}", "bad_type", f"is {type(value).__name__}"))
        elif name in _RDMA_NUMBERS:
            continue
        elif types[name] is not str and isinstance(value, int | float) and not 0 < value <= _MOST:
            errors.append(FieldError(f"{prefix}{name}", "out_of_range", f"must be above 0, at most {_MOST}"))
    return errors


def _rdma_errors(store: Mapping[str, Any]) -> list[FieldError]:
    """Return what is wrong with the RDMA settings, by the rules of those who use them."""
    if store.get("protocol") not in {None, "tcp", "rdma"}:
        return [FieldError("store.protocol", "unknown", f"is {store['protocol']!r}, use tcp or rdma")]
    try:
        RdmaSettings(**{name: store.get(name) for name in _RDMA_NUMBERS}, devices=store.get("devices") or "")
    except InvalidInput as error:
        return [e.under("store") for e in error.errors]
    return []


def local_model(path: str | None) -> str | None:
    """Return a model path that names a model, None for SGLang's placeholders."""
    return None if path is None or path.lower() in _NO_MODEL else path
