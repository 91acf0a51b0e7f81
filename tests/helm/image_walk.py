"""Walks a Dockerfile without Docker: a base made by debootstrap, a layer for each step, chroot for each RUN.

Layers are folders that the kernel's overlay puts on top of each other, inside a mount namespace that ends
with its process: nothing stays mounted, whatever is killed. As with Docker, a step whose input did not change
is not walked again (`CAKETIN_FULL=1` walks all of them); the layers are plain folders in the cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helm.dockerfile import ImageConfig, Instruction, Stage, apply, fill, read_dockerfile

REPO = Path(__file__).resolve().parent.parent.parent
SUITE = "bookworm"
MIRROR = "http://deb." + "debian.org/debian"
STEP_SECONDS = 420
KEPT_LAYERS = 60
"""Two walks of both images, so that two that run at once leave each other theirs."""
_DEVICES = ("null", "zero", "full", "random", "urandom")


@dataclass
class Image:
    """A built image: its layers, lowest first, and what it tells a runtime."""

    layers: list[Path]
    config: ImageConfig

    def own_bytes(self) -> int:
        """Size of the layers above the base."""
        command = ["du", "-scb", *map(str, self.layers[1:])]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return int(done.stdout.splitlines()[-1].split()[0])

    def files(self, pattern: str) -> list[str]:
        """Paths in the image, of the layers above the base, that match."""
        return [
            str(p.relative_to(layer)) for layer in self.layers[1:] for p in layer.rglob("*")
            if (p.is_file() or p.is_dir()) and fnmatch.fnmatch(str(p.relative_to(layer)), pattern)
        ]  # fmt: skip


def script_in(
    layers: Sequence[Path],
    command: Sequence[str],
    *,
    user: str = "0:0",
    workdir: str = "/",
    mounts: Sequence[tuple[str, str, str]] = (),
    write_to: Path | None = None,
) -> str:
    """Return shell lines that run `command` on top of `layers`, in a mount namespace made for them.

    Args:
        layers: folders, lowest first.
        command: program and arguments.
        user: uid:gid.
        workdir: folder to start in.
        mounts: (kind, source, place): `bind` or `ro` with a source, `tmpfs` with its options.
        write_to: folder that takes what is changed; None: the root is read-only, as in the chart.
    """
    lines = ["set -e", "at=$(mktemp -d)", 'mount -t tmpfs tmpfs "$at"', 'mkdir "$at/root" "$at/none"']
    lower = ":".join(str(layer) for layer in reversed(layers))
    if write_to is None:
        lines.append('mkdir "$at/upper" "$at/work"')
        options = f"lowerdir={lower},upperdir=$at/upper,workdir=$at/work"
        lines.append(f'mount -t overlay overlay -o "{options}" "$at/root"')
    else:
        work = write_to.with_name(write_to.name + ".work")
        lines.append(f"mkdir -p {write_to} {work}")
        options = f"lowerdir={lower},upperdir={write_to},workdir={work}"
        lines.append(f'mount -t overlay overlay -o "{options}" "$at/root"')
    lines += ['root="$at/root"', 'mount -t proc proc "$root/proc"', 'mount -t tmpfs tmpfs "$root/dev"']
    lines += [f'touch "$root/dev/{d}"; mount --bind /dev/{d} "$root/dev/{d}"' for d in _DEVICES]
    lines += ['mkdir "$root/dev/shm"', 'mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"']
    lines += ['ln -s /proc/self/fd "$root/dev/fd"']
    lines += [f'ln -s /proc/self/fd/{n} "$root/dev/std{w}"' for n, w in enumerate(("in", "out", "err"))]
    for kind, source, place in mounts:
        at = f'"$root{place}"'
        if kind == "tmpfs":
            lines += [f"mkdir -p {at}", f"mount -t tmpfs -o {source or 'mode=1777'} tmpfs {at}"]
        else:
            make = (
                f"mkdir -p {at}"
                if Path(source).is_dir()
                else f'mkdir -p "$(dirname {at})"; [ -e {at} ] || touch {at}'
            )
            lines += [make, f"mount --bind {shlex.quote(source)} {at}"]
            if kind == "ro":
                lines.append(f"mount -o remount,bind,ro {at}")
    if write_to is None:
        # Only now: mount points had to be made.
        lines.append('mount -o remount,ro "$root"')
    inner = f"cd {shlex.quote(workdir)} && exec {shlex.join(command)}"
    lines.append(f'exec chroot --userspec={user} --groups= "$root" /bin/sh -c {shlex.quote(inner)}')
    return "\n".join(lines)


def in_namespace(script: str) -> list[str]:
    """Return the command that runs `script` in a mount namespace of its own."""
    return ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script]


class ImageWalk:
    """Builds the images of a Dockerfile."""

    def __init__(self, dockerfile: Path = REPO / "Dockerfile", **arguments: str) -> None:
        """Read it; `arguments` are those of `--build-arg`."""
        self._stages = {s.name: s for s in read_dockerfile(dockerfile, arguments)}
        self._context = dockerfile.parent
        self._built: dict[str, tuple[Image, str]] = {}
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        self._cache = Path(base) / "caketin" / "image-walk"
        self._cache.mkdir(parents=True, exist_ok=True)
        with self._alone():
            self._forget_old_layers()
        self._walk_all = os.environ.get("CAKETIN_FULL") == "1"
        self._walked: set[str] = set()

    def build(self, target: str) -> Image:
        """Return the image of a stage, walking what was not walked yet."""
        with self._alone():
            return self._build(target)[0]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the cache: two processes that walk the same step would take each other's half-made layer."""
        with (self._cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _build(self, target: str) -> tuple[Image, str]:
        if target in self._built:
            return self._built[target]
        stage = self._stages.get(target)
        if stage is None:
            assert target.startswith("debian:12"), f"the base is {target}: only Debian 12 can be made here"
            self._built[target] = Image([self._base()], ImageConfig()), f"base {target}"
        else:
            self._built[target] = self._walk(stage)
        return self._built[target]

    def _walk(self, stage: Stage) -> tuple[Image, str]:
        below, key = self._build(stage.base)
        image = deepcopy(below)
        arguments: dict[str, str] = {}
        for instruction in stage.instructions:
            if instruction.word == "ARG":
                name, _, value = instruction.rest.partition("=")
                arguments[name] = value
            elif instruction.word in {"RUN", "COPY", "WORKDIR"}:
                # A shell fills the variables of a RUN from its environment.
                known = {**arguments, **image.config.env}
                filled = instruction.rest if instruction.word == "RUN" else fill(instruction.rest, known)
                key = self._step(image, Instruction(instruction.word, filled), known, key)
            apply(image.config, instruction)
        return image, key

    def _step(self, image: Image, step: Instruction, environment: dict[str, str], before: str) -> str:
        content = self._copied(step) if step.word == "COPY" else repr(sorted(environment.items()))
        key = hashlib.sha256(f"{before}\n{step.word} {step.rest}\n{content}".encode()).hexdigest()
        layer = self._cache / key[:24]
        if not layer.is_dir() or (self._walk_all and key not in self._walked):
            shutil.rmtree(layer, ignore_errors=True)
            made = self._cache / f"{key[:24]}.new"
            for left in (made, made.with_name(made.name + ".work")):
                shutil.rmtree(left, ignore_errors=True)
            made.mkdir()
            self._do(image, step, environment, made)
            shutil.rmtree(made.with_name(made.name + ".work"), ignore_errors=True)
            made.rename(layer)
        self._walked.add(key)
        os.utime(layer)
        image.layers.append(layer)
        return key

    def _forget_old_layers(self) -> None:
        """Keep what the last walks used: each change of the sources makes some hundred megabytes anew."""
        layers = [p for p in self._cache.iterdir() if p.is_dir() and not p.name.startswith("debian-")]
        for old in sorted(layers, key=lambda p: p.stat().st_mtime)[:-KEPT_LAYERS]:
            shutil.rmtree(old, ignore_errors=True)

    def _do(self, image: Image, step: Instruction, environment: dict[str, str], into: Path) -> None:
        if step.word == "RUN":
            self._run(image, step.rest, environment, into)
        elif step.word == "WORKDIR":
            (into / step.rest.lstrip("/")).mkdir(parents=True)
        else:
            self._copy(image, step.rest, into)

    def _run(self, image: Image, line: str, environment: dict[str, str], into: Path) -> None:
        mounts, settings = _network()
        script = script_in(
            image.layers,
            ["/bin/sh", "-c", line],
            user=image.config.user,
            workdir=image.config.workdir,
            mounts=[*mounts, ("tmpfs", "mode=1777", "/tmp")],
            write_to=into,
        )
        path = image.config.env.get("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        done = subprocess.run(
            in_namespace(script),
            env={"DEBIAN_FRONTEND": "noninteractive", **settings, **environment, "PATH": path},
            capture_output=True,
            text=True,
            timeout=STEP_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"RUN {line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"

    def _copy(self, image: Image, rest: str, into: Path) -> None:
        source_image, sources, place = self._copy_words(rest)
        target = Path(image.config.workdir) / place
        at = into / str(target).lstrip("/")
        if source_image is None:
            for name in sources:
                source = self._context / name
                to = at / source.name if place.endswith("/") else at
                to.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    shutil.copytree(source, at, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy2(source, to)
            return
        (source,) = sources
        assert source.startswith("/") and not place.endswith("/"), f"COPY {rest} is not understood here"
        lower = ":".join(str(layer) for layer in reversed(self._build(source_image)[0].layers))
        at.parent.mkdir(parents=True, exist_ok=True)
        script = (
            f'set -e; at=$(mktemp -d); mount -t tmpfs tmpfs "$at"; mkdir "$at/root" "$at/none"\n'
            f'mount -t overlay overlay -o "ro,lowerdir=$at/none:{lower}" "$at/root"\n'
            f'cp -a "$at/root{source}" {shlex.quote(str(at))}'
        )
        subprocess.run(in_namespace(script), check=True, timeout=STEP_SECONDS)

    def _copied(self, step: Instruction) -> str:
        """What a COPY's result depends on besides its text."""
        source_image, sources, _ = self._copy_words(step.rest)
        if source_image is not None:
            return self._build(source_image)[1]
        digest = hashlib.sha256()
        for name in sources:
            source = self._context / name
            for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
                if file.is_file() and "__pycache__" not in file.parts:
                    digest.update(f"{file.relative_to(self._context)}\n".encode() + file.read_bytes())
        return digest.hexdigest()

    def _copy_words(self, rest: str) -> tuple[str | None, list[str], str]:
        parts = shlex.split(rest)
        source_image = None
        if parts[0].startswith("--from="):
            source_image = parts.pop(0).removeprefix("--from=")
        return source_image, parts[:-1], parts[-1]

    def _base(self) -> Path:
        """A minimal Debian, as the base image is one; made once."""
        base = self._cache / f"debian-{SUITE}"
        if base.is_dir():
            return base
        made = base.with_suffix(".new")
        shutil.rmtree(made, ignore_errors=True)
        # From the machine's own packages first where it has set a mirror.
        mirror = os.environ.get("CAKETIN_DEBIAN_MIRROR", MIRROR)
        command = ["debootstrap", "--variant=minbase", SUITE, str(made), mirror]
        done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_SECONDS, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        lines = "".join(f"deb {mirror} {s} main\n" for s in (SUITE, f"{SUITE}-updates"))
        security = f"deb {mirror.removesuffix('debian')}debian-security {SUITE}-security main\n"
        (made / "etc/apt/sources.list").write_text(lines + security)
        # A frozen mirror is as good here as a fresh one.
        (made / "etc/apt/apt.conf.d/99walk").write_text('Acquire::Check-Valid-Until "false";\n')
        # What Debian's image for Docker does: no package stays in a layer.
        (made / "etc/apt/apt.conf.d/docker-clean").write_text(
            'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };\n'
            'Dir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\n'
        )
        (made / "etc/resolv.conf").unlink(missing_ok=True)
        made.rename(base)
        return base


def _network() -> tuple[list[tuple[str, str, str]], dict[str, str]]:
    """What a RUN needs to reach the archives from this machine: mounts, and variables."""
    mounts = [("ro", "/etc/resolv.conf", "/etc/resolv.conf")]
    settings = {k: v for k, v in os.environ.items() if k.lower() in {"http_proxy", "https_proxy", "no_proxy"}}
    bundle = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE", "")
    if bundle and Path(bundle).is_file():
        mounts.append(("ro", bundle, "/run/machine-ca.crt"))
        settings["PIP_CERT"] = "/run/machine-ca.crt"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2].strip(".")
        if option not in {"index-url", "extra-index-url", "find-links", "trusted-host", "proxy"}:
            continue
        text = value.strip("'\"").replace("\\n", " ")
        settings[f"PIP_{option.replace('-', '_').upper()}"] = text
        for word in text.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.is_dir():
                top = str(Path(*path.parts[:3]))  # an index links to its files by ../
                mounts.append(("ro", top, top))
    return list(dict.fromkeys(mounts)), settings


def needs_root() -> None:
    """Skip where mounts cannot be made or a tool is missing."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts and chroot")
    missing = [tool for tool in ("debootstrap", "unshare", "chroot", "ip") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
