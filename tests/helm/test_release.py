"""The life of a release with the real Helm, on a server that keeps objects: install, upgrade, removal."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helm.chart import CASES, CHART, NAMESPACE, render
from tests.helm.kube_api import KubeApi

pytestmark = [pytest.mark.helm, pytest.mark.timeout(300)]


class Cluster:
    """A server, and Helm with its records in memory."""

    def __init__(self, api: KubeApi, helm: Any) -> None:
        self.api = api
        self._helm = helm

    def install(self, values: dict[str, Any]) -> str:
        done = self._helm.install(str(CHART), "caketin", values, wait="hookOnly", timeout=60)
        return str(done["status"])

    def upgrade(self, values: dict[str, Any]) -> str:
        done = self._helm.upgrade(str(CHART), "caketin", values, wait="hookOnly", timeout=60)
        return str(done["status"])

    def roll_back(self, revision: int) -> None:
        self._helm.rollback("caketin", version=revision, wait="hookOnly", timeout=60)

    def remove(self) -> None:
        self._helm.uninstall("caketin")

    def secrets(self) -> dict[str, dict[str, str]]:
        return {
            name: {k: base64.b64decode(v).decode() for k, v in o["data"].items()}
            for name, o in self.api.of("Secret").items()
        }


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    import helm_python

    with (
        KubeApi() as api,
        helm_python.Config(
            kubeconfig_content=api.kubeconfig, namespace=NAMESPACE, storage_driver="memory"
        ) as helm,
    ):
        yield Cluster(api, helm)


def test_an_install_makes_exactly_what_the_chart_renders_smoke(cluster: Cluster) -> None:
    assert cluster.install({}) == "deployed"
    made = {(o["kind"], o["metadata"]["name"]) for o in cluster.api.objects.values()}
    rendered = {(o["kind"], o["metadata"]["name"]) for o in render({}).objects}
    assert made == rendered - {("Pod", "caketin-test")}


def test_an_upgrade_keeps_every_token_and_the_password_smoke(cluster: Cluster) -> None:
    cluster.install({})
    before = cluster.secrets()
    assert set(before) == {
        *("caketin-tokens", "caketin-redis"),
        *(f"caketin-{who}-token" for who in ("engine", "operator", "scraper")),
    }
    cluster.upgrade({"api": {"replicas": 5}})
    assert cluster.secrets() == before
    assert cluster.api.of("Deployment")["caketin-api"]["spec"]["replicas"] == 5
    cluster.roll_back(1)
    assert cluster.secrets() == before
    assert cluster.api.of("Deployment")["caketin-api"]["spec"]["replicas"] == 2


def test_more_tokens_may_come_later_and_the_first_ones_stay(cluster: Cluster) -> None:
    cluster.install({})
    before = cluster.secrets()
    cluster.upgrade(CASES["more tokens"])
    after = cluster.secrets()
    digest = hashlib.sha256(before["caketin-engine-token"]["token"].encode()).hexdigest()
    assert digest in after["caketin-tokens"]["tokens.toml"]
    assert 'id = "router"' in after["caketin-tokens"]["tokens.toml"]


def test_tokens_of_ones_own_take_the_place_of_those_that_were_made(cluster: Cluster) -> None:
    cluster.install({})
    own = {"existingSecret": "mine", "engineTokenSecret": "engine", "scraperTokenSecret": "scraper"}
    cluster.upgrade({"auth": own})
    assert set(cluster.secrets()) == {"caketin-redis"}


def test_removal_leaves_nothing_of_the_release(cluster: Cluster) -> None:
    cluster.install({})
    cluster.remove()
    assert cluster.api.objects == {}


def test_a_wrong_value_changes_nothing(cluster: Cluster) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError, match="replicas"):
        cluster.install({"api": {"replicas": "many"}})
    assert cluster.api.objects == {}
    cluster.install({})
    before = dict(cluster.api.objects)
    with pytest.raises(helm_python.HelmError, match="tag latest"):
        cluster.upgrade({"api": {"image": {"tag": "latest"}}})
    assert cluster.api.objects == before


@pytest.mark.parametrize("case", ["production", "rdma", "existing mooncake", "redis by parts"])
def test_every_way_to_run_it_installs(cluster: Cluster, case: str) -> None:
    values = CASES[case]
    if case == "production":
        # The Prometheus operator's kinds are not on this server.
        values = values | {"monitoring": {"dashboards": {"enabled": True}}}
    assert cluster.install(values) == "deployed"
