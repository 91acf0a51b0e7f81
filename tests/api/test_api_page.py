"""docs/api.md runs as written; docs/operations.md lists every setting and every metric, and no other."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import httpx
import pytest

from api.metrics import Metrics
from api.settings import setting_fields
from tests.api.conftest import Stack

DOCS = Path(__file__).resolve().parents[2] / "docs"
OPERATIONS = (DOCS / "operations.md").read_text()


def test_the_examples_of_the_api_page_run_as_written(stack: Stack, client: httpx.Client):
    text = (DOCS / "api.md").read_text()
    # A closing fence would count as expected output.
    text = re.sub(r"^```.*$", "", text, flags=re.MULTILINE)
    parsed = doctest.DocTestParser().get_doctest(text, {"url": stack.url}, "docs/api.md", "docs/api.md", 0)
    assert len(parsed.examples) > 25
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    result = runner.run(parsed, out=told.append)
    assert result.failed == 0, "".join(told)


def rows(title: str) -> dict[str, list[str]]:
    section = OPERATIONS.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {first.strip("`"): rest for first, *rest in cells}


def default_of(name: str) -> str:
    default = str(dict(setting_fields())[name].default)
    return default if default != "**********" else "redis://127.0.0.1:6379/0"


@pytest.mark.parametrize("name", [name for name, _ in setting_fields()])
def test_every_setting_is_listed_with_its_default_and_meaning(name):
    default, text = rows("Settings")[name]
    assert default.strip("`") == default_of(name)
    assert text == dict(setting_fields())[name].description


def test_no_setting_is_listed_that_is_not_there():
    assert set(rows("Settings")) == {name for name, _ in setting_fields()}


def test_every_metric_is_listed_with_its_labels_and_no_other():
    there = {}
    for family in Metrics().registry.collect():
        if family.name.startswith("caketin_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            there[name] = family.documentation
    listed = rows("Metrics")
    assert set(listed) == set(there)
    for name, (_, text) in listed.items():
        assert text == there[name]
