"""The floors of the house, enforced on the import statements: who may import whom, and what stays pure.

Reads source, imports nothing of the packages. Each rule is itself tested on a tree with a planted violation.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from caketin.__main__ import EXTRA_OF_MODULE

REPO = Path(__file__).resolve().parent.parent

FLOORS = {
    "metadata": {"metadata"},
    "dataplane": {"dataplane", "metadata"},
    "api": {"api", "metadata"},
    "caketin": {"caketin", "api", "dataplane", "metadata"},
}

# What a pure module may import: computing, no input or output, no clock, no randomness, no settings.
PURE_IMPORTS = {
    *("__future__", "abc", "array", "base64", "binascii", "bisect", "collections", "copy", "dataclasses"),
    *(
        "datetime",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "hmac",
        "itertools",
        "json",
        "math",
        "msgspec",
        "numpy",
        "operator",
        "re",
    ),
    *("string", "struct", "tomllib", "types", "typing"),
}
PURE_WITHOUT_CALLS = {"open", "print", "input", "exec", "eval"}

# The data plane runs in an engine's process, on the base install: without Redis, FastAPI and the rest.
SERVER_MODULES = {name for name, extra in EXTRA_OF_MODULE.items() if extra == "server"}
# An engine's process imports these; the base install must be enough for them.
BASE_ENTRIES = ("caketin", "caketin.__main__", "caketin.sglang", "metadata", "dataplane")
# The one room whose modules an engine loads after its own torch.
ENGINE_ADAPTERS = "dataplane.engines."


@dataclass(frozen=True)
class Import:
    """One import statement.

    `target` is the module, `names` what is taken from it (modules or mere attributes); `at_import_time` says
    whether importing the file is enough to run it.
    """

    target: str
    line: int
    at_import_time: bool
    names: tuple[str, ...] = ()


def pure_modules() -> list[str]:
    """The list in the Makefile, as dotted names."""
    text = (REPO / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(r"^PURE := (.+)$", text, re.MULTILINE)
    assert found, "the Makefile has lost its list PURE"
    return [path.replace("/", ".") for path in found.group(1).split()]


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, for every module of the four packages under `root`."""
    found = {}
    for package in FLOORS:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path) -> list[Import]:
    return list(_walk(ast.parse(path.read_text(), str(path)).body, at_import_time=True))


def _walk(nodes: Iterable[ast.AST], at_import_time: bool) -> Iterator[Import]:
    for node in nodes:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, node.lineno, at_import_time)
            case ast.ImportFrom(module=module, names=names, level=level):
                target = "." * level + (module or "")
                yield Import(target, node.lineno, at_import_time, tuple(a.name for a in names))
            case ast.Call(func=func, args=args) if _name(func) in {"import_module", "__import__"}:
                literal = args[0].value if args and isinstance(args[0], ast.Constant) else "<computed>"
                yield Import(str(literal), node.lineno, at_import_time)
                yield from _walk(ast.iter_child_nodes(node), at_import_time)
            case ast.If(test=test, body=body, orelse=orelse) if _name(test) == "TYPE_CHECKING":
                yield from _walk(body, at_import_time=False)
                yield from _walk(orelse, at_import_time)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _walk(ast.iter_child_nodes(node), at_import_time=False)
            case _:
                yield from _walk(ast.iter_child_nodes(node), at_import_time)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _root(target: str) -> str:
    return target.partition(".")[0]


def floor_violations(root: Path) -> list[str]:
    """Imports of a floor above or beside; relative and computed ones, which nobody can check, count too."""
    found = []
    for name, path in modules(root).items():
        allowed = FLOORS[_root(name)]
        for imported in imports_of(path):
            where = f"{path.relative_to(root)}:{imported.line}"
            if imported.target.startswith("."):
                found.append(f"{where} has a relative import; write the full name")
            elif imported.target == "<computed>" and _root(name) != "caketin":
                found.append(f"{where} imports a computed name, which the floors cannot be checked on")
            elif _root(imported.target) in FLOORS and _root(imported.target) not in allowed:
                found.append(f"{where} imports {imported.target} from {_root(name)}")
    return found


def purity_violations(root: Path, pure: list[str]) -> list[str]:
    """What makes a module of `pure` impure: an import, direct or through a neighbour, or a call."""
    found = []
    every = modules(root)
    reached = {name for start in pure for name in _closure([start], every, import_time_only=False)}
    for name in sorted(reached | set(pure)):
        if name not in every:
            found.append(f"{name} is on the list PURE but does not exist")
            continue
        where = every[name].relative_to(root)
        found += [
            f"{where}:{imported.line} imports {imported.target} in a pure module"
            for imported in imports_of(every[name])
            if _root(imported.target) not in PURE_IMPORTS | set(FLOORS)
        ]
        found += [
            f"{where}:{node.lineno} calls {_name(node.func)} in a pure module"
            for node in ast.walk(ast.parse(every[name].read_text()))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in PURE_WITHOUT_CALLS
        ]
    return found


def base_install_violations(root: Path) -> list[str]:
    """Imports, on the way of an engine's process, of something that the base install does not bring."""
    every = modules(root)
    starts = [n for n in every if n in BASE_ENTRIES or _root(n) == "dataplane"]
    found = []
    for name in _closure(starts, every, import_time_only=True):
        for imported in imports_of(every[name]):
            if imported.at_import_time and _root(imported.target) in SERVER_MODULES:
                where = f"{every[name].relative_to(root)}:{imported.line}"
                found.append(f"{where} imports {imported.target} at import time, on an engine's way in")
    return sorted(found)


def torch_violations(root: Path) -> list[str]:
    """Imports of torch at import time; an engine adapter is imported by an engine that has it."""
    return [
        f"{path.relative_to(root)}:{imported.line} imports torch at import time"
        for name, path in modules(root).items()
        if not name.startswith(ENGINE_ADAPTERS)
        for imported in imports_of(path)
        if imported.at_import_time and _root(imported.target) == "torch"
    ]


def _closure(starts: list[str], every: dict[str, Path], import_time_only: bool) -> list[str]:
    """The modules of the packages that importing `starts` reaches, parents' `__init__` included."""
    reached: set[str] = set()
    frontier = list(starts)
    while frontier:
        name = frontier.pop()
        if name in reached or name not in every:
            continue
        reached.add(name)
        frontier += [name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)]
        for imported in imports_of(every[name]):
            if imported.at_import_time or not import_time_only:
                frontier += [imported.target, *(f"{imported.target}.{n}" for n in imported.names)]
    return sorted(reached)


def test_no_package_imports_a_floor_above_or_beside_it() -> None:
    assert floor_violations(REPO) == []


def test_pure_modules_reach_no_io() -> None:
    assert purity_violations(REPO, pure_modules()) == []


def test_the_list_of_pure_modules_holds_the_domain() -> None:
    domain = {"pools", "pool_json", "namespace", "object_keys", "page_hash", "hit_policy"}
    assert {f"metadata.{name}" for name in domain} | {"dataplane.host_pool"} <= set(pure_modules())


def test_a_module_that_calls_itself_pure_is_on_the_list() -> None:
    says = re.compile(r"\bPure[:.]")
    claimed = {
        n for n, p in modules(REPO).items() if says.search(ast.get_docstring(ast.parse(p.read_text())) or "")
    }
    assert claimed - set(pure_modules()) == set()


def test_an_engines_process_needs_no_server_extra() -> None:
    assert base_install_violations(REPO) == []


def test_nothing_imports_torch_at_import_time() -> None:
    assert torch_violations(REPO) == []


def test_importing_the_packages_alone_loads_no_server_module() -> None:
    code = (
        "import sys, caketin, metadata, dataplane, api\n"
        f"print(sorted({SERVER_MODULES | {'torch', 'mooncake'}!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def plant(root: Path, **files: str) -> Path:
    """A tree of the four packages with these files in it; `metadata__x` is metadata/x.py."""
    for package in FLOORS:
        (root / package).mkdir()
        (root / package / "__init__.py").write_text("")
    for name, text in files.items():
        (root / (name.replace("__", "/") + ".py")).write_text(text)
    return root


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("metadata__x", "import dataplane.agent\n"),
        ("metadata__x", "from api import app\n"),
        ("metadata__x", "def f():\n    from caketin.cli import command_line\n"),
        ("metadata__x", "import importlib\nm = importlib.import_module('dataplane.host_pool')\n"),
        ("metadata__x", "from importlib import import_module\nm = import_module('api')\n"),
        ("metadata__x", "m = __import__('caketin')\n"),
        ("metadata__x", "from importlib import import_module\nm = import_module('a' + 'pi')\n"),
        ("metadata__x", "from .. import api\n"),
        ("dataplane__x", "try:\n    import api.schemas as s\nexcept ImportError:\n    pass\n"),
        ("dataplane__x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import api\n"),
        ("api__x", "class A:\n    from dataplane.object_store import ObjectStore\n"),
    ],
)
def test_a_planted_import_of_a_higher_floor_is_found(tmp_path: Path, file: str, text: str) -> None:
    assert len(floor_violations(plant(tmp_path, **{file: text}))) == 1


def test_the_allowed_directions_are_not_found(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        dataplane__x="from metadata.pools import PoolSpec\n",
        api__x="import metadata\n",
        caketin__x="import api, dataplane\nfrom importlib import import_module\nimport_module('a' + 'pi')\n",
        metadata__x="import metadatastore\n",
    )
    assert floor_violations(root) == []


@pytest.mark.parametrize(
    "text",
    [
        "import os\n",
        "def f():\n    import socket\n",
        "from pathlib import Path\n",
        "import redis\n",
        "import time\n",
        "import logging\n",
        "x = open('file')\n",
        "print(1)\n",
        "from metadata import impure\n",
    ],
)
def test_planted_io_in_a_pure_module_is_found(tmp_path: Path, text: str) -> None:
    root = plant(tmp_path, metadata__x=text, metadata__impure="import httpx\n")
    assert len(purity_violations(root, ["metadata.x"])) == 1


def test_a_pure_module_that_went_away_is_found(tmp_path: Path) -> None:
    assert purity_violations(plant(tmp_path), ["metadata.x"]) == [
        "metadata.x is on the list PURE but does not exist"
    ]


@pytest.mark.parametrize(
    "files",
    [
        {"dataplane__x": "import redis\n"},
        {"dataplane__x": "from metadata import y\n", "metadata__y": "import redis.asyncio\n"},
        {"dataplane__x": "from metadata.y import z\n", "metadata__y": "from pydantic import BaseModel\n"},
        {"caketin____init__": "import typer\n"},
        {"metadata____init__": "from metadata.y import z\n", "metadata__y": "import redis\n"},
    ],
)
def test_a_planted_server_module_on_an_engines_way_is_found(tmp_path: Path, files: dict[str, str]) -> None:
    root = plant(tmp_path)
    for name, text in files.items():
        folder, _, module = name.partition("__")
        (root / folder / f"{module}.py").write_text(text)
    assert len(base_install_violations(root)) == 1


def test_redis_in_the_index_and_a_late_import_are_no_violation(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        metadata__page_index="import redis\n",
        dataplane__x="def f():\n    import prometheus_client\n",
    )
    assert base_install_violations(root) == []


def test_planted_torch_is_found_outside_the_engine_adapters(tmp_path: Path) -> None:
    root = plant(tmp_path, dataplane__x="import torch\n", api__y="def f():\n    import torch\n")
    (root / "dataplane" / "engines").mkdir()
    (root / "dataplane" / "engines" / "sglang.py").write_text("import torch\n")
    assert torch_violations(root) == ["dataplane/x.py:1 imports torch at import time"]


def test_every_module_of_the_server_extra_is_known_to_the_front_door() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[<>=;~! ]", d)[0] for d in project["optional-dependencies"]["server"]}
    assert {n.replace("-", "_") for n in names} <= SERVER_MODULES
