import string
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from metadata.errors import InvalidInput
from metadata.namespace import MAX_PAGE_SIZE, MAX_TEXT, Namespace, fingerprint
from tests.metadata.specs import namespaces

ACME = Namespace("acme", "Qwen/Qwen3-32B", "main", 64)


def faults(error: pytest.ExceptionInfo[InvalidInput]) -> list[str]:
    return [e.field for e in error.value.errors]


def test_the_id_is_sixteen_hex_digits_and_does_not_change_between_releases():
    # Pinned: another value would orphan everything that is stored.
    assert ACME.namespace_id == "4039dcbea939f42e"
    assert set(ACME.namespace_id) <= set(string.hexdigits.lower())


@pytest.mark.parametrize(
    "changed",
    [
        {"tenant": "acm"},
        {"model": "Qwen/Qwen3-32B "},
        {"revision": "Main"},
        {"page_size": 65},
        {"hash_kind": "bigram"},
        {"salt_fingerprint": fingerprint("a")},
    ],
    ids=lambda c: next(iter(c)),
)
def test_every_dimension_is_part_of_the_id(changed):
    assert set(changed) <= {f.name for f in fields(Namespace)}
    assert replace(ACME, **changed).namespace_id != ACME.namespace_id


def test_the_dimensions_above_are_all_there_are():
    assert {f.name for f in fields(Namespace)} == {
        "tenant", "model", "revision", "page_size", "hash_kind", "salt_fingerprint",
    }  # fmt: skip


@given(namespaces, namespaces)
def test_ids_are_equal_exactly_when_the_identities_are(one, other):
    assert (one.namespace_id == other.namespace_id) == (one == other)


tricky = st.text(st.sampled_from('ab,":\\/{}|\x7e é'), min_size=1, max_size=6)


@given(tricky, tricky, tricky, st.data())
def test_no_delimiter_moves_text_from_one_field_to_the_next_unseen(tenant, model, revision, data):
    joined = tenant + model + revision
    cuts = sorted(data.draw(st.tuples(*[st.integers(1, len(joined) - 1)] * 2)))
    assume(cuts[0] < cuts[1])
    other = Namespace(joined[: cuts[0]], joined[cuts[0] : cuts[1]], joined[cuts[1] :], 64)
    mine = Namespace(tenant, model, revision, 64)
    assert (mine.namespace_id == other.namespace_id) == (mine == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "b", "c"), ("a,b", "c", "c")),
        (("a", 'b","model":"x', "c"), ("a", "b", "c")),
        (("a", "\\u00e9", "c"), ("a", "é", "c")),
        (("a", "é", "c"), ("a", "e\u0301", "c")),
    ],
)
def test_escapes_and_quotes_do_not_make_two_identities_one(one, other):
    assert Namespace(*one, 64).namespace_id != Namespace(*other, 64).namespace_id


@given(namespaces)
def test_json_gives_the_namespace_back(namespace):
    assert Namespace.from_json(namespace.to_json()) == namespace


def test_a_namespace_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        ACME.model = "other"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"tenant": ""}, "tenant"),
        ({"tenant": None}, "tenant"),
        ({"model": "a\nb"}, "model"),
        ({"model": "\ud800"}, "model"),
        ({"model": 5}, "model"),
        ({"revision": "x" * (MAX_TEXT + 1)}, "revision"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": MAX_PAGE_SIZE + 1}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"page_size": 64.0}, "page_size"),
        ({"page_size": "64"}, "page_size"),
        ({"hash_kind": "trigram"}, "hash_kind"),
        ({"hash_kind": None}, "hash_kind"),
        ({"salt_fingerprint": ""}, "salt_fingerprint"),
        ({"salt_fingerprint": "A" * 32}, "salt_fingerprint"),
        ({"salt_fingerprint": 5}, "salt_fingerprint"),
    ],
    ids=str,
)
def test_a_value_that_breaks_a_rule_is_refused_by_field(changed, field):
    with pytest.raises(InvalidInput) as error:
        replace(ACME, **changed)
    assert faults(error) == [field]


def test_limits_are_inclusive():
    assert replace(ACME, page_size=MAX_PAGE_SIZE, model="x" * MAX_TEXT).page_size == MAX_PAGE_SIZE


def test_every_fault_is_listed_at_once():
    with pytest.raises(InvalidInput) as error:
        Namespace.from_json({})
    assert faults(error) == ["tenant", "model", "revision", "page_size", "hash_kind"]


@given(st.text(min_size=1), st.text(min_size=1))
def test_a_fingerprint_names_a_salt_one_way(salt, other):
    name = fingerprint(salt)
    assert len(name) == 32
    assert set(name) <= set("0123456789abcdef")
    assert (name == fingerprint(other)) == (salt == other)


def test_no_salt_has_no_fingerprint():
    assert fingerprint(None) is fingerprint("") is None


def test_a_refused_salt_is_not_repeated_in_the_error():
    with pytest.raises(InvalidInput) as error:
        fingerprint("hush\ud800")
    assert faults(error) == ["namespace_salt"]
    assert "hush" not in str(error.value)
    assert error.value.__cause__ is None
    with pytest.raises(InvalidInput) as error:
        replace(ACME, salt_fingerprint="hush")
    assert "hush" not in str(error.value)
