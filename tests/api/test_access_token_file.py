"""The token file on disk: rotation, what is refused, and what stays in force."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from api.token_file import TokenFile, _stamp, mode_problem, open_token_file
from metadata.errors import InvalidInput
from metadata.quota_rules import Quota
from tests.api.access_scene import TOKENS, bearer, client_of, entry, guarded, secret, write

ONE, TWO = entry("one", "acme", "engine"), entry("two", "acme", "engine")


def look_again(file: TokenFile) -> None:
    file._next_look = 0.0


def known(file: TokenFile) -> list[str]:
    look_again(file)
    return [name for name in ("one", "two") if file.table.find(secret(name)) is not None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tokens.toml", ONE)


def rename_over(path: Path, text: str) -> None:
    write(path.with_suffix(".new"), text).replace(path)


def in_place(path: Path, text: str) -> None:
    path.write_text(text)


def same_time_and_size(path: Path, text: str) -> None:
    """What an editor or a copy that keeps times leaves behind."""
    before = path.stat()
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("way", [rename_over, in_place, same_time_and_size])
def test_a_new_file_is_in_force_without_a_restart(path: Path, way: Callable[[Path, str], None]) -> None:
    file = TokenFile(path)
    assert known(file) == ["one"]
    way(path, TWO)
    assert known(file) == ["two"]
    way(path, ONE + TWO)
    assert known(file) == ["one", "two"]


def test_a_change_within_one_tick_of_the_clock_is_seen(path: Path) -> None:
    file = TokenFile(path)
    in_place(path, TWO)
    # As if the first reading had been of this very stamp: two writes within a tick of the clock.
    file._stamp = _stamp(path.stat())
    assert known(file) == ["two"]


def test_the_file_is_looked_at_once_a_second_at_most(path: Path) -> None:
    file = TokenFile(path)
    rename_over(path, TWO)
    assert file.table.find(secret("two")) is None
    deadline = time.monotonic() + 5
    while file.table.find(secret("two")) is None:
        assert time.monotonic() < deadline, "the new file did not come into force"
        time.sleep(0.02)


def test_a_file_that_has_settled_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(path, (1, 1))
    file = TokenFile(path)
    monkeypatch.setattr("api.token_file._is_settled", lambda _stamp: True)
    monkeypatch.setattr("api.token_file._read", lambda _path: pytest.fail("was read again"))
    assert known(file) == ["one"]


def remove(path: Path) -> None:
    path.unlink()


def turn_into_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def turn_into_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def let_the_group_read(path: Path) -> None:
    rename_over(path, TWO)
    path.chmod(0o640)


def let_anybody_write(path: Path) -> None:
    rename_over(path, TWO)
    path.chmod(0o602)


BROKEN = {
    "empty": (lambda path: in_place(path, ""), "token has 0 entries"),
    "half": (lambda path: in_place(path, TWO[: TWO.index("scopes")]), "token[0].scopes is missing"),
    "no TOML": (lambda path: in_place(path, "[[token"), "is not TOML"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe"), "is not UTF-8 text"),
    "too large": (lambda path: in_place(path, ONE + "#" * (1 << 20)), "more than 1048576 bytes"),
    "removed": (remove, "cannot be read: No such file"),
    "a folder": (turn_into_a_folder, "Is a directory"),
    "a pipe": (turn_into_a_pipe, "no regular file"),
    "read by the group": (let_the_group_read, "has mode 0640"),
    "written by anybody": (let_anybody_write, "has mode 0602"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_cannot_be_used_keeps_the_old_tokens_and_says_why(path: Path, what: str) -> None:
    breaks, said = BROKEN[what]
    file = TokenFile(path)
    breaks(path)
    with capture_logs() as logged:
        for _ in range(3):
            assert known(file) == ["one"]
    assert said in (file.problem or "")
    assert "still using the 1 tokens of the last good file" in file.state()
    assert said in file.state()
    assert str(path.parent) not in file.state()
    # Said once, not every second.
    (line,) = logged
    assert line["log_level"] == "error"
    assert said in line["problem"]


@pytest.mark.parametrize("text", [ONE, TWO])
def test_a_file_that_is_mended_is_in_force_again(path: Path, text: str) -> None:
    file = TokenFile(path)
    in_place(path, "[[token")
    assert known(file) == ["one"]
    assert file.problem is not None
    rename_over(path, text)
    assert known(file) == (["one"] if text == ONE else ["two"])
    assert file.problem is None
    assert file.state() == "1 tokens"


def test_a_mode_that_is_mended_is_enough(path: Path) -> None:
    file = TokenFile(path)
    let_the_group_read(path)
    assert known(file) == ["one"]
    path.chmod(0o600)
    assert known(file) == ["two"]


def test_a_secret_in_the_wrong_place_of_a_new_file_is_in_no_log(path: Path) -> None:
    file = TokenFile(path)
    for text in (
        ONE.replace('tenant = "acme"', f'tenant = "{secret("one")}x "'),
        f"[[token]]\nid = {secret('one')}\n",
        f'{secret("one")} = "x"\n' + ONE,
    ):
        in_place(path, text)
        with capture_logs() as logged:
            assert known(file) == ["one"]
        assert "the old tokens stay" in str(logged)
        assert secret("one")[3:] not in str(logged) + file.state()


@pytest.mark.parametrize("what", BROKEN)
def test_a_server_does_not_start_on_a_file_that_cannot_be_used(path: Path, what: str) -> None:
    breaks, said = BROKEN[what]
    breaks(path)
    with pytest.raises(InvalidInput) as refused:
        open_token_file(str(path))
    (error,) = refused.value.errors
    assert error.field == "token_file"
    assert said in error.detail


def test_no_path_is_no_token_file() -> None:
    assert open_token_file("") is None


@pytest.mark.parametrize(
    ("mode", "owner", "me", "fine"),
    [
        (0o100600, 7, 7, True),
        (0o100400, 7, 7, True),
        (0o100600, 0, 0, True),
        (0o100640, 7, 7, False),
        (0o100604, 7, 7, False),
        (0o100620, 7, 7, False),
        (0o100610, 7, 7, False),
        (0o100600, 8, 7, False),
        (0o100600, 8, 0, False),
        # A mounted secret: root's, and readable by the group of an ordinary user.
        (0o100440, 0, 7, True),
        (0o100640, 0, 7, True),
        (0o100440, 0, 0, False),
        (0o100644, 0, 7, False),
        (0o100660, 0, 7, False),
    ],
)
def test_only_a_file_that_nobody_else_can_read_or_change_is_believed(mode, owner, me, fine) -> None:
    assert (mode_problem(mode, owner, me) is None) == fine


def test_quotas_come_with_the_tokens(path: Path) -> None:
    file = TokenFile(path)
    assert file.quotas == {}
    rename_over(path, ONE + "[tenants.acme]\nmax_pages = 5\n")
    look_again(file)
    assert file.quotas == {"acme": Quota(max_pages=5)}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_tokens_are_rotated_under_a_server_that_runs(redis_url: str, tmp_path: Path) -> None:
    with guarded(redis_url, tmp_path) as stack, httpx.Client(base_url=stack.url) as http:
        path = tmp_path / "tokens.toml"

        def status(name: str) -> int:
            return http.get("/v1/engines", headers=bearer(name)).status_code

        def detail() -> str:
            checks = http.get("/readyz", headers=bearer("everybody")).json()
            assert checks["ready"]
            return next(c["detail"] for c in checks["checks"] if c["name"] == "tokens")

        assert (status("acme-reader"), status("new-reader")) == (200, 401)
        rename_over(path, TOKENS + entry("new-reader", "acme", "reader"))
        wait_until(lambda: status("new-reader") == 200, "the new token did not come into force")
        assert status("acme-reader") == 200
        rename_over(path, entry("new-reader", "acme", "reader") + entry("everybody", "*", "operator"))
        wait_until(lambda: status("acme-reader") == 401, "the old token stayed in force")
        in_place(path, "")
        wait_until(lambda: "last good file" in detail(), "the broken file was not told")
        assert (status("acme-reader"), status("new-reader")) == (401, 200)


def test_a_token_that_expires_while_the_server_runs_is_refused(redis_url: str, tmp_path: Path) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=2)
    text = entry("brief", "acme", "reader", expires=soon)
    with guarded(redis_url, tmp_path, text) as stack, client_of(stack, "brief") as http:
        assert http.get("/v1/engines").status_code == 200
        wait_until(lambda: http.get("/v1/engines").status_code == 401, "the token did not expire")
