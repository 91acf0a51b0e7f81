"""A Debian kernel with soft-RoCE and an initial RAM disk that starts it on this machine's own files.

Downloads are kept in the cache folder; nothing is installed. The guest's root is the host's, read-only over
9p, so that what runs there is this working tree with the environment that the tests themselves run in.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from caketin.stack import cache_folder

HERE = Path(__file__).parent
INIT = HERE / "guest" / "init.sh"
MODULES = ("virtio_pci", "virtio_net", "9pnet_virtio", "9p", "overlay", "crc32_generic", "rdma_rxe")
_META_PACKAGE = "linux-image-amd64"
_BUSYBOX_PACKAGE = "busybox-static"


class NoGuest(Exception):
    """What the virtual machine needs is not there; the text says what."""


@dataclass(frozen=True)
class Kernel:
    """What QEMU starts.

    Attributes:
        image: the kernel.
        initrd: the initial RAM disk.
        version: of the kernel.
    """

    image: Path
    initrd: Path
    version: str


def guest_kernel() -> Kernel:
    """Return the kernel, downloading it the first time.

    Raises:
        NoGuest: there is no apt-get here, or it cannot download.
    """
    folder = cache_folder() / "rdma"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unpacked = _unpacked(folder)
        image = next((unpacked / "boot").glob("vmlinuz-*"))
        version = image.name.removeprefix("vmlinuz-")
        initrd = _initrd(unpacked, version)
    return Kernel(image, initrd, version)


def _unpacked(folder: Path) -> Path:
    """Return the folder with kernel and busybox; an older kernel is kept rather than asked for anew."""
    done = folder / "unpacked"
    if done.is_dir():
        return done
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise NoGuest(
            "a Debian kernel is fetched with apt-get and unpacked with dpkg-deb, which are not here"
        )
    packages = folder / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    packages.mkdir()
    try:
        _download(packages)
    except NoGuest:
        _run(["apt-get", "-q", "update"], packages)  # where no list of packages was fetched yet
        _download(packages)
    half = folder / "half"
    shutil.rmtree(half, ignore_errors=True)
    for package in packages.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(half)], packages)
    half.rename(done)
    shutil.rmtree(packages)
    return done


def _download(folder: Path) -> None:
    for package in (_kernel_package(), _BUSYBOX_PACKAGE):
        _run(["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package], folder)


def _kernel_package() -> str:
    said = _run(["apt-cache", "depends", _META_PACKAGE], HERE)
    found = re.search(r"Depends: (linux-image-\S+)", said)
    if found is None:
        raise NoGuest(f"apt-cache knows no {_META_PACKAGE}")
    return found[1]


def _run(command: list[str], where: Path) -> str:
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise NoGuest(f"{' '.join(command)} failed: {done.stderr.strip()[-400:]}")
    return done.stdout


def _initrd(unpacked: Path, version: str) -> Path:
    """Return the RAM disk: busybox, the modules in the order of their needs, `init.sh`."""
    init = INIT.read_bytes()
    tag = hashlib.sha256(b"%s %s %s" % (init, " ".join(MODULES).encode(), version.encode())).hexdigest()[:12]
    target = unpacked.parent / f"initrd-{tag}.gz"
    if not target.exists():
        modules = list(_in_order(unpacked / "lib" / "modules" / version))
        files = [("init", init, 0o755), ("bin/busybox", (unpacked / "bin" / "busybox").read_bytes(), 0o755)]
        files += [(f"modules/{i:02d}-{m.name}", m.read_bytes(), 0o644) for i, m in enumerate(modules)]
        half = target.with_suffix(".half")
        half.write_bytes(gzip.compress(cpio(files), 1))
        half.rename(target)
    return target


def _in_order(folder: Path) -> Iterator[Path]:
    """Give the modules' files, each after those that it depends on, as they say themselves."""
    files = {p.name.removesuffix(".ko").replace("-", "_"): p for p in folder.rglob("*.ko")}
    given: set[str] = set()

    def walk(name: str) -> Iterator[Path]:
        if name in given or name not in files:  # what is not there as a file is built in
            return
        given.add(name)
        needs = re.search(rb"\0depends=([^\0]*)\0", files[name].read_bytes())
        for need in filter(None, needs[1].decode().split(",") if needs else ()):
            yield from walk(need.replace("-", "_"))
        yield files[name]

    for module in MODULES:
        if module.replace("-", "_") not in files:
            raise NoGuest(f"the kernel in {folder} has no module {module}: remove the cache folder's `rdma`")
        yield from walk(module)


def cpio(files: Sequence[tuple[str, bytes, int]]) -> bytes:
    """Return an archive in the format that the kernel unpacks (`newc`), with the folders that are needed."""
    folders = sorted({str(p) for name, _, _ in files for p in Path(name).parents if str(p) != "."})
    entries = [(name, b"", 0o040755) for name in folders]
    entries += [(name, data, 0o100000 | mode) for name, data, mode in files]
    out = bytearray()
    for number, (name, data, mode) in enumerate([*entries, ("TRAILER!!!", b"", 0)], 1):
        raw = name.encode() + b"\0"
        numbers = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0)
        out += b"070701" + b"".join(b"%08x" % n for n in numbers) + raw
        out += b"\0" * (-len(out) % 4) + data
        out += b"\0" * (-len(out) % 4)
    return bytes(out)
