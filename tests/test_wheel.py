"""The wheel, as a user meets it: built, looked into, installed alone into a new environment, used there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from caketin import __version__

REPO = Path(__file__).resolve().parent.parent
PACKAGES = ("api", "caketin", "dataplane", "metadata")
# What pip says when no index answers, as against an index that lacks a release.
NO_INDEX = (
    "NewConnectionError",
    "Connection refused",
    "Network is unreachable",
    "Temporary failure",
    "ProxyError",
)
# What an engine, not this package, brings to its adapter; and the store, which an extra brings.
NOT_IN_BASE = ("mooncake", "torch", "sglang")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(REPO)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def base_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds the wheel and the base dependencies, nothing else."""
    folder = tmp_path_factory.mktemp("venv") / "base"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
    python = folder / "bin" / "python"
    flags = os.environ.get("PIP_FLAGS", "").split()
    command = [str(python), "-m", "pip", "install", *flags, "-c", str(REPO / "constraints.txt"), str(wheel)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stdout + done.stderr
        if any(word in said for word in NO_INDEX):
            pytest.skip("NO PACKAGE INDEX ANSWERS: the wheel was built but not installed anywhere")
        pytest.fail(said)
    return python


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "COLUMNS"}}
    return subprocess.run(
        [str(python), *arguments], cwd=cwd, env=environment, check=False, capture_output=True, text=True
    )


def test_the_wheel_holds_the_packages_their_types_and_their_data_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {n.split("/")[0] for n in names}
    assert tops == {*PACKAGES, f"caketin-{__version__}.dist-info"}
    assert {f"{p}/py.typed" for p in PACKAGES} <= names
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=REPO, check=True, capture_output=True, text=True
    ).stdout.split()
    assert set(tracked) <= names, "tracked files of the packages are missing from the wheel"
    assert not [n for n in names if n.endswith((".pyc", ".so")) or "__pycache__" in n]
    assert f"caketin-{__version__}.dist-info/licenses/LICENSE" in names


def test_the_base_install_brings_only_what_the_project_lists(base_python: Path, tmp_path: Path) -> None:
    done = run(base_python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    installed = {line.partition("==")[0].lower() for line in done.stdout.splitlines()}
    # All that an engine's process gets with `pip install caketin`: a new name here is a decision. The
    # environment brings the first three, and anyio needs the fourth before Python 3.13.
    assert installed - {"pip", "setuptools", "wheel", "typing_extensions"} == {
        *("caketin", "numpy", "httptools", "msgspec", "tenacity"),
        *("httpx", "httpcore", "h11", "anyio", "certifi", "idna"),
    }


def test_the_packages_import_from_another_directory(base_python: Path, tmp_path: Path) -> None:
    code = "import caketin, metadata, dataplane; print(caketin.__version__, caketin.__file__)"
    done = run(base_python, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    version, file = done.stdout.split()
    assert version == __version__
    assert "site-packages" in file


def test_every_dataplane_module_imports_on_the_base_install(base_python: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, pkgutil, dataplane\n"
        "for found in pkgutil.walk_packages(dataplane.__path__, 'dataplane.'):\n"
        "    try:\n"
        "        importlib.import_module(found.name)\n"
        "    except ModuleNotFoundError as error:\n"
        f"        if error.name.partition('.')[0] not in {NOT_IN_BASE!r}:\n"
        "            print(found.name, error)\n"
    )
    done = run(base_python, "-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_installed_command_gives_its_version(base_python: Path, tmp_path: Path) -> None:
    done = run(base_python.parent / "caketin", "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"caketin {__version__}\n")
    assert run(base_python, "-m", "caketin", "--version", cwd=tmp_path).stdout == done.stdout


@pytest.mark.parametrize("command", [["serve"], ["up"], ["replay", "trace.jsonl"], ["serve", "--help"]])
def test_a_command_of_the_server_extra_names_it_and_exits_2(
    base_python: Path, tmp_path: Path, command: list[str]
) -> None:
    done = run(base_python.parent / "caketin", *command, cwd=tmp_path)
    assert done.returncode == 2
    assert f"caketin {command[0]} needs" in done.stderr
    assert "pip install 'caketin[server]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [[], ["--help"]])
def test_the_command_alone_says_what_the_base_install_is(
    base_python: Path, tmp_path: Path, command: list[str]
) -> None:
    done = run(base_python.parent / "caketin", *command, cwd=tmp_path)
    assert done.returncode == 0
    assert "pip install 'caketin[server]'" in done.stdout


@pytest.mark.parametrize("package", ["metadata", "dataplane", "api"])
def test_a_folder_that_shadows_a_package_is_named(base_python: Path, tmp_path: Path, package: str) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    done = run(base_python, "-c", "import caketin", cwd=tmp_path)
    assert done.returncode == 1
    assert f"ImportError: caketin needs its own package '{package}'" in done.stderr
    assert str(tmp_path / package / "__init__.py") in done.stderr


def test_a_module_file_that_shadows_a_package_is_named(base_python: Path, tmp_path: Path) -> None:
    (tmp_path / "metadata.py").touch()
    done = run(base_python, "-c", "import caketin", cwd=tmp_path)
    assert done.returncode == 1
    assert str(tmp_path / "metadata.py") in done.stderr


def test_a_module_already_imported_under_the_name_is_named(base_python: Path, tmp_path: Path) -> None:
    code = "import sys, types; sys.modules['api'] = types.ModuleType('api'); import caketin"
    done = run(base_python, "-c", code, cwd=tmp_path)
    assert "ImportError: caketin needs its own package 'api'" in done.stderr


def test_a_folder_without_init_shadows_nothing(base_python: Path, tmp_path: Path) -> None:
    # A namespace package yields to a regular one further down the path, so this is no case for an error.
    (tmp_path / "metadata").mkdir()
    done = run(base_python, "-c", "import caketin, metadata.pools; print('fine')", cwd=tmp_path)
    assert done.stdout == "fine\n", done.stderr


def test_a_missing_neighbour_and_a_namespace_package_in_its_place_are_named(tmp_path: Path) -> None:
    # caketin copied alone: nothing of its own stands beside it, only a bare folder of the same name.
    lone = tmp_path / "lone"
    (lone / "caketin").mkdir(parents=True)
    (lone / "caketin" / "__init__.py").write_bytes((REPO / "caketin" / "__init__.py").read_bytes())
    isolated = ("-S", "-E", "-c", "import caketin")
    done = run(Path(sys.executable), *isolated, cwd=lone)
    assert "but nothing is found under that name" in done.stderr
    (lone / "metadata").mkdir()
    done = run(Path(sys.executable), *isolated, cwd=lone)
    assert f"but {lone / 'metadata'} is imported under that name" in done.stderr
