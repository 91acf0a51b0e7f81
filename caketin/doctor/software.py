"""Python, caketin itself, and whether Mooncake loads here."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata as distributions
from pathlib import Path
from typing import Final

import caketin
from caketin.doctor.finding import Finding

_OLDEST, _NEWEST = (3, 11), (3, 13)
_NEIGHBOURS: Final = ("metadata", "dataplane", "api")
_IBVERBS: Final = "libibverbs.so.1"
_APT: Final = "apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4"
_LOAD_SECONDS: Final = 60.0
_EXTRAS: Final = "pip install 'caketin[cpu]' (on a GPU machine caketin[cuda12] or caketin[cuda13])"
_OURS: Final = {
    "mooncake-transfer-engine-non-cuda": "cpu",
    "mooncake-transfer-engine": "cuda12",
    "mooncake-transfer-engine-cuda13": "cuda13",
}
"""Distribution -> the extra that brings it. All are imported by one name."""


def software() -> Iterator[Finding]:
    """Look at what is installed."""
    yield _python(sys.version_info[:2])
    yield _caketin()
    installed = _mooncake_wheels()
    yield _ibverbs(needed=bool(installed))
    yield _mooncake(installed)


def _python(version: tuple[int, ...]) -> Finding:
    found = f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})"
    if _OLDEST <= version <= _NEWEST:
        return Finding("Python", found)
    return Finding("Python", found, "bad", "caketin runs on Python 3.11, 3.12 and 3.13: use one of these")


def _caketin() -> Finding:
    # That the neighbours are caketin's own was checked when it was imported.
    home = Path(caketin.__file__).resolve().parent.parent
    found = f"{caketin.__version__} with {', '.join(_NEIGHBOURS)} from {home}"
    try:
        said = distributions.version("caketin")
    except distributions.PackageNotFoundError:
        said = ""
    if said == caketin.__version__:
        return Finding("caketin", found)
    advice = f"pip knows version {said or 'none'}, another copy lies first on the path: reinstall caketin"
    return Finding("caketin", found, "warn", advice)


def _mooncake_wheels() -> dict[str, str]:
    """Return the installed distributions that bring `mooncake`: name -> version."""
    found = {}
    for wheel in distributions.distributions():
        name = (wheel.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith("mooncake-transfer-engine"):
            found[name] = wheel.version
    return found


def _ibverbs(*, needed: bool) -> Finding:
    try:
        ctypes.CDLL(_IBVERBS)
    except OSError as error:
        state = "bad" if needed else "warn"
        advice = f"Mooncake links against it, over TCP too. Debian, Ubuntu: {_APT}"
        return Finding("libibverbs", f"does not load: {error}", state, advice)  # type: ignore[arg-type]
    return Finding("libibverbs", f"{_IBVERBS} loads")


def _mooncake(installed: dict[str, str]) -> Finding:
    listed = ", ".join(f"{name} {version}" for name, version in sorted(installed.items()))
    if not installed:
        return Finding("Mooncake", "not installed: only the file store is at hand", "warn", _EXTRAS)
    if len(installed) > 1:
        advice = f"they overwrite each other: pip uninstall {' '.join(sorted(installed))}, then {_EXTRAS}"
        return Finding("Mooncake", f"several wheels with one import name: {listed}", "bad", advice)
    why = _load_error()
    if not why:
        return Finding("Mooncake", f"{listed} loads")
    return Finding(
        "Mooncake", f"{listed} does not load: {why}", "bad", _load_advice(why, next(iter(installed)))
    )


def _load_error() -> str:
    """Return why Mooncake does not load, in a process of its own: a wrong wheel may crash it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import mooncake.store"],
            capture_output=True,
            text=True,
            timeout=_LOAD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it takes longer than {_LOAD_SECONDS:g} s"
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"the process ended with code {done.returncode}"


def _load_advice(why: str, wheel: str) -> str:
    if any(library in why for library in ("libibverbs", "libnuma", "libcurl")):
        return f"Debian, Ubuntu: {_APT}"
    if any(library in why for library in ("libcuda", "libcudart", "libnvidia")):
        extra = _OURS.get(wheel, "this one")
        return f"extra {extra} needs CUDA's libraries. Without a GPU: pip uninstall {wheel}; {_EXTRAS}"
    return f"reinstall it: pip install --force-reinstall {wheel}"
