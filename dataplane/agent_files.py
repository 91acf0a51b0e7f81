"""The folder and the files that engines map: private, named by us alone, and gone when they have to be.

    <shared dir>/lock              held while an agent lives: there is one agent a folder
    <shared dir>/tiers/1/kv        a pool's memory; several sessions may share it
    <shared dir>/s-51c0/kv         a session's name for the same file (a hard link), removed with the session

Folders are 0700, files 0600 (0711 and 0666 where the agent serves other users too: the names of sessions are
random and cannot be listed). Nothing is opened through a link that somebody else put there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataplane.host_memory import OutOfHostMemory
from dataplane.memory_limits import memory_left
from metadata.errors import CaketinError

_TIERS: Final = "tiers"
_NEW_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderUnusable(CaketinError):
    """The shared folder is another user's, is a link, or another agent has it."""

    code = "folder_unusable"

    def __str__(self) -> str:
        return self.detail


class SharedFolder:
    """The private folder of one agent. What an earlier agent left in it is removed on entry."""

    def __init__(self, path: Path, *, for_others: bool = False) -> None:
        """Take the folder, making it where there is none.

        Args:
            path: the folder; its parent has to exist or be ours to make.
            for_others: let other users open what they know the name of.

        Raises:
            FolderUnusable: it is not ours, cannot be written, or another agent runs on it.
        """
        self.path = path
        self._folder_mode = 0o711 if for_others else 0o700
        self._file_mode = 0o666 if for_others else 0o600
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            self._fd = os.open(path, _FOLDER)
        except OSError as error:
            raise FolderUnusable(f"{path} cannot be used: {error.strerror}") from None
        try:
            self._take()
        except BaseException:
            os.close(self._fd)
            raise

    def pool_file(self, tier: int, name: str, length: int) -> PoolFile:
        """Return a new file of a tier, with all its memory allocated.

        Raises:
            OutOfHostMemory: the tmpfs has no room.
        """
        with contextlib.suppress(FileExistsError):
            (self.path / _TIERS / str(tier)).mkdir(mode=0o700)
        return PoolFile(self.path / _TIERS / str(tier) / name, length, self._file_mode)

    def remove_tier(self, tier: int) -> None:
        """Remove the names of a tier's files."""
        shutil.rmtree(self.path / _TIERS / str(tier), ignore_errors=True)

    def link(self, session: str, tier: int, name: str) -> Path:
        """Give a session a name of its own for a pool's file, and return it."""
        folder = self.path / session
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(self._folder_mode)
        path = folder / name
        os.link(self.path / _TIERS / str(tier) / name, path, follow_symlinks=False)
        return path

    def unlink(self, session: str) -> None:
        """Remove a session's names."""
        shutil.rmtree(self.path / session, ignore_errors=True)

    def close(self) -> None:
        """Remove everything and let others have the folder; again: nothing happens."""
        if self._fd < 0:
            return
        self._clear()
        with contextlib.suppress(OSError):
            (self.path / "lock").unlink()
            self.path.rmdir()
        os.close(self._lock)
        os.close(self._fd)
        self._fd = -1

    def _take(self) -> None:
        found = os.fstat(self._fd)
        if found.st_uid != os.geteuid():
            raise FolderUnusable(f"{self.path} belongs to user {found.st_uid}: name a folder of your own")
        os.fchmod(self._fd, self._folder_mode)
        self._lock = os.open(
            "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fd
        )
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            detail = f"another agent runs on {self.path}: end it, or give this one a folder of its own"
            raise FolderUnusable(detail) from None
        self._clear()
        (self.path / _TIERS).mkdir(mode=0o700)

    def _clear(self) -> None:
        """Remove what is left of an earlier life: nobody may take its pages for this one's."""
        for entry in os.scandir(self._fd):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.name, ignore_errors=True, dir_fd=self._fd)
            elif entry.name != "lock":
                with contextlib.suppress(OSError):
                    os.unlink(entry.name, dir_fd=self._fd)


class PoolFile:
    """The memory of one pool in one file, mapped here and in every engine that uses it.

    Attributes:
        address: of the first byte in this process.
        length: bytes.
    """

    def __init__(self, path: Path, length: int, mode: int) -> None:
        """Make, fill and map the file.

        Raises:
            OutOfHostMemory: there is no room for it.
        """
        self.length = length
        left = memory_left()
        if length > left:
            raise OutOfHostMemory(f"{length} bytes of memory are needed for pools and {left} are left")
        fd = os.open(path, _NEW_FILE, 0o600)
        try:
            os.fchmod(fd, mode)
            # Allocated now: a sparse file kills whoever touches a page that the tmpfs has no room for.
            os.posix_fallocate(fd, 0, length)
            self._map = mmap.mmap(fd, length, flags=mmap.MAP_SHARED)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno not in {errno.ENOSPC, errno.ENOMEM, errno.EFBIG}:
                raise
            detail = f"{length} bytes of shared memory are needed and {path.parent} has no room for them"
            raise OutOfHostMemory(detail) from None
        finally:
            os.close(fd)
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.ctypes.data)

    def close(self) -> None:
        """Give the mapping back. No address of it may be in use any more; again: nothing happens."""
        if self._bytes is not None:
            self._bytes = None
            self._map.close()
