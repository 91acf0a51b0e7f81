"""A flag wins over a variable, a variable over the file, the file over the default; a bad value is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.settings import Settings, StoreSettings, flag_of, setting_fields, spellings, variable_of
from metadata.errors import InvalidInput

NAMES = [name for name, _ in setting_fields()]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(variable_of(name), raising=False)
    monkeypatch.setenv("CAKETIN_STORE_PATH", "/env/store")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "caketin.toml"
    path.write_text(
        'lease_seconds = 11\nnote_seconds = 12\nflush_seconds = 0.5\n[store]\nprotocol = "rdma"\n'
    )
    return path


def test_flag_over_variable_over_file_over_default(file, monkeypatch):
    monkeypatch.setenv("CAKETIN_LEASE_SECONDS", "21")
    monkeypatch.setenv("CAKETIN_NOTE_SECONDS", "22")
    found = Settings.load({"lease_seconds": "31"}, file)
    assert (found.lease_seconds, found.note_seconds, found.flush_seconds) == (31, 22, 0.5)
    assert found.companion_seconds == 3600


def test_settings_of_the_store_come_from_all_sources_at_once(file, monkeypatch):
    monkeypatch.setenv("CAKETIN_STORE_MASTER", "m:1")
    found = Settings.load({"store.kind": "mooncake"}, file).store
    assert (found.kind, found.master, found.path, found.protocol) == ("mooncake", "m:1", "/env/store", "rdma")


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_has_a_flag_a_variable_and_a_description(name):
    field = dict(setting_fields())[name]
    assert field.description
    assert spellings(name) == f"{flag_of(name)}, {variable_of(name)}, or {name} in the file"
    assert flag_of(name).startswith("--")
    assert "_" not in flag_of(name)


BAD = {
    "port": "70000",
    "workers": "0",
    "redis_connect_seconds": "-1",
    "lease_seconds": "soon",
    "flush_seconds": "0",
    "max_body_bytes": "1",
    "log_format": "xml",
    "log_level": "loud",
    "redis_url": "http://localhost",
    "store.kind": "tape",
    "store.protocol": "carrier pigeon",
}


@pytest.mark.parametrize("how", ["flag", "variable", "file"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_with_all_three_spellings(name, how, monkeypatch, tmp_path):
    flags, path = {}, None
    if how == "flag":
        flags = {name: BAD[name]}
    elif how == "variable":
        monkeypatch.setenv(variable_of(name), BAD[name])
    else:
        path = tmp_path / "bad.toml"
        table, _, key = name.rpartition(".")
        path.write_text((f"[{table}]\n" if table else "") + f'{key} = "{BAD[name]}"\n')
    with pytest.raises(InvalidInput) as refused:
        Settings.load(flags, path)
    (error,) = refused.value.errors
    assert error.field == name
    for spelling in (flag_of(name), variable_of(name), f"{name} in the file"):
        assert spelling in error.detail


def test_an_unknown_setting_in_the_file_is_refused(tmp_path):
    path = tmp_path / "unknown.toml"
    path.write_text('redis_uri = "redis://x"\n[store]\nkinds = "file"\n')
    with pytest.raises(InvalidInput) as refused:
        Settings.load({}, path)
    assert {(e.field, e.code) for e in refused.value.errors} == {
        ("redis_uri", "unknown_setting"),
        ("store.kinds", "unknown_setting"),
    }


@pytest.mark.parametrize("text", ["port = ", "\x00", "port = 1\nport = 2"])
def test_a_file_that_is_no_toml_is_told(text, tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=r"broken\.toml.*not TOML.*--config"):
        Settings.load({}, path)
    with pytest.raises(InvalidInput, match="No such file"):
        Settings.load({}, tmp_path / "absent.toml")


def test_a_store_without_its_place_names_the_setting(monkeypatch):
    monkeypatch.delenv("CAKETIN_STORE_PATH")
    with pytest.raises(InvalidInput, match=r"--store-path, CAKETIN_STORE_PATH, or store\.path"):
        Settings.load({})
    with pytest.raises(InvalidInput, match="--store-master"):
        Settings.load({"store.kind": "mooncake"})


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "example.org", "::"])
def test_without_tokens_only_loopback_is_listened_on(host):
    with pytest.raises(InvalidInput, match="--host"):
        Settings.load({"host": host})
    assert Settings.load({"host": "::1"}).host == "::1"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://user:secret@h:1/0", "redis://***@h:1/0"),
        ("redis+cluster://:secret@a:1,b:2", "redis+cluster://***@a:1,b:2"),
    ],
)
def test_settings_are_shown_without_secrets(url, shown):
    found = Settings.load({"redis_url": url})
    assert found.shown()["redis_url"] == shown
    assert set(found.shown()) == set(NAMES)
    assert "secret" not in repr(found)
    assert "secret" not in str(found)
    assert ("secret" in found.secrets()) == ("secret" in url)


def test_a_refused_redis_url_does_not_tell_its_password():
    with pytest.raises(InvalidInput) as refused:
        Settings.load({"redis_url": "http://user:hunter22@h:1/0"})
    assert "hunter22" not in str(refused.value)


def test_settings_made_in_code_need_no_source():
    found = Settings(redis_url="redis://h:1/0", store=StoreSettings(kind="file", path="/code"))
    assert found.store.path == "/code"
