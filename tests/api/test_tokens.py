"""The token file's form, digests, and finding a token; pure."""

from __future__ import annotations

import hashlib
import tomllib
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.tokens import (
    MAX_TOKENS,
    SCOPES,
    AccessFile,
    Token,
    TokenTable,
    bearer,
    entry_text,
    read_access_file,
    token_digest,
    token_text,
)
from metadata.errors import InvalidInput
from metadata.quota_rules import Quota

KEY = b"k" * 32
ONE = token_text(b"\1" * 32)
DIGEST = hashlib.sha256(ONE.encode()).hexdigest()
ENTRY = f'[[token]]\nid = "one"\nsha256 = "{DIGEST}"\ntenant = "acme"\nscopes = ["engine"]\n'


def faults(text: str) -> list[tuple[str, str]]:
    with pytest.raises(InvalidInput) as refused:
        read_access_file(text)
    return [(e.field, e.code) for e in refused.value.errors]


def changed(**changes: str | None) -> str:
    """The entry with these TOML values in place of its own; None leaves the name out."""
    values = {
        "id": '"one"',
        "sha256": f'"{DIGEST}"',
        "tenant": '"acme"',
        "scopes": '["engine"]',
        **changes,
    }
    return "[[token]]\n" + "".join(f"{n} = {v}\n" for n, v in values.items() if v is not None)


def test_a_token_is_a_prefix_and_256_bits_and_the_file_keeps_its_sha256() -> None:
    assert ONE == "ct_AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE"
    assert token_digest(ONE).hex() == DIGEST


def test_an_entry_is_read_as_it_is_written() -> None:
    text = ENTRY + 'expires = 2027-01-31T12:00:00+01:00\ncomment = "the \\"prefill\\" fleet"\n'
    (token,) = read_access_file(text).tokens
    assert token == Token(
        "one",
        bytes.fromhex(DIGEST),
        "acme",
        frozenset({"engine"}),
        datetime(2027, 1, 31, 11, tzinfo=UTC),
        'the "prefill" fleet',
    )
    assert read_access_file(entry_text(token)).tokens == (token,)


names = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
moments = st.datetimes(min_value=datetime(1970, 1, 1), timezones=st.just(UTC)).map(
    lambda found: found.replace(microsecond=0)
)
comments = st.text(max_size=200).filter(str.isprintable)


@given(
    names, st.binary(min_size=32, max_size=32), names, st.sets(st.sampled_from(SCOPES), min_size=1), moments
)
def test_every_entry_that_is_written_is_read_back(name, secret, tenant, scopes, expires) -> None:
    token = Token(name, secret, tenant, frozenset(scopes), expires)
    assert read_access_file(entry_text(token)).tokens == (token,)


@given(comments)
def test_every_comment_that_is_written_is_read_back(comment) -> None:
    token = Token("one", b"\1" * 32, "acme", frozenset({"engine"}), comment=comment)
    assert read_access_file(entry_text(token)).tokens == (token,)


@pytest.mark.parametrize(
    "token",
    [
        Token('x"\nid2 = "y', b"\1" * 32, "acme", frozenset({"engine"})),
        Token("x", b"\1" * 32, 'a"]', frozenset({"engine"})),
        Token("x", b"\1" * 32, "acme", frozenset({"engine"}), comment="two\nlines"),
        Token("x", b"\1" * 32, "*", frozenset({"engine", "operator"})),
        Token("x", b"\1" * 32, "acme", frozenset()),
        Token("x", b"\1", "acme", frozenset({"engine"})),
    ],
)
def test_an_entry_that_the_file_could_not_hold_is_not_written(token: Token) -> None:
    with pytest.raises(InvalidInput):
        entry_text(token)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("id", None, "missing"),
        ("id", "1", "invalid"),
        ("id", '"two words"', "invalid"),
        ("id", f'"{"x" * 65}"', "invalid"),
        ("sha256", None, "missing"),
        ("sha256", f'"{DIGEST.upper()}"', "invalid"),
        ("sha256", f'"{ONE}"', "invalid"),
        ("tenant", None, "missing"),
        ("tenant", '""', "invalid"),
        ("tenant", '"a/b"', "invalid"),
        ("scopes", None, "missing"),
        ("scopes", "[]", "invalid"),
        ("scopes", '"engine"', "invalid"),
        ("scopes", '["engine", "root"]', "invalid"),
        ("scopes", '[["engine"]]', "invalid"),
        ("expires", '"tomorrow"', "invalid"),
        ("expires", "2027-01-31T12:00:00", "invalid"),
        ("expires", "2027-01-31", "invalid"),
        ("comment", "1", "invalid"),
        ("comment", '"a\\nb"', "invalid"),
        ("comment", f'"{"x" * 201}"', "invalid"),
        ("scope", '["engine"]', "unknown"),
    ],
)
def test_a_wrong_value_is_named_by_entry_and_field_and_not_repeated(name, value, code) -> None:
    text = changed(**{name: value})
    assert faults(text) == [(f"token[0].{name}", code)]
    with pytest.raises(InvalidInput) as refused:
        read_access_file(text)
    assert ONE not in str(refused.value)
    assert DIGEST[:8] not in str(refused.value).lower()


def test_all_faults_of_a_file_are_told_at_once() -> None:
    text = changed(id="1") + changed(id='"two"', scopes="[]", tenant="7")
    # The second entry has the first one's digest, too.
    assert faults(text) == [
        ("token[0].id", "invalid"),
        ("token[1].scopes", "invalid"),
        ("token[1].tenant", "invalid"),
        ("token[1].sha256", "twice"),
    ]


def test_two_entries_of_one_id_or_one_digest_are_refused() -> None:
    other = "0" * 64
    assert faults(ENTRY + changed(sha256=f'"{other}"')) == [("token[1].id", "twice")]
    assert faults(ENTRY + changed(id='"two"')) == [("token[1].sha256", "twice")]


def test_two_faulty_entries_are_not_said_to_be_the_same() -> None:
    assert faults(changed(id="1", sha256="1") * 2) == [
        ("token[0].id", "invalid"),
        ("token[0].sha256", "invalid"),
        ("token[1].id", "invalid"),
        ("token[1].sha256", "invalid"),
    ]


@pytest.mark.parametrize("text", ["", "# nothing\n", "token = 1", "[tenants.acme]\nmax_pages = 1\n"])
def test_a_file_without_a_token_is_refused(text: str) -> None:
    assert faults(text) == [("token", "count")]


def test_more_tokens_than_the_bound_are_refused() -> None:
    assert faults("token = [" + "1," * (MAX_TOKENS + 1) + "]") == [("token", "count")]


def test_an_entry_that_is_no_table_lacks_everything() -> None:
    assert [code for _, code in faults("token = [1]")] == ["missing"] * 4


def test_what_is_no_toml_is_refused_without_repeating_it() -> None:
    with pytest.raises(InvalidInput, match="not TOML") as refused:
        read_access_file(f"[[token]]\nsha256 = {ONE}\n")
    assert ONE[3:10] not in str(refused.value)


def test_a_name_that_is_a_token_is_not_repeated() -> None:
    assert faults(ENTRY + f'{ONE} = "x"\n') == [("an entry", "unknown")]
    assert faults(f"{ONE} = 1\n{ENTRY}") == [("an entry", "unknown")]


@pytest.mark.parametrize("scopes", ['["engine"]', '["reader"]', '["operator", "engine"]'])
def test_only_an_operator_is_of_all_tenants(scopes: str) -> None:
    assert faults(changed(tenant='"*"', scopes=scopes)) == [("token[0].scopes", "all_tenants")]
    (token,) = read_access_file(changed(tenant='"*"', scopes='["operator"]')).tokens
    assert token.tenant == "*"


def test_quotas_are_read_by_tenant_and_leave_open_what_they_do_not_say() -> None:
    text = ENTRY + "[tenants.acme]\nmax_pages = 5\n[tenants.b]\nmax_bytes = 0\n[tenants.c]\n"
    assert read_access_file(text).quotas == {
        "acme": Quota(max_pages=5),
        "b": Quota(max_bytes=0),
        "c": Quota(),
    }
    assert read_access_file(ENTRY) == AccessFile(read_access_file(ENTRY).tokens, {})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[tenants.acme]\nmax_pages = -1\n", ("tenants.acme.max_pages", "invalid")),
        ("[tenants.acme]\nmax_pages = true\n", ("tenants.acme.max_pages", "invalid")),
        ("[tenants.acme]\nmax_bytes = 1.5\n", ("tenants.acme.max_bytes", "invalid")),
        ("[tenants.acme]\nmax_page = 1\n", ("tenants.acme.max_page", "unknown")),
        ('[tenants."a b"]\nmax_pages = 1\n', ("tenants.a b", "bad_name")),
        ("[tenants]\nacme = 1\n", None),
    ],
)
def test_a_wrong_quota_is_named(text: str, fault) -> None:
    if fault is None:
        assert read_access_file(ENTRY + text).quotas == {"acme": Quota()}
        return
    assert faults(ENTRY + text) == [fault]


def test_tenants_that_are_no_table_are_refused() -> None:
    assert faults("tenants = 1\n" + ENTRY) == [("tenants", "wrong_type")]


def table(*secrets: bytes) -> TokenTable:
    made = [Token(f"t{i}", token_digest(token_text(s)), "acme", frozenset()) for i, s in enumerate(secrets)]
    return TokenTable(made, KEY)


def test_a_token_is_found_and_every_other_text_is_not() -> None:
    known = table(b"\1" * 32, b"\2" * 32)
    assert len(known) == 2
    found = known.find(ONE)
    assert found is not None
    assert found.token_id == "t0"
    # Neither what the file keeps, nor a token that is nearly right, nor nothing.
    for other in (DIGEST, ONE[:-1] + "F", ONE + " ", "", token_text(b"\3" * 32)):
        assert known.find(other) is None


def test_a_digest_of_zeros_is_not_what_stands_in_for_an_unknown_token() -> None:
    zeros = TokenTable([Token("t", b"\0" * 32, "acme", frozenset())], KEY)
    assert zeros.find(ONE) is None


@given(
    st.lists(st.binary(min_size=32, max_size=32), unique=True, max_size=20),
    st.binary(min_size=32, max_size=32),
)
def test_exactly_the_tokens_of_the_table_are_found(secrets, other) -> None:
    known = table(*secrets)
    for i, secret in enumerate(secrets):
        found = known.find(token_text(secret))
        assert found is not None
        assert found.token_id == f"t{i}"
    assert (known.find(token_text(other)) is not None) == (other in secrets)


def test_the_last_word_has_the_digest_and_not_the_place_in_the_table() -> None:
    class OnePlace(TokenTable):
        def _place(self, digest: bytes) -> bytes:
            return b"one"

    known = OnePlace([Token("t", token_digest(ONE), "acme", frozenset())], KEY)
    assert known.find(ONE) is not None
    assert known.find(token_text(b"\3" * 32)) is None


def test_places_in_the_table_depend_on_the_key_so_that_nobody_outside_can_steer_them() -> None:
    token = Token("t", token_digest(ONE), "acme", frozenset())
    assert set(TokenTable([token], KEY)._places) != set(TokenTable([token], b"other" * 6)._places)


@pytest.mark.parametrize("header", [f"Bearer {ONE}", f"bearer {ONE}", f"BEARER   {ONE} "])
def test_a_bearer_header_gives_its_token(header: str) -> None:
    assert bearer(header) == ONE


@pytest.mark.parametrize(
    "header",
    [
        *("", "Bearer", "Bearer ", ONE, f"Basic {ONE}", f"Bearer {ONE}x", f"Bearer {ONE} {ONE}"),
        *(f"Bearer{ONE}", "Bearer hunter2", f"Bearer {ONE}\n", f"Bearer\t{ONE}", f"Bearer {ONE[:-1]}é"),
        f" Bearer {ONE}",
    ],
)
def test_every_other_header_gives_none(header: str) -> None:
    assert bearer(header) is None


def test_a_token_expires_at_its_moment() -> None:
    moment = datetime(2027, 1, 31, tzinfo=UTC)
    token = Token("t", b"", "acme", frozenset(), moment)
    assert not token.has_expired(moment - timedelta(seconds=1))
    assert token.has_expired(moment)
    assert not Token("t", b"", "acme", frozenset()).has_expired(moment)


def test_no_digest_is_shown_when_a_token_is_printed() -> None:
    token = Token("t", token_digest(ONE), "acme", frozenset({"engine"}))
    assert repr(token_digest(ONE)) not in repr(token)


def test_the_file_of_the_pure_reader_is_plain_toml() -> None:
    assert tomllib.loads(ENTRY)["token"][0]["tenant"] == "acme"
