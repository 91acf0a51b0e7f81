"""The chart with the real Helm: it lints, renders with all kinds of values, and Kubernetes knows it all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.chart import CASES, CHART, NAMESPACE, RELEASE, Rendered, flipped, matrix, render, switches

pytestmark = [pytest.mark.helm, pytest.mark.timeout(300)]

MATRIX = matrix()
FOREIGN = {"monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1"}
"""Groups of objects whose schemas Kubernetes itself does not have."""


@pytest.fixture(scope="module")
def renderings() -> dict[str, Rendered]:
    return {name: render(values) for name, values in MATRIX.items()}


def api_versions() -> list[str]:
    import kubernetes_validate

    newest = sorted(
        {tuple(int(n) for n in v.split(".")[:2]) for v in kubernetes_validate.utils.all_versions()}
    )[-3:]
    return [f"{major}.{minor}" for major, minor in newest]


@pytest.mark.parametrize("case", CASES)
def test_lint_is_strict_and_finds_nothing_smoke(case: str) -> None:
    import helm_python

    found = helm_python.lint(str(CHART), CASES[case], strict=True, namespace=NAMESPACE)
    assert found["errors"] == []
    # Severity 1 is information: the chart has no icon.
    assert [m for m in found["messages"] if m["severity"] > 1] == []


def test_kubernetes_knows_every_object_in_its_three_newest_versions_smoke(
    renderings: dict[str, Rendered],
) -> None:
    import kubernetes_validate

    versions = api_versions()
    assert len(versions) == 3
    checked = 0
    seen: set[str] = set()
    for case, rendered in renderings.items():
        for o in rendered.objects:
            text = repr(o)
            if o["apiVersion"] in FOREIGN or text in seen:
                continue
            seen.add(text)
            for version in versions:
                try:
                    kubernetes_validate.validate(o, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    pytest.fail(f"{case}: {o['kind']} {o['metadata']['name']}, {version}: {error.message}")
                checked += 1
    assert checked > 100


def test_a_wrong_field_would_be_seen() -> None:
    import kubernetes_validate

    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containerz": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, api_versions()[-1], strict=True)


def test_every_object_is_in_the_releases_namespace_and_no_name_comes_twice(
    renderings: dict[str, Rendered],
) -> None:
    for case, rendered in renderings.items():
        names = [(o["kind"], o["metadata"]["name"]) for o in rendered.objects]
        assert len(names) == len(set(names)), case
        assert {o["metadata"]["namespace"] for o in rendered.objects} == {NAMESPACE}, case


def test_selectors_find_the_pods_they_mean(renderings: dict[str, Rendered]) -> None:
    for case, rendered in renderings.items():
        pods = [
            o["spec"]["template"]["metadata"]["labels"] if o["kind"] != "Pod" else o["metadata"]["labels"]
            for o in rendered.objects
            if o["kind"] == "Pod" or "template" in o.get("spec", {})
        ]
        for o in rendered.objects:
            spec = o.get("spec", {})
            selector = {
                "Service": spec.get("selector"),
                "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels"),
                "PodDisruptionBudget": (spec.get("selector") or {}).get("matchLabels"),
            }.get(o["kind"])
            if selector is None:
                continue
            found = [labels for labels in pods if selector.items() <= labels.items()]
            assert len(found) == 1, f"{case}: {o['kind']} {o['metadata']['name']} selects {len(found)} kinds"


def test_what_pods_mount_and_read_is_made_by_the_chart_or_named_in_the_values(
    renderings: dict[str, Rendered],
) -> None:
    for case, rendered in renderings.items():
        made = {o["metadata"]["name"] for o in rendered.objects if o["kind"] in {"Secret", "ConfigMap"}}
        for pod, spec in rendered.pods().items():
            volumes = spec.get("volumes", [])
            named = {v["secret"]["secretName"] for v in volumes if "secret" in v}
            named |= {v["configMap"]["name"] for v in volumes if "configMap" in v}
            for c in [*spec.get("initContainers", []), *spec["containers"]]:
                refs = [e["valueFrom"].get("secretKeyRef") for e in c.get("env", []) if "valueFrom" in e]
                named |= {r["name"] for r in refs if r}
                mounted = {m["name"] for m in c.get("volumeMounts", [])}
                claims = {"data"}
                assert mounted <= {v["name"] for v in volumes} | claims, f"{case}: {pod}"
            assert named - made <= names_in(MATRIX[case]), f"{case}: {pod} needs {named - made}"


def names_in(values: Any) -> set[str]:
    if isinstance(values, dict):
        return set().union(*(names_in(v) for v in values.values()))
    return {values} if isinstance(values, str) else set()


def test_long_names_stay_within_what_kubernetes_takes() -> None:
    for o in render({}, name="a-release-whose-name-is-as-long-as-helm-allows-it-53c").objects:
        assert len(o["metadata"]["name"]) <= 63
        assert all(len(v) <= 63 for v in o["metadata"]["labels"].values())


def test_a_release_of_the_charts_own_name_is_not_called_twice() -> None:
    assert render({}, name="caketin").of("Deployment", "caketin-api")
    assert render({}, name="prod").of("Deployment", "prod-caketin-api")


def test_every_switch_changes_something(renderings: dict[str, Rendered]) -> None:
    # Switches that only mean something together with another one.
    together: dict[str, dict[str, Any]] = {
        "rdma.hostNetwork": {"store": {"protocol": "rdma"}},
        "agent.hostNetwork": {"agent": {"enabled": True}},
        "agent.metrics.enabled": {"agent": {"enabled": True}},
        "redis.external.tls": {"redis": {"mode": "external", "external": {"hosts": ["redis:6379"]}}},
    }
    for name, on in switches():
        base = together.get(name, {})
        plain = _without_secrets(render(base))
        other = _without_secrets(render(_merged(base, flipped(name, on))))
        assert plain != other, f"{name} changes nothing"


def _without_secrets(rendered: Rendered) -> list[dict[str, Any]]:
    return [o for o in rendered.objects if o["kind"] != "Secret"]


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return a | {
        k: _merged(a[k], v) if isinstance(v, dict) and isinstance(a.get(k), dict) else v for k, v in b.items()
    }


def test_the_notes_say_where_it_is_how_to_test_it_and_what_is_missing(
    renderings: dict[str, Rendered],
) -> None:
    notes = renderings["minimal"].notes
    assert f"helm test {RELEASE} --namespace {NAMESPACE}" in notes
    assert f"http://caketin-api.{NAMESPACE}.svc:7411" in notes
    assert "no TLS" in notes
    assert "no TLS" not in renderings["production"].notes
    assert "networkPolicy.nodeCIDRs is empty" in renderings["agent.enabled = true"].notes
    assert "networkPolicy.nodeCIDRs is empty" not in renderings["rdma"].notes
    on_the_node = render({"store": {"protocol": "rdma"}}).notes
    assert "storage nodes are on the node's network and networkPolicy.nodeCIDRs is empty" in on_the_node
    assert "backend-protocol: HTTPS" in renderings["production"].notes
    assert "backend-protocol" not in renderings["tls"].notes


def test_extra_values_of_every_part_reach_its_pod() -> None:
    extra = {
        "extraEnv": [{"name": "EXTRA", "value": "here"}],
        "extraEnvFrom": [{"secretRef": {"name": "more"}}],
        "nodeSelector": {"pool": "here"},
        "tolerations": [{"key": "here", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"note": "here"},
        "podLabels": {"label": "here"},
        "annotations": {"above": "here"},
        "priorityClassName": "here",
    }
    rendered = render(
        {
            "image": {"pullSecrets": [{"name": "here"}]},
            "api": extra,
            "agent": extra | {"enabled": True},
            "redis": {"bundled": extra},
            "mooncake": {"master": extra, "storage": extra},
        }
    )
    controllers = [o for o in rendered.objects if "template" in o.get("spec", {})]
    assert len(controllers) == 5
    for o in controllers:
        pod, where = o["spec"]["template"], o["metadata"]["name"]
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert {"name": "EXTRA", "value": "here"} in container["env"], where
        assert container["envFrom"] == extra["extraEnvFrom"], where
        assert spec["nodeSelector"] == extra["nodeSelector"], where
        assert spec["tolerations"] == extra["tolerations"], where
        assert spec["affinity"] == extra["affinity"], where
        assert spec["priorityClassName"] == "here", where
        assert spec["imagePullSecrets"] == [{"name": "here"}], where
        assert pod["metadata"]["annotations"]["note"] == "here", where
        assert pod["metadata"]["labels"]["label"] == "here", where
        assert o["metadata"]["annotations"]["above"] == "here", where
