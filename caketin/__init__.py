"""caketin: the L3 tier of the hierarchical KV cache for hybrid LLMs.

The packages `api`, `dataplane`, `metadata` and `caketin` are installed side by side under these names. Only
`caketin` is meant for outsiders; on import it checks that its neighbours are its own.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

__version__ = "0.1.0"

_NEIGHBOURS = ("metadata", "dataplane", "api")


def _refuse_shadowed_neighbours() -> None:
    home = Path(__file__).resolve().parent.parent
    for name in _NEIGHBOURS:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is None or origin.parent.parent != home:
            seen = (
                f"{origin} is imported under that name" if origin else "nothing is installed under that name"
            )
            raise ImportError(
                f"caketin needs its own package {name!r} from {home}, but {seen}. Rename or move what "
                "shadows it, or install caketin into an environment of its own."
            )


_refuse_shadowed_neighbours()
