"""What the tests of a replay share: its store seen from behind, and what the control plane counted."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from caketin.replay.driver import ReplaySettings, replay
from caketin.replay.report import Report
from caketin.replay.trace import Load
from caketin.stack import Stack
from dataplane.file_store import FileStore
from dataplane.mooncake_store import MooncakeStore
from dataplane.object_store import ObjectStore

PROMPT = {"CAKETIN_NEGATIVE_SECONDS": "0"}
"""Pages that were gone may be claimed again at once: with the usual pause, numbers depend on time."""

SETTINGS = ReplaySettings("", page_bytes=512, page_tokens=64, verify=True, call_seconds=10)


def run(stack: Stack, load: Load, **settings: object) -> Report:
    """Replay a load; `settings` are those of `ReplaySettings`."""
    return replay(replace(SETTINGS, url=stack.url, **settings), load, lambda _pages: None)


def open_behind(stack: Stack) -> ObjectStore:
    """Open the stack's store as somebody who does not ask caketin."""
    if stack.mooncake is None:
        return FileStore(stack.settings.data_dir / "pages")
    return MooncakeStore(stack.mooncake.settings)


def counted(stack: Stack, model: str, *, by: str = "") -> dict[str, dict[str, int]]:
    """Return the sums of `/v1/hit-rates` for one model: pool name, or "" for the whole prefix -> sums."""
    query = {"window": "24h", "step": "1h", "by": f"model,{by}".strip(",")}
    answer = httpx.get(f"{stack.url}/v1/hit-rates", params=query, timeout=30, trust_env=False)
    rows = [row for row in answer.json()["series"] if row["labels"]["model"] == model]
    return {
        row["labels"].get("pool", ""): {
            **{name: sum(row[name]) for name in ("queried_pages", "hit_pages", "lost_pages")},
            **{f"miss:{reason}": sum(pages) for reason, pages in row["misses"].items()},
        }
        for row in rows
    }


def metric(stack: Stack, name: str, **labels: str) -> float:
    """Return the sum over all samples of a metric that have these labels."""
    text = httpx.get(f"{stack.url}/metrics", timeout=30, trust_env=False).text
    total = 0.0
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if match and all(f'{k}="{v}"' in (match[1] or "") for k, v in labels.items()):
            total += float(match[2])
    return total


@dataclass(frozen=True)
class Place:
    """A stack that tests share, and a model of one test's own in it."""

    stack: Stack
    model: str

    def run(self, load: Load, **settings: object) -> Report:
        """Replay a load as this model."""
        return run(self.stack, load, model=self.model, **settings)

    def namespaces(self) -> list[str]:
        """Return the ids of the model's namespaces."""
        answer = httpx.get(f"{self.stack.url}/v1/namespaces", params={"limit": 1000}, trust_env=False).json()
        return [n["namespace_id"] for n in answer["namespaces"] if n["model"] == self.model]

    def page_files(self) -> list[Path]:
        """Return the files of all pages, manifests left out, in the order of their names."""
        objects = self.stack.settings.data_dir / "pages" / "objects"
        found = (p for namespace in self.namespaces() for p in (objects / namespace).rglob("*"))
        return sorted(p for p in found if p.is_file() and p.name != "manifest")

    def keys(self, store: ObjectStore) -> list[str]:
        """Return the keys of all objects of pages."""
        keys = [k for namespace in self.namespaces() for k in store.keys(f"ct1/{namespace}/")]
        return [k for k in keys if "/manifest/" not in k]

    def counted(self, *, by: str = "") -> dict[str, dict[str, int]]:
        """Return what `/v1/hit-rates` counted for the model; see `counted`."""
        return counted(self.stack, self.model, by=by)
