"""Where Redis is, read from one URL: a server, a cluster's seeds, or Sentinels and a service.

redis://[user:password@]host:port/db            rediss:// the same over TLS;  unix:///path?db=0
redis+cluster://[user:password@]h1:p1,h2:p2     rediss+cluster://
redis+sentinel://[user:password@]h1:p1,h2:p2/service[/db][?sentinel_username=&sentinel_password=]
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from metadata.errors import FieldError, InvalidInput

Topology = Literal["single", "cluster", "sentinel"]

_SCHEMES: Final[dict[str, tuple[Topology, bool]]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "unix": ("single", False),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
}
_DEFAULT_PORT: Final = {"single": 6379, "cluster": 6379, "sentinel": 26379}
_HOST: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?\Z"
)
_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_MAX_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed URL; its text form shows no password.

    Attributes:
        topology: what is at `hosts`.
        hosts: (host, port): the server, some of the cluster's nodes, or the Sentinels.
        tls: whether connections to Redis and to the Sentinels are encrypted.
        db: database number; always 0 on a cluster.
        service: name that the Sentinels know the primary by.
        path: Unix socket of a single server, in place of a host.
        tls_files: what the driver takes for TLS, such as `ssl_ca_certs`.
    """

    topology: Topology
    hosts: tuple[tuple[str, int], ...]
    tls: bool = False
    db: int = 0
    service: str = ""
    path: str = ""
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    tls_files: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        kind = "" if self.topology == "single" else f"+{self.topology}"
        hosts = ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.hosts)
        tail = f"/{self.service}" if self.service else ""
        return f"redis{'s' if self.tls else ''}{kind}://{hosts}{tail}" + (f"/{self.db}" if self.db else "")


def parse_redis_url(url: str) -> RedisAddress:
    """Return what a URL names.

    Raises:
        InvalidInput: it cannot be read; the text shows no part that may hold a password.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _bad(f"cannot be read ({type(error).__name__}): write an IPv6 address as [::1]:6379") from None
    if parts.scheme not in _SCHEMES:
        raise _bad(f"has scheme {parts.scheme!r}, use one of {', '.join(s + '://' for s in _SCHEMES)}")
    topology, tls = _SCHEMES[parts.scheme]
    credentials, _, host_list = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    path = [unquote(p) for p in parts.path.strip("/").split("/") if p]
    tls_files = tuple((k, query.pop(k)) for k in _TLS_FILES if k in query)
    username = query.pop("username", None) or unquote(user) or None
    secret = query.pop("password", None) or unquote(password) or None
    db_text = query.pop("db", None)
    sentinel = (query.pop("sentinel_username", None), query.pop("sentinel_password", None))
    if query:
        raise _bad(f"has unknown parameters: {', '.join(sorted(query))}")
    if parts.scheme == "unix":
        return RedisAddress(
            "single", (), path=unquote(parts.path), db=_db(db_text), username=username, password=secret
        )
    service, db = _path(topology, path, db_text)
    return RedisAddress(
        topology,
        _hosts(host_list, topology),
        tls=tls,
        db=db,
        service=service,
        username=username,
        password=secret,
        sentinel_username=sentinel[0],
        sentinel_password=sentinel[1],
        tls_files=tls_files,
    )


def _hosts(text: str, topology: Topology) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    for item in text.split(","):
        match = _HOST.fullmatch(item)
        port = int((match and match["port"]) or _DEFAULT_PORT[topology])
        if match is None or not 0 < port <= _MAX_PORT:
            raise _bad("has a host that is not host:port; separate several by commas")
        found.append((match["v6"] or match["name"], port))
    if topology == "single" and len(found) > 1:
        raise _bad("names several hosts: use redis+cluster:// or redis+sentinel://")
    return tuple(found)


def _path(topology: Topology, path: list[str], db_text: str | None) -> tuple[str, int]:
    service = ""
    if topology == "sentinel":
        if not path:
            raise _bad("names no service: redis+sentinel://host:26379/SERVICE")
        service, path = path[0], path[1:]
    if len(path) > 1:
        raise _bad("has a path that is longer than a database number")
    db = _db(path[0] if path else db_text)
    if topology == "cluster" and db:
        raise _bad("has a database number; a cluster has database 0 only")
    return service, db


def _db(text: str | None) -> int:
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit()):
        raise _bad("has a database that is not a number")
    return int(text)


def _bad(detail: str) -> InvalidInput:
    return InvalidInput("the Redis URL cannot be used", [FieldError("redis_url", "invalid", detail)])
