"""HTTPS by flags, what a server refuses to start with, and the warning where tokens travel in clear text."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
import trustme
from structlog.testing import capture_logs

from api.server import check_files, warn_of_clear_text
from api.settings import Settings, StoreSettings
from metadata.errors import InvalidInput
from tests.api.access_scene import TOKENS, bearer, guarded, write
from tests.api.serve_process import command, environment

STORE = StoreSettings(kind="file", path="store")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = Path(tmp_path_factory.mktemp("tls"))
    authority = trustme.CA()
    found = {name: folder / f"{name}.pem" for name in ("authority", "cert", "key", "other_key")}
    authority.cert_pem.write_to_path(found["authority"])
    mine, other = authority.issue_cert("127.0.0.1"), authority.issue_cert("127.0.0.1")
    for i, blob in enumerate(mine.cert_chain_pems):
        blob.write_to_path(found["cert"], append=i > 0)
    mine.private_key_pem.write_to_path(found["key"])
    other.private_key_pem.write_to_path(found["other_key"])
    return found


def test_with_a_certificate_the_server_speaks_https_only(redis_url: str, tmp_path: Path, tls) -> None:
    more = {"tls_cert": str(tls["cert"]), "tls_key": str(tls["key"])}
    with guarded(redis_url, tmp_path, **more) as stack:
        url = stack.url.replace("http://", "https://")
        trust = ssl.create_default_context(cafile=tls["authority"])
        with httpx.Client(base_url=url, verify=trust, headers=bearer("acme-reader")) as http:
            assert http.get("/v1/engines").status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{stack.url}/healthz")
        old = ssl.create_default_context(cafile=tls["authority"])
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
        assert httpx.get(f"{url}/healthz", verify=old).status_code == 200


def faults(**more: str) -> list[tuple[str, str]]:
    settings = Settings(store=STORE, **more)
    with pytest.raises(InvalidInput) as refused:
        check_files(settings)
    return [(e.field, e.detail) for e in refused.value.errors]


def test_a_certificate_that_cannot_be_used_is_told_before_the_start(tmp_path: Path, tls) -> None:
    cert, key = str(tls["cert"]), str(tls["key"])
    for pair, said in (
        ((cert, str(tls["other_key"])), "KEY_VALUES_MISMATCH"),
        ((cert, str(tmp_path / "absent")), "No such file"),
        ((key, key), "cannot be used"),
    ):
        ((field, detail),) = faults(tls_cert=pair[0], tls_key=pair[1])
        assert field == "tls_cert"
        assert said in detail
    check_files(Settings(store=STORE, tls_cert=cert, tls_key=key))


@pytest.mark.parametrize("given", ["tls_cert", "tls_key"])
def test_half_of_tls_is_refused_and_the_other_half_named(given: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Settings.load({given: "x.pem", "store.path": "store"})
    other = {"tls_cert": "--tls-key", "tls_key": "--tls-cert"}[given]
    assert other in refused.value.errors[0].detail


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "cache.example"])
def test_other_hosts_than_loopback_need_a_token_file(host: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Settings.load({"host": host, "store.path": "store"})
    assert "--token-file" in refused.value.errors[0].detail
    assert Settings.load({"host": host, "store.path": "store", "token_file": "t"}).host == host


def test_a_server_ends_with_a_sentence_where_its_token_file_cannot_be_used(tmp_path: Path) -> None:
    file = write(tmp_path / "tokens.toml", TOKENS)
    file.chmod(0o644)
    flags = ["--token-file", str(file), "--store-path", str(tmp_path), "--port", "0"]
    done = subprocess.run(
        command(*flags), capture_output=True, text=True, timeout=60, env=environment(), check=False
    )
    assert done.returncode == 2
    assert (
        "token_file: has mode 0644, so that others than its owner can read or change it: chmod 600"
        in done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("host", "tls_files", "warned"), [("10.0.0.1", "", True), ("10.0.0.1", "x", False), ("::1", "", False)]
)
def test_clear_text_beyond_loopback_is_warned_of(host: str, tls_files: str, warned: bool) -> None:
    settings = Settings(store=STORE, host=host, token_file="t", tls_cert=tls_files, tls_key=tls_files)
    with capture_logs() as logged:
        warn_of_clear_text(settings)
    assert ["clear text" in line["event"] for line in logged] == [True] * warned
