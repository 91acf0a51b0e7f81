"""The token file on disk: watched, re-read whole, and never half believed.

A new file takes effect within a second, without a restart. A new file that cannot be used changes nothing:
the tokens of the last good one stay, and the log and `/readyz` say so.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

from api.logs import get_logger
from api.tokens import TokenTable, read_access_file
from metadata.errors import FieldError, InvalidInput
from metadata.quota_rules import Quota

CHECK_SECONDS: Final = 1.0
MAX_FILE_BYTES: Final = 1 << 20
_SETTLED_SECONDS: Final = 2.0
"""A file written so recently may be written again without a new time stamp: it is read again."""

_Stamp: TypeAlias = tuple[int, ...]

log = get_logger(__name__)


class TokenFile:
    """The tokens and quotas of a file, as they were at most a second ago."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            InvalidInput: it cannot be used; the text says why, and what to do.
        """
        self.problem: str | None = None
        self._path = path
        self._key = secrets.token_bytes(32)
        self._stamp, text = _read(path)
        self._take(text)
        self._text = text
        self._next_look = time.monotonic() + CHECK_SECONDS

    @property
    def table(self) -> TokenTable:
        """The tokens in force."""
        self._look()
        return self._table

    @property
    def quotas(self) -> Mapping[str, Quota]:
        """The quotas in force, by tenant."""
        self._look()
        return self._quotas

    def state(self) -> str:
        """Return a sentence for `/readyz`; names no path."""
        count = len(self.table)
        if self.problem is None:
            return f"{count} tokens"
        return f"still using the {count} tokens of the last good file; the present one: {self.problem}"

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + CHECK_SECONDS
        try:
            if _stamp(self._path.stat()) == self._stamp and _is_settled(self._stamp):
                return
            self._stamp, text = _read(self._path)
            if text != self._text:
                self._take(text)
                self._text = text
                log.info("token file read", tokens_in_force=len(self._table))
            elif self.problem is not None:
                log.info("token file is as it was", tokens_in_force=len(self._table))
            self.problem = None
        except OSError as error:
            self._keep(f"cannot be read: {error.strerror}")
        except InvalidInput as error:
            self._keep("; ".join([error.detail, *(f"{e.field} {e.detail}" for e in error.errors[:10])]))

    def _take(self, text: str) -> None:
        found = read_access_file(text)
        self._table, self._quotas = TokenTable(found.tokens, self._key), found.quotas

    def _keep(self, problem: str) -> None:
        if problem != self.problem:
            log.error("token file cannot be used, the old tokens stay", problem=problem)
        self.problem = problem


def open_token_file(path: str) -> TokenFile | None:
    """Return the token file at `path`; None where the path is empty.

    Raises:
        InvalidInput: it cannot be used.
    """
    if not path:
        return None
    try:
        return TokenFile(Path(path))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except InvalidInput as error:
        problem = "; ".join([error.detail, *(f"{e.field} {e.detail}" for e in error.errors)])
    raise InvalidInput("the token file cannot be used", [FieldError("token_file", "invalid", problem)])


def mode_problem(mode: int, owner: int, me: int) -> str | None:
    """Return why a file of this mode and owner must not be believed, or None.

    A file of root that its group may read is fine for others than root: a secret that is mounted into a
    container of an ordinary user looks so, and that user can read it in no other way.
    """
    mode = stat.S_IMODE(mode)
    if owner not in {0, me}:
        return f"belongs to user {owner}: it must belong to root or to the user of the server"
    allowed = 0o040 if owner == 0 and me != 0 else 0
    if mode & 0o077 & ~allowed:
        return f"has mode {mode:04o}, so that others than its owner can read or change it: chmod 600"
    return None


def _read(path: Path) -> tuple[_Stamp, str]:
    """Return the stamp and the text of a file, both of one state of it.

    Raises:
        OSError: it cannot be read.
        InvalidInput: it is no file to believe.
    """
    # Non-blocking: a named pipe must not hold up the server.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            raise InvalidInput("is no regular file")
        problem = mode_problem(before.st_mode, before.st_uid, os.geteuid())
        if problem is not None:
            raise InvalidInput(problem)
        raw = file.read(MAX_FILE_BYTES + 1)
        after = os.fstat(descriptor)
    if len(raw) > MAX_FILE_BYTES:
        raise InvalidInput(f"has more than {MAX_FILE_BYTES} bytes")
    if _stamp(before) != _stamp(after):
        raise InvalidInput("is being written")
    try:
        return _stamp(after), raw.decode()
    except UnicodeDecodeError:
        raise InvalidInput("is not UTF-8 text") from None


def _stamp(found: os.stat_result) -> _Stamp:
    return (
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
        found.st_mode,
        found.st_uid,
    )


def _is_settled(stamp: _Stamp) -> bool:
    return time.time() - max(stamp[3], stamp[4]) / 1e9 > _SETTLED_SECONDS
