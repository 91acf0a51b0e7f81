"""The hot calls find namespace and caller by hand: they refuse what FastAPI's solver would have refused."""

from __future__ import annotations

import pytest

CALLS = ["lookup", "commit", "missing"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "namespace",
    [
        "0123456789abcde",
        "0123456789abcdef0",
        "0123456789ABCDEF",
        "0123456789abcdef%0A",
        "%00123456789abcde",
        "x",
    ],
)
def test_a_namespace_id_of_another_form_is_named_before_the_body_is_read(client, call, namespace):
    answer = client.post(f"/v1/namespaces/{namespace}/{call}", content=b"no JSON")
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    assert (error["field"], error["code"]) == ("ns", "bad_format")


@pytest.mark.parametrize("call", CALLS)
def test_a_good_one_goes_on_to_the_body(client, call):
    answer = client.post(f"/v1/namespaces/0123456789abcdef/{call}", json={"page_hashes": 3})
    assert answer.status_code == 422, answer.text
    assert "ns" not in {error["field"] for error in answer.json()["errors"]}


def test_the_documentation_still_has_the_parameter(client):
    paths = client.get("/openapi.json").json()["paths"]
    for call in CALLS:
        (parameter,) = paths[f"/v1/namespaces/{{ns}}/{call}"]["post"]["parameters"]
        assert (parameter["name"], parameter["in"], parameter["required"]) == ("ns", "path", True)
        assert parameter["schema"]["pattern"] == "^[0-9a-f]{16}$"
