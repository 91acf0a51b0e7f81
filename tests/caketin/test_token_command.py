"""`caketin token`, and the commands that show a token; the examples of docs/security.md run as they stand."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from typer.testing import CliRunner

from api.settings import flag_of, setting_fields
from api.tokens import TOKEN_FORM, read_access_file, token_digest
from caketin.access_token import access_token
from caketin.cli import command_line
from metadata.errors import InvalidInput
from tests.api.access_scene import TOKENS, guarded, secret, write
from tests.api.conftest import Stack
from tests.api.conftest import redis_url as redis_url  # noqa: PLC0414  a fixture
from tests.api.serve_process import environment, served

REPO = Path(__file__).resolve().parents[2]
DOCS = (REPO / "docs" / "security.md").read_text()
NEW = ("new", "--tenant", "acme", "--scope", "engine")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def token(*arguments: str, folder: Path) -> Done:
    """Run `caketin token` in this process: starting one takes longer than all the rest."""
    given = [str(folder / a) if a.endswith("t.toml") else a for a in arguments]
    found = CliRunner().invoke(command_line(["token"]), ["token", *given], env={"COLUMNS": "200"})
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return Done(found.exit_code, found.stdout, found.stderr)


def caketin(*arguments: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "caketin", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=folder,
        env=environment(**env),
        check=False,
    )


def new(folder: Path, *more: str) -> str:
    done = token(*NEW, "--file", "t.toml", *more, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ids(folder: Path) -> list[str]:
    return [t.token_id for t in read_access_file((folder / "t.toml").read_text()).tokens]


def test_a_token_is_printed_once_and_its_digest_kept_in_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        shown = new(tmp_path, "--id", "one", "--days", "1", "--comment", "a “note”")
    finally:
        os.umask(old)
    assert TOKEN_FORM.fullmatch(shown)
    (entry,) = read_access_file((tmp_path / "t.toml").read_text()).tokens
    assert (entry.token_id, entry.tenant, entry.scopes) == ("one", "acme", {"engine"})
    assert entry.sha256 == token_digest(shown)
    assert entry.comment == "a “note”"
    assert stat.S_IMODE((tmp_path / "t.toml").stat().st_mode) == 0o600
    assert shown not in (tmp_path / "t.toml").read_text()
    listed = token("ls", "--file", "t.toml", folder=tmp_path).stdout
    assert "one" in listed
    assert entry.sha256.hex() not in listed
    assert [p.name for p in tmp_path.iterdir()] == ["t.toml"]


def test_what_a_person_wrote_into_the_file_stays(tmp_path: Path) -> None:
    new(tmp_path, "--id", "one")
    mine = "# mine\n[tenants.acme]  # and mine\nmax_pages = 7"
    with (tmp_path / "t.toml").open("a") as file:
        file.write(mine)
    new(tmp_path, "--id", "two")
    done = token("revoke", "one", "--file", "t.toml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ids(tmp_path) == ["two"]
    assert mine in (tmp_path / "t.toml").read_text()


def test_names_that_are_not_given_are_made_and_differ(tmp_path: Path) -> None:
    new(tmp_path)
    new(tmp_path)
    one, two = ids(tmp_path)
    assert one != two
    assert one.startswith("acme-engine-")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["new", "--tenant", "a b", "--scope", "engine"], "tenant must be 1 to 64"),
        (["new", "--tenant", "acme", "--scope", "root"], "use engine, reader, operator"),
        (["new", "--tenant", "*", "--scope", "engine"], 'must be ["operator"]'),
        ([*NEW, "--id", "one"], "token[1].id is the same as in an earlier entry"),
        ([*NEW, "--comment", "a\nb"], "printable"),
        (["revoke", "nobody"], "there is no token 'nobody'"),
        (["revoke", "one"], "the last token"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    new(tmp_path, "--id", "one")
    before = (tmp_path / "t.toml").read_text()
    done = token(*arguments, "--file", "t.toml", folder=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert (tmp_path / "t.toml").read_text() == before


def test_a_file_that_others_can_read_or_that_is_broken_is_not_added_to(tmp_path: Path) -> None:
    new(tmp_path, "--id", "one")
    (tmp_path / "t.toml").chmod(0o644)
    done = token(*NEW, "--file", "t.toml", folder=tmp_path)
    assert (done.returncode, "chmod 600" in done.stderr) == (2, True)
    (tmp_path / "t.toml").chmod(0o600)
    (tmp_path / "t.toml").write_text("[[token")
    done = token(*NEW, "--file", "t.toml", folder=tmp_path)
    assert (done.returncode, "is not TOML" in done.stderr) == (2, True)
    done = token(*NEW, "--file", "absent/t.toml", folder=tmp_path)
    assert (done.returncode, "No such file" in done.stderr) == (2, True)


def test_a_link_stays_a_link_and_the_owner_the_owner(tmp_path: Path) -> None:
    new(tmp_path, "--id", "one")
    (tmp_path / "t.toml").rename(tmp_path / "real.toml")
    (tmp_path / "t.toml").symlink_to("real.toml")
    if os.geteuid() == 0:
        os.chown(tmp_path / "real.toml", 65534, 65534)
    before = (tmp_path / "real.toml").stat()
    new(tmp_path, "--id", "two")
    assert (tmp_path / "t.toml").is_symlink()
    after = (tmp_path / "real.toml").stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)
    assert ids(tmp_path) == ["one", "two"]


def test_two_that_add_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "caketin", "token", *NEW, "--file", "t.toml", "--id"]
    running = [
        subprocess.Popen([*command, f"t{i}"], cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL)
        for i in range(3)
    ]
    assert [process.wait(90) for process in running] == [0, 0, 0]
    assert sorted(ids(tmp_path)) == ["t0", "t1", "t2"]


def test_an_entry_in_a_form_of_its_own_is_not_guessed_at(tmp_path: Path) -> None:
    new(tmp_path, "--id", "one")
    digest = token_digest("x").hex()
    inline = f'{{id = "two", sha256 = "{digest}", tenant = "acme", scopes = ["reader"]}}'
    one = (tmp_path / "t.toml").read_text()
    fields = ", ".join(line for line in one.splitlines() if " = " in line)
    write(tmp_path / "t.toml", f"token = [{{{fields}}}, {inline}]\n")
    done = token("revoke", "two", "--file", "t.toml", folder=tmp_path)
    assert (done.returncode, "by hand" in done.stderr) == (2, True)
    assert ids(tmp_path) == ["one", "two"]


@pytest.fixture(scope="module")
def guarded_stack(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with guarded(redis_url, Path(tmp_path_factory.mktemp("guarded"))) as found:
        yield found


def test_commands_show_the_token_of_a_file_or_of_the_variable(guarded_stack: Stack, tmp_path: Path) -> None:
    write(tmp_path / "engine", secret("acme-engine") + "\n")
    write(tmp_path / "reader", secret("acme-reader"))
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"hash_ids": [0, 1, 2]}\n{"hash_ids": [0, 1, 3]}\n')
    replay = ("replay", str(trace), "--url", guarded_stack.url)
    ls = ("ls", "namespaces", "--json", "--url", guarded_stack.url)
    done = caketin(*replay, "--token-file", "engine", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = caketin(*ls, "--token-file", "reader", folder=tmp_path)
    assert '"model": "replay"' in done.stdout or "replay" in done.stdout, done.stderr
    done = caketin(*ls, folder=tmp_path, CAKETIN_TOKEN=secret("acme-reader"))
    assert "replay" in done.stdout, done.stderr
    # Another tenant's token sees nothing, no token and a wrong scope are refused with a sentence.
    done = caketin(*ls, folder=tmp_path, CAKETIN_TOKEN=secret("globex-everything"))
    assert (done.returncode, done.stdout.strip()) == (0, "[]")
    for command, env, said in (
        (ls, {}, "a bearer token that is in force is needed"),
        (ls, {"CAKETIN_TOKEN": secret("acme-engine")}, "scope reader"),
        (replay, {"CAKETIN_TOKEN": secret("acme-reader")}, "scope engine"),
    ):
        done = caketin(*command, folder=tmp_path, **env)
        assert done.returncode == 2
        assert said in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr
        assert "ct_" not in done.stderr


def test_what_is_no_token_is_refused_without_repeating_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("CAKETIN_TOKEN", raising=False)
    assert access_token(None) is None
    for text, said in (
        ("hunter2", "holds no access token"),
        (TOKENS, "a server's token file, which holds digests only"),
        ("", "holds no access token"),
        (secret("a") + "\n" + secret("b"), "holds no access token"),
    ):
        with pytest.raises(InvalidInput) as refused:
            access_token(write(tmp_path / "token", text))
        assert said in str(refused.value)
        assert "hunter2" not in str(refused.value)
        assert secret("a") not in str(refused.value)
    with pytest.raises(InvalidInput, match="No such file"):
        access_token(tmp_path / "absent")
    monkeypatch.setenv("CAKETIN_TOKEN", "hunter2")
    with pytest.raises(InvalidInput, match="CAKETIN_TOKEN holds no access token"):
        access_token(None)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS, re.DOTALL)


def run(script: str, folder: Path, **env: str) -> str:
    """Run an example of the page as a person would type it."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    (bin_folder / "caketin").write_text(f'#!/bin/sh\nexec {sys.executable} -m caketin "$@"\n')
    (bin_folder / "caketin").chmod(0o755)
    path = f"{bin_folder}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(shutil.which("bash")), "-euc", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=environment(PATH=path, **env),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_file_of_the_page_is_one_that_the_server_takes() -> None:
    (text,) = blocks("toml")
    found = read_access_file(text)
    assert [t.token_id for t in found.tokens] == ["acme-prefill"]
    assert found.quotas["acme"].max_pages == 2_000_000
    assert tomllib.loads(text)["tenants"]["acme"]["max_bytes"] == 40_000_000_000_000


def test_the_commands_of_the_page_do_what_it_says(redis_url: str, tmp_path: Path) -> None:
    make, serve, show, rotate = blocks("bash")
    listed = run(make, tmp_path)
    assert "acme-prefill" in listed
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    assert serve.split()[:2] == ["caketin", "serve"]
    flags = [str(tmp_path / word) if word.endswith((".toml", ".pem")) else word for word in serve.split()[2:]]
    with served(redis_url, tmp_path, *flags, authority=tmp_path / "ca.pem") as process:
        here = show.replace("https://127.0.0.1:7411", process.url)
        run(here, tmp_path, SSL_CERT_FILE=str(tmp_path / "ca.pem"))
        run(rotate, tmp_path)
        ids_now = [t.token_id for t in read_access_file((tmp_path / "tokens.toml").read_text()).tokens]
        assert "acme-prefill-2" in ids_now
        assert "acme-prefill" not in ids_now


def test_every_setting_and_scope_that_the_page_names_is_there() -> None:
    flags = {flag_of(name) for name, _ in setting_fields()}
    own = {"--file", "--tenant", "--scope", "--id", "--days", "--comment", "--url"}
    assert set(re.findall(r"--[a-z][a-z-]+", DOCS)) <= flags | own
