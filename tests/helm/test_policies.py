"""What no rendering may do, whatever the values: privileges, versions nobody can name, no probes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.chart import CASES, RDMA, Rendered, matrix, render

pytestmark = [pytest.mark.helm, pytest.mark.timeout(300)]

MATRIX = matrix()
MAY_LOCK_MEMORY = {"agent", "storage", "doctor", "replay"}
"""Containers that may be root and hold IPC_LOCK, and nothing else; over TCP only the agent."""
ON_THE_NODE = {"DaemonSet/caketin-agent": {"/run/caketin", "/dev/shm/caketin"}}
"""Pods with folders of the node."""


def locking(case: str) -> set[str]:
    """Containers that lock memory there."""
    rdma = MATRIX[case].get("store", {}).get("protocol") == "rdma"
    return MAY_LOCK_MEMORY if rdma else {"agent"}


@pytest.fixture(scope="module")
def renderings() -> dict[str, Rendered]:
    return {name: render(values) for name, values in MATRIX.items()}


def test_nothing_is_privileged_and_nobody_gains_privileges_smoke(renderings: dict[str, Rendered]) -> None:
    for case, rendered in renderings.items():
        for where, c in rendered.containers().items():
            security = c["securityContext"]
            assert not security.get("privileged"), f"{case}: {where}"
            assert security["allowPrivilegeEscalation"] is False, f"{case}: {where}"
            assert security["readOnlyRootFilesystem"] is True, f"{case}: {where}"
            assert security["capabilities"]["drop"] == ["ALL"], f"{case}: {where}"
            added = security["capabilities"].get("add", [])
            allowed = ["IPC_LOCK"] if c["name"] in locking(case) else []
            assert added in ([], allowed), f"{case}: {where} adds {added}"


def test_only_what_locks_memory_runs_as_root(renderings: dict[str, Rendered]) -> None:
    for case, rendered in renderings.items():
        for where, spec in rendered.pods().items():
            security = spec["securityContext"]
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            if security["runAsUser"] == 0:
                assert {c["name"] for c in spec["containers"]} <= locking(case), f"{case}: {where}"
            else:
                assert security["runAsNonRoot"] is True, f"{case}: {where}"
    over_tcp = renderings["minimal"].pods()["StatefulSet/caketin-mooncake-storage"]
    assert over_tcp["securityContext"]["runAsUser"] != 0


def test_the_nodes_namespaces_and_folders_are_left_alone(renderings: dict[str, Rendered]) -> None:
    for case, rendered in renderings.items():
        for where, spec in rendered.pods().items():
            assert not spec.get("hostPID"), where
            assert not spec.get("hostIPC"), where
            folders = {v["hostPath"]["path"] for v in spec.get("volumes", []) if "hostPath" in v}
            assert folders <= ON_THE_NODE.get(where, set()), f"{case}: {where}"
            if spec.get("hostNetwork"):
                assert {c["name"] for c in spec["containers"]} <= locking(case), f"{case}: {where}"
                assert spec["dnsPolicy"] == "ClusterFirstWithHostNet", f"{case}: {where}"


def test_no_pod_can_call_kubernetes(renderings: dict[str, Rendered]) -> None:
    for rendered in renderings.values():
        assert all(spec["automountServiceAccountToken"] is False for spec in rendered.pods().values())
        kinds = {o["kind"] for o in rendered.objects}
        assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}


def test_kubernetes_sets_no_variables_of_services(renderings: dict[str, Rendered]) -> None:
    # A Service named caketin would set CAKETIN_PORT=tcp://10.0.0.1:7411, which is no port.
    for rendered in renderings.values():
        assert all(spec["enableServiceLinks"] is False for spec in rendered.pods().values())


def test_every_image_has_a_version(renderings: dict[str, Rendered]) -> None:
    for case, rendered in renderings.items():
        for where, c in rendered.containers().items():
            image = c["image"]
            name, _, version = image.rpartition("@") if "@" in image else image.rpartition(":")
            assert name, f"{case}: {where}: {image}"
            assert version not in {"", "latest"}, f"{case}: {where}: {image}"
            if version.startswith("sha256:"):
                assert len(version) == 71


def test_every_container_has_bounds_and_every_server_has_three_probes(
    renderings: dict[str, Rendered],
) -> None:
    for case, rendered in renderings.items():
        for where, c in rendered.containers().items():
            resources = c["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]), f"{case}: {where}"
            assert "memory" in resources["limits"], f"{case}: {where}"
            if not where.startswith("Pod/"):
                probes = {"startupProbe", "livenessProbe", "readinessProbe"}
                assert probes <= set(c), f"{case}: {where}"


def test_liveness_never_depends_on_another_part(renderings: dict[str, Rendered]) -> None:
    # A Redis that is away must not make Kubernetes restart every control plane.
    for rendered in renderings.values():
        for c in rendered.containers().values():
            assert "readyz" not in repr(c.get("livenessProbe"))


def test_secrets_are_readable_for_their_pod_only(renderings: dict[str, Rendered]) -> None:
    for case, rendered in renderings.items():
        for where, spec in rendered.pods().items():
            for volume in spec.get("volumes", []):
                if "secret" in volume and volume["name"] != "ca":
                    mode = volume["secret"]["defaultMode"]
                    assert mode in {0o440, 0o400}, f"{case}: {where}: {volume['name']}"
                    if mode == 0o440:
                        assert spec["securityContext"]["fsGroup"], f"{case}: {where}"


# The arrows of docs/architecture.md as (from, to): an engine or the agent calls the API and the store, the
# API calls Redis (and for a purge the store's master), storage nodes join their master.
ARROWS = {
    ("client", "api"), ("client", "mooncake-master"), ("client", "mooncake-storage"),
    ("test", "api"), ("test", "mooncake-master"), ("test", "mooncake-storage"), ("test", "redis"),
    ("agent", "api"), ("agent", "mooncake-master"), ("agent", "mooncake-storage"),
    ("api", "redis"), ("api", "mooncake-master"), ("mooncake-storage", "mooncake-master"),
}  # fmt: skip
COMPONENT = "app.kubernetes.io/component"


def arrows(rendered: Rendered) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """What the policies let in and what they let out, among the chart's own parts and its clients."""

    def peers(rules: list[dict[str, Any]], side: str) -> set[str]:
        found = set()
        for peer in [p for rule in rules for p in rule.get(side, [])]:
            labels = peer.get("podSelector", {}).get("matchLabels", {})
            if COMPONENT in labels:
                found.add(labels[COMPONENT])
            elif "caketin/client" in labels:
                found.add("client")
        return found

    let_in, let_out = set(), set()
    for policy in rendered.of("NetworkPolicy"):
        spec = policy["spec"]
        own = spec["podSelector"]["matchLabels"][COMPONENT]
        let_in |= {(peer, own) for peer in peers(spec["ingress"], "from")}
        let_out |= {(own, peer) for peer in peers(spec["egress"], "to")}
    return let_in, let_out


def test_the_network_allows_exactly_the_arrows_of_the_architecture() -> None:
    let_in, let_out = arrows(render(CASES["agent over tcp"]))
    assert let_in == ARROWS
    # Clients and the test pod have no policy of their own.
    assert let_out == {(a, b) for a, b in ARROWS if a not in {"client", "test"}}


def test_every_part_with_a_network_of_its_own_has_a_policy_for_both_ways() -> None:
    rendered = render(CASES["agent over tcp"])
    own = {p["spec"]["podSelector"]["matchLabels"][COMPONENT] for p in rendered.of("NetworkPolicy")}
    assert own == {"api", "redis", "mooncake-master", "mooncake-storage", "agent"}
    for policy in rendered.of("NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        for rule in policy["spec"]["ingress"]:
            assert rule["from"], "a rule that lets everybody in"
            assert rule["ports"], "a rule that opens every port"


def test_what_is_not_scraped_and_not_routed_opens_no_door() -> None:
    def doors(values: dict[str, Any]) -> str:
        return repr(render(values).one("NetworkPolicy", "caketin-api")["spec"]["ingress"])

    assert "monitoring" not in doors({})
    assert "ingress-nginx" not in doors({})
    assert "monitoring" in doors({"monitoring": {"serviceMonitor": {"enabled": True}}})
    assert "ingress-nginx" in doors({"api": {"ingress": {"enabled": True}}})


def test_nodes_are_let_in_only_where_they_are_named() -> None:
    assert "ipBlock" not in repr(render(CASES["agent over tcp"]).of("NetworkPolicy"))
    assert "10.0.0.0/16" in repr(render(RDMA).one("NetworkPolicy", "caketin-mooncake-storage"))


def test_an_external_redis_is_reached_where_the_values_say() -> None:
    def out(**policy: Any) -> list[dict[str, Any]]:
        values = CASES["redis by url"] | {"networkPolicy": policy}
        return list(render(values).one("NetworkPolicy", "caketin-api")["spec"]["egress"])

    assert {} in out()
    named = out(externalRedisCIDRs=["10.2.0.0/24"])
    assert {} not in named
    assert {"to": [{"ipBlock": {"cidr": "10.2.0.0/24"}}]} in named
