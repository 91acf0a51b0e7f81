"""The extra config: what the page lists is taken, and what cannot be used is named before anything starts."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dataplane.engines.sglang_settings import BackendSettings, EngineFacts
from dataplane.store_access import StoreOverrides
from metadata.errors import InvalidInput

PAGE = Path(__file__).parents[3] / "docs" / "sglang.md"
URL = {"control_url": "http://127.0.0.1:1"}


def listed() -> set[str]:
    """The names in the page's table of settings."""
    table = PAGE.read_text().split("## Settings in the extra config")[1].split("\n\n")[1]
    return {n for line in table.splitlines()[2:] for n in re.findall(r"`([^`]+)`", line.split("|")[1])}


def faults(**given: Any) -> list[tuple[str, str]]:
    with pytest.raises(InvalidInput) as refused:
        BackendSettings.of({**URL, **given})
    return [(e.field, e.code) for e in refused.value.errors]


def test_the_page_lists_every_setting_and_no_other():
    ours = {f.name for f in fields(BackendSettings)} - {"store"}
    assert listed() == ours | {f"store.{f.name}" for f in fields(StoreOverrides)}


@pytest.mark.parametrize("name", sorted(listed()))
def test_every_setting_of_the_page_is_known_and_has_a_type(name):
    first, _, second = name.partition(".")
    strange: list[Any] = [[1]]
    given = {first: {second: strange}} if second else {first: strange}
    assert (name, "bad_type") in faults(**given)


@pytest.mark.parametrize("name", ["controll_url", "call_second", "store.paths", "store.path"])
def test_a_typo_is_named_and_so_is_a_dotted_name(name):
    assert faults(**{name: "x"}) == [(name, "unknown")]


def test_a_typo_below_store_is_named():
    assert faults(store={"bounce": 4}) == [("store.bounce", "unknown")]


@pytest.mark.parametrize("name", sorted(listed() - {"control_url"}))
def test_null_means_the_default(name):
    first, _, second = name.partition(".")
    given = {first: {second: None}} if second else {first: None}
    assert BackendSettings.of({**URL, **given}) == BackendSettings.of(URL)


def test_an_engine_whose_model_nobody_names_is_refused():
    assert BackendSettings.of(URL).model_of(EngineFacts(model="served")) == "served"
    with pytest.raises(InvalidInput, match="give extra_config a 'model'"):
        BackendSettings.of(URL).model_of(EngineFacts())


def test_the_token_comes_from_its_file(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    assert BackendSettings.of({**URL, "token": f"@{tmp_path / 'token'}"}).token == "secret"


@pytest.mark.parametrize("made", [None, b"", b"\xff\xfe", b"two words"])
def test_a_token_file_that_cannot_be_used_is_named(tmp_path, made):
    file = tmp_path / "token"
    if made is not None:
        file.write_bytes(made)
    with pytest.raises(InvalidInput) as refused:
        _ = BackendSettings.of({**URL, "token": f"@{file}"}).control
    assert [e.field for e in refused.value.errors] == ["token"]
    assert "two words" not in str(refused.value)
