"""caketin: the L3 tier of the hierarchical KV cache for hybrid LLMs.

The packages `api`, `dataplane`, `metadata` and `caketin` are installed side by side under these names. Only
`caketin` is meant for outsiders; on import it checks that its neighbours are its own.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__version__ = "0.1.0"

_NEIGHBOURS = ("metadata", "dataplane", "api")


def _refuse_shadowed_neighbours() -> None:
    home = Path(__file__).resolve().parent.parent
    for name in _NEIGHBOURS:
        found = _found_as(name)
        if found is not None and found.resolve() == home / name / "__init__.py":
            continue
        seen = f"{found} is imported under that name" if found else "nothing is found under that name"
        raise ImportError(
            f"caketin needs its own package {name!r} from {home}, but {seen}. Rename or move what "
            "shadows it, or install caketin into an environment of its own."
        )


def _found_as(name: str) -> Path | None:
    """Return the file (namespace package: the folder) that `import name` gives, or None."""
    loaded = sys.modules.get(name)
    # A module made by hand has no spec, and find_spec raises for it.
    spec = importlib.util.find_spec(name) if loaded is None else loaded.__spec__
    origin = spec.origin if spec is not None else getattr(loaded, "__file__", None)
    if origin is not None:
        return Path(origin)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(folders[0]) if folders else None


_refuse_shadowed_neighbours()
