"""The file store's folder: whose it is, and the private place in it where each process writes."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

from dataplane.object_store import StoreUnavailable

FORMAT: Final = b"caketin file store, format 1\n"


def claim_folder(root: Path) -> None:
    """Make `root` a file store, or see that it is one.

    Raises:
        StoreUnavailable: it holds another format or other files, or cannot be written.
    """
    marker = root / "FORMAT"
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not marker.exists():
            foreign = sorted(p.name for p in root.iterdir() if not p.name.startswith("FORMAT"))
            if foreign and not marker.exists():  # it may have become a store since
                raise StoreUnavailable(f"{root} is no file store and not empty (it holds {foreign[0]!r})")
            _write_marker(root, marker)
        found = marker.read_bytes()
        if found != FORMAT:
            raise StoreUnavailable(
                f"{root} is of another format, {found[:60]!r}; this version writes {FORMAT!r}"
            )
        for name in ("objects", "tmp"):
            (root / name).mkdir(exist_ok=True, mode=0o700)
    except OSError as e:
        raise StoreUnavailable(f"{root} cannot be used as a file store: {e}") from e


def _write_marker(root: Path, marker: Path) -> None:
    draft = root / f"FORMAT.{uuid.uuid4().hex}"
    draft.write_bytes(FORMAT)
    try:
        with suppress(FileExistsError):  # two processes open a new folder at once
            os.link(draft, marker)
    finally:
        draft.unlink()


class Workspace:
    """A folder for one process's unfinished files, locked while the process lives.

    A lock instead of a process id says who is alive: ids mean nothing between containers that share a volume.
    """

    def __init__(self, folder: Path) -> None:
        """Make a workspace under `folder` and remove those of dead processes."""
        self._numbers = itertools.count()
        self.path, self._fd = _make(folder)
        for other in folder.iterdir():
            if other.name != Path(self.path).name:
                _remove_if_dead(other)

    def new_path(self) -> str:
        """Return a path that no file has; the process id tells forked children apart."""
        return f"{self.path}/{os.getpid()}-{next(self._numbers)}"

    def close(self) -> None:
        """Remove the workspace."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


def _make(folder: Path) -> tuple[str, int]:
    while True:
        path = str(folder / uuid.uuid4().hex)
        os.mkdir(path, 0o700)  # noqa: PTH102 - a string all the way, for speed
        fd = _lock(path)
        # Somebody's sweep may have met it between these two steps: then it is gone, or going.
        if fd is not None:
            if os.fstat(fd).st_nlink:
                return path, fd
            os.close(fd)


def _remove_if_dead(path: Path) -> None:
    fd = _lock(str(path))
    if fd is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)


def _lock(path: str) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
