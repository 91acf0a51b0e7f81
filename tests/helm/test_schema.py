"""values.schema.json: wrong values are refused before anything is installed, in words that name the value."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.chart import CASES, CHART, defaults, render

pytestmark = pytest.mark.helm

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"apii": {}}, "'apii' not allowed"),
    ({"api": {"replica": 2}}, "'replica' not allowed"),
    ({"api": {"replicas": "two"}}, "at '/api/replicas': got string, want integer"),
    ({"api": {"replicas": 0}}, "at '/api/replicas'"),
    ({"api": {"config": {"lease_secondz": 3}}}, "'lease_secondz' not allowed"),
    ({"api": {"config": {"redis_url": "redis://x"}}}, "'redis_url' not allowed"),
    ({"api": {"config": {"log_level": "loud"}}}, "at '/api/config/log_level'"),
    ({"api": {"config": {"max_body_bytes": 5}}}, "at '/api/config/max_body_bytes': minimum"),
    ({"api": {"service": {"port": 99999}}}, "at '/api/service/port': maximum"),
    ({"api": {"extraEnv": {"A": "b"}}}, "at '/api/extraEnv': got object, want array"),
    ({"api": {"httpRoute": {"enabled": True}}}, "at '/api/httpRoute/parentRefs'"),
    ({"store": {"protocol": "carrier-pigeon"}}, "at '/store/protocol': value must be one of 'tcp', 'rdma'"),
    ({"rdma": {"resourceName": "ib"}}, "at '/rdma/resourceName'"),
    ({"tls": {"enabled": True}}, "at '/tls/existingSecret': minLength"),
    ({"redis": {"mode": "sometimes"}}, "at '/redis/mode': value must be one of 'bundled', 'external'"),
    ({"redis": {"mode": "external"}}, "at '/redis/external/url'"),
    ({"redis": {"external": {"url": "http://redis"}}}, "at '/redis/external/url'"),
    ({"mooncake": {"mode": "external"}}, "at '/mooncake/external/master'"),
    ({"mooncake": {"storage": {"segmentSize": "lots"}}}, "at '/mooncake/storage/segmentSize'"),
    ({"mooncake": {"storage": {"hugepages": "4Ki"}}}, "at '/mooncake/storage/hugepages'"),
    ({"agent": {"hostMemory": "-1Gi"}}, "at '/agent/hostMemory'"),
    ({"agent": {"sharedDir": "dev/shm"}}, "at '/agent/sharedDir'"),
    (
        {"auth": {"tokens": [{"id": "a", "tenant": "b", "scopes": ["engine"], "sha256": "ct_secret"}]}},
        "at '/auth/tokens/0/sha256'",
    ),
    (
        {"auth": {"tokens": [{"id": "a", "tenant": "b", "scopes": ["root"], "sha256": "ab" * 32}]}},
        "at '/auth/tokens/0/scopes/0'",
    ),
    ({"networkPolicy": {"nodeCIDRs": ["everywhere"]}}, "at '/networkPolicy/nodeCIDRs/0'"),
]

FAILED_BY_TEMPLATE: list[tuple[dict[str, Any], str]] = [
    ({"api": {"image": {"tag": "latest"}}}, "image caketin/dataplane has the tag latest"),
    (
        {"redis": {"mode": "external", "external": {"url": "redis://:secret@host:6379/0"}}},
        "redis.external.url holds a password, which belongs in a Secret",
    ),
    (
        {"redis": {"mode": "external", "external": {"hosts": ["a:1"], "topology": "sentinel"}}},
        "redis.external.service is needed",
    ),
    ({"mooncake": {"storage": {"portRange": {"first": 16000, "last": 15000}}}}, "portRange"),
    ({"api": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "minReplicas"),
    ({"mooncake": {"storage": {"segmentSize": "1Mi"}}}, "segmentSize: a node lends 16Mi or more"),
    (
        {"mooncake": {"storage": {"segmentSize": "1536Mi", "hugepages": "1Gi"}}},
        "segmentSize 1536Mi is no multiple of mooncake.storage.hugepages 1Gi",
    ),
    (
        {"store": {"protocol": "rdma"}, "rdma": {"devices": "tp0=mlx5_0;tp1=mlx5_1"}},
        "rdma.devices names devices for ranks only",
    ),
    ({"agent": {"enabled": True}, "auth": {"existingSecret": "mine"}}, "auth.engineTokenSecret is needed"),
]


@pytest.mark.parametrize(("values", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_a_wrong_value_is_refused_and_named_smoke(values: dict[str, Any], says: str) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmValuesError) as caught:
        render(values)
    assert says in str(caught.value)


@pytest.mark.parametrize(("values", "says"), FAILED_BY_TEMPLATE, ids=[s for _, s in FAILED_BY_TEMPLATE])
def test_values_that_do_not_go_together_are_refused_in_a_sentence(values: dict[str, Any], says: str) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError) as caught:
        render(values)
    assert says in str(caught.value)


def test_the_defaults_and_all_cases_are_accepted() -> None:
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        for values in CASES.values():
            chart.validate_schema(values)


def test_every_value_has_a_place_in_the_schema() -> None:
    import json

    schema = json.loads((CHART / "values.schema.json").read_text())

    def walk(values: dict[str, Any], at: dict[str, Any], path: str) -> None:
        while "$ref" in at:
            at = schema["$defs"][at["$ref"].rsplit("/", 1)[1]]
        if "properties" not in at:
            return
        assert at.get("additionalProperties") is False, f"{path} takes any name"
        assert set(values) <= set(at["properties"]), path
        missing = set(at["properties"]) - set(values) - {"global", "claims", "requests", "limits"}
        assert not missing, f"values.yaml says nothing of {path}: {missing}"
        for name, value in values.items():
            if isinstance(value, dict):
                walk(value, at["properties"][name], f"{path}.{name}")

    walk(defaults(), schema, "")
